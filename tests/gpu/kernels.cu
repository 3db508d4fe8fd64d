#include <cuda_runtime.h>

#include "kernels.h"

namespace vmem::gpu {

namespace {

__global__ void add_kernel(uint64_t* words, size_t count, uint64_t value) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) words[i] += value;
}

__global__ void sum_kernel(const uint64_t* words, size_t count, uint64_t* sum) {
  __shared__ unsigned long long total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (size_t i = threadIdx.x; i < count; i += blockDim.x) mine += words[i];
  atomicAdd(&total, mine);
  __syncthreads();
  if (threadIdx.x == 0) *sum = total;
}

__global__ void read_kernel(const uint64_t* words, size_t count, uint64_t* sink) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  uint64_t mine = 0;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) mine ^= words[i];
  if (sink != nullptr && mine == 0x123456789abcdef) *sink = mine;  // keeps the compiler from removing the loads
}

__global__ void stand_still_kernel(const uint32_t* gate) {
  while (*const_cast<const volatile uint32_t*>(gate) == 0) __nanosleep(1000);
}

__device__ uint64_t stamp(uint64_t index, uint64_t round) {
  uint64_t z = index * 0x9e3779b97f4a7c15u + round * 0xbf58476d1ce4e5b9u + 1;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  return z ^ (z >> 31);
}

__global__ void set_stamps_kernel(uint64_t* words, size_t count, uint64_t first, uint64_t round, size_t stride) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    if ((first + i) % stride == 0) words[i] = stamp(first + i, round);
  }
}

__global__ void check_stamps_kernel(const uint64_t* words, size_t count, uint64_t first, uint64_t round, size_t stride,
                                    unsigned long long* wrong) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  unsigned long long bad = 0;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    if ((first + i) % stride == 0) bad += words[i] != stamp(first + i, round);
  }
  if (bad != 0) atomicAdd_system(wrong, bad);
}

__global__ void check_zero_kernel(const uint64_t* words, size_t count, unsigned long long* wrong) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  unsigned long long bad = 0;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) bad += words[i] != 0;
  if (bad != 0) atomicAdd_system(wrong, bad);
}

unsigned blocks_for(size_t count) {
  const size_t blocks = (count + 255) / 256;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > 1024 ? 1024 : blocks);
}

}  // namespace

void add(void* stream, uint64_t* words, size_t count, uint64_t value) {
  add_kernel<<<blocks_for(count), 256, 0, static_cast<cudaStream_t>(stream)>>>(words, count, value);
}

void sum(void* stream, const uint64_t* words, size_t count, uint64_t* sum) {
  sum_kernel<<<1, 1024, 0, static_cast<cudaStream_t>(stream)>>>(words, count, sum);
}

void read_all(void* stream, const uint64_t* words, size_t count, uint64_t* sink) {
  read_kernel<<<blocks_for(count), 256, 0, static_cast<cudaStream_t>(stream)>>>(words, count, sink);
}

void stand_still(void* stream, const uint32_t* gate) {
  stand_still_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(gate);
}

void stand_everywhere(void* stream, const uint32_t* gate) {
  int device = 0, processors = 0, most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxThreadsPerMultiProcessor, device);
  const unsigned groups = 2 * static_cast<unsigned>(processors * most / 512);  // more groups than fit at once
  stand_still_kernel<<<groups, 512, 0, static_cast<cudaStream_t>(stream)>>>(gate);
}

void set_stamps(void* stream, uint64_t* words, size_t count, uint64_t first, uint64_t round, size_t stride) {
  set_stamps_kernel<<<blocks_for(count), 256, 0, static_cast<cudaStream_t>(stream)>>>(words, count, first, round,
                                                                                      stride);
}

void check_stamps(void* stream, const uint64_t* words, size_t count, uint64_t first, uint64_t round, size_t stride,
                  unsigned long long* wrong) {
  check_stamps_kernel<<<blocks_for(count), 256, 0, static_cast<cudaStream_t>(stream)>>>(words, count, first, round,
                                                                                        stride, wrong);
}

void check_zero(void* stream, const uint64_t* words, size_t count, unsigned long long* wrong) {
  check_zero_kernel<<<blocks_for(count), 256, 0, static_cast<cudaStream_t>(stream)>>>(words, count, wrong);
}

void load_all() {
  cudaFuncAttributes ignored;
  cudaFuncGetAttributes(&ignored, set_stamps_kernel);
  cudaFuncGetAttributes(&ignored, check_stamps_kernel);
  cudaFuncGetAttributes(&ignored, check_zero_kernel);
  cudaFuncGetAttributes(&ignored, add_kernel);
  cudaFuncGetAttributes(&ignored, sum_kernel);
  cudaFuncGetAttributes(&ignored, read_kernel);
  cudaFuncGetAttributes(&ignored, stand_still_kernel);
}

}  // namespace vmem::gpu
