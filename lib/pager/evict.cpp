// The way out: out of sight, compared with what the store has, written if it differs, and only then let go.
//
// Whether a block must be written is never guessed from marks: the digest of an image that cannot change any more is
// compared with the digest of what the store holds. The exceptions are blocks of read-only files, which are never
// written, and blocks that stood write-protected since they were equal to the store.
#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "core/break.h"
#include "core/log.h"
#include "core/on_exit.h"
#include "core/step.h"
#include "device/park.h"
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

constexpr size_t kClusterBlock = 64 << 10;  // blocks up to this size are written side by side, never in place

constexpr uint16_t kForget = static_cast<uint16_t>(~(core::kReadAhead | core::kMarker | core::kPrefetched));

}  // namespace

void Pager::evict_loop() {
  Batch batch;
  std::array<policy::Victim, 32> victims;
  uint8_t next_short = kStagingPools;
  static_assert(std::tuple_size_v<decltype(victims)> <= Batch::capacity());
  Lock lock(mutex_);
  while (!threads_.stop) {
    const uint64_t now = now_ns();
    if (waits_.check_starved(lock, now)) {
      pump(lock);
      continue;
    }
    if (failed_.ask_again(lock, now)) continue;
    if (!queues_.evict_requests.empty()) {
      serve_evict_request(lock);
      continue;
    }
    pressure_.lift_cap(now);
    // Who starves while nothing moves needs what a held block has: a buffer.
    const bool stuck = !waits_.queue().empty() && !moves_.in_flight();
    // Or there is no memory to know one more block by.
    const bool too_many = !waits_.queue().empty() && residents_.free() == 0;
    const bool host_short = waits_.must_evict() || stuck || too_many;
    if (host_short && shown_.any()) gpu_work_.notify_one();
    reserve_.set_refilling(host_short && !stuck);
    const std::optional<uint8_t> staging_short = short_of_staging(next_short);
    if (!host_short && !staging_short && waits_.queue().empty()) {
      wait_for_work(lock);
      continue;
    }
    if (const uint64_t pause = write_back_.pause(now); pause != 0) {
      uint64_t most = waits_.queue().empty() ? UINT64_MAX : Progress::kSlice / 2;
      if (!failed_.retries().empty()) most = std::min(most, failed_.retries().kShortest);
      need_evict_.wait_for(lock, std::chrono::nanoseconds(std::min(pause, most)));
      continue;
    }
    if (!host_short && !staging_short) {  // starved for a buffer, or for what is leaving already
      need_evict_.wait_for(lock, std::chrono::milliseconds(5));
      pump(lock);
      continue;
    }
    // A batch is worth about 8 MiB, so that several evictors share the work and small blocks cluster.
    const uint64_t pages =
        std::max<uint64_t>(1, std::min<uint64_t>(8 << 20, 32 * reserve_.largest_block()) / core::kPage);
    size_t count = host_short ? map_.policy_of(kHostPool).victims(pages, victims) : 0;
    if (count == 0 && staging_short) {
      count = map_.policy_of(*staging_short).victims(pages, victims);
      next_short =
          static_cast<uint8_t>(*staging_short + 1);  // frames of another size may be short as well, and have their turn
    }
    batch.clear();
    bool copies = false;
    for (size_t i = 0; i < count; ++i) {
      Resident& resident = residents_[victims[i].id];
      if (resident.is_copy) {
        copies |= evict_copy(victims[i].id);
        continue;
      }
      Region& r = *resident.region;
      const BlockIndex b = resident.block;
      const bool probe = victims[i].probe && r.table[b].state == State::resident;
      if (!victims[i].probe) resident.admitted = false;
      if (victims[i].probe && !probe) continue;
      // Leased, and the acquire has not come so far as to hold it: admitted again, it is.
      Move* m = r.dying || holds_for_lease(r, b) ? nullptr : begin_take(r, b, false, probe);
      if (m != nullptr) {
        batch.push_back(m);
      } else if (!victims[i].probe && !r.dying) {
        map_.admit(r, b, clock_.stamp());
      }
    }
    if (batch.empty() && !copies) need_evict_.wait_for(lock, std::chrono::milliseconds(5));
    if (copies || (batch.empty() && stuck)) {  // frames came free
      After after;
      pump(after);
      if (!after.empty()) {
        run(lock, after);
      }
    }
    if (batch.empty()) continue;
    evict_batch(lock, batch.all());
  }
}

