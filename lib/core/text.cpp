#include "core/text.h"

#include <cstdint>
#include <cstring>

namespace vmem::core {

namespace {

struct Sequence {
  size_t length = 0;  // 0: broken
  uint32_t code = 0;
};

Sequence decode(std::string_view text, size_t at) {
  const auto first = static_cast<unsigned char>(text[at]);
  if (first < 0x80) return {1, first};
  const size_t length = first >= 0xc2 && first < 0xe0   ? 2
                        : first >= 0xe0 && first < 0xf0 ? 3
                        : first >= 0xf0 && first < 0xf5 ? 4
                                                        : 0;
  if (length == 0 || text.size() - at < length) return {};
  uint32_t code = first & (0xffu >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    const auto c = static_cast<unsigned char>(text[at + i]);
    if ((c & 0xc0) != 0x80) return {};
    code = code << 6 | (c & 0x3f);
  }
  // Rejects overlong forms, surrogates and codes beyond the last character.
  if ((length == 3 && code < 0x800) || (length == 4 && code < 0x10000) || (code >= 0xd800 && code < 0xe000) ||
      code > 0x10ffff)
    return {};
  return {length, code};
}

bool harmless(uint32_t c) {
  struct Range {
    uint32_t first, last;
  };
  // Zero-width joiner and non-joiner (200c, 200d) are kept: scripts need them, and they move
  // nothing.
  static constexpr Range kRanges[] = {{0x00, 0x1f},       {0x7f, 0x9f},      {0xad, 0xad},     {0x61c, 0x61c},
                                      {0x180e, 0x180e},   {0x200b, 0x200b},  {0x200e, 0x200f}, {0x2028, 0x202e},
                                      {0x2060, 0x206f},   {0xfeff, 0xfeff},  {0xfff9, 0xfffb}, {0xfffe, 0xffff},
                                      {0x1d173, 0x1d17a}, {0xe0000, 0xe0fff}};
  for (const Range& r : kRanges) {
    if (c >= r.first && c <= r.last) return false;
  }
  return true;
}

}  // namespace

size_t printable_sequence(std::string_view text, size_t at) {
  if (at >= text.size()) return 0;
  const Sequence s = decode(text, at);
  return s.length != 0 && harmless(s.code) ? s.length : 0;
}

size_t make_printable(char* text, size_t length) {
  const std::string_view all(text, length);
  size_t to = 0;
  for (size_t at = 0; at < length;) {
    const Sequence s = decode(all, at);  // bytes before `at` have been read already
    if (s.length != 0 && harmless(s.code)) {
      memmove(text + to, text + at, s.length);
      to += s.length;
    } else {
      text[to++] = '?';
    }
    at += s.length != 0 ? s.length : 1;
  }
  return to;
}

std::string printable(std::string_view text) {
  std::string out(text);
  out.resize(make_printable(out.data(), out.size()));
  return out;
}

}  // namespace vmem::core
