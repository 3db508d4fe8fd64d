// PeerMigrator moves blocks directly from one device to another: because a request wants them
// there, or because their own device has no room (spilled, DeviceReclaim).
//
// - A block in transition is charged to both devices, and belongs to its destination. When it comes
//   to rest it is on one of the two, and only that one is charged.
#pragma once

#include <span>

#include "device/device.h"
#include "pager/host/memory_waits.h"
#include "pager/host/page_in.h"
#include "pager/tier/device_blocks.h"

namespace vmem::pager {

struct DeviceTier;
struct HostTier;

class PeerMigrator {
 public:
  PeerMigrator(PagerContext& ctx, DeviceTier& tier);

  // Claims a block at rest on another device for a move to device d. Call it after
  // reserve_transition(), when device d has room.
  Transition* begin(Region& r, core::BlockIndex b, int d) VMEM_LOCKED;
  // Copies the batch to device d and brings each block to rest. The batch is in address order.
  // `by`: the device whose copy engines do it; if that is the source, all blocks must be on it.
  void run(std::span<Transition* const> batch, int d, int by) VMEM_UNLOCKED;
  // Does the same for blocks in DeviceState::incoming, and for those that arrive there, for one
  // turn.
  void run_waiting(int d) VMEM_UNLOCKED;

 private:
  class Line;
  void copy(std::span<Transition* const> batch, int d, int by) VMEM_UNLOCKED;
  void settle_all(std::span<Transition* const> moved, int d) VMEM_UNLOCKED;
  void settle(Transition* m, int d) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
