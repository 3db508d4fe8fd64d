#include "pager/host/reclaim.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "core/break.h"
#include "core/clock.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

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

// The block has to be written, and no write is possible for a while. Keeps its policy from naming
// it again before one is.
void Reclaim::set_aside(core::FrameId id) {
  ctx_.map.frame_table()[id].unwritten = true;
  any_aside_ = aside_since_ = true;
}

bool Reclaim::admit_aside(uint64_t now_ns) {
  constexpr size_t kLooks = 4096, kMost = 256;
  if (now_ns >= aside_ns_) {
    aside_ns_ = UINT64_MAX;
    any_aside_ = aside_since_ = true;
  }
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

// A batch is about 8 MiB, so that several reclaim threads share the work and small blocks cluster.
// While a failed write waits for its next try, blocks that need no write leave and the others are
// set aside: in all regions if the store failed, in one region if its own file did.
bool Reclaim::shrink(Lock& lock, const Short& what, uint8_t* next_staging) {
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
  if (only_clean && count == 0) return false;
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
  if (batch.empty() && !copies && passed) {
    lock.give_way();
    return true;
  }
  if (batch.empty() && !copies) host_.pressure.wait_for(lock, std::chrono::milliseconds(5));
  if (copies || (batch.empty() && what.stuck)) {  // frames may have come free
    DeferredWork after;
    ctx_.upcalls.memory_freed(after);
    if (!after.empty()) host_.page_in.run(lock, after);
  }
  if (!batch.empty()) host_.writeback.evict_batch(lock, batch.all());
  return true;
}

void Reclaim::evict_after_transition(Region& r, BlockIndex b) {
  const State state = r.table[b].state;
  if (r.dying || (state != State::resident && state != State::staged) || host_.reclaim_requests.full()) return;
  if (host_.reclaim_requests.add({&r, b, b}, false)) host_.pressure.wake_reclaim();
}

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

}  // namespace vmem::pager
