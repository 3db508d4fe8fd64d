#include "pager/block/block_map.h"

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "core/clock.h"
#include "pager/block/advice.h"
#include "policy/adaptive_policy.h"

namespace vmem::pager {

namespace {

// Indexed by Frame::pool.
std::vector<std::unique_ptr<policy::EvictionPolicy>> make_policies(size_t devices) {
  std::vector<std::unique_ptr<policy::EvictionPolicy>> policies(kDevicePools + devices);
  for (auto& policy : policies) policy = std::make_unique<policy::AdaptivePolicy>();
  return policies;
}

}  // namespace

BlockMap::BlockMap(trap::Trap& trap, const store::Space& space, StagingPoolSet& staging, core::Counters& counters,
                   const Tunables& tunables, size_t devices, Upcalls& upcalls)
    : trap_(trap),
      space_(space),
      counters_(counters),
      tunables_(tunables),
      upcalls_(upcalls),
      policies_(make_policies(devices)),
      copies_(frame_table_, staging, policies_, nonresident_age_),
      spilled_(frame_table_),
      dirty_(frame_table_, tunables) {}

Region* BlockMap::find(uintptr_t address) {
  auto it = regions_.upper_bound(address);
  if (it == regions_.begin()) return nullptr;
  Region* r = std::prev(it)->second.get();
  return address - reinterpret_cast<uintptr_t>(r->base) < r->span ? r : nullptr;
}

Status BlockMap::check_range(const void* ptr, size_t size, BlockSpan* out) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(ptr);
  if (size == 0) return error(EINVAL, "size is 0; give the bytes of the range at %p", ptr);
  Region* r = find(at);
  if (r == nullptr || r->dying) return error(EINVAL, "%p is not inside a region of libvmem", ptr);
  const size_t offset = at - reinterpret_cast<uintptr_t>(r->base);
  if (size > r->size || offset > r->size - size) {
    return error(EINVAL, "the range at %p, %zu bytes, ends %zu bytes after its region%s%s (%p, %zu bytes)", ptr, size,
                 offset >= r->size ? size : size - (r->size - offset), r->name.empty() ? "" : " ", r->name.c_str(),
                 static_cast<void*>(r->base), r->size);
  }
  *out = {r, r->index(ptr), r->index(static_cast<const std::byte*>(ptr) + size - 1)};
  return {};
}

core::OwnString BlockMap::describe_locked(const Region& r, BlockIndex b) const try {
  core::OwnString text =
      core::textf("region %s%llu, block %llu (offset %llu)", r.name.empty() ? "" : (r.name + " #").c_str(),
                  static_cast<unsigned long long>(r.id), static_cast<unsigned long long>(b),
                  static_cast<unsigned long long>(b) * r.block_size);
  const core::Block& block = r.table[b];
  if (block.extent) {
    text += ", " + space_.describe(block.extent);
  } else if (r.source.present) {
    text += core::textf(", file %s, offset %llu", r.source.file.path.c_str(),
                        static_cast<unsigned long long>(r.source.offset) + b * r.block_size);
  }
  return text;
} catch (const std::bad_alloc&) {
  return "";
}

core::OwnString BlockMap::describe(const Region& r, BlockIndex b) {
  Lock lock(mutex_);
  return describe_locked(r, b);
}

Status BlockMap::refusal() const {
  const Region* worst = nullptr;
  uint64_t most = 0;
  for (const auto& [base, r] : regions_) {
    const uint64_t bytes = (r->table.count(State::resident) + r->table.count(State::staged)) * r->block_size;
    if (r->source.refusals == 0 || r->dying || (worst != nullptr && bytes <= most)) continue;
    worst = r.get();
    most = bytes;
  }
  if (worst == nullptr) return {};
  return core::error(worst->source.refusal.code(),
                     "region %s%llu keeps %s in memory, since its file %s refuses them (errno %d): make the file take "
                     "them, free the region by vmem_discard, or drop its changes with VMEM_ADVISE_DONT_NEED",
                     worst->name.empty() ? "" : (worst->name + " #").c_str(),
                     static_cast<unsigned long long>(worst->id), core::human_bytes(most).c_str(),
                     worst->source.file.path.c_str(), -worst->source.refusal.code());
}

void BlockMap::withdraw(FrameId id) {
  if (std::exchange(frame_table_[id].admitted, false)) policy(id).remove(id);
}

void BlockMap::give_entry(FrameId id) {
  withdraw(id);
  spilled_.remove(id);
  dirty_.remove(id);
  frame_table_.give(id);
}

FrameId BlockMap::new_entry(Region& r, BlockIndex b, std::byte* bytes, uint8_t pool) {
  const FrameId id = frame_table_.take(r, b, bytes, pool);
  r.table.set_aux(b, id);
  return id;
}

