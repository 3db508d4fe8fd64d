// Reads the edges of a graph from a file. Used by the examples. Two formats are accepted:
//
// - An edge list: two vertices a line, counted from 0, separated by blanks, tabs or one comma. A
//   weight and a time (at most two numbers) or attributes ({..}) may follow and are ignored. # and
//   % begin comments.
// - Matrix Market's coordinate format: vertices count from 1, and there are as many as the matrix
//   has rows. Each entry of a symmetric, skew-symmetric or Hermitian matrix is an edge in both
//   directions. An entry is an edge whatever its value.
//
// Any other input is refused with its line number and the reason.
#pragma once

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <vector>

#include "common/input.h"
#include "common/lines.h"

namespace edges {

inline constexpr size_t kLongestLine = 1 << 20;
inline constexpr uint64_t kMostVertices = UINT32_MAX;

inline std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// Splits a line into words at any of the characters in `between`.
inline void split(std::string_view line, const char* between, std::vector<std::string_view>* words) {
  words->clear();
  for (size_t at = line.find_first_not_of(between); at != std::string_view::npos;
       at = line.find_first_not_of(between, at)) {
    const size_t end = std::min(line.find_first_of(between, at), line.size());
    words->push_back(line.substr(at, end - at));
    at = end;
  }
}

// Returns true if the whole word is a number of type T.
template <typename T>
bool is_number(std::string_view word, T* out) {
  const auto [end, err] = std::from_chars(word.data(), word.data() + word.size(), *out);
  return err == std::errc() && end == word.data() + word.size() && !word.empty();
}

// Like is_number(), but accepts a leading plus sign and a real number of any size.
template <typename T>
bool is_value(std::string_view word) {
  if (word.size() > 1 && word[0] == '+' && word[1] != '-') word.remove_prefix(1);
  T value;
  const auto [end, err] = std::from_chars(word.data(), word.data() + word.size(), value);
  return (err == std::errc() || (std::is_floating_point_v<T> && err == std::errc::result_out_of_range)) &&
         end == word.data() + word.size();
}

// Returns true if a line begins like Matrix Market's first line.
inline bool is_banner(std::string_view line) {
  const size_t at = line.find_first_not_of("% \t");
  return at != std::string_view::npos && line.substr(0, at).find('%') != std::string_view::npos &&
         lower(line.substr(at, 12)) == "matrixmarket";
}

class Market {
 public:
  // Parses the first line. Each parser returns why the line is refused, or "".
  std::string banner(std::string_view line) {
    const std::string text = lower(line);
    split(text, " \t", &words_);
    if (line[0] != '%' || words_[0] != "%%matrixmarket") return "a Matrix Market file begins with %%MatrixMarket";
    if (words_.size() != 5) return "four words are expected after %%MatrixMarket: matrix, format, field, symmetry";
    const std::string_view object = words_[1], format = words_[2], field = words_[3], symmetry = words_[4];
    if (object != "matrix") return "only a matrix is a graph, no " + std::string(object);
    if (format != "coordinate")
      return "only a matrix in coordinate format is a graph, none in format " + std::string(format);
    if (field != "pattern" && field != "real" && field != "integer" && field != "complex")
      return "field " + std::string(field) + " is none of pattern, real, integer and complex";
    if (symmetry != "general" && symmetry != "symmetric" && symmetry != "skew-symmetric" && symmetry != "hermitian")
      return "symmetry " + std::string(symmetry) + " is none of general, symmetric, skew-symmetric and hermitian";
    if (symmetry == "hermitian" && field != "complex") return "only a complex matrix can be hermitian";
    if (symmetry == "skew-symmetric" && field == "pattern") return "a pattern cannot be skew-symmetric";
    mirrored_ = symmetry != "general";
    diagonal_ = symmetry != "skew-symmetric";
    integer_ = field == "integer";
    values_ = field == "pattern" ? 0 : field == "complex" ? 2 : 1;
    return "";
  }
  bool sized() const { return sized_; }
  bool mirrored() const { return mirrored_; }
  uint64_t vertices() const { return vertices_; }
  uint64_t entries() const { return entries_; }
  std::string size(std::string_view line) {
    uint64_t columns = 0;
    split(line, " \t", &words_);
    if (words_.size() != 3 || !is_number(words_[0], &vertices_) || !is_number(words_[1], &columns) ||
        !is_number(words_[2], &entries_))
      return "three numbers are expected: rows, columns, entries";
    if (vertices_ != columns)
      return "a matrix of " + std::to_string(vertices_) + " x " + std::to_string(columns) +
             " is no graph: rows and columns are the same vertices";
    if (vertices_ >= kMostVertices) return "vertices have 32 bits here";
    sized_ = true;
    return "";
  }
  std::string entry(std::string_view line, uint64_t (&ends)[2]) {
    split(line, " \t", &words_);
    if (words_.size() != 2 + values_)
      return std::to_string(2 + values_) + " words are expected, there are " + std::to_string(words_.size());
    for (size_t i = 0; i < 2; ++i) {
      if (!is_number(words_[i], &ends[i])) return "\"" + std::string(words_[i].substr(0, 30)) + "\" is no index";
      if (ends[i] == 0 || ends[i] > vertices_)
        return "index " + std::to_string(ends[i]) + " is not in 1 to " + std::to_string(vertices_);
      --ends[i];
    }
    for (size_t i = 2; i < words_.size(); ++i) {
      if (!(integer_ ? is_value<int64_t>(words_[i]) : is_value<double>(words_[i])))
        return "\"" + std::string(words_[i].substr(0, 30)) + "\" is no value of this matrix";
    }
    if (mirrored_ && ends[0] < ends[1]) return "a symmetric matrix has no entries above its diagonal";
    if (!diagonal_ && ends[0] == ends[1]) return "a skew-symmetric matrix has no entries on its diagonal";
    return "";
  }

