// The devices: the memory that blocks may have on each, what is on its way there, and whether the
// device is lost.
//
// - A device has a budget from its first use on. Its charges are the blocks that tables have there,
//   and its leased bytes are the blocks under leases there. The charges exceed the limit only after
//   the limit was lowered.
// - A lost device stays lost; the log says so once. Until `rescue` is reset, host memory may have
//   the last copies of its blocks.
//
// Called under the pager's lock, unless the annotation says otherwise. Devices are called without
// it.
#pragma once

#include <string>
#include <vector>

#include "core/big_lock.h"
#include "device/cpu_gate.h"
#include "device/device.h"
#include "pager/block/block_map.h"
#include "pager/block/config.h"
#include "pager/block/transition.h"

namespace vmem::pager {

inline constexpr size_t kDriverLook = 128;   // blocks in one round of queries to the driver, some microseconds each
inline constexpr size_t kDriverPass = 8192;  // blocks passed over under one hold of the lock; most are elsewhere

class DeviceSet {
 public:
  // devices: null: there is no device tier.
  DeviceSet(device::Devices* devices, BlockMap& map, const Tunables& tunables)
      : devices_(devices),
        map_(map),
        tunables_(tunables),
        gpus_(devices != nullptr ? static_cast<size_t>(devices->count()) : 0) {}
  DeviceSet(const DeviceSet&) = delete;
  DeviceSet& operator=(const DeviceSet&) = delete;

  size_t size() const VMEM_LOCKS(no_thread_safety_analysis) { return gpus_.size(); }  // any thread; it never changes
  bool empty() const { return size() == 0; }
  DeviceState& operator[](size_t d) VMEM_LOCKED { return gpus_[d]; }
  const DeviceState& operator[](size_t d) const VMEM_LOCKED { return gpus_[d]; }
  auto begin() VMEM_LOCKED { return gpus_.begin(); }
  auto end() VMEM_LOCKED { return gpus_.end(); }

  // Whether the devices have page tables of their own. If so, the trap covers a region for its
  // whole life. Requires a device tier.
  device::CpuGate* cpu_gate() const { return devices_->cpu_gate(); }
  bool own_page_tables() const { return devices_->cpu_view() == device::CpuView::split; }

  // Wakes workers: there is something to do.
  core::EventCount& work() { return work_; }

  // Begins the use of a device, if it was not used before: makes its context and settles its
  // budget. Waits for the driver.
  core::Status use(int d) VMEM_UNLOCKED;
  // Call with the device's health after one of its calls failed. If the device is lost, notes that,
  // and says so once.
  void saw_loss(int d, const core::Status& health) VMEM_LOCKED;
  // Checks that work of the device may be ordered with the stream. The device is in use afterwards.
  core::Status check_stream(int d, void* stream) VMEM_UNLOCKED;
  // Returns the bytes of device memory that no block has and that are kept for the next.
  uint64_t kept(int d) VMEM_UNLOCKED;
  // Asks each device in use whether it is lost.
  void look_for_loss() VMEM_UNLOCKED;
  // The device refused memory to a block, which is not charged any more. Lowers the limit to what
  // blocks have, so that they make room for each other until the device is found to have more.
  // kept: as kept() returns it.
  void follow_down(int d, uint64_t kept) VMEM_LOCKED;

  // For tests, while nothing is in flight: recounts tables and leases. Returns what is wrong, or an
  // empty string.
  std::string check() VMEM_LOCKED;

 private:
  device::Devices* const devices_;
  BlockMap& map_;
  const Tunables& tunables_;
  std::vector<DeviceState> gpus_ VMEM_GUARDED_BY(core::big_lock);
  core::EventCount work_;
};

// Returns -EINVAL if the budget of a device holds no block of `block` bytes.
core::Status holds_a_block(uint64_t device_budget, uint64_t block);

// Checks a location that a caller gives. Returns -ENODEV if there is no such device, -EINVAL if the
// location is not accepted here. devices: how many there are.
core::Status check_location(int location, size_t devices, bool allow_ssd);

}  // namespace vmem::pager
