// Leases: what vmem_acquire and vmem_release mean for host memory.
#include <algorithm>
#include <cerrno>

#include "core/break.h"
#include "core/on_exit.h"
#include "core/step.h"
#include "pager/clock.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::error;
using core::State;
using core::Status;
using core::Urgency;

namespace {

constexpr unsigned kRefusals = 10;  // at least, until what the trap refuses is given up: a clock alone tells nothing

Status no_memory() {
  return error(ENOMEM, "no memory for bookkeeping");
}

}  // namespace

Status Pager::acquire(std::span<const vmem_range> ranges, int location, void* stream, Ask* ask) {
  const core::OnExit asked([&] {
    if (ask != nullptr) withdraw(ranges, ask);
  });
  if (Status s = check_location(location, false); !s.ok()) return s;
  if (location >= 0) return device_acquires_.acquire(ranges, location, stream, ask);
  stream = nullptr;  // the CPU and DMA have none
  std::vector<SpanOf> spans(ranges.size());
  Lock lock(map_.mutex());
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (Status s = map_.check_range(ranges[i].ptr, ranges[i].size, &spans[i]); !s.ok()) return s;
    if (spans[i].region->backing == Backing::file_read && (ranges[i].access & VMEM_WRITE) != 0) {
      return error(EACCES, "range %zu is in a region mapped with VMEM_MAP_READ; lease it with VMEM_READ", i);
    }
  }
  if (Status s = check_asked(spans, ask); !s.ok()) return s;
  for (const SpanOf& s : spans) ++s.region->in_flight;
  const core::OnExit let_regions_go([&] {
    lock.hold();
    for (const SpanOf& s : spans) --s.region->in_flight;
    map_.notify();
  });
  if (!releases_.empty()) {
    if (Status s = releases_.wait_for_turn(lock, spans, {}, location, ask); !s.ok()) return s;
  }
  // However this ends but well, also for want of memory: nothing is leased.
  size_t done = 0;
  core::OnExit undo([&] {
    lock.hold();
    for (size_t i = 0; i < done; ++i) grants_.take_back(spans[i], ranges[i].access, location, stream);
    for (size_t i = 0; i < done; ++i) map_.match_holds(lock, spans[i]);
  });
  for (; done < spans.size(); ++done) {
    Status s = grants_.grant(spans[done], ranges[done].access, location, stream);
    while (s.code() == -ENOMEM && supply_.give_back(lock)) {
      // Without the lock meanwhile: a stream may have leased and released them, and kernels still have them.
      if (s = releases_.wait_for_turn(lock, spans, {}, location, ask); !s.ok()) break;
      s = grants_.grant(spans[done], ranges[done].access, location, stream);
    }
    if (!s.ok()) return s;
  }
  for (const SpanOf& s : spans) {
    Region& r = *s.region;
    uint64_t hits = 0;
    for (BlockIndex b = r.table.next_touched(s.first); b <= s.last; b = r.table.next_touched(b + 1)) {
      hits += r.table[b].state == State::resident;
      map_.match_hold(r, b);
      if (b % kTurn == 0) lock.give_way();
    }
    core::add(counters_.lease_blocks, s.last - s.first + 1);
    core::add(counters_.lease_hits, hits);
  }
  // Start all reads that memory allows before waiting for the first.
  bool room = true;
  for (size_t i = 0; i < spans.size() && room; ++i) {
    Region& r = *spans[i].region;
    for (BlockIndex next = spans[i].first; next <= spans[i].last && room && !r.dying;) {
      if (Status s = Ask::check(ask); !s.ok()) return s;
      After after;
      room = start_fills(r, &next, spans[i].last, after);
      if (after.empty()) {
        lock.give_way();
        continue;
      }
      lock.unlock();
      core::step("acquire.started");
      page_in_.run(after);
      lock.lock();
    }
  }
  for (size_t i = 0; i < spans.size(); ++i) {
    for (BlockIndex b = spans[i].first; b <= spans[i].last; ++b) {
      if (Status failure = bring(lock, *spans[i].region, b, ranges[i].access, ask); !failure.ok()) return failure;
      if (b % kTurn == 0) lock.give_way();
    }
  }
  undo.dismiss();
  return {};
}

// Blocks that are leased for writing by an ask that tells of stores, and that nobody has stored to.
void Pager::not_changed(std::span<const vmem_range> ranges, int d) {
  Lock lock(map_.mutex());
  SpanOf span;
  for (const vmem_range& range : ranges) {
    if (map_.check_range(range.ptr, range.size, &span).ok()) blocks_.not_changed(span, d);
  }
}

// Locked. Begins to fill the blocks of a turn, from *next on. False: memory allows no more.
bool Pager::start_fills(Region& r, BlockIndex* next, BlockIndex last, After& after) {
  do {
    const Block& block = r.table[*next];
    if ((block.state != State::untouched && block.state != State::stored) || StarvedQueue::marked(block)) continue;
    if (failed_.retries().asleep(r, *next)) continue;
    try {
      if (!page_in_.start_fill(r, *next, Urgency::acquire, after)) return false;
    } catch (const std::bad_alloc&) {
      return false;  // what has begun must go on
    }
  } while (++*next <= last && *next % kTurn != 0);
  return true;
}

