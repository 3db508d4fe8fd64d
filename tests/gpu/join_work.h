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
inline constexpr uint64_t kNoKey = UINT64_MAX;  // of a place that is left free before the end of a block
inline constexpr unsigned kBucketMost = 24;     // tuples, free places included

// The hash of a key, and the key of a hash: its own inverse (the factors are each other's, modulo 2^64), so that a
// table can be made in order.
VMEM_EVERYWHERE inline uint64_t hash_of(uint64_t key) {
  key *= 0x9e3779b97f4a7c15u, key ^= key >> 32;
  return key * 0xf1de83e19937733du;
}
// Bucket b has the keys of hashes 16 * b + j, j below this: 4 to 12, 8 on average.
VMEM_EVERYWHERE inline unsigned tuples_of(uint64_t bucket) {
  return 4 + row_word(bucket) % 9;
}
VMEM_EVERYWHERE inline uint64_t payload_of(uint64_t key) {
  return (key ^ key >> 29) * 0xbf58476d1ce4e5b9u | 1;
}
// What a probe finds: 0 where no tuple has the key.
VMEM_EVERYWHERE inline uint64_t expected_of(uint64_t key) {
  const uint64_t hash = hash_of(key);
  return hash % 16 < tuples_of(hash / 16) ? payload_of(key) : 0;
}

// All in plain memory of the device but the tuples. Those of bucket b are [firsts[b], firsts[b + 1]), in one block.
struct JoinWork {
  const uint32_t* firsts;
  const uint64_t* keys;
  size_t count;   // of keys
  uint64_t* out;  // for each: the payload, or 0, as it is before
};

void load_joining();
// The kernel pages in the buckets, as `groups` warps, or they are where it can access them. With slots the result of
// key i goes to out[slots[i]].
void probe_asking(void* stream, const vmem_kernel_view& tuples, const JoinWork& work, unsigned groups,
                  PagingResult* result);
void probe_plain(void* stream, const Tuple* tuples, const JoinWork& work, const uint64_t* slots);
// Counts results that are not as they should be, in result->wrong.
void check_probes(void* stream, const JoinWork& work, PagingResult* result);

}  // namespace vmem::gpu
