#include "core/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <new>

namespace vmem::core {

namespace {

// Never freed, and changed without a lock: fork() may come at any point of it.
struct Notes {
  std::atomic<int> fds[64] = {};  // descriptor + 1; 0: free
  std::atomic<Notes*> next{nullptr};
};
constinit Notes notes;
constinit std::atomic<bool> registered{false};

// In the child, where nothing but async-signal-safe calls are allowed.
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
        delete made;  // another thread's is there
      }
    }
    at = next;
  }
}

int keep_from_children(int fd) {
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

void close_and_forget(int fd) {
  if (fd < 0) return;
  forget_in_children(fd);
  close(fd);
}

}  // namespace vmem::core
