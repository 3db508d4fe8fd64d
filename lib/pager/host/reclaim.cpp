#include "pager/host/reclaim.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "core/break.h"
#include "core/clock.h"
#include "core/thread.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

namespace {

constexpr uint64_t kPinPause = 1000000;  // ns between two looks at pinned blocks

}  // namespace

void ReclaimRequests::go_on(BlockIndex next) {
  BlockSpan& span = queue_.front().span;
  span.first = next;
  if (next > span.last || next >= span.region->blocks) queue_.pop_front();
}

void ReclaimRequests::forget(const Region& r) {
  queue_.erase_if([&](const ReclaimRequest& e) { return e.span.region == &r; });
}

std::string ReclaimRequests::check() const {
  if (queue_.size() > kMost) return core::strprintf("%zu requests to evict are known", queue_.size());
  for (const ReclaimRequest& e : queue_) {
    if (e.span.first > e.span.last || e.span.last >= e.span.region->blocks) {
      return core::strprintf(
          "a request to evict is of blocks %llu to %llu, of %llu", static_cast<unsigned long long>(e.span.first),
          static_cast<unsigned long long>(e.span.last), static_cast<unsigned long long>(e.span.region->blocks));
    }
  }
  return "";
}

Reclaim::Reclaim(PagerContext& ctx, HostTier& host) : ctx_(ctx), host_(host) {}

Status Reclaim::start(unsigned threads) {
  threads_.reserve(threads);
  for (unsigned i = 0; i < threads; ++i) {
    std::thread reclaim;
    Status s = core::start_thread(
        core::strprintf("vmem-reclaim-%u", i).c_str(), [this] { loop(); }, &reclaim);
    if (!s.ok() && i == 0) return s;
    if (!s.ok()) break;
    threads_.push_back(std::move(reclaim));
  }
  return {};
}

void Reclaim::stop() {
  stop_ = true;
  host_.pressure.wake_all_reclaim();
}

void Reclaim::join() {
  for (std::thread& t : threads_) t.join();
}

void Reclaim::loop() {
  uint8_t next_staging = kStagingPools;
  bool served = false, wrote = false;  // what the last turn did; other work is next
  Lock lock(ctx_.map.mutex());
  while (!stop_) {
    const uint64_t now = now_ns();
    host_.background.wake_slowed(now);
    if (host_.waits.check_starved(lock, now)) {
      host_.page_in.serve_waiting(lock);
      continue;
    }
    if (host_.failed.ask_again(lock, now)) continue;
    if (now >= pins_ns_ && host_.installer.any_pinned()) {
      pins_ns_ = now + kPinPause;
      DeferredWork after;
      host_.installer.retry_pinned(lock, after);
      host_.page_in.run(lock, after);
      continue;
    }
    served = !served && !host_.reclaim_requests.empty();
    if (served) {
      serve_request(lock);
      continue;
    }
    wrote = !wrote && host_.background.write_some(lock, now);
    if (wrote) continue;
    host_.pressure.lift_cap(now);
    Short what;
    // If blocks wait for memory while nothing is in flight, the shortage is bounce buffers: evict
    // blocks until a staged one gives back its buffer.
    what.stuck = !host_.waits.queue().empty() && !ctx_.map.transitions().in_flight();
    // Blocks may also wait because the frame table is full.
    const bool too_many = !host_.waits.queue().empty() && ctx_.map.frame_table().free() == 0;
    what.host = host_.waits.must_evict() || what.stuck || too_many;
    if (what.host) ctx_.upcalls.host_is_short();
    ctx_.reserve.set_refilling(what.host && !what.stuck);
    what.staging = ctx_.upcalls.short_of_staging(next_staging);
    if (!what.host && !what.staging && host_.waits.queue().empty()) {
      if (host_.reclaim_requests.empty()) wait_for_work(lock);
      continue;
    }
    const bool may_write = ctx_.writeback_throttle.pause(now) == 0;
    if (now >= aside_ns_) {
      aside_ns_ = UINT64_MAX;
      any_aside_ = aside_since_ = true;
    }
    if (!may_write && !ctx_.writeback_throttle.failing()) {  // only a pin: others can be written in a moment
      wait_for_writes(lock, now);
      continue;
    }
    if (may_write && any_aside_ && !admit_aside(now)) {
      lock.give_way();
      continue;
    }
    if (!may_write && !what.host && !what.staging) {
      wait_for_writes(lock, now);
      continue;
    }
    if (!what.host && !what.staging) {  // blocks wait for a buffer, or for memory that is leaving already
      host_.pressure.wait_for(lock, std::chrono::milliseconds(5));
      host_.page_in.serve_waiting(lock);  // memory or a buffer may have come free without a notification
      continue;
    }
    shrink(lock, what, &next_staging);
  }
}

