#include <cuda_runtime.h>

#include "paging_work.h"
#include "vmem/device.cuh"

namespace vmem::gpu {

namespace {

constexpr uint64_t kPatience = 10000000000, kLongest = 30000000000;  // ns

__device__ uint64_t now() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__device__ size_t block_words(const device_region<uint32_t>& region) {
  return (size_t{1} << region.view().shift) / sizeof(uint32_t);
}

__device__ uint32_t stamp(uint32_t block, uint32_t version, uint32_t at) {
  // A block that was never stored to is zeros.
  return version == 0 ? 0 : (block * 2654435761u ^ version * 40503u) + at * 2246822519u;
}

__device__ uint32_t mix(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// A lock for several readers or one writer. It never waits: a thread that has a pin or a pending
// request must not.
__device__ bool try_lock(unsigned* lock, bool alone) {
  unsigned has = alone ? 0 : *const_cast<volatile unsigned*>(lock);
  for (;;) {
    if (has == ~0u || (alone && has != 0)) return false;
    const unsigned found = atomicCAS(lock, has, alone ? ~0u : has + 1);
    if (found == has) {
      __threadfence();
      return true;
    }
    has = found;
  }
}
__device__ void unlock(unsigned* lock, bool alone) {
  __threadfence();
  if (alone) {
    atomicExch(lock, 0);
  } else {
    atomicSub(lock, 1);
  }
}

__device__ void note(PagingResult* result, Answer answer, uint64_t took) {
  if (answer == Answer::present) {
    atomicAdd_system(&result->turns, 1ull);
  } else {
    atomicAdd_system(&result->refused[static_cast<unsigned>(answer) % 16], 1ull);
  }
  atomicMax_system(&result->slowest_ns, static_cast<unsigned long long>(took));
}

__global__ void soak_kernel(device_region<uint32_t> region, unsigned* state, uint64_t ns, unsigned turns, unsigned seed,
                            bool may_store, PagingResult* result) {
  __shared__ unsigned first, count, versions[2], stores, go_on;
  block_group<uint32_t> group(region, kPatience, kLongest);
  const size_t all = block_words(region);
  const unsigned blocks = static_cast<unsigned>(region.size() / all);
  const uint64_t end = now() + ns;
  uint32_t random = mix(seed * 9781 + blockIdx.x * 6271 + 1);
  for (unsigned turn = 0; turn < turns; ++turn) {
    __syncthreads();
    if (threadIdx.x == 0) {
      go_on = now() < end;
      random = mix(random + turn);
      count = random % 8 == 0 && blocks > 1 ? 2 : 1;
      stores = may_store && (random >> 3) % 2 == 0;
      first = (random >> 4) % (blocks - count + 1);
      unsigned had = 0;
      while (had < count && try_lock(&state[2 * (first + had) + 1], stores != 0)) ++had;
      if (had < count) {
        while (had > 0) unlock(&state[2 * (first + --had) + 1], stores != 0);
        atomicAdd_system(&result->skipped, 1ull);
        count = 0;
      }
      for (unsigned i = 0; i < count; ++i) versions[i] = *const_cast<volatile unsigned*>(&state[2 * (first + i)]);
    }
    __syncthreads();
    if (!go_on) {
      if (threadIdx.x == 0)
        for (unsigned i = 0; i < count; ++i) unlock(&state[2 * (first + i) + 1], stores != 0);
      return;
    }
    if (count == 0) continue;
    const uint64_t before = now();
    {
      auto pin = group.acquire(first * all, count * all, stores != 0 ? Intent::write : Intent::read);
      if (threadIdx.x == 0) note(result, pin.answer(), now() - before);
      if (pin) {
        unsigned wrong = 0;
        for (unsigned i = 0; i < count; ++i)
          for (size_t k = threadIdx.x; k < all; k += blockDim.x)
            wrong += pin[i * all + k] != stamp(first + i, versions[i], static_cast<uint32_t>(k));
        if (wrong != 0) atomicAdd_system(&result->wrong, static_cast<unsigned long long>(wrong));
        if (stores != 0) {
          for (unsigned i = 0; i < count; ++i)
            for (size_t k = threadIdx.x; k < all; k += blockDim.x)
              pin[i * all + k] = stamp(first + i, versions[i] + 1, static_cast<uint32_t>(k));
          if (threadIdx.x == 0) {
            for (unsigned i = 0; i < count; ++i) state[2 * (first + i)] = versions[i] + 1;
            atomicAdd_system(&result->stores, 1ull);
          }
        }
      }
    }
    __syncthreads();
    if (threadIdx.x == 0)
      for (unsigned i = 0; i < count; ++i) unlock(&state[2 * (first + i) + 1], stores != 0);
  }
}

template <typename Group>
__device__ void visit_list(Group& group, const unsigned* state, const unsigned* list, unsigned count, unsigned* cursor,
                           size_t words, size_t each, unsigned me, unsigned all, PagingResult* result, bool warp) {
  __shared__ unsigned shared;
  for (;;) {
    unsigned i = 0;
    if (me == 0) i = atomicAdd(cursor, 1);
    if (warp) {
      i = __shfl_sync(0xffffffffu, i, 0);
    } else {
      __syncthreads();
      if (me == 0) shared = i;
      __syncthreads();
      i = shared;
    }
    if (i >= count) return;
    const unsigned b = list[i];
    const uint64_t before = now();
    auto pin = group.acquire(size_t{b} * each, each, Intent::read);
    if (me == 0) note(result, pin.answer(), now() - before);
    if (!pin) continue;
    const unsigned version = state[2 * b];
    unsigned wrong = 0;
    for (size_t k = me; k < words; k += all) wrong += pin[k] != stamp(b, version, static_cast<uint32_t>(k));
    if (wrong != 0) atomicAdd_system(&result->wrong, static_cast<unsigned long long>(wrong));
  }
}

__global__ void visit_kernel(device_region<uint32_t> region, const unsigned* state, const unsigned* list,
                             unsigned count, unsigned* cursor, bool warps, size_t words, PagingResult* result) {
  if (warps) {
    warp_group<uint32_t> group(region, kPatience, kLongest);
    visit_list(group, state, list, count, cursor, words, block_words(region), threadIdx.x % 32, 32, result, true);
  } else {
    block_group<uint32_t> group(region, kPatience, kLongest);
    visit_list(group, state, list, count, cursor, words, block_words(region), threadIdx.x, blockDim.x, result, false);
  }
}

__global__ void pin_kernel(device_region<uint32_t> region, unsigned times, PagingResult* result) {
  thread_group<uint32_t> group(region, kPatience, kLongest);
  for (unsigned i = 0; i < times; ++i) {
    auto pin = group.acquire(0, block_words(region), Intent::read);
    if (!pin) note(result, pin.answer(), 0);
  }
}

__global__ void wrong_kernel(device_region<uint32_t> region, bool writable, unsigned frames, unsigned* answers) {
  thread_group<uint32_t> group(region, kPatience, kLongest);
  answers[0] = static_cast<unsigned>(group.acquire(region.size(), 1).answer());
  answers[1] = static_cast<unsigned>(group.acquire(0, size_t{frames + 1} * block_words(region)).answer());
  answers[2] = writable ? static_cast<unsigned>(Answer::read_only)
                        : static_cast<unsigned>(group.acquire(0, 1, Intent::write).answer());
  auto pin = group.acquire(0, 1);
  answers[3] = static_cast<unsigned>(pin.answer());
  answers[4] = static_cast<unsigned>(group.acquire(block_words(region), 1).answer());
}

// Sums all words, `each` at a time, each time under its own pin; or those of plain memory (words).
__global__ void sum_kernel(device_region<uint32_t> region, const uint32_t* words, size_t count, size_t each,
                           PagingResult* result) {
  __shared__ unsigned sum;
  block_group<uint32_t> group(region, kPatience, kLongest);
  uint32_t mine = 0;
  const auto add = [&](const uint32_t* from) {
    const auto* const at = reinterpret_cast<const uint4*>(from);
#pragma unroll 8
    for (size_t k = threadIdx.x; k < each / 4; k += blockDim.x) {
      const uint4 some = at[k];
      mine += some.x ^ some.y ^ some.z ^ some.w;
    }
  };
  for (size_t i = blockIdx.x; i < count / each; i += gridDim.x) {
    if (words != nullptr) {
      add(words + i * each);
    } else if (auto pin = group.acquire(i * each, each)) {
      add(pin.data());
    } else if (threadIdx.x == 0) {
      note(result, pin.answer(), 0);
    }
  }
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, mine);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd_system(&result->sum, static_cast<unsigned long long>(sum));
}

__global__ void nothing_kernel() {}

cudaStream_t of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

}  // namespace

void soak(void* stream, const vmem_kernel_view& view, unsigned* state, unsigned groups, uint64_t ns, unsigned turns,
          unsigned seed, bool stores, PagingResult* result) {
  soak_kernel<<<groups, 256, 0, of(stream)>>>(device_region<uint32_t>(view), state, ns, turns, seed, stores, result);
}

void visit(void* stream, const vmem_kernel_view& view, const unsigned* state, const unsigned* list, unsigned count,
           unsigned* cursor, unsigned groups, bool warps, size_t words, PagingResult* result) {
  visit_kernel<<<groups, warps ? 32 : 512, 0, of(stream)>>>(device_region<uint32_t>(view), state, list, count, cursor,
                                                            warps, words, result);
}

void pin_again(void* stream, const vmem_kernel_view& view, unsigned groups, unsigned times, PagingResult* result) {
  pin_kernel<<<groups, 1, 0, of(stream)>>>(device_region<uint32_t>(view), times, result);
}

void sum(void* stream, const vmem_kernel_view& view, const void* plain, size_t bytes, size_t each, unsigned groups,
         unsigned threads, PagingResult* result) {
  sum_kernel<<<groups, threads, 0, of(stream)>>>(device_region<uint32_t>(view), static_cast<const uint32_t*>(plain),
                                                 bytes / 4, each / 4, result);
}

void nothing(void* stream) {
  nothing_kernel<<<1, 1, 0, of(stream)>>>();
}

void load_paging() {
  cudaFuncAttributes attributes;
  cudaFuncGetAttributes(&attributes, soak_kernel);
  cudaFuncGetAttributes(&attributes, visit_kernel);
  cudaFuncGetAttributes(&attributes, pin_kernel);
  cudaFuncGetAttributes(&attributes, sum_kernel);
  cudaFuncGetAttributes(&attributes, wrong_kernel);
  cudaFuncGetAttributes(&attributes, nothing_kernel);
}

void ask_wrong(void* stream, const vmem_kernel_view& view, bool writable, unsigned frames, unsigned* answers) {
  wrong_kernel<<<1, 1, 0, of(stream)>>>(device_region<uint32_t>(view), writable, frames, answers);
}

}  // namespace vmem::gpu
