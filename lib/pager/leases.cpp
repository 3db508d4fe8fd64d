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

std::string Pager::lease_holders() const try {
  std::string text;
  int named = 0;
  for (const auto& [base, r] : regions_) {
    if (r->leases.empty()) continue;
    if (++named > 4) return text + ", ..";
    text += core::strprintf("%sregion %s%llu %s", text.empty() ? "" : ", ",
                            r->name.empty() ? "" : (r->name + " #").c_str(), static_cast<unsigned long long>(r->id),
                            core::human_bytes(r->leases.size() * r->block_size).c_str());
  }
  return text.empty() ? "none" : text;
} catch (const std::bad_alloc&) {
  return "";
}

namespace {

Status no_memory() {
  return error(ENOMEM, "no memory for bookkeeping");
}

}  // namespace

// Throws without a change.
Status Pager::add_lease(Region& r, BlockIndex b, unsigned access) {
  auto it = r.leases.find(b);
  if (it == r.leases.end()) {
    const uint64_t kept = sums_.reserve_bytes + frames_.least_overhead();
    if (sums_.leased_bytes + r.block_size + kept > budget_.limit()) {
      return error(ENOMEM,
                   "the lease does not fit: host_budget %s less %s for faults, buffers and tables, %s leased already; "
                   "holders: %s",
                   core::human_bytes(budget_.limit()).c_str(), core::human_bytes(kept).c_str(),
                   core::human_bytes(sums_.leased_bytes).c_str(), lease_holders().c_str());
    }
    std::vector<Lease> first{{VMEM_HOST, nullptr}};
    first.back().grant(access);
    r.leases.emplace(b, std::move(first));
    sums_.leased_bytes += r.block_size;
    ++r.granted;
    const Block& block = r.table[b];
    if (core::in_memory(block.state) && residents_[block.aux].admitted && !core::broken("lease_hold"))
      policy(block.aux).hold(block.aux);
    return {};
  }
  Lease& lease = it->second.front();  // the only one, unless they are a device's
  if (lease.location != VMEM_HOST) {
    return error(EBUSY, "%s is leased at location %d; release it there first", where(r, b).c_str(), lease.location);
  }
  lease.grant(access);
  ++r.granted;
  return {};
}

// Locked. An acquire of a host lease is as if it had never been; `refused`: what it had asked for.
void Pager::remove_lease(Region& r, BlockIndex b, unsigned refused) {
  const auto it = r.leases.find(b);
  if (it == r.leases.end() || it->second.front().location != VMEM_HOST) return;  // released by who had not acquired it
  it->second.front().take_back(refused);
  forget_host_lease(r, b);
}

// A lease at the host that nobody has any more.
void Pager::forget_host_lease(Region& r, BlockIndex b) {
  const auto it = r.leases.find(b);
  if (it == r.leases.end() || it->second.front().location >= 0 || it->second.front().count != 0) return;
  r.leases.erase(it);
  sums_.leased_bytes -= r.block_size;
  progress_.made();
  const Block& block = r.table[b];
  if (core::in_memory(block.state) && residents_[block.aux].admitted) policy(block.aux).unhold(block.aux);
}

