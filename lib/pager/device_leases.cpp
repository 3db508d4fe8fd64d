// Leases at devices, and what ends them: a release ends its lease when the stream gets there.
#include <algorithm>
#include <cerrno>
#include <chrono>

#include "core/break.h"
#include "core/on_exit.h"
#include "core/step.h"
#include "device/park.h"
#include "pager/clock.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::error;
using core::State;
using core::Status;
using core::Urgency;

// Locked. Ends the releases whose streams have got there.
void Pager::reap() {
  for (size_t i = 0; i < endings_.size();) {
    bool done = false;
    // A lost device never tells; what its kernels did is lost with it, and the lease too.
    if (Status s = devices_->poll(endings_[i].ticket, &done); !s.ok()) {
      for (size_t d = 0; d < gpus_.size(); ++d) saw_loss(static_cast<int>(d));
    } else if (!done && !core::broken("release_event")) {
      ++i;
      continue;
    }
    const Ending ending = std::move(endings_[i]);
    endings_.erase(endings_.begin() + static_cast<std::ptrdiff_t>(i));
    for (const SpanOf& s : ending.spans) {
      for (BlockIndex b = s.first; b <= s.last; ++b) end_lease(*s.region, b, ending.stream);
    }
    notify();
  }
}

// Locked. One ending release of the stream's lease is over.
void Pager::end_lease(Region& r, BlockIndex b, void* stream) {
  auto it = r.leases.find(b);
  auto lease = std::find_if(it->second.begin(), it->second.end(),
                            [&](const Lease& l) { return l.stream == stream && l.pending != 0; });
  if (--lease->pending != 0 || lease->count != 0) return;
  const int d = lease->location;
  it->second.erase(lease);
  if (!it->second.empty()) return;
  r.leases.erase(it);
  Gpu& g = gpus_[static_cast<size_t>(d)];
  g.leased -= r.block_size;
  g.ending -= r.block_size;
  const Block& block = r.table[b];
  const bool known = core::in_memory(block.state) || core::on_a_device(block.state);
  if (known && residents_[block.aux].admitted) policy(block.aux).unhold(block.aux);
}

bool Pager::ending_anywhere(const Region& r) const {
  return std::any_of(endings_.begin(), endings_.end(), [&](const Ending& e) {
    return std::any_of(e.spans.begin(), e.spans.end(), [&](const SpanOf& s) { return s.region == &r; });
  });
}

namespace {

// A stream passes a release without telling anybody: looked at often at first, then less.
class Patience {
 public:
  void wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed) {
    changed.wait_for(lock, std::chrono::microseconds(pause_));
    pause_ = std::min(pause_ * 2, 1000u);
  }

 private:
  unsigned pause_ = 20;
};

}  // namespace

// Waits for leases at other locations whose releases have been called; live ones are -EBUSY.
Status Pager::wait_for_endings(Lock& lock, std::span<const SpanOf> spans, int location) {
  Patience patience;
  for (;;) {
    reap();
    bool wait = false;
    for (const SpanOf& s : spans) {
      if (s.region->dying) return error(EINVAL, "the region was freed meanwhile");
      if (s.region->leases.empty()) continue;
      for (BlockIndex b = s.first; b <= s.last; ++b) {
        const auto it = s.region->leases.find(b);
        if (it == s.region->leases.end()) continue;
        for (const Lease& l : it->second) {
          if (l.location == location) continue;
          if (l.count != 0) {
            return error(EBUSY, "%s is leased at location %d; release it there first", where(*s.region, b).c_str(),
                         l.location);
          }
          wait = true;
        }
      }
    }
    if (!wait) return {};
    patience.wait(lock, changed_);
  }
}

// Waits until the device's budget holds these blocks beside the leases of others, as far as that waiting can end.
Status Pager::wait_for_room(Lock& lock, std::span<const SpanOf> spans, int d) {
  Gpu& g = gpus_[static_cast<size_t>(d)];
  Patience patience;
  for (;;) {
    reap();
    uint64_t need = 0;
    for (const SpanOf& s : spans) {
      if (s.region->dying) return error(EINVAL, "the region was freed meanwhile");
      if (s.region->leases.empty()) {
        need += (s.last - s.first + 1) * s.region->block_size;
        continue;
      }
      for (BlockIndex b = s.first; b <= s.last; ++b) {
        if (!leased(*s.region, b)) need += s.region->block_size;
      }
    }
    if (g.leased + need <= g.budget) return {};
    if (g.leased - g.ending + need > g.budget) {
      return error(ENOMEM, "the lease of %s does not fit device %d: device_budget %s, %s leased already; holders: %s",
                   core::human_bytes(need).c_str(), d, core::human_bytes(g.budget).c_str(),
                   core::human_bytes(g.leased - g.ending).c_str(), lease_holders().c_str());
    }
    patience.wait(lock, changed_);
  }
}

