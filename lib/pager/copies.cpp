// What a staging frame is used for when its block has come to a device, or left it: a host copy, or another block.
#include "pager/clock.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::ResidentId;
using core::State;

// Locked; the block has come to its device from `frame`. False: the frame is not kept.
bool Pager::keep_copy(Region& r, BlockIndex b, std::byte* frame) {
  bool pinned = false;
  temperature(r, b, &pinned);
  // A pinned block will not leave, and a copy of what changes is none.
  const Resident& resident = map_.residents()[r.table[b].aux];
  if (pinned || (resident.changed && !resident.undecided) || r.dying || !map_.reserve_block()) return false;
  map_.copies().keep(r, b, frame);
  return true;
}

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

// Locked; the policy has chosen it and forgotten it. False: it stays, being all there is of the block.
bool Pager::evict_copy(ResidentId id) {
  const Resident& copy = map_.residents()[id];
  const Block& block = copy.region->table[copy.block];
  // Of what moves between devices the books name the one that it goes to; the other may be lost.
  const bool may_be_last = gpus_[block.device].lost || (block.state == State::leaving && gpus_.size() > 1);
  const bool goes = !may_be_last || proven_clean(block) || map_.residents()[block.aux].undecided;
  goes ? map_.copies().evict(id) : map_.copies().refuse(id);
  return goes;
}

// Locked. A staging frame while more than `keep` are free; else one of a block that the SSD or a device has too, which
// takes no I/O and nobody has to be waited for. nullptr: the pool grows, or its blocks have to be written first.
std::byte* Pager::staging_frame(const Region& r, size_t keep) {
  Staging& frames = staging_.of(r).frames;
  StagingGrowth& growth = staging_.of(r).growth;
  if (std::byte* frame = frames.get(keep)) return frame;
  const bool grows = growth.grows();
  if (growth.may_try_again(now_ns())) {
    growth.want();
    gpus_.work().notify_one();
  }
  for (int i = 0; i < 8 && !grows; ++i) {
    policy::Victim victim;
    if (map_.policy_of(staging_pool(r)).victims(1, {&victim, 1}) == 0) break;
    Resident& resident = map_.residents()[victim.id];
    if (resident.is_copy) {
      if (!evict_copy(victim.id)) break;
    } else {
      Region& other = *resident.region;
      const BlockIndex b = resident.block;
      resident.admitted = false;
      if (other.dying) continue;
      const Block& block = other.table[b];
      if (block.state != State::held || !proven_clean(block) || (block.flags & core::kWanted) != 0) {
        map_.admit(other, b, map_.clock().stamp());
        break;
      }
      if (!map_.reserve_move()) {
        map_.admit(other, b, map_.clock().stamp());
        break;
      }
      core::add(counters_.clean_drops);
      After nothing;  // nobody wants it
      write_back_.drop_held(other, b, nothing);
    }
    if (std::byte* frame = frames.get(keep)) return frame;
  }
  growth.want();
  gpus_.work().notify_one();
  pressure_.call_evictors();
  return nullptr;
}

}  // namespace vmem::pager
