// What is known of a block on a device that may change there.
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;

// Locked. What the device has may differ from the SSD and from any copy from here on.
void Pager::will_change(Region& r, BlockIndex b) {
  Block& block = r.table[b];
  block.flags |= core::kDirty;
  map_.residents()[block.aux].changed = true;
  map_.residents()[block.aux].undecided = false;
  map_.residents()[block.aux].saved = false;
  map_.copies().drop(block.aux);
}

// Locked. .. unless not_changed() says otherwise, which whoever has the lease is to do, or it has changed.
void Pager::may_change(Region& r, BlockIndex b) {
  Block& block = r.table[b];
  Resident& resident = map_.residents()[block.aux];
  // Somebody else's lease is undecided, or was never decided.
  if (resident.changed) return will_change(r, b);
  resident.undecided = resident.changed = true;
  resident.was_dirty = (block.flags & core::kDirty) != 0;
  resident.saved = false;
  block.flags |= core::kDirty;
}

// Blocks that are leased for writing by an ask that tells of stores, and that nobody has stored to.
void Pager::not_changed(std::span<const vmem_range> ranges, int d) {
  Lock lock(map_.mutex());
  SpanOf span;
  for (const vmem_range& range : ranges) {
    if (!map_.check_range(range.ptr, range.size, &span).ok()) continue;
    Region& r = *span.region;
    for (BlockIndex b = span.first; b <= span.last; ++b) {
      Block& block = r.table[b];
      if (!core::on_a_device(block.state) || block.device != d) continue;
      Resident& resident = map_.residents()[block.aux];
      if (!resident.undecided || resident.shown) continue;
      resident.undecided = resident.changed = false;
      if (!resident.was_dirty) block.flags &= static_cast<uint16_t>(~core::kDirty);
    }
  }
}

}  // namespace vmem::pager
