// The leases of a region, as ranges of blocks whose leases are the same: one lease of a million
// blocks is one range. Not thread-safe: the pager's lock protects it.
//
// - Ranges are in order and disjoint.
// - Each range has leases, all at one location and each of another stream. Each lease counts an
//   acquire or a pending release.
// - Two adjacent ranges differ in their leases, or an acquire that was not released, or a pending
//   release, begins or ends between them. So a caller that takes back exactly what it acquired
//   finds both ends, and needs no memory. Only a release of a part divides a range.
//
// divide() and prepare() get the memory that may be refused, before anything changes. A call costs
// O(ranges touched).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/os_allocator.h"
#include "core/types.h"
#include "vmem/vmem.h"

namespace vmem::pager {

// One stream's claim on a block. Leases at the host belong to no stream. `count` is acquires minus
// releases. A release at a device is `pending` until the stream reaches it, and the lease ends with
// the last one.
struct Lease {
  int location;
  void* stream;
  unsigned access = 0;  // of all its acquires: a release may not say which of them it ends
  uint32_t count = 0;
  uint32_t pending = 0;
  unsigned ended = 0;              // access of the pending releases: the stream may still use it
  uint32_t reads = 0, writes = 0;  // acquires with each bit of `access`

  bool operator==(const Lease&) const = default;
  void grant(unsigned asked) {
    access |= asked;
    ++count;
    reads += (asked & VMEM_READ) != 0;
    writes += (asked & VMEM_WRITE) != 0;
  }
  // Undoes a grant(), of an acquire that is refused.
  void take_back(unsigned asked) {
    --count;
    if ((asked & VMEM_READ) != 0 && reads != 0 && --reads == 0) access &= ~VMEM_READ;
    if ((asked & VMEM_WRITE) != 0 && writes != 0 && --writes == 0) access &= ~VMEM_WRITE;
    settle();
  }
  // asked: the access of the acquire that ends; 0: not known.
  void release(unsigned asked) {
    if (asked != 0) return take_back(asked);
    --count;
    settle();
  }
  // Undoes a release(). The access that it ended may count once too often.
  void revive(unsigned asked) {
    access |= ended | asked;
    ++count;
    const unsigned again = asked != 0 ? asked : access;
    reads += (again & VMEM_READ) != 0;
    writes += (again & VMEM_WRITE) != 0;
    settle();
  }

 private:
  // Makes leases that mean the same equal: `reads` and `writes` are at most `count`, and without
  // acquires `access` is the access that still ends.
  void settle() {
    if (count == 0 && pending != 0) access = ended;
    reads = std::min(reads, count);
    writes = std::min(writes, count);
  }
};
using Leases = core::OwnVector<Lease>;

class LeaseMap {
 public:
  using BlockIndex = core::BlockIndex;

  bool empty() const { return ranges_.empty(); }
  uint64_t blocks() const { return blocks_; }  // leased blocks
  size_t ranges() const { return ranges_.size(); }
  size_t bytes() const;                    // of memory, spares included
  const Leases* find(BlockIndex b) const;  // null: none
  bool leased(BlockIndex b) const { return !ranges_.empty() && find(b) != nullptr; }
  uint64_t leased(BlockIndex first, BlockIndex last) const;  // leased blocks of the range
  // Calls visit(first, last, leases) for each leased part of the range, in order. Stops and returns
  // false when visit() does.
  template <typename Visit>
  bool visit(BlockIndex first, BlockIndex last, Visit visit) const {
    for (auto i = at(first); i != ranges_.end() && i->first <= last; ++i) {
      if (!visit(std::max(first, i->first), std::min(last, i->second.last), i->second.leases)) return false;
    }
    return true;
  }

  // How many blocks a call changed. All are at one location.
  struct Change {
    uint64_t leased = 0;  // got their first lease, or lost their last one
    uint64_t ending = 0;  // had only pending releases before, or have only those now
  };
  // Gets the memory for an acquire of the range by the stream. Returns false if there is none;
  // callers see no change then.
  [[nodiscard]] bool prepare(BlockIndex first, BlockIndex last, void* stream) noexcept;
  // Call after prepare(). All existing leases of the range must be at `location`.
  Change acquire(BlockIndex first, BlockIndex last, int location, void* stream, unsigned access) noexcept;
  // Undoes an acquire(). Blocks that other callers released since stay released.
  Change take_back(BlockIndex first, BlockIndex last, int location, void* stream, unsigned access) noexcept;

  // A release makes these calls, under one hold of the lock:
  // - divide() of each range, which gets the memory; it returns false if there is none.
  // - unleased(): the first block that has no live lease of the stream, or last + 1.
  // - release(), which takes one acquire of each block away; at a device the release is pending
  //   from here on. asked: the access of the acquires that end, if known, as a handle knows it;
  //   else 0.
  // - join() of each range, also if a call failed. It removes leases that have ended at the host,
  //   and returns how many blocks lost their last lease.
  [[nodiscard]] bool divide(BlockIndex first, BlockIndex last) noexcept;
  BlockIndex unleased(BlockIndex first, BlockIndex last, void* stream) const;
  Change release(BlockIndex first, BlockIndex last, void* stream, unsigned asked = 0) noexcept;
  uint64_t join(BlockIndex first, BlockIndex last) noexcept;
  // Undoes one release() of the same blocks. Call join() after it, as above.
  Change revive(BlockIndex first, BlockIndex last, void* stream, unsigned asked = 0) noexcept;
  // The stream has reached one release() of the same blocks, all at a device.
  Change end(BlockIndex first, BlockIndex last, void* stream) noexcept;

  std::string check() const;  // for tests: what is wrong, or an empty string

 private:
  struct Ends {
    uint32_t acquires = 0, pending = 0;
  };
  struct Range {
    BlockIndex last = 0;
    Leases leases;
    Ends begins, ends;  // acquires and pending releases that begin at its first block, or end at its last
  };
  using Ranges = core::OwnMap<BlockIndex, Range>;

  Ranges::const_iterator at(BlockIndex b) const;  // the first that does not end before b
  Ranges::iterator at(BlockIndex b);
  void grow(Leases& leases, size_t room);
  void spare(size_t count, size_t width);
  void forget(Ranges::iterator range) noexcept;
  void trim() noexcept;
  void cut(BlockIndex b) noexcept;
  template <typename Each>
  void each(BlockIndex first, BlockIndex last, Each each) noexcept;
  template <typename At>
  void at_ends(BlockIndex first, BlockIndex last, At at_end) noexcept;

  static constexpr size_t kSpares = 8;  // spares kept while there are ranges
  Ranges ranges_;                       // by first block
  core::OwnVector<Ranges::node_type> spares_;
  uint64_t blocks_ = 0;
  size_t freed_ = 0;  // capacity for leases, of all ranges and spares
};

}  // namespace vmem::pager
