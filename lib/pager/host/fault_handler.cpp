#include "pager/host/fault_handler.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/clock.h"
#include "core/log.h"
#include "core/step.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

FaultHandler::FaultHandler(PagerContext& ctx, HostTier& host) : ctx_(ctx), host_(host) {}

void FaultHandler::set_deadline(unsigned ms) {
  deadline_ms_ = ms;
  deadline_changed_.notify_all();
}

bool FaultHandler::serve_events(int timeout_ms) {
  std::array<trap::Event, 64> room;
  size_t count = 0;
  if (Status s = ctx_.trap.wait(room, timeout_ms, &count); !s.ok()) {
    VMEM_LOG_ONCE(core::Level::error,
                  "faults can no longer be read, threads that access blocks that are not present will wait: %.*s",
                  static_cast<int>(s.text().size()), s.text().data());
    return false;
  }
  if (count == 0) return timeout_ms < 0;
  const std::span<const trap::Event> events(room.data(), count);
  for (const trap::Event& e : events) {
    if (e.kind == trap::Event::Kind::pressure) {
      Lock lock(ctx_.map.mutex());
      host_.pressure.press(e.bytes);
    }
    if (e.kind == trap::Event::Kind::tunables) ctx_.upcalls.tunables_changed();
  }
  core::step("fault.read");
  const uint64_t now = now_ns();
  DeferredWork after;
  {
    Lock lock(ctx_.map.mutex());
    for (const trap::Event& e : events) {
      if (e.kind == trap::Event::Kind::fault) on_fault(e.fault, now, after);
    }
    host_.readahead.pump_speculative(after);
  }
  host_.page_in.run(after);
  return timeout_ms < 0 || count == room.size();
}

bool FaultHandler::serve_here(const trap::Fault& fault) {
  const uint64_t now = now_ns();
  bool failed = false;
  DeferredWork after;
  {
    Lock lock(ctx_.map.mutex());
    Region* const r = ctx_.map.find(fault.address);
    if (r == nullptr) return false;
    const Block& block = r->table[r->index(reinterpret_cast<void*>(fault.address))];
    on_fault(fault, now, after);
    // The access gets SIGBUS, and the handler cannot tell that from a fault.
    failed = r->dying ? block.state != State::resident && !core::in_transition(block.state)
                      : block.state == State::poisoned && (block.flags & core::kUnanswered) == 0;
    host_.readahead.pump_speculative(after);
  }
  host_.page_in.run_here(after);
  return !failed;
}

void FaultHandler::renew(const Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  // A block on its way to a device must not be accessed half made: see on_fault().
  if (r.dying || (block.flags & core::kFaultPending) == 0 || block.state == State::promoting) return;
  ctx_.trap.wake(r.address(b), r.block_size).ignore();
}

void FaultHandler::renew_waits() {
  for (const auto& m : ctx_.map.transitions().all())
    if (m->begun_ns != 0) renew(*m->region, m->block);
  for (const MemoryWaiter& s : host_.waits.queue()) renew(*s.region, s.block);
  for (const CpuFault& a : ctx_.cpu_mappings) renew(*a.region, a.block);
}