// A write has failed: sleeps for the pause until the next try, or for a part of it.
void Reclaim::wait_for_writes(Lock& lock, uint64_t now_ns) {
  uint64_t most = host_.waits.queue().empty() ? UINT64_MAX : StallClock::kSlice / 2;
  if (host_.failed.any_retries() || host_.installer.any_pinned()) most = std::min(most, FailedBlocks::kShortestPause);
  if (const uint64_t next = host_.failed.next_ns(); next != UINT64_MAX)
    most = std::min(most, std::max(next, now_ns + 1) - now_ns);
  host_.pressure.wait_for(lock, std::chrono::nanoseconds(std::min(ctx_.writeback_throttle.pause(now_ns), most)));
}

// The block has to be written, and no write is possible for a while. Keeps its policy from naming
// it again before one is.
void Reclaim::set_aside(core::FrameId id) {
  ctx_.map.frame_table()[id].unwritten = true;
  any_aside_ = aside_since_ = true;
}

// Writes are possible: admits a few of the blocks that were set aside to their policies. Returns
// false if it has found none yet.
bool Reclaim::admit_aside(uint64_t now_ns) {
  constexpr size_t kLooks = 4096, kMost = 256;
  const FrameTable& all = ctx_.map.frame_table();
  size_t found = 0;
  for (size_t looks = 0; looks < kLooks && found < kMost && any_aside_; ++looks) {
    if (aside_next_ >= all.size()) {
      aside_next_ = 0;
      any_aside_ = std::exchange(aside_since_, false);
      continue;
    }
    const Frame& frame = all[aside_next_++];
    if (frame.region == nullptr || !frame.unwritten || frame.admitted || frame.is_copy) continue;
    Region& r = *frame.region;
    const State state = r.table[frame.block].state;
    if (state != State::resident && state != State::staged) continue;
    if (file_refuses(r, now_ns)) {
      aside_ns_ = std::min(aside_ns_, r.source.refused_until_ns);
      continue;
    }
    ctx_.map.admit(r, frame.block, ctx_.map.nonresident_age().shadow());
    ++found;
  }
  return found != 0 || !any_aside_;
}

