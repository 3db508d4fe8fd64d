// What a fault asks for: the trap's events, what each means in the state that the block is in, and what a fault tells
// read-ahead.
#include <algorithm>
#include <array>
#include <chrono>

#include "core/break.h"
#include "core/log.h"
#include "core/step.h"
#include "pager/clock.h"
#include "pager/neighbours.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::State;
using core::Status;
using core::Urgency;

namespace {

constexpr uint64_t kIdleRooms = 16;  // a stream is idle when blocks left so many times their room since its last use

constexpr uint16_t kForgetReadAhead = static_cast<uint16_t>(~(core::kReadAhead | core::kMarker | core::kPrefetched));

// A declared scan of more than memory holds will not come back soon.
bool scanned(const Region& r, uint64_t room) {
  return r.access == policy::Access::sequential && r.span >= room / 2;
}

}  // namespace

// One round of the trap's events; true when there may be more. One thread at a time.
bool Pager::serve_events(int timeout_ms) {
  std::array<trap::Event, 64> room;
  size_t count = 0;
  if (Status s = trap_->wait(room, timeout_ms, &count); !s.ok()) {
    VMEM_LOG_ONCE(core::Level::error,
                  "faults can no longer be read, threads that access blocks that are not present will wait: %.*s",
                  static_cast<int>(s.text().size()), s.text().data());
    return false;
  }
  if (count == 0) return timeout_ms < 0;
  const std::span<const trap::Event> events(room.data(), count);
  for (const trap::Event& e : events) {
    if (e.kind == trap::Event::Kind::pressure) on_pressure(e.bytes);
    if (e.kind == trap::Event::Kind::tunables) on_knobs();
  }
  core::step("fault.read");
  const uint64_t now = now_ns();
  After after;
  {
    Lock lock(mutex_);
    for (const trap::Event& e : events) {
      if (e.kind == trap::Event::Kind::fault) on_fault(e.fault, now, after);
    }
    pump_speculative(after);
  }
  run(after);
  return timeout_ms < 0 || count == room.size();
}

void Pager::fault_loop() {
  while (!threads_.stop_faults.load(std::memory_order_relaxed) && serve_events(-1)) {
  }
}

// On an I/O thread: the reads that faults cause are issued without waking another thread.
void Pager::events_ready(void* self) {
  while (static_cast<Pager*>(self)->serve_events(0)) {
  }
}

// A trap may give a touch up that is not answered in time (the module: fault_timeout_ms of its sysfs), so that nobody
// waits for a runtime that is gone. This one is there, and its disk is slow or its queue for memory long: the threads
// that wait are sent to report their touches again, which begins their time anew.
void Pager::renew_loop() {
  const auto renew = [this](const Region& r, BlockIndex b) {
    const Block& block = r.table[b];
    // A block on its way to a device must not be met half made: see on_fault().
    if (r.dying || (block.flags & core::kWanted) == 0 || block.state == State::entering) return;
    trap_->wake(r.address(b), r.block_size).ignore();
  };
  Lock lock(mutex_);
  while (!threads_.stop) {
    const unsigned ms = machine_.knobs.fault_timeout_ms;
    const uint64_t until = now_ns() + std::max(ms, 30u) / 3 * uint64_t{1000000};
    for (uint64_t now = now_ns(); !threads_.stop && now < until && ms == machine_.knobs.fault_timeout_ms;
         now = now_ns())
      renew_.wait_for(lock, std::chrono::nanoseconds(until - now));
    for (const auto& m : moves_.all())
      if (m->begun_ns != 0) renew(*m->region, m->block);
    for (const Starved& s : waits_.queue()) renew(*s.region, s.block);
    for (const CpuAccess& a : shown_) renew(*a.region, a.block);
  }
}

