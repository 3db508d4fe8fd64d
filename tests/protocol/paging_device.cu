// The group's side of the paging protocol as device code. Checks that it compiles, with each access
// as the instruction that the PTX memory model has for it; nothing runs it. Uses system scope,
// because the other side is the host and its copy engines.
#include <stddef.h>

#include <cstdint>

#ifndef __NVCC__  // clang without CUDA's headers
__device__ void __syncwarp(unsigned lanes = ~0u);
__device__ uint32_t __shfl_sync(unsigned lanes, uint32_t word, int from);
__device__ unsigned long long __shfl_xor_sync(unsigned lanes, unsigned long long word, int far);
__device__ unsigned __ballot_sync(unsigned lanes, int yes);
__device__ unsigned long long atomicMin(unsigned long long* word, unsigned long long value);
#endif
#include "vmem/device.cuh"

namespace {

using vmem::paging::DeviceAtomics;
using Table = vmem::paging::Table<DeviceAtomics>;
using vmem::paging::Answer;
using vmem::paging::Intent;

}  // namespace

// One warp for each index of the list: adds to the first word of a block, or of two blocks at once,
// or only asks.
extern "C" __global__ void paging_compiles(Table table, const uint32_t* list, unsigned* base, unsigned words) {
  const unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  vmem::paging::Group<DeviceAtomics> group(table, 1000000000);
  if (threadIdx.x % 32 == 0) {
    const uint32_t both[] = {list[warp], list[warp + 1]};
    group.prefetch(list[warp + 2]);
    if (group.acquire_all(both, 2, Intent::write) == Answer::present) {
      base[static_cast<size_t>(both[0]) * words] += base[static_cast<size_t>(both[1]) * words];
      group.release_all(both, 2);
    }
    if (group.try_acquire(list[warp], Intent::read) == Answer::present) group.release(list[warp]);
    if (group.acquire(list[warp], Intent::write) == Answer::present) group.release(list[warp]);
  }
}

// The groups of the public header: a thread, a warp and a thread block, each with its own scope.
template <typename Group>
__device__ void uses(const vmem::device_region<float>& region, size_t at) {
  Group group(region);
  group.prefetch(at + 1, 2);
  if (auto pin = group.acquire(at, 2, vmem::Intent::write)) pin[1] += *pin.data();
  auto pin = group.try_acquire(at);
  if (pin.answer() == vmem::Answer::not_yet) pin = group.acquire(at);
  pin.release();
}
template <typename Group>
__device__ void gathers(const vmem::device_region<float>& region, const int64_t* rows, const float* const* pointers,
                        float* to) {
  Group group(region);
  if (!group.gather(rows, 100, 32, to) || group.gather(pointers, 100, 32, to).row != 0) *to = 0;
  const auto ranges = [rows](size_t i) { return vmem::elements{static_cast<size_t>(rows[i]), i}; };
  const auto add = [to](size_t, const float* at, size_t, size_t n, uint32_t lane, uint32_t lanes) {
    for (size_t k = lane; k < n; k += lanes) to[k] += at[k];
  };
  if (!group.visit(ranges, 100, 99, add)) *to = 0;
}
extern "C" __global__ void classes_compile(vmem::device_region<float> region, size_t at, const int64_t* rows,
                                           const float* const* pointers, float* to) {
  uses<vmem::thread_group<float>>(region, at + threadIdx.x);
  uses<vmem::warp_group<float>>(region, at);
  uses<vmem::block_group<float>>(region, at);
  gathers<vmem::thread_group<float>>(region, rows, pointers, to);
  gathers<vmem::warp_group<float>>(region, rows, pointers, to);
  gathers<vmem::block_group<float>>(region, rows, pointers, to);
}
