#include "core/status.h"

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace vmem::core {

namespace {

std::string vstrprintf(const char* format, va_list args) {
  char small[256];
  va_list again;
  va_copy(again, args);
  const int n = vsnprintf(small, sizeof small, format, args);
  std::string out;
  if (n < 0) {
    out = format;
  } else if (static_cast<size_t>(n) < sizeof small) {
    out.assign(small, static_cast<size_t>(n));
  } else {
    out.resize(static_cast<size_t>(n));
    vsnprintf(out.data(), out.size() + 1, format, again);
  }
  va_end(again);
  return out;
}

}  // namespace

Status::Status(int err, std::string text)
    : rep_(std::make_shared<const Rep>(Rep{-std::abs(err == 0 ? EINVAL : err), std::move(text)})) {}

Status error(int err, const char* format, ...) {
  va_list args;
  va_start(args, format);
  Status out(err, vstrprintf(format, args));
  va_end(args);
  return out;
}

Status system_error(int err, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::string text = vstrprintf(format, args);
  va_end(args);
  char words[128];
  const int e = std::abs(err);
  text += strprintf(": %s (errno %d)", strerror_r(e, words, sizeof words), e);
  return Status(err, std::move(text));
}

std::string strprintf(const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::string out = vstrprintf(format, args);
  va_end(args);
  return out;
}

std::string human_bytes(uint64_t bytes) {
  static const char* const kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  const bool whole = value == static_cast<double>(static_cast<uint64_t>(value));
  return strprintf(whole ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
}

}  // namespace vmem::core
