// Shows in which parts of a region faults happen. The region has 32 equal parts. Each part's
// counter rises by one with a fault there, and is halved every four seconds. Not synchronised.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace vmem::policy {

class Heat {
 public:
  static constexpr size_t kParts = 32;
  static constexpr uint64_t kHalving = 4'000'000'000;  // ns
  using Levels = std::array<uint8_t, kParts>;

  // Counts a fault in `block`, which is less than `blocks`.
  void note(uint64_t block, uint64_t blocks, uint64_t now_ns) {
    cool(now_ns);
    uint32_t& part = counts_[static_cast<size_t>(block * kParts / blocks)];
    if (part != UINT32_MAX) ++part;
  }
  // Returns the bit width of each counter: 0 for none, one more for twice as many.
  Levels levels(uint64_t now_ns) {
    cool(now_ns);
    Levels out{};
    std::transform(counts_.begin(), counts_.end(), out.begin(),
                   [](uint32_t n) { return static_cast<uint8_t>(std::bit_width(n)); });
    return out;
  }

 private:
  void cool(uint64_t now_ns) {
    if (now_ns < cooled_ns_ + kHalving) return;
    const uint64_t times = (now_ns - cooled_ns_) / kHalving;
    for (uint32_t& n : counts_) n = times < 32 ? n >> times : 0;
    cooled_ns_ += times * kHalving;
  }

  std::array<uint32_t, kParts> counts_{};
  uint64_t cooled_ns_ = 0;
};

}  // namespace vmem::policy
