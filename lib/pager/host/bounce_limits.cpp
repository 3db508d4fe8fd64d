#include "pager/host/bounce_limits.h"

#include <algorithm>

#include "memory/frame_pool.h"

namespace vmem::pager {

namespace {

constexpr size_t kReadTogether = 256 << 10;  // usual least size of a transfer, in bytes

}  // namespace

uint64_t least_bounce(const Region& r) {
  return r.transfer == trap::Transfer::copy && r.codec != store::Codec::raw ? 2 * r.block_size : r.block_size;
}

uint64_t bounce_limit(const Region& r, const Config& config, const HostBudget& budget) {
  const uint64_t most = uint64_t{2} * config.io_depth * std::max(r.block_size, kReadTogether);
  return std::max(least_bounce(r), std::min<uint64_t>({most, budget.limit() / 8, uint64_t{64} << 20}));
}

uint64_t speculative_limit(const Region& r, const Config& config, const HostBudget& budget) {
  uint64_t most = config.io_depth * std::max(r.block_size, kReadTogether);
  if (r.bounces) {
    const uint64_t limit = bounce_limit(r, config, budget), slab = FramePool::least_bounce(r.block_size, 1);
    const uint64_t buffers = limit < slab ? limit : core::round_down(limit, slab);
    most = std::min(most, buffers / 2 / (least_bounce(r) / r.block_size));
  }
  return std::max<uint64_t>(most, r.block_size);
}

}  // namespace vmem::pager
