// The devices: what blocks may have of the memory of each one, what is on its way there, and whether it is lost.
//
//   a device has a budget from its first use on; charged for it are the blocks that tables have there, leased are those
//   under leases there, and no more is charged than its limit unless that was lowered
//   what is lost is so for ever, and was said once; until `rescue` is taken back, host memory may have the last copies
//   of its blocks
//
// Called under the pager's lock, but for what says otherwise. Calls of the devices are made without it.
#pragma once

#include <string>
#include <vector>

#include "core/big_lock.h"
#include "device/device.h"
#include "pager/block/block_map.h"
#include "pager/block/config.h"
#include "pager/block/transition.h"

namespace vmem::pager {

class DeviceSet {
 public:
  // devices: null: there is no device tier.
  DeviceSet(device::Devices* devices, BlockMap& map, const Config& config)
      : devices_(devices),
        map_(map),
        config_(config),
        gpus_(devices != nullptr ? static_cast<size_t>(devices->count()) : 0) {}
  DeviceSet(const DeviceSet&) = delete;
  DeviceSet& operator=(const DeviceSet&) = delete;

  size_t size() const VMEM_LOCKS(no_thread_safety_analysis) { return gpus_.size(); }  // any thread: it never changes
  bool empty() const { return size() == 0; }
  DeviceState& operator[](size_t d) VMEM_LOCKED { return gpus_[d]; }
  const DeviceState& operator[](size_t d) const VMEM_LOCKED { return gpus_[d]; }
  auto begin() VMEM_LOCKED { return gpus_.begin(); }
  auto end() VMEM_LOCKED { return gpus_.end(); }

  // They have page tables of their own: the region is the trap's, whatever they have of it. There is a device tier.
  bool own_page_tables() const { return devices_->cpu_view() == device::CpuView::split; }

  // The workers have something to do.
  core::EventCount& work() { return work_; }

  // The first use of a device makes its context and settles its budget. Blocks for the driver.
  core::Status use(int d) VMEM_UNLOCKED;
  // Some call failed, and the device was asked then: if it is lost, that is said, once.
  void saw_loss(int d, const core::Status& health) VMEM_LOCKED;
  // May work of the device be ordered with the stream? It is in use afterwards.
  core::Status check_stream(int d, void* stream) VMEM_UNLOCKED;
  // What no block has of the device's memory, and the next can have.
  uint64_t kept(int d) VMEM_UNLOCKED;
  // Each device in use is asked whether it is lost.
  void look_for_loss() VMEM_UNLOCKED;
  // A block was refused memory of the device, which is not charged with it any more: what is there makes room for
  // others from now on, until somebody finds out that there is more. kept: what no block has of the device's memory.
  void follow_down(int d, uint64_t kept) VMEM_LOCKED;

  // Tests: nothing is in flight. Recounts tables and leases; what is wrong, empty: nothing.
  std::string check() VMEM_LOCKED;

 private:
  device::Devices* const devices_;
  BlockMap& map_;
  const Config& config_;
  std::vector<DeviceState> gpus_ VMEM_GUARDED_BY(core::big_lock);
  core::EventCount work_;
};

// A budget that somebody gives a device whose smallest blocks have so much.
core::Status holds_a_block(uint64_t device_budget, uint64_t block);

}  // namespace vmem::pager
