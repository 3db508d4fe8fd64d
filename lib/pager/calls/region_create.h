// Makes regions: checks the request, chooses the size of the blocks and how they get to their
// addresses, allocates all that they will need, and last the addresses.
//
// - If create() fails, also for want of memory, nothing of the region is left.
// - No thread finds the region before all of it is there.
#pragma once

#include "pager/calls/region_charges.h"
#include "pager/tier/staging_allocator.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;

class RegionCreate {
 public:
  RegionCreate(PagerContext& ctx, Calls& calls);

  core::Status create(const RegionSpec& what, void** ptr) VMEM_UNLOCKED;
  // Sets *out to the block size of the region's device tier; 0: it has none.
  core::Status device_block(const RegionSpec& what, size_t* out) VMEM_UNLOCKED;

 private:
  struct Shape;  // what follows from a region's size
  core::Status make(const RegionSpec& what, void** ptr, uint64_t mark) VMEM_UNLOCKED;
  static core::Status shape(const RegionSpec& what, Shape* out);
  core::Status describe(const RegionSpec& what, const Shape& shape, Region& r);
  core::Status have_what_it_needs(Region& r, uint64_t mark, bool* charged) VMEM_UNLOCKED;
  core::Status have_addresses(const RegionSpec& what, const Shape& shape, const Region& r, uint64_t mark,
                              void** base) VMEM_UNLOCKED;

  PagerContext& ctx_;
  DeviceTier& tier_;
  Calls& calls_;
};

// Closes the region's file, if it has one. Nothing may use it any more.
void close_file(Region* r, store::Engine& engine);
// Gives the region's addresses at `base` back. A reservation of the caller's becomes one again.
core::Status give_addresses_back(trap::Trap& trap, const Region& r, void* base);

}  // namespace vmem::pager
