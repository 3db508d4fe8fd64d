// Reports where blocks are and what has happened, to callers and to observers outside the process.
//
// - A query changes nothing, except that it ends leases whose streams have got to their release.
#pragma once

#include <cstdint>
#include <vector>

#include "pager/block/region.h"
#include "pager/lease/stream_releases.h"
#include "pager/tier/device_blocks.h"
#include "vmem/vmem.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;
struct HostTier;
struct LeaseRoom;

struct RegionCensus {
  uint64_t id, base, size, block_size;  // bytes; base: the address
  uint64_t zero_bytes, ssd_bytes, host_bytes, device_bytes, failed_bytes;
  uint64_t leased_bytes;
  Backing backing;
  bool gpu;  // has a device tier
  policy::Heat::Levels heat;
  char name[64];  // "": none
};

struct DeviceCensus {
  uint64_t budget;  // bytes; 0: not used yet
  uint64_t used, leased, in_bytes, out_bytes, evictions, clean_drops;
  uint64_t spilled;  // of used
  bool lost;
  char name[64];
};

struct Snapshot {  // where blocks are at one moment
  uint64_t regions_total = 0;
  std::vector<RegionCensus> regions;  // by address, at most as many as asked for
  std::vector<DeviceCensus> devices;
  const char* device_tier = "";  // its backend; "" without one
};

class Query {
 public:
  Query(PagerContext& ctx, Calls& calls);

  Status query(const void* ptr, size_t size, vmem_residency* out) VMEM_UNLOCKED;
  void stats(struct vmem_stats* out) VMEM_UNLOCKED;
  Status device_stats(int d, struct vmem_device_stats* out) VMEM_UNLOCKED;
  // Walks only the regions: tables count their states as these change.
  void census(size_t max_regions, Snapshot* out) VMEM_UNLOCKED;

 private:
  PagerContext& ctx_;
  HostTier& host_;
  LeaseRoom& leases_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
