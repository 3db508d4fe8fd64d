// The way in: frame -> bytes -> in place, for a fault (faults.cpp), an acquire, or with less urgency for read-ahead and
// prefetch.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/break.h"
#include "core/log.h"
#include "core/on_exit.h"
#include "core/step.h"
#include "pager/clock.h"
#include "pager/neighbours.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::ResidentId;
using core::State;
using core::Status;
using core::Urgency;
using trap::Transfer;

namespace {

constexpr uint64_t kRefill = 1 << 20;  // bytes; the engine's largest transfer
constexpr uint8_t kStoresInRow = 4;    // first accesses that are stores: the next will be one too

constexpr uint16_t kForgetReadAhead = static_cast<uint16_t>(~(core::kReadAhead | core::kMarker | core::kPrefetched));

}  // namespace

// As start_fill(), into a staging frame, where the block stays held: untouched blocks of files, and stored ones.
bool Pager::start_staging(Region& r, BlockIndex b, After& after) {
  Block& block = r.table[b];
  if ((block.state == State::untouched && !tables_.may_grow(r, b)) || !map_.reserve_block()) return false;
  const bool coded = block.extent && block.extent.codec() != 0;
  std::byte* const scratch = coded ? frames_.get_bounce(r.block_size) : nullptr;
  if (coded && scratch == nullptr) return false;
  std::byte* const frame = staging_frame(r, staging_.of(r).growth.reserve());
  if (frame == nullptr) {
    if (scratch != nullptr) frames_.put_bounce(scratch, r.block_size);
    return false;
  }
  const uint32_t stamp = block.aux;
  const State from = block.state;
  const ResidentId id = map_.new_resident(r, b, frame, staging_pool(r));
  residents_[id].stamp = stamp;
  r.table.change(b, from, State::filling);
  tables_.charge(r);
  Move* m = map_.new_move(r, b);
  m->image = frame;
  m->coded = scratch;
  m->staged = true;
  m->was_untouched = from == State::untouched;
  m->way = core::Way::ssd_to_host;
  prepare_read(m, Urgency::prefetch, on_read);
  after.submit.push_back(m);
  return true;
}

// Takes memory and begins to read block b (untouched or stored). False, and nothing changed, when there is no memory.
bool Pager::start_fill(Region& r, BlockIndex b, Urgency urgency, After& after, const Starved* waited) {
  Block& block = r.table[b];
  if (block.state == State::untouched && !tables_.may_grow(r, b)) return false;
  if (!map_.reserve_block()) {
    need_evict_.notify_one();
    return false;
  }
  const size_t size = r.block_size;
  const uint64_t grows = tables_.growth(r, b), keep = grows + reserve_.left_free(urgency, size + grows);
  const bool coded = block.extent && block.extent.codec() != 0;
  std::byte* image = nullptr;
  std::byte* scratch = nullptr;
  bool fresh = false;
  if (waits_.overtakes(r)) return false;
  if (coded && (scratch = frames_.get_bounce(size)) == nullptr) return false;
  bool no_buffer = false;  // one comes free with a read, and not with a block that leaves
  if (r.transfer == Transfer::copy) {
    if (budget_.charge(size, keep)) {
      image = frames_.get_bounce(size);
      no_buffer = image == nullptr;
      if (no_buffer) budget_.credit(size);
    }
  } else {
    image = frames_.get(size, keep, &fresh);
  }
  if (image == nullptr) {
    if (scratch != nullptr) frames_.put_bounce(scratch, size);
    if (!no_buffer) need_evict_.notify_one();
    return false;
  }
  if (waits_.must_evict()) need_evict_.notify_one();

  const uint32_t stamp = block.aux;
  const State from = block.state;
  const ResidentId id = map_.new_resident(r, b, image);
  residents_[id].stamp = stamp;
  r.table.change(b, from, State::filling);
  tables_.charge(r);
  Move* m = map_.new_move(r, b);
  m->image = image;
  m->coded = scratch;
  if (urgency == Urgency::fault) m->started_ns = waited != nullptr ? waited->since_ns : now_ns();
  m->mark = waited != nullptr ? waited->mark : progress_clock_.look(m->begun_ns);
  m->way = core::Way::ssd_to_host;
  m->was_untouched = from == State::untouched;
  m->fresh = fresh && r.transfer == Transfer::install;
  m->io.unpopulated = fresh && !m->fresh && !coded;
  if (from == State::untouched && !r.from_file()) {
    core::add(counters_.zero_fills);
    block.digest = store::zero_digest(size);
    block.flags |= core::kDigest;
    after.zero.push_back(m);
    return true;
  }
  prepare_read(m, urgency, on_read);
  after.submit.push_back(m);
  return true;
}

