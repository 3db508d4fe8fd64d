#include "pager/block/guests.h"

#include <algorithm>

#include "core/status.h"

namespace vmem::pager {

bool Guests::fits(size_t d, const DeviceBudget& budget, uint64_t bytes, uint64_t now_ns) const {
  return budget.begun() && !budget.is_short() && budget.wanted() == 0 && budget.missing() == 0 && budget.fits(bytes) &&
         lists_[d].bytes + bytes <= most(budget) && now_ns >= lists_[d].refused_until_ns;
}

uint64_t Guests::over(size_t d, const DeviceBudget& budget, uint64_t now_ns) const {
  if (now_ns < lists_[d].away_until_ns) return lists_[d].bytes;
  return lists_[d].bytes - std::min(lists_[d].bytes, most(budget));
}

void Guests::add(ResidentId id, size_t d) {
  List& list = lists_[d];
  Resident& resident = residents_[id];
  resident.guest_of = static_cast<uint8_t>(d);
  resident.next_guest = kNoResident;
  resident.previous_guest = list.last;
  (list.last == kNoResident ? list.first : residents_[list.last].next_guest) = id;
  list.last = id;
  list.bytes += resident.region->block_size;
}

bool Guests::remove(ResidentId id) {
  Resident& resident = residents_[id];
  if (resident.guest_of == Resident::kNoGuest) return false;
  List& list = lists_[resident.guest_of];
  const ResidentId before = resident.previous_guest, after = resident.next_guest;
  (before == kNoResident ? list.first : residents_[before].next_guest) = after;
  (after == kNoResident ? list.last : residents_[after].previous_guest) = before;
  list.bytes -= resident.region->block_size;
  resident.guest_of = Resident::kNoGuest;
  resident.next_guest = resident.previous_guest = kNoResident;
  return true;
}

std::string Guests::check() const {
  size_t listed = 0, marked = 0;
  for (size_t d = 0; d < lists_.size(); ++d) {
    uint64_t bytes = 0;
    ResidentId before = kNoResident;
    for (ResidentId id = lists_[d].first; id != kNoResident; before = id, id = residents_[id].next_guest, ++listed) {
      const Resident& resident = residents_[id];
      if (resident.region == nullptr || resident.guest_of != d || resident.previous_guest != before ||
          listed > residents_.size())
        return core::strprintf("the guests of device %zu are not in order", d);
      const core::Block& block = resident.region->table[resident.block];
      if (resident.admitted || !core::on_a_device(block.state) || block.device != d)
        return core::strprintf("a guest of device %zu is not there, or is known to its policy", d);
      bytes += resident.region->block_size;
    }
    if (before != lists_[d].last || bytes != lists_[d].bytes) {
      return core::strprintf("guests of device %zu have %llu bytes, %llu are counted", d,
                             static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(lists_[d].bytes));
    }
  }
  for (ResidentId id = 0; id < residents_.size(); ++id) marked += is(id) ? 1 : 0;
  return listed == marked ? "" : core::strprintf("%zu guests are listed, %zu blocks are marked so", listed, marked);
}

}  // namespace vmem::pager
