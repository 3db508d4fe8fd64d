// Enough stack for calls and for the library's threads. Threads may have the smallest stack that
// POSIX allows (16 KiB), and applications call from fibers. A call needs more, for messages,
// exceptions, codecs and CUDA's driver.
//
// - Code runs in place if there is enough stack, otherwise on a stack of the library.
// - It stays on its thread: identity, thread-local storage and signal mask are the same.
// - Stacks of the library are taken without a lock, so that fork() or a signal may come at any
//   point.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

namespace vmem::core {

// A call with this much stack left runs in place. It is several times the largest need seen;
// threads_test checks the calls against it.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr size_t kStackForCalls = size_t{512} << 10;
#else
inline constexpr size_t kStackForCalls = size_t{128} << 10;
#endif

// Returns the bytes left of this thread's stack; 0 on a stack that is not the thread's own, such as
// a fiber's.
size_t stack_left() noexcept;

// Calls run(argument) on a stack of the library. Returns false without memory for one; nothing was
// run.
bool on_own_stack(void (*run)(void*), void* argument) noexcept;

// Runs `body`, which must not throw, with at least kStackForCalls of stack. Returns false without
// memory; nothing was run.
template <typename Body>
bool with_stack(Body&& body) noexcept {
  if (stack_left() < kStackForCalls) {
    using Plain = std::remove_reference_t<Body>;
    return on_own_stack([](void* b) { (*static_cast<Plain*>(b))(); }, std::addressof(body));
  }
  body();
  return true;
}

}  // namespace vmem::core
