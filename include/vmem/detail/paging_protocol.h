// The protocol between kernels that ask for blocks and the server that pages them in while they
// run: the words in memory that both sides access, their writers, and the answers. Not an interface
// for programs, which use <vmem/device.cuh>.
// - The two sides are paging_group.h (a warp or a thread block that asks) and, in the library,
//   lib/device/paging_server.h. lib/kernel_paging/README.md has the states, and why nothing
//   deadlocks.
// - C++17, for the host and for devices, without the C++ library.
//
// Every word has one kind of writer. So a host that can only store to a device's memory, and copy
// out of it, can serve a device on which only the groups have atomic operations:
//   state, home    the server    asked, use, written, token, turn, tickets, ring_head   the groups
//   progress, ended, asleep, ring_taken   the server (a group that wakes it clears asleep)
//   a cell of the ring                    the group that has claimed it
//
// Memory orders, by the pairs that need one; the operations in the code have their names.
// tests/protocol has checkers that find an error when one of these orders is taken away.
//
// - [bytes]: a block's bytes -> publish (store-release of `state`) -> a pin's first look -> its
//   fence -> accesses. An access may overtake the second look. That look has to find the same word,
//   so the bytes were in place all the time. (It is an acquire all the same, for ThreadSanitizer,
//   which does not know fences.)
// - [pin]: a pin adds to `use`, fences, and looks at `state`. An eviction stores `state`, fences,
//   and looks at `use`. One of two sequentially consistent fences comes first, and what is before
//   it is seen after the other. So the group finds the block evicting, or the server finds it
//   pinned, or both.
// - [alias]: the bytes were copied to another address than groups access. Such a copy and an access
//   are ordered only if fence_aliases() lies between the two, anywhere. The first group that pins
//   the block after its arrival makes it, and says so in `asked` (release). A group that finds this
//   before its fence (acquire) needs none. A group that has stored makes another one before it
//   unpins. Loads need none: a copy after the release does not change a load that has returned.
// - [unpin]: accesses -> release (add-release to `use`) -> the server finds no pin (load-acquire)
//   -> it copies the block out or gives its frame to another. Later additions of other groups are
//   read-modify-writes, which continue the release sequence: the server need not read the release
//   itself.
// - [mark]: a pin for writing marks `written` before its fence. By the argument of [pin], an
//   eviction that misses the mark has stopped the pin, in whatever order the server reads `use` and
//   `written`. `written` only grows: a late group cannot take back the mark of a later generation.
// - [ring]: a request is in the word that says that it is there, so relaxed is enough. The same
//   holds for `ring_taken`: the server has loaded a cell before it says so, and a store that
//   depends on that comes later.
// - [asleep]: a group stores the request, fences, and looks at `asleep`. The server stores
//   `asleep`, fences, and looks at the ring. As in [pin], the group wakes it, or it finds the
//   request.
#pragma once

#include "vmem/detail/paging_types.h"

#if defined(__CUDACC__) || defined(__CUDA__)
#define VMEM_PAGING __host__ __device__
#else
#define VMEM_PAGING
#endif

