#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

namespace vmem::core {

// Tests: nanoseconds by which the clock has jumped, as it does while a process is stopped.
inline std::atomic<uint64_t> clock_jumped_ns{0};

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec) +
         clock_jumped_ns.load(std::memory_order_relaxed);
}

}  // namespace vmem::core
