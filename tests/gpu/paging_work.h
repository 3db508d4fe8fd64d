// Kernels of kernel_paging_test, which page in the data they access. Asynchronous; stream is a
// cudaStream_t.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vmem/vmem.h"

namespace vmem::gpu {

inline constexpr size_t kPagedBlock = size_t{2} << 20;  // for benchmarks; tests take any size

// In pinned host memory; kernels add to it.
struct PagingResult {
  unsigned long long wrong = 0;         // words
  unsigned long long turns = 0;         // acquires that succeeded
  unsigned long long stores = 0;        // acquires that stored to every word
  unsigned long long skipped = 0;       // turns in which another group held the lock
  unsigned long long refused[16] = {};  // by vmem::Answer
  unsigned long long slowest_ns = 0;    // the slowest acquire
  unsigned long long sum = 0;           // of the words that sum() read
};

// `groups` thread blocks do as many turns as they can in `ns`, at most `turns`. A turn acquires a
// random block (or two adjacent ones), compares every word with the block's version, may store
// every word anew, and releases it.
// state: two words for each block of the view, zeros at first:
// its version and its lock.
void soak(void* stream, const vmem_kernel_view& view, unsigned* state, unsigned groups, uint64_t ns, unsigned turns,
          unsigned seed, bool stores, PagingResult* result);

// `groups` thread blocks (or warps) take blocks from the list one after the other, and compare
// `words` of each. *cursor is device memory, 0.
void visit(void* stream, const vmem_kernel_view& view, const unsigned* state, const unsigned* list, unsigned count,
           unsigned* cursor, unsigned groups, bool warps, size_t words, PagingResult* result);

// Each of `groups` thread blocks pins and releases the same present block that often.
void pin_again(void* stream, const vmem_kernel_view& view, unsigned groups, unsigned times, PagingResult* result);

// Groups of that many threads sum the first `bytes` of the range, `each` at a time, each time under
// its own pin. With `plain` they sum plain memory, without pins.
void sum(void* stream, const vmem_kernel_view& view, const void* plain, size_t bytes, size_t each, unsigned groups,
         unsigned threads, PagingResult* result);

// A kernel that does nothing.
void nothing(void* stream);

// Loads all these kernels, so that none is loaded behind a kernel that waits for a block.
void load_paging();

// Stores 5 answers, for a group that requests too much, beyond the range, a store where none is
// allowed, or with a pin.
void ask_wrong(void* stream, const vmem_kernel_view& view, bool writable, unsigned frames, unsigned* answers);

}  // namespace vmem::gpu
