#include "core/process/fork.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <new>

#include "core/process/descriptor.h"
#include "core/types.h"

namespace vmem::core {

namespace {

// Never freed, and changed without a lock: fork() may come at any point of a change.
struct Notes {
  std::atomic<int> fds[64] = {};  // descriptor + 1; 0: free
  std::atomic<Notes*> next{nullptr};
};
constinit Notes notes;
constinit std::atomic<bool> registered{false}, marked{false}, forked{false};

// 0 in a child. `mark` is in a page that the kernel empties in every child, however made, if it can
// do that.
constinit std::atomic<uint32_t> of_handlers{1};
constinit std::atomic<const std::atomic<uint32_t>*> mark{&of_handlers};

// Runs in the child, where only async-signal-safe calls are allowed.
void close_all() {
  for (Notes* at = &notes; at != nullptr; at = at->next.load()) {
    for (auto& slot : at->fds) {
      if (const int fd = slot.exchange(0) - 1; fd >= 0) close(fd);
    }
  }
}

bool note_in(Notes& at, int fd) {
  for (auto& slot : at.fds) {
    int free = 0;
    if (slot.compare_exchange_strong(free, fd + 1)) return true;
  }
  return false;
}

// Without memory, or before Linux 4.14, children of raw system calls look like their parent.
const std::atomic<uint32_t>* make_mark() {
  void* const page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return &of_handlers;
  if (madvise(page, kPage, MADV_WIPEONFORK) == 0) return new (page) std::atomic<uint32_t>(1);
  munmap(page, kPage);
  return &of_handlers;
}

}  // namespace

void close_in_children(int fd) {
  if (!registered.exchange(true)) pthread_atfork(nullptr, nullptr, close_all);
  for (Notes* at = &notes; !note_in(*at, fd);) {
    Notes* next = at->next.load();
    if (next == nullptr) {
      Notes* const made = new (std::nothrow) Notes;
      if (made == nullptr) return;
      if (at->next.compare_exchange_strong(next, made)) {
        next = made;
      } else {
        delete made;  // another thread was first
      }
    }
    at = next;
  }
}

int keep_from_children(int fd) {
  fd = above_standard(fd);
  if (fd >= 0) close_in_children(fd);
  return fd;
}

void forget_in_children(int fd) {
  for (Notes* at = &notes; at != nullptr; at = at->next.load()) {
    for (auto& slot : at->fds) {
      int mine = fd + 1;
      if (slot.compare_exchange_strong(mine, 0)) return;
    }
  }
}

void mark_this_process() {
  of_handlers.store(1);
  mark.store(make_mark());
  if (marked.exchange(true)) return;
  pthread_atfork(nullptr, nullptr, [] {
    of_handlers.store(0);
    forked.store(true);
  });
}

bool has_parents_state() {
  return forked.load(std::memory_order_relaxed);
}

bool in_child() {
  return of_handlers.load(std::memory_order_relaxed) == 0 ||
         mark.load(std::memory_order_relaxed)->load(std::memory_order_relaxed) == 0;
}

void close_and_forget(int fd) {
  if (fd < 0) return;
  forget_in_children(fd);
  close(fd);
}

}  // namespace vmem::core
