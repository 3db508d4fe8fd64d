// Who waits for the pager, what it was asked to do when it can, the sums of what it knows of, and its threads. Plain
// data under the pager's lock.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <thread>
#include <vector>

#include "core/types.h"
#include "pager/moves.h"
#include "pager/queue.h"

namespace vmem::pager {

struct Queues {
  static constexpr size_t kMaxSpeculative = 1024;

  Queue<Wish> wishes;  // acquires first
  Queue<Departure> departures;
  std::list<StreamHint> stream_hints;  // at most kMaxSpeculative; those looked at longest ago first
  uint64_t last_hint = 0;
};

struct Sums {
  uint64_t reserved_blocks = 0;  // of all regions
  uint64_t next_region_id = 1;
};

// The devices' workers.
struct Threads {
  std::vector<std::thread> devices;
  bool stop_devices VMEM_GUARDED_BY(core::big_lock) = false;
  unsigned arriving VMEM_GUARDED_BY(core::big_lock) = 0;  // at what arrives
  // .. the last that may be at it has ended something, and begins something next
  bool ended_last VMEM_GUARDED_BY(core::big_lock) = false;
};

}  // namespace vmem::pager
