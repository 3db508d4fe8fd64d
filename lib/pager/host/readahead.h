// Reads blocks before they are accessed: the windows of streams, the neighbours of a missed block,
// and what a prefetch asks for. Tells the policies of faults: policy::ReadAhead and
// policy::FaultAround decide what to read.
//
// - Blocks that were read ahead and are not used yet have at most HostBudget::ahead_limit bytes.
//   Those that no stream comes for leave first.
//
// The pager's lock protects both classes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "pager/account/context.h"
#include "pager/block/pooled_list.h"
#include "pager/host/page_in.h"

namespace vmem::pager {

struct HostTier;

struct Speculative {
  Region* region;
  core::BlockIndex next;
  int64_t stride;
  uint64_t count;
  core::BlockIndex marker;  // read-ahead only
  core::Urgency urgency;

  void advance(uint64_t blocks) {
    next = static_cast<core::BlockIndex>(static_cast<int64_t>(next) + static_cast<int64_t>(blocks) * stride);
    count -= blocks;
  }
};

// Queue of blocks to be read before they are accessed: prefetches to host memory and read-ahead
// windows, taken block by block. Also counts the bytes that are being read for it.
//
// - At most kMost entries wait.
// - in_flight() = the blocks of the transitions that read ahead, each counted once.
//
// add() needs memory unless reserve() made room.
class ReadaheadQueue {
 public:
  static constexpr size_t kMost = 1024;

  bool empty() const { return queue_.empty(); }
  size_t size() const { return queue_.size(); }
  Speculative& front() { return queue_.front(); }
  void pop() { queue_.pop_front(); }
  // Makes room for so many entries. Returns false if there is no memory.
  [[nodiscard]] bool reserve(size_t entries) noexcept { return queue_.reserve(entries); }
  // Returns false, and drops the entry, if kMost entries wait or there is no memory.
  [[nodiscard]] bool add(const Speculative& what) { return queue_.size() < kMost && queue_.push_back(what); }
  // Removes what is queued of a run: its reader has passed it, or will not come.
  void forget(const Region& r, const policy::Run& run);
  // Removes the entries of a region that is being freed.
  void forget(const Region& r);

  // Returns true if so many more bytes may be read now. One block always may.
  bool may_start(uint64_t bytes, uint64_t most) const { return in_flight_ == 0 || in_flight_ + bytes <= most; }
  // started(): the transition reads a block ahead. ended(): it has been read, or there was no
  // memory for it; does nothing for other transitions.
  void started(Transition& m);
  void ended(Transition& m);
  uint64_t in_flight() const { return in_flight_; }

  // For tests: recounts the transitions. Returns the first error, or an empty string.
  std::string check(std::span<const std::unique_ptr<Transition>> transitions) const;

 private:
  PooledList<Speculative> queue_;
  uint64_t in_flight_ = 0;  // bytes
};

class Readahead {
 public:
  Readahead(PagerContext& ctx, HostTier& host);

  // A block is accessed. If it was read ahead, counts it as used, and the blocks of its stream
  // before it.
  void used(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // A block is missed, or a marker is met: tells the streams, and queues the next window.
  void follow(Region& r, core::BlockIndex b, bool trigger) VMEM_LOCKED;
  // Block b is being read for a fault, and `reads` has its transition. If the region is used in
  // larger pieces, adds reads of the blocks beside b.
  void read_beside(Region& r, core::BlockIndex b, TransitionList& reads) VMEM_LOCKED;

  // speculate() queues blocks to be read. pump_speculative() begins as many reads as there is room
  // for.
  void speculate(Region& r, const policy::Window& w, core::Urgency urgency) VMEM_LOCKED;
  void pump_speculative(DeferredWork& after) VMEM_LOCKED;

 private:
  void pass(Region& r, const policy::Run& run, bool used) VMEM_LOCKED;
  void give_up_idle(uint64_t bytes) VMEM_LOCKED;
  void drop_behind(Region& r) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  // The clock at the last search for idle streams.
  uint64_t looked_ahead_ VMEM_GUARDED_BY(core::big_lock) = 0;
};

// Limits of a region's I/O buffers, in bytes.
// - least_bounce(): the least that it needs. A compressed block that is copied needs two buffers at
//   once, to read into and to decode into. With fewer, its fault could never be served.
// - bounce_limit(): the most that it may have. Small blocks are read many at a time: there is room
//   for one round of read-ahead, and as much again for faults and staged blocks.
uint64_t least_bounce(const Region& r);
uint64_t bounce_limit(const Region& r, const PagerContext& ctx) VMEM_LOCKED;

}  // namespace vmem::pager
