#include "pager/host/page_in.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/clock.h"
#include "core/log.h"
#include "core/scope_guard.h"
#include "core/step.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

namespace {

constexpr uint8_t kStoresInRow = 4;  // after so many first accesses that are stores, the next is taken for one, too

// Clears the frame of a fill. A frame without memory gets pages that the kernel has cleared.
void make_zeros(const Transition& m, const FramePool& frames) {
  const size_t size = m.region->block_size;
  if (m.read.fresh || (m.io.unpopulated && frames.populate(m.image, size).ok())) return;
  memset(m.image, 0, size);
}

// Returns how many bytes of the block its file has now.
size_t bytes_there(const Region& r, BlockIndex b) {
  uint64_t size = 0;
  if (!store::current_size(r.source.file, &size).ok()) return 0;
  const uint64_t from = r.source.offset + b * r.block_size;
  return size <= from ? 0 : std::min<uint64_t>(size - from, r.file_bytes(b));
}

}  // namespace

PageIn::PageIn(PagerContext& ctx, HostTier& host) : ctx_(ctx), host_(host) {}

bool PageIn::start_staging(Region& r, BlockIndex b, Urgency urgency, DeferredWork& after) {
  const Block& block = r.table[b];
  if ((block.state == State::unpopulated && !ctx_.metadata_charges.may_grow(r, b)) || !ctx_.map.reserve_block())
    return false;
  const bool coded = block.extent && block.extent.codec() != 0;
  std::byte* const scratch = coded ? ctx_.frames.get_bounce(r.block_size) : nullptr;
  if (coded && scratch == nullptr) return false;
  std::byte* const bytes = ctx_.upcalls.staging_frame(r, ctx_.staging.of(r.block_size).growth.reserve());
  if (bytes == nullptr) {
    if (scratch != nullptr) ctx_.frames.put_bounce(scratch, r.block_size);
    return false;
  }
  const uint32_t shadow = block.aux;
  const State from = block.state;
  const FrameId id = ctx_.map.new_entry(r, b, bytes, staging_pool(r));
  ctx_.map.frame_table()[id].shadow = shadow;
  r.table.begin_read(b);
  ctx_.metadata_charges.charge(r);
  Transition* m = ctx_.map.new_transition(r, b);
  m->image = bytes;
  m->coded = scratch;
  m->in_staging = true;
  m->read.was_unpopulated = from == State::unpopulated;
  m->way = core::Way::ssd_to_host;
  host_.reader.prepare_read(m, urgency, *this);
  after.submit.push_back(m);
  return true;
}

bool PageIn::start_fill(Region& r, BlockIndex b, Urgency urgency, DeferredWork& after, const MemoryWaiter* waited) {
  const Block& block = r.table[b];
  if (block.state == State::unpopulated && !ctx_.metadata_charges.may_grow(r, b)) return false;
  if (!ctx_.map.reserve_block()) {
    host_.pressure.wake_reclaim();
    return false;
  }
  const size_t size = r.block_size;
  const uint64_t grows = ctx_.metadata_charges.growth(r, b),
                 keep = grows + ctx_.reserve.left_free(urgency, size + grows);
  const bool coded = block.extent && block.extent.codec() != 0;
  std::byte* image = nullptr;
  std::byte* scratch = nullptr;
  bool fresh = false;
  if (host_.waits.overtakes(r)) return false;
  if (coded && (scratch = ctx_.frames.get_bounce(size)) == nullptr) return false;
  bool no_buffer = false;  // a buffer comes free when a read ends, not when a block leaves
  if (r.transfer == Transfer::copy) {
    if (ctx_.budget.charge(size, keep)) {
      image = ctx_.frames.get_bounce(size);
      no_buffer = image == nullptr;
      if (no_buffer) ctx_.budget.credit(size);
    }
  } else {
    image = ctx_.frames.get(size, keep, &fresh);
  }
  if (image == nullptr) {
    if (scratch != nullptr) ctx_.frames.put_bounce(scratch, size);
    if (!no_buffer) host_.pressure.wake_reclaim();
    return false;
  }
  if (host_.waits.must_evict()) host_.pressure.wake_reclaim();

  const uint32_t shadow = block.aux;
  const State from = block.state;
  const FrameId id = ctx_.map.new_entry(r, b, image);
  ctx_.map.frame_table()[id].shadow = shadow;
  r.table.begin_read(b);
  ctx_.metadata_charges.charge(r);
  Transition* m = ctx_.map.new_transition(r, b);
  m->image = image;
  m->coded = scratch;
  if (urgency == Urgency::fault) m->read.started_ns = waited != nullptr ? waited->since_ns : now_ns();
  m->mark = waited != nullptr ? waited->mark : ctx_.deadline.look(m->begun_ns);
  m->way = core::Way::ssd_to_host;
  m->read.was_unpopulated = from == State::unpopulated;
  m->read.fresh = fresh && r.transfer == Transfer::install;
  m->io.unpopulated = fresh && !m->read.fresh && !coded;
  if (from == State::unpopulated && !r.from_file()) {
    core::add(ctx_.counters.zero_fills);
    r.table.set_digest(b, store::zero_digest(size));
    after.zero.push_back(m);
    return true;
  }
  host_.reader.prepare_read(m, urgency, *this);
  after.submit.push_back(m);
  return true;
}

