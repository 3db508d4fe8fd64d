// Which blocks of a region are leased, and by whom, as ranges of blocks whose leases are the same: one lease of a
// million blocks is one range. Not thread-safe: the pager's lock protects it.
//
// Invariant: ranges are in order and disjoint, each has leases, all at one location and each of another stream, and
// every lease counts an acquire or a pending release. Two ranges that touch differ in their leases, or an acquire that
// was not released, or a pending release, begins or ends between them. So whoever takes back exactly what it acquired
// finds both its ends, and needs no memory for that; only who releases a part of it divides a range.
//
// Memory that may be refused is had by divide() and prepare(), before anything changes. A call costs O(ranges touched).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/os_allocator.h"
#include "core/types.h"
#include "vmem/vmem.h"

namespace vmem::pager {

// One stream's claim on a block; host memory's leases are of no stream. `count` acquires minus releases. A device lease
// whose releases have all been called ends when the stream gets there: until then it is one of `pending`.
struct Lease {
  int location;
  void* stream;
  unsigned access = 0;  // union of all its acquires: a release does not say which of them it ends
  uint32_t count = 0;
  uint32_t pending = 0;
  unsigned ended = 0;              // access of the pending releases: the stream may still do that
  uint32_t reads = 0, writes = 0;  // acquires that made up `access`

  bool operator==(const Lease&) const = default;
  void grant(unsigned asked) {
    access |= asked;
    ++count;
    reads += (asked & VMEM_READ) != 0;
    writes += (asked & VMEM_WRITE) != 0;
  }
  // What a refused acquire had been granted: the lease is as it was before.
  void take_back(unsigned asked) {
    --count;
    if ((asked & VMEM_READ) != 0 && reads != 0 && --reads == 0) access &= ~VMEM_READ;
    if ((asked & VMEM_WRITE) != 0 && writes != 0 && --writes == 0) access &= ~VMEM_WRITE;
    settle();
  }
  // asked: of the acquire that is ended; 0: not known.
  void release(unsigned asked) {
    if (asked != 0) return take_back(asked);
    --count;
    settle();
  }
  // A release that was not to be. What it ended may count once too often.
  void revive(unsigned asked) {
    access |= ended | asked;
    ++count;
    const unsigned again = asked != 0 ? asked : access;
    reads += (again & VMEM_READ) != 0;
    writes += (again & VMEM_WRITE) != 0;
    settle();
  }

 private:
  // Leases which mean the same are equal: no more of either than there are acquires, and without any what still ends.
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
  uint64_t blocks() const { return blocks_; }  // that are leased
  size_t ranges() const { return ranges_.size(); }
  size_t bytes() const;                    // of memory, what is kept in reserve included
  const Leases* find(BlockIndex b) const;  // null: none
  bool leased(BlockIndex b) const { return !ranges_.empty() && find(b) != nullptr; }
  uint64_t leased(BlockIndex first, BlockIndex last) const;  // how many of them
  // Calls visit(first, last, leases) for what is leased of the range, in order, until it returns false. False then.
  template <typename Visit>
  bool visit(BlockIndex first, BlockIndex last, Visit visit) const {
    for (auto i = at(first); i != ranges_.end() && i->first <= last; ++i) {
      if (!visit(std::max(first, i->first), std::min(last, i->second.last), i->second.leases)) return false;
    }
    return true;
  }

  // How many blocks changed, of one location.
  struct Change {
    uint64_t leased = 0;  // came under their first lease, or lost their last one
    uint64_t ending = 0;  // have had pending releases alone, or have nothing else now
  };
  // Memory for an acquire of the range by the stream. False: there was none, and nobody sees a change.
  [[nodiscard]] bool prepare(BlockIndex first, BlockIndex last, void* stream) noexcept;
  // After prepare(); whatever is leased of the range is leased at `location`.
  Change acquire(BlockIndex first, BlockIndex last, int location, void* stream, unsigned access) noexcept;
  // The acquire is as if it had never been. What somebody else has released meanwhile stays released.
  Change take_back(BlockIndex first, BlockIndex last, int location, void* stream, unsigned access) noexcept;

  // A release, under one hold of the lock: divide() of each range, which has the memory; false: there was none. Then
  // unleased(), the first block that has no live lease of the stream, or last + 1, and release(), which takes one
  // acquire of each block away: at a device it is pending from here on. At last join() of each, whatever came of it: it
  // forgets host leases that nobody has any more, and says how many blocks lost theirs. asked: the access of the
  // acquires that are ended, where it is known, as a handle knows it; else 0.
  [[nodiscard]] bool divide(BlockIndex first, BlockIndex last) noexcept;
  BlockIndex unleased(BlockIndex first, BlockIndex last, void* stream) const;
  Change release(BlockIndex first, BlockIndex last, void* stream, unsigned asked = 0) noexcept;
  uint64_t join(BlockIndex first, BlockIndex last) noexcept;
  // What one release() of the same blocks took away is there again. After it join(), as above.
  Change revive(BlockIndex first, BlockIndex last, void* stream, unsigned asked = 0) noexcept;
  // The stream has got to one release() of the same blocks, which were all at a device.
  Change end(BlockIndex first, BlockIndex last, void* stream) noexcept;

  std::string check() const;  // tests: empty when the invariant holds

 private:
  struct Ends {
    uint32_t acquires = 0, pending = 0;
  };
  struct Range {
    BlockIndex last = 0;
    Leases leases;
    Ends begins, ends;  // acquires and pending releases that begin with its first block, that end with its last
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

  static constexpr size_t kSpares = 8;  // kept when they are not needed
  Ranges ranges_;                       // by their first blocks
  core::OwnVector<Ranges::node_type> spares_;
  uint64_t blocks_ = 0;
  size_t freed_ = 0;  // for leases, of all ranges and spares
};

}  // namespace vmem::pager
