#include "view.h"

#include <algorithm>
#include <cstdio>
#include <ctime>

namespace vmemctl {

namespace publish = vmem::publish;

namespace {

std::string number(double n) {
  char text[32];
  snprintf(text, sizeof text, n >= 100 || n == 0 ? "%.0f" : "%.1f", n);
  return text;
}

std::string percent(uint64_t part, uint64_t whole) {
  return whole == 0 ? "-" : number(100.0 * static_cast<double>(part) / static_cast<double>(whole)) + " %";
}

std::string size(uint64_t n) {
  return bytes(static_cast<double>(n));
}

std::string mean_time(uint64_t total_ns, uint64_t count) {
  if (count == 0) return "-";
  const double us = static_cast<double>(total_ns) / static_cast<double>(count) * 1e-3;
  return us < 1000 ? number(us) + " us" : number(us * 1e-3) + " ms";
}

}  // namespace

std::vector<std::string> view(const Process& process, const Rates& r, size_t columns, size_t regions) {
  const publish::Header& h = process.now.header;
  const publish::Stats& s = h.stats;
  std::vector<std::string> out;
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  std::string head =
      std::to_string(process.pid) + "  " + printable(h.command) + "  user " + std::to_string(process.owner) + "  up " +
      duration(std::max(0.0, static_cast<double>(now.tv_sec) - static_cast<double>(h.started_ns) * 1e-9)) +
      "  libvmem " + printable(h.library) + ", " + (h.trap[0] != '\0' ? printable(h.trap) : "idle");
  if (!process.answers) head += "  (does not answer; as of " + duration(process.age_seconds) + " ago)";
  out.push_back(head);
  out.push_back("  held      host " + size(s.host_bytes) + " of " + size(s.host_budget) + ", device " +
                size(s.device_bytes) + ", SSD " + size(s.ssd_bytes));
  const auto rate = [&](double n) { return r.known ? bytes_per_second(n) : "-"; };
  out.push_back("  moving    SSD read " + rate(r.ssd_read) + ", written " + rate(r.ssd_written) + ", to device " +
                rate(r.to_device) + ", from device " + rate(r.from_device));
  out.push_back("  faults    " + (r.known ? number(r.faults) + "/s" : "-") + ", " + std::to_string(s.faults) +
                " in all, mean " + mean_time(s.fault_ns_total, s.faults) + ", longest " + mean_time(s.fault_ns_max, 1) +
                "; evictions " + std::to_string(s.evictions));
  out.push_back("  ahead     " + std::to_string(s.prefetched_blocks) + " blocks, " +
                percent(s.prefetch_hits, s.prefetched_blocks) + " used; leases found " +
                percent(s.lease_hits, s.lease_blocks) + " of their blocks in place");
  if (s.io_errors != 0 || s.checksum_errors != 0 || s.lost_blocks != 0) {
    out.push_back("  ERRORS    " + std::to_string(s.io_errors) + " of I/O, " + std::to_string(s.checksum_errors) +
                  " of checksums; blocks lost " + std::to_string(s.lost_blocks) + ", not written yet " +
                  std::to_string(s.unknown_blocks));
  }
  for (const publish::Device& d : process.now.devices) {
    out.push_back("  device " + std::to_string(d.ordinal) + "  " + printable(d.name) + ": " +
                  (d.lost != 0 ? "LOST"
                   : d.budget == 0
                       ? "not used yet"
                       : size(d.used_bytes) + " of " + size(d.budget) + ", leased " + size(d.leased_bytes)) +
                  ", in " + size(d.in_bytes) + ", out " + size(d.out_bytes));
  }
  std::vector<const publish::Region*> sorted;
  for (const publish::Region& g : process.now.regions) sorted.push_back(&g);
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) { return a->size > b->size; });
  if (!sorted.empty()) {
    out.push_back("  " + column("region", 24) + column("size", 11, true) + column("device", 11, true) +
                  column("host", 11, true) + column("SSD", 11, true) + column("zero", 11, true) +
                  column("leased", 11, true) + "  kind");
  }
  for (size_t i = 0; i < std::min(regions, sorted.size()); ++i) {
    const publish::Region& g = *sorted[i];
    const std::string name = g.name[0] != '\0' ? printable(g.name) : "#" + std::to_string(g.id);
    std::string kind = publish::kBackingNames[g.backing];
    if (g.has_device_tier == 0) kind += ", host only";
    kind += ", blocks of " + size(g.block_size);
    if (g.failed_bytes != 0) kind += ", FAILED " + size(g.failed_bytes);
    out.push_back("  " + column(name, 24) + column(size(g.size), 11, true) + column(size(g.device_bytes), 11, true) +
                  column(size(g.host_bytes), 11, true) + column(size(g.ssd_bytes), 11, true) +
                  column(size(g.zero_bytes), 11, true) + column(size(g.leased_bytes), 11, true) + "  " + kind);
  }
  const uint64_t shown = std::min(regions, sorted.size());
  if (h.regions_total > shown) out.push_back("  .. and " + std::to_string(h.regions_total - shown) + " more regions");
  if (columns != 0) {
    for (std::string& line : out) line = column(line, columns);
  }
  return out;
}

}  // namespace vmemctl
