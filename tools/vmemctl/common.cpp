#include "common.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "core/text.h"

namespace vmemctl {

std::string bytes(double n) {
  static const char* const kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  if (n >= 0x1p63) return "unlimited";
  size_t unit = 0;
  while (n >= 1024 && unit + 1 < std::size(kUnits)) n /= 1024, ++unit;
  char text[32];
  snprintf(text, sizeof text, unit == 0 || n >= 100 || n == std::floor(n) ? "%.0f %s" : "%.1f %s", n, kUnits[unit]);
  return text;
}

std::string bytes_per_second(double n) {
  return bytes(n) + "/s";
}

std::string duration(double seconds) {
  char text[48];
  const auto whole = static_cast<long>(seconds);
  if (seconds < 60) {
    snprintf(text, sizeof text, "%.0f s", seconds);
  } else if (whole < 3600) {
    snprintf(text, sizeof text, "%ld min %ld s", whole / 60, whole % 60);
  } else if (whole < 86400) {
    snprintf(text, sizeof text, "%ld h %ld min", whole / 3600, whole % 3600 / 60);
  } else {
    snprintf(text, sizeof text, "%ld d %ld h", whole / 86400, whole % 86400 / 3600);
  }
  return text;
}

std::string column(const std::string& text, size_t width, bool right) {
  std::string out;
  size_t columns = 0;
  for (size_t at = 0; at < text.size() && columns < width; ++columns) {
    const size_t n = std::max<size_t>(1, vmem::core::printable_sequence(text, at));
    out += text.substr(at, n);
    at += n;
  }
  const std::string pad(width - columns, ' ');
  return right ? pad + out : out + pad;
}

Json& Json::open(char begin, char close) {
  comma();
  out_ += begin;
  closers_ += close;
  first_ = true;
  return *this;
}

Json& Json::end() {
  out_ += closers_.back();
  closers_.pop_back();
  first_ = false;
  return *this;
}

Json& Json::key(std::string_view name) {
  value(name);
  out_ += ':';
  after_key_ = true;
  return *this;
}

Json& Json::value(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : printable(text)) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return raw(quoted + '"');
}

Json& Json::value(double d) {
  if (!std::isfinite(d)) return null();
  char text[32];
  snprintf(text, sizeof text, "%.9g", d);
  return raw(text);
}

Json& Json::raw(std::string_view text) {
  comma();
  out_ += text;
  first_ = false;
  return *this;
}

void Json::comma() {
  if (!first_ && !after_key_) out_ += ',';
  after_key_ = false;
}

}  // namespace vmemctl