// An access of a region that is being freed gets SIGBUS. From here, where that can be, and not from detach() alone:
// detach() waits for what is under way, and that may wait for a signal handler which makes this access. What is not
// answered here is when the move of its block has ended, or by detach(). Begins no move, of no block.
void Pager::touch_of_dying(Region& r, BlockIndex b, const trap::Fault& fault) {
  if (r.lost || r.quiet) return;  // nothing of ours may be put there; the frames are taken out
  Block& block = r.table[b];
  void* const page = reinterpret_cast<void*>(fault.address);
  switch (block.state) {
    case State::resident:
      if (fault.kind == trap::FaultKind::write_protect) {
        block.flags &= static_cast<uint16_t>(~core::kProtected);
        trap_->unprotect(r.address(b), r.block_size).ignore();
        return;
      }
      if (fault.address == last_spurious_) trap_->fill_zero(page, core::kPage).ignore();  // as on_fault() does
      last_spurious_ = fault.address;
      trap_->wake(page, core::kPage).ignore();
      return;
    case State::taking:
    case State::writing:  // a hole that the program made, perhaps met by a thread of ours
      if (const Resident& resident = residents_[block.aux];
          resident.in_place && !resident.dropping && fault.kind != trap::FaultKind::write_protect)
        trap_->fill_zero(page, core::kPage).ignore();
      return;
    case State::on_device:  // page tables of the device's own: the trap stands there, or the CPU is shown a copy
      if (residents_[block.aux].shown) {
        trap_->unprotect(r.address(b), r.block_size).ignore();
        return;
      }
      [[fallthrough]];
    case State::untouched:
    case State::stored:
    case State::held:
    case State::failed:
      // Refused: it is failed already, all of it or a part, or will be asked for again.
      if (!trap_->fail(r.address(b), r.block_size).ok() && !trap_->fail(page, core::kPage).ok())
        trap_->wake(r.address(b), r.block_size).ignore();
      return;
    default:
      return;
  }
}

void Pager::on_fault(const trap::Fault& fault, uint64_t now, After& after) {
  Region* r = map_.find(fault.address);
  if (r == nullptr) {
    // Its region was freed between the touch and this report: let the thread meet what is there now.
    trap_->wake(reinterpret_cast<void*>(fault.address), core::kPage).ignore();
    return;
  }
  const BlockIndex b = r->index(reinterpret_cast<void*>(fault.address));
  if (r->dying) return touch_of_dying(*r, b, fault);
  Block& block = r->table[b];
  if (!core::in_transition(block.state) && block.state != State::resident && failed_.retries().asleep(*r, b)) return;
  const uint16_t wish =
      static_cast<uint16_t>(core::kWanted | (fault.kind == trap::FaultKind::read ? 0 : core::kWantedWrite));
  const bool protection = block.state == State::resident && fault.kind == trap::FaultKind::write_protect;
  if ((block.flags & core::kWanted) == 0 && block.state != State::resident && block.state != State::failed)
    r->heat.note(b, r->blocks, now);
  if (fault.kind == trap::FaultKind::read) {
    r->stores_in_row = 0;
  } else if (r->stores_in_row < UINT8_MAX && (!protection || (block.flags & core::kReadAhead) != 0)) {
    ++r->stores_in_row;
  }
  switch (block.state) {
    case State::untouched:
    case State::stored: {
      if ((block.flags & core::kWanted) != 0) return;  // queued for memory already
      core::add(counters_.faults);
      if (block.state == State::untouched && !tables_.may_grow(*r, b)) return failed_.refuse_growth(*r, b);
      block.flags |= wish;
      After fill;
      if (!start_fill(*r, b, Urgency::fault, fill)) waits_.starve_fault(*r, b);
      follow(*r, b, false);
      if (r->adapts && !fill.submit.empty()) read_beside(*r, b, fill.submit);
      after.submit.append(fill.submit);
      after.zero.append(fill.zero);
      break;
    }
    case State::filling:
      if ((block.flags & core::kWanted) == 0) core::add(counters_.faults);
      block.flags |= wish;
      used(*r, b);
      break;
    case State::held:
      core::add(counters_.faults);
      core::add(counters_.soft_faults);
      block.flags |= wish;
      used(*r, b);
      if (residents_[block.aux].admitted) map_.policy(block.aux).touched(block.aux);
      begin_install(*r, b, after);
      counters_.fault_took(now_ns() - now);
      break;
    case State::installing:
      block.flags |= wish;
      used(*r, b);
      break;
    case State::taking:
    case State::writing:
      if (const Resident& resident = residents_[block.aux];
          resident.in_place && !resident.dropping && fault.kind != trap::FaultKind::write_protect) {
        // The block's pages are in place, so the program dropped this one itself (madvise), and it may be one of our
        // own threads that met the hole while hashing: it must not wait for itself. A page that is there makes this
        // fail.
        trap_->fill_zero(reinterpret_cast<void*>(fault.address), core::kPage).ignore();
      }
      if ((block.flags & core::kWanted) == 0) core::add(counters_.faults);
      block.flags |= wish;
      break;
    case State::resident:
      used(*r, b);
      if (protection) {
        core::add(counters_.write_protect_faults);
        block.flags &= static_cast<uint16_t>(~core::kProtected);
        // Under the lock: an evictor that protects this block next must come after.
        trap_->unprotect(r->address(b), r->block_size).ignore();
        break;
      }
      core::add(counters_.spurious_faults);
      if (fault.address == last_spurious_) {
        // Twice on one page of a block that is in place: the program dropped the page itself (madvise). As for any
        // memory it then reads zeros; a page that is there after all makes this fail and changes nothing.
        trap_->fill_zero(reinterpret_cast<void*>(fault.address), core::kPage).ignore();
      }
      last_spurious_ = fault.address;
      trap_->wake(reinterpret_cast<void*>(fault.address), core::kPage).ignore();
      break;
    case State::failed:
      if ((block.flags & core::kUnanswered) != 0) failed_.fail_accesses(*r, b);
      // Other pages of it get SIGBUS already, perhaps, after an unfail() that was refused half way: this one, too.
      if ((block.flags & core::kUnanswered) != 0 &&
          !trap_->fail(reinterpret_cast<void*>(fault.address), core::kPage).ok() && failed_.retries().asleep(*r, b))
        break;
      trap_->wake(reinterpret_cast<void*>(fault.address), core::kPage).ignore();
      break;
    case State::leaving:
      if (residents_[block.aux].in_place && fault.kind != trap::FaultKind::write_protect)  // as above
        trap_->fill_zero(reinterpret_cast<void*>(fault.address), core::kPage).ignore();
      // The trap stands there already, the books do not say so yet: settle() grants it.
      core::add(counters_.faults);
      block.flags |= wish;
      break;
    case State::entering:
      // Where the CPU sees what the device sees: woken when the block has been made: it goes on then, and parks at the
      // device's door. Sooner it would come back at once, again and again, and one of its tries would fall between the
      // mapping of the block and its shutting.
      if ((block.flags & core::kWanted) == 0) core::add(counters_.faults);
      block.flags |= wish;
      break;
    case State::on_device:
      if (shown_.met(*r, b, fault, now_ns())) gpu_work_.notify_one();
      break;
    case State::count_:
      break;
  }
}

