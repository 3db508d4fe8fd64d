// Where blocks are at one moment, for observers outside the process.
#pragma once

#include <cstdint>
#include <vector>

#include "pager/block/region.h"

namespace vmem::pager {

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

struct Snapshot {
  uint64_t regions_total = 0;
  std::vector<RegionCensus> regions;  // by address, at most as many as asked for
  std::vector<DeviceCensus> devices;
  const char* device_tier = "";  // its backend; "" without one
};

}  // namespace vmem::pager
