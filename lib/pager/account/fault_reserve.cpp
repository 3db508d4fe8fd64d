#include "pager/account/fault_reserve.h"

#include <numeric>

#include "core/status.h"

namespace vmem::pager {

void FaultReserve::add_region(size_t block_size) {
  ++regions_[size_class(block_size)];
  count();
}

void FaultReserve::remove_region(size_t block_size) {
  --regions_[size_class(block_size)];
  count();
}

void FaultReserve::count() {
  largest_block_ = 0;
  for (size_t i = 0; i < regions_.size(); ++i) {
    if (regions_[i] != 0) largest_block_ = core::kPage << i;
  }
  follow_budget();
}

uint64_t FaultReserve::low_watermark() const {
  const uint64_t room = frames_.room(), mine = room - std::min(room, pinned());
  const unsigned percent = refilling_ ? percent_high_ : percent_low_;
  const uint64_t part = std::min(mine / 4, std::max<uint64_t>(mine / 32, 4 * largest_block_));
  return std::min(std::max(part, mine / 100 * percent), mine - std::min(mine, 2 * largest_block_));
}

uint64_t FaultReserve::left_free(core::Urgency urgency, uint64_t size) const {
  if (urgency == core::Urgency::fault) return 0;
  if (urgency == core::Urgency::acquire) return bytes_ / 2;
  const uint64_t low = low_watermark();
  return std::min(bytes_, low - std::min(low, size));
}

bool FaultReserve::short_of(uint64_t first, uint64_t leaving) const {
  const uint64_t wanted = std::max({low_watermark(), wanted_, first});
  return budget_.in_use() - frames_.idle_buffers() + wanted > budget_.limit() + leaving;
}

bool FaultReserve::room_for_device_stale(uint64_t block_size) const {
  const uint64_t room = frames_.room();
  const uint64_t free = std::max({bytes_, room / 4, room / 100 * percent_low_});
  return free + pinned() + block_size <= room;
}

std::string FaultReserve::check(uint64_t leased, uint64_t regions) const {
  if (leased != leased_) {
    return core::strprintf("leased_bytes %llu, counted %llu", static_cast<unsigned long long>(leased_),
                           static_cast<unsigned long long>(leased));
  }
  const uint64_t counted = std::accumulate(regions_.begin(), regions_.end(), uint64_t{0});
  if (counted != regions) {
    return core::strprintf("%llu regions are counted by their blocks, and there are %llu",
                           static_cast<unsigned long long>(counted), static_cast<unsigned long long>(regions));
  }
  for (size_t i = 0; i < regions_.size(); ++i) {
    if (regions_[i] != 0 && core::kPage << i > largest_block_) return "a region has larger blocks than the largest";
  }
  return "";
}

}  // namespace vmem::pager
