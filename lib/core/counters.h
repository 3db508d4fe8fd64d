// Counters of the whole runtime. Relaxed atomics: each counter is exact, but a set of them is not a
// snapshot.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/histogram.h"

namespace vmem::core {

struct Counters {
  std::atomic<uint64_t> faults{0}, fault_ns_total{0}, fault_ns_max{0};
  std::atomic<uint64_t> soft_faults{0}, write_protect_faults{0};
  std::atomic<uint64_t> read_bytes{0}, write_bytes{0}, background_write_bytes{0};
  std::atomic<uint64_t> evictions{0}, clean_drops{0};
  std::atomic<uint64_t> prefetched_blocks{0}, prefetch_hits{0}, prefetch_wasted{0}, fault_around_blocks{0};
  std::atomic<uint64_t> host_to_device_bytes{0}, device_to_host_bytes{0};
  std::atomic<uint64_t> io_errors{0}, checksum_errors{0}, lost_blocks{0};
  std::atomic<uint64_t> zero_fills{0}, copied_bytes{0};
  std::atomic<uint64_t> lease_blocks{0}, lease_hits{0};  // blocks leased by acquires; those already in place
  std::atomic<uint64_t> swept_blocks{0};                 // looked at by sync, evict, free and exit
  Histogram fault_ns;                                    // the times of fault_ns_total
  Histogram move_ns[kWays];                              // from claiming a block to its arrival

  void fault_took(uint64_t ns) {
    fault_ns_total.fetch_add(ns, std::memory_order_relaxed);
    fault_ns.add(ns);
    uint64_t seen = fault_ns_max.load(std::memory_order_relaxed);
    while (seen < ns && !fault_ns_max.compare_exchange_weak(seen, ns, std::memory_order_relaxed)) {
    }
  }
};

inline void add(std::atomic<uint64_t>& counter, uint64_t n = 1) {
  counter.fetch_add(n, std::memory_order_relaxed);
}

}  // namespace vmem::core
