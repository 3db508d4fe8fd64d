// The paging protocol between threads of one process: for groups of a simulated device, and for the
// server's end of the ring.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <thread>

#include "vmem/detail/paging_protocol.h"

namespace vmem::paging {

struct HostAtomics {
  template <typename T>
  using Word = T;
  static constexpr bool kWakes = true;

  template <typename T>
  static T load(const T* word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
  }
  template <typename T>
  static T load_acquire(const T* word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
  }
  template <typename T>
  static void store(T* word, T value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
  }
  template <typename T>
  static void store_release(T* word, T value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
  }
  template <typename T>
  static T add(T* word, T value) {
    return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
  }
  template <typename T>
  static T add_release(T* word, T value) {
    return __atomic_fetch_add(word, value, __ATOMIC_RELEASE);
  }
  template <typename T>
  static bool swap_if(T* word, T* found, T wanted) {
    return __atomic_compare_exchange_n(word, found, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
  static void fence() {
#if defined(__SANITIZE_THREAD__) && defined(__x86_64__)
    // ThreadSanitizer does not know fences, and needs none here: these fences create no
    // happens-before that it could miss.
    asm volatile("mfence" ::: "memory");
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
  }
  // A CPU needs none.
  static void fence_aliases() {}
  static uint64_t now() {  // nanoseconds
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }
  static void pause() {
    std::this_thread::yield();
  }
  static void wake(uint32_t* asleep) {
    store(asleep, uint32_t{0});
    syscall(SYS_futex, asleep, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  }
  // Called by the server after RequestQueue::may_sleep(). Returns after wake(), or spuriously.
  static void sleep(uint32_t* asleep) {
    syscall(SYS_futex, asleep, FUTEX_WAIT_PRIVATE, 1, nullptr, nullptr, 0);
  }
};

// Port of a server whose groups are threads: it has the same operations as they have.
template <typename Atomics>
class DirectPort {
 public:
  explicit DirectPort(const Table<Atomics>& table) : table_(table) {}
  void set_state(uint32_t block, uint64_t word) { Atomics::store_release(&table_.state[block], word); }
  void settle() { Atomics::fence(); }
  uint32_t use(uint32_t block) { return Atomics::load_acquire(&table_.use[block]); }
  uint64_t written(uint32_t block) { return Atomics::load(&table_.written[block]); }
  void taken(uint64_t cells) { Atomics::store(&table_.control->ring_taken, cells); }
  void progress() { Atomics::add(&table_.control->progress, uint64_t{1}); }
  void end(Answer why) { Atomics::store_release(&table_.control->ended, static_cast<uint32_t>(why)); }

 private:
  Table<Atomics> table_;
};

}  // namespace vmem::paging