void BlockMap::note_dirty(Region& r, BlockIndex b) {
  if (r.backing == Backing::file_shared) dirty_.add(r.table[b].aux, now_ns());
}

void BlockMap::look_for_overdue(const Region& r, BlockIndex b) {
  if (core::in_memory(r.table[b].state) && dirty_.overdue(r.table[b].aux) && !lent_for_writing(r, b))
    dirty_.bring_forward(r.table[b].aux, now_ns());
}

void BlockMap::resize_policies(size_t frames) {
  for (size_t i = 0; i < policies_.size(); ++i)
    policies_[i]->resize(std::max(frames, frame_table_.size()), upcalls_.pages(static_cast<uint8_t>(i)));
}

// The shadow of the eviction replaces the frame number.
void BlockMap::free_entry(BlockIndex b, Region& r) {
  const core::Block& block = r.table[b];
  const FrameId id = block.aux;
  copies_.drop(id);
  give_entry(id);
  nonresident_age_.left(r.block_size);
  r.table.set_aux(b, nonresident_age_.shadow());
}

void BlockMap::admit(Region& r, BlockIndex b, uint32_t shadow) {
  const core::Block& block = r.table[b];
  Frame& frame = frame_table_[block.aux];
  if (frame.admitted) return;
  policy::Admission a;
  a.id = block.aux;
  a.weight = static_cast<uint32_t>(r.block_size / core::kPage);
  a.priority = r.advice.priority;
  a.temperature = temperature_in(r, b, frame.pool, &a.pinned);
  a.sequential = r.advice.access == policy::Access::sequential;
  a.probes = r.probes && frame.pool == kHostPool;
  a.ahead = (block.flags & core::kReadAhead) != 0;
  a.hinted = (block.flags & core::kPrefetched) != 0;
  a.refused = std::exchange(frame.could_not_leave, false);
  if (shadow != 0) a.age = nonresident_age_.age(shadow);
  policy(a.id).admit(a);
  frame.admitted = true;
  frame.leased = false;
  match_hold(r, b);
}

void BlockMap::admit_refused(Region& r, BlockIndex b) {
  frame_table_[r.table[b].aux].could_not_leave = true;
  admit(r, b, nonresident_age_.shadow());
}

void BlockMap::follow_advice(Region& r, BlockIndex b) {
  const core::Block& block = r.table[b];
  if (!core::in_memory(block.state) && !core::on_a_device(block.state)) return;
  Frame& frame = frame_table_[block.aux];
  // A spilled block is on its preferred device now: it is no longer spilled.
  if (block.state == core::State::on_device && r.advice.places.at(b).preferred == block.device &&
      spilled_.remove(block.aux))
    admit(r, b, nonresident_age_.shadow());
  if (frame.admitted) {
    bool pinned = false;
    const policy::Temperature t = temperature_in(r, b, frame.pool, &pinned);
    policy(block.aux).advise(block.aux, t, r.advice.priority, pinned);
  }
  if (core::on_a_device(block.state)) copies_.follow_advice(block.aux);
}

// The policy holds a block once, for all of its leases.
void BlockMap::match_hold(Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  if (!core::in_memory(block.state) && !core::on_a_device(block.state)) return;
  Frame& frame = frame_table_[block.aux];
  // holds_for_lease() has core::broken("lease_hold"). The build looks for that text here, and
  // compiles this file again for it.
  if (!frame.admitted || frame.leased == holds_for_lease(r, b)) return;
  frame.leased = !frame.leased;
  if (frame.leased) {
    policy(block.aux).hold(block.aux);
  } else {
    policy(block.aux).unhold(block.aux);
  }
}

// Each block gets the hold that its leases ask for when this reaches it, whichever leases those are
// by then. Until then a reclaim thread may choose a block that was leased just now, and leaves it
// alone; it does not yet choose one that was released just now.
void BlockMap::match_holds(Lock& lock, const BlockSpan& span) {
  Region& r = *span.region;
  for (BlockIndex b = r.table.next_populated(span.first); b <= span.last && !r.dying;
       b = r.table.next_populated(b + 1)) {
    match_hold(r, b);
    look_for_overdue(r, b);
    if (b % kTurn == 0) lock.give_way();
  }
}

