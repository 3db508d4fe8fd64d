#include "pager/host/readahead.h"

#include <algorithm>
#include <utility>

#include "pager/block/block_run.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

namespace {

constexpr uint64_t kRefill = 1 << 20;        // bytes; the engine's largest transfer
constexpr uint64_t kIdleRooms = 16;          // a stream is idle if memory was filled so many times since its last use
constexpr size_t kReadTogether = 256 << 10;  // usual least size of a transfer, in bytes

// Returns true for a declared scan of more than memory holds: its blocks are not used again soon.
bool scanned(const Region& r, uint64_t room) {
  return r.advice.access == policy::Access::sequential && r.span >= room / 2;
}

// Returns the most that read-ahead, prefetch and fault-around may read at a time if the next block
// is of this region: half of its buffers.
uint64_t speculative_limit(const Region& r, const PagerContext& ctx) VMEM_LOCKED {
  uint64_t most = ctx.config.io_depth * std::max(r.block_size, kReadTogether);
  if (r.bounces) {
    const uint64_t limit = bounce_limit(r, ctx), slab = FramePool::least_bounce(r.block_size, 1);
    const uint64_t buffers = limit < slab ? limit : core::round_down(limit, slab);
    most = std::min(most, buffers / 2 / (least_bounce(r) / r.block_size));
  }
  return std::max<uint64_t>(most, r.block_size);
}

}  // namespace

uint64_t least_bounce(const Region& r) {
  return r.transfer == trap::Transfer::copy && r.codec != store::Codec::raw ? 2 * r.block_size : r.block_size;
}

uint64_t bounce_limit(const Region& r, const PagerContext& ctx) {
  const uint64_t most = uint64_t{2} * ctx.config.io_depth * std::max(r.block_size, kReadTogether);
  return std::max(least_bounce(r), std::min<uint64_t>({most, ctx.budget.limit() / 8, uint64_t{64} << 20}));
}

void ReadaheadQueue::forget(const Region& r, const policy::Run& run) {
  if (run.count == 0) return;
  const int64_t end = static_cast<int64_t>(run.first) + static_cast<int64_t>(run.count) * run.stride;
  for (Speculative& s : queue_) {
    if (s.region != &r || s.urgency != Urgency::readahead || s.stride != run.stride) continue;
    const int64_t left = end - static_cast<int64_t>(s.next), n = left / s.stride;
    if (left % s.stride != 0 || n <= 0 || static_cast<uint64_t>(n) > run.count) continue;
    s.advance(std::min(static_cast<uint64_t>(n), s.count));
  }
}

void ReadaheadQueue::forget(const Region& r) {
  queue_.erase_if([&](const Speculative& s) { return s.region == &r; });
}

void ReadaheadQueue::started(Transition& m) {
  m.read.speculative = true;
  if (!std::exchange(m.read.reads_ahead, true)) in_flight_ += m.region->block_size;
}

void ReadaheadQueue::ended(Transition& m) {
  if (std::exchange(m.read.reads_ahead, false)) in_flight_ -= m.region->block_size;
}

std::string ReadaheadQueue::check(std::span<const std::unique_ptr<Transition>> transitions) const {
  if (queue_.size() > kMost) return "too many windows wait to be read ahead";
  uint64_t counted = 0;
  for (const auto& m : transitions) {
    if (!m->read.reads_ahead) continue;
    if (m->begun_ns == 0) return "a move is over, and its block is said to be read ahead";
    counted += m->region->block_size;
  }
  if (counted == in_flight_) return "";
  return core::strprintf("%llu bytes are said to be read ahead, moves have %llu",
                         static_cast<unsigned long long>(in_flight_), static_cast<unsigned long long>(counted));
}

Readahead::Readahead(PagerContext& ctx, HostTier& host) : ctx_(ctx), host_(host) {}

void Readahead::used(Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  if ((block.flags & core::kReadAhead) == 0) return;
  const bool marker = (block.flags & core::kReadaheadMarker) != 0;
  const int64_t stride = std::max<int32_t>(1, std::abs(ctx_.map.frame_table()[block.aux].stride));
  const int64_t step = ctx_.map.frame_table()[block.aux].stride < 0 ? stride : -stride;
  r.table.forget_read_ahead(b);
  ctx_.map.frame_table().seen(ctx_.map.frame_table()[block.aux]);
  core::add(ctx_.counters.prefetch_hits);
  for (int64_t i = static_cast<int64_t>(b) + step; i >= 0 && i < static_cast<int64_t>(r.blocks); i += step) {
    const Block& before = r.table[static_cast<BlockIndex>(i)];
    if ((before.flags & core::kReadAhead) == 0 || before.state != State::resident) break;
    r.table.forget_read_ahead(static_cast<BlockIndex>(i));
    ctx_.map.frame_table().seen(ctx_.map.frame_table()[before.aux]);
    core::add(ctx_.counters.prefetch_hits);
    if (ctx_.map.frame_table()[before.aux].admitted) ctx_.map.policy(before.aux).touched(before.aux);
  }
  follow(r, b, marker);
}

