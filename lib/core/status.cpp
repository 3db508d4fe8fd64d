#include "core/status.h"

#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "core/text.h"

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

// Never throws: where memory is short the code is right and the words are others.
Status::Status(int err, std::string text) {
  text.resize(make_printable(text.data(), text.size()));  // paths and names are in it
  const int code = -std::abs(err == 0 ? EINVAL : err);
  try {
    rep_ = std::make_shared<const Rep>(Rep{code, std::move(text)});
  } catch (const std::bad_alloc&) {
    static constexpr size_t kCodes = 256;
    alignas(Rep) static constinit std::array<std::byte, kCodes * sizeof(Rep)> storage{};
    // Words so short that a string holds them itself; no destructor.
    static const Rep* const without_memory = [] {
      for (size_t i = 0; i < kCodes; ++i) new (&storage[i * sizeof(Rep)]) Rep{-static_cast<int>(i), "out of memory"};
      return std::launder(reinterpret_cast<const Rep*>(storage.data()));
    }();
    // Owns nothing, so it takes no memory.
    rep_ = std::shared_ptr<const Rep>(std::shared_ptr<void>(),
                                      &without_memory[static_cast<size_t>(-code) < kCodes ? -code : EIO]);
  }
}

Status error(int err, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::string text;
  try {
    text = vstrprintf(format, args);
  } catch (const std::bad_alloc&) {
    text = "out of memory";  // short enough to need none
  }
  va_end(args);
  return Status(err, std::move(text));
}

Status system_error(int err, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::string text;
  try {
    text = vstrprintf(format, args);
    char words[128];
    const int e = std::abs(err);
    text += strprintf(": %s (errno %d)", strerror_r(e, words, sizeof words), e);
  } catch (const std::bad_alloc&) {
    text = "out of memory";
  }
  va_end(args);
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