Status Pager::acquire(std::span<const vmem_range> ranges, int location, void* stream) {
  if (Status s = check_location(location, false); !s.ok()) return s;
  if (location >= 0) return acquire_on_device(ranges, location, stream);
  stream = nullptr;  // the CPU and DMA have none
  std::vector<SpanOf> spans(ranges.size());
  Lock lock(mutex_);
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (Status s = check_range(ranges[i].ptr, ranges[i].size, &spans[i]); !s.ok()) return s;
    if (spans[i].region->backing == Backing::file_read && (ranges[i].access & VMEM_WRITE) != 0) {
      return error(EACCES, "range %zu is in a region mapped with VMEM_MAP_READ; lease it with VMEM_READ", i);
    }
  }
  if (!queues_.endings.empty()) {
    for (const SpanOf& s : spans) ++s.region->in_flight;
    Status waited = wait_for_turn(lock, spans, {}, location);
    for (const SpanOf& s : spans) --s.region->in_flight;
    notify();
    if (!waited.ok()) return waited;
  }
  // However this ends but well, also for want of memory: nothing is leased.
  size_t done = 0, in_flight = 0;
  BlockIndex next = 0;
  const core::OnExit let_regions_go([&] {
    for (size_t i = 0; i < in_flight; ++i) --spans[i].region->in_flight;
    notify();
  });
  core::OnExit undo([&] {
    if (!lock.owns_lock()) lock.lock();
    for (size_t i = 0; i <= done && i < spans.size(); ++i) {
      const BlockIndex end = i < done ? spans[i].last + 1 : next;
      for (BlockIndex b = spans[i].first; b < end; ++b) remove_lease(*spans[i].region, b, ranges[i].access);
    }
  });
  for (done = 0; done < spans.size(); ++done) {
    const SpanOf& s = spans[done];
    for (next = s.first; next <= s.last; ++next) {
      if (Status failure = add_lease(*s.region, next, ranges[done].access); !failure.ok()) return failure;
    }
  }
  for (const SpanOf& s : spans) {
    uint64_t hits = 0;
    for (BlockIndex b = s.first; b <= s.last; ++b) hits += s.region->table[b].state == State::resident;
    core::add(counters_.lease_blocks, s.last - s.first + 1);
    core::add(counters_.lease_hits, hits);
    ++s.region->in_flight;
    ++in_flight;
  }
  // Start all reads that memory allows before waiting for the first.
  After after;
  bool room = true;
  for (size_t i = 0; i < spans.size() && room; ++i) {
    Region& r = *spans[i].region;
    for (BlockIndex b = spans[i].first; b <= spans[i].last && room; ++b) {
      const Block& block = r.table[b];
      if ((block.state == State::untouched || block.state == State::stored) && (block.flags & core::kStarved) == 0) {
        try {
          room = start_fill(r, b, Urgency::acquire, after);
        } catch (const std::bad_alloc&) {
          room = false;  // what has begun must go on
        }
      }
    }
  }
  if (!after.empty()) {
    lock.unlock();
    core::step("acquire.started");
    run(after);
    lock.lock();
  }
  for (size_t i = 0; i < spans.size(); ++i) {
    for (BlockIndex b = spans[i].first; b <= spans[i].last; ++b) {
      if (Status failure = bring(lock, *spans[i].region, b, ranges[i].access); !failure.ok()) return failure;
    }
  }
  undo.dismiss();
  return {};
}

// Waits until leased block b is in place; the lease keeps it there.
Status Pager::bring(Lock& lock, Region& r, BlockIndex b, unsigned access) {
  bool tried = false;
  uint64_t starving = Progress::kNone;
  for (;;) {
    if (r.dying) return error(EINVAL, "region %llu was freed meanwhile", static_cast<unsigned long long>(r.id));
    if (r.lost) return error(EIO, "the addresses of %s went with a device that was reset", where(r, b).c_str());
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
          return Status(why.code() == -ENOMEM ? ENOMEM : EIO, std::string(why.text()));
        }
        tried = true;  // an old failure: the disk may have recovered
        revive(r, b);
        continue;
      case State::untouched:
      case State::stored:
        tried = true;
        if (block.state == State::untouched && !table_may_grow(r, b)) return no_table(r, b);
        if ((access & VMEM_WRITE) != 0) block.flags |= core::kWantedWrite;
        if ((block.flags & core::kStarved) == 0 && !start_fill(r, b, Urgency::acquire, after)) {
          if (!starve(r, b, Urgency::acquire)) return no_memory();
        }
        break;
      case State::held:
        if ((block.flags & core::kStarved) == 0 && !begin_install(r, b, after)) return no_memory();
        break;
      case State::on_device: {
        Job job{1, {}};
        Move* m = begin_leave(r, b, Leave::host);
        if (m == nullptr) {  // no staging frame: one comes free when a held block has been written
          if (starving == Progress::kNone) starving = look(now_ns());
          if (hopeless(starving)) return no_staging_frame();
          changed_.wait_for(lock, std::chrono::milliseconds(20));
          continue;
        }
        starving = Progress::kNone;
        m->job = &job;
        lock.unlock();
        leave_batch({&m, 1});
        lock.lock();
        if (!job.status.ok())
          return Status(job.status.code() == -ENOMEM ? ENOMEM : EIO, std::string(job.status.text()));
        continue;
      }
      default:
        break;
    }
    if (!after.empty()) {
      lock.unlock();
      run(after);
      lock.lock();
      continue;
    }
    if ((block.flags & core::kStarved) != 0) {
      if (starving == Progress::kNone) starving = look(now_ns());
      if (hopeless(starving)) {
        queues_.starved.erase_if(
            [&](const Starved& s) { return s.region == &r && s.block == b && s.urgency == Urgency::acquire; });
        block.flags &= static_cast<uint16_t>(~core::kStarved);
        if (!write_back_.error.ok()) return take_write_error();
        return error(ENOMEM, "no memory within host_budget %s for %u ms and nothing can be evicted; leases: %s",
                     core::human_bytes(budget_.limit()).c_str(), config_.fault_timeout_ms, lease_holders().c_str());
      }
      changed_.wait_for(lock, std::chrono::milliseconds(50));
    } else {
      changed_.wait(lock);
    }
  }
}

}  // namespace vmem::pager
