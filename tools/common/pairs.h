// Reads texts with "key, tab, value" in each line. A value may contain tabs; empty lines are
// skipped. Used by the examples.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/input.h"
#include "common/lines.h"

namespace pairs {

// Calls pair(key, value, at) for each line; `at` is the value's offset in the file. longest: the
// longest line in bytes.
template <typename Pair>
void read(const input::File& file, size_t longest, Pair pair) {
  Lines text(file, longest);
  uint64_t at = 0;
  for (std::string whole; text.next(&whole); at += whole.size() + 1) {
    const std::string_view line = without_cr(whole);
    if (line.empty()) continue;
    const size_t tab = line.find('\t');
    if (tab == std::string_view::npos)
      throw input::refused_line(file.path(), text.number(),
                                "\"" + std::string(line.substr(0, 60)) + "\" is not \"key, tab, value\"");
    pair(std::string(line.substr(0, tab)), line.substr(tab + 1), at + tab + 1);
  }
}

}  // namespace pairs
