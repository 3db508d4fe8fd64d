// Copies between units and pinned host memory.
#include <algorithm>
#include <mutex>

#include "core/outside_lock.h"
#include "core/step.h"
#include "device/units/units.h"

namespace vmem::device {

Status UnitDevices::check_part(const char* what, const Copy& copy, const Reservation& r) {
  const size_t from = (copy.block - r.base) % r.unit, to = from + copy.size;
  for (size_t i = r.index(copy.block); i <= r.index(copy.block + copy.size - 1); ++i) {
    const size_t filled = r.units[i].filled.load() * kUnit;
    if (copy.part ? from != filled : filled != 0)
      return error(EINVAL, "%s at %#zx: the first %#zx bytes of the unit have been copied, by parts", what, copy.block,
                   filled);
  }
  if (copy.part && (to > r.unit || (to != r.unit && to % kUnit != 0)))
    return error(EINVAL, "%s at %#zx: a part may not end at byte %#zx of a unit of %#zx", what, copy.block, to, r.unit);
  return {};
}

Status UnitDevices::check_copies(const char* what, int device, std::span<const Copy> copies, unsigned allowed_states,
                                 bool zeros, Spans* keep) {
  if (copies.empty()) return error(EINVAL, "%s: nothing to copy", what);
  if (copies.size() > kMostRanges)
    return error(EINVAL, "%s: %zu copies in one call, %zu are the most", what, copies.size(), kMostRanges);
  for (const Copy& copy : copies) {
    ReservationPtr r = find(copy.block);
    if (copy.size == 0 || r == nullptr || copy.size > r->base + r->size - copy.block)
      return error(EINVAL, "%s: %#zx bytes at %#zx are not inside one managed range of libvmem", what, copy.size,
                   copy.block);
    for (size_t i = r->index(copy.block); i <= r->index(copy.block + copy.size - 1); ++i) {
      const UnitState state = r->units[i].state.load();
      if ((bit(state) & allowed_states) == 0)
        return error(EINVAL, "%s at %#zx: the unit is %s", what, r->base + i * r->unit, unit_state_name(state));
      if (r->units[i].device.load() != device)
        return error(EINVAL, "%s at %#zx: the unit is on device %d, not %d", what, r->base + i * r->unit,
                     r->units[i].device.load(), device);
    }
    if (Status s = check_part(what, copy, *r); !s.ok()) return s;
    const auto frame = reinterpret_cast<uintptr_t>(copy.frame);
    std::lock_guard lock(pin_mutex_);
    auto pin = pins_.upper_bound(frame);
    const bool pinned = pin != pins_.begin() && (--pin, frame - pin->first < pin->second) &&
                        copy.size <= pin->second - (frame - pin->first);
    if (!pinned && !(zeros && copy.frame == nullptr))
      return error(EINVAL, "%s: %#zx bytes of host memory at %p are not pinned", what, copy.size, copy.frame);
    if (keep->keep.empty() || keep->keep.back() != r) keep->keep.push_back(r);
  }
  return {};
}

Status UnitDevices::copy_in(int device, std::span<const Copy> copies, Ticket* done) {
  core::must_be_outside("Devices::copy_in");
  Spans keep;
  if (Status s = usable(device); !s.ok()) return s;
  const unsigned allowed = unified() ? bit(UnitState::shut) : kMade;
  if (Status s = check_copies("copying to a device", device, copies, allowed, !unified(), &keep); !s.ok()) return s;
  core::step("device.copy_in");
  if (unified()) return backend_copy(device, Direction::in, copies, done);
  enum class Fills : uint8_t { not_all, next_part, all };
  const auto each_unit = [&](auto&& visit) {
    for (const Copy& copy : copies) {
      const ReservationPtr r = find(copy.block);
      for (size_t i = r->index(copy.block); i <= r->index(copy.block + copy.size - 1); ++i) {
        const uintptr_t at = r->base + i * r->unit, end = copy.block + copy.size;
        Fills fills = copy.block <= at && end >= at + r->unit ? Fills::all : Fills::not_all;
        if (copy.part) fills = end == at + r->unit ? Fills::all : Fills::next_part;
        if (Status s = visit(Span{r.get(), i, 1}, fills, end - at); !s.ok()) return s;
      }
    }
    return Status();
  };
  // Units that copies fill whole need no zeros first.
  Status status = each_unit([&](const Span& unit, Fills fills, size_t) {
    if (unit.unit(0).state.load() != UnitState::fresh) return Status();
    if (fills == Fills::not_all) return zero_fresh(unit);
    if (fills == Fills::all) mark(unit, UnitState::shut);
    return Status();
  });
  if (status.ok()) status = backend_copy(device, Direction::in, copies, done);
  if (!status.ok()) {
    each_unit([&](const Span& unit, Fills fills, size_t) {
      if (fills == Fills::all && unit.unit(0).state.load() == UnitState::shut) mark(unit, UnitState::fresh);
      return Status();
    }).ignore();
    return status;
  }
  each_unit([&](const Span& unit, Fills fills, size_t end) {
    if (fills != Fills::not_all) unit.unit(0).filled.store(static_cast<uint8_t>(fills == Fills::all ? 0 : end / kUnit));
    return Status();
  }).ignore();
  return status;
}

Status UnitDevices::copy_out(int device, std::span<const Copy> copies, Ticket* done) {
  core::must_be_outside("Devices::copy_out");
  Spans keep;
  if (Status s = usable(device); !s.ok()) return s;
  if (Status s = check_copies("copying from a device", device, copies,
                              bit(UnitState::shut) | bit(unified() ? UnitState::held : UnitState::open), false, &keep);
      !s.ok())
    return s;
  core::step("device.copy_out");
  return backend_copy(device, Direction::out, copies, done);
}

}  // namespace vmem::device
