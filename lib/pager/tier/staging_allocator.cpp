#include "pager/tier/staging_allocator.h"

#include <cerrno>
#include <chrono>

#include "core/clock.h"
#include "core/log.h"
#include "core/step.h"
#include "pager/tier/device_tier.h"

namespace vmem::pager {

StagingAllocator::StagingAllocator(PagerContext& ctx, DeviceTier& tier) : ctx_(ctx), host_(tier.host) {}

std::byte* StagingAllocator::frame(const Region& r, size_t keep) {
  Staging& frames = ctx_.staging.of(r.block_size).frames;
  StagingGrowth& growth = ctx_.staging.of(r.block_size).growth;
  if (std::byte* bytes = frames.get(keep)) return bytes;
  const bool grows = growth.grows();
  if (growth.may_try_again(now_ns())) {
    growth.want();
    ctx_.device_set.work().notify_one();
  }
  for (int i = 0; i < 8 && !grows; ++i) {
    policy::Victim victim;
    if (ctx_.map.policy_of(staging_pool(r)).victims(1, {&victim, 1}) == 0) break;
    Frame& frame = ctx_.map.frame_table()[victim.id];
    if (frame.is_copy) {
      if (!evict_copy(victim.id)) break;
    } else {
      Region& other = *frame.region;
      const BlockIndex b = frame.block;
      frame.admitted = false;
      if (other.dying) continue;
      const Block& block = other.table[b];
      if (block.state != State::staged || !proven_clean(block) || (block.flags & core::kFaultPending) != 0 ||
          !ctx_.map.reserve_transition()) {
        frame.could_not_leave = victim.refused;
        ctx_.map.admit(other, b, ctx_.map.nonresident_age().shadow());
        break;
      }
      core::add(ctx_.counters.clean_drops);
      DeferredWork nothing;  // no thread waits for the block
      host_.writeback.drop_held(other, b, nothing);
    }
    if (std::byte* bytes = frames.get(keep)) return bytes;
  }
  growth.want();
  ctx_.device_set.work().notify_one();
  host_.pressure.wake_all_reclaim();
  return nullptr;
}

bool StagingAllocator::keep_copy(Region& r, BlockIndex b, std::byte* bytes) {
  bool pinned = false;
  temperature(r, b, &pinned);
  // A pinned block does not leave, and a copy of a block that changes is worthless.
  const Frame& frame = ctx_.map.frame_table()[r.table[b].aux];
  if (pinned || (frame.dev.changed && !frame.dev.undecided) || r.dying || !ctx_.map.reserve_block()) return false;
  ctx_.map.copies().keep(r, b, bytes);
  return true;
}

bool StagingAllocator::evict_copy(FrameId id) {
  const Frame& copy = ctx_.map.frame_table()[id];
  const Block& block = copy.region->table[copy.block];
  // The tables name the destination of a block that moves between devices; the source may be lost.
  const bool may_be_last =
      ctx_.device_set[block.device].lost || (block.state == State::demoting && ctx_.device_set.size() > 1);
  const bool goes = !may_be_last || proven_clean(block) || ctx_.map.frame_table()[block.aux].dev.undecided;
  goes ? ctx_.map.copies().evict(id) : ctx_.map.copies().refuse(id);
  return goes;
}

std::optional<uint8_t> StagingAllocator::is_short(uint8_t first) {
  for (uint8_t i = 0; i < device::kUnitSizes && !ctx_.device_set.empty(); ++i) {
    const auto pool = static_cast<uint8_t>(kStagingPools + (first - kStagingPools + i) % device::kUnitSizes);
    const StagingGrowth& growth = ctx_.staging.of(core::kHugePage << (pool - kStagingPools)).growth;
    if (growth.blocks_must_leave(ctx_.writeback_throttle.leaving(pool))) return pool;
  }
  return std::nullopt;
}

void StagingAllocator::set_share(unsigned percent) {
  for (StagingPool& p : ctx_.staging) p.growth.set_share(percent);
  ctx_.device_set.work().notify_all();
}

Status StagingAllocator::want(const Region& r, uint64_t mark) {
  constexpr size_t kLeast = Staging::kLeast;
  Lock lock(ctx_.map.mutex());
  StagingPool& pool = ctx_.staging.of(r.block_size);
  for (;; lock.sleep_for(ctx_.map.changed(), std::chrono::milliseconds(20))) {
    while (pool.growth.growing()) lock.sleep(ctx_.map.changed());
    if (pool.frames.total() != 0) break;
    Status s;
    if (pool.growth.fits()) s = make(lock, pool, pool.frames.slab_frames());
    if (s.code() == -EAGAIN) s = make(lock, pool, kLeast);
    if (pool.frames.total() != 0) break;
    if (end_unused(lock)) continue;
    if (s.ok() && ctx_.staging.growing()) continue;  // other threads make or free frames: there may be room then
    const uint64_t frames = kLeast * pool.frames.frame();
    const bool never = !pool.growth.has_room() || (!s.ok() && s.code() != -EAGAIN) || !ctx_.reserve.fits(frames);
    if (never || ctx_.deadline.hopeless(mark)) {
      ctx_.reserve.want_nothing();
      return error(ENOMEM,
                   "host_budget %s has no room for the staging frames of the device tier (at least %s for blocks of "
                   "%s; at most %u %% of the budget, setting staging_share, of which %s are taken) beside %s leased "
                   "and %s for faults, tables and buffers; raise host_budget, or make the region with VMEM_HOST_ONLY%s"
                   "%.*s",
                   core::human_bytes(ctx_.budget.limit()).c_str(), core::human_bytes(frames).c_str(),
                   core::human_bytes(pool.frames.frame()).c_str(), pool.growth.share(),
                   core::human_bytes(ctx_.budget.charged(Use::staging)).c_str(),
                   core::human_bytes(ctx_.reserve.pinned()).c_str(),
                   core::human_bytes(ctx_.frames.least_overhead() + ctx_.reserve.bytes()).c_str(),
                   s.text().empty() ? "" : ": ", static_cast<int>(s.text().size()), s.text().data());
    }
    ctx_.reserve.want(frames + ctx_.reserve.bytes());
    host_.pressure.wake_all_reclaim();
  }
  ctx_.reserve.want_nothing();
  return {};
}

bool StagingAllocator::grow(Lock& lock) {
  for (StagingPool& pool : ctx_.staging) {
    if (pool.regions == 0 || !pool.growth.due(now_ns())) continue;
    // Tried again when a transition wants a frame, or at once when unused frames have been freed.
    if (!pool.growth.fits())
      end_unused(lock);
    else if (make(lock, pool, pool.frames.slab_frames()).code() == -EAGAIN)
      end_unused(lock);
    return true;
  }
  return false;
}

// Makes another slab; drops the lock while it works. One thread at a time.
Status StagingAllocator::make(Lock& lock, StagingPool& pool, size_t at_most) {
  const size_t frames = pool.growth.take(at_most);
  if (frames == 0) return {};
  if (!pool.frames.reserve(frames, ctx_.reserve.bytes())) {
    pool.growth.no_room(now_ns());
    host_.pressure.wake_all_reclaim();
    return Status(EAGAIN, "");
  }
  pool.growth.begin();
  lock.unlock();
  Staging::Slab slab;
  Status s = Staging::make_slab(*ctx_.devices, ctx_.trap, frames, pool.frames.frame(), ctx_.config.numa_nodes, &slab);
  lock.lock();
  pool.growth.end(s.ok(), now_ns());
  if (s.ok()) {
    pool.frames.add_slab(*ctx_.devices, slab);
    ctx_.map.resize_policies();
  } else {
    pool.frames.unreserve(frames);
    VMEM_LOG_OFTEN(core::Level::warning, "the device tier goes on with %zu staging frames: %.*s", pool.frames.total(),
                   static_cast<int>(s.text().size()), s.text().data());
  }
  ctx_.map.notify();
  return s;
}

// Frees frames of a size that no region needs, for frames of other sizes; drops the lock while it
// works. Returns false if there are none, or they cannot be freed now.
bool StagingAllocator::end_unused(Lock& lock) {
  StagingPool* const pool = ctx_.staging.unused();
  if (pool == nullptr) return false;
  const Staging::Slab slab = pool->frames.take_slab();
  pool->growth.begin();  // no thread makes frames of this size now
  ++ctx_.staging.ending;
  lock.unlock();
  core::step("staging.ending");
  Staging::end_slab(*ctx_.devices, slab);
  lock.lock();
  --ctx_.staging.ending;
  pool->growth.end(true, now_ns());
  pool->frames.unreserve(slab.size / pool->frames.frame());
  ctx_.map.resize_policies();
  ctx_.device_set.work().notify_all();
  ctx_.map.notify();
  return true;
}

bool StagingAllocator::give_back(Lock& lock) {
  if (end_unused(lock)) return true;
  if (ctx_.staging.ending == 0) return false;
  while (ctx_.staging.ending != 0) lock.sleep(ctx_.map.changed());  // other threads are freeing them
  return true;
}

}  // namespace vmem::pager
