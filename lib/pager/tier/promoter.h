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

struct DeviceTier;
struct HostTier;

class Promoter final : private IoEnd {
 public:
  Promoter(PagerContext& ctx, DeviceTier& tier);

  // Starts blocks of the requests while there is room. wake: wakes the workers for blocks that are
  // ready.
  void pump(DeferredWork& after, bool wake = true) VMEM_LOCKED;
  void wake_for_ready() VMEM_LOCKED;
  // All of the block has been read, or the read failed; m->status says which.
  void read_over(Transition* m, DeferredWork& after) VMEM_LOCKED;

 private:
  void io_ended(Transition* m) VMEM_UNLOCKED override;
  void io_came(Transition* m, size_t bytes) VMEM_UNLOCKED override;
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

  PagerContext& ctx_;
  HostTier& host_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
