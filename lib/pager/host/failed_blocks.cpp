#include "pager/host/failed_blocks.h"

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "core/break.h"
#include "core/clock.h"
#include "core/fatal.h"
#include "core/log.h"
#include "core/process/at_exit.h"
#include "core/step.h"
#include "core/thread.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

FailedBlocks::FailedBlocks(PagerContext& ctx, HostTier& host) : ctx_(ctx), host_(host) {}

using core::Level;

// The write may have left a part of its bytes where the old ones were. No digest taken before
// proves anything, even if the program restores the old bytes, until a write of the whole block
// succeeds.
void FailedBlocks::mark_unknown(Region& r, BlockIndex b) {
  const core::Block& block = r.table[b];
  if ((block.flags & core::kUnknown) == 0) ++unknown_blocks_;
  r.table.mark(b, core::kUnknown);
  if (r.gpu) r.table.mark(b, core::kDirty);
  r.table.clear(b, core::kDigest | core::kProtected);
}

void FailedBlocks::clear_unknown(Region& r, BlockIndex b) {
  if ((r.table[b].flags & core::kUnknown) == 0) return;
  --unknown_blocks_;
  r.table.clear(b, core::kUnknown);
}

// The store's copy is older than the lost changes, and must not be taken for them.
void FailedBlocks::mark_lost(Region& r, BlockIndex b, const Status& why) {
  forget_store_copy(r, b);
  r.table.clear(b, core::kFaultPending | core::kStorePending | core::kDirty | core::kProtected | core::kReadAhead |
                       core::kReadaheadMarker | core::kPrefetched | core::kTold);
  if (!core::broken("lost_mark")) r.table.mark(b, core::kLost);
  core::add(ctx_.counters.lost_blocks);
  r.table.poison(b);
  r.keep_reason(b, core::error(EIO, "%.*s", static_cast<int>(why.text().size()), why.text().data()));
  fail_accesses(r, b);
}

// Accesses get SIGBUS long enough for all waiting threads to get theirs. A program whose handler
// returns repeats the access at once, so the block is read no more than ten times a second. Without
// memory for one more entry, the time of the oldest is over.
void FailedBlocks::mark_unread(Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  if ((block.flags & core::kUnread) == 0) ++r.counts.unread;
  r.table.mark(b, core::kUnread);
  if (!ctx_.trap.caps().poison) return;
  const ReadError unread{&r, b, now_ns() + kSlice};
  if (!unread_.push_back(unread)) {
    if (unread_.empty()) return;
    read_again();
    if (!unread_.push_back(unread)) return;  // an acquire reads it
  }
  host_.pressure.wake_reclaim();
}

void FailedBlocks::clear_unread(Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  if ((block.flags & core::kUnread) == 0) return;
  --r.counts.unread;
  r.table.clear(b, core::kUnread);
  r.reasons.erase(b);
}

// Makes the first unread block absent, if it still waits. If the trap refuses, this is tried again.
// The list must not be empty.
void FailedBlocks::read_again() {
  auto& [r, b, until_ns] = unread_.front();
  const Block& block = r->table[b];
  const bool waits = !r->dying && !r->lost && block.state == State::poisoned && (block.flags & core::kUnread) != 0 &&
                     (block.flags & (core::kDropped | core::kShowsFile)) == 0;
  if (!waits) return unread_.pop_front();
  if (revive(*r, b).ok()) return;
  until_ns = now_ns() + kSlice;
  unread_.move_front(unread_.end());
}

void FailedBlocks::fail_accesses(Region& r, BlockIndex b) {
  if (r.lost) return;
  const Status s = ctx_.trap.fail(r.address(b), r.block_size);
  if (s.ok()) {
    r.table.clear(b, core::kUnanswered);
    return;
  }
  r.table.mark(b, core::kUnanswered);
  answer_later(r, b, s);
}

void FailedBlocks::answer_later(Region& r, BlockIndex b, const Status& why) {
  if (!ask_later(r, b)) return;
  VMEM_LOG_OFTEN(Level::error, "the trap cannot answer accesses, so they wait: %.*s, %s",
                 static_cast<int>(why.text().size()), why.text().data(), ctx_.map.describe_locked(r, b).c_str());
}