void Readahead::follow(Region& r, BlockIndex b, bool marker) {
  const uint64_t limit = ctx_.budget.ahead_limit();
  const auto w = r.use.readahead.on_fault(b, marker, {limit / r.block_size, ctx_.map.nonresident_age().pages()});
  pass(r, r.use.readahead.passed(), true);
  pass(r, r.use.readahead.given_up(), false);
  if (w) {
    const uint64_t bytes = w->count * r.block_size;
    if (ctx_.map.frame_table().ahead_bytes() + bytes > limit) give_up_idle(bytes);
    speculate(r, *w, Urgency::readahead);
  }
  drop_behind(r);
}

// b stays the first, and the others follow in the order of their addresses. Upwards, all are one
// read. Downwards, the others are one read that no thread waits for. Streams read ahead separately.
void Readahead::read_beside(Region& r, BlockIndex b, TransitionList& reads) {
  if (r.advice.access != policy::Access::normal || r.use.readahead.streams() || !host_.waits.queue().empty()) return;
  const BlockIndex first = r.use.fault_around.first(b);
  uint64_t present = 0;
  for (uint32_t i = 0; i < r.use.fault_around.count(b); ++i)
    present |= uint64_t{core::in_memory(r.table[first + i].state)} << i;
  policy::Run run = r.use.fault_around.around(b, present);
  if (run.count < 2) return;
  run.count = std::min(run.count, 1 + ctx_.budget.ahead_limit() / r.block_size / 4);
  // A run goes on as it began: if the block before b was stored to, the next ones will be.
  const Block& before = r.table[static_cast<BlockIndex>(static_cast<int64_t>(b) - run.stride)];
  const bool stores = r.writable() && (before.flags & core::kProtected) == 0 &&
                      (before.state == State::resident || (before.flags & core::kStorePending) != 0);
  const uint64_t cap = speculative_limit(r, ctx_);
  TransitionList others;
  for (uint64_t i = 1; i < run.count; ++i) {
    const auto n = static_cast<BlockIndex>(static_cast<int64_t>(b) + static_cast<int64_t>(i) * run.stride);
    const Block& block = r.table[n];
    // Stop at a block of zeros, which are made faster than they are moved, and at a block that
    // waits.
    const bool stored = block.state == State::stored;
    const bool in_file =
        block.state == State::unpopulated && r.from_file() && !r.in_hole(n) && ctx_.metadata_charges.may_grow(r, n);
    DeferredWork fill;
    if ((!stored && !in_file) || (block.flags & core::kFaultPending) != 0 || MemoryWaitQueue::marked(block) ||
        !host_.readahead_queue.may_start(r.block_size, cap) ||
        !host_.page_in.start_fill(r, n, Urgency::readahead, fill)) {
      run.count = i;
      break;
    }
    Transition* m = fill.submit.pop();
    m->io.urgency = Urgency::fault;  // as for b: engines merge reads of one urgency
    m->read.stored_soon = stores;
    host_.readahead_queue.started(*m);
    core::add(ctx_.counters.fault_around_blocks);
    run.stride > 0 ? others.push_back(m) : others.push_front(m);
  }
  if (r.transfer == trap::Transfer::copy && !stores) place_together(others, host_.page_in.together());
  reads.append(others);
  r.use.readahead.presume(run);
}

// The reader of a stream has passed these blocks (used), or no reader comes for them. In a declared
// scan used blocks become the first to leave, oldest first. Unused blocks always do. They keep
// their marks, and count as wasted if they stay unused.
void Readahead::pass(Region& r, const policy::Run& run, bool used) {
  const bool leave = !used || scanned(r, ctx_.frames.room());
  host_.readahead_queue.forget(r, run);
  for (uint64_t i = 0; i < run.count; ++i) {
    const auto b = static_cast<BlockIndex>(static_cast<int64_t>(run.first) + static_cast<int64_t>(i) * run.stride);
    const Block& block = r.table[b];
    if (block.state != State::resident && (used || block.state != State::staged)) continue;
    Frame& frame = ctx_.map.frame_table()[block.aux];
    if (!used && !frame.ahead) continue;
    if ((block.flags & core::kReadAhead) != 0 && frame.admitted) ctx_.map.policy(block.aux).touched(block.aux);
    if (used && (block.flags & core::kReadAhead) != 0) {
      r.table.forget_read_ahead(b);
      core::add(ctx_.counters.prefetch_hits);
    }
    if (used) ctx_.map.frame_table().seen(frame);
    if (!leave || !frame.admitted) continue;
    bool pinned = false;
    if (temperature(r, b, &pinned) != policy::Temperature::normal || pinned) continue;
    ctx_.map.policy(block.aux).advise(block.aux, policy::Temperature::cold, r.advice.priority, false);
  }
}