void PageIn::io_ended(Transition* m) {
  DeferredWork after;
  finish_read(m, after);
  run(after);
}

// Logs that a block could not be read. If the file's own pages will serve the access, that is no
// error.
void PageIn::say_failed(const Transition& m) {
  const int length = static_cast<int>(m.status.text().size());
  const char* const text = m.status.text().data();
  const size_t there = m.cut ? core::round_up(bytes_there(*m.region, m.block), core::kPage) : 0;
  if (there != 0 && (m.read.accessed < there || m.read.accessed == SIZE_MAX)) {
    VMEM_LOG_OFTEN(core::Level::info, "%.*s", length, text);
  } else if (m.cut) {
    VMEM_LOG_OFTEN(core::Level::error, "%.*s: an access beyond its end gets SIGBUS", length, text);
  } else {
    VMEM_LOG_OFTEN(core::Level::error, "%.*s: an access gets SIGBUS", length, text);
  }
  core::settle_log();
}

// State reading; the file is too short for the block. Maps the file's pages, so that an access
// meets what it would meet in a mapping: bytes inside the file, zeros to the end of its last page,
// SIGBUS beyond, and all of it again when the file has grown. Returns true if they are mapped. If
// the trap cannot do that and the file has bytes of the block, the rest of the block is zeros and
// the status is cleared.
bool PageIn::show_file(Transition* m) {
  Region& r = *m->region;
  std::byte* const at = r.address(m->block);
  const size_t inside = core::round_up(r.file_bytes(m->block), core::kPage);
  Status s;
  if (inside < r.block_size) s = ctx_.trap.fail(at + inside, r.block_size - inside);
  if (s.ok()) {
    s = map_file(ctx_.trap, r, m->block);
    if (s.ok()) return true;
    // The poison must be undone before bytes can be put there. If that fails, the block stays
    // poisoned until an acquire tries again.
    if (inside < r.block_size && !ctx_.trap.unfail(at + inside, r.block_size - inside).ok()) return false;
  }
  if (m->io.transferred == 0) return false;
  m->status = Status();
  if (r.writable()) m->digest = store::digest(m->image, r.block_size);
  return false;
}

// Ends a fill without the block, which is absent again.
void PageIn::abandon_fill(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  host_.installer.give_frame(r, m->image);
  ctx_.map.free_entry(m->block, r);
  r.table.forget_read_ahead(m->block);
  r.table.abandon_read(m->block);
  ctx_.map.free_transition(m);
  ctx_.upcalls.memory_freed(after);
}

// The kernel had no memory to read a block that is wanted: the block is read later.
void PageIn::put_off_fill(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const BlockIndex b = m->block;
  host_.failed.read_later(r, b, m->status);
  m->status = {};  // waiters look at the block again
  abandon_fill(m, after);
}

// A block that is wanted could not be read: it is poisoned.
void PageIn::fail_fill(Transition* m, bool shows_file, DeferredWork& after) {
  Region& r = *m->region;
  host_.installer.give_frame(r, m->image);
  ctx_.map.free_entry(m->block, r);
  r.table.poison(m->block);
  r.table.clear(m->block, core::kFaultPending | core::kStorePending | core::kReadAhead | core::kReadaheadMarker);
  if (shows_file) r.table.mark(m->block, core::kShowsFile);
  if (m->io.result != 0) {
    host_.failed.mark_unread(r, m->block);
  } else {
    host_.failed.clear_unread(r, m->block);
  }
  r.keep_reason(m->block, m->status);
  if (!shows_file) host_.failed.fail_accesses(r, m->block);
  ctx_.map.free_transition(m);
  ctx_.upcalls.memory_freed(after);
}