FailedBlocks::Retry* FailedBlocks::add_retry(Region& r, BlockIndex b, uint64_t now) {
  Retry* known = find_retry(r, b);
  if (known == nullptr) {
    Retry fresh;
    fresh.region = &r;
    fresh.block = b;
    fresh.refused_ns = now;
    if (!retries_.push_front(fresh)) return nullptr;
    known = &retries_.front();
  }
  known->lived_ns += std::min(now - known->refused_ns, known->pause_ns + kSlice);
  known->refused_ns = now;
  known->pause_ns = std::clamp(2 * known->pause_ns, kShortestPause, kLongestPause);
  known->due_ns = now + known->pause_ns;
  known->asleep = true;
  ++known->times;
  return known;
}

bool FailedBlocks::ask_later(Region& r, BlockIndex b) {
  const bool known = find_retry(r, b) != nullptr;
  if (Retry* const retry = add_retry(r, b, now_ns())) {
    retry->memory = false;
    retry->accessed = true;
  } else {
    ctx_.trap.wake(r.address(b), r.block_size).ignore();
  }
  host_.pressure.wake_reclaim();
  return !known;
}

void FailedBlocks::read_later(Region& r, BlockIndex b, const Status& why) {
  const core::Block& block = r.table[b];
  const bool accessed = (block.flags & core::kFaultPending) != 0;
  const bool known = find_retry(r, b) != nullptr;
  if (!known) {
    VMEM_LOG_OFTEN(Level::warning, "%.*s: it is tried again", static_cast<int>(why.text().size()), why.text().data());
  }
  const uint64_t now = now_ns();
  const uint64_t mark = ctx_.deadline.look(now);
  if (Retry* const retry = add_retry(r, b, now)) {
    if (!retry->memory) retry->mark = mark;
    retry->memory = true;
    retry->accessed |= accessed;
  } else if (accessed) {
    ctx_.trap.wake(r.address(b), r.block_size).ignore();
  }
  r.table.answer_faults(b);
  host_.pressure.wake_reclaim();
}

Status FailedBlocks::not_read(const Region& r, BlockIndex b) const {
  return core::error(ENOMEM, "the kernel had no memory to read a block in %u ms; the log says more, %s",
                     ctx_.tunables.fault_timeout_ms, ctx_.map.describe_locked(r, b).c_str());
}

uint64_t FailedBlocks::next_ns() const {
  uint64_t next = unread_.empty() ? UINT64_MAX : unread_.front().until_ns;
  for (const Retry& e : retries_) next = std::min(next, e.due_ns);
  return next;
}

bool FailedBlocks::want_memory() const {
  return std::any_of(retries_.begin(), retries_.end(), [](const Retry& e) { return e.memory; });
}

bool FailedBlocks::ask_again(Lock& lock, uint64_t now) {
  if (!unread_.empty() && unread_.front().until_ns <= now) {
    read_again();
    return true;
  }
  const auto due = std::find_if(retries_.begin(), retries_.end(), [&](const Retry& e) { return e.due_ns <= now; });
  if (due == retries_.end()) return false;
  Retry* retry = &*due;
  Region& r = *retry->region;
  const BlockIndex b = retry->block;
  const auto absent = [&] {
    const State state = r.table[b].state;
    return !r.dying && (state == State::unpopulated || state == State::stored || state == State::staged);
  };
  const uint64_t limit = ctx_.tunables.fault_timeout_ms * uint64_t{1000000};
  if (retry->bus &&
      (core::in_transition(r.table[b].state) || (absent() && !ctx_.trap.unfail(r.address(b), r.block_size).ok()))) {
    retry->due_ns = now + kSlice;
    return true;
  }
  if (retry->bus || !retry->asleep) {  // threads have got their signals, or were not refused again
    if (retry->asleep) ctx_.trap.wake(r.address(b), r.block_size).ignore();
    retries_.erase(due);
    return true;
  }
  const bool late = retry->accessed && retry->times > kRefusals && retry->lived_ns >= limit &&
                    (!retry->memory || ctx_.deadline.hopeless(retry->mark));
  const bool over = late && r.table[b].state != State::resident;
  retry->asleep = false;
  retry->due_ns = now + 2 * kLongestPause;
  if (over) {
    VMEM_LOG_OFTEN(Level::error, "%s, %u times in %u ms: an access gets SIGBUS; the contents are intact, %s",
                   retry->memory ? "the kernel had no memory to read a block" : "a block could not be put in place",
                   retry->times, ctx_.tunables.fault_timeout_ms, ctx_.map.describe_locked(r, b).c_str());
    retry->times = 0;
    retry->lived_ns = 0;
    retry->mark = ctx_.deadline.look(now);
    ++r.counts.in_flight;
    lock.unlock();
    core::settle_log();  // log before the signal
    core::step("retry.said");
    lock.lock();
    --r.counts.in_flight;
    ctx_.map.notify();
    if (r.dying) return true;
    retry = find_retry(r, b);
    if (retry != nullptr && absent() && ctx_.trap.fail(r.address(b), r.block_size).ok()) {
      retry->bus = true;
      retry->due_ns = now_ns() + kSlice;
      return true;
    }
  }
  const Status woken = ctx_.trap.wake(r.address(b), r.block_size);
  if (woken.code() != -EPERM || retry == nullptr) return true;
  if (late) end_process(r, b, woken);
  add_retry(r, b, now);  // no thread has repeated the access
  return true;
}