// Evicts a batch of victims. A batch is about 8 MiB, so that several reclaim threads share the work
// and small blocks cluster. While a failed write waits for its next try, blocks that need no write
// leave and the others are set aside: in all regions if the store failed, in one region if its own
// file did.
void Reclaim::shrink(Lock& lock, const Short& what, uint8_t* next_staging) {
  Batch batch;
  std::array<policy::Victim, 32> victims;
  static_assert(std::tuple_size_v<decltype(victims)> <= Batch::capacity());
  const uint64_t pages =
      std::max<uint64_t>(1, std::min<uint64_t>(8 << 20, 32 * ctx_.reserve.largest_block()) / core::kPage);
  size_t count = what.host ? ctx_.map.policy_of(kHostPool).victims(pages, victims) : 0;
  if (count == 0 && what.staging) {
    count = ctx_.map.policy_of(*what.staging).victims(pages, victims);
    // Frames of another size may be short as well; they are next.
    *next_staging = static_cast<uint8_t>(*what.staging + 1);
  }
  bool copies = false, passed = false;  // passed: victims are set aside or refused, and others come next
  const bool full = ctx_.writeback_throttle.full(now_ns()) && !core::broken("full_disk");
  const uint64_t now = now_ns();
  const bool only_clean = ctx_.writeback_throttle.pause(now) != 0;
  if (only_clean && count == 0) return wait_for_writes(lock, now);
  for (size_t i = 0; i < count; ++i) {
    Frame& frame = ctx_.map.frame_table()[victims[i].id];
    if (frame.is_copy) {
      copies |= ctx_.upcalls.evict_copy(victims[i].id);
      continue;
    }
    Region& r = *frame.region;
    const BlockIndex b = frame.block;
    const bool probe = victims[i].probe && r.table[b].state == State::resident;
    if (!victims[i].probe) frame.admitted = false;
    if (victims[i].probe && !probe) continue;
    // Others go first, while there are others, if the store is full and has no room for this block
    // yet, or if the block could not be taken lately.
    const bool fits_not = full && r.backing == Backing::anonymous && !r.table[b].extent && !only_clean;
    if ((fits_not || frame.pins.passed_over(now)) && !r.dying && !victims[i].refused) {
      passed = true;
      if (!probe) ctx_.map.admit_refused(r, b);
      continue;
    }
    const bool must_be_clean = only_clean || file_refuses(r, now);
    if (must_be_clean && !probe && !r.dying && !host_.isolator.may_be_clean(r, b)) {
      passed = true;
      set_aside(victims[i].id);
      continue;
    }
    // The block is leased, but its policy does not hold it yet: admit() makes it.
    // core::broken("lease_hold") is in holds_for_lease(), and is named here to have this file
    // compiled again.
    Transition* m = r.dying || holds_for_lease(r, b) ? nullptr : host_.isolator.begin_take(r, b, false, probe);
    if (m != nullptr) {
      m->write.only_clean = must_be_clean;
      m->write.reclaims = true;
      batch.push_back(m);
    } else if (!victims[i].probe && !r.dying) {
      // No slot for its image: blocks that need none can leave. If others got slots, it gets one.
      batch.empty() ? ctx_.map.admit_refused(r, b) : ctx_.map.admit(r, b, ctx_.map.nonresident_age().shadow());
    }
  }
  if (batch.empty() && !copies && passed) return lock.give_way();
  if (batch.empty() && !copies) host_.pressure.wait_for(lock, std::chrono::milliseconds(5));
  if (copies || (batch.empty() && what.stuck)) {  // frames may have come free
    DeferredWork after;
    ctx_.upcalls.memory_freed(after);
    if (!after.empty()) host_.page_in.run(lock, after);
  }
  if (!batch.empty()) host_.writeback.evict_batch(lock, batch.all());
}

void Reclaim::evict_after_transition(Region& r, BlockIndex b) {
  const State state = r.table[b].state;
  if (r.dying || (state != State::resident && state != State::staged) || host_.reclaim_requests.full()) return;
  if (host_.reclaim_requests.add({&r, b, b}, false)) host_.pressure.wake_reclaim();
}

// Evicts a few blocks of the oldest request. Leased blocks are passed over. Blocks in transition
// leave when that is over.
void Reclaim::serve_request(Lock& lock) {
  const auto [span, behind] = host_.reclaim_requests.first();
  Region& r = *span.region;
  Batch batch;
  BlockIndex b = r.table.next_populated(span.first);
  for (; b <= span.last && b < r.blocks && batch.size() < 32; b = r.table.next_populated(b + 1)) {
    const State state = r.table[b].state;
    if (!core::in_memory(state) || leased(r, b)) continue;
    Frame& frame = ctx_.map.frame_table()[r.table[b].aux];
    if (core::in_transition(state)) {
      frame.evict_when_stable = !behind;
      continue;
    }
    if (behind && frame.ahead) continue;
    ctx_.map.withdraw(r.table[b].aux);
    if (Transition* m = host_.isolator.begin_take(r, b, false, false)) {
      batch.push_back(m);
    } else {
      ctx_.map.admit(r, b, ctx_.map.nonresident_age().shadow());
    }
  }
  host_.reclaim_requests.go_on(b);
  host_.writeback.evict_batch(lock, batch.all());
}

// Sleeps until there is work. Returns idle memory to the system, a part at a time.
void Reclaim::wait_for_work(Lock& lock) {
  const uint64_t now = now_ns();
  uint64_t next = std::min({host_.failed.next_ns(), host_.pressure.next_ns(), host_.background.next_ns(now)});
  if (host_.installer.any_pinned()) next = std::min(next, std::max(pins_ns_, now + 1));
  // The stall clock counts only if a thread looks at it often enough.
  if (host_.failed.want_memory()) next = std::min(next, now + StallClock::kSlice / 2);
  if (next == UINT64_MAX) {
    host_.pressure.wait(lock);
  } else if (now < next) {
    host_.pressure.wait_for(lock, std::chrono::nanoseconds(next - now));
  } else if (now >= host_.pressure.next_ns()) {
    host_.pressure.release_idle(now);
    lock.give_way();
  }
}

}  // namespace vmem::pager
