// Processes as text: status prints it once, top again and again.
#pragma once

#include <string>
#include <vector>

#include "processes.h"

namespace vmemctl {

inline constexpr const char* kSorts[] = {"size", "device", "host", "ssd", "leased", "name"};

struct ViewOptions {
  size_t columns = 0;  // lines are folded to this width; 0: as wide as they are
  size_t regions = 5;  // at most so many
  size_t sort = 0;     // of kSorts: what is most, or first, comes first
  bool heat = false;   // a row under each region that shows where its faults are
  std::string filter;  // regions whose name has it, where the command has not; "" all
};
std::vector<std::string> view(const Process& process, const Rates& rates, const ViewOptions& options);

// Whether the process, or one of its regions, is what the filter asks for.
bool is_wanted(const Process& process, const std::string& filter);

// What the figures ask for, a line each, with the figure: "58 % of read-ahead wasted: ...". Nothing while there is too
// little to judge by.
std::vector<std::string> advice(const vmem::publish::Stats& stats);

// A time that a share of the faults (0 to 1) did not exceed: the end of its bucket. 0: there were none.
uint64_t quantile_ns(const vmem::publish::Histogram& times, double share);
// The same of what came between two looks.
vmem::publish::Histogram difference(const vmem::publish::Histogram& before, const vmem::publish::Histogram& now);

// One character a value, of eight heights; the highest is the largest of them. "" for none.
std::string sparkline(const std::vector<double>& values);
// Where a region's bytes are, by their share: D device, H host, S SSD, "." never written.
std::string where_row(const vmem::publish::Region& region, size_t width);
// Where a region's late faults are, from its begin to its end: one character for each of 32 parts (or blocks, if it has
// fewer), one step higher for twice as many or more, "." for none. "" where there are none at all.
std::string heat_row(const vmem::publish::Region& region);
// Broken at spaces so that no line is wider; those that follow are indented.
std::vector<std::string> folded(const std::string& line, size_t columns, size_t indent);

}  // namespace vmemctl
