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
#include "core/counters.h"
#include "core/options.h"
#include "pager/account/cpu_mappings.h"
#include "pager/account/device_queues.h"
#include "pager/account/device_set.h"
#include "pager/account/fault_reserve.h"
#include "pager/account/metadata_charges.h"
#include "pager/account/staging_pool_set.h"
#include "pager/block/block_map.h"
#include "pager/block/config.h"
#include "pager/block/region.h"
#include "pager/block/transition.h"
#include "pager/calls/advise.h"
#include "pager/calls/device_acquire.h"
#include "pager/calls/exit_flush.h"
#include "pager/calls/export.h"
#include "pager/calls/host_acquire.h"
#include "pager/calls/prefetch.h"
#include "pager/calls/query.h"
#include "pager/calls/range_demoter.h"
#include "pager/calls/range_flush.h"
#include "pager/calls/region_charges.h"
#include "pager/calls/region_create.h"
#include "pager/calls/region_free.h"
#include "pager/calls/sync.h"
#include "pager/calls/tunables.h"
#include "pager/host/fault_handler.h"
#include "pager/host/memory_waits.h"
#include "pager/host/readahead.h"
#include "pager/host/reclaim.h"
#include "pager/host/truncated_files.h"
#include "pager/lease/acquire_requests.h"
#include "pager/lease/lease_manager.h"
#include "pager/lease/stream_releases.h"
#include "pager/threads/device_workers.h"
#include "pager/tier/copy_in.h"
#include "pager/tier/cpu_mapper.h"
#include "pager/tier/device_blocks.h"
#include "pager/tier/device_reclaim.h"
#include "pager/tier/kernel_ranges.h"
#include "pager/tier/peer_migrator.h"
#include "pager/tier/pipelined_copy.h"
#include "pager/tier/promoter.h"
#include "pager/tier/staging_allocator.h"
#include "pager/tier/staging_loans.h"
#include "vmem/vmem.h"

namespace vmem::pager {

class Pager final : private BlockMap::Above, private Reclaim::Above, private FaultHandler::Above, private MemoryFreed {
 public:
  Pager(Parts parts, Config config);
  ~Pager();  // stops the threads; all regions must be freed (shutdown())
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;
  core::Status start();
  core::Status create(const RegionSpec& what, void** ptr) { return maker_.create(what, ptr); }
  core::Status destroy(void* ptr, bool force) { return teardown_.destroy(ptr, force); }
  core::Status discard(void* ptr) { return teardown_.discard(ptr); }
  core::Status set_name(const void* ptr, const char* name);
  core::Status prefetch(const void* ptr, size_t size, int location, void* stream = nullptr) {  // stream null: at once
    return prefetch_.prefetch(ptr, size, location, stream);
  }
  core::Status advise(const void* ptr, size_t size, int advice, int location) {
    return advise_.advise(ptr, size, advice, location);
  }
  // ask: the request that AcquireRequests::ask() filled in for the same arguments, or null.
  Status acquire(std::span<const vmem_range> ranges, int location, void* stream, AcquireRequest* ask = nullptr);
  // Leases at devices end when the stream `end` reaches the release. knows_access: each range has
  // the access of the acquire that it ends.
  Status release(std::span<const vmem_range> ranges, void* stream) { return release(ranges, stream, stream); }
  Status release(std::span<const vmem_range> ranges, void* stream, void* end, bool knows_access = false) {
    return releases_.release(ranges, stream, end, knows_access);
  }
  Status evict(const void* ptr, size_t size, int location);
  Status sync(const void* ptr, size_t size) { return sync_.sync(ptr, size); }
  Status sync_all() { return sync_.sync_all(); }
  Status export_range(const void* ptr, size_t size, device::Export how, int* descriptor) {
    return exports_.export_range(ptr, size, how, descriptor);
  }
  AcquireRequests& acquire_requests() { return acquire_requests_; }
  KernelRanges& kernel_ranges() { return kernel_ranges_; }
  StagingLoans& staging_loans() { return staging_loans_; }  // staging frames lent to kernels of open ranges
  Query& queries() { return queries_; }
  Tunables& tunables() { return tunables_; }
  // For setting debug, at exit: asks each device in use whether it is lost, and logs those that
  // are.
  void look_for_loss() { device_set_.look_for_loss(); }
  // For exit(): write dirty blocks of shared files. flush_host() writes those that need no device.
  core::Status flush_shared() { return exit_flush_.flush_shared(); }
  core::Status flush_host() { return exit_flush_.flush_host(); }
  // Frees every region, whatever uses or leases it. First writes the dirty blocks of all shared
  // files that need no device.
  void shutdown() {
    exit_flush_.flush_host().ignore();  // the frees retry what fails
    teardown_.destroy_all();
  }
  bool has_regions();

