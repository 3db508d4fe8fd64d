#include "core/process/inherited.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstring>
#include <new>

#include "core/break.h"
#include "core/mutex.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace vmem::core {

// A child reads these wherever threads of its parent were at the fork. So `size` is 0 until an
// entry is complete.
struct Addresses {
  std::atomic<uintptr_t> start{0};
  std::atomic<size_t> size{0};
  Addresses* next_free = nullptr;  // under the mutex
};

namespace {

struct Page {
  std::array<Addresses, 170> all;
  Page* next = nullptr;
};
constinit Mutex mutex;  // leaf; writers hold it
constinit Addresses* unused VMEM_GUARDED_BY(mutex) = nullptr;
constinit std::atomic<Page*> mine{nullptr};       // regions of this process
constinit std::atomic<Page*> inherited{nullptr};  // regions of its ancestors; never freed

template <typename Visit>
void each(const Page* page, const Visit& visit) {
  for (; page != nullptr; page = page->next) {
    for (const Addresses& one : page->all) {
      const size_t size = one.size.load(std::memory_order_acquire);
      if (size != 0) visit(one.start.load(std::memory_order_relaxed), size);
    }
  }
}

bool in_inherited(uintptr_t at) {
  bool found = false;
  each(inherited.load(), [&](uintptr_t start, size_t size) { found |= at - start < size; });
  return found;
}

// Prints why. SA_RESETHAND then lets the same access end the program as it would have.
void say_why(int, siginfo_t* info, void*) {
  const bool raised = info->si_code <= 0;
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  if (!raised && in_inherited(at)) {
    char line[] =
        "libvmem: error: access of 0x0000000000000000, in a region of the process that this one was forked from: "
        "regions are not inherited; make one here, or map the file again\n";
    char* digit = strstr(line, "0x") + 17;
    for (uintptr_t rest = at; rest != 0; rest /= 16) *digit-- = "0123456789abcdef"[rest % 16];
    if (write(STDERR_FILENO, line, sizeof line - 1) < 0) return;
  }
  if (raised) raise(SIGSEGV);
}

void handle_accesses() {
  struct sigaction now {};
  if (sigaction(SIGSEGV, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) return;
  struct sigaction why {};
  why.sa_sigaction = say_why;
  why.sa_flags = static_cast<int>(SA_SIGINFO | SA_RESETHAND | SA_ONSTACK);
  sigaction(SIGSEGV, &why, nullptr);
}

// Makes only system calls and accesses plain memory: threads of the parent may have been anywhere.
void after_fork_in_child() VMEM_LOCKS(no_thread_safety_analysis) {
  new (&mutex) Mutex;
  unused = nullptr;
  Page* const pages = mine.exchange(nullptr);
  if (broken("inherited")) return;
  bool any = false;
  each(pages, [&](uintptr_t start, size_t size) {
    any = true;
    void* const wanted = reinterpret_cast<void*>(start);
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void* const at = mmap(wanted, size, PROT_NONE, kFlags, -1, 0);
    if (at != MAP_FAILED && at != wanted) munmap(at, size);  // before Linux 4.17, the address is a hint
  });
  if (pages == nullptr) return;
  Page* last = pages;
  while (last->next != nullptr) last = last->next;
  last->next = inherited.load();
  inherited.store(pages);
  if (any) handle_accesses();
}

Addresses* new_note() VMEM_REQUIRES(mutex) {
  if (unused == nullptr) {
    static constinit std::atomic<bool> prepared{false};
    if (!prepared.exchange(true)) pthread_atfork(nullptr, nullptr, after_fork_in_child);
    Page* const page = new (std::nothrow) Page;
    if (page == nullptr) return nullptr;
    page->next = mine.load();
    for (Addresses& one : page->all) {
      one.next_free = unused;
      unused = &one;
    }
    mine.store(page);
  }
  Addresses* const note = unused;
  unused = note->next_free;
  return note;
}

}  // namespace

void NotedAddresses::set(const void* start, size_t size) {
  const MutexLock lock(mutex);
  // The program may have placed this region over one of its parent's: forget that one.
  for (Page* page = inherited.load(); page != nullptr; page = page->next) {
    for (Addresses& one : page->all) {
      const uintptr_t from = one.start.load(), at = reinterpret_cast<uintptr_t>(start);
      if (from < at + size && at < from + one.size.load()) one.size.store(0);
    }
  }
  noted_ = new_note();
  if (noted_ == nullptr) return;
  noted_->start.store(reinterpret_cast<uintptr_t>(start), std::memory_order_relaxed);
  noted_->size.store(size, std::memory_order_release);
}

NotedAddresses::~NotedAddresses() {
  if (noted_ == nullptr) return;
  const MutexLock lock(mutex);
  noted_->size.store(0, std::memory_order_release);
  noted_->next_free = unused;
  unused = noted_;
}

bool is_inherited(const void* at) {
  return inherited.load(std::memory_order_relaxed) != nullptr && in_inherited(reinterpret_cast<uintptr_t>(at));
}

}  // namespace vmem::core
