// The advised location of a region's blocks, and the advice that they are read much more than
// stored to (VMEM_ADVISE_SET_PREFERRED_LOCATION, VMEM_ADVISE_SET_READ_MOSTLY). It is only advice:
// no call is refused, and no block is moved or kept for good because of it. advice.h has its
// effects.
//
// - Ranges are in order and disjoint, and each says something. Adjacent ranges say different
//   things.
//
// Not thread-safe: the pager's lock protects it. prefer() and set_read_mostly() need memory. A
// lookup takes time logarithmic in the number of ranges.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/os_allocator.h"
#include "pager/block/names.h"

namespace vmem::pager {

class PlacementAdvice {
 public:
  static constexpr int16_t kNowhere = INT16_MIN;
  static constexpr size_t kMost = 256;  // ranges

  struct Said {
    int16_t preferred = kNowhere;  // a device, VMEM_HOST or kNowhere
    bool read_mostly = false;
    bool operator==(const Said&) const = default;
  };

  bool empty() const { return ranges_.empty(); }
  Said at(core::BlockIndex b) const;
  // Returns the last of the blocks from b on that have the same advice as b, at most `last`.
  core::BlockIndex same_until(core::BlockIndex b, core::BlockIndex last) const;

  // Set the advice of [first, last]; kNowhere and false take it back. Return false if that would
  // make more than kMost ranges. May throw bad_alloc. In both cases nothing has changed.
  bool prefer(core::BlockIndex first, core::BlockIndex last, int16_t location);
  bool set_read_mostly(core::BlockIndex first, core::BlockIndex last, bool on);

  size_t ranges() const { return ranges_.size(); }

 private:
  struct Range {
    core::BlockIndex first, last;
    Said said;
  };
  using Ranges = core::OwnVector<Range>;
  static void add(Ranges& to, const Range& range);
  template <typename Change>
  bool change(core::BlockIndex first, core::BlockIndex last, Change how);
  Ranges::const_iterator from(core::BlockIndex b) const;

  Ranges ranges_;
};

}  // namespace vmem::pager
