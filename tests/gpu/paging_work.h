// Kernels of kernel_paging_test: they page in what they access by themselves. Asynchronous; stream is a cudaStream_t.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vmem/vmem.h"

namespace vmem::gpu {

inline constexpr size_t kPagedBlock = size_t{2} << 20;  // of benchmarks; tests take any size

// In pinned host memory; kernels add to it.
struct PagingResult {
  unsigned long long wrong = 0;         // words
  unsigned long long turns = 0;         // acquires that succeeded
  unsigned long long stores = 0;        // .. and stored to every word
  unsigned long long skipped = 0;       // turns in which another group had the block
  unsigned long long refused[16] = {};  // by vmem::Answer
  unsigned long long slowest_ns = 0;    // acquire
  unsigned long long sum = 0;           // of what sum() has read
};

// `groups` thread blocks do as many turns as they can in `ns`, or `turns`: acquire a block at random (or two
// neighbours), compare every word with the block's version, store every word anew or not, and give it up. state: two
// words for each block of the view, zeros at first: its version, and who has it.
void soak(void* stream, const vmem_kernel_view& view, unsigned* state, unsigned groups, uint64_t ns, unsigned turns,
          unsigned seed, bool stores, PagingResult* result);

// `groups` thread blocks (or as many warps) take blocks from the list one after the other, and compare `words` of each.
// *cursor is device memory, 0.
void visit(void* stream, const vmem_kernel_view& view, const unsigned* state, const unsigned* list, unsigned count,
           unsigned* cursor, unsigned groups, bool warps, size_t words, PagingResult* result);

// Each of `groups` thread blocks pins and gives up the same block so often; it is there.
void pin_again(void* stream, const vmem_kernel_view& view, unsigned groups, unsigned times, PagingResult* result);

// Groups of so many threads sum the first `bytes` of the range, `each` at a time, under a pin of its own each time; or
// those of plain memory, without.
void sum(void* stream, const vmem_kernel_view& view, const void* plain, size_t bytes, size_t each, unsigned groups,
         unsigned threads, PagingResult* result);

// A kernel that does nothing.
void nothing(void* stream);

// All of these are loaded: none is for the first time behind one that asks.
void load_paging();

// What a group is told that asks for too much, beside the range, to store where it may not, or with a pin: 5 answers.
void ask_wrong(void* stream, const vmem_kernel_view& view, bool writable, unsigned frames, unsigned* answers);

}  // namespace vmem::gpu
