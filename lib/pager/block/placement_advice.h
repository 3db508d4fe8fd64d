// What the program has said of where blocks of a region are best, and that they are read much more than stored to
// (VMEM_ADVISE_SET_PREFERRED_LOCATION, VMEM_ADVISE_SET_READ_MOSTLY). Advice alone: nothing is refused, moved or kept
// for good because of it. advice.h says what follows from it.
//
//   ranges that say something, in order of their blocks, none of which lies in two; two that meet say different things
//
// Not thread-safe: the pager's lock protects it. set() needs memory; a look takes the logarithm of the ranges.
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
    int16_t preferred = kNowhere;  // a device, or VMEM_HOST
    bool read_mostly = false;
    bool operator==(const Said&) const = default;
  };

  bool empty() const { return ranges_.empty(); }
  Said at(core::BlockIndex b) const;
  // Blocks from b on, to the end of what says the same of all: their last, or `last`.
  core::BlockIndex same_until(core::BlockIndex b, core::BlockIndex last) const;

  // Of [first, last]; kNowhere, false: nothing any more. False: that would be more ranges than are kept, and nothing
  // has changed. Throws bad_alloc, and nothing has changed.
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
