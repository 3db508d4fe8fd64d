// Shows processes as text: once for status, repeatedly for top.
#pragma once

#include <string>
#include <vector>

#include "processes.h"

namespace vmemctl {

inline constexpr const char* kSorts[] = {"size", "device", "host", "ssd", "leased", "name"};

struct ViewOptions {
  size_t columns = 0;  // lines are folded to this width; 0: not folded
  size_t regions = 5;  // at most this many
  size_t sort = 0;     // index in kSorts; the largest, or first, comes first
  bool heat = false;   // a row under each region shows where its faults are
  std::string filter;  // only regions whose name contains this, unless the command does; "" all
};
std::vector<std::string> view(const Process& process, const Rates& rates, const ViewOptions& options);

// Returns true if the process or one of its regions matches the filter.
bool is_wanted(const Process& process, const std::string& filter);

// Advice from the figures, a line each, with the figure: "58 % of read-ahead wasted: ...". Empty if
// there is too little data.
std::vector<std::string> advice(const vmem::publish::Stats& stats);

// The time that a share of the faults (0 to 1) did not exceed: the end of its bucket. 0 if there
// were none.
uint64_t quantile_ns(const vmem::publish::Histogram& times, double share);
// The histogram of the time between two looks.
vmem::publish::Histogram difference(const vmem::publish::Histogram& before, const vmem::publish::Histogram& now);

// Draws one character a value, of eight heights; the largest value is the highest. "" for no
// values.
std::string sparkline(const std::vector<double>& values);
// Shows where a region's bytes are, by share: D device, H host, S SSD, "." never written.
std::string where_row(const vmem::publish::Region& region, size_t width);
// Shows where a region's late faults are: one character for each of 32 parts (or blocks, if fewer),
// one step higher for twice as many, "." for none. "" if the region has no late faults.
std::string heat_row(const vmem::publish::Region& region);
// Breaks a line at spaces to fit the width; continuation lines are indented.
std::vector<std::string> folded(const std::string& line, size_t columns, size_t indent);

}  // namespace vmemctl
