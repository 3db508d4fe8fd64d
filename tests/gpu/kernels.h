// Kernels of the GPU tests and the probe, callable from plain C++. They are asynchronous; stream is
// a cudaStream_t.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vmem::gpu {

// Does words[i] += value.
void add(void* stream, uint64_t* words, size_t count, uint64_t value);
// Sets *sum to the sum of words; *sum is pinned host memory. Uses one thread block: slow and
// simple.
void sum(void* stream, const uint64_t* words, size_t count, uint64_t* sum);
// Reads every word with the whole device; *sink is device memory or null.
void read_all(void* stream, const uint64_t* words, size_t count, uint64_t* sink);
// Sets words[i] = stamp(first + i, round) wherever (first + i) % stride == 0; stamp() as in
// tests/system/support.h.
void set_stamps(void* stream, uint64_t* words, size_t count, uint64_t first, uint64_t round, size_t stride);
// Adds the number of such words that differ to *wrong (pinned host memory).
void check_stamps(void* stream, const uint64_t* words, size_t count, uint64_t first, uint64_t round, size_t stride,
                  unsigned long long* wrong);
// Adds the number of words that are not 0 to *wrong.
void check_zero(void* stream, const uint64_t* words, size_t count, unsigned long long* wrong);
// Runs until *gate (pinned host memory) is not 0.
void stand_still(void* stream, const uint32_t* gate);
// Runs the same on every multiprocessor of the current device, with as many threads as fit.
void stand_everywhere(void* stream, const uint32_t* gate);
// Loads all kernels, so that no later first launch waits for another stream (lazy loading).
// Synchronises.
void load_all();

}  // namespace vmem::gpu
