// What the CPU sees of blocks on a device whose page tables are its own: shows them and hides them, as CpuMappings has
// decided, and makes room where memory is short.
//
// An access that finds no memory waits as any fault does: it gets SIGBUS when for the time-out nothing went on. So does
// a store that would make a block stale where stale and leased blocks leave no room for others; loads of the block go
// on being served beside it, but for the pages of such stores, for a moment.
//
// Who loads goes on as soon as the piece that he waits for is in place; the rest of the block comes behind it, and he
// waits again where he is faster. Until all of it is there the block is on its way, and what fails takes the piece
// back.
//
// A copy that is shown is charged as a block in host memory. It is dropped when a WRITE lease comes, when the block
// goes to another device, and when memory is short; what is stale is never dropped, nor what shows a block of a device
// that is lost: it is the block then.
//
// A block that nobody leases is shown where it is advised read mostly alone. Its copy takes only what reclaim threads
// keep nothing of: the oldest copy goes for it, so that who loads all of a device's blocks in turn takes others no
// memory away. Where there is none to go the block moves, as it does where its copy has gone for want of memory before:
// the policy of host memory knows what is used there then.
//
//   an access among CpuMappings' is answered, or refused, or asked again; what is begun for it ends without it
//   what is shown is charged to the host budget as a block in host memory
//
// Called under the pager's lock, but for what says otherwise.
#pragma once

#include "pager/lease/stream_releases.h"
#include "pager/tier/demoter.h"

namespace vmem::pager {

class CpuMapper : private Shared {
 public:
  CpuMapper(const Shared& shared, device::Devices* devices, DeviceSet& gpus, CpuMappings& cpu_mappings,
            DeviceBlocks& blocks, MemoryPressure& pressure, MemoryWaits& waits, PageIn& page_in,
            StagingAllocator& supply, StreamReleases& releases, Demoter& demoter, MemoryFreed& freed)
      : Shared(shared),
        devices_(devices),
        device_set_(gpus),
        cpu_mappings_(cpu_mappings),
        blocks_(blocks),
        pressure_(pressure),
        waits_(waits),
        page_in_(page_in),
        supply_(supply),
        releases_(releases),
        demoter_(demoter),
        freed_(freed) {}

  // All locked on entry and on return, and not meanwhile.
  // Does what it can for those who wait, and makes room where memory is short. False: there is nothing to be done now.
  bool serve(Lock& lock) VMEM_LOCKED;
  // What host memory has of a lost device's blocks, in place for the CPU or in a staging frame, may be all there is: it
  // is the block from now on. False: there is none.
  bool rescue(Lock& lock) VMEM_LOCKED;
  // A block on a device, shown and not stale. False: the device is lost, what is shown may be the last copy and stays,
  // and a worker is about to make it the block; or somebody has pinned a page, or nobody knows, and it stays.
  bool hide(Lock& lock, Region& r, core::BlockIndex b) VMEM_LOCKED;

 private:
  CpuMappings::Around around(const CpuFault& access, uint64_t now, bool may_hide) VMEM_LOCKED;
  void refuse_access(CpuFault& access, CpuMappings::Next why, uint64_t now) VMEM_LOCKED;
  bool may_show(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  bool room_beside(const Region& r) VMEM_LOCKED;
  Transition* begin(const CpuFault& access, bool leased, CpuMappings::Next* next) VMEM_LOCKED;
  Transition* begin_show(Region& r, core::BlockIndex b, uint64_t left_free) VMEM_LOCKED;
  // load_at: the page that somebody waits for first, if it is known.
  void show(Transition* m, uintptr_t load_at) VMEM_UNLOCKED;
  core::Status show_all(const Transition& m, uintptr_t load_at, bool* placed) VMEM_UNLOCKED;
  core::Status show_part(const Transition& m, size_t from, size_t to, bool* placed) VMEM_UNLOCKED;
  bool hide_oldest(Lock& lock) VMEM_LOCKED;
  const CpuMapping* oldest() VMEM_LOCKED;

  device::Devices* const devices_;
  DeviceSet& device_set_;
  CpuMappings& cpu_mappings_;
  DeviceBlocks& blocks_;
  MemoryPressure& pressure_;
  MemoryWaits& waits_;
  PageIn& page_in_;
  StagingAllocator& supply_;
  StreamReleases& releases_;
  Demoter& demoter_;
  MemoryFreed& freed_;
};

}  // namespace vmem::pager
