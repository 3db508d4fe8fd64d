// The table of a region's blocks. BlockTable is the only writer of states, flags, digests and
// extents: other classes read entries and ask for changes by name. Every call is made under the
// pager's lock. A table for 16 TiB costs only address space at first: its entries start as zero
// pages.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "core/types.h"

namespace vmem::core {

// Where a block's current bytes are. In the states marked (owner) exactly one thread may act on the
// block. Every other thread leaves a flag and waits for the next state.
enum class State : uint8_t {
  unpopulated,   // never written: zeros, or the mapped file's bytes. Trapped
  stored,        // in the store, at `extent`. Trapped
  reading,       // (owner) being read into a frame. Trapped
  staged,        // in a frame, trapped: a read-ahead marker, a probe, a device region's block in a staging frame
  mapping,       // (owner) its pages are being put in place
  resident,      // in place: accesses cost nothing
  isolating,     // (owner) being taken out of sight or write-protected, hashed, dropped
  writing_back,  // (owner) being written to the store, from a frame or from its place, write-protected
  poisoned,      // its bytes are unavailable: accesses get SIGBUS, the reason was logged
  promoting,     // (owner) on its way into a device
  on_device,     // on a device
  demoting,      // (owner) on its way out of a device
  count_,
};
const char* state_name(State state);
constexpr bool in_transition(State s) {
  return s == State::reading || s == State::mapping || s == State::isolating || s == State::writing_back ||
         s == State::promoting || s == State::demoting;
}
// States in which the block occupies host memory. `aux` is its FrameId.
constexpr bool in_memory(State s) {
  return s == State::reading || s == State::staged || s == State::mapping || s == State::resident ||
         s == State::isolating || s == State::writing_back;
}

// States in which the block occupies memory of `device`. `aux` is its FrameId.
constexpr bool on_a_device(State s) {
  return s == State::promoting || s == State::on_device || s == State::demoting;
}

enum Flag : uint16_t {
  kFaultPending = 1 << 0,     // a fault waits for this block
  kStorePending = 1 << 1,     // a store waits for this block
  kWaitsForMemory = 1 << 2,   // in MemoryWaitQueue
  kReadaheadMarker = 1 << 3,  // a read-ahead marker
  kReadAhead = 1 << 4,        // read ahead or prefetched, no access seen since
  kDigest = 1 << 5,           // `digest` is the digest of the bytes in the store or the file
  kProtected = 1 << 6,        // in place, write-protected, and equal to the store
  kDirty = 1 << 7,            // on a device, or staged: may differ from what the store has
  kUnknown = 1 << 8,          // its last write failed: the store or the file may have torn bytes, so it must be written
  kLost = 1 << 9,             // poisoned: the only copy of its changes is gone; until it is dropped or freed
  kTold = 1 << 10,            // kLost, and a call has reported it
  kDropped = 1 << 11,         // poisoned: a fault waited for memory in vain and got SIGBUS; the bytes are intact
  kPrefetched = 1 << 12,      // kReadAhead by vmem_prefetch, not by read-ahead
  kShowsFile = 1 << 13,       // poisoned: its file ends before the block does; the file itself is mapped there
  // Poisoned, but the trap refused to answer accesses with SIGBUS. The next access asks it again.
  // With kShowsFile: the trap refused to map the file, and accesses get SIGBUS.
  kUnanswered = 1 << 14,
  kUnread = 1 << 15,  // its last read failed: a call that asks for its bytes to be safe reports it
};

struct Block {
  Digest digest;
  Extent extent;     // where the store has it; empty if it has not
  uint32_t aux = 0;  // in memory or on a device: FrameId; else the shadow of its last eviction, 0: never
  State state = State::unpopulated;
  uint8_t device = 0;  // on_device, promoting, demoting
  uint16_t flags = 0;
};
static_assert(sizeof(Block) == 32);

class BlockTable {
 public:
  BlockTable() = default;
  ~BlockTable();
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;
  Status create(uint64_t blocks);

  uint64_t size() const { return blocks_; }
  const Block& operator[](BlockIndex i) const { return table_[i]; }

