// Shows blocks on devices with their own page tables to the CPU, and hides them again, as
// CpuMappings decides; makes room when memory is short.
//
// - A shown copy is charged to the host budget as a block in host memory. It is dropped when a
//   WRITE lease comes, when the block goes to another device, and when memory is short. A copy that
//   is newer than the device (device_stale), or that shows a block of a lost device, is never
//   dropped: it is the block then.
// - Each access in CpuMappings is answered, refused or asked again. Work that was begun for an
//   access ends without it.
// - An access that finds no memory waits as any fault does, and gets SIGBUS when nothing has gone
//   on for the time-out. So does a store that would make a block stale while stale and leased
//   blocks leave no room for others. Loads of that block are still served, except for the pages of
//   such stores, for a moment.
// - A load continues when the piece that it waits for is in place. The rest of the block follows,
//   and the program waits again if it gets ahead of that. The block is in transition until all of
//   it is in place; a failure removes the pieces again.
// - A block without leases is shown only if it is advised read-mostly. Its copy uses only host
//   memory above the reclaim watermark. The oldest copy is dropped to make room for it, so that a
//   program that loads all blocks of a device in turn takes no memory from others. If there is no
//   copy to drop, the block moves to host memory. So does a block whose copy was dropped before for
//   want of memory: then the eviction policy of host memory learns how the block is used.
//
// Called under the pager's lock, except where noted.
#pragma once

#include "pager/lease/stream_releases.h"
#include "pager/tier/demoter.h"

namespace vmem::pager {

struct DeviceTier;
struct HostTier;
struct LeaseRoom;

class CpuMapper {
 public:
  CpuMapper(PagerContext& ctx, DeviceTier& tier);

  // All three drop the lock while they work.
  //
  // Serves accesses that wait, and makes room when memory is short. Returns false if there is
  // nothing to do now.
  bool serve(Lock& lock) VMEM_LOCKED;
  // Makes the host copies of a lost device's blocks, mapped for the CPU or in staging frames, the
  // blocks: they may be the only copies. Returns false if there are none.
  bool rescue(Lock& lock) VMEM_LOCKED;
  // Drops the copy of a block that is on a device and shown, but not stale. Returns false, and the
  // copy stays, if:
  // - the device is lost: this may be the only copy, and a worker is about to make it the block,
  // - or it is unknown whether the device is lost, or a page of the copy is pinned.
  bool hide(Lock& lock, Region& r, core::BlockIndex b) VMEM_LOCKED;

 private:
  CpuMappings::Around around(const CpuFault& access, uint64_t now, bool may_hide) VMEM_LOCKED;
  void refuse_access(CpuFault& access, CpuMappings::Next why, uint64_t now) VMEM_LOCKED;
  bool may_show(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  bool room_beside(const Region& r) VMEM_LOCKED;
  Transition* begin(const CpuFault& access, bool leased, CpuMappings::Next* next) VMEM_LOCKED;
  Transition* begin_show(Region& r, core::BlockIndex b, uint64_t left_free) VMEM_LOCKED;
  // load_at: the page that a thread waits for first; 0 if unknown.
  void show(Transition* m, uintptr_t load_at) VMEM_UNLOCKED;
  core::Status show_all(const Transition& m, uintptr_t load_at, bool* placed) VMEM_UNLOCKED;
  core::Status show_part(const Transition& m, size_t from, size_t to, bool* placed) VMEM_UNLOCKED;
  bool hide_oldest(Lock& lock) VMEM_LOCKED;
  const CpuMapping* oldest() VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  LeaseRoom& leases_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
