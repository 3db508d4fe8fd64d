#include "pager/host/isolator.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "core/break.h"
#include "core/fault_server.h"
#include "core/log.h"
#include "core/process/unwatched_reads.h"
#include "core/step.h"
#include "pager/block/block_run.h"
#include "pager/host/drop_pages.h"
#include "pager/host/host_tier.h"
#include "store/codec.h"

namespace vmem::pager {

Isolator::Isolator(PagerContext& ctx) : ctx_(ctx) {}

Transition* Isolator::begin_take(Region& r, BlockIndex b, bool keep, bool probe) {
  const Block& block = r.table[b];
  Frame& frame = ctx_.map.frame_table()[block.aux];
  const bool held = block.state == State::staged || frame.lent_to_kernels;
  // A device that has pinned a page can store to it in place, whatever protects it. So a block that
  // is to leave is taken out first, if the trap sees pins then.
  const bool takes = !keep && ctx_.trap.caps().pins == trap::Pins::taken_away && !core::broken("pins");
  const bool in_place = !held && ((r.transfer == Transfer::copy && !takes) ||
                                  (keep && r.transfer == Transfer::move && ctx_.trap.caps().write_protect));
  std::byte* image = held                              ? frame.bytes
                     : in_place                        ? r.address(b)
                     : r.transfer == Transfer::install ? frame.bytes
                                                       : ctx_.frames.get_slot(r.block_size);
  if (image == nullptr) return nullptr;
  // Without memory for a copy the block is protected: it must be written.
  std::byte* aside = nullptr;
  if (in_place && keep && lent_for_writing(r, b) && !core::broken("leased_copy"))
    aside = r.bounces ? ctx_.frames.get_bounce(r.block_size) : ctx_.frames.get(r.block_size, 0);
  if (!ctx_.map.reserve_transition()) {
    if (aside != nullptr)
      r.bounces ? ctx_.frames.put_bounce(aside, r.block_size) : ctx_.frames.put(aside, r.block_size);
    if (!held && !in_place && r.transfer != Transfer::install) ctx_.frames.put_slot(image, r.block_size);
    return nullptr;
  }
  frame.lent_to_kernels ? r.table.begin_write(b) : r.table.begin_isolate(b);
  Transition* m = ctx_.map.new_transition(r, b);
  m->image = image;
  m->way = core::Way::host_to_ssd;
  m->write.keep = keep;
  m->write.probe = probe;
  m->write.from_staged = held;
  m->write.in_place = in_place;
  m->write.unprotected = aside != nullptr;
  m->write.aside = aside;
  m->in_staging = in_staging(frame.pool);
  m->write.clean = !r.writable() || (!held && stood_protected(ctx_.trap.caps().pins, block, frame)) ||
                   (m->in_staging && proven_clean(block));
  m->write.elsewhere = (block.flags & core::kUnknown) != 0;
  m->write.has_digest = (block.flags & core::kDigest) != 0 && (block.flags & core::kUnknown) == 0;
  frame.in_place = in_place;
  frame.dropping = frame.holed = false;
  if (!probe && !m->write.clean && r.codec != store::Codec::raw && r.backing != Backing::file_shared) {
    m->coded = ctx_.frames.get_bounce(r.block_size);  // none free: this image is stored raw
    // If the program has changed rights in the region, blocks are not compressed in place.
    if (m->coded != nullptr && in_place && r.guarded &&
        (m->write.aside = ctx_.frames.get_bounce(r.block_size)) == nullptr) {
      ctx_.frames.put_bounce(m->coded, r.block_size);
      m->coded = nullptr;
    }
  }
  // Memory that a pin has kept before does not count as leaving: other blocks are reclaimed
  // instead.
  if (!keep && !probe && !frame.pins.pinned)
    ctx_.writeback_throttle.count_leaving(m->write.leaving, r.block_size, leaves_pool(*m));
  if ((keep || probe) && frame.admitted) ctx_.map.policy(block.aux).hold(block.aux);
  return m;
}

bool Isolator::may_be_clean(const Region& r, BlockIndex b) const {
  const Block& block = r.table[b];
  if (ctx_.map.frame_table()[block.aux].unwritten) return false;
  if (!r.writable() || (block.flags & core::kProtected) != 0) return true;
  return (block.flags & (core::kDigest | core::kUnknown)) == core::kDigest;
}

namespace {

// Not inlined: callers may have little stack, and need the buffer only in regions with changed
// rights.
[[gnu::noinline]] int digest_guarded(store::Digester& digester, const std::byte* from, size_t size,
                                     core::Absent absent) {
  std::array<std::byte, size_t{16} << 10> room;  // fits the first-level cache
  for (size_t at = 0; at < size; at += room.size()) {
    const size_t bytes = std::min(room.size(), size - at);
    if (const int error = core::read_guarded(room.data(), from + at, bytes, absent); error != 0) return error;
    digester.update(room.data(), bytes);
  }
  return 0;
}

}  // namespace

// Hashes a block in place. At any moment the program may take the right to read a page, or make it
// a guard page. Once it has done so in a region (guarded), our threads load nothing there: the
// kernel reads for them. Until then the mappings are checked again after each kLook bytes, which
// leaves the first such change only a short window.
Status Isolator::digest_in_place(Transition* m, Look* look) {
  constexpr size_t kLook = size_t{256} << 10;
  const Region& r = *m->region;
  store::Digester digester;
  core::may_wait_for_a_fault("a block is compared in its place");
  for (size_t at = 0; at < r.block_size; at += kLook) {
    const std::byte* const from = r.address(m->block) + at;
    const size_t bytes = std::min(r.block_size - at, kLook);
    if (!r.guarded && (from < look->first || from + bytes > look->last || look->left < bytes)) {
      const size_t rest = r.span - static_cast<size_t>(from - r.base);
      *look = {.first = from, .last = from + std::min(kLook, rest), .left = kLook};
      look->loads = may_load(mappings_, r, from, static_cast<size_t>(look->last - from));
    }
    look->left -= std::min(look->left, bytes);
    int error = 0;
    if (m->write.aside != nullptr) {
      error = core::read_guarded(m->write.aside + at, from, bytes, r.absent);
      digester.update(m->write.aside + at, bytes);
    } else if (r.guarded || !look->loads) {
      error = digest_guarded(digester, from, bytes, r.absent);
    } else {
      const core::UnwatchedReads unwatched;
      digester.update(from, bytes);
    }
    if (error == 0) continue;
    Status s =
        core::error(EFAULT,
                    "%zu bytes at %p cannot be read (mprotect, munmap, a guard page?), and /proc/self/mem does not "
                    "help: their block stays in memory, and is not written",
                    bytes, static_cast<const void*>(from));
    VMEM_LOG_ONCE(core::Level::warning, "%.*s", static_cast<int>(s.text().size()), s.text().data());
    return s;
  }
  if (m->write.aside != nullptr) m->image = m->write.aside;
  m->digest = digester.finish();
  return {};
}

// Runs on threads that answer for the trap, so it must not fault.
bool Isolator::still_same(const Transition* m) const {
  const Region& r = *m->region;
  if (ctx_.trap.caps().pins != trap::Pins::taken_away || m->write.aside != nullptr) return true;
  std::array<std::byte, size_t{16} << 10> room;
  store::Digester digester;
  for (size_t at = 0; at < r.block_size; at += room.size()) {
    const size_t bytes = std::min(room.size(), r.block_size - at);
    if (reader_.read_at_once(room.data(), r.address(m->block) + at, bytes, r.absent) != 0) return false;
    digester.update(room.data(), bytes);
  }
  return digester.finish() == m->digest;
}

// Afterwards the image cannot change, and `clean` says whether the store has the same bytes.
void Isolator::take_one(Transition* m, Look* look) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  std::byte* const at = r.address(m->block);
  core::step("evict.taking");
  if (!m->write.from_staged) {
    // Blocks in place are write-protected by now, and others are in their slots, or the status says
    // why not.
    if (!m->write.in_place && r.transfer != Transfer::copy)
      m->status = ctx_.trap.take(at, r.block_size, m->image, r.transfer);
    if (!m->status.ok()) {
      settle_torn_take(m);
      return;
    }
    m->write.out = !m->write.in_place;
  }
  core::step("evict.taken");
  if (m->write.probe || m->write.clean) return;
  if (m->write.in_place) {
    m->status = digest_in_place(m, look);
    if (!m->status.ok()) return;
  } else {
    m->digest = store::digest(m->image, r.block_size);
  }
  m->write.clean = m->write.has_digest && (core::broken("compare") || m->digest == block.digest);
  if (!m->write.clean && r.backing == Backing::anonymous && m->digest == store::zero_digest(r.block_size)) {
    m->write.clean = m->write.zeros = true;
  }
}