// Answers an access of a region that is being freed, with SIGBUS if the block is absent. detach()
// would answer it, too, but detach() waits for work in flight, and that work may wait for a signal
// handler that makes this access. Accesses that are not answered here are answered at the end of
// the block's transition, or by detach(). Begins no transition.
void FaultHandler::access_of_dying(Region& r, BlockIndex b, const trap::Fault& fault) {
  if (r.lost || r.quiet) return;  // no page may be put there: frames are being removed, or the device is lost
  const Block& block = r.table[b];
  void* const page = reinterpret_cast<void*>(fault.address);
  switch (block.state) {
    case State::resident:
      if (fault.kind == trap::FaultKind::write_protect) {
        r.table.clear(b, core::kProtected);
        ctx_.trap.unprotect(r.address(b), r.block_size).ignore();
        return;
      }
      if (met_before(fault.address)) ctx_.trap.fill_zero(page, core::kPage).ignore();  // as in met_resident()
      ctx_.trap.wake(page, core::kPage).ignore();
      return;
    case State::isolating:
    case State::writing_back:
      // The program dropped this page. One of our threads may have met the hole.
      if (const Frame& frame = ctx_.map.frame_table()[block.aux]; frame.in_place && !frame.dropping &&
                                                                  fault.kind != trap::FaultKind::write_protect &&
                                                                  !ctx_.trap.fill_zero(page, core::kPage).ok())
        ctx_.trap.wake(page, core::kPage).ignore();
      return;
    case State::on_device:  // split page tables: the trap is in place, or a copy is mapped
      if (ctx_.map.frame_table()[block.aux].dev.cpu_mapped) {
        ctx_.trap.unprotect(r.address(b), r.block_size).ignore();
        return;
      }
      [[fallthrough]];
    case State::unpopulated:
    case State::stored:
    case State::staged:
    case State::poisoned:
      // If both are refused, the page is poisoned already, or its access will be reported again.
      if (!ctx_.trap.fail(r.address(b), r.block_size).ok() && !ctx_.trap.fail(page, core::kPage).ok())
        ctx_.trap.wake(r.address(b), r.block_size).ignore();
      return;
    default:
      return;
  }
}

// Notes what a fault tells about the use of the region.
void FaultHandler::note_access(Region& r, BlockIndex b, const trap::Fault& fault, uint64_t now) {
  const Block& block = r.table[b];
  const bool protection = block.state == State::resident && fault.kind == trap::FaultKind::write_protect;
  if ((block.flags & core::kFaultPending) == 0 && block.state != State::resident && block.state != State::poisoned)
    r.use.heat.note(b, r.blocks, now);
  if (fault.kind == trap::FaultKind::read) {
    r.use.stores_in_row = 0;
  } else if (r.use.stores_in_row < UINT8_MAX && (!protection || (block.flags & core::kReadAhead) != 0)) {
    ++r.use.stores_in_row;
  }
}

// Delays a fault that would make one more block dirty while there are too many: it waits until some
// have been written. Returns true if it waits. With Transfer::move and Transfer::install later
// stores to a block are not seen, so a load makes the block dirty as well.
bool FaultHandler::slow_down(Region& r, BlockIndex b, const trap::Fault& fault, uint64_t now) {
  DirtyBlocks& dirty = ctx_.map.dirty();
  if (r.backing != Backing::file_shared || !dirty.slows(now)) return false;
  const Block& block = r.table[b];
  if (core::in_memory(block.state) && dirty.listed(block.aux)) return false;
  const bool stores = fault.kind != trap::FaultKind::read;
  switch (block.state) {
    case State::unpopulated:
    case State::staged:
      if ((block.flags & core::kFaultPending) != 0 || (!stores && r.transfer == Transfer::copy)) return false;
      break;
    case State::reading:
    case State::mapping:
      if (!stores || (block.flags & core::kStorePending) != 0) return false;
      break;
    case State::resident:
      if (fault.kind != trap::FaultKind::write_protect) return false;
      break;
    default:
      return false;
  }
  return dirty.slow(r, b, now);
}

// State unpopulated or stored: the block has to be read.
void FaultHandler::met_absent(Region& r, BlockIndex b, const trap::Fault& fault, uint16_t wanted, DeferredWork& after) {
  const Block& block = r.table[b];
  if ((block.flags & core::kFaultPending) != 0) return;  // it waits for memory already
  core::add(ctx_.counters.faults);
  if (block.state == State::unpopulated && !ctx_.metadata_charges.may_grow(r, b))
    return host_.failed.refuse_growth(r, b);
  r.table.mark(b, wanted);
  DeferredWork fill;
  if (!host_.page_in.start_fill(r, b, Urgency::fault, fill)) host_.waits.starve_fault(r, b, 0, 0, fault.thread);
  if (!fill.submit.empty()) fill.submit.tail->read.accessed = fault.address - reinterpret_cast<uintptr_t>(r.address(b));
  host_.readahead.follow(r, b, false);
  if (r.use.adapts && !fill.submit.empty()) host_.readahead.read_beside(r, b, fill.submit);
  after.submit.append(fill.submit);
  after.zero.append(fill.zero);
}

