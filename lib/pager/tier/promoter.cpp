#include "pager/tier/promoter.h"

#include <algorithm>
#include <array>

#include "core/log.h"
#include "core/step.h"
#include "pager/tier/device_tier.h"

namespace vmem::pager {

namespace {

constexpr BlockIndex kLooksForFrames = 1024;          // blocks of a request to look at for frames that others need
constexpr uint64_t kAheadBytes = uint64_t{64} << 20;  // freed at once for a request

}  // namespace

Promoter::Promoter(PagerContext& ctx, DeviceTier& tier) : ctx_(ctx), host_(tier.host), tier_(tier) {}

void Promoter::pump(DeferredWork& after, bool wake) {
  std::array<bool, device::kMaxDevices> full{};
  // Blocks of one size wait for frames of that size; other blocks on the device continue.
  std::array<std::array<bool, device::kUnitSizes>, device::kMaxDevices> held_up{};
  std::array<uint64_t, device::kMaxDevices> wanted{};  // bytes of all requests for a full device
  for (DeviceState& g : ctx_.device_set) g.budget.want(0);
  for (auto it = ctx_.queues.promotion_requests.begin(); it != ctx_.queues.promotion_requests.end();) {
    const size_t d = static_cast<size_t>(it->device);
    bool& size_held_up = held_up[d][device::unit_class(it->region->block_size)];
    if (size_held_up && !full[d]) full[d] = !start_without_frames(*it, kDeviceBatch, after);
    if (full[d] || size_held_up) {
      if (full[d]) wanted[d] += (it->last - it->next + 1) * it->region->block_size;
      ++it;
      continue;
    }
    Start result = serve(it, after);
    size_held_up = result == Start::no_frame;
    if (size_held_up && !start_without_frames(*it, kLooksForFrames, after)) result = Start::no_room;
    if (result == Start::no_room) {
      full[d] = true;
      wanted[d] += (it->last - it->next + 1) * it->region->block_size;
      if (it->owner != nullptr) read_meanwhile(*it, after);
    }
    it = it->next > it->last ? ctx_.queues.promotion_requests.erase(it) : std::next(it);
  }
  for (size_t d = 0; d < ctx_.device_set.size(); ++d) {
    if (!full[d]) continue;
    ctx_.device_set[d].budget.want(std::min(wanted[d], kAheadBytes));
    ctx_.device_set.work().notify_all();
  }
  if (wake) wake_for_ready();
}

// Starts as much of a request as there is room for.
Start Promoter::serve(PooledList<PromotionRequest>::iterator request, DeferredWork& after) {
  Start result = Start::done;
  while (request->next <= request->last) {
    result = start(*request->region, request->next, request->device, request->urgency, after);
    if (result == Start::wait && request->owner == nullptr && request->next < request->last) {
      // Only this block of a hint waits until it has come to rest; the others need not wait for it.
      PromotionRequest one = *request;
      one.last = one.next;
      if (!ctx_.queues.promotion_requests.insert(request, one)) break;
      result = Start::done;
    }
    if (result != Start::done) break;
    ++request->next;
  }
  return result;
}

// Reads blocks of an acquire that are only on disk into staging frames while the device makes room.
void Promoter::read_meanwhile(PromotionRequest& request, DeferredWork& after) {
  Region& r = *request.region;
  const BlockIndex last = std::min<BlockIndex>(request.last, request.next + kDeviceBatch - 1);
  for (BlockIndex b = std::max(request.next, request.read_to); b <= last; request.read_to = ++b) {
    const State state = r.table[b].state;
    if (state != State::stored && !(state == State::unpopulated && r.from_file())) continue;
    if (r.dying || MemoryWaitQueue::marked(r.table[b]) || !host_.page_in.start_staging(r, b, request.urgency, after))
      return;
    after.submit.tail->read.meanwhile = true;
  }
}

// Starts blocks that need no frame, for a request that found no frame or is behind one that found
// none: its acquire has leased them, so no other request gets their frames before. Returns false if
// the device is full.
bool Promoter::start_without_frames(const PromotionRequest& request, BlockIndex looks, DeferredWork& after) {
  Region& r = *request.region;
  const BlockIndex last = std::min<BlockIndex>(request.last, request.next + looks - 1);
  for (BlockIndex b = request.next; b <= last; ++b) {
    const Block& block = r.table[b];
    const bool needs_none = (block.state == State::staged && in_staging(ctx_.map.frame_table()[block.aux].pool)) ||
                            (block.state == State::on_device && block.device != request.device);
    if (needs_none && start(r, b, request.device, request.urgency, after) == Start::no_room) return false;
  }
  return true;
}

void Promoter::wake_for_ready() {
  for (const DeviceState& g : ctx_.device_set) {
    if (g.ready.empty()) continue;
    if (g.ready.size() * g.ready.front()->region->block_size > kBatchBytes) return ctx_.device_set.work().notify_all();
    ctx_.device_set.work().notify_one();
  }
}

// Returns `done` if nothing is to be done for device d, else the thing that the block waits for;
// nullopt: claim it.
std::optional<Start> Promoter::not_now(Region& r, BlockIndex b, int d, Urgency urgency) {
  const Block& block = r.table[b];
  const DeviceState& g = ctx_.device_set[static_cast<size_t>(d)];
  if (r.dying) return Start::done;
  switch (block.state) {
    case State::promoting:
      return block.device == d ? Start::done : Start::wait;
    case State::on_device:
      if (block.device == d) {
        tier_.blocks.adopt(r, b);
        return Start::done;
      }
      if (ctx_.map.frame_table()[block.aux].dev.cpu_mapped) return Start::done;  // an acquire hides it first
      if (urgency != Urgency::acquire && leased(r, b)) return Start::done;
      break;
    case State::poisoned:
      return Start::done;  // an acquire reports the reason
    case State::unpopulated:
    case State::stored:
      if (host_.failed.asleep(r, b)) return Start::done;  // an acquire asks again
      break;
    case State::staged:
      break;
    case State::resident:
      if (urgency != Urgency::acquire && leased(r, b)) return Start::done;
      break;
    default:
      return Start::wait;
  }
  if (block.state == State::unpopulated && !ctx_.metadata_charges.may_grow(r, b)) return Start::no_room;
  // The budget has become too small for the block: a hint would wait for ever.
  if (r.block_size > g.budget.limit() && urgency != Urgency::acquire) return Start::done;
  if (!g.budget.fits(r.block_size) || !ctx_.map.reserve_block()) return Start::no_room;
  return std::nullopt;
}

// Claims a block for device d.
Start Promoter::start(Region& r, BlockIndex b, int d, Urgency urgency, DeferredWork& after) {
  if (const auto why = not_now(r, b, d, urgency)) return *why;
  const Block& block = r.table[b];
  DeviceState& g = ctx_.device_set[static_cast<size_t>(d)];
  const State from = block.state;
  const bool hinted = urgency != Urgency::acquire;
  if (from == State::on_device) {  // from another device, directly
    ctx_.map.frame_table()[block.aux].dev.hinted = hinted;
    if (hinted) core::add(ctx_.counters.prefetched_blocks);
    g.incoming.push_back(tier_.peer_migrator.begin(r, b, d));
    ctx_.device_set.work().notify_one();
    return Start::done;
  }
  const bool zero = from == State::unpopulated && !r.from_file();
  const bool staged = from == State::staged && in_staging(ctx_.map.frame_table()[block.aux].pool);
  std::byte* bytes = nullptr;
  std::byte* scratch = nullptr;
  if (!zero && !staged && !take_frames(r, b, &bytes, &scratch)) return Start::no_frame;
  if (hinted) core::add(ctx_.counters.prefetched_blocks);
  g.budget.charge(r.block_size);
  if (from == State::staged || from == State::resident) {
    claim_in_host(r, b, d, hinted, bytes);
  } else {
    claim_in_store(r, b, d, urgency, bytes, scratch, after);
  }
  return Start::done;
}

// Takes a staging frame, and a bounce buffer if the store has the block encoded.
bool Promoter::take_frames(const Region& r, BlockIndex b, std::byte** bytes, std::byte** scratch) {
  const Block& block = r.table[b];
  if (block.extent && block.extent.codec() != 0 &&
      (block.state == State::stored || block.state == State::unpopulated)) {
    *scratch = ctx_.frames.get_bounce(r.block_size);
    if (*scratch == nullptr) return false;
  }
  *bytes = tier_.staging_allocator.frame(r, ctx_.staging.of(r.block_size).growth.reserve());
  if (*bytes != nullptr) return true;
  if (*scratch != nullptr) ctx_.frames.put_bounce(*scratch, r.block_size);
  *scratch = nullptr;
  return false;
}

// Claims a block that is in host memory, in a frame or in place.
void Promoter::claim_in_host(Region& r, BlockIndex b, int d, bool hinted, std::byte* bytes) {
  const Block& block = r.table[b];
  const State from = block.state;
  Frame& frame = ctx_.map.frame_table()[block.aux];
  if (frame.admitted) ctx_.map.policy(block.aux).remove(block.aux);
  frame.admitted = false;
  frame.dev.changed = frame.dev.undecided = false;
  frame.dev.hinted = hinted;
  if ((block.flags & core::kReadAhead) != 0) host_.readahead.used(r, b);
  Transition* m = ctx_.map.new_transition(r, b);
  m->device = d;
  m->way = core::Way::to_device;
  if (bytes == nullptr) {
    m->image = frame.bytes;
  } else {
    m->image = bytes;
    m->move.source = from == State::staged ? frame.bytes : r.address(b);
  }
  if (from == State::resident) {
    if (!stood_protected(ctx_.trap.caps().pins, block, frame)) r.table.mark(b, core::kDirty);
    frame.in_place = frame.promoted = true;
    frame.dropping = frame.holed = false;
    r.table.begin_isolate(b);
  } else {
    frame.pool = static_cast<uint8_t>(kDevicePools + d);
    ctx_.map.note_clean(r, b);  // its flags say from now on whether the file has its bytes
    r.table.begin_promote(b, d);
  }
  m->in_staging = true;
  ctx_.device_set[static_cast<size_t>(d)].ready.push_back(m);
}

// Claims a block that is in the store or its file, or in neither: then it is zeros and needs no
// frame.
void Promoter::claim_in_store(Region& r, BlockIndex b, int d, Urgency urgency, std::byte* bytes, std::byte* scratch,
                              DeferredWork& after) {
  const Block& block = r.table[b];
  const State from = block.state;
  const bool hinted = urgency != Urgency::acquire;
  const uint32_t shadow = block.aux;
  const FrameId id = ctx_.map.new_entry(r, b, nullptr, static_cast<uint8_t>(kDevicePools + d));
  ctx_.map.frame_table()[id].shadow = shadow;
  ctx_.map.frame_table()[id].dev.hinted = hinted;
  r.table.clear(b, core::kDirty);
  r.table.begin_promote(b, d);
  ctx_.metadata_charges.charge(r);
  Transition* m = ctx_.map.new_transition(r, b);
  m->device = d;
  m->way = core::Way::to_device;
  m->image = bytes;
  m->coded = scratch;
  m->in_staging = true;
  m->read.was_unpopulated = from == State::unpopulated;
  m->read.speculative = hinted;
  if (bytes == nullptr) {
    core::add(ctx_.counters.zero_fills);
    r.table.set_digest(b, store::zero_digest(r.block_size));
    ctx_.device_set[static_cast<size_t>(d)].ready.push_back(m);
    return;
  }
  host_.reader.prepare_read(m, urgency, *this, tier_.pipelined_copy.wants(r));
  after.submit.push_back(m);
}

void Promoter::io_came(Transition* m, size_t bytes) {
  tier_.pipelined_copy.came(m, bytes);
}

void Promoter::io_ended(Transition* m) {
  DeferredWork after;
  finish_read(m, after);
  host_.page_in.run(after);
}

// Keeps the reason why the block could not be read. An acquire that waits for it gets the reason,
// or, if the kernel had no memory for the read, asks again later. A CPU access reads again.
void Promoter::keep_failure(Transition* m) {
  Region& r = *m->region;
  if (m->read.no_memory) {
    const bool wanted =
        !m->read.speculative || (r.table[m->block].flags & core::kFaultPending) != 0 || leased(r, m->block);
    if (wanted) host_.failed.read_later(r, m->block, m->status);
    return;
  }
  VMEM_LOG_OFTEN(m->read.speculative ? core::Level::warning : core::Level::error, "%.*s, on its way to device %d",
                 static_cast<int>(m->status.text().size()), m->status.text().data(), m->device);
  r.keep_reason(m->block, m->status);
}

// State promoting, with the trap still in place.
void Promoter::finish_read(Transition* m, DeferredWork& after) {
  core::step("device.read");
  host_.reader.verify_read(m);
  const Lock lock(ctx_.map.mutex());
  if (tier_.pipelined_copy.is_left(m)) read_over(m, after);
}

void Promoter::read_over(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  if (m->coded != nullptr) ctx_.frames.put_bounce(m->coded, r.block_size);
  m->coded = nullptr;
  if (m->status.ok()) {
    host_.failed.clear_unread(r, m->block);
    if (!block.extent && r.writable()) {
      r.table.set_digest(m->block, m->digest);
    }
    DeviceState& g = ctx_.device_set[static_cast<size_t>(m->device)];
    g.ready.push_back(m);
    if (g.sleepers != 0 && leased(r, m->block)) {
      ctx_.map.notify();  // the acquire copies it itself; a worker need not wake it
    } else {
      ctx_.device_set.work().notify_one();
    }
    return;
  }
  // Nothing was made on the device yet: the block is where it was.
  keep_failure(m);
  ctx_.staging.of(r.block_size).frames.put(m->image);
  ctx_.device_set[static_cast<size_t>(m->device)].budget.credit(r.block_size);
  ctx_.map.free_entry(m->block, r);
  r.table.abandon_promote(m->block);
  const BlockIndex b = m->block;
  ctx_.map.free_transition(m);
  host_.page_in.settle(r, b, after);
  ctx_.upcalls.memory_freed(after);
}

}  // namespace vmem::pager