void Pager::on_read(store::Io& io) {
  Move* m = static_cast<Move*>(io.user);
  Pager& self = *m->pager;
  After after;
  self.finish_read(m, after);
  self.run(after);
}

// Unlocked; the read of `m` is over. Decodes and verifies it; the status is the move's.
void Pager::verify_read(Move* m) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  core::add(counters_.read_bytes, m->io.transferred);
  if (m->io.result != 0) {
    core::add(counters_.io_errors);
    m->status = core::system_error(m->io.result, "reading failed, %s", map_.place(r, m->block).c_str());
  } else if (!block.extent && m->io.transferred < r.file_bytes(m->block)) {
    m->cut = true;
    m->status = core::error(EIO, "the file became shorter than when it was mapped: %zu of %zu bytes are left, %s",
                            m->io.transferred, r.file_bytes(m->block), map_.place(r, m->block).c_str());
  } else if (m->coded != nullptr) {
    m->status =
        store::decode(static_cast<store::Codec>(block.extent.codec()), m->coded, m->io.size, m->image, r.block_size);
    if (!m->status.ok()) core::add(counters_.checksum_errors);
  }
  if (m->status.ok() && block.extent) {
    // The digest also tells later whether the block was changed, so it stays even where it is not verified.
    const bool verify = r.checksum == 0 ? verify_.load(std::memory_order_relaxed) : r.checksum > 0;
    if (verify && !core::broken("digest_check") && !(store::digest(m->image, r.block_size) == block.digest)) {
      core::add(counters_.checksum_errors);
      m->status = core::error(EIO, "checksum mismatch: what the SSD returned is not what was written, %s",
                              map_.place(r, m->block).c_str());
    }
  } else if (m->status.ok() && r.writable()) {
    m->digest = store::digest(m->image, r.block_size);
  }
}

// Unlocked; state filling, and the file is too short for the block by now. Its pages are mapped there, so that a touch
// meets what it would meet in a mapping: bytes inside the file, zeros to the end of its last page, SIGBUS beyond, and
// all of it again when the file has grown. Where the trap cannot have that, the block is zeros from the file's end on,
// if it has any bytes: the status is cleared. True: mapped.
bool Pager::show_file(Move* m) {
  Region& r = *m->region;
  std::byte* const at = r.address(m->block);
  const size_t inside = core::round_up(r.file_bytes(m->block), core::kPage);
  Status s;
  if (inside < r.block_size) s = trap_->fail(at + inside, r.block_size - inside);
  if (s.ok()) {
    s = map_file(*trap_, r, m->block);
    if (s.ok()) return true;
    // Nothing can be put there before that is taken back: the block stays failed, and an acquire tries anew.
    if (inside < r.block_size && !trap_->unfail(at + inside, r.block_size - inside).ok()) return false;
  }
  if (m->io.transferred == 0) return false;
  m->status = Status();
  if (r.writable()) m->digest = store::digest(m->image, r.block_size);
  return false;
}

// Describes the read of block b to `m`, whose image (and coded) are set.
void Pager::prepare_read(Move* m, Urgency urgency, void (*done)(store::Io&)) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  m->pager = this;
  store::Io& io = m->io;
  io.op = store::Io::Op::read;
  io.urgency = urgency;
  io.user = m;
  io.done = done;
  if (block.extent) {
    io.file = space_->file(block.extent);
    io.offset = block.extent.offset();
    io.size = block.extent.length();
    io.buffer = m->coded != nullptr ? m->coded : m->image;
  } else {
    io.file = r.file_id;
    io.offset = r.file_offset + m->block * r.block_size;
    io.size = r.block_size;
    io.buffer = m->image;
    io.short_read_is_zero = true;
  }
}

