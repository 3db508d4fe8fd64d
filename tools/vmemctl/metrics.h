// What `vmemctl export` says: the Prometheus text format, version 0.0.4.
#pragma once

#include <string>
#include <vector>

#include "processes.h"

namespace vmemctl {

// sysfs: the module's folder; its counters are left out where it is not loaded.
std::string metrics(const Found& found, const std::string& sysfs);

}  // namespace vmemctl