// Locked; the block's transition in host memory is over. Where prefetch to the SSD met it, it is asked again.
void Pager::leaves(Region& r, BlockIndex b) {
  const State state = r.table[b].state;
  if (r.dying || (state != State::resident && state != State::held) || queues_.evict_requests.full()) return;
  if (queues_.evict_requests.add({&r, b, b}, false)) need_evict_.notify_one();
}

// A few blocks of the oldest request. What is leased is passed over, what moves has its turn when it has come to rest.
void Pager::serve_evict_request(Lock& lock) {
  const auto [span, behind] = queues_.evict_requests.first();
  Region& r = *span.region;
  Batch batch;
  BlockIndex b = r.table.next_touched(span.first);
  for (; b <= span.last && b < r.blocks && batch.size() < 32; b = r.table.next_touched(b + 1)) {
    const State state = r.table[b].state;
    if (!core::in_memory(state) || leased(r, b)) continue;
    Resident& resident = residents_[r.table[b].aux];
    if (core::in_transition(state)) {
      resident.leaves = !behind;
      continue;
    }
    if (behind && resident.ahead) continue;
    if (resident.admitted) map_.policy(r.table[b].aux).remove(r.table[b].aux);
    resident.admitted = false;
    if (Move* m = begin_take(r, b, false, false)) {
      batch.push_back(m);
    } else {
      map_.admit(r, b, clock_.stamp());
    }
  }
  queues_.evict_requests.go_on(b);
  evict_batch(lock, batch.all());
}

// Claims a resident or held block for the way out. nullptr: no address space for its image.
Move* Pager::begin_take(Region& r, BlockIndex b, bool keep, bool probe) {
  Block& block = r.table[b];
  Resident& resident = residents_[block.aux];
  const bool held = block.state == State::held;
  const bool in_place =
      !held && (r.transfer == Transfer::copy || (keep && r.transfer == Transfer::move && trap_->caps().write_protect));
  std::byte* image = held                              ? resident.frame
                     : in_place                        ? r.address(b)
                     : r.transfer == Transfer::install ? resident.frame
                                                       : frames_.get_slot(r.block_size);
  if (image == nullptr) return nullptr;
  if (!map_.reserve_move()) {
    if (!held && !in_place && r.transfer != Transfer::install) frames_.put_slot(image, r.block_size);
    return nullptr;
  }
  r.table.change(b, block.state, State::taking);
  Move* m = map_.new_move(r, b);
  m->image = image;
  m->way = core::Way::host_to_ssd;
  m->keep = keep;
  m->probe = probe;
  m->from_held = held;
  m->in_place = in_place;
  m->staged = in_staging(resident.pool);
  m->clean = !r.writable() || (block.flags & core::kProtected) != 0 || (m->staged && proven_clean(block));
  m->elsewhere = (block.flags & core::kUnknown) != 0;
  m->has_digest = (block.flags & core::kDigest) != 0 && (block.flags & core::kUnknown) == 0;
  resident.in_place = in_place;
  resident.dropping = false;
  if (!probe && !m->clean && r.codec != store::Codec::raw && r.backing != Backing::file_shared) {
    m->coded = frames_.get_bounce(r.block_size);  // none free: this image is stored raw
  }
  if (!keep && !probe) leaves(m);
  if ((keep || probe) && resident.admitted) map_.policy(block.aux).hold(block.aux);
  return m;
}

// Unlocked. Afterwards the image cannot change, and `clean` says whether the store has the same.
void Pager::take_one(Move* m) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  std::byte* const at = r.address(m->block);
  core::step("evict.taking");
  if (!m->from_held) {
    // What is in place is write-protected by now, or could not be.
    if (!m->in_place) m->status = trap_->take(at, r.block_size, m->image, r.transfer);
    if (!m->status.ok()) {
      settle_torn_take(m);
      return;
    }
    m->out = !m->in_place;
  }
  core::step("evict.taken");
  if (m->probe || m->clean) return;
  m->digest = store::digest(m->image, r.block_size);
  m->clean = m->has_digest && (core::broken("compare") || m->digest == block.digest);
  if (!m->clean && r.backing == Backing::anonymous && m->digest == store::zero_digest(r.block_size)) {
    m->clean = m->zeros = true;
  }
}

// Locked on entry and on return, and not meanwhile.
void Pager::evict_batch(Lock& lock, std::span<Move*> batch) {
  lock.unlock();
  evict_batch(batch);
  lock.lock();
}

