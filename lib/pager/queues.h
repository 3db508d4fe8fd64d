// Who waits for the pager, what it was asked to do when it can, the sums of what it knows of, and its threads. Plain
// data under the pager's lock.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <thread>
#include <vector>

#include "core/types.h"
#include "pager/moves.h"
#include "pager/queue.h"
#include "pager/stream_leases.h"
#include "trap/trap.h"

namespace vmem::pager {

struct Queues {
  static constexpr size_t kMaxSpeculative = 1024;

  Queue<Wish> wishes;  // acquires first
  Queue<Departure> departures;
  StreamLeases endings;
  std::list<StreamHint> stream_hints;  // at most kMaxSpeculative; those looked at longest ago first
  uint64_t last_hint = 0;
};

struct Sums {
  uint64_t reserved_blocks = 0;  // of all regions
  uint64_t next_region_id = 1;
};

// The pager's own. stop and stop_devices are under its lock.
struct Threads {
  std::thread faults, renew;
  std::vector<std::thread> devices;
  bool stop = false, stop_devices = false;
  unsigned arriving = 0;    // devices' workers at what arrives. Under its lock
  bool ended_last = false;  // .. the last that may be at it has ended something, and begins something next
  std::atomic<bool> stop_faults{false};
  bool watching = false;  // the engine's serve faults, and there is no thread for them
};

// What the machine allows, and what was set: config has what is in force.
struct Machine {
  trap::Knobs knobs;  // zeros: there are none
  uint64_t wanted_readahead = 0;
  unsigned wanted_timeout_ms = 0;
};

}  // namespace vmem::pager
