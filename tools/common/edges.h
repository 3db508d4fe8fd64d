// Edges of a graph as people have them: an edge list (two vertices a line; # and % begin comments; what follows is left
// out) or Matrix Market's coordinates (from 1; a symmetric matrix has each edge both ways). Read again at each call.
#pragma once

#include <sys/stat.h>

#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

namespace edges {

// The next line, or what there is room for: a file may have one that no memory would hold. False: there is none.
template <size_t N>
bool next_line(FILE* file, char (&line)[N]) {
  size_t n = 0;
  int c;
  while ((c = getc_unlocked(file)) != EOF && c != '\n') {
    if (n + 1 < N) line[n++] = static_cast<char>(c);
  }
  line[n] = '\0';
  return n != 0 || c == '\n';
}

// Calls edge(from, to) for each edge of the file; vertices count from 0.
template <typename Edge>
void read(const std::string& path, Edge edge) {
  struct stat s;
  // Of a device it may be endless.
  if (stat(path.c_str(), &s) == 0 && !S_ISREG(s.st_mode) && !S_ISFIFO(s.st_mode))
    throw std::runtime_error(path + " is no ordinary file");
  const std::unique_ptr<FILE, int (*)(FILE*)> file(fopen(path.c_str(), "re"), fclose);
  if (file == nullptr) throw std::system_error(errno, std::generic_category(), path);
  char line[1 << 10];
  bool market = false, symmetric = false, sized = false;
  for (uint64_t n = 1; next_line(file.get(), line); ++n) {
    const auto wrong = [&](const char* what) {
      return std::runtime_error(path + ", line " + std::to_string(n) + ": " + what);
    };
    if (n == 1 && std::string(line).rfind("%%MatrixMarket", 0) == 0) {
      const std::string header = line;
      market = true;
      if (header.find("coordinate") == std::string::npos) throw wrong("a matrix without coordinates is no graph");
      symmetric = header.find("symmetric") != std::string::npos || header.find("hermitian") != std::string::npos;
      continue;
    }
    const char* at = line;
    while (*at == ' ' || *at == '\t') ++at;
    if (*at == '#' || *at == '%' || *at == '\n' || *at == '\r' || *at == '\0') continue;
    if (market && !sized) {  // rows, columns, entries
      sized = true;
      continue;
    }
    uint64_t ends[2];
    for (uint64_t& end : ends) {
      while (*at == ' ' || *at == '\t' || *at == ',') ++at;
      char* after;
      if (*at < '0' || *at > '9') throw wrong("two numbers of vertices are expected");
      end = strtoull(at, &after, 10);
      at = after;
      if (market && end-- == 0) throw wrong("Matrix Market counts from 1");
      if (end >= UINT32_MAX) throw wrong("vertices have 32 bits here");
    }
    edge(static_cast<uint32_t>(ends[0]), static_cast<uint32_t>(ends[1]));
    if (symmetric && ends[0] != ends[1]) edge(static_cast<uint32_t>(ends[1]), static_cast<uint32_t>(ends[0]));
  }
  if (ferror(file.get())) throw std::system_error(errno, std::generic_category(), path);
}

}  // namespace edges
