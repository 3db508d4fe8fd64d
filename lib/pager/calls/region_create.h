// Makes regions: checks what is asked for, chooses how large the blocks are and how they come to their place, has all
// that they will need, and then the addresses.
//
//   however it ends but well, also for want of memory, nothing of the region is left
//   nobody finds the region before all of it is there
//
#pragma once

#include "pager/calls/region_charges.h"
#include "pager/tier/staging_allocator.h"

namespace vmem::pager {

class RegionCreate : private Shared {
 public:
  // devices: null: there is no device tier. sums: under the lock.
  RegionCreate(const Shared& shared, device::Devices* devices, RegionTotals& sums, DeviceSet& gpus,
               StagingAllocator& supply, RegionCharges& charges)
      : Shared(shared), devices_(devices), sums_(sums), device_set_(gpus), supply_(supply), charges_(charges) {}

  core::Status create(const RegionSpec& what, void** ptr) VMEM_UNLOCKED;
  // How large the blocks of a region's device tier are; 0: it has none.
  core::Status device_block(const RegionSpec& what, size_t* out) VMEM_UNLOCKED;

 private:
  struct Shape;  // of a region: what follows from its size
  core::Status make(const RegionSpec& what, void** ptr, uint64_t mark) VMEM_UNLOCKED;
  static core::Status shape(const RegionSpec& what, Shape* out);
  core::Status describe(const RegionSpec& what, const Shape& shape, Region& r);
  core::Status have_what_it_needs(Region& r, uint64_t mark, bool* charged) VMEM_UNLOCKED;
  core::Status have_addresses(const RegionSpec& what, const Shape& shape, const Region& r, uint64_t mark,
                              void** base) VMEM_UNLOCKED;

  device::Devices* const devices_;
  RegionTotals& sums_;
  DeviceSet& device_set_;
  StagingAllocator& supply_;
  RegionCharges& charges_;
};

// The region's file, if it has one, is nobody's any more.
void close_file(Region* r, store::Engine& engine);
// So are its addresses, at `base`: a reservation of the caller's is one again.
core::Status give_addresses_back(trap::Trap& trap, const Region& r, void* base);

}  // namespace vmem::pager
