// The way to a device.
//
//   stored, untouched ──read──┐
//   held (staging frame) ─────┼─> entering: prepare, copy, open ──> on_device
//   resident ──taking, copy───┘
//
// Workers run prepare, copies and waits without the lock, several blocks at a time; an acquire leaves a wish and waits
// until the copy of each of its blocks is issued. What is ready at once, on devices with page tables of their own, it
// issues itself, and a worker does the rest. Nothing here runs on a fault thread or an I/O thread except the end of a
// read, which calls no device.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/fault_server.h"
#include "core/guarded_read.h"
#include "core/log.h"
#include "core/step.h"
#include "pager/clock.h"
#include "pager/drop.h"
#include "pager/insist.h"
#include "pager/neighbours.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::ResidentId;
using core::State;
using core::Status;
using core::Urgency;

namespace {

constexpr BlockIndex kLooksForFrames = 1024;          // blocks of a wish that may hold frames which others wait for
constexpr uint64_t kAheadBytes = uint64_t{64} << 20;  // made free at once for a wish

}  // namespace

// Starts what the wishes ask for, as far as there is room. wake: the workers, for what is ready then.
void Pager::pump_devices(After& after, bool wake) {
  std::array<bool, device::kMaxDevices> full{};
  // Blocks of a size wait for what blocks of that size move through: others on the device go on.
  std::array<std::array<bool, device::kUnitSizes>, device::kMaxDevices> held_up{};
  std::array<uint64_t, device::kMaxDevices> wanted{};  // by all that find a device full: their blocks may lie apart
  for (Gpu& g : gpus_) g.budget.want(0);
  for (auto it = queues_.wishes.begin(); it != queues_.wishes.end();) {
    const size_t d = static_cast<size_t>(it->device);
    bool& size_held_up = held_up[d][device::unit_class(it->region->block_size)];
    if (size_held_up && !full[d]) full[d] = !start_without_frames(*it, kDeviceBatch, after);
    if (full[d] || size_held_up) {
      if (full[d]) wanted[d] += (it->last - it->next + 1) * it->region->block_size;
      ++it;
      continue;
    }
    Start result = Start::done;
    while (it->next <= it->last) {
      result = start_entering(*it->region, it->next, it->device, it->urgency, after);
      if (result == Start::wait && it->owner == nullptr && it->next < it->last) {
        // Of a hint only this block waits until it is where it goes; the rest has no need to.
        Wish one = *it;
        one.last = one.next;
        if (!queues_.wishes.insert(it, one)) break;
        result = Start::done;
      }
      if (result != Start::done) break;
      ++it->next;
    }
    size_held_up = result == Start::no_frame;
    if (size_held_up && !start_without_frames(*it, kLooksForFrames, after)) result = Start::no_room;
    if (result == Start::no_room) {
      full[d] = true;
      wanted[d] += (it->last - it->next + 1) * it->region->block_size;
      if (it->owner != nullptr) read_meanwhile(*it, after);
    }
    it = it->next > it->last ? queues_.wishes.erase(it) : std::next(it);
  }
  for (size_t d = 0; d < gpus_.size(); ++d) {
    if (!full[d]) continue;
    gpus_[d].budget.want(std::min(wanted[d], kAheadBytes));
    gpus_.work().notify_all();
  }
  if (wake) wake_for_ready();
}

// Locked. While room is made on a device, what an acquire waits for there and only the disk has is read into staging
// frames.
void Pager::read_meanwhile(Wish& wish, After& after) {
  Region& r = *wish.region;
  const BlockIndex last = std::min<BlockIndex>(wish.last, wish.next + kDeviceBatch - 1);
  for (BlockIndex b = std::max(wish.next, wish.read_to); b <= last; wish.read_to = ++b) {
    const State state = r.table[b].state;
    if (state != State::stored && !(state == State::untouched && r.from_file())) continue;
    if (r.dying || StarvedQueue::marked(r.table[b]) || !page_in_.start_staging(r, b, wish.urgency, after)) return;
    after.submit.tail->meanwhile = true;
  }
}