// The frame has the block's bytes: the block goes in place, or is staged.
void PageIn::settle_read(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  ReadGroup* const together = m->read.group;
  ctx_.map.progress().made();
  host_.failed.clear_unread(r, m->block);
  const bool wanted = (block.flags & core::kFaultPending) != 0 || leased(r, m->block);
  if (m->in_staging) {
    r.table.end_read(m->block);
    ctx_.map.admit(r, m->block, ctx_.map.frame_table()[block.aux].shadow);
    const BlockIndex b = m->block;
    ctx_.map.free_transition(m);
    settle(r, b, after);
    ctx_.upcalls.memory_freed(after);
    return;
  }
  const bool stay_held = !wanted && (block.flags & core::kReadaheadMarker) != 0 &&
                         (r.transfer != Transfer::copy || ctx_.frames.free_bounce(r.block_size) > 8);
  if (stay_held) {
    r.table.end_read(m->block);
    ctx_.map.admit(r, m->block, ctx_.map.frame_table()[block.aux].shadow);
    ctx_.map.free_transition(m);
    ctx_.upcalls.memory_freed(after);
    return;
  }
  // If every block is stored to, write protection of a block that was read ahead only costs a
  // second trap.
  const bool stored_soon =
      !wanted && m->read.speculative && (m->read.stored_soon || r.use.stores_in_row >= kStoresInRow);
  m->protect = r.transfer == Transfer::copy && r.writable() && (block.flags & core::kStorePending) == 0 &&
               (block.flags & core::kDigest) != 0 && !stored_soon;
  // The others were read by the same transfer. A block that will be stored to does not wait for
  // them: it is not protected as they are.
  const bool waits = together != nullptr && (m->protect || !r.writable());
  host_.installer.queue_install(m, waits ? together->ready : after.install);
}

// Notes that the file has a hole at the block and behind it.
void PageIn::note_hole(const Transition& m) {
  Region& r = *m.region;
  r.source.hole_first = m.block;
  r.source.hole_end = std::min<uint64_t>((m.read.hole_end - r.source.offset) / r.block_size, r.blocks);
}

// Clears the frame. Drops and retakes the lock; the state stays reading.
void PageIn::clear_hole(Lock& lock, Transition* m) {
  Region& r = *m->region;
  lock.unlock();
  make_zeros(*m, ctx_.frames);
  lock.lock();
  if (!r.writable()) return;
  r.table.set_digest(m->block, store::zero_digest(r.block_size));
}

// Verifies the bytes, then puts the block in place, leaves it staged, or ends the fill without it.
void PageIn::finish_read(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  const bool zero = m->io.op == store::Io::Op::read && m->io.size == 0;
  core::step("fill.read");
  if (!zero) host_.reader.verify_read(m);
  Lock lock(ctx_.map.mutex());
  ReadGroup* const together = m->read.group;
  core::ScopeGuard was_read([&] {
    if (together != nullptr && --together->left == 0) after.install.append(together->ready);
  });
  const bool nobody_asked =
      (block.flags & core::kFaultPending) == 0 && (m->read.meanwhile || (m->read.speculative && !leased(r, m->block)));
  bool fatal_for_touch = !m->status.ok() && !m->read.no_memory && !nobody_asked;
  bool shows_file = false;
  if (fatal_for_touch) {
    lock.unlock();  // in state reading other threads only set flags of the block
    say_failed(*m);
    if (m->cut) shows_file = show_file(m);
    fatal_for_touch = !m->status.ok();
    lock.lock();
  }
  if (m->coded != nullptr) ctx_.frames.put_bounce(m->coded, r.block_size);
  m->coded = nullptr;
  host_.readahead_queue.ended(*m);
  if (m->read.hole) {
    note_hole(*m);
    if (nobody_asked && (block.flags & core::kPrefetched) == 0) {
      // A later access makes zeros faster than this frame could be put in place.
      abandon_fill(m, after);
      return;
    }
    clear_hole(lock, m);
  }
  if (!m->status.ok() && nobody_asked) {  // a later access reads the block again
    if (!m->cut && !m->read.no_memory) {
      VMEM_LOG_OFTEN(core::Level::warning, "%.*s, reading ahead", static_cast<int>(m->status.text().size()),
                     m->status.text().data());
    }
    abandon_fill(m, after);
    return;
  }
  if (m->read.no_memory) {
    put_off_fill(m, after);
    return;
  }
  if (fatal_for_touch) {
    fail_fill(m, shows_file, after);
    return;
  }
  if (!zero && !block.extent && r.writable()) {
    r.table.set_digest(m->block, m->digest);
  }
  settle_read(m, after);
}

