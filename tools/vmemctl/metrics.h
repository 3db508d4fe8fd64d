// What `vmemctl export` says: the Prometheus text format, version 0.0.4.
#pragma once

#include <string>
#include <vector>

#include "processes.h"

namespace vmemctl {

// Of all processes of one user together; what is more is counted in vmem_samples_left_out. Regions, then devices, then
// moves are what is missing first.
inline constexpr size_t kMaxSamples = 40000;

// sysfs: the module's folder; its counters are left out where it is not loaded.
std::string metrics(const Found& found, const std::string& sysfs);

}  // namespace vmemctl
