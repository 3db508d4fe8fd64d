// Host copies of blocks that are on a device. A block that came through a staging frame leaves its bytes there until
// the frame is wanted for something else: while the copy is kept, the block leaves its device by being forgotten there,
// and is in host memory at once. Without it a block that is clean on the SSD would be read again, and one that is not
// would be copied back.
//
//   Resident::copy of a block on a device names a resident of the staging pool with the same bytes (is_copy), which is
//   nobody else's; it goes when the block may change there: a WRITE lease, a store of the CPU
//
// Copies compete with blocks that are only in staging frames, under one policy: how long ago a block left its device
// last is its age. Not thread-safe: the pager's lock protects it. Needs no memory.
#pragma once

#include <cstddef>
#include <string>

#include "memory/staging.h"
#include "pager/eviction_clock.h"
#include "pager/residents.h"
#include "policy/evictor.h"

namespace vmem::pager {

class HostCopies {
 public:
  // policy: of the staging pool.
  HostCopies(Residents& residents, memory::Staging& staging, policy::Evictor& policy, const EvictionClock& clock)
      : residents_(residents), staging_(staging), policy_(policy), clock_(clock) {}

  // The block, which has come to its device from `frame`, keeps it. A resident must be free.
  void keep(Region& r, core::BlockIndex b, std::byte* frame);
  bool has(core::ResidentId on_device) const { return residents_[on_device].copy != core::kNoResident; }
  size_t count() const { return count_; }
  // The block has changed, or may, or is gone. Nothing where it has no copy.
  void drop(core::ResidentId on_device);

  // Its frame, for a move that reads it: nobody evicts it until unhold().
  std::byte* hold(core::ResidentId on_device);
  void unhold(core::ResidentId on_device) { policy_.unhold(residents_[on_device].copy); }
  // A copy that is held is the block from now on, and of the block on the device nothing is left to be known.
  core::ResidentId become(core::ResidentId on_device);

  // The policy has chosen the copy, and forgotten it: it goes; or it stays, being all there is of the block.
  void evict(core::ResidentId copy);
  void refuse(core::ResidentId copy) { admit(copy); }

  // Tests: recounts all. What is wrong; empty: nothing.
  std::string check() const;

 private:
  void admit(core::ResidentId copy);
  void give(core::ResidentId copy);

  Residents& residents_;
  memory::Staging& staging_;
  policy::Evictor& policy_;
  const EvictionClock& clock_;
  size_t count_ = 0;
};

}  // namespace vmem::pager