// Locked; nobody asked for the block. It is absent again.
void Pager::abandon_fill(Move* m, After& after) {
  Region& r = *m->region;
  Block& block = r.table[m->block];
  give_frame(r, m->image);
  map_.free_resident(m->block, r);
  block.flags &= kForgetReadAhead;
  r.table.change(m->block, State::filling, block.extent ? State::stored : State::untouched);
  map_.free_move(m);
  pump(after);
}

// Unlocked on entry; owns the transition. Verifies, then puts the block in place or leaves it held.
void Pager::finish_read(Move* m, After& after) {
  Region& r = *m->region;
  Block& block = r.table[m->block];
  const bool zero = m->io.op == store::Io::Op::read && m->io.size == 0;
  core::step("fill.read");
  if (!zero) verify_read(m);
  Lock lock(mutex_);
  Together* const together = m->together;
  core::OnExit was_read([&] {
    if (together != nullptr && --together->left == 0) after.install.append(together->ready);
  });
  const bool nobody_asked = m->speculative && (block.flags & core::kWanted) == 0 && !leased(r, m->block);
  bool fatal_for_touch = !m->status.ok() && !nobody_asked;
  bool shows_file = false;
  if (fatal_for_touch) {
    lock.unlock();  // still filling, so nobody else acts on the block
    core::log(core::Level::error, "%.*s: an access %sgets SIGBUS", static_cast<int>(m->status.text().size()),
              m->status.text().data(), m->cut ? "beyond its end " : "");
    core::settle_log();
    if (m->cut) shows_file = show_file(m);
    fatal_for_touch = !m->status.ok();
    lock.lock();
  }
  if (m->coded != nullptr) frames_.put_bounce(m->coded, r.block_size);
  m->coded = nullptr;
  queues_.speculation.ended(*m);
  if (m->hole) {
    r.hole_first = m->block;
    r.hole_end = std::min<uint64_t>((m->hole_end - r.file_offset) / r.block_size, r.blocks);
    if (nobody_asked && (block.flags & core::kPrefetched) == 0) {
      abandon_fill(m, after);  // zeros are made faster than they are moved
      return;
    }
    lock.unlock();  // still filling
    if (!m->fresh) memset(m->image, 0, r.block_size);
    lock.lock();
    if (r.writable()) {
      block.digest = store::zero_digest(r.block_size);
      block.flags |= core::kDigest;
    }
  }
  if (!m->status.ok() && nobody_asked) {  // whoever touches it will read for himself
    if (!m->cut) {
      core::log(core::Level::warning, "%.*s, reading ahead", static_cast<int>(m->status.text().size()),
                m->status.text().data());
    }
    abandon_fill(m, after);
    return;
  }
  if (fatal_for_touch) {
    give_frame(r, m->image);
    map_.free_resident(m->block, r);
    r.table.change(m->block, State::filling, State::failed);
    block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite | core::kReadAhead | core::kMarker));
    if (shows_file) block.flags |= core::kShowsFile;
    r.keep_reason(m->block, m->status);
    if (!shows_file) failed_.fail_accesses(r, m->block);
    map_.free_move(m);
    pump(after);
    return;
  }
  progress_.made();
  if (!zero && !block.extent && r.writable()) {
    block.digest = m->digest;
    block.flags |= core::kDigest;
  }
  const bool wanted = (block.flags & core::kWanted) != 0 || leased(r, m->block);
  if (m->staged) {
    r.table.change(m->block, State::filling, State::held);
    map_.admit(r, m->block, residents_[block.aux].stamp);
    const BlockIndex b = m->block;
    map_.free_move(m);
    settle(r, b, after);
    pump(after);
    return;
  }
  const bool stay_held = !wanted && (block.flags & core::kMarker) != 0 &&
                         (r.transfer != Transfer::copy || frames_.free_bounce(r.block_size) > 8);
  if (stay_held) {
    r.table.change(m->block, State::filling, State::held);
    map_.admit(r, m->block, residents_[block.aux].stamp);
    map_.free_move(m);
    pump(after);
    return;
  }
  // Where every block is stored to, one that was read before anybody asked for it would only trap a second time.
  const bool stored_soon = !wanted && m->speculative && (m->stored_soon || r.stores_in_row >= kStoresInRow);
  m->protect = r.transfer == Transfer::copy && r.writable() && (block.flags & core::kWantedWrite) == 0 &&
               (block.flags & core::kDigest) != 0 && !stored_soon;
  // The others were read by the same transfer. One that is to be stored to is not protected as they are.
  const bool waits = together != nullptr && (m->protect || !r.writable());
  start_installing(m, State::filling, waits ? together->ready : after.install);
}

