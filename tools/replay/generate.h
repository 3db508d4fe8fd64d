// Traces of block touches: generated from a pattern, read from files and written to files.
//
// Text: one touch a line, "block" or "block r" or "block w"; empty lines and lines that start with
// # are skipped. Binary: "VMEMTRC1", then 8 bytes a touch, little-endian: block * 2 + (1 for a
// write).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace vmem::replay {

struct Touch {
  uint64_t block;
  bool write = false;
};
using Trace = std::vector<Touch>;

struct Pattern {
  std::string name = "zipf";
  uint64_t blocks = 4096;
  uint64_t length = 200000;  // touches
  uint64_t seed = 1;
  double skew = 0.9;  // zipf
  uint64_t hot = 0;   // blocks of the hot set (scan, mixed) or of one phase's set; 0: blocks / 8
  uint64_t stride = 7;
};

inline const std::vector<std::string>& pattern_names() {
  static const std::vector<std::string> names = {"seq",   "cyclic", "uniform",     "zipf",    "scan",  "mixed",
                                                 "phase", "stride", "two-tenants", "rewrite", "merge", "loops"};
  return names;
}

// Draws ranks 0 .. n-1 with probability proportional to 1 / (rank + 1)^skew, from a table of
// cumulative sums.
class Zipf {
 public:
  Zipf(uint64_t n, double skew) : sums_(n) {
    double sum = 0;
    for (uint64_t i = 0; i < n; ++i) sums_[i] = sum += 1.0 / std::pow(static_cast<double>(i + 1), skew);
  }
  uint64_t operator()(std::mt19937_64& random) const {
    const double at = static_cast<double>(random() >> 11) / static_cast<double>(uint64_t{1} << 53) * sums_.back();
    return static_cast<uint64_t>(std::lower_bound(sums_.begin(), sums_.end(), at) - sums_.begin());
  }

 private:
  std::vector<double> sums_;
};

// Returns an empty trace if the name is unknown.
inline Trace generate(const Pattern& p) {
  Trace trace;
  trace.reserve(p.length);
  std::mt19937_64 random(p.seed);
  const uint64_t n = std::max<uint64_t>(p.blocks, 1), hot = std::clamp<uint64_t>(p.hot != 0 ? p.hot : n / 8, 1, n);
  // Maps a rank to a block at random: popularity is independent of the address.
  std::vector<uint64_t> place(n);
  std::iota(place.begin(), place.end(), 0);
  std::shuffle(place.begin(), place.end(), random);
  if (p.name == "seq") {
    for (uint64_t i = 0; i < std::min(p.length, n); ++i) trace.push_back({i});
  } else if (p.name == "cyclic") {
    for (uint64_t i = 0; i < p.length; ++i) trace.push_back({i % n});
  } else if (p.name == "uniform") {
    for (uint64_t i = 0; i < p.length; ++i) trace.push_back({random() % n});
  } else if (p.name == "zipf") {
    const Zipf zipf(n, p.skew);
    for (uint64_t i = 0; i < p.length; ++i) trace.push_back({place[zipf(random)]});
  } else if (p.name == "scan") {
    // A third of the time a hot set, then one pass over all other blocks, then the hot set again.
    const uint64_t each = p.length > n - hot ? (p.length - (n - hot)) / 2 : 0;
    for (uint64_t i = 0; i < each; ++i) trace.push_back({random() % hot});
    for (uint64_t b = hot; b < n; ++b) trace.push_back({b});
    for (uint64_t i = 0; i < each; ++i) trace.push_back({random() % hot});
  } else if (p.name == "mixed") {
    // Every other touch goes to the hot set; the others walk once through all other blocks.
    for (uint64_t i = 0, next = hot; i < p.length; ++i) {
      if (i % 2 == 0) {
        trace.push_back({random() % hot});
      } else {
        trace.push_back({next});
        next = next + 1 == n ? hot : next + 1;
      }
    }
  } else if (p.name == "phase") {
    // Four disjoint sets, one after the other; inside each the touches are skewed.
    const Zipf zipf(hot, p.skew);
    for (uint64_t i = 0; i < p.length; ++i) trace.push_back({place[(i * 4 / p.length * hot + zipf(random)) % n]});
  } else if (p.name == "loops") {
    // The same four sets, each read in a loop during its phase.
    for (uint64_t i = 0; i < p.length; ++i) trace.push_back({(i * 4 / p.length * hot + i % hot) % n});
  } else if (p.name == "stride") {
    for (uint64_t i = 0, at = 0; i < p.length; ++i) {
      trace.push_back({at});
      at += p.stride;
      if (at >= n) at = (at + 1) % p.stride;
    }
  } else if (p.name == "two-tenants") {
    // Half of the touches belong to a loop, half to a skewed load.
    const uint64_t half = std::max<uint64_t>(n / 2, 1);
    const Zipf zipf(n - half, p.skew);
    for (uint64_t i = 0; i < p.length; ++i) {
      trace.push_back({i % 2 == 0 ? i / 2 % half : half + place[zipf(random)] % (n - half)});
    }
  } else if (p.name == "rewrite") {
    // Written in order, then read back in order, repeatedly.
    for (uint64_t i = 0; i < p.length; ++i) trace.push_back({i % n, i / n % 2 == 0});
  } else if (p.name == "merge") {
    // Merges eight sorted runs: eight streams at random speeds, then the next pass.
    constexpr uint64_t kRuns = 8;
    const uint64_t run = std::max<uint64_t>(n / kRuns, 1);
    std::vector<uint64_t> at(kRuns, 0);
    uint64_t left = run * kRuns;
    for (uint64_t i = 0; i < p.length; ++i) {
      if (left == 0) {
        at.assign(kRuns, 0);
        left = run * kRuns;
      }
      uint64_t which = random() % kRuns;
      while (at[which] == run) which = (which + 1) % kRuns;
      trace.push_back({std::min(which * run + at[which]++, n - 1)});
      --left;
    }
  }
  return trace;
}

}  // namespace vmem::replay
