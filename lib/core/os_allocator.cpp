#include "core/os_allocator.h"

#include <pthread.h>
#include <sys/mman.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <optional>

#include "core/break.h"
#include "core/mutex.h"
#include "core/outside_lock.h"
#include "core/signals.h"
#include "core/types.h"

namespace vmem::core {

// With a sanitizer, uses its malloc: it tracks no other memory, and it is never an application's.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define VMEM_OWN_IS_MALLOC 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define VMEM_OWN_IS_MALLOC 1
#endif
#endif

#ifdef VMEM_OWN_IS_MALLOC

void* own_allocate(size_t bytes) {
  return ::operator new(bytes);
}
void own_free(void* at, size_t bytes) noexcept {
  ::operator delete(at, bytes);
}
void keep_own_memory_in_children() {}

#else

namespace {

// A request of up to kMostSmall bytes gets a place in a slab. A slab has places of one size and is
// aligned to its own size. A larger request gets its own pages.
constexpr size_t kSlab = 64 << 10, kPiece = 512 << 10, kMostSmall = 8192;
constexpr std::array<uint16_t, 17> kSizes{32,  48,   64,   96,   128,  192,  256,  384, 512,
                                          768, 1024, 1536, 2048, 3072, 4096, 6144, 8192};

struct Place {
  Place* next;
};
struct alignas(16) Slab {
  Slab *next, *previous;  // in the list of its size with free places, or in the spare list
  Place* free;            // places given back
  uint32_t begun;         // bytes ever handed out, with this header
  uint32_t used;          // places in use
  uint32_t size;          // bytes of a place
  uint32_t born;          // Memory::forks when the slab was begun
};
// Slabs of one size with free places. The first is used first.
struct Slabs {
  Slab* first = nullptr;
  void push(Slab* slab) {
    slab->previous = nullptr;
    slab->next = first;
    if (first != nullptr) first->previous = slab;
    first = slab;
  }
  void take(Slab* slab) {
    (slab->previous != nullptr ? slab->previous->next : first) = slab->next;
    if (slab->next != nullptr) slab->next->previous = slab->previous;
  }
};
struct Memory {
  Mutex mutex;  // leaf, held for a few instructions or to map a piece
  std::array<Slabs, kSizes.size()> open VMEM_GUARDED_BY(mutex);
  Slabs spare VMEM_GUARDED_BY(mutex);         // empty; they have no memory but their headers
  uint32_t forks VMEM_GUARDED_BY(mutex) = 0;  // forks between the first use of the memory and this process
};
constinit Memory memory;

// Locks the memory. No signal handler runs on a thread that holds this lock: it could access a
// block, and the thread that serves the fault allocates here. A thread with the pager's lock has
// seen to that already.
class VMEM_LOCKS(scoped_lockable) Held {
 public:
  Held() VMEM_ACQUIRE(memory.mutex) {
    if (big_locks_held == 0 && !signals_deferred()) blocked_.emplace();
    memory.mutex.lock();
  }
  ~Held() VMEM_RELEASE() { memory.mutex.unlock(); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  std::optional<SignalsBlocked> blocked_;
};

size_t index_of(size_t bytes) {
  size_t i = 0;
  while (kSizes[i] < bytes) ++i;
  return i;
}

bool has_room(const Slab* slab) {
  return slab->free != nullptr || slab->begun + slab->size <= kSlab;
}

// Maps more spare slabs. Returns false if the kernel has no memory.
bool map_piece() VMEM_REQUIRES(memory.mutex) {
  void* const raw = mmap(nullptr, kPiece + kSlab, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return false;
  const uintptr_t start = reinterpret_cast<uintptr_t>(raw), at = round_up(start, kSlab), end = at + kPiece;
  if (at != start) munmap(raw, at - start);
  if (end != start + kPiece + kSlab) munmap(reinterpret_cast<void*>(end), start + kPiece + kSlab - end);
  for (uintptr_t slab = end; slab != at;) memory.spare.push(reinterpret_cast<Slab*>(slab -= kSlab));
  return true;
}

void* get_place(size_t bytes) {
  const size_t i = index_of(bytes);
  const Held held;
  Slab* slab = memory.open[i].first;
  if (slab == nullptr) {
    if (memory.spare.first == nullptr && !map_piece()) return nullptr;
    slab = memory.spare.first;
    memory.spare.take(slab);
    slab->free = nullptr;
    slab->begun = sizeof(Slab);
    slab->used = 0;
    slab->size = kSizes[i];
    slab->born = memory.forks;
    memory.open[i].push(slab);
  }
  void* at = slab->free;
  if (at != nullptr) {
    slab->free = slab->free->next;
  } else {
    at = reinterpret_cast<std::byte*>(slab) + slab->begun;
    slab->begun += slab->size;
  }
  ++slab->used;
  if (!has_room(slab)) memory.open[i].take(slab);
  return at;
}

void put_place(void* at) {
  auto* const slab = reinterpret_cast<Slab*>(reinterpret_cast<uintptr_t>(at) & ~(kSlab - 1));
  const Held held;
  if (slab->born != memory.forks) return;  // from before a fork: its list may have been in mid-change
  Slabs& open = memory.open[index_of(slab->size)];
  if (!has_room(slab)) open.push(slab);
  slab->free = new (at) Place{slab->free};
  // Keeps one for the next request.
  if (--slab->used != 0 || (open.first == slab && slab->next == nullptr)) return;
  open.take(slab);
  if (slab->begun > kPage) madvise(reinterpret_cast<std::byte*>(slab) + kPage, kSlab - kPage, MADV_DONTNEED);
  memory.spare.push(slab);
}

}  // namespace

void* own_allocate(size_t bytes) {
  const MemoryHook refuses = memory_hook.load(std::memory_order_relaxed);
  void* at = nullptr;
  if (broken("own_memory")) return malloc(bytes);
  if (refuses != nullptr && refuses()) [[unlikely]] {
    throw_bad_alloc();
  } else if (bytes <= kMostSmall) {
    at = get_place(bytes);
  } else {
    at = mmap(nullptr, round_up(bytes, kPage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) at = nullptr;
  }
  if (at == nullptr) throw_bad_alloc();
  return at;
}

void own_free(void* at, size_t bytes) noexcept {
  if (at == nullptr) return;
  if (broken("own_memory")) return free(at);
  if (bytes <= kMostSmall) {
    put_place(at);
  } else {
    const size_t pages = round_up(bytes, kPage);
    if (munmap(at, pages) != 0) madvise(at, pages, MADV_DONTNEED);  // too many mappings to split one
  }
}

void keep_own_memory_in_children() {
  static std::atomic<bool> done{false};
  if (done.exchange(true)) return;
  // Holds no lock during the application's fork handlers: they may access a block, and the fault's
  // service allocates here. A child starts anew and abandons its parent's memory.
  pthread_atfork(nullptr, nullptr, []() VMEM_LOCKS(no_thread_safety_analysis) {
    new (&memory.mutex) Mutex;
    memory.open = {};
    memory.spare = {};
    ++memory.forks;
  });
}

#endif

}  // namespace vmem::core
