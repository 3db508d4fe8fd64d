// One region. The pager's lock protects it unless a field says otherwise.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <new>
#include <string>

#include "core/break.h"
#include "core/os_allocator.h"
#include "core/process/guarded_read.h"
#include "core/process/inherited.h"
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
#include "store/io_request.h"
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

// Describes a region that is to be made.
struct RegionSpec {
  size_t size = 0;
  size_t block_size = 0;
  Backing backing = Backing::anonymous;
  store::Codec codec = store::Codec::raw;
  std::string path;  // files
  uint64_t offset = 0;
  bool host_only = false;         // no device tier, even if the process has one
  bool fixed_block_size = false;  // block_size was given for this region
  int advice = 0;                 // one of enum vmem_advice, given with it; 0: none
  size_t device_block = 0;        // block size on devices (RegionCreate::device_block()); 0: no device tier
  bool adapts = false;            // small blocks; a fault reads as many together as their use suggests
  int checksum = 0;               // 1, -1: verified or not; 0: as the setting says
  int core_dump = 0;              // 1, -1: its host memory goes into core dumps, or not; 0: as the trap says
  uintptr_t address = 0;          // wanted, if nothing is mapped there; 0: any
  bool fixed = false;             // exactly at `address`, in place of a reservation of the caller
  bool lock = true;               // file_shared: the file is locked
  bool says_size() const { return fixed_block_size && !adapts; }
};

// The file of a region that has one.
struct RegionFile {
  store::MappedFile file;
  store::FileId id = 0;
  bool present = false;
  uint64_t offset = 0;
  bool sparse = false;  // the file may have holes
  // Blocks in a hole of the file, when it was last looked at. They are not read ahead. A fault
  // looks again.
  core::BlockIndex hole_first = 0, hole_end = 0;
  // Writes of the file fail: no eviction or background write of it begins before this time.
  uint64_t refused_until_ns = 0;
  unsigned refusals = 0;     // tries in a row that failed
  core::Status refusal;      // the last failure
  core::Status write_error;  // the first failure that no call has reported
};
// Memory that is charged for a region.
struct RegionCharge {
  size_t table = 0;              // bytes: the larger of the table's footprint and table_granted
  size_t table_granted = 0;      // bytes that are charged from the start
  size_t leases = 0;             // bytes
  uint64_t reserved_blocks = 0;  // so many can move at once without more memory
  uint64_t stored_span = 0;      // bytes for which the store has reserved memory
};
struct RegionCounts {
  uint64_t in_flight = 0;     // blocks in a transition, and threads that use the region outside the lock
  uint64_t granted = 0;       // leases that were ever granted
  uint64_t arrived = 0;       // blocks that ever came to rest on a device
  uint64_t issued = 0;        // promoting blocks whose copies are issued
  uint32_t asked = 0;         // ranges of asynchronous acquires that have not returned
  uint32_t kernels = 0;       // ranges open to kernels that ask for blocks
  uint64_t unread = 0;        // blocks with kUnread
  uint64_t device_stale = 0;  // blocks on a device whose copy in host memory is newer
  uint64_t told_at_exit = 0;  // at exit: `granted` + 1 when the wait for a live lease's stream was given up
};
// How the region was used so far, and what is read beside a fault for that.
struct RegionUse {
  RegionUse(uint64_t blocks, uint32_t max_window, uint32_t group)
      : readahead(blocks, max_window), fault_around(blocks, group), adapts(group > 1) {}
  policy::ReadAhead readahead;
  policy::FaultAround fault_around;
  bool adapts = false;  // a fault also reads the blocks that `fault_around` says
  policy::Heat heat;
  uint8_t stores_in_row = 0;  // first accesses of blocks that were stores, since the last load
};
// The program's advice.
struct RegionAdvice {
  policy::Access access = policy::Access::normal;
  policy::Priority priority = policy::Priority::normal;
  bool read_mostly = false;               // the program wants host pages beside those of a device
  core::OwnVector<AdvisedRange> advised;  // cold, hot, pin; the last that covers a block counts
  PlacementAdvice places;                 // advice.h has the effects of both
};

struct Region {
  Region(uint64_t blocks_, uint32_t max_window, uint32_t group = 1) : use(blocks_, max_window, group) {}

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
  int checksum = 0;  // as in RegionSpec
  bool probes = false;
  bool bounces = false;   // its blocks need bounce buffers
  bool reserved = false;  // its addresses are a reservation of the caller, which is mapped again at the end
  bool gpu = false;       // has a device tier: one range on the devices, whose units are its blocks
  // The program has once changed the rights of a part of it: blocks in place are read by
  // read_guarded(). Any thread.
  mutable std::atomic<bool> guarded = false;
  core::Absent absent = core::Absent::zeros;  // what an unmapped page of a block in place contains