// Locked. From here install() owns the block; the policy must not name it.
void Pager::start_installing(Move* m, State from, MoveList& install) {
  Region& r = *m->region;
  r.table.change(m->block, from, State::installing);
  if (Retry* const retry = failed_.retries().empty() ? nullptr : failed_.retries().find(r, m->block);
      retry != nullptr && retry->bus)
    retry->bus = !trap_->unfail(r.address(m->block), r.block_size).ok();
  const ResidentId id = r.table[m->block].aux;
  m->pinned_in_policy = residents_[id].admitted;
  if (m->pinned_in_policy) map_.policy(id).hold(id);
  install.push_back(m);
}

// The block is held: it goes in place, or waits for memory. The move finishes in install(). False: not even that can be
// remembered, as starve_fault() has it.
bool Pager::begin_install(Region& r, BlockIndex b, After& after) {
  if (r.lost) return true;  // there is no place any more
  if (start_install(r, b, after)) return true;
  r.table[b].flags |= core::kWanted;
  return waits_.starve_fault(r, b);
}

// False, and nothing changed, when there is no memory.
bool Pager::start_install(Region& r, BlockIndex b, After& after, const Starved* waited) {
  if (!map_.reserve_move()) return false;
  Block& block = r.table[b];
  const bool staged = in_staging(residents_[block.aux].pool);
  // The bytes will be in two places for a moment.
  if (staged && !budget_.charge(r.block_size, 0)) return false;
  Move* m = map_.new_move(r, b);
  m->since_ns = waited != nullptr ? waited->since_ns : now_ns();
  m->mark = waited != nullptr ? waited->mark : progress_clock_.look(m->begun_ns);
  m->image = residents_[block.aux].frame;
  m->staged = staged;
  m->io.size = 0;
  m->protect = r.transfer == Transfer::copy && r.writable() && (block.flags & core::kWantedWrite) == 0 &&
               (block.flags & core::kDigest) != 0 && (block.flags & core::kDirty) == 0;
  start_installing(m, State::held, after.install);
  return true;
}

void Pager::give_frame(Region& r, std::byte* image) {
  if (r.gpu && staging_.of(r).frames.owns(image)) {
    staging_.of(r).frames.put(image);
  } else if (r.transfer == Transfer::copy) {
    frames_.put_bounce(image, r.block_size);
    budget_.credit(r.block_size);
  } else {
    frames_.put(image, r.block_size);
  }
}

// Unlocked; owns the transitions (installing) of the first, and of others that the same call can put in place.
void Pager::install(MoveList& moves, After& after) {
  const Batch run = take_run(moves);
  const auto fill = [&](const Move& first, size_t blocks) {
    const Region& r = *first.region;
    core::step("install.before");
    Status s = trap_->fill(r.address(first.block), blocks * r.block_size, first.image, r.transfer,
                           first.protect ? trap::Protect::yes : trap::Protect::no);
    core::step("install.after");
    return s;
  };
  const Status all = fill(*run[0], run.size());
  // One block's trouble is not the others'. Where all are left half way there is no telling which are whole.
  const bool alone = run.size() > 1 && !all.ok() && all.code() != -ENOTRECOVERABLE;
  for (Move* m : run) installed(m, alone ? fill(*m, 1) : all, after);
}

