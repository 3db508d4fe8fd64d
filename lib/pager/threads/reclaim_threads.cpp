#include "pager/threads/reclaim_threads.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/clock.h"
#include "core/thread.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

namespace {

constexpr uint64_t kPinPause = 1000000;  // ns between two looks at pinned blocks

}  // namespace

ReclaimThreads::ReclaimThreads(PagerContext& ctx, HostTier& host) : ctx_(ctx), host_(host) {}

Status ReclaimThreads::start(unsigned threads) {
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

void ReclaimThreads::stop() {
  stop_ = true;
  host_.pressure.wake_all_reclaim();
}

void ReclaimThreads::join() {
  for (std::thread& t : threads_) t.join();
}

void ReclaimThreads::loop() {
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
      host_.reclaim.serve_request(lock);
      continue;
    }
    wrote = !wrote && host_.background.write_some(lock, now);
    if (wrote) continue;
    host_.pressure.lift_cap(now);
    Reclaim::Short what;
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
    if (!may_write && !ctx_.writeback_throttle.failing()) {  // only a pin: others can be written in a moment
      wait_for_writes(lock, now);
      continue;
    }
    if (may_write && !host_.reclaim.admit_aside(now)) {
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
    if (!host_.reclaim.shrink(lock, what, &next_staging)) wait_for_writes(lock, now_ns());
  }
}

// A write has failed: sleeps for the pause until the next try, or for a part of it.
void ReclaimThreads::wait_for_writes(Lock& lock, uint64_t now_ns) {
  uint64_t most = host_.waits.queue().empty() ? UINT64_MAX : StallClock::kSlice / 2;
  if (host_.failed.any_retries() || host_.installer.any_pinned()) most = std::min(most, FailedBlocks::kShortestPause);
  if (const uint64_t next = host_.failed.next_ns(); next != UINT64_MAX)
    most = std::min(most, std::max(next, now_ns + 1) - now_ns);
  host_.pressure.wait_for(lock, std::chrono::nanoseconds(std::min(ctx_.writeback_throttle.pause(now_ns), most)));
}

// Sleeps until there is work. Returns idle memory to the system, a part at a time.
void ReclaimThreads::wait_for_work(Lock& lock) {
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
