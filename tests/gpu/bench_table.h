// Rows of a benchmark. Each row does the same work in several ways, in turn and several times, so
// that a change in the speed of the disk affects all ways alike. Ratios are taken within a round;
// the table shows their medians.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/raw_disk.h"

namespace gpubench {

using Json = nlohmann::ordered_json;

struct Sample {
  double value = 0;          // GB/s or us
  double cores_per_gbs = 0;  // 0: not measured
  double p99 = 0;            // of a latency; 0: not measured
  std::string error;
};

// Measures wall time and CPU time of this process.
class Meter {
 public:
  Meter() { start(); }
  void start() {
    time_ = rawdisk::now();
    cpu_ = cpu();
  }
  // Adds the time since start().
  void stop() {
    seconds_ += rawdisk::now() - time_;
    used_ += cpu() - cpu_;
  }
  double seconds() const { return seconds_; }
  Sample rate(uint64_t bytes) const {
    const double gb = static_cast<double>(bytes) / 1e9;
    return {gb / seconds_, used_ / gb, 0, ""};
  }
  static double cpu() {
    rusage u;
    getrusage(RUSAGE_SELF, &u);
    return static_cast<double>(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
  }

 private:
  double time_ = 0, cpu_ = 0, seconds_ = 0, used_ = 0;
};

inline Sample latency(std::vector<double>& us) {
  if (us.empty()) return {0, 0, 0, "nothing measured"};
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], 0, us[us.size() * 99 / 100], ""};
}

using Way = std::pair<std::string, std::function<Sample()>>;  // "raw", "hand", "other", "vmem"

class Table {
 public:
  // only: comma-separated prefixes of keys; "": all.
  Table(int rounds, std::string only) : rounds_(rounds), only_(std::move(only)) {}

  // Returns whether a row is selected: its key begins with one of `only`. For a group (a common
  // prefix of keys): whether one of its rows may be.
  bool wanted(const std::string& key, bool group = false) const {
    if (only_.empty()) return true;
    for (size_t at = 0; at <= only_.size();) {
      const size_t end = std::min(only_.find(',', at), only_.size());
      const std::string one = only_.substr(at, end - at);
      if (key.starts_with(one) || (group && one.starts_with(key))) return true;
      at = end + 1;
    }
    return false;
  }

  // lower: lower values are better.
  void row(const std::string& key, const std::string& what, const std::string& unit, const std::vector<Way>& ways,
           bool lower = false) {
    if (!wanted(key)) return;
    Row r{key, what, unit, lower, {}};
    for (int round = 0; round < rounds_; ++round) {
      std::string line = key + ":";
      // Reverse the order in every second round: otherwise one way would always find the disk
      // warmed by another.
      for (size_t i = 0; i < ways.size(); ++i) {
        const Way& way = ways[round % 2 == 0 ? i : ways.size() - 1 - i];
        Sample s;
        try {
          s = way.second();
        } catch (const std::exception& e) {
          s.error = e.what();
          failed_ = true;
        }
        char text[64];
        snprintf(text, sizeof text, " %s %.2f", way.first.c_str(), s.value);
        line += s.error.empty() ? text : " " + way.first + " FAILED (" + s.error + ")";
        r.ways[way.first].push_back(std::move(s));
      }
      fprintf(stderr, "%s %s\n", line.c_str(), unit.c_str());
      fflush(stderr);
    }
    rows_.push_back(std::move(r));
  }

  bool failed() const { return failed_; }

