#include "policy/fault_around.h"

#include <algorithm>
#include <bit>

namespace vmem::policy {

using core::BlockIndex;

namespace {

// Ignore runs that chance makes more often than this. A larger limit reads too much for random
// accesses; a smaller one learns too late of records of 512 KiB.
constexpr double kChance = 0.125;

}  // namespace

FaultAround::FaultAround(uint64_t blocks, uint32_t group)
    : blocks_(blocks), group_(std::clamp(group, 1u, kLargestGroup)) {}

uint32_t FaultAround::count(BlockIndex block) const {
  return static_cast<uint32_t>(std::min<uint64_t>(group_, blocks_ - first(block)));
}

Run FaultAround::around(BlockIndex block, uint64_t present) const {
  const uint32_t n = count(block), at = static_cast<uint32_t>(block - first(block));
  present &= n == kLargestGroup ? UINT64_MAX : (uint64_t{1} << n) - 1;
  present &= ~(uint64_t{1} << at);
  const auto has = [&](uint32_t i) { return (present >> i & 1) != 0; };
  uint32_t below = 0, above = 0;
  while (below < at && has(at - below - 1)) ++below;
  while (at + above + 1 < n && has(at + above + 1)) ++above;
  const bool up = below >= above;
  const uint32_t run = std::max(below, above);
  // The chance that this many blocks, anywhere in the group, make such a run on one side or the
  // other.
  const auto others = static_cast<uint32_t>(std::popcount(present));
  double chance = 2;
  for (uint32_t i = 0; i < run; ++i) chance *= static_cast<double>(others - i) / static_cast<double>(n - 1 - i);
  uint32_t wanted = 1;
  if (run != 0 && chance <= kChance) {
    const uint32_t room = up ? n - at : at + 1;
    while (wanted < std::min(run, room) && !has(up ? at + wanted : at - wanted)) ++wanted;
  }
  return {block, up ? 1 : -1, wanted};
}

}  // namespace vmem::policy
