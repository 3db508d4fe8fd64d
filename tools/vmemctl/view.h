// Processes as text: status prints it once, top again and again.
#pragma once

#include <string>
#include <vector>

#include "processes.h"

namespace vmemctl {

// Lines of one process, at most `columns` wide (0: as wide as they are) and with at most `regions` regions, the largest
// first.
std::vector<std::string> view(const Process& process, const Rates& rates, size_t columns, size_t regions);

}  // namespace vmemctl
