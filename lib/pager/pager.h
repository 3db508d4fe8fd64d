// What calls of the API mean for regions and blocks: regions come and go, leases, sync, hints, queries. What moves
// blocks are classes of their own, which Pager makes and connects: it is all that they ask of those above them, and
// serves whoever waits when memory comes free.
//
// The lock is BlockMap's. It protects every field here and in Region; what must be done without it is collected as
// DeferredWork, and done when it has been dropped. Each transition of a block (core::State) has one owner, which works
// without the lock; everybody else leaves a mark in the block's flags, and PageIn::settle() grants it when the owner is
// done.
#pragma once

#include <map>
#include <memory>
#include <optional>

#include "core/big_lock.h"
#include "core/counters.h"
#include "core/options.h"
#include "pager/arrivals.h"
#include "pager/ask.h"
#include "pager/block_map.h"
#include "pager/config.h"
#include "pager/device_acquires.h"
#include "pager/device_blocks.h"
#include "pager/device_room.h"
#include "pager/device_views.h"
#include "pager/device_workers.h"
#include "pager/evictor.h"
#include "pager/fault_service.h"
#include "pager/gpus.h"
#include "pager/host_reserve.h"
#include "pager/lease_grants.h"
#include "pager/loans.h"
#include "pager/memory_waits.h"
#include "pager/migrator.h"
#include "pager/moves.h"
#include "pager/pending_releases.h"
#include "pager/progress.h"
#include "pager/promoter.h"
#include "pager/queues.h"
#include "pager/range_demoter.h"
#include "pager/read_ahead.h"
#include "pager/region.h"
#include "pager/shown_copies.h"
#include "pager/shown_files.h"
#include "pager/staging_pools.h"
#include "pager/staging_supply.h"
#include "pager/table_charges.h"
#include "vmem/vmem.h"

