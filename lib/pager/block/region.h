// What the pager knows of one region. Protected by the pager's lock unless a field says otherwise.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <new>
#include <string>

#include "core/break.h"
#include "core/guarded_read.h"
#include "core/inherited.h"
#include "core/os_allocator.h"
#include "core/types.h"
#include "pager/block/block_table.h"
#include "pager/block/lease_map.h"
#include "pager/block/names.h"
#include "pager/block/placement_advice.h"
#include "policy/eviction_policy.h"
#include "policy/fault_around.h"
#include "policy/heat.h"
#include "policy/readahead.h"
#include "store/codec.h"
#include "store/file.h"
#include "trap/trap.h"
#include "vmem/vmem.h"

namespace vmem::pager {

enum class Backing : uint8_t {
  anonymous,     // zeros; blocks go to the store
  file_read,     // a file's bytes; never written
  file_shared,   // changes go to the file
  file_private,  // changes go to the store
};

struct AdvisedRange {
  core::BlockIndex first, last;
  policy::Temperature temperature;
  bool pinned;
};

// What a region is to be.
struct RegionSpec {
  size_t size = 0;
  size_t block_size = 0;
  Backing backing = Backing::anonymous;
  store::Codec codec = store::Codec::raw;
  std::string path;  // files
  uint64_t offset = 0;
  bool host_only = false;                          // no device tier, also where there is one
  bool fixed_block_size = false;                   // block_size was asked for, for this region
  policy::Access access = policy::Access::normal;  // advised with it
  size_t device_block = 0;  // .. of its device tier, as RegionCreate::device_block() has it; 0: none
  bool adapts = false;      // .. or the blocks are to be small and read together where that is how they are used
  int checksum = 0;         // 1, -1: verified or not; 0: as the setting has it
  int core_dump = 0;        // 1, -1: what is in host memory goes into core dumps, or does not; 0: as the trap has it
  uintptr_t address = 0;    // where, if nothing is there; 0: anywhere
  bool fixed = false;       // .. exactly there, in the place of a reservation of the caller's
  bool lock = true;         // file_shared: the file is locked
  bool says_size() const { return fixed_block_size && !adapts; }
};

struct Region {
  Region(uint64_t blocks_, uint32_t max_window, uint32_t group = 1)
      : readahead(blocks_, max_window), fault_around(blocks_, group), adapts(group > 1) {}

  // Fixed at creation; any thread that keeps the region alive may read them.
  uint64_t id = 0;
  std::byte* base = nullptr;
  core::NotedAddresses noted;  // for forked children
  size_t size = 0;             // bytes the caller asked for
  size_t span = 0;             // bytes of address space: blocks * block_size
  size_t block_size = 0;
  uint64_t blocks = 0;
  Backing backing = Backing::anonymous;
  trap::Transfer transfer = trap::Transfer::move;
  store::Codec codec = store::Codec::raw;
  int checksum = 0;  // as RegionSpec has it
  bool probes = false;
  bool bounces = false;   // its blocks need bounce buffers
  bool reserved = false;  // its addresses are a reservation of the caller's, who gets that back
  bool gpu = false;       // has a device tier: one managed range, whose units are its blocks
  store::MappedFile file;
  store::FileId file_id = 0;
  bool has_file = false;
  uint64_t file_offset = 0;
  bool sparse = false;  // the file may have holes
  // Writes of its file fail: none is begun for its own sake before this time. So many tries in a row have failed.
  uint64_t refused_until_ns = 0;
  unsigned refusals = 0;
  core::Status refusal;      // .. the last one
  core::Status write_error;  // .. the first one that no call has told of
  // The program has changed the rights of a part of it once: read where it stands by read_guarded(). Any thread.
  mutable std::atomic<bool> guarded = false;
  core::Absent absent = core::Absent::zeros;  // .. what a page is that is not mapped
  // Blocks where a hole was when somebody last looked: not worth reading ahead. A fault looks again.
  core::BlockIndex hole_first = 0, hole_end = 0;

  core::BlockTable table;
  size_t table_charged = 0;      // its footprint, or what it was granted
  size_t table_granted = 0;      // .. when it was made
  uint64_t reserved_blocks = 0;  // there is memory to move so many at once
  uint64_t stored_span = 0;      // .. and so many bytes in the store
  policy::ReadAhead readahead;
  policy::FaultAround fault_around;
  bool adapts = false;  // a fault reads what `fault_around` says beside its block
  policy::Heat heat;
  policy::Access access = policy::Access::normal;
  policy::Priority priority = policy::Priority::normal;
  core::OwnString name;
  uint8_t stores_in_row = 0;  // first accesses of blocks, since one of them was a load
  LeaseMap leases;
  size_t leases_charged = 0;                                 // bytes
  core::OwnHashMap<core::BlockIndex, core::Status> reasons;  // why a block is poisoned
  uint64_t granted = 0;                                      // leases, ever
  uint64_t arrived = 0;                                      // blocks at a device, ever
  uint64_t issued = 0;                                       // of those promoting: their copies are issued
  uint32_t asked = 0;         // ranges of acquires that were asked for and have not begun
  uint32_t kernels = 0;       // ranges that are open to kernels that ask
  uint64_t in_flight = 0;     // blocks in a transition, and threads that use the region outside the lock
  uint64_t unread = 0;        // blocks with kUnread
  uint64_t device_stale = 0;  // blocks on a device whose copy in host memory is newer
  bool dying = false;
  bool quiet = false;                     // dying, and nobody uses it any more: detach() answers every access
  bool unfinished = false;                // at exit: blocks were left that did not come to rest
  uint64_t told_at_exit = 0;              // `granted` + 1 when a stream's work under a live lease was given up
  bool read_mostly = false;               // advised so: host pages beside a device's are what the program wants
  bool lost = false;                      // its device was reset: the addresses are nobody's any more
  core::OwnVector<AdvisedRange> advised;  // cold, hot, pin; the last that covers a block counts
  PlacementAdvice places;                 // what follows from both: advice.h

