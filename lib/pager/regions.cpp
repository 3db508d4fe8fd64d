// Making and freeing regions.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <new>
#include <thread>
#include <utility>

#include "core/break.h"
#include "core/few.h"
#include "core/log.h"
#include "core/mappings.h"
#include "core/on_exit.h"
#include "core/step.h"
#include "core/thread.h"
#include "pager/clock.h"
#include "pager/io_buffers.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::BlockIndex;
using core::error;
using core::kHugePage;
using core::State;
using core::Status;
using trap::Transfer;

namespace {

constexpr size_t kMaxRegion = size_t{1} << 46;
// Of regions whose blocks adapt; so many that they make a huge page lie together.
constexpr size_t kAdaptingBlock = 64 << 10;
constexpr uint32_t kAdaptingGroup = kHugePage / kAdaptingBlock;

Status open_file(const NewRegion& what, bool direct, Region* r, store::Engine& engine) {
  if (what.offset % core::kPage != 0) {
    return error(EINVAL, "offset %llu is not a multiple of %zu", static_cast<unsigned long long>(what.offset),
                 core::kPage);
  }
  if (Status s =
          store::open_mapped(what.path, what.backing == Backing::file_shared, direct, &r->file, what.offset, what.size);
      !s.ok())
    return s;
  core::OnExit close([r] { store::close_mapped(&r->file); });  // also for want of memory
  const uint64_t have = r->file.file.size;
  if (what.offset > have || what.size > have - what.offset) {
    return error(EINVAL, "file %s has %llu bytes, but offset %llu + size %zu needs %llu", what.path.c_str(),
                 static_cast<unsigned long long>(have), static_cast<unsigned long long>(what.offset), what.size,
                 static_cast<unsigned long long>(what.offset) + what.size);
  }
  if (Status s = engine.add_file(r->file.file.fd, &r->file_id); !s.ok()) return s;
  close.dismiss();
  r->has_file = true;
  r->sparse = store::may_have_holes(r->file);
  r->file_offset = what.offset;
  return {};
}

Status no_memory(size_t size) {
  return error(ENOMEM, "no memory for the tables of a region of %s", core::human_bytes(size).c_str());
}

void close_file(Region* r, store::Engine& engine) {
  if (!r->has_file) return;
  engine.remove_file(r->file_id);
  store::close_mapped(&r->file);
}

}  // namespace

// How large the blocks of a region's device tier are; 0: it has none. Larger ones move faster, smaller ones waste less:
// from 8 MiB on little is gained where something is ahead (0.95 to 0.99 of a pinned copy on an H200; 0.74 and 0.77 by 2
// MiB), and each miss moves more. Those that are chosen leave a device, and what moves there, room for several.
Status Pager::device_block(const NewRegion& what, size_t* out) {
  constexpr size_t kLargestChosen = size_t{8} << 20;
  constexpr uint64_t kSeveral = 16, kMostRounding = 3;  // percent of the region
  *out = 0;
  if (devices_ == nullptr || what.host_only) return {};
  if (what.says_size()) {
    *out = what.block_size;
    if (*out >= device::kUnit && *out <= devices_->largest_unit()) return {};
    const std::string least = core::human_bytes(device::kUnit), most = core::human_bytes(devices_->largest_unit());
    return error(EINVAL, "block_size %s: a region with a device tier (%s) has blocks of %s%s%s; add VMEM_HOST_ONLY",
                 core::human_bytes(*out).c_str(), devices_->name(), least.c_str(), least == most ? "" : " to ",
                 least == most ? "" : most.c_str());
  }
  *out = devices_->unit();
  if (!config_.auto_device_blocks) return {};
  Lock lock(map_.mutex());
  uint64_t budget = UINT64_MAX;
  for (int d = 0; d < devices_->count(); ++d) {
    const DeviceBudget& of = gpus_[static_cast<size_t>(d)].budget;
    budget = std::min(budget, of.begun()                   ? of.budget()
                              : config_.device_budget != 0 ? config_.device_budget
                                                           : devices_->info(d).total_bytes / 5 * 4);
  }
  size_t block = std::min(kLargestChosen, devices_->largest_unit());
  for (; block > device::kUnit; block /= 2) {
    const uint64_t rounding = core::round_up(what.size, block) - what.size;
    StagingPool& pool = staging_.of(block);
    if (rounding <= what.size / 100 * kMostRounding && kSeveral * block <= budget &&
        kSeveral * block <= pool.growth.most() && staging_.can_serve(block))
      break;
  }
  // Better too large than none.
  for (size_t larger = 2 * block; !staging_.can_serve(block) && larger <= devices_->largest_unit(); larger *= 2) {
    if (larger <= budget && staging_.can_serve(larger)) block = larger;
  }
  *out = block;
  return {};
}