// A block that was read ahead is touched: it, and those of its stream up to it, were worth reading.
void Pager::used(Region& r, BlockIndex b) {
  Block& block = r.table[b];
  if ((block.flags & core::kReadAhead) == 0) return;
  const bool marker = (block.flags & core::kMarker) != 0;
  const int64_t stride = std::max<int32_t>(1, std::abs(residents_[block.aux].stride));
  const int64_t step = residents_[block.aux].stride < 0 ? stride : -stride;
  block.flags &= kForgetReadAhead;
  residents_.seen(residents_[block.aux]);
  core::add(counters_.prefetch_hits);
  for (int64_t i = static_cast<int64_t>(b) + step; i >= 0 && i < static_cast<int64_t>(r.blocks); i += step) {
    Block& before = r.table[static_cast<BlockIndex>(i)];
    if ((before.flags & core::kReadAhead) == 0 || before.state != State::resident) break;
    before.flags &= kForgetReadAhead;
    residents_.seen(residents_[before.aux]);
    core::add(counters_.prefetch_hits);
    if (residents_[before.aux].admitted) map_.policy(before.aux).touched(before.aux);
  }
  follow(r, b, marker);
}

// Tells read-ahead of a fault, and does what follows from it.
void Pager::follow(Region& r, BlockIndex b, bool marker) {
  const uint64_t limit = budget_.ahead_limit();
  const auto w = r.readahead.on_fault(b, marker, {limit / r.block_size, clock_.pages()});
  pass(r, r.readahead.passed(), true);
  pass(r, r.readahead.given_up(), false);
  if (w) {
    const uint64_t bytes = w->count * r.block_size;
    if (residents_.ahead_bytes() + bytes > limit) give_up_idle(bytes);
    speculate(r, *w, Urgency::readahead);
  }
  drop_behind(r);
}

