// Frees regions: a region's memory goes after its last use, and its addresses go last.
//
// - While the region may still be used, the free is refused (-EBUSY). With force, it waits for the
//   work of devices as far as that ever ends, takes loans back, and writes what a shared file
//   lacks.
// - Changes that a file refuses keep its region, unless discard() or force is used.
// - From `dying` on, nothing of the region is begun. From `quiet` on, no thread has anything of it
//   in flight.
// - All that the region had is given back once: memory, extents, what RegionCreate charged,
//   addresses.
#pragma once

#include <array>

#include "pager/calls/sync.h"
#include "pager/tier/promoter.h"
#include "pager/tier/staging_loans.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;
struct HostTier;
struct LeaseRoom;

class RegionFree {
 public:
  RegionFree(PagerContext& ctx, Calls& calls);

  // force: frees it whatever holds it.
  core::Status destroy(void* ptr, bool force) VMEM_UNLOCKED { return end(ptr, force, nullptr); }
  // Frees the region even if its file refuses changes. Then returns -EIO: they are lost with the
  // region.
  core::Status discard(void* ptr) VMEM_UNLOCKED;
  // Frees every region, whatever holds it.
  void destroy_all() VMEM_UNLOCKED;

 private:
  using OnDevices = std::array<uint64_t, device::kMaxDevices>;  // bytes
  core::Status find(void* ptr, Region** out) VMEM_LOCKED;
  core::Status may_go(const Region& r) VMEM_LOCKED;
  core::Status end_uses(Lock& lock, Region& r, bool force) VMEM_LOCKED;
  core::Status check_unsealed(Lock& lock, Region& r) VMEM_LOCKED;
  // lost: changes that the file refuses go with the region, and *lost says so. Null: they keep the
  // region.
  core::Status end(void* ptr, bool force, core::Status* lost) VMEM_UNLOCKED;
  core::Status write_file(Lock& lock, Region& r, bool force, core::Status* lost) VMEM_LOCKED;
  void finish_kernels(Lock& lock, Region& r) VMEM_LOCKED;
  void drain(uint64_t used, uint64_t until_ns) VMEM_UNLOCKED;
  void become_quiet(Lock& lock, Region& r, bool force) VMEM_LOCKED;
  void forget(Region& r) VMEM_LOCKED;
  void keep_frames(Region& r) VMEM_UNLOCKED;
  void detach(Region& r) VMEM_UNLOCKED;
  void give_blocks_back(Lock& lock, Region& r, OnDevices* on_devices) VMEM_LOCKED;
  void give_memory_back(Region& r, core::BlockIndex b, OnDevices* on_devices) VMEM_LOCKED;
  core::Status give_managed_back(Region& r, OnDevices* on_devices) VMEM_UNLOCKED;
  void nobodys(OnDevices* on_devices) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  LeaseRoom& leases_;
  DeviceTier& tier_;
  Calls& calls_;
};

}  // namespace vmem::pager
