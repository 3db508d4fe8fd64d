#include "pager/block/placement_advice.h"

#include <algorithm>

namespace vmem::pager {

// Returns the first range that ends at b or later.
PlacementAdvice::Ranges::const_iterator PlacementAdvice::from(BlockIndex b) const {
  return std::lower_bound(ranges_.begin(), ranges_.end(), b,
                          [](const Range& range, BlockIndex block) { return range.last < block; });
}

PlacementAdvice::Said PlacementAdvice::at(BlockIndex b) const {
  const auto range = from(b);
  return range != ranges_.end() && range->first <= b ? range->said : Said();
}

BlockIndex PlacementAdvice::same_until(BlockIndex b, BlockIndex last) const {
  const auto range = from(b);
  if (range == ranges_.end()) return last;
  return std::min(last, range->first <= b ? range->last : range->first - 1);
}

void PlacementAdvice::add(Ranges& to, const Range& range) {
  if (range.said == Said()) return;
  if (!to.empty() && to.back().last + 1 == range.first && to.back().said == range.said) {
    to.back().last = range.last;
  } else {
    to.push_back(range);
  }
}

template <typename Change>
bool PlacementAdvice::change(BlockIndex first, BlockIndex last, Change how) {
  Ranges all;
  all.reserve(ranges_.size() + 4);
  for (const Range& range : ranges_) {
    if (range.first < first) add(all, {range.first, std::min(range.last, first - 1), range.said});
  }
  for (BlockIndex b = first; b <= last;) {
    const BlockIndex end = same_until(b, last);
    Said said = at(b);
    how(said);
    add(all, {b, end, said});
    b = end + 1;
  }
  for (const Range& range : ranges_) {
    if (range.last > last) add(all, {std::max(range.first, last + 1), range.last, range.said});
  }
  if (all.size() > kMost && all.size() > ranges_.size()) return false;
  ranges_.swap(all);
  return true;
}

bool PlacementAdvice::prefer(BlockIndex first, BlockIndex last, int16_t location) {
  return change(first, last, [&](Said& said) { said.preferred = location; });
}

bool PlacementAdvice::set_read_mostly(BlockIndex first, BlockIndex last, bool on) {
  return change(first, last, [&](Said& said) { said.read_mostly = on; });
}

}  // namespace vmem::pager
