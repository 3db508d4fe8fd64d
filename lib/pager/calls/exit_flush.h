// Shared files at exit, when nobody will come back to say what failed: their changed blocks are written whoever leases
// them, and what did not reach them is logged.
//
//   what can be written without a wait for anybody comes first
//   a wait ends when nothing has gone on for the time-out: a device that never answers keeps nobody
//
#pragma once

#include <span>

#include "core/inplace_vector.h"
#include "pager/account/device_set.h"
#include "pager/calls/range_flush.h"

namespace vmem::pager {

class ExitFlush : private Shared {
 public:
  // devices: null: there is no device tier.
  ExitFlush(const Shared& shared, device::Devices* devices, DeviceSet& gpus, FailedBlocks& failed,
            RangeFlush& range_writer)
      : Shared(shared), devices_(devices), device_set_(gpus), failed_(failed), range_flush_(range_writer) {}

  // What needs no device, before all else. What fails is tried again, and said, by flush_shared().
  core::Status flush_host() VMEM_UNLOCKED;
  // The first failure.
  core::Status flush_shared() VMEM_UNLOCKED;

 private:
  struct LiveDevice;
  core::Status write_region(Lock& lock, Region& r, RangeScan* scan, bool again) VMEM_LOCKED;
  core::Status write_under_leases(Lock& lock) VMEM_LOCKED;
  core::Status write_leased(Lock& lock, Region& r, std::span<const LiveDevice> known, RangeScan* scan) VMEM_LOCKED;
  static bool concerns(const Region& r);
  static void find_live(const Region& r, core::InplaceVector<LiveDevice, device::kMaxDevices>* live,
                        core::BlockIndex* first);
  void drain_aside(LiveDevice* live) VMEM_UNLOCKED;
  void wait_for_ends(std::span<LiveDevice> live, uint64_t timeout_ms) VMEM_UNLOCKED;

  device::Devices* const devices_;
  DeviceSet& device_set_;
  FailedBlocks& failed_;
  RangeFlush& range_flush_;
};

}  // namespace vmem::pager