  void print() const {
    printf(
        "| what | unit | libvmem (low to high) | raw limit | by hand | other | libvmem / raw | libvmem / by hand | "
        "cores "
        "per GB/s: libvmem, raw, by hand |\n|---|---|---|---|---|---|---|---|---|\n");
    for (const Row& r : rows_) {
      const Spread v = spread(r, "vmem");
      char ours[128];
      const int digits = r.unit == "us" ? 1 : 2;
      snprintf(ours, sizeof ours, "**%.*f** (%.*f to %.*f)", digits, v.median, digits, v.low, digits, v.high);
      std::string cores;
      for (const char* way : {"vmem", "raw", "hand"}) {
        const Spread s = spread(r, way);
        char text[32];
        snprintf(text, sizeof text, "%.2f", s.cores);
        cores += (cores.empty() ? "" : ", ") + std::string(s.cores > 0 ? text : "-");
      }
      printf("| %s | %s | %s%s | %s | %s | %s | %s | %s | %s |\n", r.what.c_str(), r.unit.c_str(),
             v.samples != 0 ? ours : "failed", tail(v).c_str(), figure(r, "raw").c_str(), figure(r, "hand").c_str(),
             figure(r, "other").c_str(), ratio(r, "raw").c_str(), ratio(r, "hand").c_str(), cores.c_str());
    }
    fflush(stdout);
  }

  Json json() const {
    Json out = Json::array();
    for (const Row& r : rows_) {
      Json row{{"key", r.key}, {"what", r.what}, {"unit", r.unit}, {"lower_is_better", r.lower}};
      for (const auto& [way, samples] : r.ways) {
        const Spread s = spread(r, way);
        Json values = Json::array();
        for (const Sample& x : samples) values.push_back(x.error.empty() ? Json(x.value) : Json(x.error));
        row[way] = {{"median", s.median},       {"low", s.low},     {"high", s.high}, {"p99", s.p99},
                    {"cores_per_gbs", s.cores}, {"samples", values}};
      }
      for (const char* way : {"raw", "hand", "other"}) {
        if (const double x = median_ratio(r, way); x > 0) row[std::string("vmem_to_") + way] = x;
      }
      out.push_back(std::move(row));
    }
    return out;
  }

 private:
  struct Row {
    std::string key, what, unit;
    bool lower;
    std::map<std::string, std::vector<Sample>> ways;
  };
  struct Spread {
    double median = 0, low = 0, high = 0, p99 = 0, cores = 0;
    size_t samples = 0;
  };

  static double middle(std::vector<double> v) {
    if (v.empty()) return 0;
    std::sort(v.begin(), v.end());
    return (v[v.size() / 2] + v[(v.size() - 1) / 2]) / 2;
  }
  static Spread spread(const Row& r, const std::string& way) {
    const auto it = r.ways.find(way);
    if (it == r.ways.end()) return {};
    std::vector<double> v, p99, cores;
    for (const Sample& s : it->second) {
      if (!s.error.empty()) continue;
      v.push_back(s.value);
      p99.push_back(s.p99);
      cores.push_back(s.cores_per_gbs);
    }
    if (v.empty()) return {};
    const auto [low, high] = std::minmax_element(v.begin(), v.end());
    return {middle(v), *low, *high, middle(p99), middle(cores), v.size()};
  }
  static double median_ratio(const Row& r, const std::string& way) {
    const auto ours = r.ways.find("vmem"), theirs = r.ways.find(way);
    if (ours == r.ways.end() || theirs == r.ways.end()) return 0;
    std::vector<double> ratios;
    for (size_t i = 0; i < ours->second.size(); ++i) {
      const Sample &a = ours->second[i], &b = theirs->second[i];
      if (a.error.empty() && b.error.empty() && b.value > 0) ratios.push_back(a.value / b.value);
    }
    return middle(ratios);
  }
  static std::string tail(const Spread& s) {
    char text[32];
    snprintf(text, sizeof text, ", p99 %.0f", s.p99);
    return s.p99 > 0 ? text : "";
  }
  static std::string figure(const Row& r, const std::string& way) {
    const Spread s = spread(r, way);
    char text[32];
    snprintf(text, sizeof text, "%.2f", s.median);
    return s.samples != 0 ? text + tail(s) : "-";
  }
  static std::string ratio(const Row& r, const std::string& way) {
    const double x = median_ratio(r, way);
    char text[32];
    snprintf(text, sizeof text, "%.2f", x);
    return x > 0 ? text : "-";
  }

  const int rounds_;
  const std::string only_;
  bool failed_ = false;
  std::vector<Row> rows_;
};

}  // namespace gpubench
