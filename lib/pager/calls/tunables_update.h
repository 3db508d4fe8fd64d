// Settings that may change while the pager runs, by a call or by an administrator of the module.
//
// - PagerContext::tunables has the values in force. For read-ahead and the time-out, that is the
//   smaller of the setting and the module's limit.
// - A budget is not set below what live leases hold, nor host_budget below what the present regions
//   need.
#pragma once

#include "pager/host/fault_handler.h"
#include "pager/lease/stream_releases.h"
#include "pager/tier/promoter.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;
struct HostTier;
struct LeaseRoom;

class TunablesUpdate {
 public:
  TunablesUpdate(PagerContext& ctx, Calls& calls);

  Status set_host_budget(uint64_t bytes) VMEM_UNLOCKED;    // -EBUSY: leases or regions need more
  Status set_device_budget(uint64_t bytes) VMEM_UNLOCKED;  // -EBUSY: leases hold more; -ENOMEM: a device has less
  void set_device_reserve(uint64_t bytes) VMEM_UNLOCKED;
  void set_space_budget(uint64_t bytes) VMEM_UNLOCKED;
  void set_readahead(uint64_t bytes) VMEM_UNLOCKED;
  void set_fault_timeout(unsigned ms) VMEM_UNLOCKED;
  void set_staging_share(unsigned percent) VMEM_UNLOCKED;
  void set_writeback(uint64_t interval_ns, uint64_t dirty_limit) VMEM_UNLOCKED;
  void set_peer_spill(unsigned percent) VMEM_UNLOCKED;
  void set_checksum(bool on);
  // Applies the module's limits, which may have changed.
  void follow_module() VMEM_UNLOCKED;

 private:
  PagerContext& ctx_;
  HostTier& host_;
  LeaseRoom& leases_;
  DeviceTier& tier_;
  // As set by calls.
  uint64_t wanted_readahead_ VMEM_GUARDED_BY(core::big_lock);
  unsigned wanted_timeout_ms_ VMEM_GUARDED_BY(core::big_lock);
};

}  // namespace vmem::pager
