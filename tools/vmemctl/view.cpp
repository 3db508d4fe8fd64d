#include "view.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <initializer_list>
#include <iterator>
#include <utility>

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

std::string time_words(double ns) {
  const double us = ns * 1e-3;
  if (us < 1000) return number(us) + " us";
  return us < 1e6 ? number(us * 1e-3) + " ms" : number(us * 1e-6) + " s";
}

std::string mean_time(uint64_t total_ns, uint64_t count) {
  return count == 0 ? "-" : time_words(static_cast<double>(total_ns) / static_cast<double>(count));
}

// "1.5G", for narrow columns.
std::string short_size(uint64_t n) {
  std::string text = size(n);
  const size_t blank = text.find(' ');
  if (blank == std::string::npos) return text;
  const char unit = text[blank + 1];
  return text.substr(0, blank) + (unit == 'B' ? "" : std::string(1, unit));
}

std::string name_of(const publish::Region& g) {
  return g.name[0] != '\0' ? printable(g.name) : "#" + std::to_string(g.id);
}

uint64_t key_of(const publish::Region& g, size_t sort) {
  const uint64_t keys[] = {g.size, g.device_bytes, g.host_bytes, g.ssd_bytes, g.leased_bytes, 0};
  return keys[sort];
}

size_t width_of(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

constexpr uint64_t kEnough = 200;  // blocks needed to judge

std::string share_words(uint64_t part, uint64_t whole) {
  char text[24];
  snprintf(text, sizeof text, "%.0f %%", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
  return text;
}

}  // namespace

bool is_wanted(const Process& process, const std::string& filter) {
  if (printable(process.now.header.command).find(filter) != std::string::npos) return true;
  return std::any_of(process.now.regions.begin(), process.now.regions.end(),
                     [&](const publish::Region& g) { return name_of(g).find(filter) != std::string::npos; });
}

std::vector<std::string> advice(const publish::Stats& s) {
  std::vector<std::string> out;
  if (s.lost_blocks != 0)
    out.push_back(std::to_string(s.lost_blocks) + " blocks lost: their bytes are gone; the log says which, and why");
  if (s.unknown_blocks != 0)
    out.push_back(std::to_string(s.unknown_blocks) +
                  " blocks could not be written, and are kept in memory: look at the SSD's room and errors");
  if (s.prefetched_blocks >= kEnough && s.prefetch_wasted * 5 >= s.prefetched_blocks * 2)
    out.push_back(share_words(s.prefetch_wasted, s.prefetched_blocks) +
                  " of read-ahead wasted: advise RANDOM where access has no order, or lower readahead");
  if (s.lease_blocks >= kEnough && s.lease_hits * 2 < s.lease_blocks)
    out.push_back("leases found only " + share_words(s.lease_hits, s.lease_blocks) +
                  " of their blocks in place: prefetch the next one while one is in use");
  const bool full = s.host_budget != 0 && s.host_bytes >= s.host_budget - s.host_budget / 16;
  if (full && s.evictions >= kEnough && s.faults > s.soft_faults && (s.faults - s.soft_faults) * 2 > s.evictions)
    out.push_back("the host budget is full and " + std::to_string(s.evictions) +
                  " blocks were evicted for others: a larger host_budget (vmemctl tune), or a smaller block_size where "
                  "access has no order");
  return out;
}

uint64_t quantile_ns(const publish::Histogram& times, double share) {
  uint64_t all = 0, below = 0;
  for (const uint64_t n : times.count) all += n;
  if (all == 0) return 0;
  for (size_t i = 0; i < std::size(times.count); ++i) {
    below += times.count[i];
    if (static_cast<double>(below) >= share * static_cast<double>(all)) return uint64_t{1} << i;
  }
  return uint64_t{1} << (std::size(times.count) - 1);
}

publish::Histogram difference(const publish::Histogram& before, const publish::Histogram& now) {
  publish::Histogram out = now;
  for (size_t i = 0; i < std::size(out.count); ++i) out.count[i] -= std::min(before.count[i], now.count[i]);
  out.sum_ns -= std::min(before.sum_ns, now.sum_ns);
  return out;
}

namespace {
constexpr const char* kHeights[] = {"\u2581", "\u2582", "\u2583", "\u2584", "\u2585", "\u2586", "\u2587", "\u2588"};
}

std::string sparkline(const std::vector<double>& values) {
  const double most = values.empty() ? 0 : *std::max_element(values.begin(), values.end());
  std::string out;
  for (const double v : values)
    out += kHeights[most > 0 ? std::min<size_t>(7, static_cast<size_t>(v / most * 7.999)) : 0];
  return out;
}

std::string where_row(const publish::Region& g, size_t width) {
  const double whole = static_cast<double>(g.size);
  std::string out;
  double sum = 0;
  const std::pair<uint64_t, char> parts[] = {{g.device_bytes, 'D'}, {g.host_bytes, 'H'}, {g.ssd_bytes, 'S'}};
  for (const auto& [n, letter] : parts) {
    sum += static_cast<double>(n);
    const double share = whole > 0 ? std::min(1.0, sum / whole) : 0;
    const auto end = static_cast<size_t>(std::lround(share * static_cast<double>(width)));
    out.append(std::min(end, width) - std::min(out.size(), std::min(end, width)), letter);
  }
  return out + std::string(width - out.size(), '.');
}

std::string heat_row(const publish::Region& g) {
  const size_t all = std::size(g.heat);
  const uint64_t blocks = g.block_size != 0 ? (g.size + g.block_size - 1) / g.block_size : all;
  const size_t parts = static_cast<size_t>(std::clamp<uint64_t>(blocks, 1, all));
  const uint8_t most = *std::max_element(std::begin(g.heat), std::end(g.heat));
  std::string out;
  if (most == 0) return out;
  for (size_t i = 0; i < parts; ++i) {
    const uint8_t level = g.heat[i * all / parts];
    out += level == 0 ? "." : kHeights[std::min(7, std::max(0, 7 - (most - level)))];
  }
  return out;
}

std::vector<std::string> folded(const std::string& line, size_t columns, size_t indent) {
  std::vector<std::string> out;
  std::string rest = line;
  while (columns > indent + 8 && width_of(rest) > columns) {
    size_t at = 0, seen = 0, cut = 0;
    for (; at < rest.size() && seen <= columns; ++at) {
      seen += (rest[at] & 0xc0) != 0x80 ? 1 : 0;
      if (rest[at] == ' ' && seen <= columns + 1 && rest.find_first_not_of(' ') < at) cut = at;
    }
    if (cut == 0) break;  // one long word: it is cut
    out.push_back(rest.substr(0, cut));
    const size_t next = rest.find_first_not_of(' ', cut);
    if (next == std::string::npos) return out;  // only blanks did not fit
    rest = std::string(indent, ' ') + rest.substr(next);
  }
  out.push_back(columns == 0 || width_of(rest) <= columns ? rest : column(rest, columns));
  return out;
}

std::vector<std::string> view(const Process& process, const Rates& r, const ViewOptions& options) {
  const size_t columns = options.columns;
  const publish::Header& h = process.now.header;
  const publish::Stats& s = h.stats;
  std::vector<std::string> out;
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  std::string head =
      (process.pid != 0 ? std::to_string(process.pid) : "pid unknown") + "  " + printable(h.command) + "  user " +
      std::to_string(process.owner) + "  up " +
      duration(std::max(0.0, static_cast<double>(now.tv_sec) - static_cast<double>(h.started_ns) * 1e-9)) +
      "  libvmem " + printable(h.library) + ", " + (h.trap[0] != '\0' ? printable(h.trap) : "idle") +
      (h.device_tier[0] != '\0' ? ", device tier " + printable(h.device_tier) : "");
  if (!process.answers) head += "  (does not answer; as of " + duration(process.age_seconds) + " ago)";
  out.push_back(head);
  out.push_back("  held      host " + size(s.host_bytes) + " of " + size(s.host_budget) + ", device " +
                size(s.device_bytes) + ", SSD " + size(s.ssd_bytes));
  const auto rate = [&](double n) { return r.known ? bytes_per_second(n) : "-"; };
  out.push_back("  moving    SSD read " + rate(r.ssd_read) + ", written " + rate(r.ssd_written) + ", to device " +
                rate(r.to_device) + ", from device " + rate(r.from_device));
  const auto quantile = [&](double share) {
    const uint64_t ns = quantile_ns(h.fault, share);
    return ns == 0 ? std::string("-") : "under " + time_words(static_cast<double>(ns));
  };
  out.push_back("  faults    " + (r.known ? number(r.faults) + "/s" : "-") + ", " + std::to_string(s.faults) +
                " in all, mean " + mean_time(s.fault_ns_total, s.faults) + ", p50 " + quantile(0.5) + ", p99 " +
                quantile(0.99) + ", longest " + mean_time(s.fault_ns_max, 1) + "; evictions " +
                std::to_string(s.evictions));
  out.push_back("  ahead     " + std::to_string(s.prefetched_blocks) + " blocks, " +
                percent(s.prefetch_hits, s.prefetched_blocks) + " used; leases found " +
                percent(s.lease_hits, s.lease_blocks) + " of their blocks in place" +
                (s.fault_around_blocks != 0 ? "; read beside others " + std::to_string(s.fault_around_blocks) : ""));
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
  for (const std::string& line : advice(s)) out.push_back("  advice    " + line);
  const bool all = printable(h.command).find(options.filter) != std::string::npos;
  std::vector<const publish::Region*> sorted;
  for (const publish::Region& g : process.now.regions) {
    if (all || name_of(g).find(options.filter) != std::string::npos) sorted.push_back(&g);
  }
  std::stable_sort(sorted.begin(), sorted.end(), [&](const auto* a, const auto* b) {
    return std::string_view(kSorts[options.sort]) == "name" ? name_of(*a) < name_of(*b)
                                                            : key_of(*a, options.sort) > key_of(*b, options.sort);
  });
  const bool narrow = columns != 0 && columns < 120;
  const size_t name_width = narrow ? 16 : 24, number_width = narrow ? 8 : 11, row = narrow ? 12 : 16;
  const auto sizes = [&](std::initializer_list<std::string> words) {
    std::string text;
    for (const std::string& w : words) text += column(w, number_width, true);
    return text;
  };
  if (columns != 0) {
    for (size_t i = 0; i < out.size(); ++i) {
      std::vector<std::string> lines = folded(out[i], columns, 12);
      out.insert(out.erase(out.begin() + static_cast<std::ptrdiff_t>(i)), lines.begin(), lines.end());
      i += lines.size() - 1;
    }
  }
  if (!sorted.empty()) {
    out.push_back("  " + column("region", name_width) + sizes({"size", "device", "host", "SSD", "zero", "leased"}) +
                  "  " + column("where", row) + (narrow ? "" : "  kind"));
  }
  for (size_t i = 0; i < std::min(options.regions, sorted.size()); ++i) {
    const publish::Region& g = *sorted[i];
    std::string kind = publish::kBackingNames[g.backing];
    if (g.has_device_tier == 0) kind += ", host only";
    kind += ", blocks of " + size(g.block_size);
    const auto words = [&](uint64_t n) { return narrow ? short_size(n) : size(n); };
    const std::string failed = g.failed_bytes != 0 ? "FAILED " + size(g.failed_bytes) : "";
    if (!failed.empty()) kind += ", " + failed;
    out.push_back("  " + column(name_of(g), name_width) +
                  sizes({words(g.size), words(g.device_bytes), words(g.host_bytes), words(g.ssd_bytes),
                         words(g.zero_bytes), words(g.leased_bytes)}) +
                  "  " + where_row(g, row) + (narrow ? "" : "  " + kind));
    if (narrow && !failed.empty()) out.push_back("    " + failed);
    if (const std::string heat = options.heat ? heat_row(g) : ""; !heat.empty()) out.push_back("    faults in " + heat);
  }
  const uint64_t shown = std::min(options.regions, sorted.size());
  if (options.filter.empty() && h.regions_total > shown)
    out.push_back("  .. and " + std::to_string(h.regions_total - shown) + " more regions");
  if (columns != 0) {
    for (std::string& line : out) line = column(line, columns);
  }
  return out;
}

}  // namespace vmemctl
