// The protocol between kernels that ask for blocks and the server that pages them in while they run: the words in
// memory that both sides access, who may write which, and the answers. What the two sides do is in paging_group.h (a
// warp or a thread block that asks) and, in the library, lib/device/paging_server.h. The states, and why nothing
// deadlocks: docs/gpu-paging.md. C++17, for the host and for devices: nothing of the C++ library. No interface
// for programs: <vmem/device.cuh> is.
//
// Every word has one kind of writer, so that a host that can only store to a device's memory, and copy out of it, can
// serve a device whose groups alone have atomic operations there:
//   state, home    the server alone  asked, use, written, token, turn, tickets, ring_head   the groups alone
//   progress, ended, asleep, ring_taken   the server (who wakes it clears asleep)
//   a cell of the ring                    the group that has claimed it
//
// Memory order, by the pairs that need one; the names are at the operations that are meant. tests/protocol has
// checkers, which find something as soon as one of these orders is taken away:
//   [bytes]   a block's bytes -> publish (store-release of `state`) -> a pin's first look -> its fence -> accesses. An
//             access may overtake the second look: that has to find the same word, so the bytes were in place
//             meanwhile. (It is an acquire all the same, for ThreadSanitizer, which knows no fences.)
//   [pin]     a pin: add to `use`, fence, look at `state`. An eviction: store `state`, fence, look at `use`. Of two
//             sequentially consistent fences one comes first, and what is before it is seen behind the other: the
//             group finds the block evicting, or the server finds it pinned, or both.
//   [alias]   the bytes were copied to another address than that which groups access. What such a copy is ordered with
//             takes a fence of its own, anywhere on the way from one to the other: the first group that pins a block
//             after it came has it, and says so in `asked` (release); who finds that before its fence (acquire) needs
//             none. What a group has stored it fences before it unpins. What it has only loaded, it has: a load that
//             has returned is not changed by a copy that comes behind the release.
//   [unpin]   accesses -> release (add-release to `use`) -> the server finds no pin (load-acquire) -> it copies
//             the block out or gives its frame to another. Later adds and subtractions of other groups are
//             read-modify-writes, which continue the release sequence: the server need not read the release itself.
//   [mark]    a pin for writing marks `written` before its fence. By the argument of [pin], an eviction that misses the
//             mark has stopped the pin, in whatever order the server reads `use` and `written`. `written` grows only: a
//             group that is late cannot take back the mark of a later generation.
//   [ring]    a request travels in the word that says it is there: relaxed is enough. So it is for `ring_taken`: the
//             server has loaded a cell before it says so, and a store that depends on that comes later.
//   [asleep]  a group: store the request, fence, look at `asleep`. The server: store `asleep`, fence, look at the ring.
//             As [pin]: the group wakes it, or it finds the request.
#pragma once

#include "vmem/detail/paging_types.h"

#if defined(__CUDACC__) || defined(__CUDA__)
#define VMEM_PAGING __host__ __device__
#else
#define VMEM_PAGING
#endif

