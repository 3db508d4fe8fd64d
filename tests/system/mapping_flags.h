// The kernel's information about a process's own mappings.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

namespace systest {

// Returns how many bytes of [address, address + size) are in mappings with this flag (two letters,
// as in smaps).
inline size_t bytes_with_flag(const void* address, size_t size, const std::string& flag) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address), end = begin + size;
  std::ifstream smaps("/proc/self/smaps");
  uintptr_t from = 0, to = 0;
  size_t bytes = 0;
  for (std::string line; std::getline(smaps, line);) {
    // a line that begins with a letter like "A" parses as the first number only
    uintptr_t first = 0, last = 0;
    if (sscanf(line.c_str(), "%lx-%lx ", &first, &last) == 2) from = first, to = last;
    if (line.rfind("VmFlags:", 0) != 0 || (line + " ").find(" " + flag + " ") == std::string::npos) continue;
    if (std::max(from, begin) < std::min(to, end)) bytes += std::min(to, end) - std::max(from, begin);
  }
  return bytes;
}

}  // namespace systest