  // Changes of state. Only the thread that owns the block's transition makes them. A call in a state
  // that is not listed ends the process by fatal(). Absent means: stored if the block has an extent,
  // else unpopulated.
  void begin_read(BlockIndex i);                 // absent, poisoned -> reading
  void end_read(BlockIndex i);                   // reading -> staged
  void abandon_read(BlockIndex i);               // reading -> absent
  void begin_install(BlockIndex i);              // reading, staged, isolating, writing back -> mapping
  void end_install(BlockIndex i);                // mapping -> resident
  void abandon_install(BlockIndex i);            // mapping -> staged
  void begin_isolate(BlockIndex i);              // staged, resident -> isolating
  void begin_write(BlockIndex i);                // isolating -> writing back
  void keep_staged(BlockIndex i);                // isolating, writing back -> staged
  void keep_in_place(BlockIndex i);              // isolating, writing back -> resident
  void let_go(BlockIndex i);                     // isolating, writing back -> absent
  void begin_promote(BlockIndex i, int device);  // absent, staged, isolating -> promoting
  void end_promote(BlockIndex i);                // promoting -> on device
  void abandon_promote(BlockIndex i);            // promoting -> absent
  void abandon_promote_staged(BlockIndex i);     // promoting -> staged
  void begin_demote(BlockIndex i);               // on device -> demoting
  void abandon_demote(BlockIndex i);             // demoting -> on device
  void end_demote(BlockIndex i);                 // demoting -> absent
  void end_demote_staged(BlockIndex i);          // demoting -> staged
  void end_demote_in_place(BlockIndex i);        // demoting -> resident
  void poison(BlockIndex i);                     // absent, reading, mapping, isolating, promoting, demoting -> poisoned
  void revive(BlockIndex i);                     // poisoned -> absent
  void forget_contents(BlockIndex i);            // stored -> unpopulated

  // Flags of Flag, set and cleared.
  void mark(BlockIndex i, uint16_t flags) { table_[i].flags |= flags; }
  void clear(BlockIndex i, uint16_t flags) { table_[i].flags &= static_cast<uint16_t>(~flags); }
  void answer_faults(BlockIndex i) { clear(i, kFaultPending | kStorePending); }
  void forget_read_ahead(BlockIndex i) { clear(i, kReadAhead | kReadaheadMarker | kPrefetched); }
  void set_digest(BlockIndex i, const Digest& digest) {
    table_[i].digest = digest;
    mark(i, kDigest);
  }
  void forget_digest(BlockIndex i) { clear(i, kDigest); }
  void set_extent(BlockIndex i, Extent extent) { table_[i].extent = extent; }
  void set_aux(BlockIndex i, uint32_t aux) { table_[i].aux = aux; }
  void set_device(BlockIndex i, int device) { table_[i].device = static_cast<uint8_t>(device); }

  // Returns the first block at or after `from` that may not be unpopulated, or size(). Skips pages
  // of the table whose blocks are all unpopulated. To stay short, a call skips a limited number of
  // them and then returns the first block of a page.
  BlockIndex next_populated(BlockIndex from) const;
  // Blocks in a state; kept current by each change. Unpopulated blocks are not counted.
  uint64_t count(State state) const { return counts_[static_cast<size_t>(state)]; }
  // Bytes of memory that the table may occupy now. A page whose blocks are all unpopulated again is
  // given back before long, with the shadows of their evictions.
  size_t footprint() const { return footprint_; }
  // How much footprint() grows if block i comes into use (0 for most blocks), and its value with
  // all blocks in use.
  size_t cost(BlockIndex i) const { return mapped_ == 0 || committed_[i / kChunk] ? 0 : kPage + 1; }
  size_t most() const { return mapped_ == 0 ? footprint_ : (blocks_ + kChunk - 1) / kChunk * (kPage + 2); }
  // For tests: recounts everything. Returns what is wrong, or an empty string.
  std::string check() const;
  static constexpr uint64_t kChunk = kPage / sizeof(Block);  // blocks in a page of the table

 private:
  friend struct BlockTableEditor;  // of the unit tests
  void change(BlockIndex i, uint16_t from_any, State to);
  State absent(BlockIndex i) const { return table_[i].extent ? State::stored : State::unpopulated; }
  void give_back(uint64_t chunk);
  Block* table_ = nullptr;
  uint64_t blocks_ = 0;
  size_t mapped_ = 0;  // bytes; 0: from calloc
  size_t footprint_ = 0;
  uint8_t* used_ = nullptr;      // by chunk: blocks that are not unpopulated
  std::vector<bool> committed_;  // by chunk: has memory
  static constexpr uint64_t kNone = UINT64_MAX;
  std::array<uint64_t, 16> empty_;  // the last chunks that became empty; kept, since they may be used again soon
  size_t next_empty_ = 0;
  uint64_t counts_[static_cast<size_t>(State::count_)] = {};
};

}  // namespace vmem::core