// Where a limit of the process is the reason, its words are better than those of whoever met it.
Status Pager::create(const NewRegion& what, void** ptr) {
  NewRegion one = what;
  if (Status s = device_block(what, &one.device_block); !s.ok()) return s;
  // All sizes that are tried wait for memory together: no longer than one would.
  const uint64_t mark = [this] {
    Lock lock(map_.mutex());
    return progress_clock_.look(now_ns());
  }();
  Status s;
  for (;; one.device_block /= 2) {
    core::step("create.trying");
    try {
      s = make(one, ptr, mark);
    } catch (const std::bad_alloc&) {
      s = no_memory(what.size);
    }
    // Blocks that nobody has asked for may be smaller, and need less.
    const bool chosen = config_.auto_device_blocks && !what.says_size();
    if (s.code() != -ENOMEM || !chosen || one.device_block <= device::kUnit) break;
  }
  if (s.code() != -ENOMEM) return s;
  return core::name_limit(s, ("a region of " + core::human_bytes(what.size)).c_str());
}

// mark: of who waits for memory for it.
Status Pager::make(const NewRegion& what, void** ptr, uint64_t mark) {
  if (what.size == 0) return error(EINVAL, "size is 0; give the bytes of the region");
  if (what.size > kMaxRegion) {
    return error(EINVAL, "size %zu is above the largest region, %s", what.size, core::human_bytes(kMaxRegion).c_str());
  }
  const bool gpu = what.device_block != 0;
  size_t block_size = gpu ? what.device_block : what.adapts ? kAdaptingBlock : what.block_size;
  while (!gpu && block_size / 2 >= what.size && block_size > core::kMinBlock) block_size /= 2;
  const uint64_t blocks = core::round_up(what.size, block_size) / block_size;
  const bool chosen = gpu && !what.says_size();  // who gives an address cannot know it
  const size_t alignment = chosen ? kHugePage : std::max(kHugePage, std::min(block_size, core::kMaxBlock));
  if (what.address % alignment != 0) {
    return error(EINVAL, "address %#zx is not accepted; give a multiple of %s, or 0", size_t{what.address},
                 core::human_bytes(alignment).c_str());
  }

  uint64_t readahead;
  {
    Lock lock(map_.mutex());
    readahead = config_.readahead_bytes;
  }
  auto region = std::make_unique<Region>(blocks, static_cast<uint32_t>(readahead / block_size),
                                         what.adapts && !gpu ? kAdaptingGroup : 1);
  Region& r = *region;
  r.size = what.size;
  r.span = blocks * block_size;
  r.block_size = block_size;
  r.blocks = blocks;
  r.backing = what.backing;
  r.codec = what.codec;
  r.checksum = what.checksum;
  const trap::Caps& caps = trap_->caps();
  r.gpu = gpu;
  if (caps.install && !gpu) {
    r.transfer = Transfer::install;
    r.probes = block_size >= kHugePage;
  } else if (caps.move && config_.allow_move && block_size >= kHugePage && !gpu) {
    r.transfer = Transfer::move;
    r.probes = true;
  } else {
    r.transfer = Transfer::copy;
    if (!caps.write_protect) {
      return error(ENOTSUP, "trap %s can neither move pages nor write-protect them; Linux 5.7 or later is needed",
                   caps.name);
    }
  }
  core::OwnMap<uintptr_t, std::unique_ptr<Region>> alone;
  alone.emplace(0, nullptr);
  auto node = alone.extract(alone.begin());
  if (r.from_file()) {
    if (Status s = open_file(what, config_.direct_io, &r, *engine_); !s.ok()) return s;
  }
  r.bounces = r.transfer == Transfer::copy || r.codec != store::Codec::raw;
  // However this ends but well, also for want of memory: nothing of it is left.
  bool charged = false;
  core::OnExit undo([&] {
    if (charged) {
      Lock lock(map_.mutex());
      credit_region(r);
    }
    space_->unreserve(r.stored_span);
    close_file(&r, *engine_);
  });
  // What its blocks need later is had now: out of memory is an error of this call and not of a touch.
  if (Status s = r.table.create(blocks); !s.ok()) return s;
  if (Status s = store::prepare_codec(r.codec); !s.ok()) return s;
  store::zero_digest(block_size);  // computed once, and not by the first fault
  if (r.backing == Backing::anonymous || r.backing == Backing::file_private) {
    if (!space_->reserve(r.span)) return no_memory(r.size);
    r.stored_span = r.span;
  }
  {
    Lock lock(map_.mutex());
    Status s = charge_region(lock, r, mark);
    while (s.code() == -ENOMEM && supply_.give_back(lock)) s = charge_region(lock, r, mark);
    if (!s.ok()) return s;
    charged = true;
  }
  void* base = nullptr;
  if (gpu) {
    if (Status s = supply_.want(r, mark); !s.ok()) return s;
    int born = 0;  // on any that is well
    while (born + 1 < devices_->count() && !devices_->health(born).ok()) ++born;
    if (Status s = devices_->reserve(r.span, block_size, born, &base); !s.ok()) return s;
    if (Status s = trap_->attach_at(base, r.span, r.transfer); !s.ok()) {
      devices_->release(base).ignore();
      return s;
    }
  } else if (Status s = trap_->attach_blocks(r.span, alignment, block_size, r.transfer, what.address, &base); !s.ok()) {
    return s;
  }
  if (what.core_dump != 0) {
    Status s = trap_->dump(base, r.span, what.core_dump > 0 ? trap::CoreDump::yes : trap::CoreDump::no);
    if (!s.ok()) {
      trap_->detach(base, r.span).ignore();
      (gpu ? devices_->release(base) : trap_->unmap(base, r.span)).ignore();
      return s;
    }
  }
  r.base = static_cast<std::byte*>(base);
  node.key() = reinterpret_cast<uintptr_t>(base);
  node.mapped() = std::move(region);
  Lock lock(map_.mutex());
  if (r.transfer == Transfer::copy) frames_.place(base, r.span);
  r.id = sums_.next_region_id++;
  map_.regions().insert(std::move(node));
  undo.dismiss();
  *ptr = base;
  return {};
}