// Unlocked; every move is in state taking. No more than a Batch holds.
void Pager::evict_batch(std::span<Move*> batch) {
  Batch writes;
  Drops drops;
  std::sort(batch.begin(), batch.end(), lies_before);
  protect_in_place(*trap_, batch);
  for (Move* m : batch) {
    take_one(m);
    if (!m->status.ok() || m->probe) continue;
    if (!m->clean) {
      writes.push_back(m);
    } else if (m->in_place && !m->keep) {
      drops.add(*m);
    }
  }
  if (!drops.empty()) {
    {
      // From here an absent page of these blocks is our doing: its touch must wait for the block to be read again.
      Lock lock(mutex_);
      for (Move* m : batch) {
        if (m->status.ok() && !m->probe && m->clean && m->in_place && !m->keep) {
          residents_[m->region->table[m->block].aux].dropping = true;
        }
      }
    }
    if (Status s = trap_->drop(drops.all()); !s.ok())
      core::fatal("memory of blocks could not be dropped: %s", s.text().data());
  }
  prepare_writes(writes.all());
  core::step("evict.decided");

  After after;
  {
    Lock lock(mutex_);
    for (Move* m : batch) {
      Region& r = *m->region;
      if (m->probe && m->status.ok()) {
        r.table.change(m->block, State::taking, State::held);
        residents_[r.table[m->block].aux].frame = m->image;
        map_.policy(r.table[m->block].aux).unhold(r.table[m->block].aux);
        settle_probe(r, m->block, after);
        map_.free_move(m);
      } else if (m->torn) {
        lose_taken(m);
      } else if (!m->status.ok()) {
        if (m->stored != 0) {
          note_write_failure(m);
        } else {
          write_back_.pinned(now_ns());
        }
        put_back(m, after);
      } else if (m->clean) {
        finish_clean(m, after);
      } else {
        r.table.change(m->block, State::taking, State::writing);
        to_store(m, after);
      }
    }
    pump(after);
  }
  run(after);
}

void Pager::settle_probe(Region& r, BlockIndex b, After& after) {
  if ((r.table[b].flags & core::kWanted) == 0) return;
  map_.policy(r.table[b].aux).touched(r.table[b].aux);
  begin_install(r, b, after);
}

// Unlocked. Encodes and finds room; a move that finds none carries the status. No more than a Batch holds.
void Pager::prepare_writes(std::span<Move* const> moves) {
  Batch cluster;
  for (Move* m : moves) {
    Region& r = *m->region;
    if (r.backing == Backing::file_shared) continue;
    m->stored = r.block_size;
    m->codec = store::Codec::raw;
    if (m->coded != nullptr) store::encode(r.codec, m->image, r.block_size, m->coded, &m->stored, &m->codec);
    const core::Extent old = r.table[m->block].extent;
    if (old && old.codec() == 0 && m->codec == store::Codec::raw && r.block_size > kClusterBlock) {
      m->extent = old;
      m->new_extent = m->elsewhere && space_->allocate(m->stored, 0, {&m->extent, 1}).ok();
      if (!m->new_extent) m->extent = old;
      continue;
    }
    m->new_extent = true;
    if (m->codec == store::Codec::raw && r.block_size <= kClusterBlock) {
      cluster.push_back(m);
    } else {
      m->status = space_->allocate(m->stored, static_cast<unsigned>(m->codec), {&m->extent, 1});
    }
  }
  // Blocks of one region that leave together lie together, in the order of their addresses.
  std::sort(cluster.begin(), cluster.end(), lies_before);
  for (size_t i = 0; i < cluster.size();) {
    size_t n = 1;
    while (i + n < cluster.size() && cluster[i + n]->stored == cluster[i]->stored) ++n;
    std::array<core::Extent, Batch::capacity()> extents;
    if (space_->allocate(cluster[i]->stored, 0, std::span(extents).first(n)).ok()) {
      for (size_t k = 0; k < n; ++k) cluster[i + k]->extent = extents[k];
    } else {
      for (size_t k = 0; k < n; ++k) {
        Move* const m = cluster[i + k];
        m->status = space_->allocate(m->stored, 0, {&m->extent, 1});
        // Over its old copy rather than not at all: until it is whole there, it is in memory.
        const core::Extent old = m->region->table[m->block].extent;
        if (m->status.code() != -ENOSPC || !old || old.codec() != 0 || old.length() != m->stored) continue;
        m->status = {};
        m->extent = old;
        m->new_extent = false;
      }
    }
    i += n;
  }
}