// Unlocked; the trap has said of the block, or of all that were put in place with it, how that went.
void Pager::installed(Move* m, const Status& s, After& after) {
  Region& r = *m->region;
  std::byte* const at = r.address(m->block);
  if (s.ok()) {
    core::add(r.transfer == Transfer::copy ? counters_.copied_bytes : counters_.moved_bytes, r.block_size);
  }
  const bool torn = !s.ok() && torn_by_fill(m, s);
  Lock lock(mutex_);
  Block& block = r.table[m->block];
  if (m->pinned_in_policy) map_.policy(block.aux).unhold(block.aux);
  if (torn) {
    lose_filled(m, s);
    pump(after);
    return;
  }
  if (!s.ok() && m->staged && (s.code() == -ENOMEM || s.code() == -EDQUOT)) {
    // The trap's own copy of it was refused memory: as for any frame, others leave for it.
    r.table.change(m->block, State::installing, State::held);
    budget_.credit(r.block_size);
    map_.admit(r, m->block, 0);
    pressure_.hold_back_after_refusal(s);
    block.flags |= core::kWanted;
    waits_.starve_fault(r, m->block, m->since_ns, m->mark);
    map_.free_move(m);
    pump(after);
    return;
  }
  if (!s.ok()) {
    // The bytes are still in the frame, and the frame is still ours: nothing is lost, the touch waits for the next try.
    r.table.change(m->block, State::installing, State::held);
    if (m->staged) budget_.credit(r.block_size);
    map_.admit(r, m->block, 0);
    block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
    m->status = s;
    failed_.answer_later(r, m->block, s);
    map_.free_move(m);
    return;
  }
  Resident& resident = residents_[block.aux];
  if (r.transfer == Transfer::move) {
    frames_.put_slot(m->image, r.block_size);
    resident.frame = nullptr;
  } else if (m->staged) {  // from now on it is a block like any other in host memory
    staging_.of(r).frames.put(m->image);
    resident.frame = nullptr;
    if (resident.admitted) map_.policy(block.aux).remove(block.aux);
    resident.admitted = false;
    resident.pool = kHostPool;
    block.flags &= static_cast<uint16_t>(~core::kDirty);
  } else if (r.transfer == Transfer::copy) {
    frames_.put_bounce(m->image, r.block_size);
    resident.frame = nullptr;
  }
  r.table.change(m->block, State::installing, State::resident);
  block.flags &= static_cast<uint16_t>(~core::kProtected);
  if (m->protect) {
    if ((block.flags & core::kWantedWrite) != 0) {
      // A store met the protection between fill() and this lock: it was reported as a wish, nobody else will answer it.
      trap_->unprotect(at, r.block_size).ignore();
    } else {
      block.flags |= core::kProtected;
    }
  }
  block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
  map_.admit(r, m->block, resident.stamp);
  if (m->started_ns != 0) counters_.fault_took(now_ns() - m->started_ns);
  map_.free_move(m);
  pump(after);
}

// Unlocked; the owner of a fill. True: what it is to read is a hole of the file, so there is nothing to read.
bool Pager::find_hole(Move* m) {
  const Region& r = *m->region;
  if (!r.sparse || !m->was_untouched || m->io.done != on_read) return false;
  if (!store::find_hole(r.file.file.fd, m->io.offset, r.file_bytes(m->block), &m->hole_end)) return false;
  m->hole = true;
  m->io.size = 0;
  return true;
}

// Locked on entry and on return, and not meanwhile.
void Pager::run(Lock& lock, After& after) {
  lock.unlock();
  run(after);
  lock.lock();
}

// The same, for those whom memory that came free helps.
void Pager::pump(Lock& lock) {
  After after;
  pump(after);
  run(lock, after);
}

void Pager::run(After& after) {
  while (!after.empty()) {
    After now;
    std::swap(now, after);
    std::array<store::Io*, 64> batch;
    size_t size = 0;
    MoveList holes;
    while (!now.submit.empty()) {  // the disk first: it is the slowest
      Move* m = now.submit.pop();
      if (populate(m, after)) {
        if (find_hole(m)) {
          holes.push_back(m);
        } else {
          batch[size++] = &m->io;
        }
      }
      if (size != batch.size() && !now.submit.empty()) continue;
      engine_->submit({batch.data(), size});
      size = 0;
    }
    while (!holes.empty()) finish_read(holes.pop(), after);
    while (!now.zero.empty()) {
      Move* m = now.zero.pop();
      if (!populate(m, after)) continue;
      if (!m->fresh) memset(m->image, 0, m->region->block_size);
      finish_read(m, after);
    }
    while (!now.install.empty()) install(now.install, after);
  }
}

