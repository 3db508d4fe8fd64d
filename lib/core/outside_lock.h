// Marks calls that must not be made under the pager's lock (core/big_lock.h): must_be_outside()
// stands before each of them.
#pragma once

namespace vmem::core {

// Big locks that this thread holds.
inline constinit thread_local int big_locks_held = 0;

// Reports a call that must not happen under a big lock: aborts with a message (on), or logs it once
// (off, as in production). Tests and simulated devices switch it on.
void be_strict_about_big_locks(bool on);
void called_under_big_lock(const char* call);

inline void must_be_outside(const char* call) {
  if (big_locks_held != 0) [[unlikely]]
    called_under_big_lock(call);
}

}  // namespace vmem::core
