#include "pager/tier/managed_holes.h"

#include <unistd.h>

#include <cerrno>

#include "core/fatal.h"
#include "core/inplace_vector.h"

namespace vmem::pager {

void ManagedHoles::restore_trap(std::span<const device::Range> ranges) {
  if (device_set_.own_page_tables()) return;  // the trap is always in place
  // Adjacent regions have trap ranges of their own.
  core::InplaceVector<uintptr_t, Batch::capacity()> limits;
  {
    const Lock lock(map_.mutex());
    for (const device::Range& range : ranges) {
      const Region* const region = map_.find(range.address);
      limits.push_back(reinterpret_cast<uintptr_t>(region->base) + region->span);
    }
  }
  for (size_t i = 0; i < ranges.size();) {
    size_t n = 1;
    uintptr_t end = ranges[i].address + ranges[i].size;
    while (i + n < ranges.size() && ranges[i + n].address == end && end < limits[i]) end += ranges[i + n++].size;
    Status s =
        trap_.attach_at(reinterpret_cast<void*>(ranges[i].address), end - ranges[i].address, trap::Transfer::copy);
    for (int tries = 0; !s.ok() && tries < 100; ++tries) {  // the process may soon have fewer mappings
      usleep(1000);
      s = trap_.attach_at(reinterpret_cast<void*>(ranges[i].address), end - ranges[i].address, trap::Transfer::copy);
    }
    if (!s.ok()) {
      core::fatal("the trap cannot be put back where a block left its device (vm.max_map_count?): %.*s",
                  static_cast<int>(s.text().size()), s.text().data());
    }
    i += n;
  }
  devices_->rearm(ranges).ignore();
}

Status ManagedHoles::punch(std::span<const device::Range> ranges) {
  Status s = devices_->punch(ranges);
  for (int tries = 0; s.code() == -EBUSY && tries < 1000; ++tries) {
    usleep(1000);
    s = devices_->punch(ranges);
  }
  return s;
}

}  // namespace vmem::pager
