// What the CPU sees of blocks on a device whose page tables are its own (device::CpuView::separate): the trap, as of
// any block that is not present. An access waits in `accesses` until a worker has looked at it:
//
//   nobody leases the block     it comes to host memory, as with any hint
//   READ leases, load           it is shown: a copy stands in place, write-protected, and the device keeps the block
//   READ leases, store          .. then the copy may change, and the device's bytes are stale: they go, and the copy is
//                               the block, when the last lease has ended; an acquire waits for that, or is refused.
//                               What a sync or the end of the program writes is the copy
//   a WRITE lease               the access waits for its end, at most the fault time-out
//
// An access that finds no memory waits as any fault does: it gets SIGBUS when for the time-out nothing went on. So does
// a store that would make a block stale where stale and leased blocks leave no room for others; loads of the block go
// on being served beside it, but for the pages of such stores, for a moment.
//
// A copy that is shown is charged as a block in host memory. It is dropped when a WRITE lease comes, when the block
// goes to another device, and when memory is short; what is stale is never dropped, nor what shows a block of a device
// that is lost: it is the block then.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/log.h"
#include "core/step.h"
#include "pager/clock.h"
#include "pager/insist.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::ResidentId;
using core::State;
using core::Status;

namespace {

constexpr uint64_t kTryAgain = 20000000;     // ns until what failed is tried again
constexpr uint64_t kAskAgain = 100000000;    // .. whose accesses are refused: they have got their signals by then
constexpr uint64_t kLookedAt = 100000000;    // .. that a wait counts between two looks at most
constexpr uint64_t kShownAtLeast = 5000000;  // .. until a copy may go for want of memory: it has been accessed
// Accesses that meet no page of what they are shown: so many were met before, and reported late. Not so the next.
constexpr uint8_t kReportedLate = 3;

CpuAccess* access_of(Queue<CpuAccess>& accesses, const Region& r, BlockIndex b) {
  const auto it = std::find_if(accesses.begin(), accesses.end(),
                               [&](const CpuAccess& a) { return a.region == &r && a.block == b; });
  return it == accesses.end() ? nullptr : &*it;
}

}  // namespace

// Locked; on a device. A CPU waits for it (kWanted). failed: its last try; the wait is the same.
void Pager::queue_access(Region& r, BlockIndex b, const Move* failed) {
  Block& block = r.table[b];
  Resident& resident = residents_[block.aux];
  if (resident.asked) return;
  const uint64_t now = now_ns(), mark = look(now);
  CpuAccess access{&r, b, now, mark};
  if (failed != nullptr && failed->since_ns != 0) access = {&r, b, failed->since_ns, failed->mark, now + kTryAgain};
  access.loads = true;
  if (!queues_.accesses.push_back(access)) {
    block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
    trap_->wake(r.address(b), r.block_size).ignore();  // reported again
    return;
  }
  resident.asked = true;
  gpu_work_.notify_one();
}

// Locked; state on_device, met by a fault.
void Pager::access_on_device(Region& r, BlockIndex b, const trap::Fault& fault) {
  Block& block = r.table[b];
  Resident& resident = residents_[block.aux];
  if (resident.stale && fault.kind == trap::FaultKind::write_protect) {
    trap_->unprotect(r.address(b), r.block_size).ignore();
    return;
  }
  // Or the program dropped a page itself (madvise). Of what only the CPU has, it is zeros then; where that page is
  // there this fails. Else it is what the device has.
  const bool missing = resident.shown && fault.kind != trap::FaultKind::write_protect;
  if (missing && resident.stale) trap_->fill_zero(reinterpret_cast<void*>(fault.address), core::kPage).ignore();
  const bool late = missing && (resident.stale || resident.missed < kReportedLate);
  if (late) ++resident.missed;
  if (!own_page_tables() || resident.refused || late) {
    // It met the trap before the block was made over it, or shown, and has been woken since or is here.
    trap_->wake(reinterpret_cast<void*>(fault.address), core::kPage).ignore();
    return;
  }
  if ((block.flags & core::kWanted) == 0) core::add(counters_.faults);
  block.flags |= core::kWanted;
  const bool load = fault.kind == trap::FaultKind::read, first = !resident.asked;
  if (!load) block.flags |= core::kWantedWrite;
  queue_access(r, b);
  CpuAccess* const access = access_of(queues_.accesses, r, b);
  if (access == nullptr) return;
  access->loads = load || (access->loads && !first);
  if (resident.apart) return;  // reported again
  const uintptr_t page = core::round_down(fault.address, core::kPage);
  auto& stores = access->stores;
  if (!load && !stores.full() && std::find(stores.begin(), stores.end(), page) == stores.end()) stores.push_back(page);
}