// Locked. Charges what region r needs besides its blocks, or says with the numbers why that does not fit.
Status Pager::charge_region(Lock& lock, Region& r, uint64_t mark) {
  const uint64_t budget = budget_.limit(), overhead = frames_.least_overhead();
  if (budget < overhead + 4 * r.block_size) {
    return error(ENOMEM,
                 "host_budget %s holds fewer than 4 blocks of %s beside %s of tables and buffers; raise host_budget or "
                 "lower %s",
                 core::human_bytes(budget).c_str(), core::human_bytes(r.block_size).c_str(),
                 core::human_bytes(overhead).c_str(), r.gpu ? "device_block_size" : "block_size");
  }
  if (!reserve_blocks(lock, r)) return no_memory(r.size);
  r.table_granted = std::min<size_t>(r.table.most(), budget_.wanted() / 32);
  if (r.bounces) {
    // What others hold and can do without leaves for the first buffers.
    for (Status s;; lock.sleep_for(map_.changed(), std::chrono::milliseconds(20))) {
      s = frames_.want_bounce(r.block_size, bounce_limit(r, config_, budget_), least_bounce(r));
      if (s.ok()) break;
      const uint64_t least = FramePool::least_bounce(r.block_size, least_bounce(r));
      if (!reserve_.fits(least) || progress_clock_.hopeless(mark)) {
        reserve_.want_nothing();
        sums_.reserved_blocks -= std::exchange(r.reserved_blocks, 0);
        return s;
      }
      reserve_.want(least);
      pressure_.call_evictors();
    }
    reserve_.want_nothing();
  }
  if (r.gpu) ++staging_.of(r).regions;
  tables_.charge(r);
  reserve_.add_region(r.block_size);
  if (reserve_.fits(0)) return {};
  Status s = error(ENOMEM,
                   "host_budget %s has no room for a region of %s blocks: %s of tables and buffers, %s leased, %s "
                   "for faults; raise host_budget, lower %s or release leases",
                   core::human_bytes(budget_.limit()).c_str(), core::human_bytes(r.block_size).c_str(),
                   core::human_bytes(frames_.least_overhead()).c_str(), core::human_bytes(reserve_.pinned()).c_str(),
                   core::human_bytes(reserve_.bytes()).c_str(), r.gpu ? "device_block_size" : "block_size");
  credit_region(r);
  return s;
}

