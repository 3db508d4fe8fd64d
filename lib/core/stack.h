// Stack for calls, and for the library's threads. Threads may have the smallest stack that POSIX allows (16 KiB), and
// applications call from fibers; a call, with messages, exceptions, codecs and CUDA's driver below it, needs more.
//
// - What is to run does that where it is if there is enough stack, and otherwise on a stack of the library's.
// - It stays on its thread: identity, thread-local storage and signal mask are the same.
// - Stacks of the library are taken without a lock, so that a fork() or a signal may come at any point.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

namespace vmem::core {

// A call that finds as much left runs in place: several times what any was seen to need (threads_test holds them to
// it).
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr size_t kStackForCalls = size_t{512} << 10;
#else
inline constexpr size_t kStackForCalls = size_t{128} << 10;
#endif

// Bytes that are left of this thread's stack; 0 on a stack that is not the thread's own, such as a fiber's.
size_t stack_left() noexcept;

// Runs it on a stack of the library's. False: there is no memory for one, and nothing was run.
bool on_own_stack(void (*run)(void*), void* argument) noexcept;

// Runs `body`, which throws nothing, with kStackForCalls of stack at least. False: it could not be had, and nothing was
// run.
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
