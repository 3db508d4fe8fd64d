// The pager: makes and connects the classes below it, and is the interface that lib/api calls.
// Pager implements the interfaces through which lower classes call up, and serves waiters when
// memory comes free.
//
// - BlockMap's lock protects every field here and in Region. Work that must run without the lock is
//   collected as DeferredWork and runs after the lock is dropped.
// - Each transition of a block (core::State) has one owner, which works without the lock. Other
//   threads set flags in the block. PageIn::settle() serves them when the owner is done.
#pragma once

#include <memory>
#include <optional>

#include "core/big_lock.h"
#include "core/options.h"
#include "pager/account/context.h"
#include "pager/calls/calls.h"
#include "pager/host/host_tier.h"
#include "pager/lease/lease_room.h"
#include "pager/threads/device_workers.h"
#include "pager/threads/fault_threads.h"
#include "pager/threads/reclaim_threads.h"
#include "pager/tier/device_tier.h"
#include "vmem/vmem.h"

namespace vmem::pager {

class Pager final : private Upcalls {
 public:
  Pager(Parts parts, Config config, const Tunables& tunables);
  ~Pager();  // stops the threads; all regions must be freed (shutdown())
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;
  core::Status start();
  core::Status create(const RegionSpec& what, void** ptr) { return calls_.region_create.create(what, ptr); }
  core::Status destroy(void* ptr, bool force) { return calls_.region_free.destroy(ptr, force); }
  core::Status discard(void* ptr) { return calls_.region_free.discard(ptr); }
  core::Status set_name(const void* ptr, const char* name);
  core::Status prefetch(const void* ptr, size_t size, int location, void* stream = nullptr) {  // stream null: at once
    return calls_.prefetch.prefetch(ptr, size, location, stream);
  }
  core::Status advise(const void* ptr, size_t size, int advice, int location) {
    return calls_.advise.advise(ptr, size, advice, location);
  }
  // ask: the request that AcquireRequests::ask() filled in for the same arguments, or null.
  Status acquire(std::span<const vmem_range> ranges, int location, void* stream, AcquireRequest* ask = nullptr);
  // Leases at devices end when the stream `end` reaches the release. knows_access: each range has
  // the access of the acquire that it ends.
  Status release(std::span<const vmem_range> ranges, void* stream) { return release(ranges, stream, stream); }
  Status release(std::span<const vmem_range> ranges, void* stream, void* end, bool knows_access = false) {
    return leases_.releases.release(ranges, stream, end, knows_access);
  }
  Status evict(const void* ptr, size_t size, int location);
  Status sync(const void* ptr, size_t size) { return calls_.sync.sync(ptr, size); }
  Status sync_all() { return calls_.sync.sync_all(); }
  Status export_range(const void* ptr, size_t size, device::Export how, int* descriptor) {
    return calls_.exports.export_range(ptr, size, how, descriptor);
  }
  AcquireRequests& acquire_requests() { return leases_.acquire_requests; }
  KernelRanges& kernel_ranges() { return tier_.kernel_ranges; }
  StagingLoans& staging_loans() { return tier_.staging_loans; }  // staging frames lent to kernels of open ranges
  Query& queries() { return calls_.query; }
  TunablesUpdate& tunables_update() { return calls_.tunables_update; }
  // For setting debug, at exit: asks each device in use whether it is lost, and logs those that
  // are.
  void look_for_loss() { ctx_.device_set.look_for_loss(); }
  // For exit(): write dirty blocks of shared files. flush_host() writes those that need no device.
  core::Status flush_shared() { return calls_.exit_flush.flush_shared(); }
  core::Status flush_host() { return calls_.exit_flush.flush_host(); }
  // Frees every region, whatever uses or leases it. First writes the dirty blocks of all shared
  // files that need no device.
  void shutdown() {
    calls_.exit_flush.flush_host().ignore();  // the frees retry what fails
    calls_.region_free.destroy_all();
  }
  bool has_regions();

  // For tests, while nothing is in flight: recounts tables, budget and leases. Returns the first
  // error, or an empty string.
  std::string check();
  core::Counters& counters() { return ctx_.counters; }
  trap::Trap& trap() { return *trap_; }

 private:
  uint64_t pages(uint8_t pool) const VMEM_LOCKED override;
  void reserve_queues(size_t transitions) VMEM_LOCKED override;
  void evict_after_transition(Region& r, core::BlockIndex b) VMEM_LOCKED override {
    host_.reclaim.evict_after_transition(r, b);
  }
  void host_is_short() VMEM_LOCKED override;
  std::optional<uint8_t> short_of_staging(uint8_t first) VMEM_LOCKED override {
    return tier_.staging_allocator.is_short(first);
  }
  bool evict_copy(core::FrameId copy) VMEM_LOCKED override { return tier_.staging_allocator.evict_copy(copy); }
  std::byte* staging_frame(const Region& r, size_t keep) VMEM_LOCKED override {
    return tier_.staging_allocator.frame(r, keep);
  }

  void memory_freed(DeferredWork& after) VMEM_LOCKED override;
  void write_overdue(const void* ptr, size_t size) VMEM_UNLOCKED;
  void tunables_changed() VMEM_UNLOCKED override { calls_.tunables_update.follow_module(); }

  std::unique_ptr<trap::Trap> trap_;
  std::unique_ptr<store::Engine> engine_;
  std::unique_ptr<store::Space> space_;
  std::unique_ptr<device::Devices> devices_;  // null: no device tier
  PagerContext ctx_;
  HostTier host_;
  LeaseRoom leases_;
  DeviceTier tier_;
  Calls calls_;
  FaultThreads fault_threads_;
  ReclaimThreads reclaim_threads_;
  DeviceWorkers workers_;
};

}  // namespace vmem::pager