  core::BlockTable table;
  core::OwnString name;
  LeaseMap leases;
  core::OwnHashMap<core::BlockIndex, core::Status> reasons;  // why a block is poisoned
  bool dying = false;
  bool quiet = false;       // dying, and no thread uses it any more: detach() answers every access
  bool unfinished = false;  // at exit: some blocks did not come to rest
  bool lost = false;        // its device was reset, and its addresses are gone
  RegionFile source;
  RegionCharge charge;
  RegionCounts counts;
  RegionUse use;
  RegionAdvice advice;

  std::byte* address(core::BlockIndex b) const { return base + b * block_size; }
  core::BlockIndex index(const void* p) const {
    return static_cast<size_t>(static_cast<const std::byte*>(p) - base) / block_size;
  }
  bool writable() const { return backing != Backing::file_read; }
  // Bytes of block b that the file holds (file regions): less than block_size in the last block
  // only.
  size_t file_bytes(core::BlockIndex b) const {
    const uint64_t from = b * block_size;
    return from >= size ? 0 : std::min<uint64_t>(block_size, size - from);
  }
  bool in_hole(core::BlockIndex b) const { return b >= source.hole_first && b < source.hole_end; }
  // Keeps the reason why a block is poisoned. Without memory only the text is lost.
  void keep_reason(core::BlockIndex b, const core::Status& why) noexcept try {
    reasons[b] = why;
  } catch (const std::bad_alloc&) {
  }
  core::Status reason(core::BlockIndex b) const {
    const auto at = reasons.find(b);
    return at != reasons.end() ? at->second : core::error(EIO, "the log says why");
  }
  // Whether an unpopulated block has its bytes in the file.
  bool from_file() const { return backing != Backing::anonymous; }
};

// Whether its file refused a write lately, so that it is not written yet.
inline bool file_refuses(const Region& r, uint64_t now_ns) {
  return now_ns < r.source.refused_until_ns;
}

// Whether the block is leased, at any location.
inline bool leased(const Region& r, core::BlockIndex b) {
  return r.leases.leased(b);
}

// Returns the temperature that was advised last.
inline policy::Temperature temperature(const Region& r, core::BlockIndex b, bool* pinned) {
  for (auto it = r.advice.advised.rbegin(); it != r.advice.advised.rend(); ++it) {
    if (b < it->first || b > it->last) continue;
    *pinned = it->pinned;
    return it->temperature;
  }
  *pinned = false;
  return policy::Temperature::normal;
}

// Whether a library thread may load from [from, from + size), inside one block, at this moment. It
// may not if the program has changed the rights of a part of the region, or made a guard page
// there. (A region with a device tier lies in several mappings: only the rights of the block
// count.) A refusal holds for the region's life, unless its cause may be pages that were swapped
// out.
inline bool may_load(const core::MappingQuery& mappings, const Region& r, const std::byte* from, size_t size) {
  using Marks = core::MappingQuery::Marks;
  if (r.guarded) return false;
  const bool plain = r.gpu ? mappings.plain(r.address(r.index(from)), r.block_size) : mappings.plain(r.base, r.span);
  const Marks marks = plain ? mappings.marks(from, size) : Marks::guards;
  if (marks == Marks::guards) r.guarded = true;
  return marks == Marks::none;
}

// Whether the store or the file certainly has the same bytes.
inline bool proven_clean(const core::Block& block) {
  return (block.flags & (core::kDirty | core::kUnknown)) == 0;
}

// Whether the policy must hold the block: a leased block is not evicted.
inline bool holds_for_lease(const Region& r, core::BlockIndex b) {
  return r.leases.leased(b) && !core::broken("lease_hold");
}

// Whether the block has a WRITE lease, or a pending release of one.
inline bool lent_for_writing(const Region& r, core::BlockIndex b) {
  const Leases* leases = r.leases.find(b);
  return leases != nullptr && std::any_of(leases->begin(), leases->end(),
                                          [](const Lease& l) { return ((l.access | l.ended) & VMEM_WRITE) != 0; });
}

// Whether a live WRITE lease holds the block on a device, whose work may store to it.
inline bool live_on_device(const Region& r, core::BlockIndex b) {
  const Leases* leases = r.leases.find(b);
  return leases != nullptr && std::any_of(leases->begin(), leases->end(), [](const Lease& l) {
           return l.location >= 0 && l.count != 0 && (l.access & VMEM_WRITE) != 0;
         });
}

// Whether a stream has yet to reach the release after which its writes are complete.
inline bool awaits_writes(const Region& r, core::BlockIndex b) {
  const Leases* leases = r.leases.find(b);
  return leases != nullptr && std::any_of(leases->begin(), leases->end(),
                                          [](const Lease& l) { return l.count == 0 && (l.ended & VMEM_WRITE) != 0; });
}

// Maps the file itself in the block's place, up to the end of the region's part of the file.
inline core::Status map_file(trap::Trap& trap, const Region& r, core::BlockIndex b) {
  return trap.map_file(r.address(b), core::round_up(r.file_bytes(b), core::kPage), r.source.file.file.fd,
                       r.source.offset + b * r.block_size, r.backing == Backing::file_shared);
}

}  // namespace vmem::pager
