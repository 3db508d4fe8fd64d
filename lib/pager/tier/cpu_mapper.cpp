#include "pager/tier/cpu_mapper.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/break.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/step.h"
#include "pager/host/drop_pages.h"
#include "pager/tier/device_tier.h"
#include "pager/tier/retry.h"

namespace vmem::pager {

namespace {

// Sizes of the pieces that the CPU is shown: a load waits for the first, and each piece is twice as
// large as the one before.
constexpr size_t kPiece = size_t{64} << 10, kLargestPiece = size_t{2} << 20;

}  // namespace

CpuMapper::CpuMapper(PagerContext& ctx, DeviceTier& tier)
    : ctx_(ctx), host_(tier.host), leases_(tier.leases), tier_(tier) {}

// The block is on a device and not leased for writing. Returns nullptr if there is no memory for a
// copy that leaves `left_free` bytes of the budget.
Transition* CpuMapper::begin_show(Region& r, BlockIndex b, uint64_t left_free) {
  if (!ctx_.cpu_mappings.unrefuse(r, b) || !ctx_.map.reserve_transition() || !ctx_.cpu_mappings.expect())
    return nullptr;
  if (!ctx_.budget.charge(r.block_size, left_free)) {
    ctx_.cpu_mappings.not_shown();
    if (left_free == 0) host_.pressure.wake_all_reclaim();
    return nullptr;
  }
  const Block& block = r.table[b];
  const bool kept = ctx_.map.copies().has(block.aux);
  std::byte* const bytes = kept ? ctx_.map.copies().hold(block.aux) : tier_.staging_allocator.frame(r, 0);
  if (bytes == nullptr) {
    ctx_.cpu_mappings.not_shown();
    ctx_.budget.credit(r.block_size);
    return nullptr;
  }
  Transition* m = ctx_.map.new_transition(r, b);
  m->image = bytes;
  m->move.kept = kept;
  m->in_staging = true;
  m->device = block.device;
  m->way = core::Way::from_device;
  tier_.blocks.claim(r, b);
  return m;
}

// State demoting. Maps bytes of the block, from its device or its host copy, write-protected at its
// address. Fills whole blocks if the trap reports blocks instead of pages. *placed: some pages may
// be in place.
Status CpuMapper::show_part(const Transition& m, size_t from, size_t to, bool* placed) {
  Region& r = *m.region;
  Status s;
  if (!m.move.kept && from != to) {
    device::Ticket ticket;
    const device::Copy copy{reinterpret_cast<uintptr_t>(r.address(m.block)) + from, m.image + from, to - from};
    s = ctx_.devices->copy_out(m.device, {&copy, 1}, &ticket);
    if (s.ok())  // the frame is about to be reused
      s = wait_for_copy(*ctx_.devices, m.device, ticket);
  }
  size_t piece = ctx_.trap.caps().one_report ? r.block_size : kPiece;
  for (; s.ok() && from != to; piece = std::min(2 * piece, kLargestPiece)) {
    const size_t size = std::min(piece, to - from);
    *placed = true;
    s = ctx_.trap.fill(r.address(m.block) + from, size, m.image + from, trap::Transfer::copy, trap::Protect::yes);
    from += size;
  }
  return s;
}

// State demoting. Maps the piece that a thread waits for first, then the bytes behind it, which the
// thread is likely to load next, then those before it.
Status CpuMapper::show_all(const Transition& m, uintptr_t load_at, bool* placed) {
  const size_t size = m.region->block_size;
  const auto base = reinterpret_cast<uintptr_t>(m.region->address(m.block));
  if (ctx_.trap.caps().one_report) return show_part(m, 0, size, placed);
  const size_t first = load_at != 0 ? core::round_down(load_at - base, kPiece) : 0;
  Status s = show_part(m, first, first + kPiece, placed);
  core::step("device.showing_rest");
  if (s.ok()) s = show_part(m, first + kPiece, size, placed);
  if (s.ok()) s = show_part(m, 0, first, placed);
  return s;
}

// State demoting.
void CpuMapper::show(Transition* m, uintptr_t load_at) {
  Region& r = *m->region;
  const BlockIndex b = m->block;
  core::step("device.showing");
  bool placed = false;
  m->status = show_all(*m, load_at, &placed);
  const Status health = m->status.ok() ? Status() : ctx_.devices->health(m->device);
  if (!m->status.ok() && placed) {  // pieces that stay would go stale in view of the CPU
    const trap::Range range{reinterpret_cast<uintptr_t>(r.address(b)), r.block_size};
    drop_until_unpinned(ctx_.trap, {&range, 1});
  }
  core::step("device.shown");
  DeferredWork after;
  Lock lock(ctx_.map.mutex());
  ctx_.device_set.saw_loss(m->device, health);
  const Block& block = r.table[b];
  Frame& frame = ctx_.map.frame_table()[block.aux];
  if (m->move.kept) {
    ctx_.map.copies().unhold(block.aux);
  } else {
    // Keep the copy of a read-mostly block: later loads need no transfer.
    const bool stays = m->status.ok() && r.advice.places.at(b).read_mostly && !frame.dev.changed;
    if (!stays || !tier_.staging_allocator.keep_copy(r, b, m->image))
      ctx_.staging.of(r.block_size).frames.put(m->image);
  }
  const bool shown = m->status.ok();
  if (shown) {
    ctx_.cpu_mappings.show(r, b, now_ns());
    core::add(ctx_.counters.copied_bytes, r.block_size);
    if (!m->move.kept) {
      ctx_.device_set[static_cast<size_t>(m->device)].out_bytes += r.block_size;
      core::add(ctx_.counters.device_to_host_bytes, r.block_size);
    }
  } else {
    ctx_.cpu_mappings.not_shown();
    ctx_.budget.credit(r.block_size);
  }
  r.table.abandon_demote(b);
  if (frame.admitted) ctx_.map.policy(block.aux).unhold(block.aux);
  if (!shown && ctx_.cpu_mappings.ask(r, b, now_ns(), since(m))) ctx_.device_set.work().notify_one();
  if (ctx_.device_set[block.device].lost) ctx_.device_set[block.device].rescue = true;
  ctx_.map.free_transition(m);
  ctx_.upcalls.memory_freed(after);
  lock.unlock();
  host_.page_in.run(after);
}

bool CpuMapper::hide(Lock& lock, Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  const int d = block.device;
  tier_.blocks.claim(r, b);
  ++r.counts.in_flight;
  lock.unlock();
  core::step("device.hiding");
  const Status probed = ctx_.devices->probe(d);  // a driver reports an illegal address at the next call
  const Status health = probed.ok() ? Status() : ctx_.devices->health(d);
  // Pinned pages stay whole in place; other blocks on the device do not wait for the pin to end.
  const bool hidden = probed.ok() && (core::broken("shown_goes") || drop_one(ctx_.trap, r, b));
  if (!hidden && health.ok()) usleep(1000);  // the caller tries again
  lock.lock();
  ctx_.device_set.saw_loss(d, health);
  if (hidden) {
    ctx_.cpu_mappings.forget(r, b);
    ctx_.budget.credit(r.block_size);
  }
  tier_.blocks.unclaim(r, b);
  --r.counts.in_flight;
  ctx_.map.notify();
  host_.page_in.serve_waiting(lock);
  return hidden;
}

bool CpuMapper::rescue(Lock& lock) {
  Batch batch;
  for (size_t d = 0; d < ctx_.device_set.size() && batch.empty(); ++d) {
    if (!std::exchange(ctx_.device_set[d].rescue, false)) continue;
    for (const auto& [base, r] : ctx_.map.regions()) {
      if (!r->gpu || r->dying || r->lost) continue;
      for (BlockIndex b = r->table.next_populated(0); b < r->blocks && !batch.full();
           b = r->table.next_populated(b + 1)) {
        const core::Block& block = r->table[b];
        if (block.state != State::on_device || block.device != d) continue;
        if (!ctx_.map.frame_table()[block.aux].dev.cpu_mapped && !ctx_.map.copies().has(block.aux)) continue;
        if (Transition* m = tier_.demoter.begin(*r, b, Leave::host)) {
          batch.push_back(m);
        } else {
          ctx_.device_set[d].rescue = true;  // no memory: try later
        }
      }
    }
    if (batch.full()) ctx_.device_set[d].rescue = true;  // there may be more
  }
  if (batch.empty()) return false;
  tier_.demoter.run(lock, batch.all());
  return true;
}

// Returns whether a load of this block, on a device and not leased, may be shown a copy. The CPU
// does not see what the device stores to the block without a lease from then on, so this needs the
// program's read-mostly advice.
bool CpuMapper::may_show(const Region& r, BlockIndex b) {
  const auto said = r.advice.places.at(b);
  return said.read_mostly && said.preferred != VMEM_HOST && ctx_.trap.caps().write_protect &&
         !ctx_.map.frame_table()[r.table[b].aux].dev.displaced;
}

// Returns whether one more copy leaves enough memory for all waiters and for the reserve.
bool CpuMapper::room_beside(const Region& r) {
  return host_.waits.queue().empty() && ctx_.budget.available() >= r.block_size + ctx_.reserve.low_watermark();
}

// Collects the facts about an access that CpuMappings does not know.
CpuMappings::Around CpuMapper::around(const CpuFault& access, uint64_t now, bool may_hide) {
  const Region& r = *access.region;
  const BlockIndex b = access.block;
  const Block& block = r.table[b];
  if (block.state != State::on_device) return {};
  CpuMappings::Around around;
  around.now_ns = now;
  around.lent_most_ns = ctx_.tunables.fault_timeout_ms * uint64_t{1000000};
  around.lost = ctx_.device_set[block.device].lost;
  around.lent = !around.lost && lent_for_writing(r, b);
  around.leased = !around.lost && leased(r, b);
  around.elsewhere = around.leased && r.leases.find(b)->front().location != block.device;
  around.shows = !around.lost && !around.leased && may_show(r, b);
  around.room = ctx_.reserve.room_for_device_stale(r.block_size);
  around.may_hide = may_hide;
  return around;
}

// Logs the reason, and makes accesses of the block get SIGBUS.
void CpuMapper::refuse_access(CpuFault& access, CpuMappings::Next why, uint64_t now) {
  const auto place = ctx_.map.describe_locked(*access.region, access.block);
  const unsigned ms = ctx_.tunables.fault_timeout_ms;
  const auto limit = core::human_bytes(ctx_.budget.limit());
  if (why == CpuMappings::Next::refuse_lent) {
    VMEM_LOG_OFTEN(
        core::Level::error,
        "a block has been under a WRITE lease at a device for %u ms: accesses of the CPU get SIGBUS until it "
        "is released, %s",
        ms, place.c_str());
  } else if (why == CpuMappings::Next::refuse_store) {
    VMEM_LOG_OFTEN(core::Level::error,
                   "no room within host_budget %s for %u ms for a store of the CPU to a block under READ leases at a "
                   "device: the store gets SIGBUS, %s",
                   limit.c_str(), ms, place.c_str());
  } else {
    VMEM_LOG_OFTEN(core::Level::error,
                   "no memory within host_budget %s for %u ms, or no way to copy a block from its device: accesses of "
                   "the CPU get SIGBUS until there is; the contents are intact, %s",
                   limit.c_str(), ms, place.c_str());
  }
  ctx_.cpu_mappings.refuse(access, why, now);
}

// Returns the oldest copy that cannot be the only one of its block; nullptr if there is none.
const CpuMapping* CpuMapper::oldest() {
  const std::span<const DeviceState> gpus(ctx_.device_set.begin(), ctx_.device_set.end());
  return ctx_.cpu_mappings.oldest(now_ns(), [gpus](size_t d) { return gpus[d].lost; });
}

// Drops the oldest copy if host memory is short. Returns false if it dropped none.
bool CpuMapper::hide_oldest(Lock& lock) {
  if (!ctx_.cpu_mappings.any() || !host_.waits.must_evict()) return false;
  const CpuMapping* const s = oldest();
  if (s == nullptr) return false;
  ctx_.map.frame_table()[s->region->table[s->block].aux].dev.displaced = true;
  return hide(lock, *s->region, s->block);
}

// Begins what was decided about an access. A block without leases moves to host memory if no copy
// can be made. Returns nullptr if the block does not move, or if there is no memory.
Transition* CpuMapper::begin(const CpuFault& access, bool leased, CpuMappings::Next* next) {
  using Next = CpuMappings::Next;
  Region& r = *access.region;
  const BlockIndex b = access.block;
  Transition* m = nullptr;
  if (*next == Next::show && (leased || room_beside(r)))
    m = begin_show(r, b, leased ? 0 : ctx_.reserve.low_watermark());
  if (*next == Next::show && m == nullptr && !leased) *next = Next::move;
  if (*next == Next::move) m = tier_.demoter.begin(r, b, Leave::host);
  if (m == nullptr) return nullptr;
  m->since_ns = access.since_ns;
  m->mark = access.mark;
  return m;
}

bool CpuMapper::serve(Lock& lock) {
  using Next = CpuMappings::Next;
  if (!ctx_.cpu_mappings.waits() && (!ctx_.cpu_mappings.any() || !host_.waits.must_evict())) return false;
  leases_.releases.reap(lock);
  if (hide_oldest(lock)) return true;
  const uint64_t now = now_ns();
  Batch batch;
  Transition* to_show = nullptr;
  uintptr_t load_at = 0;
  for (auto it = ctx_.cpu_mappings.begin();
       it != ctx_.cpu_mappings.end() && batch.size() < kDeviceBatch && to_show == nullptr;) {
    Region& r = *it->region;
    const BlockIndex b = it->block;
    const CpuMappings::Around facts = around(*it, now, batch.empty());
    Next next = ctx_.cpu_mappings.next(*it, facts);
    const bool lacks_room = next == Next::show && !facts.leased && !it->made_room && !room_beside(r);
    const CpuMapping* const older = lacks_room ? oldest() : nullptr;  // drop it first
    if (older != nullptr) next = facts.may_hide ? Next::hide : Next::wait;
    if (Transition* const m = begin(*it, facts.leased, &next)) {
      load_at = it->load_at;
      it = ctx_.cpu_mappings.begun(it);
      if (next == Next::show) {
        to_show = m;
      } else {
        batch.push_back(m);
      }
      continue;
    }
    if (next == Next::show || next == Next::move) next = ctx_.cpu_mappings.stays(*it, now);
    switch (next) {
      case Next::again:
        break;
      case Next::change:
        tier_.blocks.will_change(r, b);
        ctx_.cpu_mappings.change(r, b);
        break;
      case Next::hide:
        it->made_room |= older != nullptr;
        older != nullptr ? hide(lock, *older->region, older->block) : hide(lock, r, b);
        return true;
      case Next::erase:
        it = ctx_.cpu_mappings.erase(it);
        break;
      case Next::refuse:
      case Next::refuse_store:
      case Next::refuse_lent:
        refuse_access(*it, next, now);
        [[fallthrough]];
      default:
        ++it;
    }
  }
  if (to_show == nullptr && batch.empty()) return false;
  lock.unlock();
  if (!batch.empty()) tier_.demoter.run(batch.all());
  if (to_show != nullptr) show(to_show, load_at);
  lock.lock();
  return true;
}

}  // namespace vmem::pager