namespace vmem::pager {

class Pager final : private BlockMap::Above,
                    private Evictor::Above,
                    private FaultService::Above,
                    private DeviceWorkers::Above,
                    private Room {
 public:
  Pager(Parts parts, Config config);
  ~Pager();  // stops the threads; regions must have been freed (shutdown())
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;
  core::Status start(), sync_all();
  core::Status create(const NewRegion& what, void** ptr);
  core::Status destroy(void* ptr, bool force);
  core::Status set_name(const void* ptr, const char* name);
  core::Status prefetch(const void* ptr, size_t size, int location, void* stream = nullptr);  // null: now
  core::Status advise(const void* ptr, size_t size, int advice, int location);
  // ask: of ask() with the same arguments. Released when `end` gets there; knows_access: the ranges have what is ended.
  core::Status acquire(std::span<const vmem_range> ranges, int location, void* stream, Ask* ask = nullptr);
  core::Status release(std::span<const vmem_range> ranges, void* stream) { return release(ranges, stream, stream); }
  core::Status release(std::span<const vmem_range> ranges, void* stream, void* end, bool knows_access = false) {
    return releases_.release(ranges, stream, end, knows_access);
  }
  core::Status ask(std::span<const vmem_range> ranges, int location, void* stream, Ask* ask);
  void withdraw(std::span<const vmem_range> ranges, Ask*ask), wake_asked();
  core::Status check_stream(int location, void* stream);
  // open_range.cpp: for kernels of device d; range.access: what they do.
  core::Status open_range(const vmem_range& range, int d, uint64_t budget, OpenRange* out);
  void close_range(OpenRange* range);
  // .. leases.cpp: of leases by an Ask that tells of stores, before they end.
  void not_changed(std::span<const vmem_range> ranges, int d);
  Loans& loans() { return loans_; }  // of blocks of such a range to its kernels
  // export.cpp
  core::Status export_range(const void* ptr, size_t size, device::Export how, int* descriptor);
  core::Status evict(const void* ptr, size_t size, int location);
  core::Status sync(const void* ptr, size_t size);
  core::Status query(const void* ptr, size_t size, vmem_residency* out);
  void stats(struct vmem_stats* out);
  core::Status device_stats(int device, struct vmem_device_stats* out);
  void census(size_t max_regions, Census* out);
  void look_for_loss() {
    gpus_.look_for_loss();
  }  // setting debug, at exit: asks each device in use whether it is lost, and says so

  core::Status set_host_budget(uint64_t bytes);    // -EBUSY: live leases hold more
  core::Status set_device_budget(uint64_t bytes);  // .. -ENOMEM: above what some device has
  void set_readahead(uint64_t bytes), set_space_budget(uint64_t bytes), set_checksum(bool on),
      set_neighbours(unsigned percent);
  void set_staging_share(unsigned percent), set_fault_timeout(unsigned ms), set_device_reserve(uint64_t bytes);
  core::Status flush_shared(), flush_host();  // for exit(): changed blocks of shared files; host: what needs no device
  void shutdown();                            // frees every region, whatever holds it
  bool has_regions();

  std::string check();  // tests: recounts tables, budget and leases; empty: all is right, and nothing is in flight
  core::Counters& counters() { return counters_; }
  trap::Trap& trap() { return *trap_; }

 private:
  using Lock = core::BigLock;

  // pager.cpp
  core::Status check_location(int location, bool allow_ssd) const;
  uint64_t pages(uint8_t pool) const VMEM_LOCKED override;
  void reserve_queues(size_t moves) VMEM_LOCKED override;
  void leaves(Region& r, core::BlockIndex b) VMEM_LOCKED override { evictor_.leaves(r, b); }
  void host_is_short() VMEM_LOCKED override;
  std::optional<uint8_t> short_of_staging(uint8_t first) VMEM_LOCKED override { return supply_.is_short(first); }
  bool evict_copy(core::ResidentId copy) VMEM_LOCKED override { return supply_.evict_copy(copy); }
  std::byte* staging_frame(const Region& r, size_t keep) VMEM_LOCKED override { return supply_.frame(r, keep); }

  // tables.cpp
  bool reserve_blocks(Lock& lock, Region& r) VMEM_LOCKED;
  void came_free(DeferredWork& after) VMEM_LOCKED override;
  void pump(Lock& lock) VMEM_LOCKED;
  void tunables_changed() VMEM_UNLOCKED override;

  // leases.cpp, hints.cpp, sync.cpp, regions.cpp
  bool start_fills(Region& r, core::BlockIndex* next, core::BlockIndex last, After& after) VMEM_LOCKED;
  core::Status bring(Lock& lock, Region& r, core::BlockIndex b, unsigned access, const Ask* ask) VMEM_LOCKED;
  core::Status advise_device(Lock& lock, const SpanOf& span, device::Advice what, int location, bool set) VMEM_LOCKED;
  core::Status drop_contents(const void* ptr, size_t size) VMEM_UNLOCKED;
  core::Status drop_block(Lock& lock, Region& r, core::BlockIndex b, bool* skipped) VMEM_LOCKED;
  core::Status write_out(Lock& lock, Region& r, core::BlockIndex first, core::BlockIndex last, bool keep,
                         Sweep* sweep) VMEM_LOCKED;
  core::Status write_for_free(Lock& lock, Region& r, bool force) VMEM_LOCKED;
  core::Status sync_blocks(Lock& lock, const SpanOf& span, bool* skipped) VMEM_LOCKED;
  core::Status flush_file(Lock& lock, Region& r) VMEM_LOCKED;
  core::Status write_under_leases(Lock& lock) VMEM_LOCKED;
  core::Status make(const NewRegion& what, void** ptr, uint64_t mark) VMEM_UNLOCKED;
  core::Status device_block(const NewRegion& what, size_t* out) VMEM_UNLOCKED;
  void forget_region(Region& r) VMEM_LOCKED;
  bool serve_departure(Lock& lock) VMEM_LOCKED override;
  void keep_frames(Region& r) VMEM_UNLOCKED;
  void finish_kernels(Lock& lock, Region& r) VMEM_LOCKED;
  core::Status charge_region(Lock& lock, Region& r, uint64_t mark) VMEM_LOCKED;
  void credit_region(Region& r) VMEM_LOCKED;

  // hints.cpp
  bool serve_stream_hints(Lock& lock) VMEM_LOCKED override;
  bool hints_wait_for_streams() VMEM_LOCKED override { return !queues_.stream_hints.empty(); }
  core::Status mark_stream(void* stream, int location, device::Ticket* out) VMEM_UNLOCKED;
  core::Status start_hint(const SpanOf& span, int location, After& after) VMEM_LOCKED;

  bool own_page_tables() const { return gpus_.own_page_tables(); }

  // export.cpp
  core::Status exported_from(const SpanOf& span, int* device) VMEM_LOCKED;

  std::unique_ptr<trap::Trap> trap_;
  std::unique_ptr<store::Engine> engine_;
  std::unique_ptr<store::Space> space_;
  std::unique_ptr<device::Devices> devices_;  // null: no device tier
  Config config_;
  core::Counters counters_;
  HostBudget budget_ VMEM_GUARDED_BY(core::big_lock);
  FramePool frames_ VMEM_GUARDED_BY(core::big_lock);
  StagingPools staging_ VMEM_GUARDED_BY(core::big_lock);
  Queues queues_ VMEM_GUARDED_BY(core::big_lock);
  BlockMap map_;
  Gpus gpus_;
  WriteBackState writes_ VMEM_GUARDED_BY(core::big_lock);
  ProgressClock progress_clock_;
  ShownCopies shown_ VMEM_GUARDED_BY(core::big_lock);
  HostReserve reserve_ VMEM_GUARDED_BY(core::big_lock);
  TableCharges tables_ VMEM_GUARDED_BY(core::big_lock);
  const Shared shared_;
  LeaseGrants grants_;
  DeviceBlocks blocks_;
  MemoryPressure pressure_;
  FailedBlocks failed_;
  MemoryWaits waits_;
  Speculation speculation_ VMEM_GUARDED_BY(core::big_lock);
  EvictRequests evict_requests_ VMEM_GUARDED_BY(core::big_lock);
  StoreReader reader_;
  Installer installer_;
  PageIn page_in_;
  ReadAhead read_ahead_;
  Isolator isolator_;
  StoreWriter writer_;
  WriteBack write_back_;
  StagingSupply supply_;
  PendingReleases releases_;
  Holes holes_;
  Migrator migrator_;
  Demoter demoter_;
  RangeDemoter range_demoter_;
  Evictor evictor_;
  Loans loans_;
  DeviceViews views_;
  DeviceRoom device_room_;
  Promoter promoter_;
  Arrivals arrivals_;
  ShownFiles shown_files_;
  DeviceAcquires device_acquires_;
  DeviceWorkers workers_;
  FaultService faults_;

  Sums sums_ VMEM_GUARDED_BY(core::big_lock);
  // As it was set: config_ has what is in force.
  uint64_t wanted_readahead_ VMEM_GUARDED_BY(core::big_lock) = 0;
  unsigned wanted_timeout_ms_ VMEM_GUARDED_BY(core::big_lock) = 0;
};

}  // namespace vmem::pager