void FaultHandler::met_resident(Region& r, BlockIndex b, const trap::Fault& fault) {
  const Block& block = r.table[b];
  host_.readahead.used(r, b);
  if (fault.kind == trap::FaultKind::write_protect) {
    core::add(ctx_.counters.write_protect_faults);
    // Under the lock: if a reclaim thread protects the block next, that must come after this.
    const Status s = ctx_.trap.unprotect(r.address(b), r.block_size);
    if (s.code() == -EPERM) return met_forbidden_ioctl(r, b, s);
    r.table.clear(b, core::kProtected);
    ctx_.map.note_dirty(r, b);
    return;
  }
  void* const page = reinterpret_cast<void*>(fault.address);
  // A second report of one page of a resident block: the program has dropped the page (madvise). As
  // in any memory, the page then reads as zeros. If the page is present, fill_zero() fails and
  // changes nothing. Stores to the new page are not trapped, so the block is no longer clean.
  if (met_before(fault.address) && ctx_.trap.fill_zero(page, core::kPage).ok() &&
      (block.flags & core::kProtected) != 0) {
    r.table.clear(b, core::kProtected);
    ctx_.trap.unprotect(r.address(b), r.block_size).ignore();
    ctx_.map.note_dirty(r, b);
  }
  ctx_.trap.wake(page, core::kPage).ignore();
}

// The program has forbidden the call that lifts write protection, so the store cannot be let
// through. The SSD has the bytes of a protected block: evict it, and it comes back without
// protection when the access is repeated.
void FaultHandler::met_forbidden_ioctl(Region& r, BlockIndex b, const Status& why) {
  VMEM_LOG_ONCE(core::Level::error,
                "%.*s. Was ioctl forbidden after libvmem had started? Stores to blocks that are protected wait until "
                "those have left memory and come back, and changed blocks cannot leave",
                static_cast<int>(why.text().size()), why.text().data());
  host_.failed.ask_later(r, b);
  if ((r.table[b].flags & core::kProtected) == 0 || leased(r, b) || host_.reclaim_requests.full()) return;
  if (host_.reclaim_requests.add({&r, b, b}, false)) host_.pressure.wake_reclaim();
}

void FaultHandler::met_failed(Region& r, BlockIndex b, const trap::Fault& fault) {
  const Block& block = r.table[b];
  void* const page = reinterpret_cast<void*>(fault.address);
  if ((block.flags & core::kUnanswered) != 0) host_.failed.fail_accesses(r, b);
  // An unfail() that stopped half way may have left other pages with SIGBUS: this page gets it,
  // too.
  if ((block.flags & core::kUnanswered) != 0 && !ctx_.trap.fail(page, core::kPage).ok() && host_.failed.asleep(r, b))
    return;
  if (met_before(fault.address))
    ctx_.trap.fail(page, core::kPage).ignore();  // the program dropped the poison (madvise)
  ctx_.trap.wake(page, core::kPage).ignore();
}

// Returns true if the page was reported before although nothing had to be done. Threads that meet
// several pages in turn are kept apart by a hash, except where pages share a slot.
bool FaultHandler::met_before(uintptr_t address) {
  uintptr_t& last = spurious_[address / core::kPage * 0x9e3779b97f4a7c15u >> 58];
  return std::exchange(last, address) == address;
}

