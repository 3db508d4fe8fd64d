// Memory to write a block from a copy when no frame is free. A block cannot be written from its
// place if the program has revoked the right to read a page of it. Without this buffer a budget
// full of such blocks would stay full. It serves one block at a time, beyond host_budget. Others
// wait.
//
// - A transition has the buffer from take() or pass() until it calls pass(). In that time it is in
//   no list.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <utility>

#include "pager/block/transition.h"

namespace vmem::pager {

class EmergencyBuffer {
 public:
  EmergencyBuffer() = default;
  ~EmergencyBuffer() { drop(); }
  EmergencyBuffer(const EmergencyBuffer&) = delete;
  EmergencyBuffer& operator=(const EmergencyBuffer&) = delete;

  // Returns false if another transition has the buffer; then `m` waits for it.
  bool take(Transition* m) VMEM_LOCKED {
    if (std::exchange(taken_, true)) {
      waiting_.push_back(m);
      return false;
    }
    return true;
  }
  // For the transition that has the buffer. Returns null if the kernel has no memory.
  std::byte* memory(size_t size) {
    if (size == size_) return at_;
    drop();
    void* const at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    // Like frames: neither in core dumps nor in children.
    madvise(at, size, MADV_DONTDUMP);
    madvise(at, size, MADV_DONTFORK);
    at_ = static_cast<std::byte*>(at);
    size_ = size;
    return at_;
  }
  // Removes and returns the waiting transitions for which `which` returns true.
  template <typename Which>
  TransitionList give_up(const Which& which) VMEM_LOCKED {
    TransitionList all, out;
    all.append(waiting_);
    while (!all.empty()) {
      Transition* const m = all.pop();
      (which(*m) ? out : waiting_).push_back(m);
    }
    return out;
  }
  // The transition that has the buffer no longer needs it. Returns the one that has it now. Returns
  // null if none waits; then the memory is given back.
  Transition* pass(core::BigMutex& mutex) VMEM_UNLOCKED {
    for (;;) {
      {
        const core::BigLock lock(mutex);
        if (!waiting_.empty()) return waiting_.pop();
        if (size_ == 0) {
          taken_ = false;
          return nullptr;
        }
      }
      drop();
    }
  }
  bool idle() const VMEM_LOCKED { return !taken_; }

 private:
  void drop() {
    if (size_ != 0) munmap(at_, size_);
    at_ = nullptr;
    size_ = 0;
  }

  bool taken_ VMEM_GUARDED_BY(core::big_lock) = false;
  TransitionList waiting_ VMEM_GUARDED_BY(core::big_lock);
  // For the transition that has the buffer.
  std::byte* at_ = nullptr;
  size_t size_ = 0;
};

}  // namespace vmem::pager
