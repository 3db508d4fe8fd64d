// Kernels of join_bench: the probe of a hash join. Asynchronous; stream is a cudaStream_t.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gather_work.h"
#include "paging_work.h"
#include "vmem/vmem.h"

namespace vmem::gpu {

struct Tuple {
  uint64_t key, payload;
};
inline constexpr uint64_t kNoKey = UINT64_MAX;  // the key of an unused place before the end of a block
inline constexpr unsigned kBucketMost = 24;     // tuples, unused places included

// The hash of a key, and the key of a hash: the function is its own inverse (the factors are
// inverse to each other modulo 2^64), so that a table can be built in order.
VMEM_EVERYWHERE inline uint64_t hash_of(uint64_t key) {
  key *= 0x9e3779b97f4a7c15u, key ^= key >> 32;
  return key * 0xf1de83e19937733du;
}
// Bucket b has the keys of hashes 16 * b + j for j below this number: 4 to 12, 8 on average.
VMEM_EVERYWHERE inline unsigned tuples_of(uint64_t bucket) {
  return 4 + row_word(bucket) % 9;
}
VMEM_EVERYWHERE inline uint64_t payload_of(uint64_t key) {
  return (key ^ key >> 29) * 0xbf58476d1ce4e5b9u | 1;
}
// Returns the result of a probe: 0 if no tuple has the key.
VMEM_EVERYWHERE inline uint64_t expected_of(uint64_t key) {
  const uint64_t hash = hash_of(key);
  return hash % 16 < tuples_of(hash / 16) ? payload_of(key) : 0;
}

// Only the tuples are in the region; all other arrays are plain memory of the device. Bucket b has
// the tuples [firsts[b], firsts[b + 1]), all in one block.
struct JoinWork {
  const uint32_t* firsts;
  const uint64_t* keys;
  size_t count;   // number of keys
  uint64_t* out;  // for each key: the payload; 0 before, and if there is none
};

void load_joining();
// probe_asking pages in the buckets with `groups` warps; probe_plain accesses them in place. With
// slots, the result of key i goes to out[slots[i]].
void probe_asking(void* stream, const vmem_kernel_view& tuples, const JoinWork& work, unsigned groups,
                  PagingResult* result);
void probe_plain(void* stream, const Tuple* tuples, const JoinWork& work, const uint64_t* slots);
// Counts wrong results in result->wrong.
void check_probes(void* stream, const JoinWork& work, PagingResult* result);

}  // namespace vmem::gpu