// One of our threads owns the block. If the pages are in place, the program has dropped this page
// (madvise), and the owner itself may have met the hole while hashing. It must not wait for itself,
// so the hole is filled with zeros. That fails if the page is present. It also fails, with the same
// error, while the kernel frees a page table all of whose pages the program drops (Linux 6.14).
void FaultHandler::fill_hole(Frame& frame, const trap::Fault& fault) {
  if (!frame.in_place || fault.kind == trap::FaultKind::write_protect) return;
  void* const page = reinterpret_cast<void*>(fault.address);
  const Status s = ctx_.trap.fill_zero(page, core::kPage);
  frame.holed |= s.ok();
  // Have the access repeated: the end of the transition may depend on it.
  if (!s.ok()) ctx_.trap.wake(page, core::kPage).ignore();
}

// Longer than other functions, to have all states side by side.
void FaultHandler::on_fault(const trap::Fault& fault, uint64_t now, DeferredWork& after) {
  Region* r = ctx_.map.find(fault.address);
  if (r == nullptr) {
    // The region was freed before this report: let the thread access what is there now.
    ctx_.trap.wake(reinterpret_cast<void*>(fault.address), core::kPage).ignore();
    return;
  }
  const BlockIndex b = r->index(reinterpret_cast<void*>(fault.address));
  if (r->dying) return access_of_dying(*r, b, fault);
  const Block& block = r->table[b];
  if (!core::in_transition(block.state) && block.state != State::resident && host_.failed.waits(*r, b)) return;
  if (slow_down(*r, b, fault, now)) return;
  const uint16_t wanted =
      static_cast<uint16_t>(core::kFaultPending | (fault.kind == trap::FaultKind::read ? 0 : core::kStorePending));
  note_access(*r, b, fault, now);
  switch (block.state) {
    case State::unpopulated:
    case State::stored:
      met_absent(*r, b, fault, wanted, after);
      break;
    case State::reading:
      if ((block.flags & core::kFaultPending) == 0) core::add(ctx_.counters.faults);
      r->table.mark(b, wanted);
      host_.readahead.used(*r, b);
      break;
    case State::staged:
      core::add(ctx_.counters.faults);
      core::add(ctx_.counters.soft_faults);
      r->table.mark(b, wanted);
      host_.readahead.used(*r, b);
      if (ctx_.map.frame_table()[block.aux].admitted) ctx_.map.policy(block.aux).touched(block.aux);
      host_.installer.install_or_wait(*r, b, after);
      ctx_.counters.fault_took(now_ns() - now);
      break;
    case State::mapping:
      // fill() wakes the thread, unless the program has dropped the page since: then `holed` does.
      if (fault.kind != trap::FaultKind::write_protect) ctx_.map.frame_table()[block.aux].holed = true;
      r->table.mark(b, wanted);
      host_.readahead.used(*r, b);
      break;
    case State::isolating:
    case State::writing_back:
      if (!ctx_.map.frame_table()[block.aux].dropping) fill_hole(ctx_.map.frame_table()[block.aux], fault);
      if ((block.flags & core::kFaultPending) == 0) core::add(ctx_.counters.faults);
      r->table.mark(b, wanted);
      break;
    case State::resident:
      met_resident(*r, b, fault);
      break;
    case State::poisoned:
      met_failed(*r, b, fault);
      break;
    case State::demoting:
      // If a copy for the CPU is in place, its hole is filled. Else PageIn::settle serves the fault
      // when the demotion ends.
      fill_hole(ctx_.map.frame_table()[block.aux], fault);
      core::add(ctx_.counters.faults);
      r->table.mark(b, wanted);
      break;
    case State::promoting:
      // With unified page tables the thread is woken when the block is made, and then parks at its
      // gate. Woken earlier it would come back again and again, and one of its tries could fall
      // between the mapping of the block and the shutting of the gate.
      if ((block.flags & core::kFaultPending) == 0) core::add(ctx_.counters.faults);
      r->table.mark(b, wanted);
      break;
    case State::on_device:
      if (ctx_.cpu_mappings.met(*r, b, fault, now_ns())) ctx_.device_set.work().notify_one();
      break;
    case State::count_:
      break;
  }
}

}  // namespace vmem::pager
