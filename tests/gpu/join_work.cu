#include <cuda_runtime.h>

#include "join_work.h"
#include "vmem/device.cuh"

namespace vmem::gpu {

namespace {

constexpr uint64_t kPatience = 10000000000, kLongest = 30000000000;  // ns
constexpr unsigned kBlocks = 1056;                                   // thread blocks of 256

__global__ void __launch_bounds__(256, 3)
    asking_kernel(device_region<Tuple> tuples, JoinWork w, unsigned groups, PagingResult* result) {
  warp_group<Tuple> group(tuples, kPatience, kLongest);
  const unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const size_t each = (w.count + groups - 1) / groups, first = warp * each;
  if (warp >= groups || first >= w.count) return;
  const auto ranges = [&w, first](size_t i) {
    const uint64_t bucket = hash_of(w.keys[first + i]) / 16;
    return elements{w.firsts[bucket], w.firsts[bucket + 1] - w.firsts[bucket]};
  };
  const auto look = [&w, first](size_t i, const Tuple* at, size_t, size_t n, uint32_t lane, uint32_t lanes) {
    const uint64_t key = w.keys[first + i];
    for (size_t k = lane; k < n; k += lanes)
      if (at[k].key == key) w.out[first + i] = at[k].payload;
  };
  const Gathered got = group.visit(ranges, min(each, w.count - first), kBucketMost, look);
  if (!got && threadIdx.x % 32 == 0) atomicAdd_system(&result->refused[static_cast<unsigned>(got.answer) % 16], 1ull);
}

// One thread per key, as joins of tables that fit are written.
__global__ void plain_kernel(const Tuple* tuples, JoinWork w, const uint64_t* slots) {
  const size_t threads = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < w.count; i += threads) {
    const uint64_t key = w.keys[i], bucket = hash_of(key) / 16;
    uint64_t found = 0;
    for (uint32_t k = w.firsts[bucket], end = w.firsts[bucket + 1]; k < end && found == 0; ++k)
      if (tuples[k].key == key) found = tuples[k].payload;
    w.out[slots == nullptr ? i : slots[i]] = found;
  }
}

__global__ void check_kernel(JoinWork w, PagingResult* result) {
  unsigned long long wrong = 0;
  const size_t threads = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < w.count; i += threads)
    wrong += w.out[i] != expected_of(w.keys[i]);
  if (wrong != 0) atomicAdd_system(&result->wrong, wrong);
}

cudaStream_t of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

}  // namespace

void load_joining() {
  cudaFuncAttributes ignored;
  cudaFuncGetAttributes(&ignored, asking_kernel);
  cudaFuncGetAttributes(&ignored, plain_kernel);
  cudaFuncGetAttributes(&ignored, check_kernel);
}

void probe_asking(void* stream, const vmem_kernel_view& tuples, const JoinWork& work, unsigned groups,
                  PagingResult* result) {
  asking_kernel<<<(groups + 7) / 8, 256, 0, of(stream)>>>(device_region<Tuple>(tuples), work, groups, result);
}

void probe_plain(void* stream, const Tuple* tuples, const JoinWork& work, const uint64_t* slots) {
  plain_kernel<<<kBlocks, 256, 0, of(stream)>>>(tuples, work, slots);
}

void check_probes(void* stream, const JoinWork& work, PagingResult* result) {
  check_kernel<<<kBlocks, 256, 0, of(stream)>>>(work, result);
}

}  // namespace vmem::gpu
