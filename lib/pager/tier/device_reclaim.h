// DeviceReclaim makes room on a device, for requests that wait and for a budget that was lowered:
// it chooses which blocks leave and where they go.
//
// Spilled blocks leave first. The device's own blocks spill to a linked device with room; otherwise
// they go to host memory, or are dropped if their bytes are elsewhere too. A spilled block goes
// only to host memory: its own device just had no room for it, and its room comes free here as soon
// as any block's.
//
//   on_device ─> demoting, spilled: copied by this device's engines ─> on_device there, spilled
//   on_device, preferred on another: copied there, if it might spill ─> on_device there, its own
//   spilled ─> demoting, evicted: as any block ─> staged, stored, unpopulated
//   spilled ─> demoting, asked for where it was before: copied back ─> on_device there
//   spilled, leased or asked for where it is ─> that device's own
//
// - Only a request that waits for the room waits for a move to a peer. The move waits only for
//   copies and the driver, as a move to host memory does: it needs none of the peer's streams.
// - Reclaim begins with no block that is leased or whose region is being freed. A block that was
//   chosen and could not leave is admitted again.
//
// Called under the pager's lock.
#pragma once

#include <array>

#include "pager/lease/stream_releases.h"
#include "pager/tier/demoter.h"
#include "pager/tier/peer_migrator.h"

namespace vmem::pager {

struct DeviceTier;
struct LeaseRoom;

class DeviceReclaim {
 public:
  DeviceReclaim(PagerContext& ctx, DeviceTier& tier);

  // Makes room on device d for requests that wait, and while the device has more than its budget.
  // Drops the lock while it works. Returns false if there is room, or if no block can leave.
  bool make(Lock& lock, int d) VMEM_LOCKED;
  // Returns whether spilled blocks have to leave and could not yet: poll, since no event says when
  // they can.
  bool spilled_overstay() VMEM_LOCKED;

 private:
  bool has_room_for(int d, int n, uint64_t bytes, uint64_t now_ns) VMEM_LOCKED;
  int peer_of(int d, uint64_t bytes) VMEM_LOCKED;
  int home_with_room(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  bool worth_keeping_near(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  struct Need {
    bool there = false;
    uint64_t since_ns = 0;  // when the need arose, or when a block that was to stay last left
  };
  bool is_to_stay(const Region& r, core::BlockIndex b, int d) VMEM_LOCKED;
  void evict_spilled(int d, Batch& leaving) VMEM_LOCKED;
  bool spill(Region& r, core::BlockIndex b, Batch& spilling, int* peer) VMEM_LOCKED;
  void evict_own(int d, Batch& leaving, Batch& spilling, int* peer) VMEM_LOCKED;
  Transition* begin_leave_for_others(int d) VMEM_LOCKED;

  PagerContext& ctx_;
  LeaseRoom& leases_;
  DeviceTier& tier_;
  std::array<Need, device::kMaxDevices> needs_ VMEM_GUARDED_BY(core::big_lock);
};

}  // namespace vmem::pager
