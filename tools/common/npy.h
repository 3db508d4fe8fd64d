// Matrices of 32-bit floats in NumPy's file format (.npy, row-major). Used by the examples.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "common/input.h"

namespace npy {

// Parses a header: a Python dictionary literal with the three keys in any order.
class Header {
 public:
  // longs: numbers may end with L, as Python 2 writes them.
  Header(std::string_view text, bool longs) : text_(text), longs_(longs) {}
  // Returns why the header is refused, or "".
  std::string parse() {
    bool again = false;
    if (!take('{')) return "has a header that is no dictionary";
    while (!take('}')) {
      std::string key;
      if (!string(&key) || !take(':')) return "has a header that is no dictionary";
      bool* const seen = key == "descr" ? &has_type_ : key == "fortran_order" ? &has_order_ : &has_shape_;
      if (seen == &has_shape_ && key != "shape") return "has a header with an unknown key, " + key;
      again = again || *seen;
      *seen = true;
      if (std::string why = seen == &has_type_ ? type() : seen == &has_order_ ? order() : shape(); !why.empty())
        return why;
      if (!take(',') && !is_next('}')) return "has a header that is no dictionary";
    }
    blanks();
    if (at_ != text_.size()) return "has a header with more than a dictionary";
    if (again || !has_type_ || !has_order_ || !has_shape_)
      return "has a header without descr, fortran_order and shape, each once";
    return "";
  }
  uint64_t rows = 0, columns = 0;

 private:
  static constexpr uint64_t kMost = UINT32_MAX;

  void blanks() { at_ = std::min(text_.find_first_not_of(" \t\n", at_), text_.size()); }
  bool is_next(char c) {
    blanks();
    return at_ < text_.size() && text_[at_] == c;
  }
  bool take(char c) {
    if (!is_next(c)) return false;
    ++at_;
    return true;
  }
  // Parses a string without escapes; Python 2 writes a u before it.
  bool string(std::string* out) {
    if (is_next('u')) ++at_;
    if (at_ >= text_.size() || (text_[at_] != '\'' && text_[at_] != '"')) return false;
    const size_t end = text_.find(text_[at_], at_ + 1);
    if (end == std::string_view::npos) return false;
    *out = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return out->find_first_of("\\\n") == std::string::npos;
  }
  std::string type() {
    std::string name;
    if (!string(&name)) return "has a descr that is no text: only float32 ('<f4') is read here";
    // numpy.dtype()'s names for it, on a machine that is little-endian itself
    const std::string_view code = std::string_view(name).substr(name.find_first_not_of("<=|") == 1 ? 1 : 0);
    if (code != "f4" && code != "f" && name != "float32" && name != "single")
      return "has descr '" + name + "': only float32 in little-endian order ('<f4') is read here";
    return "";
  }
  std::string order() {
    blanks();
    const std::string_view rest = text_.substr(at_);
    if (rest.starts_with("True")) return "is written by columns (fortran_order): save numpy.ascontiguousarray() of it";
    if (!rest.starts_with("False")) return "has a fortran_order that is neither True nor False";
    at_ += 5;
    return "";
  }
  bool number(uint64_t* out) {
    blanks();
    const size_t from = at_;
    for (*out = 0; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_)
      *out = std::min<uint64_t>(*out * 10 + static_cast<uint64_t>(text_[at_] - '0'), kMost + 1);
    const bool is = at_ > from && (text_[from] != '0' || at_ == from + 1);  // Python accepts no leading zeros
    if (longs_ && at_ < text_.size() && text_[at_] == 'L') ++at_;
    return is;
  }
  std::string shape() {
    std::vector<uint64_t> sizes;
    if (!take('(')) return "has a shape that is no tuple";
    for (bool comma = true; !take(')'); comma = take(',')) {
      uint64_t size = 0;
      if (!comma || !number(&size)) return "has a shape that is no tuple of numbers";
      sizes.push_back(size);
      if (sizes.size() == 1 && is_next(')')) return "has a shape that is no tuple";
    }
    if (sizes.size() != 2)
      return "has " + std::to_string(sizes.size()) + (sizes.size() == 1 ? " dimension" : " dimensions") +
             ", a matrix has 2";
    if (sizes[0] == 0 || sizes[1] == 0) return "has no numbers: one of its dimensions is 0";
    if (sizes[0] > kMost || sizes[1] > kMost) return "has more rows or columns than 32 bits count";
    rows = sizes[0], columns = sizes[1];
    return "";
  }