// Locked; it has come to rest on a device. Who met the trap meanwhile has not been answered.
void Pager::answer_on_device(Region& r, BlockIndex b, const Move* failed) {
  Block& block = r.table[b];
  if (gpus_[block.device].lost) {
    gpus_[block.device].rescue = true;
    gpu_work_.notify_one();
  }
  if (r.dying) {  // reported again, for touch_of_dying()
    trap_->wake(r.address(b), r.block_size).ignore();
    return;
  }
  if (residents_[block.aux].stale) {  // who met its protection while it was copied may go on
    block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
    trap_->unprotect(r.address(b), r.block_size).ignore();
    queue_access(r, b, failed);  // until it has left
    return;
  }
  if ((block.flags & core::kWanted) == 0) return;
  if (own_page_tables()) {
    queue_access(r, b, failed);
    // A store that came while the block moved is known by no page yet: it is reported again.
    if ((block.flags & core::kWantedWrite) != 0) trap_->wake(r.address(b), r.block_size).ignore();
    return;
  }
  block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
  trap_->wake(r.address(b), r.block_size).ignore();
}

// Locked; on a device. Who waits for it, and whoever accesses it before its entry is through, gets SIGBUS. stores: only
// those whose pages are known, where they are few.
void Pager::refuse_access(Region& r, CpuAccess* a, bool stores) {
  Block& block = r.table[a->block];
  Resident& resident = residents_[block.aux];
  if (resident.refused || !unrefuse(r, a->block)) return;
  a->gives_up = false;
  // A trap that reports blocks, and not pages, refuses blocks.
  if (stores && !trap_->caps().one_report && !a->stores.empty() && !a->stores.full()) {
    resident.apart = true;
    for (const uintptr_t page : a->stores)
      resident.apart &= trap_->fail(reinterpret_cast<void*>(page), core::kPage).ok();
    if (resident.apart) {
      block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
      trap_->wake(r.address(a->block), r.block_size).ignore();  // loads are reported again
      return;
    }
    resident.apart = true;
    if (!unrefuse(r, a->block)) return;
  }
  resident.refused = trap_->fail(r.address(a->block), r.block_size).ok();
  if (resident.refused) block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
}

// Locked; on a device, under leases for reading. nullptr: there is no memory for a copy.
Move* Pager::begin_show(Region& r, BlockIndex b) {
  if (!unrefuse(r, b)) return nullptr;
  if (!queues_.shown.reserve(queues_.shown.size() + 1) || !reserve_move()) return nullptr;
  if (!budget_.charge(r.block_size, 0)) {
    need_evict_.notify_all();
    return nullptr;
  }
  Block& block = r.table[b];
  const bool kept = copies_.has(block.aux);
  std::byte* const frame = kept ? copies_.hold(block.aux) : staging_frame(r, 0);
  if (frame == nullptr) {
    budget_.credit(r.block_size);
    return nullptr;
  }
  Move* m = new_move(r, b);
  m->image = frame;
  m->kept = kept;
  m->staged = true;
  m->device = block.device;
  m->way = core::Way::from_device;
  r.table.change(b, State::on_device, State::leaving);
  if (residents_[block.aux].admitted) policy(block.aux).hold(block.aux);
  return m;
}