// Locked; nothing of the region uses memory any more. Gives back what charge_region() took.
void Pager::credit_region(Region& r) {
  sums_.reserved_blocks -= std::exchange(r.reserved_blocks, 0);
  if (r.bounces) frames_.unwant_bounce(r.block_size);
  if (r.gpu && --staging_.of(r).regions == 0) gpus_.work().notify_all();  // others may have its frames
  tables_.credit(r);
  reserve_.remove_region(r.block_size);
}

// Nothing that waits in a queue names the region any more.
void Pager::forget_region(Region& r) {
  waits_.queue().forget(r);
  failed_.forget(r);
  tables_.forget(r);
  speculation_.forget(r);
  evict_requests_.forget(r);
  queues_.wishes.erase_if([&](const Wish& w) { return w.region == &r; });
  queues_.departures.erase_if([&](const Departure& d) { return d.region == &r; });
  shown_.forget(r);
  for (StreamHint& h : queues_.stream_hints) {
    if (h.region == &r) h.region = nullptr;  // its ticket ends without the lock
  }
}

// Changed blocks of a shared file. A lease that is granted while they are written lets its holder change what has been
// written already: when it is released before the end, that is written too.
Status Pager::write_for_free(Lock& lock, Region& r, bool force) {
  for (int round = 0;; ++round) {
    const uint64_t granted = r.granted;
    Sweep sweep;
    sweep.all = force;
    sweep.frees = true;
    Status s = write_out(lock, r, 0, r.blocks - 1, true, &sweep);
    if (!s.ok()) return s;
    if (force || r.dying || granted == r.granted || core::broken("free_again"))
      return failed_.tell_lost(r, 0, r.blocks - 1, false);
    const bool live = !r.leases.visit(0, r.blocks - 1, [](BlockIndex, BlockIndex, const Leases& leases) {
      return std::all_of(leases.begin(), leases.end(), [](const Lease& l) { return l.count == 0; });
    });
    if (live || round == 16) {
      return error(EBUSY, "region %llu is leased while its changes are written; release it first",
                   static_cast<unsigned long long>(r.id));
    }
  }
}

