// Writes shared files at exit, when no later call can report a failure. Writes changed blocks
// whatever leases they are under, and logs changes that did not reach their file.
//
// - Blocks that can be written without a wait come first.
// - A wait ends when nothing has gone on for the time-out, so a device that never answers cannot
//   hold up the exit.
#pragma once

#include <span>

#include "core/inplace_vector.h"
#include "pager/account/device_set.h"
#include "pager/calls/range_flush.h"

namespace vmem::pager {

struct Calls;
struct HostTier;

class ExitFlush {
 public:
  ExitFlush(PagerContext& ctx, Calls& calls);

  // Writes blocks that need no device. Comes first; flush_shared() tries failed blocks again and
  // logs their failure.
  core::Status flush_host() VMEM_UNLOCKED;
  // Returns the first failure.
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

  PagerContext& ctx_;
  HostTier& host_;
  Calls& calls_;
};

}  // namespace vmem::pager
