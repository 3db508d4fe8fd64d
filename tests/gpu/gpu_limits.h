// How much managed memory a test process may have alive. Unified memory beyond the memory of the
// card can hang the driver of the whole machine. Every program here calls this before it reserves
// memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace vmem::gpu {

inline constexpr uint64_t kMostManaged = uint64_t{8} << 30;

// Returns the number of bytes: the smaller of 8 GiB and an eighth of the free memory of the device
// that has the least free. 0: no device.
inline uint64_t managed_limit() {
  int devices = 0, current = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return 0;
  cudaGetDevice(&current);
  uint64_t limit = kMostManaged;
  for (int d = 0; d < devices; ++d) {
    size_t free_bytes = 0, total_bytes = 0;
    if (cudaSetDevice(d) != cudaSuccess || cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) return 0;
    if (free_bytes / 8 < limit) limit = free_bytes / 8;
  }
  cudaSetDevice(current);
  return limit;
}

// Ends the program if `bytes` exceed its limit of managed memory.
inline void require_managed(uint64_t bytes, uint64_t limit) {
  if (bytes <= limit) return;
  std::fprintf(stderr, "refused: %.2f GiB of managed memory wanted, the limit is %.2f GiB (8 GiB, or 1/8 of free)\n",
               static_cast<double>(bytes) / (1 << 30), static_cast<double>(limit) / (1 << 30));
  std::exit(2);
}

}  // namespace vmem::gpu
