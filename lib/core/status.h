// Errors with words. Every fallible function inside libvmem returns a Status; the C boundary turns it into a negative
// errno and keeps the words for vmem_last_error().
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/os_allocator.h"

namespace vmem::core {

// Value type; cheap when ok (one null pointer). Safe to hand from thread to thread, and to make and drop under any
// lock.
class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  Status(int err, std::string_view text);

  bool ok() const { return rep_ == nullptr; }
  // 0 or a negative errno.
  int code() const { return rep_ ? rep_->code : 0; }
  // Empty when ok. Says what was wrong, with the numbers, and what to do. Safe to print (core/text.h).
  std::string_view text() const { return rep_ ? std::string_view(rep_->text) : std::string_view(); }
  // Deliberately drops an error; use only where a comment says why nothing is lost.
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
// The same with ": <strerror> (errno N)" appended.
Status system_error(int err, const char* format, ...) __attribute__((format(printf, 2, 3)));

std::string strprintf(const char* format, ...) __attribute__((format(printf, 1, 2)));
// The same for whoever may hold the pager's lock.
OwnString textf(const char* format, ...) __attribute__((format(printf, 1, 2)));
// "8 GiB", "1.5 MiB", "37 bytes": for messages. So short that a string holds them itself.
std::string human_bytes(uint64_t bytes);

}  // namespace vmem::core