// Memory or a buffer came free: whoever waits for it, most urgent first.
void Pager::pump(After& after) {
  while (!waits_.queue().empty()) {
    const Starved s = waits_.queue().front();
    Block& block = s.region->table[s.block];
    if (block.state == State::untouched && !tables_.may_grow(*s.region, s.block)) {  // it has been used up meanwhile
      block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
      if (s.urgency == Urgency::fault) failed_.refuse_growth(*s.region, s.block);
      map_.notify();  // an acquire says why
    } else if (block.state == State::untouched || block.state == State::stored) {
      if (!start_fill(*s.region, s.block, s.urgency, after, &s)) return;
    } else if (block.state == State::held && (block.flags & core::kWanted) != 0) {
      if (!start_install(*s.region, s.block, after, &s)) return;
    }
    waits_.queue().pop();
  }
  // Memory came free another way than by a write that works again: a region was freed, a lease released.
  tables_.try_again();
  if (failed_.any_dropped() && budget_.available() >= reserve_.largest_block()) failed_.revive_dropped();
  pump_speculative(after);
  if (!gpus_.empty()) pump_devices(after);
}

void Pager::speculate(Region& r, const policy::Window& w, Urgency urgency) {
  if (w.count == 0) return;
  if (!queues_.speculation.add({&r, w.first, w.stride, w.count, w.marker, urgency})) r.readahead.on_dropped(w.count);
}

void Pager::pump_speculative(After& after) {
  bool more = false;  // of what this call began
  while (!queues_.speculation.empty()) {
    Speculative& s = queues_.speculation.front();
    Region& r = *s.region;
    if (s.count == 0 || s.next >= r.blocks) {
      queues_.speculation.pop();
      continue;
    }
    if (s.urgency == Urgency::readahead && residents_.ahead_bytes() + r.block_size > budget_.ahead_limit()) {
      r.readahead.on_cut({s.next, s.stride, s.count});
      queues_.speculation.pop();
      continue;
    }
    const uint64_t cap = speculative_limit(r);
    // Blocks that are asked for together are read together: not one for each that has come.
    const uint64_t room = more ? r.block_size : std::max<uint64_t>(r.block_size, std::min(cap / 2, kRefill));
    if (!queues_.speculation.may_start(room, cap)) return;
    more = true;
    Block& block = r.table[s.next];
    if ((block.state == State::untouched || block.state == State::stored) && !StarvedQueue::marked(block) &&
        // Nothing to read ahead in a hole: zeros are made faster than they are moved.
        !(block.state == State::untouched &&
          (!r.from_file() || (s.urgency == Urgency::readahead && r.in_hole(s.next)) || !tables_.may_grow(r, s.next)))) {
      if (r.gpu && s.urgency == Urgency::prefetch) {  // on its way to a device, most likely
        if (!start_staging(r, s.next, after)) return;
      } else if (!start_fill(r, s.next, s.urgency, after)) {
        return;
      }
      queues_.speculation.started(*after.submit.tail);
      core::add(counters_.prefetched_blocks);
      block.flags |= core::kReadAhead;
      if (s.urgency == Urgency::prefetch) {
        block.flags |= core::kPrefetched;
      } else {
        residents_.read_ahead(residents_[block.aux]);
      }
      if (s.urgency == Urgency::readahead && s.next == s.marker) block.flags |= core::kMarker;
      residents_[block.aux].stride = static_cast<int32_t>(s.stride);
    } else if (core::in_memory(block.state) && s.urgency == Urgency::readahead && s.next == s.marker) {
      // The marker is in memory already: nobody would notice the stream pass it. The next miss begins a new window.
    }
    s.advance(1);
  }
}

void Pager::settle(Region& r, BlockIndex b, After& after) {
  Block& block = r.table[b];
  if ((block.flags & core::kWanted) == 0) return;
  switch (block.state) {
    case State::held:
      begin_install(r, b, after);
      break;
    case State::untouched:
    case State::stored:
      if (r.dying) break;
      if (!start_fill(r, b, Urgency::fault, after)) waits_.starve_fault(r, b);
      break;
    case State::resident:
      block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
      break;
    default:
      break;
  }
}

}  // namespace vmem::pager
