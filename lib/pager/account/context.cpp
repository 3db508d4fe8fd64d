#include "pager/account/context.h"

#include <utility>

namespace vmem::pager {

PagerContext::PagerContext(const Backends& backends, Config settings, Upcalls& pager)
    : trap(backends.trap),
      engine(backends.engine),
      space(backends.space),
      devices(backends.devices),
      upcalls(pager),
      config(std::move(settings)),
      budget(config.host_budget),
      frames(trap, budget, config.numa_nodes),
      staging(budget, config.staging_share, devices != nullptr ? devices->largest_unit() : device::kUnit),
      map(trap, space, staging, counters, config, devices != nullptr ? static_cast<size_t>(devices->count()) : 0,
          upcalls),
      device_set(devices, map, config),
      deadline(map, writeback_throttle, config),
      cpu_mappings(trap, map.frame_table(), deadline, counters, devices != nullptr && device_set.own_page_tables()),
      reserve(budget, frames, cpu_mappings),
      metadata_charges(budget, reserve, map.frame_table(), map.transitions(), trap) {
  map.policy_of(kHostPool).resize(0, config.host_budget / core::kPage);
}

}  // namespace vmem::pager