// Unlocked; state leaving.
void Pager::show(Move* m) {
  Region& r = *m->region;
  const BlockIndex b = m->block;
  core::step("device.showing");
  if (!m->kept) {
    device::Ticket ticket;
    const device::Copy copy{reinterpret_cast<uintptr_t>(r.address(b)), m->image, r.block_size};
    m->status = devices_->copy_out(m->device, {&copy, 1}, &ticket);
    if (m->status.ok())  // the frame is to be somebody else's
      m->status = insist(*devices_, m->device, "waiting for a copy", [&] { return devices_->wait(ticket); });
  }
  const Status health = m->status.ok() ? Status() : devices_->health(m->device);
  if (m->status.ok())
    m->status = trap_->fill(r.address(b), r.block_size, m->image, trap::Transfer::copy, trap::Protect::yes);
  core::step("device.shown");
  After after;
  Lock lock(mutex_);
  saw_loss(m->device, health);
  Block& block = r.table[b];
  Resident& resident = residents_[block.aux];
  if (m->kept) {
    copies_.unhold(block.aux);
  } else {
    staging_.of(r).frames.put(m->image);
  }
  const bool shown = m->status.ok() && queues_.shown.push_back({&r, b, now_ns()});  // there is room
  if (shown) {
    resident.shown = true;
    resident.missed = 0;
    core::add(counters_.copied_bytes, r.block_size);
    if (!m->kept) {
      gpus_[static_cast<size_t>(m->device)].out_bytes += r.block_size;
      core::add(counters_.device_to_host_bytes, r.block_size);
    }
    // A store that met the protection before this lock is reported once more.
    block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
    trap_->wake(r.address(b), r.block_size).ignore();
  } else {
    budget_.credit(r.block_size);
  }
  r.table.change(b, State::leaving, State::on_device);
  if (resident.admitted) policy(block.aux).unhold(block.aux);
  if (!shown) queue_access(r, b, m);
  if (gpus_[block.device].lost) gpus_[block.device].rescue = true;
  free_move(m);
  pump(after);
  lock.unlock();
  run(after);
}

// Unlocked; state leaving. The bytes that the CPU is shown, to be written.
Status Pager::copy_shown(Move* m) {
  Region& r = *m->region;
  Status s = trap_->protect(m->source, r.block_size);
  core::step("device.copying_shown");
  if (s.ok()) {
    copy_protected(m->image, m->source, r.block_size);
    core::add(counters_.copied_bytes, r.block_size);
  }
  Lock lock(mutex_);
  Resident& resident = residents_[r.table[m->block].aux];
  resident.in_place = false;
  if (resident.stale) trap_->unprotect(m->source, r.block_size).ignore();  // stores go on while it is written
  return s;
}

// Locked on entry and on return, and not meanwhile; on a device, shown and not stale. False: the device is lost, what
// is shown may be the last copy and stays, and a worker is about to make it the block; or nobody knows, and it stays.
bool Pager::hide(Lock& lock, Region& r, BlockIndex b) {
  Block& block = r.table[b];
  const int d = block.device;
  r.table.change(b, State::on_device, State::leaving);
  if (residents_[block.aux].admitted) policy(block.aux).hold(block.aux);
  ++r.in_flight;
  lock.unlock();
  core::step("device.hiding");
  const Status probed = devices_->probe(d);  // a driver tells of an illegal address when something is asked of it
  const Status health = probed.ok() ? Status() : devices_->health(d);
  if (!probed.ok() && health.ok()) usleep(1000);  // tried again
  const trap::Range range{reinterpret_cast<uintptr_t>(r.address(b)), r.block_size};
  if (Status s = probed.ok() ? trap_->drop({&range, 1}) : Status(); !s.ok())
    core::fatal("memory of a block could not be dropped: %s", s.text().data());
  lock.lock();
  saw_loss(d, health);
  if (probed.ok()) {
    forget_shown(r, b);
    budget_.credit(r.block_size);
  }
  if (residents_[block.aux].admitted) policy(block.aux).unhold(block.aux);
  stays(r, b);
  --r.in_flight;
  notify();
  After after;
  pump(after);
  lock.unlock();
  run(after);
  lock.lock();
  return probed.ok();
}

// Locked. What is in place there belongs to somebody else now, or to nobody.
void Pager::forget_shown(Region& r, BlockIndex b) {
  Resident& resident = residents_[r.table[b].aux];
  if (!resident.shown) return;
  resident.shown = false;
  if (std::exchange(resident.stale, false)) {
    --r.stale;
    sums_.stale_bytes -= r.block_size;
  }
  queues_.shown.erase_if([&](const Shown& s) { return s.region == &r && s.block == b; });
}