// Grows the table a chunk at a time. References to frames stay valid.
bool BlockMap::reserve_entries(size_t count) noexcept try {
  while (frame_table_.size() < count) {
    resize_policies(frame_table_.size() + FrameTable::kStep);
    frame_table_.grow();
  }
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

bool BlockMap::reserve_transition(size_t free) noexcept try {
  if (const size_t room = transitions_.grows_to(free); room != 0) upcalls_.reserve_queues(room);
  return transitions_.reserve(free);
} catch (const std::bad_alloc&) {
  return false;
}

bool BlockMap::reserve_block() {
  return (frame_table_.free() != 0 || reserve_entries(frame_table_.size() + 1)) && reserve_transition();
}

Transition* BlockMap::new_transition(Region& r, BlockIndex b) {
  Transition* m = transitions_.take(r, b, now_ns());
  ++r.counts.in_flight;
  return m;
}

void BlockMap::notify() {
  changed_.notify_all();
  waiters_.wake_all();
}

void BlockMap::free_transition(Transition* m) {
  --m->region->counts.in_flight;
  const bool moved = m->device >= 0 ? m->image != nullptr || m->move.migrates : m->io.size != 0;
  if (m->way != core::Way::none && moved && m->status.ok())
    counters_.move_ns[static_cast<size_t>(m->way)].add(now_ns() - m->begun_ns);
  if (m->device >= 0 && moved && m->status.ok()) progress_.made();
  if (m->completion != nullptr) {
    --m->completion->outstanding;
    if (m->completion->status.ok()) m->completion->status = m->status;
  }
  if (m->write.background) dirty_.write_ends(m->region->block_size, now_ns());
  transitions_.give(m);
  const core::Block& block = m->region->table[m->block];
  if (core::in_memory(block.state) && std::exchange(frame_table_[block.aux].evict_when_stable, false))
    upcalls_.evict_after_transition(*m->region, m->block);
  if (m->region->dying) trap_.wake(m->region->address(m->block), m->region->block_size).ignore();  // it is made again
  waiters_.wake(*m->region, m->block);
  changed_.notify_all();
}

bool BlockMap::wait_stable(Lock& lock, Region& r, BlockIndex b, RangeScan* scan) {
  if (r.dying || !core::in_transition(r.table[b].state)) return !r.dying;
  for (BlockWaiter waiter(waiters_, r, b); !r.dying && core::in_transition(r.table[b].state);) {
    // Only the disk is in the way: it has as long as it needs. (At exit the limit of the whole counts.)
    const core::Block& block = r.table[b];
    const bool written = block.state == State::writing_back ||
                         (block.state == State::isolating && !frame_table_[block.aux].lent_to_kernels);
    if (written && scan != nullptr && scan->wait == RangeScan::Wait::while_it_goes_on) {
      scan->progress.look(now_ns(), true);
      lock.sleep(waiter.changed);
      continue;
    }
    if (wait_on(lock, scan, waiter.changed)) continue;
    scan->leave(b);
    return true;
  }
  if (scan != nullptr) scan->progress.made();
  return !r.dying;
}

bool BlockMap::wait_on(Lock& lock, RangeScan* scan, std::condition_variable& what) {
  if (scan == nullptr || scan->wait == RangeScan::Wait::always) {
    lock.sleep(what);
    return true;
  }
  scan->progress.look(now_ns(), false);
  const uint64_t most = tunables_.fault_timeout_ms * uint64_t{1000000};
  if (scan->wait == RangeScan::Wait::never || scan->progress.over(0, most)) return false;
  core::add(counters_.swept_blocks);  // progress for a thread at exit: this wait has its own limit
  lock.sleep_for(what, std::chrono::milliseconds(5));
  return true;
}

std::string BlockMap::check() {
  size_t blocks_in_memory = 0;
  for (auto& [base, r] : regions_) {
    if (std::string s = r->table.check(); !s.empty()) return s;
    if (std::string s = r->leases.check(); !s.empty()) return s;
    for (BlockIndex b = r->table.next_populated(0); b < r->blocks; b = r->table.next_populated(b + 1)) {
      if (!core::in_memory(r->table[b].state) && !core::on_a_device(r->table[b].state)) continue;
      ++blocks_in_memory;
      const Frame& frame = frame_table_[r->table[b].aux];
      if (frame.region != r.get() || frame.block != b)
        return "a frame points elsewhere: " + std::string(describe_locked(*r, b));
      if (frame.admitted && frame.leased != holds_for_lease(*r, b))
        return "a lease holds no block: " + std::string(describe_locked(*r, b));
    }
  }
  if (blocks_in_memory + copies_.count() != frame_table_.used()) return "frames and tables disagree";
  if (std::string s = frame_table_.check(); !s.empty()) return s;
  if (std::string s = copies_.check(); !s.empty()) return s;
  if (std::string s = spilled_.check(); !s.empty()) return s;
  if (std::string s = dirty_.check(); !s.empty()) return s;
  return transitions_.check();
}

}  // namespace vmem::pager
