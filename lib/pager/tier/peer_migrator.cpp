#include "pager/tier/peer_migrator.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <utility>

#include "core/clock.h"
#include "core/inplace_vector.h"
#include "core/step.h"
#include "pager/block/block_run.h"
#include "pager/tier/device_tier.h"

namespace vmem::pager {

namespace {

constexpr uint64_t kRefusedFor = 1'000'000'000;  // ns; so long no spilled block goes to a device that refused one

}  // namespace

PeerMigrator::PeerMigrator(PagerContext& ctx, DeviceTier& tier) : ctx_(ctx), host_(tier.host), tier_(tier) {}

Transition* PeerMigrator::begin(Region& r, BlockIndex b, int d) {
  const Block& block = r.table[b];
  Frame& frame = ctx_.map.frame_table()[block.aux];
  Transition* m = ctx_.map.new_transition(r, b);
  m->device = block.device;
  m->move.migrates = true;
  m->way = core::Way::between_devices;
  m->move.was_spilled = ctx_.map.spilled().remove(block.aux);
  if (frame.admitted) ctx_.map.policy(block.aux).remove(block.aux);
  frame.admitted = false;
  frame.pool = static_cast<uint8_t>(kDevicePools + d);
  r.table.begin_demote(b);
  ctx_.device_set[block.device].budget.count_leaving(r.block_size, true);
  ctx_.device_set[static_cast<size_t>(d)].budget.charge(r.block_size);
  r.table.set_device(b, d);
  return m;
}

// Sets each transition's status. Only for managed memory: its driver moves neighbours together.
void PeerMigrator::copy(std::span<Transition* const> batch, int d, int by) {
  core::step("device.migrating");
  for (size_t i = 0; i < batch.size();) {
    core::InplaceVector<device::Range, device::kMostRanges> ranges;
    std::array<Status, device::kMostRanges> each;
    const size_t first = i;
    while (i < batch.size() && !ranges.full()) {
      // Each range succeeds or fails alone. A failed range may have moved in part, which managed
      // memory allows.
      const Region& r = *batch[i]->region;
      size_t n = 1;
      while (i + n < batch.size() && batch[i + n]->region == &r && batch[i + n]->block == batch[i]->block + n) ++n;
      ranges.push_back({reinterpret_cast<uintptr_t>(r.address(batch[i]->block)), n * r.block_size});
      i += n;
    }
    ctx_.devices->migrate(ranges.all(), d, by, std::span(each.data(), ranges.size()))
        .ignore();  // `each` has the results
    for (size_t k = first, range = 0; range < ranges.size(); ++range) {
      const size_t n = ranges[range].size / batch[k]->region->block_size;
      for (const size_t end = k + n; k < end; ++k) batch[k]->status = each[range];
    }
  }
}

// Brings a block to rest: on device d, or where it was if its status is an error.
void PeerMigrator::settle(Transition* m, int d) {
  DeviceState& g = ctx_.device_set[static_cast<size_t>(d)];
  Region& r = *m->region;
  DeviceState& from = ctx_.device_set[static_cast<size_t>(m->device)];
  const Block& block = r.table[m->block];
  Frame& frame = ctx_.map.frame_table()[block.aux];
  if (!m->status.ok()) {
    from.budget.stays(r.block_size, true);
    g.budget.credit(r.block_size);
    if (m->move.spills) {
      ctx_.map.spilled().remove(block.aux);
      ctx_.map.spilled().refuse(static_cast<size_t>(d), now_ns() + kRefusedFor);
    } else {
      g.failure = m->status;
      ++g.failures;
    }
    r.table.set_device(m->block, m->device);
    frame.pool = static_cast<uint8_t>(kDevicePools + m->device);
    frame.dev.hinted = (block.flags & core::kReadAhead) != 0;
  } else {
    if (frame.dev.hinted) r.table.mark(m->block, core::kReadAhead | core::kPrefetched);
    from.budget.left(r.block_size, true);
    from.out_bytes += r.block_size;
    g.in_bytes += r.block_size;
    if (m->move.spills) ++from.evictions;
    (m->move.spills ? from.to_peers : g.from_peers) += m->move.spills || m->move.was_spilled ? r.block_size : 0;
  }
  tier_.blocks.stays(r, m->block);
  tier_.blocks.know_again(*m);
  ctx_.map.free_transition(m);
}

// Brings blocks to rest; each has its status.
void PeerMigrator::settle_all(std::span<Transition* const> moved, int d) {
  bool full = false;
  for (const Transition* m : moved) {
    if (m->status.ok()) continue;
    full |= m->status.code() == -ENOMEM;
    for (const int end : {m->device, d}) {
      const Status health = ctx_.devices->health(end);
      const Lock lock(ctx_.map.mutex());
      ctx_.device_set.saw_loss(end, health);
    }
  }
  const uint64_t kept = full ? ctx_.device_set.kept(d) : 0;
  DeferredWork after;
  Lock lock(ctx_.map.mutex());
  if (ctx_.device_set.own_page_tables()) ctx_.device_set[static_cast<size_t>(d)].budget.set_keeps(true);
  for (Transition* m : moved) settle(m, d);
  if (full) ctx_.device_set.follow_down(d, kept);
  ctx_.upcalls.memory_freed(after);
  lock.unlock();
  host_.page_in.run(after);
}

// The blocks that one worker moves in a turn, one after the other.
class PeerMigrator::Line final : public device::Migration {
 public:
  // Moves the batch, or takes `turn` bytes of the blocks that wait.
  Line(PeerMigrator& migrator, int d, std::span<Transition* const> batch)
      : peer_migrator_(migrator), d_(d), batch_(batch) {}
  Line(PeerMigrator& migrator, int d, uint64_t turn) : peer_migrator_(migrator), d_(d), turn_(turn) {}

