// Acquires at devices: takes all leases at once, requests the missing blocks, and orders the stream
// after the copies.
//
// - An acquire that fails leases nothing and leaves no request behind.
// - Blocks leased for writing count as changed as soon as all of them are there and the stream is
//   ordered after their copies. No kernel stores to them before the acquire returns.
#pragma once

#include <span>
#include <vector>

#include "pager/host/truncated_files.h"
#include "pager/tier/copy_in.h"
#include "pager/tier/cpu_mapper.h"
#include "pager/tier/device_reclaim.h"
#include "pager/tier/promoter.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;
struct HostTier;
struct LeaseRoom;

class DeviceAcquire {
 public:
  DeviceAcquire(PagerContext& ctx, Calls& calls);

  // ask: made by AcquireRequests::ask() with the same arguments; null: the caller waits.
  core::Status acquire(std::span<const vmem_range> ranges, int d, void* stream,
                       const AcquireRequest* ask) VMEM_UNLOCKED;

 private:
  struct Coming;  // progress of a wait for blocks
  core::Status check_ranges(std::span<const vmem_range> ranges, std::span<BlockSpan> out) VMEM_LOCKED;
  void hold_leased(Lock& lock, std::span<const BlockSpan> spans, int d) VMEM_LOCKED;
  void make_room(Lock& lock, std::span<const BlockSpan> spans, int d, const AcquireRequest* ask) VMEM_LOCKED;
  core::Status revive_failed(Lock& lock, Region& r, core::BlockIndex first, core::BlockIndex last) VMEM_LOCKED;
  core::Status ask_for_missing(Lock& lock, std::span<const BlockSpan> spans, int d,
                               const AcquireRequest* ask) VMEM_LOCKED;
  core::Status bring(Lock& lock, const BlockSpan& span, unsigned access, int d, const void* owner,
                     std::vector<device::Ticket>* tickets, const AcquireRequest* ask) VMEM_LOCKED;
  core::Status failure_of(Region& r, core::BlockIndex b, core::BlockIndex* tried) VMEM_LOCKED;
  core::Status ask_again(Lock& lock, Region& r, core::BlockIndex b, int d, const void* owner,
                         Coming* coming) VMEM_LOCKED;
  core::Status wait_for_some(Lock& lock, const BlockSpan& span, int d, const AcquireRequest* ask) VMEM_LOCKED;
  void note_come(Region& r, core::BlockIndex b, std::vector<device::Ticket>* tickets) VMEM_LOCKED;
  core::Status cannot_come(const Region& r, int d) VMEM_LOCKED;
  bool stores_may_begin(std::span<const BlockSpan> spans, std::span<const vmem_range> ranges,
                        const std::vector<device::Ticket>& ordered, int d) VMEM_LOCKED;
  void mark_changed(std::span<const BlockSpan> spans, std::span<const vmem_range> ranges, bool decided) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  LeaseRoom& leases_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
