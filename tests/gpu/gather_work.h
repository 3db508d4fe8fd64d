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

// Rows to gather: ids, their number, and words per row. `out` is plain memory of the device.
struct RowWork {
  const uint64_t* ids;
  size_t count, words;
  uint32_t* out;
};

// Loads all kernels. The first launch of a kernel, while another kernel waits for a block, may wait
// for that kernel and block all calls of CUDA.
void load_gathering();
// The kernel pages in the blocks it needs. `groups` warps, or thread blocks of 256 threads, share
// the rows.
void gather_asking(void* stream, const vmem_kernel_view& view, const RowWork& work, unsigned groups, bool warps,
                   PagingResult* result);
// The table is where the device can access it. Row i goes to place slots[i], or to i if slots is
// null.
void gather_plain(void* stream, const uint32_t* table, const RowWork& work, const uint64_t* slots);
// Counts wrong words in result->wrong.
void check_rows(void* stream, const RowWork& work, PagingResult* result);
// Stores 6 words of answers of gather in one thread block: for rows of which one is out of range,
// by address, and with a pin.
void gather_wrong(void* stream, const vmem_kernel_view& view, size_t rows, size_t words, uint32_t* out,
                  unsigned* answers);

}  // namespace vmem::gpu
