// Host copies of blocks that are on a device. A block that came through a staging frame leaves its bytes there until
// the frame is wanted for something else: while the copy is kept, the block leaves its device by being forgotten there,
// and is in host memory at once. Without it a block that is clean on the SSD would be read again, and one that is not
// would be copied back.
//
//   Resident::copy of a block on a device names a resident of the staging pool with the same bytes. It goes when the
//   block may change there: a WRITE lease, a store of the CPU.
//
// Copies compete with blocks that are only in staging frames, under one policy: how long ago a block left its device
// last is its age.
#include "pager/clock.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::kNoResident;
using core::ResidentId;
using core::State;

// Locked; the block has come to its device from `frame`. False: the frame is not kept.
bool Pager::keep_copy(Region& r, BlockIndex b, std::byte* frame) {
  const ResidentId on_device = r.table[b].aux;
  bool pinned = false;
  temperature(r, b, &pinned);
  // A pinned block will not leave, and a copy of what changes is none.
  if (pinned || residents_[on_device].changed || r.dying || !reserve_block()) return false;
  const ResidentId id = residents_.take(r, b, frame, kStagingPool);
  Resident& copy = residents_[id];
  copy.is_copy = true;
  copy.stamp = residents_[on_device].stamp;
  residents_[on_device].copy = id;
  admit_copy(id);
  return true;
}

// Locked.
void Pager::admit_copy(ResidentId id) {
  Resident& copy = residents_[id];
  policy::Admission a;
  a.id = id;
  a.weight = static_cast<uint32_t>(copy.region->block_size / core::kPage);
  a.priority = copy.region->priority;
  a.probes = false;
  if (copy.stamp != 0) a.age = clock_.age(copy.stamp);
  policy(id).admit(a);
  copy.admitted = true;
}

// Locked. The block on a device has changed, or may, or is gone: it is its only copy.
void Pager::drop_copy(ResidentId on_device) {
  const ResidentId id = residents_[on_device].copy;
  residents_[on_device].copy = kNoResident;
  if (id == kNoResident) return;
  staging_.put(residents_[id].frame);
  give_resident(id);
}

// Locked. What the device has may differ from the SSD and from any copy from here on.
void Pager::will_change(Region& r, BlockIndex b) {
  Block& block = r.table[b];
  block.flags |= core::kDirty;
  residents_[block.aux].changed = true;
  drop_copy(block.aux);
}

// Locked; the policy has chosen it and forgotten it. False: it stays, being all there is of the block.
bool Pager::evict_copy(ResidentId id) {
  const Resident& copy = residents_[id];
  const Block& block = copy.region->table[copy.block];
  if (gpus_[block.device].lost && !proven_clean(block)) {
    admit_copy(id);
    return false;
  }
  residents_[block.aux].copy = kNoResident;
  staging_.put(copy.frame);
  residents_[id].admitted = false;
  give_resident(id);
  return true;
}

// Locked; state leaving, with its copy claimed by begin_leave(). The copy is the block from now on, in state held.
void Pager::become_copy(Region& r, BlockIndex b) {
  const ResidentId id = residents_[r.table[b].aux].copy;
  residents_[r.table[b].aux].copy = kNoResident;
  free_resident(b, r);
  Resident& resident = residents_[id];
  resident.is_copy = false;
  resident.stamp = stamp_now();
  r.table[b].aux = id;
  policy(id).unhold(id);
  match_hold(r, b);
}

// Locked. A staging frame while more than `keep` are free; else one of a block that the SSD or a device has too, which
// takes no I/O and nobody has to be waited for. nullptr: the pool grows, or its blocks have to be written first.
std::byte* Pager::staging_frame(size_t keep) {
  if (std::byte* frame = staging_.get(keep)) return frame;
  const bool grows = growth_.grows();
  if (growth_.may_try_again(now_ns())) {
    growth_.want();
    gpu_work_.notify_one();
  }
  for (int i = 0; i < 8 && !grows; ++i) {
    policy::Victim victim;
    if (policies_[kStagingPool]->victims(1, {&victim, 1}) == 0) break;
    Resident& resident = residents_[victim.id];
    if (resident.is_copy) {
      if (!evict_copy(victim.id)) break;
    } else {
      Region& r = *resident.region;
      const BlockIndex b = resident.block;
      resident.admitted = false;
      if (r.dying) continue;
      if (r.table[b].state != State::held || !proven_clean(r.table[b]) || (r.table[b].flags & core::kWanted) != 0) {
        admit(r, b, stamp_now());
        break;
      }
      if (!reserve_move()) {
        admit(r, b, stamp_now());
        break;
      }
      r.table.change(b, State::held, State::taking);
      Move* m = new_move(r, b);
      m->image = resident.frame;
      m->from_held = m->staged = true;
      leaves(m);
      core::add(counters_.clean_drops);
      After nothing;  // nobody wants it
      let_go(m, State::taking, nothing);
    }
    if (std::byte* frame = staging_.get(keep)) return frame;
  }
  growth_.want();
  gpu_work_.notify_one();
  need_evict_.notify_all();
  return nullptr;
}

}  // namespace vmem::pager