// Waits until leased block b is in place; the lease keeps it there.
Status Pager::bring(Lock& lock, Region& r, BlockIndex b, unsigned access, const Ask* ask) {
  bool tried = false;
  unsigned refused = 0;  // so often the trap would not have it in place, since ..
  uint64_t refused_ns = 0;
  uint64_t starving = Progress::kNone;
  for (;;) {
    if (r.dying) return error(EINVAL, "region %llu was freed meanwhile", static_cast<unsigned long long>(r.id));
    if (Status s = Ask::check(ask); !s.ok()) {
      if (starving != Progress::kNone) waits_.queue().give_up_acquire(r, b);
      return s;
    }
    if (r.lost) return error(EIO, "the addresses of %s went with a device that was reset", map_.where(r, b).c_str());
    Block& block = r.table[b];
    After after;
    switch (block.state) {
      case State::resident:
        if ((access & VMEM_WRITE) != 0 && (block.flags & core::kProtected) != 0) {
          // DMA must find the pages writable: a kernel without our handler could not resolve the protection.
          block.flags &= static_cast<uint16_t>(~core::kProtected);
          return trap_->unprotect(r.address(b), r.block_size);
        }
        return {};
      case State::failed:
        if ((block.flags & core::kShowsFile) != 0 && (block.flags & core::kUnanswered) != 0) {
          if (Status s = shown_files_.revive(lock, r, b); !s.ok()) return s;
          continue;
        }
        if ((block.flags & core::kShowsFile) != 0) {  // as far as the file goes it is there
          lock.unlock();
          uint64_t size = 0;
          Status s = store::current_size(r.file, &size);
          lock.lock();
          if (!s.ok()) return s;
          if (size > r.file_offset + b * r.block_size) return {};
          tried = true;
        }
        if (tried || (block.flags & core::kLost) != 0) {
          if ((block.flags & core::kLost) != 0) block.flags |= core::kTold;
          const Status why = r.reason(b);
          return Status(why.code() == -ENOMEM ? ENOMEM : EIO, why.text());
        }
        tried = true;  // an old failure: the disk may have recovered
        if (Status s = failed_.revive(r, b); !s.ok()) return s;
        continue;
      case State::untouched:
      case State::stored:
        tried = true;
        if (failed_.retries().asleep(r, b)) {  // the kernel had no memory to read it
          if (starving == Progress::kNone) starving = progress_clock_.look(now_ns());
          if (progress_clock_.hopeless(starving)) {
            return error(ENOMEM, "the kernel had no memory to read a block in %u ms; the log says more, %s",
                         config_.fault_timeout_ms, map_.where(r, b).c_str());
          }
          lock.sleep_for(map_.changed(), std::chrono::milliseconds(20));
          continue;
        }
        if (block.state == State::untouched && !tables_.may_grow(r, b)) return failed_.no_table(r, b);
        if ((access & VMEM_WRITE) != 0) block.flags |= core::kWantedWrite;
        if (!StarvedQueue::marked(block) && !page_in_.start_fill(r, b, Urgency::acquire, after)) {
          if (!waits_.starve(r, b, Urgency::acquire)) return no_memory();
        }
        break;
      case State::held:
        if (!StarvedQueue::marked(block) && !installer_.begin_install(r, b, after)) return no_memory();
        break;
      case State::on_device: {
        Job job{1, {}};
        Move* m = demoter_.begin(r, b, Leave::host);
        if (m == nullptr) {  // no staging frame: one comes free when a held block has been written
          if (starving == Progress::kNone) starving = progress_clock_.look(now_ns());
          if (progress_clock_.hopeless(starving)) return range_demoter_.cannot_leave(r, b);
          lock.sleep_for(map_.changed(), std::chrono::milliseconds(20));
          continue;
        }
        starving = Progress::kNone;
        m->job = &job;
        demoter_.run(lock, {&m, 1});
        if (!job.status.ok()) return Status(job.status.code() == -ENOMEM ? ENOMEM : EIO, job.status.text());
        continue;
      }
      default:
        break;
    }
    if (!after.empty()) {
      const bool installs = !after.install.empty();
      page_in_.run(lock, after);
      if (!installs || r.table[b].state != State::held || StarvedQueue::marked(r.table[b])) continue;
      const uint64_t now = now_ns();
      if (refused++ == 0) refused_ns = now;
      if (refused > kRefusals && now - refused_ns >= config_.fault_timeout_ms * uint64_t{1000000}) {
        return error(EIO, "a block could not be put in place, %u times in %u ms; the log says why, %s", refused,
                     config_.fault_timeout_ms, map_.where(r, b).c_str());
      }
      lock.sleep_for(map_.changed(), std::chrono::milliseconds(20));
      continue;
    }
    if (StarvedQueue::marked(block)) {
      if (starving == Progress::kNone) starving = progress_clock_.look(now_ns());
      if (progress_clock_.hopeless(starving)) {
        waits_.queue().give_up_acquire(r, b);
        if (!writes_.error().ok()) return writes_.take_error();
        return error(ENOMEM, "no memory within host_budget %s for %u ms and nothing can be evicted; leases: %s",
                     core::human_bytes(budget_.limit()).c_str(), config_.fault_timeout_ms, grants_.holders().c_str());
      }
      lock.sleep_for(map_.changed(), std::chrono::milliseconds(50));
    } else {
      Waiter waiter(map_.waiters(), r, b);
      lock.sleep(waiter.changed);
    }
  }
}

}  // namespace vmem::pager