// Waits until no release of the region's leases is under way; does not wait for live ones.
void Pager::wait_for_region_endings(Lock& lock, Region& r) {
  if (!r.gpu) return;
  Patience patience;
  for (reap(); ending_anywhere(r) && !r.dying; reap()) patience.wait(lock, changed_);
}

Status Pager::acquire_on_device(std::span<const vmem_range> ranges, int d, void* stream) {
  if (Status s = use_device(d); !s.ok()) return s;
  if (Status s = devices_->check_stream(stream, d); !s.ok()) {
    Lock lock(mutex_);
    saw_loss(d);
    return s;
  }
  Lock lock(mutex_);
  std::vector<SpanOf> spans(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (Status s = check_range(ranges[i].ptr, ranges[i].size, &spans[i]); !s.ok()) return s;
    const Region& r = *spans[i].region;
    if (!r.gpu) {
      return error(EINVAL, "range %zu is in a region without a device tier (VMEM_HOST_ONLY); make it without that flag",
                   i);
    }
    if (r.backing == Backing::file_read && (ranges[i].access & VMEM_WRITE) != 0) {
      return error(EACCES, "range %zu is in a region mapped with VMEM_MAP_READ; lease it with VMEM_READ", i);
    }
  }
  for (const SpanOf& s : spans) ++s.region->in_flight;  // they stay while we wait
  const core::OnExit let_regions_go([&] {
    for (const SpanOf& span : spans) --span.region->in_flight;
    notify();
  });
  if (Status s = wait_for_endings(lock, spans, d); !s.ok()) return s;
  if (Status s = wait_for_room(lock, spans, d); !s.ok()) return s;
  // However this ends but well, also for want of memory: nothing is leased.
  size_t done = 0;
  BlockIndex next = 0;
  core::OnExit undo([&] {
    if (!lock.owns_lock()) lock.lock();
    for (size_t i = 0; i <= done && i < spans.size(); ++i) {
      const BlockIndex end = i < done ? spans[i].last + 1 : next;
      for (BlockIndex b = spans[i].first; b < end; ++b)
        drop_device_lease(*spans[i].region, b, ranges[i].access, stream);
    }
    std::erase_if(wishes_, [&](const Wish& w) { return w.owner == &spans; });
    gpu_work_.notify_all();
  });
  for (done = 0; done < spans.size(); ++done) {
    Region& r = *spans[done].region;
    uint64_t hits = 0;
    for (next = spans[done].first; next <= spans[done].last; ++next) {
      hits += r.table[next].state == State::on_device && r.table[next].device == d;
      add_device_lease(r, next, ranges[done].access, d, stream);
    }
    core::add(counters_.lease_blocks, spans[done].last - spans[done].first + 1);
    core::add(counters_.lease_hits, hits);
  }
  // Everything that is missing is asked for before anything is waited for.
  After after;
  bool missing = false;
  for (const SpanOf& s : spans) {
    Region& r = *s.region;
    BlockIndex b = s.first;
    while (b <= s.last && r.table[b].state == State::on_device && r.table[b].device == d) ++b;
    if (b > s.last) continue;
    if (!r.reasons.empty()) {
      for (BlockIndex i = b; i <= s.last; ++i) {
        const bool lost = r.lost || (r.table[i].flags & core::kLost) != 0;
        if (r.table[i].state == State::failed && !lost) revive(r, i);  // an old failure: the disk may have recovered
        if (r.table[i].state != State::failed) r.reasons.erase(i);
      }
    }
    const auto at = std::find_if(wishes_.begin(), wishes_.end(), [](const Wish& w) { return w.owner == nullptr; });
    wishes_.insert(at, Wish{&r, b, s.last, d, Urgency::acquire, &spans});
    missing = true;
  }
  if (missing) {
    pump_devices(after);
    lock.unlock();
    core::step("acquire.started");
    run(after);
    lock.lock();
  }
  std::vector<device::Ticket> tickets;
  for (size_t i = 0; i < spans.size(); ++i) {
    if (Status s = bring_to_device(lock, spans[i], ranges[i].access, d, &spans, &tickets); !s.ok()) return s;
  }
  lock.unlock();
  Status ordered;
  for (const device::Ticket& ticket : tickets) {
    if (ordered.ok() && !core::broken("stream_order")) ordered = devices_->order_after(ticket, stream, d);
  }
  lock.lock();
  if (!ordered.ok()) return ordered;
  undo.dismiss();
  return {};
}

