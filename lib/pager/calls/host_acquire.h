// Acquires at the host: grants all ranges at once, brings missing blocks into place, and returns
// when all are there. StreamReleases::release() ends the leases, as at a device.
//
// - An acquire that fails leases nothing.
// - An acquire begins all reads that memory allows before it waits for the first.
#pragma once

#include <optional>
#include <span>

#include "pager/calls/range_flush.h"
#include "pager/host/truncated_files.h"
#include "pager/lease/stream_releases.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;
struct HostTier;
struct LeaseRoom;

class HostAcquire {
 public:
  HostAcquire(PagerContext& ctx, Calls& calls);

  // ask: made by AcquireRequests::ask() with the same arguments; null: the caller waits.
  core::Status acquire(std::span<const vmem_range> ranges, const AcquireRequest* ask) VMEM_UNLOCKED;

 private:
  struct Coming;  // progress of a wait for a block
  core::Status check_ranges(std::span<const vmem_range> ranges, std::span<BlockSpan> out) VMEM_LOCKED;
  core::Status grant(Lock& lock, std::span<const BlockSpan> spans, size_t which, unsigned access,
                     const AcquireRequest* ask) VMEM_LOCKED;
  void hold(Lock& lock, const BlockSpan& span) VMEM_LOCKED;
  core::Status start_reads(Lock& lock, std::span<const BlockSpan> spans, const AcquireRequest* ask) VMEM_LOCKED;
  bool start_fills(Region& r, core::BlockIndex* next, core::BlockIndex last, DeferredWork& after) VMEM_LOCKED;
  core::Status bring(Lock& lock, Region& r, core::BlockIndex b, unsigned access, const AcquireRequest* ask) VMEM_LOCKED;
  core::Status let_write(Region& r, core::BlockIndex b, unsigned access) VMEM_LOCKED;
  // Return how the wait for the block ended, or nullopt: look at the block again.
  std::optional<core::Status> met_failed(Lock& lock, Region& r, core::BlockIndex b, Coming* coming) VMEM_LOCKED;
  std::optional<core::Status> met_on_device(Lock& lock, Region& r, core::BlockIndex b, Coming* coming) VMEM_LOCKED;
  core::Status wait_for_retry(Lock& lock, const Region& r, core::BlockIndex b, Coming* coming) VMEM_LOCKED;
  core::Status installed(Lock& lock, const Region& r, core::BlockIndex b, Coming* coming) VMEM_LOCKED;
  core::Status wait(Lock& lock, Region& r, core::BlockIndex b, Coming* coming) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  LeaseRoom& leases_;
  DeviceTier& tier_;
  Calls& calls_;
};

}  // namespace vmem::pager