// Block b is being read for a fault, `reads` has its move: with it what lies beside it, where that is how the region is
// used. It stays the first, and the others follow in the order of their places, so that upwards all are one read, and
// downwards the others are one that nobody waits for. A stream reads ahead in its own time.
void Pager::read_beside(Region& r, BlockIndex b, MoveList& reads) {
  if (r.access != policy::Access::normal || r.readahead.streams() || !waits_.queue().empty()) return;
  const BlockIndex first = r.neighbours.first(b);
  uint64_t present = 0;
  for (uint32_t i = 0; i < r.neighbours.count(b); ++i)
    present |= uint64_t{core::in_memory(r.table[first + i].state)} << i;
  policy::Run run = r.neighbours.around(b, present);
  if (run.count < 2) return;
  run.count = std::min(run.count, 1 + budget_.ahead_limit() / r.block_size / 4);
  // The run goes on as it is used: one that was stored to will be.
  const Block& before = r.table[static_cast<BlockIndex>(static_cast<int64_t>(b) - run.stride)];
  const bool stores = r.writable() && (before.flags & core::kProtected) == 0 &&
                      (before.state == State::resident || (before.flags & core::kWantedWrite) != 0);
  const uint64_t cap = speculative_limit(r);
  MoveList others;
  for (uint64_t i = 1; i < run.count; ++i) {
    const auto n = static_cast<BlockIndex>(static_cast<int64_t>(b) + static_cast<int64_t>(i) * run.stride);
    Block& block = r.table[n];
    // Zeros are made faster than they are moved, and what is waited for has its turn.
    const bool stored = block.state == State::stored;
    const bool in_file = block.state == State::untouched && r.from_file() && !r.in_hole(n) && tables_.may_grow(r, n);
    After fill;
    if ((!stored && !in_file) || (block.flags & core::kWanted) != 0 || StarvedQueue::marked(block) ||
        !queues_.speculation.may_start(r.block_size, cap) || !start_fill(r, n, Urgency::readahead, fill)) {
      run.count = i;
      break;
    }
    Move* m = fill.submit.pop();
    m->io.urgency = Urgency::fault;  // as b's: engines merge what is of one urgency
    m->stored_soon = stores;
    queues_.speculation.started(*m);
    core::add(counters_.neighbour_blocks);
    run.stride > 0 ? others.push_back(m) : others.push_front(m);
  }
  if (r.transfer == trap::Transfer::copy && !stores) place_together(others, queues_.together);
  reads.append(others);
  r.readahead.presume(run);
}

// The reader of a stream is past these (used), or nobody comes for them. In a declared scan they leave before anything
// else, the oldest first; what nobody used does so in any case, and keeps its marks, so that it counts as wasted if
// that is true.
void Pager::pass(Region& r, const policy::Run& run, bool used) {
  const bool leave = !used || scanned(r, frames_.room());
  queues_.speculation.forget(r, run);
  for (uint64_t i = 0; i < run.count; ++i) {
    const auto b = static_cast<BlockIndex>(static_cast<int64_t>(run.first) + static_cast<int64_t>(i) * run.stride);
    Block& block = r.table[b];
    if (block.state != State::resident && (used || block.state != State::held)) continue;
    Resident& resident = residents_[block.aux];
    if (!used && !resident.ahead) continue;
    if ((block.flags & core::kReadAhead) != 0 && resident.admitted) map_.policy(block.aux).touched(block.aux);
    if (used && (block.flags & core::kReadAhead) != 0) {
      block.flags &= kForgetReadAhead;
      core::add(counters_.prefetch_hits);
    }
    if (used) residents_.seen(resident);
    if (!leave || !resident.admitted) continue;
    bool pinned = false;
    if (temperature(r, b, &pinned) != policy::Temperature::normal || pinned) continue;
    map_.policy(block.aux).advise(block.aux, policy::Temperature::cold, r.priority, false);
  }
}

// There is no room to read `bytes` ahead: streams that nobody has read from while memory was filled many times over
// make some.
void Pager::give_up_idle(uint64_t bytes) {
  const uint64_t room = frames_.room() / core::kPage;
  if (clock_.pages() < sums_.looked_ahead + room / 8 || clock_.pages() < kIdleRooms * room) return;
  sums_.looked_ahead = clock_.pages();
  for (auto& [base, region] : regions_) {
    for (size_t i = 0; i < policy::ReadAhead::kStreams && bytes != 0; ++i) {
      const policy::Run run = region->readahead.give_up(clock_.pages() - kIdleRooms * room);
      if (run.count == 0) break;
      pass(*region, run, false);
      bytes -= std::min(bytes, run.count * region->block_size);
    }
  }
}

// What a declared scan has passed makes room at once, so that the same few frames, warm and huge, serve the whole scan,
// and write-back keeps step with the stores.
void Pager::drop_behind(Region& r) {
  if (!scanned(r, frames_.room()) || queues_.evict_requests.full()) return;
  const policy::Run run = r.readahead.leave_behind(std::max<uint64_t>(2, (uint64_t{16} << 20) / r.block_size));
  if (run.count == 0) return;
  const auto last =
      static_cast<BlockIndex>(static_cast<int64_t>(run.first) + static_cast<int64_t>(run.count - 1) * run.stride);
  if (!queues_.evict_requests.add({&r, std::min(run.first, last), std::max(run.first, last)}, true)) return;
  need_evict_.notify_one();
}

}  // namespace vmem::pager
