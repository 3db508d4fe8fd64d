// Errors with messages. Every fallible function inside libvmem returns a Status. The C boundary
// turns it into a negative errno and keeps the message for vmem_last_error().
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/os_allocator.h"

namespace vmem::core {

// Value type; ok is one null pointer. May be passed between threads, and made and dropped under any
// lock.
class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  Status(int err, std::string_view text);

  bool ok() const { return rep_ == nullptr; }
  // 0 or a negative errno.
  int code() const { return rep_ ? rep_->code : 0; }
  // Empty if ok. Says what was wrong, with numbers, and what to do. Safe to print (core/text.h).
  std::string_view text() const { return rep_ ? std::string_view(rep_->text) : std::string_view(); }
  // Drops an error on purpose. Use only where a comment says why nothing is lost.
  void ignore() const {}

 private:
  struct Rep {
    int code;
    OwnString text;
  };
  std::shared_ptr<const Rep> rep_;
};

// err: a positive or negative errno. The format is printf's.
Status error(int err, const char* format, ...) __attribute__((format(printf, 2, 3)));
// Same with ": <strerror> (errno N)" appended.
Status system_error(int err, const char* format, ...) __attribute__((format(printf, 2, 3)));

std::string strprintf(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Same, for callers that may hold the pager's lock.
OwnString textf(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Returns "8 GiB", "1.5 MiB" or "37 bytes", for messages. Short enough for a string to hold without
// memory.
std::string human_bytes(uint64_t bytes);

}  // namespace vmem::core
