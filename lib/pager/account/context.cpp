#include "pager/account/context.h"

#include <utility>

namespace vmem::pager {

PagerContext::PagerContext(const Backends& backends, Config fixed, const Tunables& changing, Upcalls& pager)
    : trap(backends.trap),
      engine(backends.engine),
      space(backends.space),
      devices(backends.devices),
      upcalls(pager),
      config(std::move(fixed)),
      tunables(changing),
      budget(tunables.host_budget),
      frames(trap, budget, config.numa_nodes),
      staging(budget, config.staging_share, devices != nullptr ? devices->largest_unit() : device::kUnit),
      map(trap, space, staging, counters, tunables, devices != nullptr ? static_cast<size_t>(devices->count()) : 0,
          upcalls),
      device_set(devices, map, tunables),
      deadline(map, writeback_throttle, tunables),
      cpu_mappings(trap, map.frame_table(), deadline, counters, devices != nullptr && device_set.own_page_tables()),
      reserve(budget, frames, cpu_mappings),
      metadata_charges(budget, reserve, map.frame_table(), map.transitions(), trap) {
  map.policy_of(kHostPool).resize(0, tunables.host_budget / core::kPage);
  map.spilled().set_share(config.peer_spill_percent);
}

}  // namespace vmem::pager