// Unlocked; nobody uses the region any more. Some of its frames, with their memory, serve the next region: to find and
// to clear as much costs about what reading it does. The rest goes with the addresses.
void Pager::keep_frames(Region& r) {
  if (r.transfer != Transfer::move) return;
  core::Few<std::pair<BlockIndex, std::byte*>, 64> turn;
  uint64_t room = UINT64_MAX;
  for (BlockIndex b = 0; b < r.blocks;) {
    {
      Lock lock(map_.mutex());
      room = std::min(room, frames_.room_to_keep());
      turn.clear();
      for (b = r.table.next_touched(b); b < r.blocks && !turn.full() && room >= r.block_size;
           b = r.table.next_touched(b + 1)) {
        if (b % kTurn == 0) lock.give_way();
        if (r.table[b].state != State::resident) continue;
        std::byte* const slot = frames_.get_slot(r.block_size);
        if (slot == nullptr) break;
        turn.push_back({b, slot});
        room -= r.block_size;
      }
    }
    if (turn.empty()) return;
    size_t taken = 0;
    while (taken < turn.size() &&
           trap_->take(r.address(turn[taken].first), r.block_size, turn[taken].second, r.transfer).ok())
      ++taken;
    if (taken != turn.size()) trap_->release_frames(turn[taken].second, r.block_size).ignore();  // torn, perhaps
    Lock lock(map_.mutex());
    for (size_t i = 0; i < taken; ++i) map_.residents()[r.table[turn[i].first].aux].frame = turn[i].second;
    for (size_t i = taken; i < turn.size(); ++i) frames_.put_slot(turn[i].second, r.block_size);
    if (taken != turn.size()) return;  // pinned, as the others may be
  }
}

// Locked on entry and on return, and not meanwhile. Whatever may use leased blocks, or asks, ends before they go. A
// device whose page tables are its own is lost by a kernel that goes on, and with it all that is there alone; the
// driver frees no managed memory before its kernels have ended. A thread of ours waits for them: they may wait for a
// signal handler of this one.
void Pager::finish_kernels(Lock& lock, Region& r) {
  if (!r.gpu || !own_page_tables()) return;
  uint64_t used = 0;
  r.leases.visit(0, r.blocks - 1, [&](BlockIndex, BlockIndex, const Leases& leases) {
    if (leases.front().location >= 0) used |= uint64_t{1} << leases.front().location;
    return true;
  });
  // Kernels that ask are told that nothing comes any more, and may have given up all that they had: they run yet.
  for (size_t d = 0; r.kernels != 0 && d < gpus_.size(); ++d)
    if (gpus_[d].budget.begun()) used |= uint64_t{1} << d;
  if (used == 0) return;
  ++r.in_flight;
  const uint64_t until = now_ns() + config_.fault_timeout_ms * uint64_t{1000000};
  lock.unlock();
  core::step("free.draining");
  const auto drain = [this, used, until] {
    for (int d = 0; d < devices_->count(); ++d) {
      if ((used >> d & 1) == 0) continue;
      // Lost: nothing runs there. It is refused while anybody captures a graph.
      Status s = devices_->drain(d);
      for (; !s.ok() && devices_->health(d).ok() && now_ns() < until; s = devices_->drain(d)) usleep(1000);
      if (!s.ok() && devices_->health(d).ok())
        core::log(core::Level::warning, "kernels may still use what is freed now: %.*s",
                  static_cast<int>(s.text().size()), s.text().data());
    }
  };
  bool drained = false;
  std::thread draining;
  Status started;
  try {
    started = core::start_thread(
        "vmem-drain",
        [&] {
          drain();
          const Lock ended(map_.mutex());
          drained = true;
          map_.notify();
        },
        &draining);
  } catch (const std::bad_alloc&) {
    started = Status(ENOMEM, "");
  }
  if (!started.ok()) drain();
  lock.lock();
  while (started.ok() && !drained) lock.sleep(map_.changed());
  if (started.ok()) {
    lock.unlock();
    draining.join();
    lock.lock();
  }
  --r.in_flight;
  map_.notify();
}

