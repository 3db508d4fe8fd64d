#include "pager/block/host_copies.h"

#include <utility>

#include "pager/block/advice.h"

namespace vmem::pager {

void HostCopies::keep(Region& r, BlockIndex b, std::byte* frame) {
  const ResidentId on_device = r.table[b].aux, id = residents_.take(r, b, frame, staging_pool(r));
  Resident& copy = residents_[id];
  copy.is_copy = true;
  copy.stamp = residents_[on_device].stamp;
  residents_[on_device].copy = id;
  ++count_;
  admit(id);
}

void HostCopies::admit(ResidentId id) {
  Resident& copy = residents_[id];
  policy::Admission a;
  a.id = id;
  a.weight = static_cast<uint32_t>(copy.region->block_size / core::kPage);
  a.priority = copy.region->priority;
  a.temperature = copy_temperature(*copy.region, copy.block);
  a.probes = false;
  if (copy.stamp != 0) a.age = clock_.age(copy.stamp);
  policy(id).admit(a);
  copy.admitted = true;
}

void HostCopies::give(ResidentId id) {
  if (residents_[id].admitted) policy(id).remove(id);
  staging_.of(*residents_[id].region).frames.put(residents_[id].frame);
  residents_.give(id);
  --count_;
}

void HostCopies::follow_advice(ResidentId on_device) {
  const ResidentId id = residents_[on_device].copy;
  if (id == kNoResident) return;
  const Resident& copy = residents_[id];
  policy(id).advise(id, copy_temperature(*copy.region, copy.block), copy.region->priority, false);
}

void HostCopies::drop(ResidentId on_device) {
  const ResidentId id = std::exchange(residents_[on_device].copy, kNoResident);
  if (id != kNoResident) give(id);
}

std::byte* HostCopies::hold(ResidentId on_device) {
  const ResidentId id = residents_[on_device].copy;
  policy(id).hold(id);
  return residents_[id].frame;
}

ResidentId HostCopies::become(ResidentId on_device) {
  const ResidentId id = std::exchange(residents_[on_device].copy, kNoResident);
  residents_[id].is_copy = false;
  policy(id).unhold(id);
  --count_;
  return id;
}

void HostCopies::evict(ResidentId id) {
  const Resident& copy = residents_[id];
  residents_[copy.region->table[copy.block].aux].copy = kNoResident;
  residents_[id].admitted = false;
  give(id);
}

size_t HostCopies::count(const memory::Staging& in) const {
  size_t count = 0;
  for (ResidentId id = 0; id < residents_.size(); ++id) {
    const Resident& resident = residents_[id];
    count += resident.region != nullptr && resident.is_copy && resident.region->block_size == in.frame() ? 1 : 0;
  }
  return count;
}

std::string HostCopies::check() const {
  size_t copies = 0, named = 0;
  for (ResidentId id = 0; id < residents_.size(); ++id) {
    const Resident& resident = residents_[id];
    if (resident.region == nullptr) continue;
    copies += resident.is_copy ? 1 : 0;
    if (resident.copy == kNoResident) continue;
    ++named;
    const Resident& copy = residents_[resident.copy];
    if (!copy.is_copy || copy.region != resident.region || copy.block != resident.block ||
        copy.pool != staging_pool(*copy.region) || !copy.admitted || (resident.changed && !resident.undecided) ||
        !staging_.of(*copy.region).frames.owns(copy.frame) ||
        !core::on_a_device(resident.region->table[resident.block].state)) {
      return core::strprintf("a host copy is not the block's: region %llu, block %llu",
                             static_cast<unsigned long long>(resident.region->id),
                             static_cast<unsigned long long>(resident.block));
    }
  }
  if (copies != named || copies != count_)
    return core::strprintf("%zu host copies are known, blocks have %zu, and there are %zu", count_, named, copies);
  return "";
}

}  // namespace vmem::pager
