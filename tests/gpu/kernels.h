// Kernels of the GPU tests and the probe, callable from plain C++. Asynchronous; stream is a cudaStream_t.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vmem::gpu {

// words[i] += value
void add(void* stream, uint64_t* words, size_t count, uint64_t value);
// *sum = sum of words; *sum is pinned host memory. One block: slow and simple.
void sum(void* stream, const uint64_t* words, size_t count, uint64_t* sum);
// Reads every word with the whole device; *sink is device memory or null.
void read_all(void* stream, const uint64_t* words, size_t count, uint64_t* sink);
// Runs until *gate (pinned host memory) is not 0.
void stand_still(void* stream, const uint32_t* gate);
// Loads all of them, so that no later first launch waits for another stream (lazy loading). Synchronises.
void load_all();

}  // namespace vmem::gpu