  std::optional<device::Range> next() override {
    // The next range may wait long for one that is under way: first bring the ended ones to rest,
    // for requests that wait for them.
    if (under_way_count_ >= kBusyWith) rest();
    if (next_ == batch_.size() && !take_more()) {
      rest();
      return std::nullopt;
    }
    Transition* m = batch_[next_++];
    under_way_.push_back(m);
    ++under_way_count_;
    return device::Range{reinterpret_cast<uintptr_t>(m->region->address(m->block)), m->region->block_size};
  }
  void ended(device::Range range, Status status) override {
    Transition* m = under_way_.pop();
    --under_way_count_;
    m->status = std::move(status);
    ended_.push_back(m);
    ended_bytes_ += range.size;
    if (ended_.full() || ended_bytes_ >= kBatchBytes) rest();
  }

 private:
  // With so many under way the devices stay busy while others come to rest. Devices begin more
  // before they wait.
  static constexpr size_t kBusyWith = 8;

  // Brings several small blocks to rest at once, since each waiter looks every time.
  void rest() {
    if (!ended_.empty()) peer_migrator_.settle_all(ended_.all(), d_);
    ended_.clear();
    ended_bytes_ = 0;
  }
  bool take_more() {
    if (turn_ == 0) return false;
    const Lock lock(peer_migrator_.ctx_.map.mutex());
    taken_ = take_batch<kPeerBatch>(peer_migrator_.ctx_.device_set[static_cast<size_t>(d_)].incoming,
                                    std::min(turn_, kPeerBatchBytes));
    for (const Transition* m : taken_) turn_ -= std::min<uint64_t>(turn_, m->region->block_size);
    batch_ = taken_.all();
    next_ = 0;
    return !taken_.empty();
  }

  PeerMigrator& peer_migrator_;
  const int d_;
  uint64_t turn_ = 0;  // bytes that may still be taken
  core::InplaceVector<Transition*, kPeerBatch> taken_;
  std::span<Transition* const> batch_;
  size_t next_ = 0;
  TransitionList under_way_;
  size_t under_way_count_ = 0;
  core::InplaceVector<Transition*, kDeviceBatch> ended_;
  uint64_t ended_bytes_ = 0;
};

void PeerMigrator::run(std::span<Transition* const> batch, int d, int by) {
  if (ctx_.device_set.own_page_tables()) {
    core::step("device.migrating");
    Line line(*this, d, batch);
    return ctx_.devices->migrate_all(line, d, by);
  }
  copy(batch, d, by);
  settle_all(batch, d);
}

void PeerMigrator::run_waiting(int d) {
  if (ctx_.device_set.own_page_tables()) {
    core::step("device.migrating");
    Line line(*this, d, kPeerTurnBytes);
    return ctx_.devices->migrate_all(line, d, d);
  }
  core::InplaceVector<Transition*, kPeerBatch> batch;
  {
    const Lock lock(ctx_.map.mutex());
    batch = take_batch<kPeerBatch>(ctx_.device_set[static_cast<size_t>(d)].incoming, kPeerBatchBytes);
  }
  copy(batch.all(), d, d);
  settle_all(batch.all(), d);
}

}  // namespace vmem::pager
