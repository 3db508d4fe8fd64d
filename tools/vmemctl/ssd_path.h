// The path of the SSD tier: --path, or the library's own choice.
#pragma once

#include <cstdlib>
#include <string>

namespace vmemctl {

inline std::string ssd_path(const std::string& given) {
  if (!given.empty()) return given;
  for (const char* variable : {"VMEM_SSD_PATH", "TMPDIR"}) {
    const char* value = secure_getenv(variable);
    if (value != nullptr && *value != '\0') return value;
  }
  return "/var/tmp";
}

// Quotes text as one word of a shell.
inline std::string shell_word(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace vmemctl