// Waits until the copy of every block of the span is issued, or it is there; collects the ends of copies under way.
Status Pager::bring_to_device(Lock& lock, const SpanOf& span, unsigned access, int d, const void* owner,
                              std::vector<device::Ticket>* tickets) {
  Region& r = *span.region;
  Gpu& g = gpus_[static_cast<size_t>(d)];
  uint64_t waiting_since = 0;
  BlockIndex tried = UINT64_MAX;
  for (BlockIndex b = span.first; b <= span.last;) {
    if (r.dying) return error(EINVAL, "region %llu was freed meanwhile", static_cast<unsigned long long>(r.id));
    Block& block = r.table[b];
    const bool here = block.device == d && (block.state == State::on_device ||
                                            (block.state == State::entering && residents_[block.aux].issued));
    if (here) {
      if ((access & VMEM_WRITE) != 0 && !core::broken("kernel_writes")) will_change(r, b);
      if (residents_[block.aux].hinted) {
        residents_[block.aux].hinted = false;
        block.flags &= static_cast<uint16_t>(~(core::kReadAhead | core::kPrefetched));
        core::add(counters_.prefetch_hits);
      }
      if (block.state == State::entering) {
        const device::Ticket& ticket = residents_[block.aux].ticket;
        if (ticket != nullptr && (tickets->empty() || tickets->back() != ticket)) tickets->push_back(ticket);
      } else if (residents_[block.aux].admitted) {
        policy(block.aux).touched(block.aux);
      }
      waiting_since = 0;
      ++b;
      continue;
    }
    if (const auto why = r.reasons.find(b); why != r.reasons.end() && !core::in_transition(block.state)) {
      if (tried == b || block.state == State::failed) {
        if ((block.flags & core::kLost) != 0) block.flags |= core::kTold;
        return Status(why->second.code() == -ENOMEM ? ENOMEM : EIO, std::string(why->second.text()));
      }
      r.reasons.erase(why);  // an older try that was still under way
      tried = b;
    }
    if (Status s = devices_->health(d); !s.ok()) return s;
    const uint64_t now = now_ns();
    if (waiting_since == 0) waiting_since = now;
    if (now - waiting_since > config_.fault_timeout_ms * uint64_t{1000000} && !core::in_transition(block.state)) {
      if (!write_error_.ok()) return take_write_error();
      if (g.failures != 0 && !g.failure.ok()) return Status(-g.failure.code(), std::string(g.failure.text()));
      return error(ENOMEM,
                   "no room on device %d (device_budget %s, %s used) or in staging frames (%zu of %zu free) for %u ms",
                   d, core::human_bytes(g.budget).c_str(), core::human_bytes(g.used).c_str(), staging_.free(),
                   staging_.total(), config_.fault_timeout_ms);
    }
    const bool wished = std::any_of(wishes_.begin(), wishes_.end(), [&](const Wish& w) {
      return w.owner == owner && w.region == &r && w.next <= b && b <= w.last;
    });
    if (!wished && block.state != State::entering && !(block.state == State::leaving && block.device == d)) {
      // It went another way meanwhile: a move in failed, or somebody had it.
      wishes_.push_front(Wish{&r, b, b, d, Urgency::acquire, owner});
      After after;
      pump_devices(after);
      lock.unlock();
      run(after);
      lock.lock();
      continue;
    }
    if (changed_.wait_for(lock, std::chrono::milliseconds(20)) == std::cv_status::timeout) {
      After after;
      pump_devices(after);
      lock.unlock();
      run(after);
      lock.lock();
    }
  }
  return {};
}