// Locked. The store has these bytes: the memory may go, unless somebody wants the block back or it is to stay.
void Pager::finish_clean(Move* m, After& after) {
  Region& r = *m->region;
  Block& block = r.table[m->block];
  const bool gone = m->in_place && !m->keep;
  if (m->zeros) {  // the store's copy, if any, is out of date: zeros need none
    failed_.forget_store_copy(r, m->block);
    block.digest = m->digest;
    block.flags |= core::kDigest;
  }
  if (m->keep || (!gone && (block.flags & core::kWanted) != 0)) {
    put_back(m, after);
    return;
  }
  core::add(counters_.clean_drops);
  let_go(m, State::taking, after);
}

// Locked. Ends an eviction: memory back, block absent.
void Pager::let_go(Move* m, State from, After& after) {
  Region& r = *m->region;
  Block& block = r.table[m->block];
  core::add(counters_.evictions);
  progress_.made();
  if ((block.flags & core::kReadAhead) != 0) {
    core::add(counters_.prefetch_wasted);
    r.readahead.on_waste(m->block);
  }
  block.flags &= kForget;
  block.flags &= static_cast<uint16_t>(~(core::kProtected | core::kDirty));
  if (m->coded != nullptr) frames_.put_bounce(m->coded, r.block_size);
  if (m->in_place) {
    if (!core::broken("credit")) budget_.credit(r.block_size);
  } else if (m->from_held) {
    give_frame(r, m->image);
  } else {
    frames_.put(m->image, r.block_size);
  }
  write_back_.settled(m->leaving);
  map_.free_resident(m->block, r);
  if (r.from_file() && !block.extent) block.flags &= static_cast<uint16_t>(~core::kDigest);
  r.table.change(m->block, from, block.extent ? State::stored : State::untouched);
  tables_.charge(r);
  const BlockIndex b = m->block;
  map_.free_move(m);
  settle(r, b, after);
}

// Locked. The block stays in memory: wanted, synced, pinned by somebody, or its write failed.
void Pager::put_back(Move* m, After& after) {
  Region& r = *m->region;
  Block& block = r.table[m->block];
  const State from = block.state;
  write_back_.settled(m->leaving);
  if (m->coded != nullptr) frames_.put_bounce(m->coded, r.block_size);
  m->coded = nullptr;
  Resident& resident = residents_[block.aux];
  if ((m->keep || m->probe) && resident.admitted) map_.policy(block.aux).unhold(block.aux);

  if (m->in_place || (!m->status.ok() && !m->from_held && !m->out)) {
    // Its pages never left. After a failure the kernel's protection may be stronger than the flag: the next store
    // undoes it.
    if (!m->in_place && r.transfer == Transfer::move) frames_.put_slot(m->image, r.block_size);
    r.table.change(m->block, from, State::resident);
    if (m->status.ok() && m->in_place && (block.flags & core::kWantedWrite) == 0 &&
        (block.flags & core::kDigest) != 0 && !lent_for_writing(r, m->block)) {
      block.flags |= core::kProtected;
    } else {
      block.flags &= static_cast<uint16_t>(~core::kProtected);
      if (m->in_place) trap_->unprotect(r.address(m->block), r.block_size).ignore();
    }
    if ((block.flags & core::kWanted) != 0) trap_->wake(r.address(m->block), r.block_size).ignore();
    block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
    map_.admit(r, m->block, clock_.stamp());
    map_.free_move(m);
    return;
  }
  resident.frame = m->image;
  const bool wanted = (block.flags & core::kWanted) != 0;
  if (m->from_held && (!wanted || m->staged)) {
    r.table.change(m->block, from, State::held);
    map_.admit(r, m->block, clock_.stamp());
    const BlockIndex b = m->block;
    map_.free_move(m);
    if (wanted) begin_install(r, b, after);
    return;
  }
  resident.stamp = clock_.stamp();
  m->protect = false;
  start_installing(m, from, after.install);
}

