#include "pager/block/residents.h"

#include <utility>

namespace vmem::pager {

// The lowest number comes first.
void Residents::grow() {
  const size_t old = all_.size();
  all_.grow(old + 1);
  for (size_t i = all_.size(); i > old; --i) {
    all_[i - 1].copy = std::exchange(first_free_, static_cast<ResidentId>(i - 1));
  }
  free_ += all_.size() - old;
}

ResidentId Residents::take(Region& r, BlockIndex b, std::byte* frame, uint8_t pool) {
  const ResidentId id = first_free_;
  Resident& resident = all_[id];
  first_free_ = resident.copy;
  --free_;
  resident = Resident{};
  resident.region = &r;
  resident.block = b;
  resident.frame = frame;
  resident.pool = pool;
  return id;
}

void Residents::give(ResidentId id) {
  seen(all_[id]);
  all_[id] = Resident{};
  all_[id].copy = std::exchange(first_free_, id);
  ++free_;
}

void Residents::read_ahead(Resident& resident) {
  if (!std::exchange(resident.ahead, true)) ahead_bytes_ += resident.region->block_size;
}

void Residents::seen(Resident& resident) {
  if (std::exchange(resident.ahead, false)) ahead_bytes_ -= resident.region->block_size;
}

std::string Residents::check() const {
  size_t in_list = 0, without_block = 0;
  for (ResidentId id = first_free_; id != core::kNoResident; id = all_[id].copy) {
    if (all_[id].region != nullptr) return "a number that is free names a block";
    if (++in_list > free_) return "more numbers are free than are counted";
  }
  uint64_t ahead = 0;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].region == nullptr) {
      ++without_block;
    } else if (all_[i].ahead) {
      ahead += all_[i].region->block_size;
    }
  }
  if (in_list != free_ || without_block != free_) return "a number is not free, and names no block";
  if (ahead != ahead_bytes_) return "bytes that were read ahead and residents disagree";
  return "";
}

}  // namespace vmem::pager