// There is no room to read `bytes` ahead. Gives up streams that were not read while memory was
// filled many times over.
void Readahead::give_up_idle(uint64_t bytes) {
  const uint64_t room = ctx_.frames.room() / core::kPage;
  if (ctx_.map.nonresident_age().pages() < looked_ahead_ + room / 8 ||
      ctx_.map.nonresident_age().pages() < kIdleRooms * room)
    return;
  looked_ahead_ = ctx_.map.nonresident_age().pages();
  for (auto& [base, region] : ctx_.map.regions()) {
    for (size_t i = 0; i < policy::ReadAhead::kStreams && bytes != 0; ++i) {
      const policy::Run run = region->use.readahead.give_up(ctx_.map.nonresident_age().pages() - kIdleRooms * room);
      if (run.count == 0) break;
      pass(*region, run, false);
      bytes -= std::min(bytes, run.count * region->block_size);
    }
  }
}

// Evicts at once what a declared scan has passed. So the same few frames, warm and huge, serve the
// whole scan, and writeback keeps pace with the stores.
void Readahead::drop_behind(Region& r) {
  if (!scanned(r, ctx_.frames.room()) || host_.reclaim_requests.full()) return;
  const policy::Run run = r.use.readahead.leave_behind(std::max<uint64_t>(2, (uint64_t{16} << 20) / r.block_size));
  if (run.count == 0) return;
  const auto last =
      static_cast<BlockIndex>(static_cast<int64_t>(run.first) + static_cast<int64_t>(run.count - 1) * run.stride);
  if (!host_.reclaim_requests.add({&r, std::min(run.first, last), std::max(run.first, last)}, true)) return;
  host_.pressure.wake_reclaim();
}

void Readahead::speculate(Region& r, const policy::Window& w, Urgency urgency) {
  if (w.count == 0) return;
  if (!host_.readahead_queue.add({&r, w.first, w.stride, w.count, w.marker, urgency}))
    r.use.readahead.on_dropped(w.count);
}

void Readahead::pump_speculative(DeferredWork& after) {
  bool more = false;  // this call has begun a read
  while (!host_.readahead_queue.empty()) {
    Speculative& s = host_.readahead_queue.front();
    Region& r = *s.region;
    if (s.count == 0 || s.next >= r.blocks) {
      host_.readahead_queue.pop();
      continue;
    }
    if (s.urgency == Urgency::readahead &&
        ctx_.map.frame_table().ahead_bytes() + r.block_size > ctx_.budget.ahead_limit()) {
      r.use.readahead.on_cut({s.next, s.stride, s.count});
      host_.readahead_queue.pop();
      continue;
    }
    const uint64_t cap = speculative_limit(r, ctx_);
    // Wait for room for several blocks, so that blocks that are asked for together are read
    // together.
    const uint64_t room = more ? r.block_size : std::max<uint64_t>(r.block_size, std::min(cap / 2, kRefill));
    if (!host_.readahead_queue.may_start(room, cap)) return;
    more = true;
    const Block& block = r.table[s.next];
    if ((block.state == State::unpopulated || block.state == State::stored) && !MemoryWaitQueue::marked(block) &&
        // Nothing to read ahead in a hole: zeros are made faster than they are moved.
        !(block.state == State::unpopulated &&
          (!r.from_file() || (s.urgency == Urgency::readahead && r.in_hole(s.next)) ||
           !ctx_.metadata_charges.may_grow(r, s.next)))) {
      if (r.gpu && s.urgency == Urgency::prefetch) {  // most likely on its way to a device
        if (!host_.page_in.start_staging(r, s.next, Urgency::prefetch, after)) return;
      } else if (!host_.page_in.start_fill(r, s.next, s.urgency, after)) {
        return;
      }
      host_.readahead_queue.started(*after.submit.tail);
      core::add(ctx_.counters.prefetched_blocks);
      r.table.mark(s.next, core::kReadAhead);
      if (s.urgency == Urgency::prefetch) {
        r.table.mark(s.next, core::kPrefetched);
      } else {
        ctx_.map.frame_table().read_ahead(ctx_.map.frame_table()[block.aux]);
      }
      if (s.urgency == Urgency::readahead && s.next == s.marker) r.table.mark(s.next, core::kReadaheadMarker);
      ctx_.map.frame_table()[block.aux].stride = static_cast<int32_t>(s.stride);
    } else if (core::in_memory(block.state) && s.urgency == Urgency::readahead && s.next == s.marker) {
      // The marker is in memory already: no fault will tell that the stream passes it. The next
      // miss begins a new window.
    }
    s.advance(1);
  }
}

}  // namespace vmem::pager