// Locked; state writing.
void Pager::to_store(Move* m, After& after) {
  Region& r = *m->region;
  m->pager = this;
  const auto prepare = [&](store::Io& io, store::FileId file, uint64_t offset, std::byte* buffer, size_t size) {
    io.op = store::Io::Op::write;
    io.urgency = m->job != nullptr ? Urgency::acquire : Urgency::writeback;
    io.file = file;
    io.offset = offset;
    io.buffer = buffer;
    io.size = size;
    io.done = on_written;
    io.user = m;
  };
  if (r.backing == Backing::file_shared) {
    m->stored = r.file_bytes(m->block);
    prepare(m->io, r.file_id, r.file_offset + m->block * r.block_size, m->image, m->stored);
    m->io.within_file = true;
  } else {
    prepare(m->io, space_->file(m->extent), m->extent.offset(), m->codec == store::Codec::raw ? m->image : m->coded,
            m->stored);
    if (!m->new_extent) r.table[m->block].flags &= static_cast<uint16_t>(~core::kDigest);  // until it is whole again
  }
  // Worth it: it was stored to. On a device a lease says so, and what it has may have been there before.
  if (Block& block = r.table[m->block]; m->device < 0 && (block.flags & core::kReadAhead) != 0) {
    block.flags &= kForget;
    residents_.seen(residents_[block.aux]);
    core::add(counters_.prefetch_hits);
  }
  after.submit.push_back(m);
}

void Pager::on_written(store::Io& io) {
  Move* m = static_cast<Move*>(io.user);
  Pager& self = *m->pager;
  if (io.result != 0) m->status = Status(io.result, "");
  After after;
  self.finish_write(m, after);
  self.run(after);
}

// Locked. The mark, words, back-off, and a status for whoever asks next.
void Pager::note_write_failure(Move* m) {
  if (m->io.size != 0 && !core::broken("unknown_mark")) failed_.mark_unknown(*m->region, m->block);  // it was begun
  core::add(counters_.io_errors);
  if (m->status.text().empty()) {
    m->status = core::system_error(m->status.code(), "writing failed, the block stays in memory, %s",
                                   map_.where(*m->region, m->block).c_str());
  }
  if (write_back_.failed(m->status, m->job != nullptr || core::broken("write_report"), now_ns()))
    core::log(core::Level::warning, "%.*s", static_cast<int>(m->status.text().size()), m->status.text().data());
}

// Unlocked. The store has room again, or may have: who waits to write tries at once.
void Pager::store_has_room() {
  Lock lock(mutex_);
  if (write_back_.has_room()) need_evict_.notify_all();
}

// Locked. The write of `m` failed: what it had room in is not wanted. Before anybody tries again.
void Pager::give_back_extent(Move* m) {
  if (!m->new_extent || !m->extent) return;
  if (m->status.code() == -ENOSPC || m->status.code() == -EDQUOT) {
    space_->refuse(m->extent);
  } else {
    space_->release(m->extent);
  }
}

// Unlocked; state writing, or leaving for a block that stays on its device.
void Pager::finish_write(Move* m, After& after) {
  if (m->device >= 0) {
    finish_device_write(m, after);
    return;
  }
  Region& r = *m->region;
  core::step("evict.written");
  const bool cut = m->status.ok() && r.backing == Backing::file_shared && m->io.transferred < m->stored;
  if (cut) drop_cut_off(m);
  bool dropped = false;
  if (cut && m->in_place && !m->keep) {
    dropped = true;
  } else if (m->status.ok() && m->in_place && !m->keep) {
    bool wanted;
    {
      Lock lock(mutex_);
      wanted = (r.table[m->block].flags & core::kWanted) != 0;
      if (wanted) {
        m->keep = true;  // somebody waits for it: spare the read
        write_back_.settled(m->leaving);
      } else {
        residents_[r.table[m->block].aux].dropping = true;
      }
    }
    if (!wanted) {
      const trap::Range range{reinterpret_cast<uintptr_t>(m->image), r.block_size};
      if (Status s = trap_->drop({&range, 1}); !s.ok())
        core::fatal("memory of a block could not be dropped: %s", s.text().data());
      dropped = true;
    }
  }
  core::Extent old;
  Lock lock(mutex_);
  Block& block = r.table[m->block];
  if (!m->status.ok()) {
    note_write_failure(m);
    give_back_extent(m);
    put_back(m, after);
    pump(after);
    return;
  }
  write_back_.succeeded();
  progress_.made();
  core::add(counters_.write_bytes, m->io.transferred);
  if (r.backing != Backing::file_shared) {
    if (m->new_extent) old = block.extent;
    block.extent = m->extent;
  }
  block.digest = m->digest;
  block.flags |= core::kDigest;
  if (cut) block.flags &= static_cast<uint16_t>(~core::kDigest);  // not all of it is there
  block.flags &= static_cast<uint16_t>(~core::kDirty);
  failed_.clear_unknown(block);
  if (!dropped && (m->keep || (!cut && (block.flags & core::kWanted) != 0))) {
    put_back(m, after);
  } else {
    let_go(m, State::writing, after);  // wanted again meanwhile: let_go() reads it back
  }
  pump(after);
  failed_.revive_dropped();
  lock.unlock();
  if (old) space_->release(old);
}

