#include "pager/tier/device_blocks.h"

#include "core/clock.h"
#include "pager/tier/device_tier.h"

namespace vmem::pager {

DeviceBlocks::DeviceBlocks(PagerContext& ctx) : ctx_(ctx) {}

void DeviceBlocks::will_change(Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  r.table.mark(b, core::kDirty);
  ctx_.map.frame_table()[block.aux].dev.changed = true;
  ctx_.map.frame_table()[block.aux].dev.undecided = false;
  ctx_.map.frame_table()[block.aux].dev.saved = false;
  ctx_.map.copies().drop(block.aux);
}

void DeviceBlocks::may_change(Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  Frame& frame = ctx_.map.frame_table()[block.aux];
  // Another lease is undecided, or was never decided.
  if (frame.dev.changed) return will_change(r, b);
  frame.dev.undecided = frame.dev.changed = true;
  frame.dev.was_dirty = (block.flags & core::kDirty) != 0;
  frame.dev.saved = false;
  r.table.mark(b, core::kDirty);
}

void DeviceBlocks::not_changed(const BlockSpan& span, int d) {
  Region& r = *span.region;
  for (BlockIndex b = span.first; b <= span.last; ++b) {
    const Block& block = r.table[b];
    if (!core::on_a_device(block.state) || block.device != d) continue;
    Frame& frame = ctx_.map.frame_table()[block.aux];
    if (!frame.dev.undecided || frame.dev.cpu_mapped) continue;
    frame.dev.undecided = frame.dev.changed = false;
    if (!frame.dev.was_dirty) r.table.clear(b, core::kDirty);
  }
}

void DeviceBlocks::claim(Region& r, BlockIndex b) {
  r.table.begin_demote(b);
  if (const auto id = r.table[b].aux; ctx_.map.frame_table()[id].admitted) ctx_.map.policy(id).hold(id);
}

void DeviceBlocks::unclaim(Region& r, BlockIndex b) {
  if (const auto id = r.table[b].aux; ctx_.map.frame_table()[id].admitted) ctx_.map.policy(id).unhold(id);
  stays(r, b);
}

void DeviceBlocks::stays(Region& r, BlockIndex b, const Transition* failed) {
  r.table.abandon_demote(b);
  answer(r, b, failed);
}

void DeviceBlocks::answer(Region& r, BlockIndex b, const Transition* failed) {
  DeviceState& g = ctx_.device_set[r.table[b].device];
  if (g.lost) {
    g.rescue = true;
    ctx_.device_set.work().notify_one();
  }
  if (r.dying) {  // the access is reported again, for access_of_dying()
    ctx_.trap.wake(r.address(b), r.block_size).ignore();
  } else if (ctx_.cpu_mappings.answer(r, b, now_ns(), since(failed))) {
    ctx_.device_set.work().notify_one();
  }
}

void DeviceBlocks::adopt(Region& r, BlockIndex b) {
  if (ctx_.map.spilled().remove(r.table[b].aux)) ctx_.map.admit(r, b, ctx_.map.nonresident_age().shadow());
}

void DeviceBlocks::know_again(const Transition& m) {
  Region& r = *m.region;
  const Block& block = r.table[m.block];
  if (ctx_.map.spilled().is(block.aux)) return;
  if (m.move.was_spilled && block.device == m.device) {
    ctx_.map.spilled().add(block.aux, block.device);
  } else {
    ctx_.map.admit(r, m.block, ctx_.map.nonresident_age().shadow());
  }
}

bool DeviceBlocks::has_come(const Region& r, BlockIndex b, int d) {
  const Block& block = r.table[b];
  return core::on_a_device(block.state) && block.device == d &&
         (block.state == State::on_device ||
          (block.state == State::promoting && ctx_.map.frame_table()[block.aux].dev.issued));
}

}  // namespace vmem::pager
