// Memory for the copy from which a block is written that cannot be written from its place, because the program has
// taken the right to read a page of it: where no frame is free. One such block at a time, beyond host_budget; others
// wait for their turn. Else a budget full of such blocks would stay full.
//
//   a transition has it from take() or pass() until it calls pass(); it is in no list meanwhile
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

  // Locked. False: another move has it, and this one waits.
  bool take(Transition* m) VMEM_LOCKED {
    if (std::exchange(taken_, true)) {
      waiting_.push_back(m);
      return false;
    }
    return true;
  }
  // Unlocked; for whoever has it. nullptr: the kernel has no memory.
  std::byte* memory(size_t size) {
    if (size == size_) return at_;
    drop();
    void* const at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    // As frames: neither in core dumps nor in children.
    madvise(at, size, MADV_DONTDUMP);
    madvise(at, size, MADV_DONTFORK);
    at_ = static_cast<std::byte*>(at);
    size_ = size;
    return at_;
  }
  // Locked. Those that wait for it, and that `which` says need not: they are out of the list.
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
  // Unlocked; whoever has it needs it no more. Who has it now; nullptr: nobody waits, and its memory is given back.
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
  // Of who has it.
  std::byte* at_ = nullptr;
  size_t size_ = 0;
};

}  // namespace vmem::pager