  // For tests, while nothing is in flight: recounts tables, budget and leases. Returns the first
  // error, or an empty string.
  std::string check();
  core::Counters& counters() { return counters_; }
  trap::Trap& trap() { return *trap_; }

 private:
  uint64_t pages(uint8_t pool) const VMEM_LOCKED override;
  void reserve_queues(size_t transitions) VMEM_LOCKED override;
  void leaves(Region& r, core::BlockIndex b) VMEM_LOCKED override { reclaim_.leaves(r, b); }
  void host_is_short() VMEM_LOCKED override;
  std::optional<uint8_t> short_of_staging(uint8_t first) VMEM_LOCKED override { return supply_.is_short(first); }
  bool evict_copy(core::FrameId copy) VMEM_LOCKED override { return supply_.evict_copy(copy); }
  std::byte* staging_frame(const Region& r, size_t keep) VMEM_LOCKED override { return supply_.frame(r, keep); }

  void memory_freed(DeferredWork& after) VMEM_LOCKED override;
  void write_overdue(const void* ptr, size_t size) VMEM_UNLOCKED;
  void tunables_changed() VMEM_UNLOCKED override { tunables_.follow_module(); }

  std::unique_ptr<trap::Trap> trap_;
  std::unique_ptr<store::Engine> engine_;
  std::unique_ptr<store::Space> space_;
  std::unique_ptr<device::Devices> devices_;  // null: no device tier
  Config config_;
  core::Counters counters_;
  HostBudget budget_ VMEM_GUARDED_BY(core::big_lock);
  FramePool frames_ VMEM_GUARDED_BY(core::big_lock);
  StagingPoolSet staging_ VMEM_GUARDED_BY(core::big_lock);
  DeviceQueues queues_ VMEM_GUARDED_BY(core::big_lock);
  BlockMap map_;
  DeviceSet device_set_;
  WritebackThrottle writes_ VMEM_GUARDED_BY(core::big_lock);
  FaultDeadline fault_deadline_;
  CpuMappings cpu_mappings_ VMEM_GUARDED_BY(core::big_lock);
  FaultReserve reserve_ VMEM_GUARDED_BY(core::big_lock);
  MetadataCharges tables_ VMEM_GUARDED_BY(core::big_lock);
  const Shared shared_;
  LeaseManager grants_;
  DeviceBlocks blocks_;
  AcquireRequests acquire_requests_;
  KernelRanges kernel_ranges_;
  MemoryPressure pressure_;
  FailedBlocks failed_;
  MemoryWaits waits_;
  RegionTotals sums_ VMEM_GUARDED_BY(core::big_lock);
  ReadaheadQueue readahead_queue_ VMEM_GUARDED_BY(core::big_lock);
  ReclaimRequests reclaim_requests_ VMEM_GUARDED_BY(core::big_lock);
  StoreReader reader_;
  Installer installer_;
  PageIn page_in_;
  Readahead read_ahead_;
  Isolator isolator_;
  StoreWriter writer_;
  IsolatedBlocks isolated_;
  Writeback writeback_;
  StagingAllocator supply_;
  StreamReleases releases_;
  ManagedHoles managed_holes_;
  Export exports_;
  PeerMigrator peer_migrator_;
  DeviceWriteback device_writeback_;
  Demoter demoter_;
  RangeDemoter range_demoter_;
  RangeFlush range_flush_;
  Reclaim reclaim_;
  StagingLoans staging_loans_;
  CpuMapper cpu_mapper_;
  DeviceReclaim device_reclaim_;
  Promoter promoter_;
  PipelinedCopy pipelined_copy_;
  CopyIn copy_in_;
  TruncatedFiles truncated_files_;
  DeviceAcquire device_acquire_;
  HostAcquire host_acquire_;
  Sync sync_;
  ExitFlush exit_flush_;
  Prefetch prefetch_;
  Advise advise_;
  RegionCharges region_charges_;
  RegionCreate maker_;
  RegionFree teardown_;
  Query queries_;
  DeviceWorkers workers_;
  FaultHandler faults_;
  Tunables tunables_;
};

}  // namespace vmem::pager