// Locked. Of a wish that finds no frame, or stands behind one that finds none, what needs none comes first: who waits
// for it has leased it, so that its frame goes to nobody else before. False: the device is full.
bool Pager::start_without_frames(const Wish& wish, BlockIndex looks, After& after) {
  Region& r = *wish.region;
  const BlockIndex last = std::min<BlockIndex>(wish.last, wish.next + looks - 1);
  for (BlockIndex b = wish.next; b <= last; ++b) {
    const Block& block = r.table[b];
    const bool needs_none = (block.state == State::held && in_staging(map_.residents()[block.aux].pool)) ||
                            (block.state == State::on_device && block.device != wish.device);
    if (needs_none && start_entering(r, b, wish.device, wish.urgency, after) == Start::no_room) return false;
  }
  return true;
}

void Pager::wake_for_ready() {
  for (const Gpu& g : gpus_) {
    if (g.ready.empty()) continue;
    if (g.ready.size() * g.ready.front()->region->block_size > kBatchBytes) return gpus_.work().notify_all();
    gpus_.work().notify_one();
  }
}

// Locked. Claims a block for device d.
Start Pager::start_entering(Region& r, BlockIndex b, int d, Urgency urgency, After& after) {
  Block& block = r.table[b];
  Gpu& g = gpus_[static_cast<size_t>(d)];
  const size_t size = r.block_size;
  if (r.dying) return Start::done;
  switch (block.state) {
    case State::entering:
      return block.device == d ? Start::done : Start::wait;
    case State::on_device:
      if (block.device == d) {
        blocks_.adopt(r, b);
        return Start::done;
      }
      if (map_.residents()[block.aux].shown) return Start::done;  // an acquire hides it first
      if (urgency != Urgency::acquire && leased(r, b)) return Start::done;
      break;
    case State::failed:
      return Start::done;  // an acquire says why
    case State::untouched:
    case State::stored:
    case State::held:
      break;
    case State::resident:
      if (urgency != Urgency::acquire && leased(r, b)) return Start::done;
      break;
    default:
      return Start::wait;
  }
  if (block.state == State::untouched && !tables_.may_grow(r, b)) return Start::no_room;
  // Of a budget that has become too small for it no room comes, however long a hint would wait.
  if (size > g.budget.limit() && urgency != Urgency::acquire) return Start::done;
  if (!g.budget.fits(size) || !map_.reserve_block()) return Start::no_room;
  const State from = block.state;
  const bool hinted = urgency != Urgency::acquire;
  if (from == State::on_device) {  // from another device, directly
    map_.residents()[block.aux].hinted = hinted;
    if (hinted) core::add(counters_.prefetched_blocks);
    g.from_peers.push_back(migrator_.begin(r, b, d));
    gpus_.work().notify_one();
    return Start::done;
  }
  const bool zero = from == State::untouched && !r.from_file();
  const bool staged = from == State::held && in_staging(map_.residents()[block.aux].pool);
  std::byte* frame = nullptr;
  std::byte* scratch = nullptr;
  if (!zero && !staged) {
    if (block.extent && block.extent.codec() != 0 && (from == State::stored || from == State::untouched)) {
      scratch = frames_.get_bounce(size);
      if (scratch == nullptr) return Start::no_frame;
    }
    frame = supply_.frame(r, staging_.of(r).growth.reserve());
    if (frame == nullptr) {
      if (scratch != nullptr) frames_.put_bounce(scratch, size);
      return Start::no_frame;
    }
  }
  if (hinted) core::add(counters_.prefetched_blocks);
  g.budget.charge(size);
  if (from == State::held || from == State::resident) {
    Resident& resident = map_.residents()[block.aux];
    if (resident.admitted) map_.policy(block.aux).remove(block.aux);
    resident.admitted = false;
    resident.changed = resident.undecided = false;
    resident.hinted = hinted;
    if ((block.flags & core::kReadAhead) != 0) read_ahead_.used(r, b);
    Move* m = map_.new_move(r, b);
    m->device = d;
    m->way = core::Way::to_device;
    if (staged) {
      m->image = resident.frame;
    } else {
      m->image = frame;
      m->source = from == State::held ? resident.frame : r.address(b);
    }
    if (from == State::resident) {
      if ((block.flags & core::kProtected) == 0) block.flags |= core::kDirty;
      resident.in_place = resident.promoted = true;
      resident.dropping = resident.holed = false;
      r.table.change(b, State::resident, State::taking);
    } else {
      resident.pool = static_cast<uint8_t>(kDevicePools + d);
      r.table.change(b, State::held, State::entering);
      block.device = static_cast<uint8_t>(d);
    }
    m->staged = true;
    g.ready.push_back(m);
    return Start::done;
  }
  const uint32_t stamp = block.aux;
  const ResidentId id = map_.new_resident(r, b, nullptr, static_cast<uint8_t>(kDevicePools + d));
  map_.residents()[id].stamp = stamp;
  map_.residents()[id].hinted = hinted;
  block.flags &= static_cast<uint16_t>(~core::kDirty);
  r.table.change(b, from, State::entering);
  block.device = static_cast<uint8_t>(d);
  tables_.charge(r);
  Move* m = map_.new_move(r, b);
  m->device = d;
  m->way = core::Way::to_device;
  m->image = frame;
  m->coded = scratch;
  m->staged = true;
  m->was_untouched = from == State::untouched;
  m->speculative = hinted;
  if (zero) {
    core::add(counters_.zero_fills);
    block.digest = store::zero_digest(size);
    block.flags |= core::kDigest;
    g.ready.push_back(m);
    return Start::done;
  }
  reader_.prepare_read(m, urgency, *this);
  after.submit.push_back(m);
  return Start::done;
}

