#include "metrics.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

namespace vmemctl {

namespace publish = vmem::publish;

namespace {

constexpr size_t kFirstBucket = 10, kLastBucket = 34;  // 1 us to 17 s; shorter times count in the first

std::string label_text(std::string_view text) {
  std::string out;
  for (const char c : printable(text)) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return "\"" + out + "\"";
}

std::string seconds(double s) {
  char text[32];
  snprintf(text, sizeof text, "%.12g", s);
  return text;
}

// The rest of each person's share over all families, so that one person cannot fill the memory, or
// the database, of all.
class Shares {
 public:
  // Returns false if the share is used up; these samples are counted as left out.
  bool take(const Process& p, size_t samples = 1) {
    size_t& used = used_[p.person];
    if (used + samples <= kMaxSamples) {
      used += samples;
      return true;
    }
    left_out_[p.owner] += samples;
    return false;
  }
  const std::map<uid_t, uint64_t>& left_out() const { return left_out_; }

 private:
  std::map<uid_t, size_t> used_;
  std::map<uid_t, uint64_t> left_out_;
};

// One family of samples under its HELP and TYPE lines, from all processes.
class Family {
 public:
  Family(std::string* out, const char* name, const char* type, const char* help) : out_(*out), name_(name) {
    out_ += std::string("# HELP ") + name + " " + help + "\n# TYPE " + name + " " + type + "\n";
  }
  void sample(const std::string& labels, const std::string& value, const char* suffix = "") {
    out_ += name_ + suffix + (labels.empty() ? "" : "{" + labels + "}") + " " + value + "\n";
  }
  void sample(const std::string& labels, uint64_t value) { sample(labels, std::to_string(value)); }

  static constexpr size_t kOfHistogram = kLastBucket - kFirstBucket + 1 + 3;  // samples
  void histogram(const std::string& labels, const publish::Histogram& h) {
    uint64_t total = 0;
    for (size_t i = 0; i < std::size(h.count); ++i) {
      total += h.count[i];
      if (i < kFirstBucket || i > kLastBucket) continue;
      sample(labels + ",le=\"" + seconds(static_cast<double>(uint64_t{1} << i) * 1e-9) + "\"", std::to_string(total),
             "_bucket");
    }
    sample(labels + ",le=\"+Inf\"", std::to_string(total), "_bucket");
    sample(labels, seconds(static_cast<double>(h.sum_ns) * 1e-9), "_sum");
    sample(labels, std::to_string(total), "_count");
  }