namespace vmem::paging {

// What a group is told. All but the first two are errors; nothing is pinned then.
enum class Answer : uint8_t {
  present,         // pinned: loads and stores are right until it is released
  not_yet,         // requested; of what does not wait
  io_error,        // its bytes could not be read
  no_memory,       // no memory to read them into
  ended,           // the server has ended: nothing will come any more
  no_progress,     // the server got nothing done for as long as the group was willing to wait
  would_deadlock,  // the group holds pins, and would have to wait
  too_many,        // more blocks at once than the server promises frames for
  out_of_range,
  read_only,  // of a range that was opened for reading alone
  busy,       // it is leased at another location
  timed_out,  // the group has waited for as long as it was ever to
};

enum class Intent : uint8_t { read, write };

// ---- state: kind, error and generation of a block ------------------------------------------------------------------
// A generation is a block's time in memory and the time before, when it was not. Another one begins with each eviction,
// and when the server has written back a block that stays. 48 bits: they do not come round.
enum class Kind : uint8_t {
  not_present,
  present,
  evicting,  // no new pins; present again if somebody has one
  failed,    // with an error: groups get it, until the server tries again
  in_place,  // not on the device, but where groups can load from it: `home` says where; who wants it there asks
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
constexpr uint32_t kPinned = 1;                 // 24 bits: more than all threads of a device, each with several
constexpr uint32_t kReleased = kTake - 1;       // counts: it comes round, and is compared for a change only
constexpr uint32_t kRefused = 0 - uint32_t{1};  // a pin that came too late: nobody had the block
VMEM_PAGING constexpr uint32_t pins_of(uint32_t use) {
  return use & (kTake - 1);
}
VMEM_PAGING constexpr uint32_t takes_of(uint32_t use) {
  return use / kTake;
}

// ---- asked: for which generation, and how urgently -----------------------------------------------------------------
// Requested is no state of the server's: a block is that when it is not present and `asked` names its generation. So
// nobody has to clear it, and a generation has five requests at most. When the block is present nobody asks any more,
// and the word says whether its arrival has been fenced ([alias]).
enum class Urgency : uint8_t {
  prefetch,
  rows,    // by a group that waits to load a little of it, and can do so in place
  needed,  // by a group that waits for another block first, and wants both
  wait,    // by a group that is about to look for it again: it stays until somebody has had it
  first,   // by a group that has the token: as `wait`, and it is not behind the others
};

VMEM_PAGING constexpr uint64_t asked_word(uint64_t generation, Urgency urgency) {
  return generation << 3 | static_cast<uint64_t>(urgency);
}
// More than any request: in this generation it has been present, and a group that had it has put a fence between the
// copy of its bytes and all who see this.
VMEM_PAGING constexpr uint64_t fenced_word(uint64_t generation) {
  return generation << 3 | 7;
}

// ---- a cell of the ring: sequence number and request ---------------------------------------------------------------
// Written for position p: the sequence number is p + 1. What the server has taken may be written again when it has said
// so in `ring_taken`.
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

// Atomics says how words are accessed: the host's builtins, a device's instructions, or a checker's.
//   template <typename T> using Word;
//   static constexpr bool kWakes;                  groups can wake a server that sleeps (no device can)
//   T load(Word<T>*), load_acquire(Word<T>*)       relaxed where nothing else is said
//   void store(Word<T>*, T), store_release(Word<T>*, T)
//   T add(Word<T>*, T), add_release(Word<T>*, T)
//   bool swap_if(Word<T>*, T* found, T wanted)     strong; what is there is in *found when it was not that
//   void fence()                                   sequentially consistent, for all who access the words
//   void fence_aliases()                           between accesses of the same bytes at two addresses
//   uint64_t now(); void pause(); void wake(Word<uint32_t>* asleep)
// all of them static.

template <typename Atomics>
struct Control {
  template <typename T>
  using Word = typename Atomics::template Word<T>;

  Word<uint64_t> ring_head;   // how many cells were ever claimed
  Word<uint64_t> progress;    // changes whenever the server got anything done
  Word<uint64_t> tickets;     // how many were ever drawn for the token
  Word<uint64_t> turn;        // the oldest of those that wait for it, as far as they have said; 0: none has
  Word<uint32_t> ended;       // an Answer; 0: the server runs
  Word<uint32_t> token;       // how many blocks those groups want that may wait while they hold pins
  Word<uint32_t> asleep;      // 1: the server wants to be woken
  Word<uint64_t> ring_taken;  // how many cells may be claimed again, as far as the server has said
};

// What a kernel gets, by value. All but the ring lies where the groups run: a hit accesses nothing else.
template <typename Atomics>
struct Table {
  template <typename T>
  using Word = typename Atomics::template Word<T>;

  Word<uint64_t>* state;
  Word<uint64_t>* asked;
  Word<uint64_t>* written;  // the last generation in which somebody could write
  Word<uint32_t>* use;
  Control<Atomics>* control;
  Word<uint64_t>* ring;  // where the server runs
  uint32_t cells;        // a power of two, 2 at least: one could not tell full from empty
  uint32_t blocks;       // at most kMaxBlocks
  uint32_t frames;       // what one group may hold at once: the server never has fewer in all
  Word<uint64_t>* home;  // of a block that is in place: the address of its bytes
};

// Whether a group may take the token for so many blocks, beside those that have it. All that wait with pins have no
// more than half of the frames together, or one group is alone with it: there is a frame for one of them each time.
template <typename Atomics>
VMEM_PAGING bool token_allows(const Table<Atomics>& table, uint32_t taken, uint32_t count) {
  return taken == 0 || (count <= table.frames / 2 && taken <= table.frames / 2 - count);
}

// Before anybody else sees the table.
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