void Pager::io_ended(Move* m) {
  After after;
  finish_device_read(m, after);
  page_in_.run(after);
}

// Unlocked; state entering, the trap still in place.
void Pager::finish_device_read(Move* m, After& after) {
  Region& r = *m->region;
  core::step("device.read");
  reader_.verify_read(m);
  Lock lock(map_.mutex());
  Block& block = r.table[m->block];
  if (m->coded != nullptr) frames_.put_bounce(m->coded, r.block_size);
  m->coded = nullptr;
  if (m->status.ok()) {
    if (!block.extent && r.writable()) {
      block.digest = m->digest;
      block.flags |= core::kDigest;
    }
    Gpu& g = gpus_[static_cast<size_t>(m->device)];
    g.ready.push_back(m);
    if (g.sleepers != 0 && leased(r, m->block)) {
      map_.notify();  // who waits for it begins with it, and need not be woken by somebody else who has
    } else {
      gpus_.work().notify_one();
    }
    return;
  }
  // Nothing was made yet: the block is where it was. The acquire that waits for it learns why; a CPU touch reads again.
  core::log(m->speculative ? core::Level::warning : core::Level::error, "%.*s, on its way to device %d",
            static_cast<int>(m->status.text().size()), m->status.text().data(), m->device);
  r.keep_reason(m->block, m->status);
  staging_.of(r).frames.put(m->image);
  gpus_[static_cast<size_t>(m->device)].budget.credit(r.block_size);
  map_.free_resident(m->block, r);
  r.table.change(m->block, State::entering, block.extent ? State::stored : State::untouched);
  const BlockIndex b = m->block;
  map_.free_move(m);
  page_in_.settle(r, b, after);
  came_free(after);
}

[[gnu::noinline]] int copy_protected(const Region& r, std::byte* to, const std::byte* from) {
  if (!r.guarded && !plain(core::MappingQuery(), r, r.index(from))) r.guarded = true;
  if (r.guarded) return core::read_guarded(to, from, r.block_size);
  core::may_wait_for_a_fault("a block is copied from its place");
  memcpy(to, from, r.block_size);
  return 0;
}