namespace vmem::paging {

// The answer to a group. All but the first two are errors, after which nothing is pinned.
enum class Answer : uint8_t {
  present,         // pinned: accesses are right until the release
  not_yet,         // requested; only from calls that do not wait
  io_error,        // the block could not be read
  no_memory,       // no memory to read the block into
  ended,           // the server has ended: no block comes any more
  no_progress,     // the server made no progress for as long as the group was willing to wait
  would_deadlock,  // the group holds pins and would have to wait
  too_many,        // more blocks than the server promises frames for
  out_of_range,
  read_only,  // the range was opened for reading only
  busy,       // the block is leased at another location
  timed_out,  // the group has waited for the longest time it was given
};

enum class Intent : uint8_t { read, write };

// ---- state: kind, error and generation of a block ------------------------------------------------------------------
// A generation is one stay of a block in memory, with the time before it. A new one begins with
// each eviction, and when the server has written back a block that stays. It has 48 bits and does
// not wrap.
enum class Kind : uint8_t {
  not_present,
  present,
  evicting,  // no new pins; present again if a group has one
  failed,    // groups get the error until the server tries again
  in_place,  // not on the device, but groups can load from `home`; a group that wants it on the device asks
};

VMEM_PAGING constexpr uint64_t state_word(Kind kind, uint64_t generation, Answer error = Answer::present) {
  return generation << 16 | static_cast<uint64_t>(error) << 8 | static_cast<uint64_t>(kind);
}
VMEM_PAGING constexpr Kind kind_of(uint64_t state) {
  return static_cast<Kind>(state & 0xff);
}
VMEM_PAGING constexpr Answer error_of(uint64_t state) {
  return static_cast<Answer>(state >> 8 & 0xff);
}
VMEM_PAGING constexpr uint64_t generation_of(uint64_t state) {
  return state >> 16;
}
constexpr uint64_t kFirstGeneration = 1;

// ---- use: how many pins a block has, and how often one was released ------------------------------------------------
constexpr uint32_t kTake = 1 << 24;
constexpr uint32_t kPinned = 1;                 // in 24 bits: more than all threads of a device, each with several
constexpr uint32_t kReleased = kTake - 1;       // counts releases: it wraps, and is compared for a change only
constexpr uint32_t kRefused = 0 - uint32_t{1};  // a pin that came too late: the group never had the block
VMEM_PAGING constexpr uint32_t pins_of(uint32_t use) {
  return use & (kTake - 1);
}
VMEM_PAGING constexpr uint32_t takes_of(uint32_t use) {
  return use / kTake;
}

// ---- asked: for which generation, and how urgently -----------------------------------------------------------------
// Requested is not a state of the server. A block is requested if it is not present and `asked`
// names its generation. So nothing has to clear a request, and a generation has five requests at
// most. When the block is present no group asks any more, and the word says whether its arrival has
// been fenced ([alias]).
enum class Urgency : uint8_t {
  prefetch,
  rows,    // by a group that waits to load a little of it, and can load in place
  needed,  // by a group that waits for another block first, and needs both
  wait,    // by a group that is about to look again: the block stays until a group has had it
  first,   // by a group with the token: as `wait`, and served before the others
};

VMEM_PAGING constexpr uint64_t asked_word(uint64_t generation, Urgency urgency) {
  return generation << 3 | static_cast<uint64_t>(urgency);
}
// Higher than any request. In this generation the block has been present, and a group that had it
// has put a fence between the copy of its bytes and all groups that see this word.
VMEM_PAGING constexpr uint64_t fenced_word(uint64_t generation) {
  return generation << 3 | 7;
}

// ---- a cell of the ring: sequence number and request ---------------------------------------------------------------
// A cell written for position p has the sequence number p + 1. A cell that the server has taken may
// be written again when the server has said so in `ring_taken`.
constexpr uint32_t kMaxBlocks = 1 << 29;

VMEM_PAGING constexpr uint64_t cell_word(uint32_t sequence, uint32_t block = 0, Urgency urgency = Urgency::prefetch) {
  return static_cast<uint64_t>(sequence) << 32 | block << 3 | static_cast<uint64_t>(urgency);
}
VMEM_PAGING constexpr uint32_t sequence_of(uint64_t cell) {
  return static_cast<uint32_t>(cell >> 32);
}
VMEM_PAGING constexpr uint32_t block_of(uint64_t cell) {
  return static_cast<uint32_t>(cell) >> 3;
}
VMEM_PAGING constexpr Urgency urgency_of(uint64_t cell) {
  return static_cast<Urgency>(cell & 7);
}

// Atomics is the access to words: the host's builtins, a device's instructions, or a checker's. All
// members are static.
//   template <typename T> using Word;
//   static constexpr bool kWakes;                  groups can wake a sleeping server (no device can)
//   T load(Word<T>*), load_acquire(Word<T>*)       relaxed unless the name says otherwise
//   void store(Word<T>*, T), store_release(Word<T>*, T)
//   T add(Word<T>*, T), add_release(Word<T>*, T)
//   bool swap_if(Word<T>*, T* found, T wanted)     strong; on failure *found is the present value
//   void fence()                                   sequentially consistent, for all that access the words
//   void fence_aliases()                           between accesses to the same bytes at two addresses
//   uint64_t now(); void pause(); void wake(Word<uint32_t>* asleep)

template <typename Atomics>
struct Control {
  template <typename T>
  using Word = typename Atomics::template Word<T>;

  Word<uint64_t> ring_head;  // cells claimed so far
  Word<uint64_t> progress;   // changes whenever the server makes progress
  Word<uint64_t> tickets;    // tickets drawn so far
  Word<uint64_t> turn;       // the oldest ticket that waits for the token, as far as groups have stored theirs; 0: none
  Word<uint32_t> ended;      // an Answer; 0: the server runs
  Word<uint32_t> token;      // blocks wanted by the groups that may wait while they hold pins
  Word<uint32_t> asleep;     // 1: the server must be woken
  Word<uint64_t> ring_taken;  // cells that may be claimed again, as far as the server has said
};

// A kernel gets it by value. All but the ring is where the groups run: a hit accesses nothing else.
template <typename Atomics>
struct Table {
  template <typename T>
  using Word = typename Atomics::template Word<T>;

  Word<uint64_t>* state;
  Word<uint64_t>* asked;
  Word<uint64_t>* written;  // the last generation in which a group could write
  Word<uint32_t>* use;
  Control<Atomics>* control;
  Word<uint64_t>* ring;  // where the server runs
  uint32_t cells;        // a power of two, at least 2: otherwise full and empty look the same
  uint32_t blocks;       // at most kMaxBlocks
  uint32_t frames;       // what one group may hold at once; the server never has fewer in all
  Word<uint64_t>* home;  // of a block in place: the address of its bytes
};

// True if a group may take the token for `count` blocks, beside the groups that have it. All groups
// that wait with pins have no more than half of the frames together, or one group has the token
// alone. So there is always a frame for one of them.
template <typename Atomics>
VMEM_PAGING bool token_allows(const Table<Atomics>& table, uint32_t taken, uint32_t count) {
  return taken == 0 || (count <= table.frames / 2 && taken <= table.frames / 2 - count);
}

// Called before another thread sees the table.
template <typename Atomics>
VMEM_PAGING void initialise(const Table<Atomics>& table) {
  for (uint32_t i = 0; i < table.blocks; ++i) {
    Atomics::store(&table.state[i], state_word(Kind::not_present, kFirstGeneration));
    Atomics::store(&table.asked[i], uint64_t{0});
    Atomics::store(&table.written[i], uint64_t{0});
    Atomics::store(&table.use[i], uint32_t{0});
  }
  for (uint32_t i = 0; i < table.cells; ++i) Atomics::store(&table.ring[i], cell_word(i));
  Atomics::store(&table.control->ring_head, uint64_t{0});
  Atomics::store(&table.control->progress, uint64_t{0});
  Atomics::store(&table.control->tickets, uint64_t{0});
  Atomics::store(&table.control->turn, uint64_t{0});
  Atomics::store(&table.control->ended, uint32_t{0});
  Atomics::store(&table.control->token, uint32_t{0});
  Atomics::store(&table.control->asleep, uint32_t{0});
  Atomics::store(&table.control->ring_taken, uint64_t{0});
}

}  // namespace vmem::paging
