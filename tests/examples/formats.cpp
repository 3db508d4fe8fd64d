// Prints how the examples' readers parse files: an input line is "KIND PATH", an output line
// "refused: WHY" or the contents. formats.py compares them with SciPy and NumPy.
//   edges: the number of vertices, then the edges as the file has them; read both ways
//   npy:   rows, columns, and the bits of the numbers
//   pairs: the last value of each key, in hexadecimal digits
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/edges.h"
#include "common/npy.h"
#include "common/pairs.h"

namespace {

std::string hex(std::string_view bytes) {
  std::string out;
  char two[3];
  for (const char c : bytes) {
    snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(c));
    out += two;
  }
  return out;
}

void show_edges(const std::string& path) {
  const input::File file(path);
  std::vector<std::pair<uint32_t, uint32_t>> seen, again;
  const uint64_t vertices = edges::read(file, [&](uint32_t from, uint32_t to) { seen.emplace_back(from, to); });
  edges::read_plainly(file, [&](uint32_t from, uint32_t to) { again.emplace_back(from, to); });
  printf("%" PRIu64 "%s", vertices, seen == again ? "" : " READERS DIFFER");
  for (const auto& [from, to] : seen) printf(" %u-%u", from, to);
  printf("\n");
}

void show_npy(const std::string& path) {
  const npy::File file(path);
  npy::Plain plain(file.file());
  std::vector<float> row(file.columns);
  size_t wrong = 0;
  std::string bits;
  for (size_t i = 0; i < file.rows; ++i) {
    file.read(i, 0, row.data(), row.size());
    wrong += plain.differences(i * file.columns, row.data(), row.size());
    bits += hex({reinterpret_cast<const char*>(row.data()), row.size() * 4});
  }
  printf("%zu %zu%s %s\n", file.rows, file.columns, wrong == 0 ? "" : " READERS DIFFER", bits.c_str());
}

void show_pairs(const std::string& path) {
  const input::File file(path);
  std::map<std::string, std::string> all;
  pairs::read(file, 1 << 20, [&](const std::string& key, std::string_view value, uint64_t at) {
    std::string there(value.size(), '\0');
    file.read(there.data(), there.size(), at);
    all[key] = there == value ? there : "READERS DIFFER";
  });
  for (const auto& [key, value] : all) printf("%s=%s ", hex(key).c_str(), hex(value).c_str());
  printf("\n");
}

}  // namespace

int main() {
  for (std::string kind, path; std::cin >> kind >> path;) {
    try {
      if (kind == "edges") show_edges(path);
      if (kind == "npy") show_npy(path);
      if (kind == "pairs") show_pairs(path);
    } catch (const input::Refused& e) {
      std::string why = e.what();
      for (char& c : why) c = c == '\n' || c == '\r' ? '?' : c;
      printf("refused: %s\n", why.c_str());
    }
    fflush(stdout);
  }
}
