// What vmemctl sees of this process's pager.
#pragma once

#include <functional>

#include "pager/pager_gate.h"
#include "publish/layout.h"

namespace vmem::api {

// Returns the function that fills a snapshot (publish::Source::take). The gate must outlive it.
std::function<void(publish::Snapshot*)> snapshots_of(pager::PagerGate& gate);

}  // namespace vmem::api
