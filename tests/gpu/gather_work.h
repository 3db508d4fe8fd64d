// Kernels of paging_bench: rows of a table whose word w is row_word(w). Asynchronous; stream is a cudaStream_t.
#pragma once

#include <cstddef>
#include <cstdint>

#include "paging_work.h"
#include "vmem/vmem.h"

#ifdef __CUDACC__
#define VMEM_EVERYWHERE __host__ __device__
#else
#define VMEM_EVERYWHERE
#endif

namespace vmem::gpu {

VMEM_EVERYWHERE inline uint32_t row_word(uint64_t w) {
  uint32_t x = static_cast<uint32_t>(w) * 2654435761u ^ static_cast<uint32_t>(w >> 32) * 40503u;
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15;
  return x;
}

// Rows as they are needed: ids, how many, and words of each; to out, which is plain memory of the device.
struct RowWork {
  const uint64_t* ids;
  size_t count, words;
  uint32_t* out;
};

// Loads all of them: a first launch beside a kernel that waits for a block may wait for that kernel, and stop all calls
// of CUDA meanwhile.
void load_gathering();
// The kernel pages in what it needs: `groups` warps, or thread blocks of 256, share the rows.
void gather_asking(void* stream, const vmem_kernel_view& view, const RowWork& work, unsigned groups, bool warps,
                   PagingResult* result);
// The table is where the device can access it; row i goes to the place slots[i], or to i where slots is null.
void gather_plain(void* stream, const uint32_t* table, const RowWork& work, const uint64_t* slots);
// Counts words that are not as they should be, in result->wrong.
void check_rows(void* stream, const RowWork& work, PagingResult* result);
// What gather answers in one thread block: to rows of which one is outside, by address, and with a pin. 6 words.
void gather_wrong(void* stream, const vmem_kernel_view& view, size_t rows, size_t words, uint32_t* out,
                  unsigned* answers);

}  // namespace vmem::gpu
