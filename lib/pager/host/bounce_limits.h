// How many bytes of I/O buffers a region has, and how much of them reads that nobody waits for may take.
#pragma once

#include <cstdint>

#include "pager/block/config.h"
#include "pager/block/region.h"

namespace vmem::pager {

// A compressed block that is copied needs two at once, to read into and to decode into: with fewer, its fault could
// never be served.
uint64_t least_bounce(const Region& r);
// Small blocks are read many at a time: as much as is read ahead at once, and as much again for what faults ask for and
// what is staged.
uint64_t bounce_limit(const Region& r, const Config& config, const HostBudget& budget);
// Bytes of read-ahead, prefetch and neighbours that are read at a time where the next are of this region: they have
// half of the buffers at most.
uint64_t speculative_limit(const Region& r, const Config& config, const HostBudget& budget);

}  // namespace vmem::pager