// Unlocked. Blocks that come from ordinary host memory are copied to their staging frames first.
void Pager::pull(Batch& batch, int d) {
  core::Few<trap::Range, Batch::capacity()> drops;
  for (Move* m : batch) {
    if (m->source == nullptr) continue;
    Region& r = *m->region;
    const bool in_place = m->source == r.address(m->block);
    if (in_place) {
      core::step("device.taking");
      m->status = trap_->protect(m->source, r.block_size);
      if (!m->status.ok()) continue;
    }
    if (!in_place) {
      memcpy(m->image, m->source, r.block_size);
    } else if (copy_protected(r, m->image, m->source) != 0) {
      m->status = core::error(EFAULT, "pages of the block cannot be read by anybody: it stays in host memory");
      continue;
    }
    core::add(counters_.copied_bytes, r.block_size);
  }
  core::step("device.pulled");
  {
    Lock lock(map_.mutex());
    for (Move* m : batch) {
      if (m->source == nullptr || !m->status.ok()) continue;
      Resident& resident = map_.residents()[m->region->table[m->block].aux];
      if (resident.holed) {  // there may have been stores since it was copied
        m->status = core::error(EBUSY, "the program dropped a page of the block meanwhile");
        continue;
      }
      resident.dropping = true;
      if (m->source == m->region->address(m->block))
        drops.push_back({reinterpret_cast<uintptr_t>(m->source), m->region->block_size});
    }
  }
  if (!drops.empty() && !drop_pages(*trap_, drops.all())) {
    for (Move* m : batch) {
      if (m->source == nullptr || !m->status.ok() || m->source != m->region->address(m->block)) continue;
      if (!drop_one(*trap_, *m->region, m->block)) m->status = core::error(EBUSY, "a page of the block is pinned");
    }
  }
  After after;
  {
    Lock lock(map_.mutex());
    for (Move* m : batch) {
      if (m->source == nullptr) continue;
      Region& r = *m->region;
      Block& block = r.table[m->block];
      Resident& resident = map_.residents()[block.aux];
      if (!m->status.ok()) {  // stays where it is
        gpus_[static_cast<size_t>(d)].budget.credit(r.block_size);
        gpus_[static_cast<size_t>(d)].failure = m->status;
        ++gpus_[static_cast<size_t>(d)].failures;
        staging_.of(r).frames.put(m->image);
        block.flags &= static_cast<uint16_t>(~(core::kProtected | core::kDirty | core::kWanted | core::kWantedWrite));
        resident.promoted = false;
        r.table.change(m->block, State::taking, State::resident);
        trap_->unprotect(r.address(m->block), r.block_size).ignore();
        map_.admit(r, m->block, map_.clock().stamp());
        continue;
      }
      if (m->source != r.address(m->block)) {
        frames_.put_bounce(m->source, r.block_size);
      } else {
        r.table.change(m->block, State::taking, State::entering);
        block.device = static_cast<uint8_t>(d);
        resident.pool = static_cast<uint8_t>(kDevicePools + d);
      }
      budget_.credit(r.block_size);
      block.flags &= static_cast<uint16_t>(~core::kProtected);
      resident.in_place = resident.dropping = resident.promoted = false;
      resident.frame = nullptr;
      m->source = nullptr;
    }
    batch.erase_if([&](Move* m) {
      lock.hold();
      const bool failed = !m->status.ok();
      if (failed) map_.free_move(m);
      return failed;
    });
    came_free(after);
  }
  page_in_.run(after);
}

// Unlocked. Makes the blocks on their device and begins to fill them.
void Pager::begin_in(InBatch& in) {
  const Batch& batch = in.moves;
  const int d = in.device;
  core::Few<device::Range, Batch::capacity()> made_of;
  core::Few<device::Copy, Batch::capacity()> frames;
  for (const Move* m : batch) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(m->region->address(m->block));
    made_of.push_back({at, m->region->block_size});
    // A managed block is zeros when it is made. Others are cleared as they are filled: nobody waits for the device.
    if (m->image != nullptr || own_page_tables()) frames.push_back({at, m->image, m->region->block_size});
  }
  const std::span<const device::Range> ranges = made_of.all();
  const std::span<const device::Copy> copies = frames.all();
  core::step("device.preparing");
  Status& s = in.status;
  s = devices_->prepare(ranges, d, &in.torn);
  if (s.code() == -device::kIntruder)
    core::fatal("a block was touched while it was made on device %d: %.*s", d, static_cast<int>(s.text().size()),
                s.text().data());
  in.made = s.ok();
  if (!in.made) return;
  // Threads that met the trap before it went: their next try meets the device's door and parks there.
  for (const device::Range& range : ranges)
    if (!own_page_tables()) trap_->wake(reinterpret_cast<void*>(range.address), range.size).ignore();
  core::step("device.prepared");
  if (!copies.empty()) s = devices_->copy_in(d, copies, &in.ticket);
  if (s.ok()) s = devices_->map(ranges);
}

