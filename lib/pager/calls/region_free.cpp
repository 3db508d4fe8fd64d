#include "pager/calls/region_free.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <thread>
#include <utility>

#include "core/break.h"
#include "core/clock.h"
#include "core/inplace_vector.h"
#include "core/log.h"
#include "core/process/mappings.h"
#include "core/step.h"
#include "core/thread.h"
#include "pager/calls/calls.h"
#include "pager/calls/region_create.h"

namespace vmem::pager {

RegionFree::RegionFree(PagerContext& ctx, Calls& calls)
    : ctx_(ctx), host_(calls.host), leases_(calls.leases), tier_(calls.tier), calls_(calls) {}

// Removes the region from all queues.
void RegionFree::forget(Region& r) {
  host_.waits.queue().forget(r);
  host_.failed.forget(r);
  ctx_.metadata_charges.forget(r);
  host_.readahead_queue.forget(r);
  host_.reclaim_requests.forget(r);
  ctx_.map.dirty().forget(r);
  ctx_.queues.promotion_requests.erase_if([&](const PromotionRequest& w) { return w.region == &r; });
  ctx_.queues.demotion_requests.erase_if([&](const DemotionRequest& d) { return d.region == &r; });
  ctx_.cpu_mappings.forget(r);
  for (StreamHint& h : ctx_.queues.stream_hints) {
    if (h.region == &r) h.region = nullptr;  // its ticket must be destroyed without the lock
  }
}

// Keeps some frames of a region that is not in use any more, with their memory, for the next
// region: to allocate and clear as much memory takes about as long as to read it. The rest goes
// with the addresses.
void RegionFree::keep_frames(Region& r) {
  if (r.transfer != Transfer::move) return;
  core::InplaceVector<std::pair<BlockIndex, std::byte*>, 64> turn;
  uint64_t room = UINT64_MAX;
  for (BlockIndex b = 0; b < r.blocks;) {
    {
      Lock lock(ctx_.map.mutex());
      room = std::min(room, ctx_.frames.room_to_keep());
      turn.clear();
      for (b = r.table.next_populated(b); b < r.blocks && !turn.full() && room >= r.block_size;
           b = r.table.next_populated(b + 1)) {
        if (b % kTurn == 0) lock.give_way();
        if (r.table[b].state != State::resident) continue;
        std::byte* const slot = ctx_.frames.get_slot(r.block_size);
        if (slot == nullptr) break;
        turn.push_back({b, slot});
        room -= r.block_size;
      }
    }
    if (turn.empty()) return;
    size_t taken = 0;
    while (taken < turn.size() &&
           ctx_.trap.take(r.address(turn[taken].first), r.block_size, turn[taken].second, r.transfer).ok())
      ++taken;
    if (taken != turn.size()) ctx_.trap.release_frames(turn[taken].second, r.block_size).ignore();  // may be torn
    Lock lock(ctx_.map.mutex());
    for (size_t i = 0; i < taken; ++i) ctx_.map.frame_table()[r.table[turn[i].first].aux].bytes = turn[i].second;
    for (size_t i = taken; i < turn.size(); ++i) ctx_.frames.put_slot(turn[i].second, r.block_size);
    if (taken != turn.size()) return;  // pinned, and others may be
  }
}

// Waits for all kernels that may use leased blocks or request blocks, before the blocks go. Drops
// the lock. On a device with its own page tables, a kernel that goes on would cause the loss of the
// device, and of all data that is only there. The driver frees managed memory only after its
// kernels have ended. A thread of the library waits, because the kernels may wait for a signal
// handler of this thread.
void RegionFree::finish_kernels(Lock& lock, Region& r) {
  if (!r.gpu || !ctx_.device_set.own_page_tables()) return;
  uint64_t used = 0;
  r.leases.visit(0, r.blocks - 1, [&](BlockIndex, BlockIndex, const Leases& leases) {
    if (leases.front().location >= 0) used |= uint64_t{1} << leases.front().location;
    return true;
  });
  // Kernels that request blocks know that no more come, and may have released all: they still run.
  for (size_t d = 0; r.counts.kernels != 0 && d < ctx_.device_set.size(); ++d)
    if (ctx_.device_set[d].budget.begun()) used |= uint64_t{1} << d;
  if (used == 0) return;
  ++r.counts.in_flight;
  const uint64_t until = now_ns() + ctx_.tunables.fault_timeout_ms * uint64_t{1000000};
  lock.unlock();
  core::step("free.draining");
  bool drained = false;
  std::thread draining;
  Status started;
  try {
    started = core::start_thread(
        "vmem-drain",
        [&] {
          drain(used, until);
          const Lock ended(ctx_.map.mutex());
          drained = true;
          ctx_.map.notify();
        },
        &draining);
  } catch (const std::bad_alloc&) {
    started = Status(ENOMEM, "");
  }
  if (!started.ok()) drain(used, until);
  lock.lock();
  while (started.ok() && !drained) lock.sleep(ctx_.map.changed());
  if (started.ok()) {
    lock.unlock();
    draining.join();
    lock.lock();
  }
  --r.counts.in_flight;
  ctx_.map.notify();
}

// used: a bit for each device.
void RegionFree::drain(uint64_t used, uint64_t until_ns) {
  for (int d = 0; d < ctx_.devices->count(); ++d) {
    if ((used >> d & 1) == 0) continue;
    // A drain is refused while a thread captures a graph. On a lost device nothing runs.
    Status s = ctx_.devices->drain(d);
    for (; !s.ok() && ctx_.devices->health(d).ok() && now_ns() < until_ns; s = ctx_.devices->drain(d)) usleep(1000);
    if (!s.ok() && ctx_.devices->health(d).ok())
      core::log(core::Level::warning, "kernels may still use memory that is freed now: %.*s",
                static_cast<int>(s.text().size()), s.text().data());
  }
}

Status RegionFree::find(void* ptr, Region** out) {
  const auto it = ctx_.map.regions().find(reinterpret_cast<uintptr_t>(ptr));
  if (it != ctx_.map.regions().end() && !it->second->dying) {
    *out = it->second.get();
    return {};
  }
  const Region* inside = ctx_.map.find(reinterpret_cast<uintptr_t>(ptr));
  return inside != nullptr && !inside->dying
             ? error(EINVAL, "%p is %zu bytes inside a region; give its start, %p", ptr,
                     static_cast<size_t>(static_cast<std::byte*>(ptr) - inside->base), static_cast<void*>(inside->base))
             : error(EINVAL, "%p is not a region of libvmem (never was, or was freed)", ptr);
}

// Returns -EBUSY if the region is leased or open to kernels, or is about to be leased.
Status RegionFree::may_go(const Region& r) {
  if (r.counts.kernels != 0) {
    return error(EBUSY, "region %llu is open to kernels: %u ranges, %llu leased blocks; end them first",
                 static_cast<unsigned long long>(r.id), r.counts.kernels,
                 static_cast<unsigned long long>(r.leases.blocks()));
  }
  if (r.leases.empty() && r.counts.asked == 0) return {};
  if (r.leases.empty()) {
    return error(EBUSY, "region %llu has %u asynchronous leases on their way; end them first",
                 static_cast<unsigned long long>(r.id), r.counts.asked);
  }
  return error(EBUSY, "region %llu has %llu leased blocks; release them first", static_cast<unsigned long long>(r.id),
               static_cast<unsigned long long>(r.leases.blocks()));
}

namespace {

Status freed_meanwhile(const Region& r) {
  return error(EINVAL, "%p was freed meanwhile by another thread", static_cast<void*>(r.base));
}

}  // namespace

// Waits for releases; force: for kernels. Returns whether the region may go. Drops the lock.
Status RegionFree::end_uses(Lock& lock, Region& r, bool force) {
  if (!force && r.counts.kernels != 0) return may_go(r);  // leases for kernels end all the time
  if (!force && r.gpu) {
    ++r.counts.in_flight;
    leases_.releases.wait_for_region(lock, r);
    --r.counts.in_flight;
    ctx_.map.notify();
    if (r.dying) return freed_meanwhile(r);
  }
  if (!force) return may_go(r);
  finish_kernels(lock, r);
  if (r.dying) return freed_meanwhile(r);
  ++r.counts.in_flight;
  tier_.staging_loans.take_back(lock, r);
  --r.counts.in_flight;
  ctx_.map.notify();
  return r.dying ? freed_meanwhile(r) : Status();
}

// Returns -EPERM if the region is sealed (mseal): it cannot be unmapped, so it stays as it is, and
// may be freed when the process ends. Comes before anything is undone. Drops the lock.
Status RegionFree::check_unsealed(Lock& lock, Region& r) {
  ++r.counts.in_flight;
  lock.unlock();
  const bool sealed = host_.writer.mappings().sealed(r.base, r.span);
  lock.lock();
  --r.counts.in_flight;
  ctx_.map.notify();
  if (r.dying) return freed_meanwhile(r);
  if (!sealed) return may_go(r);
  return error(EPERM,
               "region %llu, %s at %p, is sealed (mseal) and cannot be unmapped: it stays, and can be used; vmem_evict "
               "gives its memory back",
               static_cast<unsigned long long>(r.id), core::human_bytes(r.size).c_str(), static_cast<void*>(r.base));
}

namespace {

// Returns -EIO with the reason why changes are lost with their region.
Status lost_changes(const Region& r, const Status& why) {
  uint64_t blocks = 0;
  for (BlockIndex b = r.table.next_populated(0); b < r.blocks; b = r.table.next_populated(b + 1))
    blocks += (r.table[b].flags & core::kUnknown) != 0;
  return error(
      EIO, "region %llu is freed, and the changes of %llu blocks of %s (%s) that its file did not take are lost: %.*s",
      static_cast<unsigned long long>(r.id), static_cast<unsigned long long>(blocks),
      core::human_bytes(r.block_size).c_str(), r.source.file.path.c_str(), static_cast<int>(why.text().size()),
      why.text().data());
}

}  // namespace

Status RegionFree::write_file(Lock& lock, Region& r, bool force, Status* lost) {
  ++r.counts.in_flight;
  Status s = calls_.sync.write_for_free(lock, r, force);
  --r.counts.in_flight;
  ctx_.map.notify();
  if (r.dying) return freed_meanwhile(r);
  if (!s.ok() && lost != nullptr && s.code() != -EBUSY) {
    *lost = lost_changes(r, s);
  } else if (!s.ok()) {
    if (!force) return s;
    core::log(core::Level::error, "changes of a shared file are lost with its region: %.*s",
              static_cast<int>(s.text().size()), s.text().data());
  }
  return force ? Status() : may_go(r);
}

void RegionFree::become_quiet(Lock& lock, Region& r, bool force) {
  r.dying = true;
  forget(r);
  // Accesses fault again, and access_of_dying() answers them. One may be from a signal handler that
  // another thread waits for.
  ctx_.map.notify();
  if (!r.lost) {
    lock.unlock();  // with the module, one operation for each block
    ctx_.trap.wake(r.base, r.span).ignore();
    lock.lock();
  }
  while (r.counts.in_flight != 0) lock.sleep(ctx_.map.changed());
  if (force) finish_kernels(lock, r);  // of leases that were granted last
  while (r.counts.in_flight != 0) lock.sleep(ctx_.map.changed());
  forget(r);
  r.quiet = true;
}

// Ends the trap in the region: parked threads get SIGBUS, resident pages go back to the system.
void RegionFree::detach(Region& r) {
  if (r.lost) {
    // Parts of the range are not reserved any more: map nothing there.
    for (BlockIndex b = 0; b < r.blocks; ++b) ctx_.trap.wake(r.address(b), r.block_size).ignore();
  } else if (Status s = ctx_.trap.detach(r.base, r.span); !s.ok()) {
    // -ENOMEM: at a limit of the process. The addresses go all the same, and parked threads wake.
    core::log(s.code() == -ENOMEM ? core::Level::info : core::Level::error, "%.*s", static_cast<int>(s.text().size()),
              s.text().data());
  }
}

// Frees the memory of a block that is in memory or on a device.
void RegionFree::give_memory_back(Region& r, BlockIndex b, OnDevices* on_devices) {
  const core::Block& block = r.table[b];
  if (core::on_a_device(block.state)) {
    ctx_.device_set[block.device].budget.frees(r.block_size);
    (*on_devices)[block.device] += r.block_size;
    if (ctx_.map.frame_table()[block.aux].dev.cpu_mapped) ctx_.budget.credit(r.block_size);
    ctx_.cpu_mappings.forget(r, b);
    ctx_.map.free_entry(b, r);
    return;
  }
  if (!core::in_memory(block.state)) return;
  ctx_.staging.of(r.block_size).lent -=
      ctx_.map.frame_table()[block.aux].lent_to_kernels ? 1 : 0;  // the kernels have ended
  std::byte* bytes = ctx_.map.frame_table()[block.aux].bytes;
  if (bytes != nullptr) {
    host_.installer.give_frame(r, bytes);
  } else {
    ctx_.budget.credit(r.block_size);
  }
  ctx_.map.free_entry(b, r);
}

// Frees the blocks of a region that no thread finds any more. Drops the lock to release extents.
void RegionFree::give_blocks_back(Lock& lock, Region& r, OnDevices* on_devices) {
  core::InplaceVector<core::Extent, 256> extents;  // a fixed array: to free must need no memory
  const auto release_extents = [&]() VMEM_LOCKED {
    lock.unlock();
    for (const core::Extent e : extents) ctx_.space.release(e);
    extents.clear();
    lock.lock();
  };
  for (BlockIndex b = r.table.next_populated(0); b < r.blocks; b = r.table.next_populated(b + 1)) {
    const core::Block& block = r.table[b];
    if (extents.full()) release_extents();
    if (b % kTurn == 0) lock.give_way();
    if (block.extent) extents.push_back(block.extent);
    host_.failed.clear_unknown(r, b);
    give_memory_back(r, b, on_devices);
  }
  calls_.region_create.credit(r);
  ctx_.map.progress().made();
  DeferredWork after;
  ctx_.upcalls.memory_freed(after);
  lock.unlock();
  host_.page_in.run(after);
  for (const core::Extent e : extents) ctx_.space.release(e);
  lock.lock();
}

// Credits the budgets with the memory that the region had on devices. A device with its own page
// tables keeps that memory.
void RegionFree::nobodys(OnDevices* on_devices) {
  for (size_t d = 0; d < ctx_.device_set.size(); ++d) {
    if ((*on_devices)[d] == 0) continue;
    ctx_.device_set[d].budget.freed(std::exchange((*on_devices)[d], 0));
    if (ctx_.device_set.own_page_tables()) ctx_.device_set[d].budget.set_keeps(true);
    ctx_.device_set.work().notify_all();
  }
}

Status RegionFree::give_managed_back(Region& r, OnDevices* on_devices) {
  if (core::broken("credit_after_release")) {
    const Lock early(ctx_.map.mutex());
    nobodys(on_devices);
  }
  Status released = ctx_.devices->release(r.base);
  DeferredWork room;
  {
    Lock lock(ctx_.map.mutex());
    nobodys(on_devices);
    ctx_.map.progress().made();
    tier_.promoter.pump(room);
  }
  host_.page_in.run(room);
  return released;
}

Status RegionFree::discard(void* ptr) {
  Status lost;
  Status s = end(ptr, false, &lost);
  return s.ok() ? lost : s;
}

Status RegionFree::end(void* ptr, bool force, Status* lost) {
  Lock lock(ctx_.map.mutex());
  Region* found = nullptr;
  if (Status s = find(ptr, &found); !s.ok()) return s;
  Region& r = *found;
  if (Status s = end_uses(lock, r, force); !s.ok()) return s;
  if (!force && !r.gpu) {
    if (Status s = check_unsealed(lock, r); !s.ok()) return s;
  }
  if (r.backing == Backing::file_shared) {
    if (Status s = write_file(lock, r, force, lost); !s.ok()) return s;
  }
  become_quiet(lock, r, force);
  lock.unlock();
  core::step("free.quiet");
  keep_frames(r);
  detach(r);
  lock.lock();
  // No thread finds the region any more. Threads that know it by a frame see that it is dying.
  const std::unique_ptr<Region> gone = std::move(ctx_.map.regions().extract(reinterpret_cast<uintptr_t>(ptr)).mapped());
  leases_.lease_manager.forget(lock, r);
  leases_.releases.forget(r);
  OnDevices on_devices = {};
  give_blocks_back(lock, r, &on_devices);
  lock.unlock();
  ctx_.space.unreserve(gone->charge.stored_span);
  if (gone->charge.stored_span != 0) host_.writer.store_has_room();
  close_file(gone.get(), ctx_.engine);
  // Last: from here on, the addresses may belong to another region.
  if (gone->gpu) return give_managed_back(*gone, &on_devices);
  Status unmapped = give_addresses_back(ctx_.trap, *gone, gone->base);
  if (unmapped.code() != -ENOMEM) return unmapped;
  // The kernel has merged the mapping with a neighbour's, and unmapping would split it into two.
  unmapped = core::name_limit(unmapped, "the neighbour of a freed region");
  core::log(core::Level::warning, "the addresses of a freed region stay taken, accesses of them get SIGBUS: %.*s",
            static_cast<int>(unmapped.text().size()), unmapped.text().data());
  return {};
}

void RegionFree::destroy_all() {
  for (;;) {
    void* base = nullptr;
    {
      Lock lock(ctx_.map.mutex());
      const auto it = std::find_if(ctx_.map.regions().begin(), ctx_.map.regions().end(),
                                   [](const auto& e) { return !e.second->dying; });
      if (it == ctx_.map.regions().end()) return;
      base = it->second->base;
    }
    destroy(base, true).ignore();  // another thread may have freed it
  }
}

}  // namespace vmem::pager