 private:
  std::vector<std::string_view> words_;
  bool mirrored_ = false, diagonal_ = true, integer_ = false, sized_ = false;
  size_t values_ = 0;
  uint64_t vertices_ = 0, entries_ = 0;
};

// Parses one line of an edge list. Returns why it is refused, or "".
inline std::string list_line(std::string_view line, uint64_t (&ends)[2]) {
  constexpr const char* kBlanks = " \t";
  const auto skip = [&](const char* what) { line.remove_prefix(std::min(line.find_first_not_of(what), line.size())); };
  for (size_t i = 0; i < 2; ++i) {
    const auto [end, err] = std::from_chars(line.data(), line.data() + line.size(), ends[i]);
    if (end == line.data()) return "two numbers of vertices are expected";
    if (err != std::errc() || ends[i] >= kMostVertices) return "vertices have 32 bits here";
    line.remove_prefix(static_cast<size_t>(end - line.data()));
    if (!line.empty() && std::string_view(" \t,").find(line[0]) == std::string_view::npos)
      return "a vertex is a whole number, and a blank or a comma ends it";
    skip(kBlanks);
    if (line.starts_with(',')) {
      line.remove_prefix(1);
      skip(kBlanks);
    }
  }
  line = line.substr(0, line.find_first_of("#%"));
  if (line.starts_with('{')) return "";
  std::vector<std::string_view> rest;
  split(line, " \t,", &rest);
  if (rest.size() > 2)
    return "more than a weight and a time follow two vertices (a list of neighbours is no list of edges)";
  for (const std::string_view word : rest) {
    if (!is_value<double>(word)) return "\"" + std::string(word.substr(0, 30)) + "\" is no weight";
  }
  return "";
}

// Calls edge(from, to) for each edge of the file; vertices count from 0. Returns the number of
// vertices.
template <typename Edge>
uint64_t read(const input::File& file, Edge edge) {
  Lines lines(file, kLongestLine);
  Market matrix;
  bool market = false;
  uint64_t vertices = 0, entries = 0, ends[2] = {};
  const auto check = [&](const std::string& why) {
    if (!why.empty()) throw input::refused_line(file.path(), lines.number(), why);
  };
  for (std::string whole; lines.next(&whole);) {
    std::string_view line = without_cr(whole);
    if (!market && is_banner(line)) {
      if (lines.number() != 1) check("a line that begins like Matrix Market's first has to be the first");
      check(matrix.banner(line));
      market = true;
      continue;
    }
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
    if (line.empty() || (!matrix.sized() && line[0] == '%') || (!market && line[0] == '#')) continue;
    if (!market) {
      check(list_line(line, ends));
      vertices = std::max(vertices, std::max(ends[0], ends[1]) + 1);
    } else if (!matrix.sized()) {
      check(matrix.size(line));
      continue;
    } else {
      if (line[0] == '%') check("comments are lines before the size");
      if (entries == matrix.entries())
        check("there are more than the " + std::to_string(matrix.entries()) + " entries");
      ++entries;
      check(matrix.entry(line, ends));
    }
    edge(static_cast<uint32_t>(ends[0]), static_cast<uint32_t>(ends[1]));
    if (matrix.mirrored() && ends[0] != ends[1]) edge(static_cast<uint32_t>(ends[1]), static_cast<uint32_t>(ends[0]));
  }
  if (market && !matrix.sized()) check("the file ends before its size");
  if (market && entries != matrix.entries())
    check("the file ends after " + std::to_string(entries) + " of " + std::to_string(matrix.entries()) + " entries");
  file.must_be_unchanged();
  return market ? matrix.vertices() : vertices;
}

// Reads the edges a second way, to check read(): uses the C library's line and number parsing and
// no format rules.
template <typename Edge>
void read_plainly(const input::File& file, Edge edge) {
  const std::unique_ptr<FILE, int (*)(FILE*)> text(fopen(file.again().c_str(), "re"), fclose);
  if (text == nullptr) throw std::system_error(errno, std::generic_category(), file.path());
  const std::unique_ptr<char*, void (*)(char**)> line(new char*(nullptr), [](char** p) { free(*p), delete p; });
  size_t room = 0;
  bool market = false, mirrored = false, sized = false;
  uint64_t read = 0;
  for (bool first = true; read < file.size(); first = false) {
    const ssize_t n = getline(line.get(), &room, text.get());
    if (n <= 0) break;
    read += static_cast<uint64_t>(n);
    const char* const at = *line + strspn(*line, " \t");
    if (first && strncasecmp(at, "%%MatrixMarket", 14) == 0) {
      market = true;
      mirrored = strcasestr(at, "symmetric") != nullptr || strcasestr(at, "hermitian") != nullptr;
    }
    if (strchr("#%\r\n", *at) != nullptr) continue;
    if (market && !sized) {
      sized = true;
      continue;
    }
    char* end;
    const auto from = static_cast<uint32_t>(strtoull(at, &end, 10)) - (market ? 1 : 0);
    const auto to = static_cast<uint32_t>(strtoull(end + strspn(end, " \t,"), nullptr, 10)) - (market ? 1 : 0);
    edge(from, to);
    if (mirrored && from != to) edge(to, from);
  }
  if (ferror(text.get()) != 0) throw std::system_error(EIO, std::generic_category(), file.path());
  file.must_be_unchanged();
}

}  // namespace edges
