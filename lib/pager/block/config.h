// The settings of a pager, and the objects that it is made of.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/clock.h"
#include "device/device.h"
#include "memory/frame_pool.h"
#include "memory/host_budget.h"
#include "memory/staging.h"
#include "memory/staging_pool_set.h"
#include "store/engine.h"
#include "store/space.h"
#include "trap/trap.h"

namespace vmem::pager {

using core::now_ns;
using memory::FramePool;
using memory::HostBudget;
using memory::Staging;
using memory::StagingGrowth;
using memory::StagingPool;
using memory::StagingPoolSet;
using memory::Use;

// Settings that stay as they are. Of three it has the first value, and another class the one in
// force: staging_share (StagingPoolSet), peer_spill_percent (SpilledBlocks), checksum (StoreReader).
struct Config {
  unsigned staging_share = 50;  // percent of host_budget
  unsigned io_depth = 16;
  uint64_t io_buffer_bytes = 0;  // held by the engine, part of host_budget
  unsigned evict_threads = 1;
  bool checksum = true;
  unsigned keep_ms = 400;  // unused memory goes back to the system after one to two times this
  bool allow_move = true;
  bool direct_io = true;
  std::vector<int> numa_nodes;
  bool auto_device_blocks = false;   // setting device_block_size is auto; else blocks have the devices' unit
  unsigned peer_spill_percent = 50;  // percent of a device's budget for blocks of other devices
};

// Settings that change while the pager runs: the values in force. Only TunablesUpdate changes them.
struct Tunables {
  uint64_t host_budget = 0;  // bytes
  uint64_t readahead_bytes = uint64_t{64} << 20;
  unsigned fault_timeout_ms = 10000;
  uint64_t writeback_interval_ns = 0;  // 0: nothing is written in the background
  uint64_t dirty_limit = 0;            // bytes; 0: DirtyBlocks::limit() chooses
  // Bytes on each device. 0: 0.8 of the memory that is free when it is first used; the limit in
  // force falls while others take that memory.
  uint64_t device_budget = 0;
  // Bytes: with less free on a device, no memory is kept there for blocks to come. None: 1/32 of
  // the device's memory.
  std::optional<uint64_t> device_reserve;
};

// The objects below the pager. It owns them; they outlive its threads.
struct Parts {
  std::unique_ptr<trap::Trap> trap;
  std::unique_ptr<store::Engine> engine;
  std::unique_ptr<store::Space> space;
  std::unique_ptr<device::Devices> devices;  // null: no device tier
};

}  // namespace vmem::pager
