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
#include "pager/tier/retry.h"

namespace vmem::pager {

namespace {

// Sizes of the pieces that the CPU is shown: a load waits for the first, and each piece is twice as
// large as the one before.
constexpr size_t kPiece = size_t{64} << 10, kLargestPiece = size_t{2} << 20;

}  // namespace

// The block is on a device and not leased for writing. Returns nullptr if there is no memory for a
// copy that leaves `left_free` bytes of the budget.
Transition* CpuMapper::begin_show(Region& r, BlockIndex b, uint64_t left_free) {
  if (!cpu_mappings_.unrefuse(r, b) || !map_.reserve_transition() || !cpu_mappings_.expect()) return nullptr;
  if (!budget_.charge(r.block_size, left_free)) {
    cpu_mappings_.not_shown();
    if (left_free == 0) pressure_.wake_all_reclaim();
    return nullptr;
  }
  const Block& block = r.table[b];
  const bool kept = map_.copies().has(block.aux);
  std::byte* const bytes = kept ? map_.copies().hold(block.aux) : supply_.frame(r, 0);
  if (bytes == nullptr) {
    cpu_mappings_.not_shown();
    budget_.credit(r.block_size);
    return nullptr;
  }
  Transition* m = map_.new_transition(r, b);
  m->image = bytes;
  m->kept = kept;
  m->in_staging = true;
  m->device = block.device;
  m->way = core::Way::from_device;
  blocks_.claim(r, b);
  return m;
}

// State demoting. Maps bytes of the block, from its device or its host copy, write-protected at its
// address. Fills whole blocks if the trap reports blocks instead of pages. *placed: some pages may
// be in place.
Status CpuMapper::show_part(const Transition& m, size_t from, size_t to, bool* placed) {
  Region& r = *m.region;
  Status s;
  if (!m.kept && from != to) {
    device::Ticket ticket;
    const device::Copy copy{reinterpret_cast<uintptr_t>(r.address(m.block)) + from, m.image + from, to - from};
    s = devices_->copy_out(m.device, {&copy, 1}, &ticket);
    if (s.ok())  // the frame is about to be reused
      s = wait_for_copy(*devices_, m.device, ticket);
  }
  size_t piece = trap_.caps().one_report ? r.block_size : kPiece;
  for (; s.ok() && from != to; piece = std::min(2 * piece, kLargestPiece)) {
    const size_t size = std::min(piece, to - from);
    *placed = true;
    s = trap_.fill(r.address(m.block) + from, size, m.image + from, trap::Transfer::copy, trap::Protect::yes);
    from += size;
  }
  return s;
}

// State demoting. Maps the piece that a thread waits for first, then the bytes behind it, which the
// thread is likely to load next, then those before it.
Status CpuMapper::show_all(const Transition& m, uintptr_t load_at, bool* placed) {
  const size_t size = m.region->block_size;
  const auto base = reinterpret_cast<uintptr_t>(m.region->address(m.block));
  if (trap_.caps().one_report) return show_part(m, 0, size, placed);
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
  const Status health = m->status.ok() ? Status() : devices_->health(m->device);
  if (!m->status.ok() && placed) {  // pieces that stay would go stale in view of the CPU
    const trap::Range range{reinterpret_cast<uintptr_t>(r.address(b)), r.block_size};
    drop_until_unpinned(trap_, {&range, 1});
  }
  core::step("device.shown");
  DeferredWork after;
  Lock lock(map_.mutex());
  device_set_.saw_loss(m->device, health);
  const Block& block = r.table[b];
  Frame& frame = map_.frame_table()[block.aux];
  if (m->kept) {
    map_.copies().unhold(block.aux);
  } else {
    // Keep the copy of a read-mostly block: later loads need no transfer.
    const bool stays = m->status.ok() && r.places.at(b).read_mostly && !frame.changed;
    if (!stays || !supply_.keep_copy(r, b, m->image)) staging_.of(r).frames.put(m->image);
  }
  const bool shown = m->status.ok();
  if (shown) {
    cpu_mappings_.show(r, b, now_ns());
    core::add(counters_.copied_bytes, r.block_size);
    if (!m->kept) {
      device_set_[static_cast<size_t>(m->device)].out_bytes += r.block_size;
      core::add(counters_.device_to_host_bytes, r.block_size);
    }
  } else {
    cpu_mappings_.not_shown();
    budget_.credit(r.block_size);
  }
  r.table.abandon_demote(b);
  if (frame.admitted) map_.policy(block.aux).unhold(block.aux);
  if (!shown && cpu_mappings_.ask(r, b, now_ns(), since(m))) device_set_.work().notify_one();
  if (device_set_[block.device].lost) device_set_[block.device].rescue = true;
  map_.free_transition(m);
  freed_.memory_freed(after);
  lock.unlock();
  page_in_.run(after);
}

bool CpuMapper::hide(Lock& lock, Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  const int d = block.device;
  blocks_.claim(r, b);
  ++r.in_flight;
  lock.unlock();
  core::step("device.hiding");
  const Status probed = devices_->probe(d);  // a driver reports an illegal address at the next call
  const Status health = probed.ok() ? Status() : devices_->health(d);
  // Pinned pages stay whole in place; other blocks on the device do not wait for the pin to end.
  const bool hidden = probed.ok() && (core::broken("shown_goes") || drop_one(trap_, r, b));
  if (!hidden && health.ok()) usleep(1000);  // the caller tries again
  lock.lock();
  device_set_.saw_loss(d, health);
  if (hidden) {
    cpu_mappings_.forget(r, b);
    budget_.credit(r.block_size);
  }
  blocks_.unclaim(r, b);
  --r.in_flight;
  map_.notify();
  page_in_.serve_waiting(lock);
  return hidden;
}

bool CpuMapper::rescue(Lock& lock) {
  Batch batch;
  for (size_t d = 0; d < device_set_.size() && batch.empty(); ++d) {
    if (!std::exchange(device_set_[d].rescue, false)) continue;
    for (const auto& [base, r] : map_.regions()) {
      if (!r->gpu || r->dying || r->lost) continue;
      for (BlockIndex b = r->table.next_populated(0); b < r->blocks && !batch.full();
           b = r->table.next_populated(b + 1)) {
        const core::Block& block = r->table[b];
        if (block.state != State::on_device || block.device != d) continue;
        if (!map_.frame_table()[block.aux].cpu_mapped && !map_.copies().has(block.aux)) continue;
        if (Transition* m = demoter_.begin(*r, b, Leave::host)) {
          batch.push_back(m);
        } else {
          device_set_[d].rescue = true;  // no memory: try later
        }
      }
    }
    if (batch.full()) device_set_[d].rescue = true;  // there may be more
  }
  if (batch.empty()) return false;
  demoter_.run(lock, batch.all());
  return true;
}

// Returns whether a load of this block, on a device and not leased, may be shown a copy. The CPU
// does not see what the device stores to the block without a lease from then on, so this needs the
// program's read-mostly advice.
bool CpuMapper::may_show(const Region& r, BlockIndex b) {
  const auto said = r.places.at(b);
  return said.read_mostly && said.preferred != VMEM_HOST && trap_.caps().write_protect &&
         !map_.frame_table()[r.table[b].aux].displaced;
}

// Returns whether one more copy leaves enough memory for all waiters and for the reserve.
bool CpuMapper::room_beside(const Region& r) {
  return waits_.queue().empty() && budget_.available() >= r.block_size + reserve_.low_watermark();
}

// Collects the facts about an access that CpuMappings does not know.
CpuMappings::Around CpuMapper::around(const CpuFault& access, uint64_t now, bool may_hide) {
  const Region& r = *access.region;
  const BlockIndex b = access.block;
  const Block& block = r.table[b];
  if (block.state != State::on_device) return {};
  CpuMappings::Around around;
  around.now_ns = now;
  around.lent_most_ns = config_.fault_timeout_ms * uint64_t{1000000};
  around.lost = device_set_[block.device].lost;
  around.lent = !around.lost && lent_for_writing(r, b);
  around.leased = !around.lost && leased(r, b);
  around.elsewhere = around.leased && r.leases.find(b)->front().location != block.device;
  around.shows = !around.lost && !around.leased && may_show(r, b);
  around.room = reserve_.room_for_device_stale(r.block_size);
  around.may_hide = may_hide;
  return around;
}

// Logs the reason, and makes accesses of the block get SIGBUS.
void CpuMapper::refuse_access(CpuFault& access, CpuMappings::Next why, uint64_t now) {
  const auto place = map_.where(*access.region, access.block);
  const unsigned ms = config_.fault_timeout_ms;
  const auto limit = core::human_bytes(budget_.limit());
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
  cpu_mappings_.refuse(access, why, now);
}

// Returns the oldest copy that cannot be the only one of its block; nullptr if there is none.
const CpuMapping* CpuMapper::oldest() {
  const std::span<const DeviceState> gpus(device_set_.begin(), device_set_.end());
  return cpu_mappings_.oldest(now_ns(), [gpus](size_t d) { return gpus[d].lost; });
}

// Drops the oldest copy if host memory is short. Returns false if it dropped none.
bool CpuMapper::hide_oldest(Lock& lock) {
  if (!cpu_mappings_.any() || !waits_.must_evict()) return false;
  const CpuMapping* const s = oldest();
  if (s == nullptr) return false;
  map_.frame_table()[s->region->table[s->block].aux].displaced = true;
  return hide(lock, *s->region, s->block);
}

// Begins what was decided about an access. A block without leases moves to host memory if no copy
// can be made. Returns nullptr if the block does not move, or if there is no memory.
Transition* CpuMapper::begin(const CpuFault& access, bool leased, CpuMappings::Next* next) {
  using Next = CpuMappings::Next;
  Region& r = *access.region;
  const BlockIndex b = access.block;
  Transition* m = nullptr;
  if (*next == Next::show && (leased || room_beside(r))) m = begin_show(r, b, leased ? 0 : reserve_.low_watermark());
  if (*next == Next::show && m == nullptr && !leased) *next = Next::move;
  if (*next == Next::move) m = demoter_.begin(r, b, Leave::host);
  if (m == nullptr) return nullptr;
  m->since_ns = access.since_ns;
  m->mark = access.mark;
  return m;
}

bool CpuMapper::serve(Lock& lock) {
  using Next = CpuMappings::Next;
  if (!cpu_mappings_.waits() && (!cpu_mappings_.any() || !waits_.must_evict())) return false;
  releases_.reap(lock);
  if (hide_oldest(lock)) return true;
  const uint64_t now = now_ns();
  Batch batch;
  Transition* to_show = nullptr;
  uintptr_t load_at = 0;
  for (auto it = cpu_mappings_.begin();
       it != cpu_mappings_.end() && batch.size() < kDeviceBatch && to_show == nullptr;) {
    Region& r = *it->region;
    const BlockIndex b = it->block;
    const CpuMappings::Around facts = around(*it, now, batch.empty());
    Next next = cpu_mappings_.next(*it, facts);
    const bool lacks_room = next == Next::show && !facts.leased && !it->made_room && !room_beside(r);
    const CpuMapping* const older = lacks_room ? oldest() : nullptr;  // drop it first
    if (older != nullptr) next = facts.may_hide ? Next::hide : Next::wait;
    if (Transition* const m = begin(*it, facts.leased, &next)) {
      load_at = it->load_at;
      it = cpu_mappings_.begun(it);
      if (next == Next::show) {
        to_show = m;
      } else {
        batch.push_back(m);
      }
      continue;
    }
    if (next == Next::show || next == Next::move) next = cpu_mappings_.stays(*it, now);
    switch (next) {
      case Next::again:
        break;
      case Next::change:
        blocks_.will_change(r, b);
        cpu_mappings_.change(r, b);
        break;
      case Next::hide:
        it->made_room |= older != nullptr;
        older != nullptr ? hide(lock, *older->region, older->block) : hide(lock, r, b);
        return true;
      case Next::erase:
        it = cpu_mappings_.erase(it);
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
  if (!batch.empty()) demoter_.run(batch.all());
  if (to_show != nullptr) show(to_show, load_at);
  lock.lock();
  return true;
}

}  // namespace vmem::pager
