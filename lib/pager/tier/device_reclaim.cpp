#include "pager/tier/device_reclaim.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/clock.h"
#include "core/step.h"
#include "pager/block/advice.h"
#include "pager/block/block_run.h"
#include "pager/tier/device_tier.h"

namespace vmem::pager {

namespace {

constexpr size_t kLook = 128;  // blocks looked at under one hold of the lock

// Limits the wait for leases to end: other acquires may lease those blocks again each time.
constexpr uint64_t kPatience = 250'000'000;  // ns

// A block that host memory also has is not sent to a peer, unless it has so many bytes: then the
// copy takes longer than the driver's calls to unmap and map the block, and the link is faster.
constexpr size_t kWorthCopying = size_t{8} << 20;

}  // namespace

DeviceReclaim::DeviceReclaim(PagerContext& ctx, DeviceTier& tier) : ctx_(ctx), leases_(tier.leases), tier_(tier) {}

bool DeviceReclaim::spilled_overstay() {
  const uint64_t now = now_ns();
  for (size_t d = 0; d < ctx_.device_set.size(); ++d)
    if (ctx_.map.spilled().over(d, ctx_.device_set[d].budget, now) != 0) return true;
  return false;
}

// Returns whether `bytes` that leave device d may spill to device n.
bool DeviceReclaim::has_room_for(int d, int n, uint64_t bytes, uint64_t now_ns) {
  const auto at = static_cast<size_t>(n);
  return at < ctx_.device_set.size() && ctx_.devices->info(d).links[at] == device::Link::nvlink &&
         !ctx_.device_set[at].lost && ctx_.map.spilled().fits(at, ctx_.device_set[at].budget, bytes, now_ns);
}

// Returns the device with the most room to which blocks of device d may spill; -1 if there is none.
int DeviceReclaim::peer_of(int d, uint64_t bytes) {
  const uint64_t now = now_ns();
  int best = -1;
  uint64_t most = 0;
  for (int n = 0; static_cast<size_t>(n) < ctx_.device_set.size(); ++n) {
    if (!has_room_for(d, n, bytes, now)) continue;
    const DeviceBudget& budget = ctx_.device_set[static_cast<size_t>(n)].budget;
    if (const uint64_t room = budget.limit() - budget.charged(); room > most) {
      most = room;
      best = n;
    }
  }
  return best;
}

// For a block on a device: returns another device that it is advised to be on, and that has room
// for it; -1 if there is none.
int DeviceReclaim::home_with_room(const Region& r, BlockIndex b) {
  const int d = r.table[b].device, home = home_of(r, b);
  return home >= 0 && home != d && has_room_for(d, home, r.block_size, now_ns()) ? home : -1;
}

// Returns whether the block is worth a move to a peer: false if dropping it costs nothing, or its
// bytes are as near elsewhere.
bool DeviceReclaim::worth_keeping_near(const Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  const Frame& frame = ctx_.map.frame_table()[block.aux];
  if (frame.dev.cpu_mapped || r.lost || ctx_.device_set[block.device].lost) return false;
  if (proven_clean(block) && !block.extent && !r.from_file()) return false;  // zeros
  const int preferred = r.advice.places.at(b).preferred;
  if (preferred == VMEM_HOST) return false;
  if (preferred >= 0 && preferred != block.device) return true;
  return !ctx_.map.copies().has(block.aux) || r.block_size >= kWorthCopying;
}

// Begins to evict spilled blocks of device d that may leave, in the order in which they came.
void DeviceReclaim::evict_spilled(int d, Batch& leaving) {
  const auto at = static_cast<size_t>(d);
  const DeviceBudget& budget = ctx_.device_set[at].budget;
  uint64_t bytes = std::min(std::max(budget.missing(), ctx_.map.spilled().over(at, budget, now_ns())), kBatchBytes);
  FrameId next = kNoFrame;
  size_t looked = 0;
  for (FrameId id = ctx_.map.spilled().first(at);
       id != kNoFrame && bytes != 0 && leaving.size() < kDeviceBatch && looked < kLook; id = next, ++looked) {
    next = ctx_.map.spilled().after(id);
    Region& r = *ctx_.map.frame_table()[id].region;
    const BlockIndex b = ctx_.map.frame_table()[id].block;
    if (r.dying || r.table[b].state != State::on_device || holds_for_lease(r, b)) continue;
    Transition* m = tier_.demoter.begin(r, b, Leave::evict);
    if (m == nullptr) return;  // no frame: perhaps one of the device's own blocks needs none
    leaving.push_back(m);
    bytes -= std::min<uint64_t>(bytes, r.block_size);
  }
}

// Begins to move a chosen block to the device that it is advised to be on, as its own, or to a
// peer, spilled. All blocks of one batch go to the same device. Returns false if it cannot go now,
// or there is no room.
bool DeviceReclaim::spill(Region& r, BlockIndex b, Batch& spilling, int* peer) {
  if (!worth_keeping_near(r, b) || !ctx_.map.reserve_transition()) return false;
  const int d = r.table[b].device, home = home_with_room(r, b);
  int to = home;
  if (to < 0) to = spilling.empty() ? peer_of(d, r.block_size) : *peer;
  if (!spilling.empty() && to != *peer) return false;
  if (to < 0 || !has_room_for(d, to, r.block_size, now_ns())) return false;
  *peer = to;
  Transition* m = tier_.peer_migrator.begin(r, b, to);
  m->move.spills = true;
  if (to != home) ctx_.map.spilled().add(r.table[b].aux, static_cast<size_t>(to));
  spilling.push_back(m);
  return true;
}

// Returns whether the program asked that the block stay on device d while another block can leave.
bool DeviceReclaim::is_to_stay(const Region& r, BlockIndex b, int d) {
  bool pinned = false;
  return temperature_in(r, b, static_cast<uint8_t>(kDevicePools + d), &pinned) == policy::Temperature::hot || pinned;
}

// Begins to evict the device's own blocks that the policy chooses. Takes no block that is to stay
// while leases of other blocks are about to end.
void DeviceReclaim::evict_own(int d, Batch& leaving, Batch& spilling, int* peer) {
  const uint64_t bytes = std::min(ctx_.device_set[static_cast<size_t>(d)].budget.missing(), kBatchBytes);
  if (bytes == 0) return;
  std::array<policy::Victim, kDeviceBatch> victims;
  policy::EvictionPolicy& policy = ctx_.map.policy_of(static_cast<uint8_t>(kDevicePools + d));
  const size_t count = policy.victims(std::max<uint64_t>(1, bytes / core::kPage), victims);
  const uint64_t now = now_ns();
  uint64_t& since = needs_[static_cast<size_t>(d)].since_ns;
  const bool others_end = leases_.releases.end_soon(d, now) && now < since + kPatience;
  for (size_t i = 0; i < count; ++i) {
    if (victims[i].probe) continue;
    Frame& frame = ctx_.map.frame_table()[victims[i].id];
    Region& r = *frame.region;
    const BlockIndex b = frame.block;
    frame.admitted = false;
    const bool last = is_to_stay(r, b, d);
    const bool stays = r.dying || r.table[b].state != State::on_device || holds_for_lease(r, b) || (others_end && last);
    bool leaves = !stays && spill(r, b, spilling, peer);
    // The batch goes to another device than the block's: it goes next time.
    const bool waits = !spilling.empty() && home_with_room(r, b) >= 0;
    if (Transition* m = leaves || stays || waits ? nullptr : tier_.demoter.begin(r, b, Leave::evict)) {
      leaving.push_back(m);
      leaves = true;
    } else if (!leaves && !r.dying) {
      // No frame for it: blocks that need none can leave. If others got frames, it gets one.
      const bool refused = !stays && !waits && leaving.empty() && spilling.empty();
      refused ? ctx_.map.admit_refused(r, b) : ctx_.map.admit(r, b, ctx_.map.nonresident_age().shadow());
    }
    if (leaves && !last) since = now;
  }
}

// Begins to move to host memory a block of device d that is leased and awaited on another device
// only. Otherwise two devices may each hold what the other waits for, with no room on either.
// Returns nullptr if there is none.
Transition* DeviceReclaim::begin_leave_for_others(int d) {
  size_t looked = 0;
  for (const PromotionRequest& w : ctx_.queues.promotion_requests) {
    if (w.device == d || w.owner == nullptr || w.region->dying) continue;
    Region& r = *w.region;
    for (BlockIndex b = w.next; b <= w.last && looked < kLook; ++b, ++looked) {
      if (r.table[b].state != State::on_device || r.table[b].device != d ||
          ctx_.map.frame_table()[r.table[b].aux].dev.cpu_mapped)
        continue;
      const Leases* leases = r.leases.find(b);
      if (leases == nullptr || leases->front().location == d) continue;
      return tier_.demoter.begin(r, b, Leave::evict);
    }
  }
  return nullptr;
}

bool DeviceReclaim::make(Lock& lock, int d) {
  const DeviceBudget& budget = ctx_.device_set[static_cast<size_t>(d)].budget;
  const auto nothing_to_do = [&]() VMEM_LOCKED {
    return budget.missing() == 0 && ctx_.map.spilled().over(static_cast<size_t>(d), budget, now_ns()) == 0;
  };
  Need& need = needs_[static_cast<size_t>(d)];
  const auto none = [&]() VMEM_LOCKED {
    need.there = false;
    return false;
  };
  if (nothing_to_do()) return none();
  leases_.releases.reap(lock);
  if (nothing_to_do()) return none();
  if (!std::exchange(need.there, true)) need.since_ns = now_ns();
  Batch leaving, spilling;
  int peer = -1;
  evict_spilled(d, leaving);
  if (!leaving.empty()) need.since_ns = now_ns();
  evict_own(d, leaving, spilling, &peer);
  if (leaving.empty() && spilling.empty() && budget.missing() != 0) {
    if (Transition* m = begin_leave_for_others(d)) leaving.push_back(m);
  }
  if (leaving.empty() && spilling.empty()) return false;
  lock.unlock();
  if (!spilling.empty()) {
    std::sort(spilling.begin(), spilling.end(), address_order);
    core::step("device.spilling");
    tier_.peer_migrator.run(spilling.all(), peer, d);
  }
  if (!leaving.empty()) tier_.demoter.run(leaving.all());
  lock.lock();
  return true;
}

}  // namespace vmem::pager