// Locked. An acquire may go on: its stream waits for the copies.
void Pager::note_issued(const InBatch& in) {
  uint64_t copied = 0;
  for (Move* m : in.moves) {
    Resident& resident = map_.residents()[m->region->table[m->block].aux];
    resident.issued = true;
    ++m->region->issued;
    resident.ticket = in.ticket;
    if (m->image != nullptr) copied += m->region->block_size;
  }
  gpus_[static_cast<size_t>(in.device)].in_bytes += copied;
  core::add(counters_.host_to_device_bytes, copied);
  map_.notify();
}

// Unlocked. They are there, or where they were.
void Pager::end_in(InBatch& in) {
  Batch& batch = in.moves;
  const int d = in.device;
  const bool made = in.made;
  bool& torn = in.torn;
  Status& s = in.status;
  core::Few<device::Range, Batch::capacity()> made_of;
  for (const Move* m : batch)
    made_of.push_back({reinterpret_cast<uintptr_t>(m->region->address(m->block)), m->region->block_size});
  const std::span<const device::Range> ranges = made_of.all();
  const bool over_trap = !own_page_tables();
  if (s.ok()) core::step("device.issued");
  if (in.ticket != nullptr) {
    // Whatever else went wrong: a kernel may have the blocks, and their frames are to be somebody else's.
    const Status copied = wait_for_copy(*devices_, d, in.ticket);
    if (s.ok()) s = copied;
  }
  if (s.ok()) {
    s = devices_->open(ranges, device::Access::read);
    if (!s.ok() && devices_->health(d).ok()) {
      core::fatal("blocks on device %d cannot be opened for the CPU, which waits for them: %.*s", d,
                  static_cast<int>(s.text().size()), s.text().data());
    }
  }
  if (!s.ok() && made) {
    const Status hidden = insist(*devices_, d, "unmapping a block", [&] { return devices_->unmap(ranges); });
    if (hidden.ok() && holes_.punch(ranges).ok()) torn = true;
  }
  if (torn) holes_.restore_trap(ranges);
  core::step("device.entered");
  After after;
  const Status health = s.ok() ? Status() : devices_->health(d);
  const bool full = !made && s.code() == -ENOMEM;
  const uint64_t kept = full ? gpus_.kept(d) : 0;
  Lock lock(map_.mutex());
  if (!s.ok()) gpus_.saw_loss(d, health);  // the books still say how it was
  if (!over_trap) gpus_[static_cast<size_t>(d)].budget.set_keeps(true);
  for (Move* m : batch) {
    Region& r = *m->region;
    Block& block = r.table[m->block];
    Resident& resident = map_.residents()[block.aux];
    if (!s.ok()) {
      undo_entering(m, s, !over_trap || !made || torn, after);
      continue;
    }
    resident.issued = false;
    --r.issued;
    resident.ticket.reset();
    resident.frame = nullptr;
    const uint32_t stamp = resident.stamp;
    r.table.change(m->block, State::entering, State::on_device);
    ++r.arrived;
    if (over_trap)
      block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));  // woken when it had been made
    if (resident.hinted) block.flags |= core::kReadAhead | core::kPrefetched;
    if (m->image != nullptr && !supply_.keep_copy(r, m->block, m->image)) staging_.of(r).frames.put(m->image);
    map_.admit(r, m->block, stamp);
    blocks_.answer(r, m->block);
    map_.free_move(m);
  }
  if (full) gpus_.follow_down(d, kept);
  if (!queues_.departures.empty()) gpus_.work().notify_one();
  came_free(after);
  lock.unlock();
  page_in_.run(after);
}

