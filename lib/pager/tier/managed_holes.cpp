#include "pager/tier/managed_holes.h"

#include <unistd.h>

#include <cerrno>

#include "core/fatal.h"
#include "core/inplace_vector.h"
#include "pager/tier/device_tier.h"

namespace vmem::pager {

ManagedHoles::ManagedHoles(PagerContext& ctx) : ctx_(ctx) {}

void ManagedHoles::restore_trap(std::span<const device::Range> ranges) {
  if (ctx_.device_set.own_page_tables()) return;  // the trap is always in place
  // Adjacent regions have trap ranges of their own.
  core::InplaceVector<uintptr_t, Batch::capacity()> limits;
  {
    const Lock lock(ctx_.map.mutex());
    for (const device::Range& range : ranges) {
      const Region* const region = ctx_.map.find(range.address);
      limits.push_back(reinterpret_cast<uintptr_t>(region->base) + region->span);
    }
  }
  for (size_t i = 0; i < ranges.size();) {
    size_t n = 1;
    uintptr_t end = ranges[i].address + ranges[i].size;
    while (i + n < ranges.size() && ranges[i + n].address == end && end < limits[i]) end += ranges[i + n++].size;
    Status s =
        ctx_.trap.attach_at(reinterpret_cast<void*>(ranges[i].address), end - ranges[i].address, trap::Transfer::copy);
    for (int tries = 0; !s.ok() && tries < 100; ++tries) {  // the process may soon have fewer mappings
      usleep(1000);
      s = ctx_.trap.attach_at(reinterpret_cast<void*>(ranges[i].address), end - ranges[i].address,
                              trap::Transfer::copy);
    }
    if (!s.ok()) {
      core::fatal("the trap cannot be put back where a block left its device (vm.max_map_count?): %.*s",
                  static_cast<int>(s.text().size()), s.text().data());
    }
    i += n;
  }
  ctx_.devices->rearm(ranges).ignore();
}

Status ManagedHoles::punch(std::span<const device::Range> ranges) {
  Status s = ctx_.devices->punch(ranges);
  for (int tries = 0; s.code() == -EBUSY && tries < 1000; ++tries) {
    usleep(1000);
    s = ctx_.devices->punch(ranges);
  }
  return s;
}

}  // namespace vmem::pager
