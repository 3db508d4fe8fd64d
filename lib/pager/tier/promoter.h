// Promoter serves promotion requests in their order, up to blocks that are ready for their device:
// it claims each block, and reads blocks that are only on disk into staging frames.
//
//   stored, unpopulated ──read──┐
//   staged (staging frame) ─────┼─> DeviceState::ready, then CopyIn
//   resident (isolating) ───────┘
//   on another device ──────────> DeviceState::incoming, then PeerMigrator
//
// - A block is charged to its device, and has its frame, from when it is claimed. If it cannot be
//   read it stays where it was.
// - Requests of acquires come before hints. Blocks of one size wait for frames, and let blocks of
//   other sizes on the device pass.
//
// Nothing here calls a device. Only the end of a read runs on an I/O thread; nothing runs on a
// fault thread. Called under the pager's lock.
#pragma once

#include <optional>

#include "pager/host/readahead.h"
#include "pager/host/store_reader.h"
#include "pager/tier/device_blocks.h"
#include "pager/tier/peer_migrator.h"
#include "pager/tier/pipelined_copy.h"
#include "pager/tier/staging_allocator.h"

namespace vmem::pager {

class Promoter final : private Shared, private IoEnd, public PipelinedCopy::Above {
 public:
  // requests: those of acquires come first.
  Promoter(const Shared& shared, PooledList<PromotionRequest>& requests, DeviceSet& gpus, DeviceBlocks& blocks,
           FailedBlocks& failed, PageIn& page_in, Readahead& read_ahead, StoreReader& reader, StagingAllocator& supply,
           PipelinedCopy& pipelined_copy, PeerMigrator& migrator, MemoryFreed& freed)
      : Shared(shared),
        requests_(requests),
        device_set_(gpus),
        blocks_(blocks),
        failed_(failed),
        page_in_(page_in),
        read_ahead_(read_ahead),
        reader_(reader),
        supply_(supply),
        pipelined_copy_(pipelined_copy),
        peer_migrator_(migrator),
        freed_(freed) {}

  // Starts blocks of the requests while there is room. wake: wakes the workers for blocks that are
  // ready.
  void pump(DeferredWork& after, bool wake = true) VMEM_LOCKED;
  void wake_for_ready() VMEM_LOCKED;

 private:
  void io_ended(Transition* m) VMEM_UNLOCKED override;
  void io_came(Transition* m, size_t bytes) VMEM_UNLOCKED override { pipelined_copy_.came(m, bytes); }
  void read_over(Transition* m, DeferredWork& after) VMEM_LOCKED override;
  void finish_read(Transition* m, DeferredWork& after) VMEM_UNLOCKED;
  void keep_failure(Transition* m) VMEM_LOCKED;
  Start serve(PooledList<PromotionRequest>::iterator request, DeferredWork& after) VMEM_LOCKED;
  void read_meanwhile(PromotionRequest& request, DeferredWork& after) VMEM_LOCKED;
  bool start_without_frames(const PromotionRequest& request, core::BlockIndex looks, DeferredWork& after) VMEM_LOCKED;
  Start start(Region& r, core::BlockIndex b, int d, core::Urgency urgency, DeferredWork& after) VMEM_LOCKED;
  std::optional<Start> not_now(Region& r, core::BlockIndex b, int d, core::Urgency urgency) VMEM_LOCKED;
  bool take_frames(const Region& r, core::BlockIndex b, std::byte** bytes, std::byte** scratch) VMEM_LOCKED;
  void claim_in_host(Region& r, core::BlockIndex b, int d, bool hinted, std::byte* bytes) VMEM_LOCKED;
  void claim_in_store(Region& r, core::BlockIndex b, int d, core::Urgency urgency, std::byte* bytes, std::byte* scratch,
                      DeferredWork& after) VMEM_LOCKED;

  PooledList<PromotionRequest>& requests_;
  DeviceSet& device_set_;
  DeviceBlocks& blocks_;
  FailedBlocks& failed_;
  PageIn& page_in_;
  Readahead& read_ahead_;
  StoreReader& reader_;
  StagingAllocator& supply_;
  PipelinedCopy& pipelined_copy_;
  PeerMigrator& peer_migrator_;
  MemoryFreed& freed_;
};

}  // namespace vmem::pager