// Ends the process, which would hang: the program has forbidden the ioctls by which waiting threads
// go on or get SIGBUS. Writes what it can of shared files first, but no blocks that would have to
// be write-protected for that.
void FailedBlocks::end_process(const Region& r, BlockIndex b, const Status& why) {
  if (std::exchange(ending_, true)) return;
  core::log(core::Level::error,
            "a thread waits for a block and cannot be woken: %.*s, %s. Ioctls of userfaultfd are forbidden, but "
            "libvmem needs them while regions exist: permit them, or free all regions first. The process ends once it "
            "has written the changes of shared files that it can",
            static_cast<int>(why.text().size()), why.text().data(), ctx_.map.describe_locked(r, b).c_str());
  const auto end = [] {
    core::do_exit_work_at_our_end();
    core::fatal("threads wait for blocks that libvmem is not allowed to put in place; the log says more");
  };
  std::thread thread;
  if (!core::start_thread("vmem-end", end, &thread).ok())
    core::fatal("threads wait for blocks that libvmem is not allowed to put in place");
  thread.detach();
}

Status FailedBlocks::tell_lost(Region& r, BlockIndex first, BlockIndex last, bool again) {
  if (!r.writable() || (r.table.count(State::poisoned) == 0 && r.counts.unread == 0)) return {};
  uint64_t lost = 0;
  BlockIndex at = 0;
  for (BlockIndex b = r.table.next_populated(first); b <= last && b < r.blocks; b = r.table.next_populated(b + 1)) {
    const core::Block& block = r.table[b];
    const bool failed = block.state == State::poisoned && (block.flags & core::kDropped) == 0;
    if (!failed && (block.flags & core::kUnread) == 0) continue;
    const bool unreadable = (block.flags & core::kLost) == 0;
    if (unreadable && (!again || !block.extent)) continue;
    if (!again && (block.flags & core::kTold) != 0) continue;
    if (!unreadable) r.table.mark(b, core::kTold);
    if (lost++ == 0) at = b;
  }
  if (lost == 0) return {};
  const Status why = r.reason(at);
  return core::error(EIO, "%llu blocks of the range are lost; the first: %s: %.*s",
                     static_cast<unsigned long long>(lost), ctx_.map.describe_locked(r, at).c_str(),
                     static_cast<int>(why.text().size()), why.text().data());
}

// The block's accesses get SIGBUS no more. An entry that stayed would cut short the time of its
// next failure.
void FailedBlocks::forget_unread(const Region& r, BlockIndex b) {
  const auto known =
      std::find_if(unread_.begin(), unread_.end(), [&](const ReadError& u) { return u.region == &r && u.block == b; });
  if (known != unread_.end()) unread_.erase(known);
}

void FailedBlocks::forget_store_copy(Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  if (block.extent) ctx_.space.release(block.extent);
  r.table.set_extent(b, {});
  r.table.forget_digest(b);
  clear_unknown(r, b);
  clear_unread(r, b);
}

// A block that the trap does not take back stays queued until the next call.
void FailedBlocks::revive_dropped() {
  for (size_t left = dropped_.size(); left != 0; --left) {
    const auto [r, b] = dropped_.front();
    const Block& block = r->table[b];
    if (block.state == State::poisoned && (block.flags & core::kDropped) != 0 && !revive(*r, b).ok()) {
      dropped_.move_front(dropped_.end());
    } else {
      dropped_.pop_front();
    }
  }
}

Status FailedBlocks::revive(Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  Status s = core::broken("revive") ? Status() : ctx_.trap.unfail(r.address(b), r.block_size);
  if (!s.ok()) {
    if ((block.flags & core::kUnanswered) == 0)
      VMEM_LOG_OFTEN(core::Level::error, "%.*s", static_cast<int>(s.text().size()), s.text().data());
    r.table.mark(b, core::kUnanswered);  // a part of it may be trapped
    return s;
  }
  if ((block.flags & core::kUnread) != 0) forget_unread(r, b);
  if (!block.extent) clear_unread(r, b);  // no stored bytes can be lost
  if ((block.flags & (core::kUnread | core::kDropped)) != core::kUnread) r.reasons.erase(b);
  r.table.clear(b, core::kDropped | core::kLost | core::kTold | core::kUnanswered);
  r.table.revive(b);
  return {};
}