// Locked; the budget has been checked. Throws without a change.
void Pager::add_device_lease(Region& r, BlockIndex b, unsigned access, int d, void* stream) {
  auto it = r.leases.find(b);
  Gpu& g = gpus_[static_cast<size_t>(d)];
  if (it == r.leases.end()) {
    std::vector<Lease> first{{d, stream}};
    first.back().grant(access);
    r.leases.emplace(b, std::move(first));
    ++r.granted;
    g.leased += r.block_size;
    const Block& block = r.table[b];
    const bool known = core::in_memory(block.state) || core::on_a_device(block.state);
    if (known && residents_[block.aux].admitted) policy(block.aux).hold(block.aux);
    return;
  }
  it->second.reserve(it->second.size() + 1);
  ++r.granted;
  const bool all_ending =
      std::all_of(it->second.begin(), it->second.end(), [](const Lease& l) { return l.count == 0; });
  if (all_ending) g.ending -= r.block_size;
  for (Lease& lease : it->second) {
    if (lease.stream != stream) continue;
    if (lease.count == 0) lease.access = lease.reads = lease.writes = 0;
    lease.grant(access);
    return;
  }
  it->second.push_back({d, stream});
  it->second.back().grant(access);
}

// Locked. The lease ends now: nothing was put on the stream under it.
void Pager::drop_device_lease(Region& r, BlockIndex b, unsigned access, void* stream) {
  auto it = r.leases.find(b);
  if (it == r.leases.end()) return;  // released by somebody who had not acquired it
  auto lease = std::find_if(it->second.begin(), it->second.end(),
                            [&](const Lease& l) { return l.stream == stream && l.count != 0; });
  if (lease == it->second.end()) return;
  Gpu& g = gpus_[static_cast<size_t>(lease->location)];
  ++lease->pending;
  lease->take_back(access);
  if (std::all_of(it->second.begin(), it->second.end(), [](const Lease& l) { return l.count == 0; })) {
    g.ending += r.block_size;
  }
  end_lease(r, b, stream);
}

// Locked; every block has a live device lease of the stream. The leases end when the stream gets here.
Status Pager::release_on_device(std::span<const SpanOf> spans, int d, void* stream) {
  Ending ending;
  ending.stream = stream;
  ending.spans.assign(spans.begin(), spans.end());
  if (endings_.capacity() == endings_.size()) endings_.reserve(2 * endings_.size() + 16);  // nothing fails below
  // A device that is lost ends everything at once.
  if (!devices_->record(stream, d, &ending.ticket).ok()) saw_loss(d);
  for (const SpanOf& s : spans) {
    for (BlockIndex b = s.first; b <= s.last; ++b) {
      auto& leases = s.region->leases.find(b)->second;
      auto lease = std::find_if(leases.begin(), leases.end(),
                                [&](const Lease& l) { return l.stream == stream && l.count != 0; });
      --lease->count;
      ++lease->pending;
      if (std::all_of(leases.begin(), leases.end(), [](const Lease& l) { return l.count == 0; })) {
        gpus_[static_cast<size_t>(d)].ending += s.region->block_size;
      }
    }
  }
  endings_.push_back(std::move(ending));
  reap();
  if (!wishes_.empty() || !departures_.empty()) gpu_work_.notify_one();
  return {};
}

// On the park thread: a CPU touch that the block's access forbids and no move explains.
bool Pager::on_touch(uintptr_t address, bool store) {
  Lock lock(mutex_);
  for (;;) {
    Region* r = find(address);
    if (r == nullptr || !r->gpu || r->lost || r->dying) return false;
    const BlockIndex b = r->index(reinterpret_cast<const void*>(address));
    Block& block = r->table[b];
    if (block.state == State::on_device) {
      if (!store) return true;
      if (!r->writable()) return false;  // an error of the program, as a store to any read-only mapping
      const device::Range range{reinterpret_cast<uintptr_t>(r->address(b)), r->block_size};
      will_change(*r, b);
      return devices_->open({&range, 1}, device::Access::read_write).ok();
    }
    // It moves. Behind a shut gate, or at the trap, the next try waits; before the gate is shut, or after it has
    // opened, only we can.
    if (!core::on_a_device(block.state) || device::park::gate(address) != device::park::Gate::open) return true;
    changed_.wait_for(lock, std::chrono::microseconds(200));
  }
}

}  // namespace vmem::pager