 private:
  std::string& out_;
  const std::string name_;
};

std::string process_labels(const Process& p) {
  const std::string name = p.pid == 0 ? "\",publication=\"" + p.name : "";  // what distinguishes them
  return "pid=\"" + std::to_string(p.pid) + name + "\",user=\"" + std::to_string(p.owner) +
         "\",command=" + label_text(p.now.header.command);
}

struct Metric {
  const char *name, *type, *help;
  uint64_t publish::Stats::*member;
};

const Metric kMetrics[] = {
    {"vmem_faults_total", "counter", "Touches that trapped.", &publish::Stats::faults},
    {"vmem_soft_faults_total", "counter", "Touches that trapped and needed no I/O.", &publish::Stats::soft_faults},
    {"vmem_host_budget_bytes", "gauge", "Host memory that may be used.", &publish::Stats::host_budget},
    {"vmem_evictions_total", "counter", "Blocks that left host memory.", &publish::Stats::evictions},
    {"vmem_clean_drops_total", "counter", "Evictions that needed no write.", &publish::Stats::clean_drops},
    {"vmem_prefetched_blocks_total", "counter", "Blocks read, or moved to a device, before they were asked for.",
     &publish::Stats::prefetched_blocks},
    {"vmem_prefetch_hits_total", "counter", "Blocks read or promoted ahead that were used.",
     &publish::Stats::prefetch_hits},
    {"vmem_prefetch_wasted_total", "counter", "Blocks read or promoted ahead and evicted unused.",
     &publish::Stats::prefetch_wasted},
    {"vmem_fault_around_blocks_total", "counter",
     "Blocks read with one that was asked for, where the block size is auto.", &publish::Stats::fault_around_blocks},
    {"vmem_dirty_bytes", "gauge", "Blocks in host memory that may hold what their shared file lacks.",
     &publish::Stats::dirty_bytes},
    {"vmem_background_written_bytes_total", "counter", "Bytes of shared files written in the background.",
     &publish::Stats::background_write_bytes},
    {"vmem_lease_blocks_total", "counter", "Blocks that acquires asked for.", &publish::Stats::lease_blocks},
    {"vmem_lease_hits_total", "counter", "Blocks that acquires found in place.", &publish::Stats::lease_hits},
    {"vmem_ssd_read_bytes_total", "counter", "Bytes read from the SSD.", &publish::Stats::read_bytes},
    {"vmem_ssd_written_bytes_total", "counter", "Bytes written to the SSD.", &publish::Stats::write_bytes},
    {"vmem_copied_bytes_total", "counter", "Bytes a CPU copied to put blocks in place.", &publish::Stats::copied_bytes},
    {"vmem_io_errors_total", "counter", "Reads and writes that failed.", &publish::Stats::io_errors},
    {"vmem_checksum_errors_total", "counter", "Blocks read back with other bytes than were written.",
     &publish::Stats::checksum_errors},
    {"vmem_lost_blocks_total", "counter", "Blocks whose only copy was lost.", &publish::Stats::lost_blocks},
    {"vmem_unknown_blocks", "gauge", "Blocks whose last write failed.", &publish::Stats::unknown_blocks},
};

void add_devices(const std::vector<Process>& processes, Shares* shares, std::string* out) {
  struct Column {
    const char *name, *type, *help;
    uint64_t (*value)(const publish::Device&);
  };
  const Column columns[] = {
      {"vmem_device_budget_bytes", "gauge", "Device memory that may be used.", [](const auto& d) { return d.budget; }},
      {"vmem_device_used_bytes", "gauge", "Device memory in use.", [](const auto& d) { return d.used_bytes; }},
      {"vmem_device_leased_bytes", "gauge", "Device memory under leases.",
       [](const auto& d) { return d.leased_bytes; }},
      {"vmem_device_evictions_total", "counter", "Blocks that left the device.",
       [](const auto& d) { return d.evictions; }},
      {"vmem_device_lost", "gauge", "1 when the device is lost.", [](const auto& d) { return uint64_t{d.lost}; }},
  };
  const auto labels = [](const Process& p, const publish::Device& d) {
    return process_labels(p) + ",device=\"" + std::to_string(d.ordinal) + "\"";
  };
  for (const Column& c : columns) {
    Family family(out, c.name, c.type, c.help);
    for (const Process& p : processes) {
      for (const publish::Device& d : p.now.devices) {
        if (shares->take(p)) family.sample(labels(p, d), c.value(d));
      }
    }
  }
  Family moved(out, "vmem_device_moved_bytes_total", "counter", "Bytes moved to (in) and from (out) the device.");
  for (const Process& p : processes) {
    for (const publish::Device& d : p.now.devices) {
      if (!shares->take(p, 2)) continue;
      moved.sample(labels(p, d) + ",direction=\"in\"", d.in_bytes);
      moved.sample(labels(p, d) + ",direction=\"out\"", d.out_bytes);
    }
  }
}

void add_regions(const std::vector<Process>& processes, Shares* shares, std::string* out) {
  Family held(out, "vmem_region_bytes", "gauge", "Bytes of a region in each tier.");
  for (const Process& p : processes) {
    for (const publish::Region& r : p.now.regions) {
      if (!shares->take(p, 5)) continue;
      const std::string labels =
          process_labels(p) + ",region=\"" + std::to_string(r.id) + "\",name=" + label_text(r.name) + ",tier=";
      held.sample(labels + "\"zero\"", r.zero_bytes);
      held.sample(labels + "\"ssd\"", r.ssd_bytes);
      held.sample(labels + "\"host\"", r.host_bytes);
      held.sample(labels + "\"device\"", r.device_bytes);
      held.sample(labels + "\"failed\"", r.failed_bytes);
    }
  }
}

// Adds each file that holds a number as a sample: the module has one value a file.
void add_module(const std::string& sysfs, std::string* out) {
  DIR* dir = opendir(sysfs.c_str());
  if (dir == nullptr) return;
  std::vector<std::string> names;
  while (const dirent* entry = readdir(dir)) names.emplace_back(entry->d_name);
  closedir(dir);
  std::sort(names.begin(), names.end());
  Family family(out, "vmem_module", "untyped", "Knobs and counters of the kernel module, as in docs/kernel-module.md.");
  for (const std::string& name : names) {
    if (name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") != std::string::npos) continue;
    const std::string path = std::filesystem::path(sysfs) / name;
    struct stat s {};
    if (stat(path.c_str(), &s) != 0 || !S_ISREG(s.st_mode)) continue;
    std::ifstream in(path);
    uint64_t value = 0;
    if (in >> value) family.sample("file=" + label_text(name), value);
  }
}

}  // namespace

std::string metrics(const Found& found, const std::string& sysfs) {
  const std::vector<Process>& processes = found.processes;
  Shares shares;
  std::string out;
  {
    Family forged(&out, "vmem_forged_publications", "gauge", "Forged publications, by their owner.");
    std::map<uid_t, uint64_t> users;
    for (const Refused& f : found.forged) ++users[f.user];
    for (const auto& [user, count] : users) forged.sample("user=\"" + std::to_string(user) + "\"", count);
  }
  {
    Family up(&out, "vmem_process_up", "gauge", "1: the process answers; 0: these are the last values it wrote.");
    for (const Process& p : processes) {
      if (shares.take(p)) up.sample(process_labels(p), p.answers ? 1 : 0);
    }
  }
  {
    Family info(&out, "vmem_process_info", "gauge", "What the process uses.");
    for (const Process& p : processes) {
      if (!shares.take(p)) continue;
      const publish::Header& h = p.now.header;
      info.sample(process_labels(p) + ",library=" + label_text(h.library) + ",trap=" + label_text(h.trap) +
                      ",device_tier=" + label_text(h.device_tier),
                  1);
    }
  }
  for (const Metric& m : kMetrics) {
    Family family(&out, m.name, m.type, m.help);
    for (const Process& p : processes) {
      if (shares.take(p)) family.sample(process_labels(p), p.now.header.stats.*m.member);
    }
  }
  {
    Family held(&out, "vmem_held_bytes", "gauge", "Bytes held in each tier.");
    for (const Process& p : processes) {
      if (!shares.take(p, 3)) continue;
      const publish::Stats& s = p.now.header.stats;
      held.sample(process_labels(p) + ",tier=\"host\"", s.host_bytes);
      held.sample(process_labels(p) + ",tier=\"device\"", s.device_bytes);
      held.sample(process_labels(p) + ",tier=\"ssd\"", s.ssd_bytes);
    }
  }
  {
    Family faults(&out, "vmem_fault_seconds", "histogram", "From the report of a fault to the block being in place.");
    for (const Process& p : processes) {
      if (shares.take(p, Family::kOfHistogram)) faults.histogram(process_labels(p), p.now.header.fault);
    }
  }
  {
    Family moves(&out, "vmem_move_seconds", "histogram", "A block's way between tiers, waiting included.");
    for (const Process& p : processes) {
      for (size_t i = 0; i < vmem::core::kWays; ++i) {
        if (!shares.take(p, Family::kOfHistogram)) continue;
        moves.histogram(process_labels(p) + ",way=\"" + vmem::core::kWayNames[i] + "\"", p.now.header.move[i]);
      }
    }
  }
  add_devices(processes, &shares, &out);
  add_regions(processes, &shares, &out);
  {
    Family family(&out, "vmem_samples_left_out", "gauge", "Samples of a user's processes left out beyond the limit.");
    for (const auto& [user, count] : shares.left_out()) family.sample("user=\"" + std::to_string(user) + "\"", count);
  }
  add_module(sysfs, &out);
  return out;
}

}  // namespace vmemctl
