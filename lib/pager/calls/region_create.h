// Makes regions: checks the request, chooses the size of the blocks and how they get to their
// addresses, allocates all that they will need, and last the addresses.
//
// A region is charged for what it needs of the host budget besides its blocks: tables; frames,
// transitions and queues, so that its blocks can move without asking for memory; buffers; and its
// part of the reserve. It gets all of it when it is made, or is not made.
//
// - If create() fails, also for want of memory, nothing of the region is left.
// - No thread finds the region before all of it is there.
// - credit() gives back what charge() took. A charge() that fails takes nothing.
// - A region's table grows by a page when the first of 128 blocks is used (MetadataCharges). If the
//   budget has no room for that page beside what blocks need to move at all, the access gets
//   SIGBUS, with the numbers in the log, and an acquire gets -ENOMEM. All that is there already
//   goes on.
// - A region keeps what it was granted when it was made, so a sparse region takes nothing from
//   others.
#pragma once

#include "pager/tier/staging_allocator.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;
struct HostTier;

class RegionCreate {
 public:
  RegionCreate(PagerContext& ctx, Calls& calls);

  core::Status create(const RegionSpec& what, void** ptr) VMEM_UNLOCKED;
  // Sets *out to the block size of the region's device tier; 0: it has none.
  core::Status device_block(const RegionSpec& what, size_t* out) VMEM_UNLOCKED;
  // Charges a new region, which no other thread knows yet. mark: of the wait for its memory, from
  // FaultDeadline::look(). Returns 0, or -ENOMEM with the numbers of why it does not fit.
  core::Status charge(Lock& lock, Region& r, uint64_t mark) VMEM_LOCKED;
  // Requires that nothing of the region uses memory any more.
  void credit(Region& r) VMEM_LOCKED;

 private:
  struct Shape;  // what follows from a region's size
  core::Status make(const RegionSpec& what, void** ptr, uint64_t mark) VMEM_UNLOCKED;
  static core::Status shape(const RegionSpec& what, Shape* out);
  core::Status describe(const RegionSpec& what, const Shape& shape, Region& r);
  bool reserve_blocks(Lock& lock, Region& r) VMEM_LOCKED;
  core::Status want_buffers(Lock& lock, Region& r, uint64_t mark) VMEM_LOCKED;
  core::Status have_what_it_needs(Region& r, uint64_t mark, bool* charged) VMEM_UNLOCKED;
  core::Status have_addresses(const RegionSpec& what, const Shape& shape, const Region& r, uint64_t mark,
                              void** base) VMEM_UNLOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  DeviceTier& tier_;
};

// Closes the region's file, if it has one. Nothing may use it any more.
void close_file(Region* r, store::Engine& engine);
// Gives the region's addresses at `base` back. A reservation of the caller's becomes one again.
core::Status give_addresses_back(trap::Trap& trap, const Region& r, void* base);

}  // namespace vmem::pager
