// Room on a device, for those who wait for it and for a budget that has become smaller: what leaves, and where it goes.
//
// Spilled blocks leave first. Blocks of the device itself are spilled to another one that is linked and has room,
// else they go to host memory, or nowhere where their bytes are elsewhere too. A spilled block goes on to host memory
// only: its device has just had no room for it, and whoever waits here gets the room as soon as from any block.
//
//   on_device ─> demoting, spilled: copied to the other device, by this one's copy engines ─> on_device there, spilled
//   on_device, preferred on another: copied there, if it might be spilled ─> on_device there, its own
//   spilled ─> demoting, evicted: as any block ─> staged, stored, unpopulated
//   spilled ─> demoting, asked for where it was before: copied back ─> on_device there
//   spilled, leased or asked for where it is ─> that device's own
//
// Nobody waits for a move to a peer who does not wait for the room that it makes; and it waits for nothing but
// copies and the driver, as a move to host memory does: what comes to the peer needs none of its streams.
//
//   what is leased, or its region is being freed, is not begun with; one that was chosen and could not leave is
//   admitted again
//
// Called under the pager's lock.
#pragma once

#include <array>

#include "pager/lease/stream_releases.h"
#include "pager/tier/demoter.h"
#include "pager/tier/peer_migrator.h"

namespace vmem::pager {

class DeviceReclaim : private Shared {
 public:
  // requests: for promotion; under the lock.
  DeviceReclaim(const Shared& shared, device::Devices* devices, const PooledList<PromotionRequest>& requests,
                DeviceSet& gpus, StreamReleases& releases, Demoter& demoter, PeerMigrator& migrator)
      : Shared(shared),
        devices_(devices),
        requests_(requests),
        device_set_(gpus),
        releases_(releases),
        demoter_(demoter),
        peer_migrator_(migrator) {}

  // On device d for those who wait, and while its budget is below what it has. Locked on entry and on return, and not
  // meanwhile. False: there is room, or nothing can go.
  bool make(Lock& lock, int d) VMEM_LOCKED;
  // Spilled blocks have to leave, and could not yet: nobody tells when they can.
  bool spilled_overstay() VMEM_LOCKED;

 private:
  bool has_room_for(int d, int n, uint64_t bytes, uint64_t now_ns) VMEM_LOCKED;
  int peer_of(int d, uint64_t bytes) VMEM_LOCKED;
  int home_with_room(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  bool worth_keeping_near(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  struct Need {
    bool there = false;
    uint64_t since_ns = 0;  // it came, or something left for it that was not to stay
  };
  bool is_to_stay(const Region& r, core::BlockIndex b, int d) VMEM_LOCKED;
  void evict_spilled(int d, Batch& leaving) VMEM_LOCKED;
  bool spill(Region& r, core::BlockIndex b, Batch& spilling, int* peer) VMEM_LOCKED;
  void evict_own(int d, Batch& leaving, Batch& spilling, int* peer) VMEM_LOCKED;
  Transition* begin_leave_for_others(int d) VMEM_LOCKED;

  device::Devices* const devices_;
  const PooledList<PromotionRequest>& requests_;
  DeviceSet& device_set_;
  StreamReleases& releases_;
  Demoter& demoter_;
  PeerMigrator& peer_migrator_;
  std::array<Need, device::kMaxDevices> needs_ VMEM_GUARDED_BY(core::big_lock);
};

}  // namespace vmem::pager