Status Pager::destroy(void* ptr, bool force) {
  Lock lock(map_.mutex());
  auto it = map_.regions().find(reinterpret_cast<uintptr_t>(ptr));
  if (it == map_.regions().end() || it->second->dying) {
    const Region* inside = map_.find(reinterpret_cast<uintptr_t>(ptr));
    return inside != nullptr && !inside->dying
               ? error(EINVAL, "%p is %zu bytes inside a region; give its start, %p", ptr,
                       static_cast<size_t>(static_cast<std::byte*>(ptr) - inside->base),
                       static_cast<void*>(inside->base))
               : error(EINVAL, "%p is not a region of libvmem (never was, or was freed)", ptr);
  }
  Region& r = *it->second;
  const auto live = [&]() -> Status {
    if (r.kernels != 0) {
      return error(EBUSY, "region %llu is open to kernels that ask: %u ranges, %llu leased blocks; end them first",
                   static_cast<unsigned long long>(r.id), r.kernels,
                   static_cast<unsigned long long>(r.leases.blocks()));
    }
    if (r.leases.empty() && r.asked == 0) return {};
    if (r.leases.empty()) {
      return error(EBUSY, "region %llu has %u asynchronous leases on their way; end them first",
                   static_cast<unsigned long long>(r.id), r.asked);
    }
    return error(EBUSY, "region %llu has %llu leased blocks; release them first", static_cast<unsigned long long>(r.id),
                 static_cast<unsigned long long>(r.leases.blocks()));
  };
  if (!force && r.kernels != 0) return live();  // leases for kernels end all the time
  if (!force && r.gpu) {
    ++r.in_flight;
    releases_.wait_for_region(lock, r);
    --r.in_flight;
    map_.notify();
    if (r.dying) return error(EINVAL, "%p was freed meanwhile by another thread", ptr);
  }
  if (!force) {
    if (Status leased = live(); !leased.ok()) return leased;
  } else {
    finish_kernels(lock, r);
    if (r.dying) return error(EINVAL, "%p was freed meanwhile by another thread", ptr);
    ++r.in_flight;
    loans_.take_back(lock, r);
    --r.in_flight;
    map_.notify();
    if (r.dying) return error(EINVAL, "%p was freed meanwhile by another thread", ptr);
  }
  if (r.backing == Backing::file_shared) {
    ++r.in_flight;
    Status s = write_for_free(lock, r, force);
    --r.in_flight;
    map_.notify();
    if (r.dying) return error(EINVAL, "%p was freed meanwhile by another thread", ptr);
    if (!s.ok()) {
      if (!force) return s;
      core::log(core::Level::error, "changes of a shared file are lost with its region: %.*s",
                static_cast<int>(s.text().size()), s.text().data());
    }
    if (!force) {
      if (Status leased = live(); !leased.ok()) return leased;
    }
  }
  r.dying = true;
  forget_region(r);
  // Who accesses it is reported again, and answered by access_of_dying(): a signal handler, perhaps, that somebody
  // waits for.
  map_.notify();
  if (!r.lost) {
    lock.unlock();  // an operation of the module for each block
    trap_->wake(r.base, r.span).ignore();
    lock.lock();
  }
  while (r.in_flight != 0) lock.sleep(map_.changed());
  if (force) finish_kernels(lock, r);  // of leases that came last
  while (r.in_flight != 0) lock.sleep(map_.changed());
  forget_region(r);
  r.quiet = true;
  lock.unlock();

  core::step("free.quiet");
  keep_frames(r);
  // Parked threads get SIGBUS, resident pages go back to the system; then the books.
  if (r.lost) {
    // Parts of the range are nobody's any more: nothing may be mapped there by us.
    for (BlockIndex b = 0; b < r.blocks; ++b) trap_->wake(r.address(b), r.block_size).ignore();
  } else if (Status s = trap_->detach(r.base, r.span); !s.ok()) {
    core::log(core::Level::error, "%.*s", static_cast<int>(s.text().size()), s.text().data());
  }
  lock.lock();
  // Nobody finds it any more; those who know it by a resident see that it is dying.
  const std::unique_ptr<Region> gone = std::move(map_.regions().extract(it).mapped());
  grants_.forget(lock, r);
  releases_.forget(r);
  core::Few<core::Extent, 256> extents;  // freeing needs no memory
  const auto release_extents = [&]() VMEM_LOCKED {
    lock.unlock();
    for (const core::Extent e : extents) space_->release(e);
    extents.clear();
    lock.lock();
  };
  bool kept = false;
  std::array<uint64_t, device::kMaxDevices> on_devices = {};  // bytes
  for (BlockIndex b = r.table.next_touched(0); b < r.blocks; b = r.table.next_touched(b + 1)) {
    core::Block& block = r.table[b];
    if (extents.full()) release_extents();
    if (b % kTurn == 0) lock.give_way();
    if (block.extent) extents.push_back(block.extent);
    failed_.clear_unknown(block);
    if (core::on_a_device(block.state)) {
      gpus_[block.device].budget.frees(r.block_size);
      on_devices[block.device] += r.block_size;
      if (map_.residents()[block.aux].shown) budget_.credit(r.block_size);
      shown_.forget(r, b);
      map_.free_resident(b, r);
      continue;
    }
    if (!core::in_memory(block.state)) continue;
    staging_.of(r).lent -= map_.residents()[block.aux].lent ? 1 : 0;  // its kernels have ended
    std::byte* frame = map_.residents()[block.aux].frame;
    if (frame != nullptr && r.transfer == Transfer::move) {
      frames_.keep(frame, r.block_size);
      kept = true;
    } else if (frame != nullptr) {
      installer_.give_frame(r, frame);
    } else {
      budget_.credit(r.block_size);
    }
    map_.free_resident(b, r);
  }
  credit_region(r);
  if (kept) {
    pressure_.keep_until(now_ns() + config_.keep_ms * uint64_t{1000000});
    pressure_.call_evictor();
  }
  map_.progress().made();
  After after;
  came_free(after);
  lock.unlock();
  page_in_.run(after);
  for (const core::Extent e : extents) space_->release(e);
  space_->unreserve(gone->stored_span);
  if (gone->stored_span != 0) writer_.store_has_room();
  close_file(gone.get(), *engine_);
  // Last: from here on the addresses may be another region's.
  if (!gone->gpu) return trap_->unmap(gone->base, gone->span);
  const auto is_nobodys = [&]() VMEM_LOCKED {
    for (size_t d = 0; d < gpus_.size(); ++d) {
      if (on_devices[d] == 0) continue;
      gpus_[d].budget.freed(std::exchange(on_devices[d], 0));
      if (own_page_tables()) gpus_[d].budget.set_keeps(true);
      gpus_.work().notify_all();
    }
  };
  if (core::broken("credit_after_release")) {
    lock.lock();
    is_nobodys();
    lock.unlock();
  }
  Status released = devices_->release(gone->base);
  lock.lock();
  is_nobodys();  // the memory that it had on devices; with page tables of its own a device keeps it
  map_.progress().made();
  After room;
  promoter_.pump(room);
  lock.unlock();
  page_in_.run(room);
  return released;
}

void Pager::shutdown() {
  for (;;) {
    void* base = nullptr;
    {
      Lock lock(map_.mutex());
      const auto it =
          std::find_if(map_.regions().begin(), map_.regions().end(), [](const auto& e) { return !e.second->dying; });
      if (it == map_.regions().end()) return;
      base = it->second->base;
    }
    destroy(base, true).ignore();  // freed by somebody else meanwhile: as well
  }
}

}  // namespace vmem::pager