Status FailedBlocks::no_table(const Region& r, BlockIndex b) const {
  return core::error(
      ENOMEM,
      "host_budget %s has no room for more of the tables of blocks: %s, of which %s are this region's (%s "
      "for each %s of it in which anything was stored), beside %s of buffers, %s leased and %s for blocks "
      "that move; raise host_budget, choose a larger block_size, or drop what is not needed with "
      "VMEM_ADVISE_DONT_NEED; %s",
      core::human_bytes(ctx_.budget.wanted()).c_str(), core::human_bytes(ctx_.metadata_charges.bytes()).c_str(),
      core::human_bytes(r.charge.table).c_str(), core::human_bytes(core::kPage).c_str(),
      core::human_bytes(core::BlockTable::kChunk * r.block_size).c_str(),
      core::human_bytes(ctx_.frames.least_overhead() - ctx_.budget.charged(Use::tables)).c_str(),
      core::human_bytes(ctx_.reserve.pinned()).c_str(),
      core::human_bytes(std::max(ctx_.reserve.bytes(), 4 * ctx_.reserve.largest_block())).c_str(),
      ctx_.map.describe_locked(r, b).c_str());
}

// Remembered by address, since the table has no entry for the block.
void FailedBlocks::refuse_growth(Region& r, BlockIndex b) {
  const Status why = no_table(r, b);
  VMEM_LOG_OFTEN(core::Level::error, "%.*s: an access gets SIGBUS", static_cast<int>(why.text().size()),
                 why.text().data());
  if (const Status failed = ctx_.metadata_charges.refuse(r, b); !failed.ok()) answer_later(r, b, failed);
}

bool FailedBlocks::drop(Region& r, BlockIndex b, const Status& why) {
  if (!dropped_.push_back({&r, b})) return false;
  r.table.answer_faults(b);
  r.table.mark(b, core::kDropped);
  r.table.poison(b);
  ctx_.metadata_charges.charge(r);
  r.keep_reason(b, why);
  fail_accesses(r, b);
  return true;
}

void FailedBlocks::goes_in_place(const Region& r, BlockIndex b) {
  if (Retry* const retry = find_retry(r, b); retry != nullptr && retry->bus)
    retry->bus = !ctx_.trap.unfail(r.address(b), r.block_size).ok();
}

void FailedBlocks::forget(const Region& r) {
  retries_.erase_if([&](const Retry& e) { return e.region == &r; });
  dropped_.erase_if([&](const auto& d) { return d.first == &r; });
  unread_.erase_if([&](const ReadError& u) { return u.region == &r; });
}

std::string FailedBlocks::check() const {
  uint64_t unknown = 0;
  for (const auto& [base, r] : ctx_.map.regions()) {
    uint64_t unread = 0;
    for (BlockIndex b = r->table.next_populated(0); b < r->blocks; b = r->table.next_populated(b + 1)) {
      const Block& block = r->table[b];
      unknown += (block.flags & core::kUnknown) != 0;
      unread += (block.flags & core::kUnread) != 0;
      if ((block.flags & core::kDropped) == 0 || r->dying) continue;
      if (block.state != State::poisoned)
        return "a block that is not failed was dropped for want of memory: " +
               std::string(ctx_.map.describe_locked(*r, b));
      // A block that was revived another way may still be queued, once for each time that it was
      // dropped.
      const auto waits = [&, region = r.get()](const auto& d) { return d.first == region && d.second == b; };
      if (std::none_of(dropped_.begin(), dropped_.end(), waits))
        return "a block that was dropped for want of memory waits for none: " +
               std::string(ctx_.map.describe_locked(*r, b));
    }
    if (unread == r->counts.unread) continue;
    return core::strprintf("%llu blocks of region %llu are said to be unread, %llu are",
                           static_cast<unsigned long long>(r->counts.unread), static_cast<unsigned long long>(r->id),
                           static_cast<unsigned long long>(unread));
  }
  if (unknown == unknown_blocks_) return "";
  return core::strprintf("%llu blocks are said to be unknown, %llu are",
                         static_cast<unsigned long long>(unknown_blocks_), static_cast<unsigned long long>(unknown));
}

}  // namespace vmem::pager
