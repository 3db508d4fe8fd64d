// Limits of a region's I/O buffers, in bytes, and of reads that no thread waits for.
#pragma once

#include <cstdint>

#include "pager/block/config.h"
#include "pager/block/region.h"

namespace vmem::pager {

// The least that a region needs. A compressed block that is copied needs two buffers at once, to
// read into and to decode into. With fewer, its fault could never be served.
uint64_t least_bounce(const Region& r);
// The most that a region may have. Small blocks are read many at a time: there is room for one
// round of read-ahead, and as much again for faults and staged blocks.
uint64_t bounce_limit(const Region& r, const Config& config, const HostBudget& budget);
// The most that read-ahead, prefetch and fault-around may read at a time if the next block is of
// this region: half of its buffers.
uint64_t speculative_limit(const Region& r, const Config& config, const HostBudget& budget);

}  // namespace vmem::pager