// Locked. Accesses of it are answered again. False: the trap does not take back what gives SIGBUS, the block has to
// stay where it is, and this is to be called again.
bool Pager::unrefuse(Region& r, BlockIndex b) {
  const auto unfail = [this](void* at, size_t size) {
    const Status s = trap_->unfail(at, size);
    if (!s.ok()) VMEM_LOG_ONCE(core::Level::error, "%.*s", static_cast<int>(s.text().size()), s.text().data());
    return s.ok();
  };
  Resident& resident = residents_[r.table[b].aux];
  if (resident.refused && unfail(r.address(b), r.block_size)) resident.refused = false;
  if (resident.refused || !resident.apart) return !resident.refused;
  CpuAccess* const access = access_of(queues_.accesses, r, b);
  if (access != nullptr)  // it stays until this has been done
    access->stores.erase_if([&](uintptr_t page) { return unfail(reinterpret_cast<void*>(page), core::kPage); });
  resident.apart = access != nullptr && !access->stores.empty();
  return !resident.apart;
}

// Locked. One more block may be stale at its device. Nobody can evict it, and others move in what it leaves, with more
// free than the evictors want: else they would take away what the CPU is shown as soon as it is.
bool Pager::room_for_stale(const Region& r) const {
  const uint64_t room = frames_.room();
  const uint64_t free = std::max({sums_.reserve_bytes, room / 4, room / 100 * machine_.knobs.watermark_low});
  return free + sums_.pinned() + r.block_size <= room;
}

// Locked. *wait: blocks of the spans are stale at their device, and are about to leave it. -EBUSY: live leases keep
// one.
Status Pager::check_stale(std::span<const SpanOf> spans, bool* wait) {
  for (const SpanOf& s : spans) {
    const Region& r = *s.region;
    if (r.stale == 0) continue;
    for (BlockIndex b = r.table.next_touched(s.first); b <= s.last && b < r.blocks; b = r.table.next_touched(b + 1)) {
      if (!core::on_a_device(r.table[b].state) || !residents_[r.table[b].aux].stale) continue;  // a sync has it, too
      const Leases* leases = r.leases.find(b);
      if (leases != nullptr && std::any_of(leases->begin(), leases->end(), [](const Lease& l) { return l.count != 0; }))
        return core::error(EBUSY, "%s: the CPU stored to it under a READ lease, which keeps what it was; release that",
                           where(r, b).c_str());
      *wait = true;
    }
  }
  return {};
}

