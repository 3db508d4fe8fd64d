#include "core/stack.h"

#include <pthread.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include "core/break.h"
#include "core/types.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

// Calls run(argument) with the stack pointer at `top`, which is aligned to 16, and returns.
// Debuggers and other unwinders find the caller through the frame pointer.
extern "C" __attribute__((visibility("hidden"))) void vmem_call_on_stack(void* argument, void (*run)(void*), void* top);
#if defined(__x86_64__)
asm(R"(
  .text
  .globl vmem_call_on_stack
  .hidden vmem_call_on_stack
  .type vmem_call_on_stack, @function
vmem_call_on_stack:
  .cfi_startproc
  endbr64
  pushq %rbp
  .cfi_def_cfa_offset 16
  .cfi_offset %rbp, -16
  movq %rsp, %rbp
  .cfi_def_cfa_register %rbp
  movq %rdx, %rsp
  callq *%rsi
  leave
  .cfi_def_cfa %rsp, 8
  ret
  .cfi_endproc
  .size vmem_call_on_stack, . - vmem_call_on_stack
)");
#elif defined(__aarch64__)
asm(R"(
  .text
  .globl vmem_call_on_stack
  .hidden vmem_call_on_stack
  .type vmem_call_on_stack, %function
vmem_call_on_stack:
  .cfi_startproc
  hint #34
  stp x29, x30, [sp, #-16]!
  .cfi_def_cfa_offset 16
  .cfi_offset x29, -16
  .cfi_offset x30, -8
  mov x29, sp
  .cfi_def_cfa_register x29
  mov sp, x2
  blr x1
  mov sp, x29
  .cfi_def_cfa_register sp
  ldp x29, x30, [sp], #16
  .cfi_def_cfa_offset 0
  .cfi_restore x29
  .cfi_restore x30
  ret
  .cfi_endproc
  .size vmem_call_on_stack, . - vmem_call_on_stack
)");
#else
#error "say here how to call a function on another stack"
#endif

namespace vmem::core {

namespace {

struct Bounds {
  uintptr_t low = 0;
  size_t size = 0;  // 0: unknown
  bool looked = false;
};
// Bounds of the stack that this thread runs on: its own, or one of ours.
constinit thread_local Bounds bounds;

constexpr size_t kOwnStack = 4 * kStackForCalls;  // bytes; pages that are never reached take no memory
constexpr size_t kIdle = 16;                      // stacks kept for later calls
constinit std::atomic<std::byte*> idle[kIdle];

// The main thread's stack grows up to its limit. glibc would read /proc/self/maps to find it, so
// use AT_EXECFN: the program's file name lies at its top.
Bounds of_main_thread() noexcept {
  constexpr size_t kUnlimited = size_t{64} << 20;
  const uintptr_t top = getauxval(AT_EXECFN);
  rlimit limit = {};
  if (top == 0 || getrlimit(RLIMIT_STACK, &limit) != 0) return {0, 0, true};
  const size_t size = std::min<size_t>(limit.rlim_cur == RLIM_INFINITY ? kUnlimited : limit.rlim_cur, top);
  return {top - size, size, true};
}

Bounds of_this_thread() noexcept {
  if (gettid() == getpid()) return of_main_thread();
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return {};  // no memory: it looks again
  void* low = nullptr;
  size_t size = 0;
  const int rc = pthread_attr_getstack(&attributes, &low, &size);
  pthread_attr_destroy(&attributes);
  if (rc != 0) return {};
  return {reinterpret_cast<uintptr_t>(low), size, true};
}

std::byte* take() noexcept {
  for (auto& slot : idle) {
    if (slot.load(std::memory_order_relaxed) == nullptr) continue;
    if (std::byte* const stack = slot.exchange(nullptr); stack != nullptr) return stack;
  }
  // The lowest page stays inaccessible: an overflow ends the process and overwrites nothing.
  void* const stack =
      mmap(nullptr, kOwnStack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (stack == MAP_FAILED) return nullptr;
  if (mprotect(static_cast<std::byte*>(stack) + kPage, kOwnStack - kPage, PROT_READ | PROT_WRITE) == 0)
    return static_cast<std::byte*>(stack);
  munmap(stack, kOwnStack);
  return nullptr;
}

void give(std::byte* stack) noexcept {
  for (auto& slot : idle) {
    std::byte* none = nullptr;
    if (slot.compare_exchange_strong(none, stack)) return;
  }
  munmap(stack, kOwnStack);
}

struct Run {
  void (*run)(void*);
  void* argument;
#ifdef __SANITIZE_ADDRESS__
  const void* caller = nullptr;
  size_t caller_size = 0;
#endif
};

void run_here(void* what) {
  auto& run = *static_cast<Run*>(what);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &run.caller, &run.caller_size);
#endif
  run.run(run.argument);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(nullptr, run.caller, run.caller_size);
#endif
}

}  // namespace

size_t stack_left() noexcept {
  if (broken("own_stack")) return SIZE_MAX;
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  Bounds& mine = bounds;
  if (!mine.looked) mine = of_this_thread();
  return here - mine.low < mine.size ? here - mine.low : 0;
}

bool on_own_stack(void (*run)(void*), void* argument) noexcept {
  std::byte* const stack = take();
  if (stack == nullptr) return false;
  std::byte* const low = stack + kPage;
  constexpr size_t kSize = kOwnStack - kPage;
  Run what{run, argument};
  const Bounds before = std::exchange(bounds, {reinterpret_cast<uintptr_t>(low), kSize, true});
#ifdef __SANITIZE_ADDRESS__
  void* frames = nullptr;
  __sanitizer_start_switch_fiber(&frames, low, kSize);
#endif
  vmem_call_on_stack(&what, run_here, low + kSize);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
#endif
  bounds = before;
  give(stack);
  return true;
}

}  // namespace vmem::core