// Unlocked; state writing. The file ends before the block does, so the rest of it was not written. As in a mapping
// those bytes are gone: the block leaves memory, else they would reach the file with the next store to the block when
// the file has grown again. Only a lease keeps it.
void Pager::drop_cut_off(Move* m) {
  Region& r = *m->region;
  core::log(core::Level::warning, "the file became shorter: %zu changed bytes beyond its end are dropped, %s",
            m->stored - m->io.transferred, map_.place(r, m->block).c_str());
  {
    Lock lock(mutex_);
    const ResidentId id = r.table[m->block].aux;
    Resident& resident = residents_[id];
    if (m->keep) {
      if (leased(r, m->block)) return;
      if (resident.admitted) {
        map_.policy(id).unhold(id);
        map_.policy(id).remove(id);
        resident.admitted = false;
      }
      m->keep = false;
      leaves(m);
    }
    resident.dropping = true;
  }
  if (!m->in_place) return;
  const trap::Range range{reinterpret_cast<uintptr_t>(m->image), r.block_size};
  if (Status s = trap_->drop({&range, 1}); !s.ok())
    core::fatal("memory of a block could not be dropped: %s", s.text().data());
}

namespace {

// Unlocked; state filling, and the file's own pages are mapped there. The trap takes their place, and for a moment
// there is neither: meanwhile touches park at the gate, which regions with a device tier have. On error touches meet
// the file as before (*shown), or SIGBUS.
Status hide_file(trap::Trap& trap, const Region& r, BlockIndex b, bool* shown) {
  if (Status s = device::park::check(); !s.ok()) return s;
  const uintptr_t at = reinterpret_cast<uintptr_t>(r.address(b));
  device::park::set(at, r.block_size, device::park::Gate::shut);
  const core::OnExit open([&] { device::park::set(at, r.block_size, device::park::Gate::open); });
  Status s = trap.unmap_file(r.address(b), r.block_size);
  if (!s.ok()) *shown = map_file(trap, r, b).ok();
  return s;
}

// .. They stay, and what was stored to them is dropped: without a gate they cannot be replaced under a reader.
Status drop_shown(trap::Trap& trap, const Region& r, BlockIndex b) {
  const trap::Range range{reinterpret_cast<uintptr_t>(r.address(b)), core::round_up(r.file_bytes(b), core::kPage)};
  return trap.drop({&range, 1});
}

}  // namespace

// A block that shows its file loses what is there. In a region with a device tier whose accesses park it is an ordinary
// block again, as by revive(); else it goes on showing the file. Locked, and not meanwhile: to take a file's pages away
// may mean that the file system writes them first. For that time nobody else acts on the block.
Status Pager::revive_shown(Lock& lock, Region& r, BlockIndex b) {
  if (!map_.reserve_block()) return core::error(ENOMEM, "no memory for bookkeeping");
  Block& block = r.table[b];
  const uint32_t stamp = block.aux;
  const ResidentId id = map_.new_resident(r, b, nullptr);
  r.table.change(b, State::failed, State::filling);
  Move* m = map_.new_move(r, b);
  const bool hides = r.gpu && !own_page_tables();
  bool shown = (block.flags & core::kUnanswered) == 0;
  lock.unlock();
  core::step("file.hiding");
  Status s = hides ? hide_file(*trap_, r, b, &shown) : drop_shown(*trap_, r, b);
  lock.lock();
  map_.give_resident(id);
  block.aux = stamp;
  After after;
  if (s.ok() && hides) {
    block.flags &= static_cast<uint16_t>(~(core::kShowsFile | core::kLost | core::kTold | core::kUnanswered));
    r.table.change(b, State::filling, block.extent ? State::stored : State::untouched);
    tables_.charge(r);
    r.reasons.erase(b);
    map_.free_move(m);
    settle(r, b, after);
  } else {
    if (!s.ok()) core::log(core::Level::error, "%.*s", static_cast<int>(s.text().size()), s.text().data());
    block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite | core::kUnanswered));
    if (!shown) block.flags |= core::kUnanswered;
    r.table.change(b, State::filling, State::failed);
    trap_->wake(r.address(b), r.block_size).ignore();
    map_.free_move(m);
  }
  pump(after);
  run(lock, after);
  return s;
}

}  // namespace vmem::pager