// Unlocked. Makes the blocks on device d, fills them and opens them.
void Pager::enter_batch(Batch& batch, int d) {
  pull(batch, d);
  if (batch.empty()) return;
  InBatch in{.moves = batch, .device = d};
  begin_in(in);
  if (in.status.ok()) {
    Lock lock(map_.mutex());
    note_issued(in);
  }
  end_in(in);
}

// Locked. Of what is ready for device d: what somebody waits for who could do it as well, without two threads that wake
// each other. What has to be copied in host memory first the workers do, side by side.
Batch Pager::take_ready(std::span<const SpanOf> spans, int d) {
  Batch mine;
  uint64_t bytes = 0;
  core::OwnVector<Move*>& ready = gpus_[static_cast<size_t>(d)].ready;
  const auto rest = std::remove_if(ready.begin(), ready.end(), [&](Move* m) {
    const size_t size = m->region->block_size;
    const bool is_mine = m->source == nullptr && !mine.full() && (mine.size() < 2 || bytes + size <= kBatchBytes) &&
                         std::any_of(spans.begin(), spans.end(), [&](const SpanOf& s) {
                           return s.region == m->region && s.first <= m->block && m->block <= s.last;
                         });
    if (is_mine) mine.push_back(m);
    bytes += is_mine ? size : 0;
    return is_mine;
  });
  ready.erase(rest, ready.end());
  std::sort(mine.begin(), mine.end(), lies_before);
  return mine;
}

// Unlocked. Begins with them; a worker ends it.
void Pager::begin_batch(const Batch& batch, int d) {
  InBatch in{.moves = batch, .device = d};
  begin_in(in);
  if (!in.status.ok()) return end_in(in);
  Lock lock(map_.mutex());
  note_issued(in);
  for (Move* m : in.moves) gpus_[static_cast<size_t>(d)].issued.push_back(m);
  gpus_.work().notify_one();
}

// Locked on entry and on return. Of device d the oldest that were begun together. False: there are none.
bool Pager::end_issued(Lock& lock, int d) {
  MoveList& issued = gpus_[static_cast<size_t>(d)].issued;
  if (issued.empty()) return false;
  const auto ticket_of = [&](const Move* m) VMEM_LOCKED -> const device::Ticket& {
    return map_.residents()[m->region->table[m->block].aux].ticket;
  };
  {
    InBatch in{.device = d, .ticket = ticket_of(issued.head), .made = true};
    while (!issued.empty() && !in.moves.full() && ticket_of(issued.head) == in.ticket) in.moves.push_back(issued.pop());
    lock.unlock();
    end_in(in);
  }
  lock.lock();
  return true;
}

// Locked; state entering. `trapped`: the trap stands there (again). Its bytes are in the staging frame still, unless a
// kernel may have changed them since.
void Pager::undo_entering(Move* m, const Status& why, bool trapped, After& after) {
  Region& r = *m->region;
  const BlockIndex b = m->block;
  Block& block = r.table[b];
  Gpu& g = gpus_[static_cast<size_t>(m->device)];
  g.budget.credit(r.block_size);
  g.failure = why;
  ++g.failures;
  m->status = why;
  Resident& resident = map_.residents()[block.aux];
  const bool lent = resident.issued && resident.changed;
  r.issued -= resident.issued ? 1 : 0;
  resident.issued = false;
  resident.ticket.reset();
  if (!trapped) r.lost = true;
  if (lent) {
    if (m->image != nullptr) staging_.of(r).frames.put(m->image);
    map_.free_resident(b, r);
    failed_.mark_lost(r, b, State::entering, why);
    map_.free_move(m);
    return;
  }
  if (m->image == nullptr) {
    map_.free_resident(b, r);
    r.table.change(b, State::entering, block.extent ? State::stored : State::untouched);
  } else {
    resident.frame = m->image;
    resident.pool = staging_pool(r);
    r.table.change(b, State::entering, State::held);
    map_.admit(r, b, map_.clock().stamp());
  }
  map_.free_move(m);
  if (!r.lost) page_in_.settle(r, b, after);
}

}  // namespace vmem::pager
