// Histogram of times with power-of-two buckets. Relaxed atomics without a lock: for paths that take
// microseconds, never for a hit.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace vmem::core {

// Bucket 0 counts 0 ns. Bucket i counts times from 2^(i-1) ns to less than 2^i ns. The last bucket
// (from 4.6 minutes) counts all longer ones.
struct Histogram {
  static constexpr size_t kBuckets = 40;
  std::atomic<uint64_t> count[kBuckets] = {};
  std::atomic<uint64_t> sum_ns{0};

  static size_t bucket(uint64_t ns) { return std::min<size_t>(std::bit_width(ns), kBuckets - 1); }
  void add(uint64_t ns) {
    count[bucket(ns)].fetch_add(1, std::memory_order_relaxed);
    sum_ns.fetch_add(ns, std::memory_order_relaxed);
  }
};

// Directions in which a block's bytes move between tiers.
enum class Way : uint8_t { ssd_to_host, host_to_ssd, to_device, from_device, between_devices, count_, none = count_ };
inline constexpr size_t kWays = static_cast<size_t>(Way::count_);
inline constexpr const char* kWayNames[kWays] = {"ssd_to_host", "host_to_ssd", "to_device", "from_device",
                                                 "between_devices"};

}  // namespace vmem::core