  std::byte* address(core::BlockIndex b) const { return base + b * block_size; }
  core::BlockIndex index(const void* p) const {
    return static_cast<size_t>(static_cast<const std::byte*>(p) - base) / block_size;
  }
  bool writable() const { return backing != Backing::file_read; }
  // Bytes of block b that the file holds (file regions): less than block_size in the last block only.
  size_t file_bytes(core::BlockIndex b) const {
    const uint64_t from = b * block_size;
    return from >= size ? 0 : std::min<uint64_t>(block_size, size - from);
  }
  bool in_hole(core::BlockIndex b) const { return b >= hole_first && b < hole_end; }
  // Why a block is poisoned. Without memory for them the words are lost, and what they say of the block is not.
  void keep_reason(core::BlockIndex b, const core::Status& why) noexcept try {
    reasons[b] = why;
  } catch (const std::bad_alloc&) {
  }
  core::Status reason(core::BlockIndex b) const {
    const auto at = reasons.find(b);
    return at != reasons.end() ? at->second : core::error(EIO, "the log says why");
  }
  // True when an absent block in state unpopulated has its bytes in the file.
  bool from_file() const { return backing != Backing::anonymous; }
};

// Its file has refused a write lately, and is not asked again yet.
inline bool file_refuses(const Region& r, uint64_t now_ns) {
  return now_ns < r.refused_until_ns;
}

// Somebody leases it, wherever.
inline bool leased(const Region& r, core::BlockIndex b) {
  return r.leases.leased(b);
}

// What was advised of it last.
inline policy::Temperature temperature(const Region& r, core::BlockIndex b, bool* pinned) {
  for (auto it = r.advised.rbegin(); it != r.advised.rend(); ++it) {
    if (b < it->first || b > it->last) continue;
    *pinned = it->pinned;
    return it->temperature;
  }
  *pinned = false;
  return policy::Temperature::normal;
}

// Whether a thread of ours may load from [from, from + size), of one block, at this moment: nobody has changed the
// rights of a part of the region, or made a guard page there. Regions with a device tier lie in several mappings: of
// the block. What is found holds for the region's life, but for pages that may have been swapped out.
inline bool may_load(const core::MappingQuery& mappings, const Region& r, const std::byte* from, size_t size) {
  using Marks = core::MappingQuery::Marks;
  if (r.guarded) return false;
  const bool plain = r.gpu ? mappings.plain(r.address(r.index(from)), r.block_size) : mappings.plain(r.base, r.span);
  const Marks marks = plain ? mappings.marks(from, size) : Marks::guards;
  if (marks == Marks::guards) r.guarded = true;
  return marks == Marks::none;
}

// What the store or the file has is certainly the same.
inline bool proven_clean(const core::Block& block) {
  return (block.flags & (core::kDirty | core::kUnknown)) == 0;
}

// The policy is to hold the block: nobody evicts what is leased.
inline bool holds_for_lease(const Region& r, core::BlockIndex b) {
  return r.leases.leased(b) && !core::broken("lease_hold");
}

// Some stream may write to it, or its writes have not been reached.
inline bool lent_for_writing(const Region& r, core::BlockIndex b) {
  const Leases* leases = r.leases.find(b);
  return leases != nullptr && std::any_of(leases->begin(), leases->end(),
                                          [](const Lease& l) { return ((l.access | l.ended) & VMEM_WRITE) != 0; });
}

// A stream has not come to a release after which its writes are complete.
inline bool awaits_writes(const Region& r, core::BlockIndex b) {
  const Leases* leases = r.leases.find(b);
  return leases != nullptr && std::any_of(leases->begin(), leases->end(),
                                          [](const Lease& l) { return l.count == 0 && (l.ended & VMEM_WRITE) != 0; });
}

// The file itself where the block lies, as far as the file goes.
inline core::Status map_file(trap::Trap& trap, const Region& r, core::BlockIndex b) {
  return trap.map_file(r.address(b), core::round_up(r.file_bytes(b), core::kPage), r.file.file.fd,
                       r.file_offset + b * r.block_size, r.backing == Backing::file_shared);
}

}  // namespace vmem::pager