  std::string_view text_;
  bool longs_;
  size_t at_ = 0;
  bool has_type_ = false, has_order_ = false, has_shape_ = false;
};

// A file to read. More bytes may follow the numbers (NumPy, too, reads the first of several
// arrays).
class File {
 public:
  explicit File(const std::string& path) : file_(path) {
    unsigned char start[12] = {};
    const bool longer = file_.size() >= sizeof start;
    if (longer) file_.read(start, sizeof start, 0);
    if (!longer || memcmp(start, "\x93NUMPY", 6) != 0) throw refused("is no .npy file");
    if (start[6] < 1 || start[6] > 3 || start[7] != 0)
      throw refused("is a .npy file of version " + std::to_string(start[6]) + "." + std::to_string(start[7]) +
                    ": there are 1.0, 2.0 and 3.0");
    const size_t before = start[6] == 1 ? 10 : 12;
    uint64_t size = start[8] + 256u * start[9];
    if (start[6] != 1) size += 65536u * start[10] + 16777216u * start[11];
    if (size > kMostHeader) throw refused("has a header of " + std::to_string(size) + " bytes, which no matrix needs");
    if (file_.size() < before + size) throw refused("is cut off in its header");
    std::string text(size, ' ');
    file_.read(text.data(), size, before);
    Header header(text, start[6] < 3);
    if (const std::string why = header.parse(); !why.empty()) throw refused(why);
    rows = header.rows, columns = header.columns;
    data_ = before + size;
    // This order of divisions cannot overflow for any shape.
    if ((file_.size() - data_) / 4 / columns < rows)
      throw refused("is cut off: it has " + std::to_string(file_.size() - data_) + " bytes for " +
                    std::to_string(rows) + " x " + std::to_string(columns) + " numbers");
  }
  // Reads `count` elements of a row from a column on into plain memory.
  void read(size_t row, size_t column, float* to, size_t count) const {
    file_.read(to, count * 4, data_ + (row * columns + column) * 4);
  }
  const input::File& file() const { return file_; }

  size_t rows = 0, columns = 0;

 private:
  static constexpr size_t kMostHeader = 10000;  // NumPy's limit, too

  input::Refused refused(const std::string& why) const { return input::Refused(file_.path() + " " + why); }

  input::File file_;
  uint64_t data_ = 0;
};

// Reads the same file a second way, to check File: through a stream, using only the length of the
// header.
class Plain {
 public:
  explicit Plain(const input::File& file) : stream_(file.again(), std::ios::binary) {
    stream_.seekg(6);
    const int version = stream_.get();
    stream_.get();
    uint64_t size = 0;
    for (int shift = 0; shift < (version == 1 ? 16 : 32); shift += 8)
      size |= static_cast<uint64_t>(stream_.get()) << shift;
    data_ = static_cast<uint64_t>(stream_.tellg()) + size;
  }
  // Counts which of `count` elements (row-major, from `first` on) differ bitwise from `those`.
  size_t differences(uint64_t first, const float* those, size_t count) {
    std::vector<float> read(count);
    stream_.seekg(static_cast<std::streamoff>(data_ + first * 4));
    if (!stream_.read(reinterpret_cast<char*>(read.data()), static_cast<std::streamsize>(count * 4))) return count;
    size_t wrong = 0;
    for (size_t i = 0; i < count; ++i) wrong += std::bit_cast<uint32_t>(read[i]) != std::bit_cast<uint32_t>(those[i]);
    return wrong;
  }

 private:
  std::ifstream stream_;
  uint64_t data_ = 0;
};

// Turns an existing file into an .npy file of this shape.
class NewFile {
 public:
  NewFile(const std::string& path, size_t rows, size_t columns)
      : columns_(columns), path_(path), fd_(open(path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), path);
    std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(rows) + ", " +
                         std::to_string(columns) + "), }";
    header.resize((header.size() + 11 + 63) / 64 * 64 - 11, ' ');
    header = std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size() + 1) + '\0' + header + '\n';
    data_ = header.size();
    write_at(header.data(), header.size(), 0);
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile() { close(fd_); }
  // Writes from plain memory.
  void write(size_t row, size_t column, const float* from, size_t count) const {
    write_at(from, count * 4, data_ + (row * columns_ + column) * 4);
  }

 private:
  void write_at(const void* from, size_t size, uint64_t at) const {
    errno = 0;
    if (pwrite(fd_, from, size, static_cast<off_t>(at)) != static_cast<ssize_t>(size))
      throw std::system_error(errno != 0 ? errno : ENOSPC, std::generic_category(), path_);
  }

  size_t columns_;
  std::string path_;
  int fd_;
  uint64_t data_ = 0;
};

}  // namespace npy