// Moves blocks of copied ranges to their slots, neighbours by one call. `batch` is in the order of
// address_order(). Pinned blocks are often many, of one buffer that stays registered for long: the
// batch waits only for the first of them. A call that has asked for its blocks waits for each.
void Isolator::take_to_slots(std::span<Transition* const> batch) {
  core::InplaceVector<std::byte*, Batch::capacity()> slots;
  const auto goes = [](const Transition& m) {
    return !m.write.in_place && !m.write.from_staged && m.region->transfer == Transfer::copy;
  };
  bool any_pinned = false;
  for (size_t i = 0, n = 1; i < batch.size(); i += n, n = 1) {
    if (!goes(*batch[i])) continue;
    Region& r = *batch[i]->region;
    while (i + n < batch.size() && goes(*batch[i + n]) && batch[i + n]->region == &r) ++n;
    const std::span<Transition* const> transitions = batch.subspan(i, n);
    slots.clear();
    for (const Transition* m : transitions) slots.push_back(m->image);
    std::sort(slots.begin(), slots.end());
    for (size_t k = 0; k < n; ++k) transitions[k]->image = slots[k];
    const auto take = [&](const Transition& first, size_t blocks) {
      const trap::PinWait wait = any_pinned && first.completion == nullptr ? trap::PinWait::none : trap::PinWait::brief;
      Status s = ctx_.trap.take(r.address(first.block), blocks * r.block_size, first.image, Transfer::copy, wait);
      any_pinned |= s.code() == -EBUSY;
      return s;
    };
    for (size_t k = 0, run = 1; k < n; k += run, run = 1) {
      while (k + run < n && goes_on(*transitions[k], *transitions[k + run], run)) ++run;
      const Status all = take(*transitions[k], run);
      // Retry blocks one by one, so that one pin does not affect the others. After a call that
      // stopped half way it is not known which are whole.
      const bool alone = run > 1 && !all.ok() && !half_way(all);
      for (Transition* m : transitions.subspan(k, run)) {
        if (alone) m->write.clean = !r.writable();  // pages that went and came back are no longer protected
        m->status = alone ? take(*m, 1) : all;
      }
    }
  }
}

