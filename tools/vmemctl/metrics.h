// Writes the text of `vmemctl export`: the Prometheus text format, version 0.0.4.
#pragma once

#include <string>
#include <vector>

#include "processes.h"

namespace vmemctl {

// For all processes of one user together; vmem_samples_left_out counts the excess. Regions are left
// out first, then devices, then moves.
inline constexpr size_t kMaxSamples = 40000;

// sysfs: the module's folder; its counters are left out if the module is not loaded.
std::string metrics(const Found& found, const std::string& sysfs);

}  // namespace vmemctl
