// What is known of each block of a region, and which changes of state are legal. The pager is the only writer; every
// call is made under its lock. A table for 16 TiB costs address space only: entries are born as zero pages.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "core/types.h"

namespace vmem::core {

// Where a block's current bytes are, and who owns the change that is under way. In the states marked (owner) exactly
// one thread may act on the block; everybody else leaves a mark in the flags and waits for the next state.
enum class State : uint8_t {
  unpopulated,   // never written: zeros, or the mapped file's bytes. Trapped.
  stored,        // in the store, at `extent`. Trapped.
  reading,       // (owner) bytes on their way into a frame. Trapped.
  staged,        // in a frame, trapped: a read-ahead marker, a probe, a device region's host copy
  mapping,       // (owner) the frame is being put in place
  resident,      // in place: accesses cost nothing
  isolating,     // (owner) being taken out of sight or write-protected, hashed, dropped
  writing_back,  // (owner) its image, in a frame or in place and write-protected, is being written to the store
  poisoned,      // its bytes cannot be had: accesses get SIGBUS, the reason was logged
  promoting,     // (owner) on its way into a device
  on_device,     // on a device; CPU accesses are the driver's business
  demoting,      // (owner) on its way out of a device
  count_,
};
const char* state_name(State state);
bool legal(State from, State to);
constexpr bool in_transition(State s) {
  return s == State::reading || s == State::mapping || s == State::isolating || s == State::writing_back ||
         s == State::promoting || s == State::demoting;
}
// States in which the block occupies host memory; `aux` is its FrameId then.
constexpr bool in_memory(State s) {
  return s == State::reading || s == State::staged || s == State::mapping || s == State::resident ||
         s == State::isolating || s == State::writing_back;
}

// States in which it occupies device memory; `device` says which, `aux` is its FrameId.
constexpr bool on_a_device(State s) {
  return s == State::promoting || s == State::on_device || s == State::demoting;
}

enum Flag : uint16_t {
  kFaultPending = 1 << 0,     // a fault waits for this block
  kStorePending = 1 << 1,     // .. and it is a store
  kWaitsForMemory = 1 << 2,   // queued for memory
  kReadaheadMarker = 1 << 3,  // a read-ahead marker
  kReadAhead = 1 << 4,        // read ahead or prefetched, no access seen since
  kDigest = 1 << 5,           // `digest` is that of the bytes in the store or the file
  kProtected = 1 << 6,        // in place write-protected: certainly equal to the store
  kDirty = 1 << 7,            // on a device, or staged: may differ from what the store has
  kUnknown = 1 << 8,          // a write of it failed: what the store or the file has may be torn, so it must be written
  kLost = 1 << 9,             // poisoned, because the only copy of its changes is gone; until it is dropped or freed
  kTold = 1 << 10,            // .. and a call has said so
  kDropped = 1 << 11,         // a fault that waited for memory was answered with SIGBUS; the bytes are intact
  kPrefetched = 1 << 12,      // by vmem_prefetch (else by read-ahead)
  kShowsFile = 1 << 13,       // poisoned, because its file ends before it or in it: the file itself is mapped there
  // Poisoned, but the trap refused to answer accesses with SIGBUS: the next one asks again. With kShowsFile: it refused
  // the file, and they get SIGBUS.
  kUnanswered = 1 << 14,
  kUnread = 1 << 15,  // the disk refused to read it the last time: who asks for its bytes to be safe is told
};

inline constexpr uint16_t kForgetReadAhead = static_cast<uint16_t>(~(kReadAhead | kReadaheadMarker | kPrefetched));

struct Block {
  Digest digest;
  Extent extent;     // where the store has it; invalid for file bytes
  uint32_t aux = 0;  // in memory or on a device: FrameId. Absent: shadow of its last eviction, 0 = never
  State state = State::unpopulated;
  uint8_t device = 0;  // on_device, promoting, demoting: which
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
  Block& operator[](BlockIndex i) { return table_[i]; }
  const Block& operator[](BlockIndex i) const { return table_[i]; }
  // The one way a state changes. Illegal: fatal().
  void change(BlockIndex i, State from, State to);
  // First block at or after `from` that may be other than unpopulated, or size(); skips pages in which all are, though
  // not so many at once that it takes long: then it is the first of a page.
  BlockIndex next_populated(BlockIndex from) const;
  // Blocks in each state, counted as they change (unpopulated: not counted).
  uint64_t count(State state) const { return counts_[static_cast<size_t>(state)]; }
  // Bytes of memory the table may occupy by now. A page whose blocks are unpopulated again is given back before long,
  // with the shadows of their evictions.
  size_t footprint() const { return footprint_; }
  // .. and how much more with block i in use, 0 for most; and at the most, with all of them.
  size_t cost(BlockIndex i) const { return mapped_ == 0 || committed_[i / kChunk] ? 0 : kPage + 1; }
  size_t most() const { return mapped_ == 0 ? footprint_ : (blocks_ + kChunk - 1) / kChunk * (kPage + 2); }
  // Recounts everything and compares: tests call it. Empty when consistent.
  std::string check() const;
  static constexpr uint64_t kChunk = kPage / sizeof(Block);  // blocks: a page of the table

 private:
  void give_back(uint64_t chunk);
  Block* table_ = nullptr;
  uint64_t blocks_ = 0;
  size_t mapped_ = 0;  // bytes, 0 when from calloc
  size_t footprint_ = 0;
  uint8_t* used_ = nullptr;      // of each chunk: blocks other than unpopulated
  std::vector<bool> committed_;  // of each chunk: has memory
  static constexpr uint64_t kNone = UINT64_MAX;
  std::array<uint64_t, 16> empty_;  // chunks that became empty last: kept, for they may soon be wanted again
  size_t next_empty_ = 0;
  uint64_t counts_[static_cast<size_t>(State::count_)] = {};
};

}  // namespace vmem::core