// Locked on entry and on return. Does what it can for those who wait, and makes room where memory is short.
bool Pager::serve_accesses(Lock& lock) {
  if (queues_.accesses.empty() && (queues_.shown.empty() || !must_evict())) return false;
  reap(lock);
  if (!queues_.shown.empty() && must_evict()) {
    const uint64_t old = now_ns() - kShownAtLeast;
    for (const auto& [region, b, since] : queues_.shown) {
      if (since > old) break;
      if (region->dying || region->table[b].state != State::on_device || residents_[region->table[b].aux].stale)
        continue;
      if (gpus_[region->table[b].device].lost) continue;
      hide(lock, *region, b);
      return true;
    }
  }
  const uint64_t now = now_ns(), limit = config_.fault_timeout_ms * uint64_t{1000000};
  Batch batch;
  Move* to_show = nullptr;
  auto it = queues_.accesses.begin();
  while (it != queues_.accesses.end() && batch.size() < kDeviceBatch && to_show == nullptr) {
    Region& r = *it->region;
    const BlockIndex b = it->block;
    Block& block = r.table[b];
    if (!r.dying && (block.state == State::entering || block.state == State::leaving)) {
      ++it;
      continue;
    }
    if (r.dying || block.state != State::on_device || !residents_[block.aux].asked) {
      it = queues_.accesses.erase(it);
      continue;
    }
    Resident& resident = residents_[block.aux];
    const bool lost = gpus_[block.device].lost;
    if (resident.apart) {
      if (now < it->not_before) {
        ++it;
        continue;
      }
      if (!unrefuse(r, b)) {
        it->not_before = now + kTryAgain;
        ++it;
        continue;
      }
      block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
      trap_->wake(r.address(b), r.block_size).ignore();  // who came meanwhile begins to wait
    }
    if (!lost && lent_for_writing(r, b)) {
      it->lent_ns += it->looked_ns == 0 ? 0 : std::min(now - it->looked_ns, kLookedAt);
      it->looked_ns = now;
      if (it->lent_ns >= limit && !resident.refused && !resident.shown) {
        core::log(core::Level::error,
                  "a block has been under a WRITE lease at a device for %u ms: accesses of the CPU get SIGBUS until it "
                  "is released, %s",
                  config_.fault_timeout_ms, where(r, b).c_str());
        refuse_access(r, &*it);
      }
      ++it;
      continue;
    }
    if (it->starved && !resident.refused) it->starved = false;  // a move took that back, and the wait goes on
    if (!it->starved && (resident.refused || resident.apart) && (now < it->not_before || !unrefuse(r, b))) {
      if (now >= it->not_before) it->not_before = now + kTryAgain;
      ++it;
      continue;
    }
    const bool leased_here = leased(r, b) && !lost;
    if (resident.shown && !resident.stale && !lost && resident.missed == kReportedLate &&
        (block.flags & core::kWanted) != 0) {  // pages of it are gone
      if (batch.empty()) {
        hide(lock, r, b);
        return true;
      }
      ++it;
      continue;
    }
    if (!resident.stale && !it->starved && (block.flags & core::kWanted) == 0) {
      resident.asked = false;
      it = queues_.accesses.erase(it);
      continue;
    }
    if (now < it->not_before || (leased_here && resident.stale) ||
        (leased_here && r.leases.find(b)->front().location != block.device)) {  // it is to move first
      ++it;
      continue;
    }
    const bool store = (block.flags & core::kWantedWrite) != 0;
    if (leased_here && resident.shown && store && !room_for_stale(r)) {
      if (batch.empty() && hopeless(it->mark)) {  // what is shown cannot be refused
        it->gives_up = true;
        hide(lock, r, b);
        return true;
      }
      ++it;
      continue;
    }
    if (leased_here && resident.shown) {
      if (store) {
        will_change(r, b);
        resident.stale = true;
        ++r.stale;
        sums_.stale_bytes += r.block_size;
        trap_->unprotect(r.address(b), r.block_size).ignore();
      } else {
        trap_->wake(r.address(b), r.block_size).ignore();
      }
      block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
      continue;
    }
    // What failed goes on failing, or there is no memory, and nothing that goes on will bring any.
    // What is stale is in place: nobody waits for it, and it is tried until it leaves.
    const bool no_room = leased_here && store && !room_for_stale(r);
    it->gives_up = it->gives_up && no_room;
    const bool over = !it->starved && !resident.stale && (it->gives_up || hopeless(it->mark));
    if (over && no_room && (it->gives_up || !it->loads)) {
      core::log(core::Level::error,
                "no room within host_budget %s for %u ms for what the CPU stores to a block under READ leases at a "
                "device: the store gets SIGBUS, %s",
                core::human_bytes(budget_.limit()).c_str(), config_.fault_timeout_ms, where(r, b).c_str());
      refuse_access(r, &*it, true);
      it->starved = resident.refused;
      it->not_before = now + (resident.apart ? kTryAgain : kAskAgain);
      ++it;
      continue;
    }
    if (over && it->not_before != 0 && resident.shown && !lost) {  // what is shown cannot be refused
      if (batch.empty()) {
        hide(lock, r, b);
        return true;
      }
      ++it;
      continue;
    }
    Move* m = nullptr;
    const bool shows = !no_room || (it->loads && !it->gives_up);  // a store alone has no use for it
    if (shows && (!over || it->not_before == 0)) m = leased_here ? begin_show(r, b) : begin_leave(r, b, Leave::host);
    if (m == nullptr) {
      if (over) {
        core::log(core::Level::error,
                  "no memory within host_budget %s for %u ms, or no way to copy a block from its device: accesses of "
                  "the CPU get SIGBUS until there is; the contents are intact, %s",
                  core::human_bytes(budget_.limit()).c_str(), config_.fault_timeout_ms, where(r, b).c_str());
        refuse_access(r, &*it);
        it->starved = resident.refused;
      }
      if (it->starved || over) it->not_before = now + kAskAgain;
      ++it;
      continue;
    }
    m->since_ns = it->since_ns;
    m->mark = it->mark;
    resident.asked = false;
    it = queues_.accesses.erase(it);
    if (leased_here) {
      to_show = m;
    } else {
      batch.push_back(m);
    }
  }
  if (to_show == nullptr && batch.empty()) return false;
  lock.unlock();
  if (!batch.empty()) leave_batch(batch.all());
  if (to_show != nullptr) show(to_show);
  lock.lock();
  return true;
}

}  // namespace vmem::pager
