#include <cuda_runtime.h>

#include "gather_work.h"
#include "vmem/device.cuh"

namespace vmem::gpu {

namespace {

constexpr uint64_t kPatience = 10000000000, kLongest = 30000000000;  // ns

template <typename Group>
__device__ void gather_part(Group& group, const RowWork& work, size_t me, size_t all, bool leads,
                            PagingResult* result) {
  const size_t each = (work.count + all - 1) / all, first = me * each;
  if (first >= work.count) return;
  const size_t count = min(each, work.count - first);
  const Gathered got = group.gather(work.ids + first, count, work.words, work.out + first * work.words);
  if (leads && !got) atomicAdd_system(&result->refused[static_cast<unsigned>(got.answer) % 16], 1ull);
}

__global__ void __launch_bounds__(256, 3)
    asking_warps(device_region<uint32_t> region, RowWork work, unsigned groups, PagingResult* result) {
  warp_group<uint32_t> group(region, kPatience, kLongest);
  const unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (warp < groups) gather_part(group, work, warp, groups, threadIdx.x % 32 == 0, result);
}

__global__ void __launch_bounds__(256, 3)
    asking_blocks(device_region<uint32_t> region, RowWork work, PagingResult* result) {
  block_group<uint32_t> group(region, kPatience, kLongest);
  gather_part(group, work, blockIdx.x, gridDim.x, threadIdx.x == 0, result);
}

// Copies like gather, without paging.
__global__ void plain_kernel(const uint32_t* table, RowWork work, const uint64_t* slots) {
  const size_t warps = size_t{gridDim.x} * blockDim.x / 32;
  const uint64_t bytes = work.words * 4;
  for (size_t i = (size_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32; i < work.count; i += warps) {
    const size_t to = slots == nullptr ? i : slots[i];
    paging::copy_words<paging::Sixteen>(reinterpret_cast<uint64_t>(work.out) + to * bytes,
                                        reinterpret_cast<uint64_t>(table) + work.ids[i] * bytes, bytes,
                                        threadIdx.x % 32, 32);
  }
}

__global__ void check_kernel(RowWork work, PagingResult* result) {
  unsigned long long wrong = 0;
  const size_t all = work.count * work.words, step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < all; i += step)
    wrong += work.out[i] != row_word(work.ids[i / work.words] * work.words + i % work.words);
  if (wrong != 0) atomicAdd_system(&result->wrong, wrong);
}

__global__ void wrong_kernel(device_region<uint32_t> region, size_t rows, size_t words, uint32_t* out,
                             unsigned* answers) {
  __shared__ int64_t ids[64];
  __shared__ const uint32_t* pointers[64];
  block_group<uint32_t> group(region, kPatience, kLongest);
  if (threadIdx.x < 64) {
    ids[threadIdx.x] = threadIdx.x == 40 ? -1 : threadIdx.x == 50 ? static_cast<int64_t>(rows) : threadIdx.x;
    // Unaligned places: rows begin at any word.
    pointers[threadIdx.x] = region.data() + threadIdx.x * (words + 1) + 1;
  }
  __syncthreads();
  const Gathered outside = group.gather(ids, 64, words, out);
  const Gathered apart = group.gather(pointers, 64, words, out + 64 * words);
  auto pin = group.acquire(0);
  const Gathered held = group.gather(ids, 64, words, out);
  pin.release();
  const Gathered none = group.gather(ids, 0, words, out);
  if (threadIdx.x != 0) return;
  answers[0] = static_cast<unsigned>(outside.answer);
  answers[1] = static_cast<unsigned>(outside.row);
  answers[2] = static_cast<unsigned>(apart.answer);
  answers[3] = static_cast<unsigned>(pin.answer());
  answers[4] = static_cast<unsigned>(held.answer);
  answers[5] = static_cast<unsigned>(none.answer);
}

cudaStream_t of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

}  // namespace

void load_gathering() {
  cudaFuncAttributes ignored;
  cudaFuncGetAttributes(&ignored, asking_warps);
  cudaFuncGetAttributes(&ignored, asking_blocks);
  cudaFuncGetAttributes(&ignored, plain_kernel);
  cudaFuncGetAttributes(&ignored, check_kernel);
  cudaFuncGetAttributes(&ignored, wrong_kernel);
}

void gather_asking(void* stream, const vmem_kernel_view& view, const RowWork& work, unsigned groups, bool warps,
                   PagingResult* result) {
  const device_region<uint32_t> region(view);
  if (warps) {
    asking_warps<<<(groups + 7) / 8, 256, 0, of(stream)>>>(region, work, groups, result);
  } else {
    asking_blocks<<<groups, 256, 0, of(stream)>>>(region, work, result);
  }
}

void gather_plain(void* stream, const uint32_t* table, const RowWork& work, const uint64_t* slots) {
  plain_kernel<<<1056, 256, 0, of(stream)>>>(table, work, slots);
}

void check_rows(void* stream, const RowWork& work, PagingResult* result) {
  check_kernel<<<1056, 256, 0, of(stream)>>>(work, result);
}

void gather_wrong(void* stream, const vmem_kernel_view& view, size_t rows, size_t words, uint32_t* out,
                  unsigned* answers) {
  wrong_kernel<<<1, 96, 0, of(stream)>>>(device_region<uint32_t>(view), rows, words, out, answers);
}

}  // namespace vmem::gpu