// Empties the slots of blocks that the store has.
void Isolator::empty_clean(std::span<Transition* const> batch) {
  core::InplaceVector<trap::Range, Batch::capacity()> ranges;
  for (Transition* m : batch) {
    if (!m->status.ok() || m->write.probe || !m->write.clean || m->write.keep || !in_slot(*m)) continue;
    const auto at = reinterpret_cast<uintptr_t>(m->image);
    const size_t size = m->region->block_size;
    m->write.emptied = true;
    if (!ranges.empty() && ranges.back().address + ranges.back().size == at) {
      ranges.back().size += size;
    } else {
      ranges.push_back({at, size});
    }
  }
  if (!ranges.empty())
    ctx_.trap.release_many(ranges.all()).ignore();  // pages that stay are left to the slot's next user
}

// Drops the pages of blocks that are in place and that the store has.
void Isolator::drop_clean(std::span<Transition* const> batch) {
  const auto goes = [](const Transition& m) {
    return m.status.ok() && !m.write.probe && m.write.clean && m.write.in_place && !m.write.keep;
  };
  DropList drops;
  {
    // From here on, absent pages of these blocks are our doing: an access waits until the block is
    // read again.
    Lock lock(ctx_.map.mutex());
    for (Transition* m : batch) {
      if (!goes(*m)) continue;
      Frame& frame = ctx_.map.frame_table()[m->region->table[m->block].aux];
      if (frame.holed) {  // the hole may have been stored to since it was looked at
        m->write.keep = true;
        ctx_.writeback_throttle.settled(m->write.leaving);
        continue;
      }
      frame.dropping = true;
      drops.add(*m);
    }
  }
  if (drops.empty() || drop_pages(ctx_.trap, drops.all())) return;
  for (Transition* m : batch) {
    if (goes(*m) && !drop_one(ctx_.trap, *m->region, m->block))
      m->status = core::error(EBUSY, "a page of the block is pinned");
  }
}

// After a failed take(): drops what is left of a torn block, and empties the slot whatever it has.
void Isolator::settle_torn_take(Transition* m) {
  Region& r = *m->region;
  if (m->write.in_place || r.transfer == Transfer::install || (!half_way(m->status) && m->status.code() != -EEXIST))
    return;
  if (half_way(m->status)) {
    VMEM_LOG_OFTEN(core::Level::error, "%.*s: the contents are lost, %s", static_cast<int>(m->status.text().size()),
                   m->status.text().data(), ctx_.map.describe(r, m->block).c_str());
    core::settle_log();
    drop_torn(ctx_.trap, r, m->block);
    m->torn = true;
  }
  ctx_.trap.release_frames(m->image, r.block_size).ignore();  // pages that stay are left to the slot's next user
}

void Isolator::isolate(std::span<Transition*> batch, Batch* writes) {
  bool drops = false;
  std::sort(batch.begin(), batch.end(), address_order);
  protect_in_place(ctx_.trap, batch);
  take_to_slots(batch);
  Look look;
  const Region* last = nullptr;
  for (Transition* m : batch) {
    if (std::exchange(last, m->region) != m->region) look = {};
    take_one(m, &look);
    if (!m->status.ok() || m->write.probe) continue;
    if (m->write.clean) {
      drops |= m->write.in_place && !m->write.keep;
    } else if (!m->write.only_clean) {
      writes->push_back(m);
    }
  }
  if (drops) drop_clean(batch);
  empty_clean(batch);
}

}  // namespace vmem::pager
