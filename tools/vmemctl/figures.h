// Summarizes repeated measurements: the median, its possible error, and whether a choice between
// several is more than noise.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace vmemctl {

constexpr double kGood = 0.95;  // of the best is good enough: a smaller value uses less memory and waits less
constexpr int kMinRounds = 5, kMaxRounds = 15;

// One quantity, measured several times.
class Figure {
 public:
  void add(double value) { samples_.insert(std::upper_bound(samples_.begin(), samples_.end(), value), value); }
  size_t count() const { return samples_.size(); }
  double low() const { return samples_.empty() ? 0 : samples_.front(); }
  double high() const { return samples_.empty() ? 0 : samples_.back(); }
  double median() const { return quantile(0.5); }
  // The relative error of the median, with 95 % confidence: 1.57 interquartile ranges divided by
  // the root of the count, as the notches of a box plot (McGill, Tukey and Larsen 1978). One
  // outlier moves it little.
  double error() const {
    if (samples_.size() < 2) return samples_.empty() ? 0 : 1;
    const double off = 1.57 * (quantile(0.75) - quantile(0.25)) / std::sqrt(static_cast<double>(samples_.size()));
    return off == 0 ? 0 : median() > 0 ? off / median() : 1;
  }

 private:
  double quantile(double part) const {
    if (samples_.empty()) return 0;
    const double at = part * static_cast<double>(samples_.size() - 1);
    const auto below = static_cast<size_t>(at);
    const size_t above = std::min(below + 1, samples_.size() - 1);
    return samples_[below] + (samples_[above] - samples_[below]) * (at - static_cast<double>(below));
  }
  std::vector<double> samples_;  // in ascending order
};

struct Verdict {
  size_t chosen = 0;    // the first that is as good as the best figure
  bool steady = false;  // each candidate is known to `tolerance`
  double error = 0;     // the largest error of the candidates
};

// `figures`: ordered from the smallest value to the largest, each with at least one sample.
inline Verdict decide(const std::vector<const Figure*>& figures, double tolerance) {
  Verdict v;
  const auto higher = [](const Figure* a, const Figure* b) { return a->median() < b->median(); };
  const Figure& best = **std::max_element(figures.begin(), figures.end(), higher);
  const auto good = [&](const Figure* f) { return f->median() >= kGood * best.median(); };
  v.chosen = static_cast<size_t>(std::find_if(figures.begin(), figures.end(), good) - figures.begin());
  size_t fewest = best.count();
  for (const Figure* f : figures) {
    fewest = std::min(fewest, f->count());
    const bool possible = f->median() * (1 + f->error()) >= kGood * best.median() * (1 - best.error());
    if (possible) v.error = std::max(v.error, f->error());
  }
  v.steady = fewest >= kMinRounds && v.error <= tolerance;
  return v;
}

}  // namespace vmemctl