void PageIn::serve_waiting(Lock& lock) {
  DeferredWork after;
  ctx_.upcalls.memory_freed(after);
  run(lock, after);
}

void PageIn::run(Lock& lock, DeferredWork& after) {
  lock.unlock();
  run(after);
  lock.lock();
}

void PageIn::run_here(DeferredWork& after) {
  Transition* mine = nullptr;
  TransitionList others;
  while (!after.submit.empty()) {
    Transition* const m = after.submit.pop();
    if (mine == nullptr && m->then == this && m->io.urgency == Urgency::fault && m->read.accessed != SIZE_MAX &&
        !m->read.fresh) {
      mine = m;
    } else {
      others.push_back(m);
    }
  }
  std::swap(after.submit, others);
  run(after);
  if (mine == nullptr) return;
  if (host_.reader.find_hole(mine) || ctx_.engine.read_here(mine->io)) {
    finish_read(mine, after);
  } else {
    after.submit.push_back(mine);
  }
  run(after);
}

void PageIn::run(DeferredWork& after) {
  while (!after.empty()) {
    DeferredWork now;
    std::swap(now, after);
    std::array<store::Io*, 64> batch;
    size_t size = 0;
    TransitionList holes;
    while (!now.submit.empty()) {  // the disk first: it is the slowest
      Transition* m = now.submit.pop();
      if (populate(m, after)) {
        if (m->then == this && host_.reader.find_hole(m)) {
          holes.push_back(m);
        } else {
          batch[size++] = &m->io;
        }
      }
      if (size != batch.size() && !now.submit.empty()) continue;
      ctx_.engine.submit({batch.data(), size});
      size = 0;
    }
    while (!holes.empty()) finish_read(holes.pop(), after);
    while (!now.zero.empty()) {
      Transition* m = now.zero.pop();
      if (!populate(m, after)) continue;
      make_zeros(*m, ctx_.frames);
      finish_read(m, after);
    }
    while (!now.install.empty()) host_.installer.install(now.install, after);
  }
}

void PageIn::settle(Region& r, BlockIndex b, DeferredWork& after) {
  const Block& block = r.table[b];
  if ((block.flags & core::kFaultPending) == 0) return;
  switch (block.state) {
    case State::staged:
      host_.installer.install_or_wait(r, b, after);
      break;
    case State::unpopulated:
    case State::stored:
      if (r.dying) break;
      if (!start_fill(r, b, Urgency::fault, after)) host_.waits.starve_fault(r, b);
      break;
    case State::resident:
      r.table.answer_faults(b);
      break;
    default:
      break;
  }
}

// Gives the frame of a fill memory if it has none yet. Returns false if there is none: then the
// block is absent again, a fault on it waits for memory, and the transition is over.
bool PageIn::populate(Transition* m, DeferredWork& after) {
  if (!m->read.fresh) return true;
  Region& r = *m->region;
  core::step("fill.populate");
  const Status s = ctx_.frames.populate(m->image, r.block_size);
  if (s.ok()) return true;
  Lock lock(ctx_.map.mutex());
  const core::Block& block = r.table[m->block];
  const core::BlockIndex b = m->block;
  if (m->coded != nullptr) ctx_.frames.put_bounce(m->coded, r.block_size);
  host_.readahead_queue.ended(*m);
  ctx_.frames.put_fresh(m->image, r.block_size);
  ctx_.map.free_entry(b, r);
  r.table.forget_read_ahead(m->block);
  r.table.abandon_read(b);
  host_.pressure.hold_back_after_refusal(s);
  if ((block.flags & core::kFaultPending) != 0) host_.waits.starve_fault(r, b, m->read.started_ns, m->mark);
  m->status = {};  // waiters look at the block again
  ctx_.map.free_transition(m);
  ctx_.upcalls.memory_freed(after);
  return false;
}

std::string PageIn::check() const {
  for (const ReadGroup& t : together_)
    if (t.left != 0 || !t.ready.empty()) return "blocks wait to be put in place together, and none is being read";
  return "";
}

}  // namespace vmem::pager
