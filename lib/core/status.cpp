#include "core/status.h"

#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>

#include "core/text.h"

namespace vmem::core {

namespace {

template <typename String>
String vformat(const char* format, va_list args) {
  char small[256];
  va_list again;
  va_copy(again, args);
  const int n = vsnprintf(small, sizeof small, format, args);
  String out;
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

constexpr std::string_view kNoMemory = "out of memory";  // short enough for a string to hold without memory

}  // namespace

// Never throws: without memory, the code is right but the message is kNoMemory.
Status::Status(int err, std::string_view text) {
  const int code = -std::abs(err == 0 ? EINVAL : err);
  try {
    const auto rep = std::allocate_shared<Rep>(Own<Rep>(), Rep{code, OwnString(text)});
    rep->text.resize(make_printable(rep->text.data(), rep->text.size()));  // it may contain paths and names
    rep_ = rep;
  } catch (const std::bad_alloc&) {
    static constexpr size_t kCodes = 256;
    alignas(Rep) static constinit std::array<std::byte, kCodes * sizeof(Rep)> storage{};
    // Messages that need no memory; never destroyed.
    static const Rep* const without_memory = [] {
      for (size_t i = 0; i < kCodes; ++i)
        new (&storage[i * sizeof(Rep)]) Rep{-static_cast<int>(i), OwnString(kNoMemory)};
      return std::launder(reinterpret_cast<const Rep*>(storage.data()));
    }();
    // Owns nothing, so it needs no memory.
    rep_ = std::shared_ptr<const Rep>(std::shared_ptr<void>(),
                                      &without_memory[static_cast<size_t>(-code) < kCodes ? -code : EIO]);
  }
}

Status error(int err, const char* format, ...) {
  va_list args;
  va_start(args, format);
  OwnString text;
  try {
    text = vformat<OwnString>(format, args);
  } catch (const std::bad_alloc&) {
    text = kNoMemory;
  }
  va_end(args);
  return Status(err, text);
}

Status system_error(int err, const char* format, ...) {
  va_list args;
  va_start(args, format);
  OwnString text;
  try {
    text = vformat<OwnString>(format, args);
    const int e = std::abs(err);
    const char* const words = strerrordesc_np(e);  // untranslated: a locale's catalogue would be read here
    text += textf(": %s (errno %d)", words != nullptr ? words : "unknown error", e);
  } catch (const std::bad_alloc&) {
    text = kNoMemory;
  }
  va_end(args);
  return Status(err, text);
}

std::string strprintf(const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::string out = vformat<std::string>(format, args);
  va_end(args);
  return out;
}

OwnString textf(const char* format, ...) {
  va_list args;
  va_start(args, format);
  OwnString out = vformat<OwnString>(format, args);
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
