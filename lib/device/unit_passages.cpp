// Units on their way from one device to another.
#include <unistd.h>

#include <array>

#include "core/big_lock.h"
#include "core/step.h"
#include "device/units.h"

namespace vmem::device {

// On error it is where it was. Else it is there for everybody but its bytes, which are on their way.
Status UnitDevices::begin_passage(Passage& p, int to, int by) {
  const size_t size = p.unit.unit_size();
  Unit& unit = p.unit.unit(0);
  core::step("device.migrate");
  p.from = unit.device.load();
  p.mapped = unit.state.load() == UnitState::open;
  // Counted on both while it moves: the new place is taken before the old one is free.
  used_[to].fetch_add(size, std::memory_order_relaxed);
  // First what is refused most often, while nothing has changed.
  uint32_t piece = 0;
  Status s = body_take(to, size, &piece);
  const bool taken = s.ok();
  if (s.ok() && p.mapped) s = body_hide(p.unit);
  if (s.ok()) {
    s = body_send_piece(p.unit, to, piece, by, &p.copied);
    if (!s.ok() && p.mapped) unhide(p.unit);
  }
  if (!s.ok()) {
    if (taken) body_give(to, size, piece);
    used_[to].fetch_sub(size, std::memory_order_relaxed);
    return s;
  }
  p.left = unit.piece.exchange(piece);
  unit.device.store(static_cast<uint8_t>(to));
  p.shown = p.mapped ? body_show(p.unit) : Status();
  return {};
}

// On error it is where it was.
Status UnitDevices::end_passage(Passage& p, int to, int by) {
  constexpr unsigned kDrainAfter = 100;  // ms
  const size_t size = p.unit.unit_size();
  Unit& unit = p.unit.unit(0);
  Status status = wait(p.copied);
  // Nobody else may have the piece before the copy has ended, whatever a wait says and whatever becomes of the other
  // device. One that does not tell ends with all the work of the device whose it is.
  for (unsigned tries = 1; !status.ok() && probe(by).ok(); ++tries) {
    usleep(1000);
    status = tries % kDrainAfter == 0 && drain(by).ok() ? Status() : wait(p.copied);
  }
  p.copied.reset();
  if (status.ok()) status = p.shown;
  // Who copies to another device is not told that this one is lost; what was to go there is here still.
  if (status.ok() && by != to) status = probe(to);
  if (status.ok()) {
    body_give(p.from, size, p.left);
    used_[p.from].fetch_sub(size, std::memory_order_relaxed);
    return {};
  }
  if (p.mapped && p.shown.ok()) hide_insistently(p.unit);
  const uint32_t piece = unit.piece.exchange(p.left);
  unit.device.store(static_cast<uint8_t>(p.from));
  body_give(to, size, piece);
  used_[to].fetch_sub(size, std::memory_order_relaxed);
  if (p.mapped) unhide(p.unit);
  return status;
}

// Each is unmapped, its copy is issued, and it is mapped where it goes, while the copies of those before it are under
// way: nobody uses them before the last has ended. Two H100 (NVLink, driver 580) unmap in 16 us beside copies that the
// target's engines pull and map in 28, where a copy of 32 MiB takes 89.
void UnitDevices::migrate_pieces(std::span<const Range> ranges, int to, int by, std::span<Status> each) {
  constexpr size_t kUnderWay = 16;
  std::array<Passage, kUnderWay> passages;
  size_t first = 0, count = 0;
  const auto note = [&](size_t range, const Status& s) {
    if (!s.ok() && each[range].ok()) each[range] = s;
  };
  const auto end_oldest = [&] {
    Passage& p = passages[first++ % kUnderWay];
    --count;
    note(p.range, end_passage(p, to, by));
  };
  for (size_t i = 0; i < ranges.size(); ++i) {
    const ReservationPtr r = find(ranges[i].address);
    for (size_t k = 0; k < ranges[i].size / r->unit && each[i].ok(); ++k) {
      const Span unit{r.get(), r->index(ranges[i].address) + k, 1};
      if (unit.unit(0).device.load() == to) continue;
      if (count == kUnderWay) end_oldest();
      if (!each[i].ok()) break;
      Passage& p = passages[(first + count) % kUnderWay];
      p = {.unit = unit, .range = i};
      const Status s = begin_passage(p, to, by);
      count += s.ok() ? 1 : 0;
      note(i, s);
    }
  }
  while (count != 0) end_oldest();
}

Status UnitDevices::migrate(std::span<const Range> ranges, int to, int by, std::span<Status> each) {
  core::must_be_outside("Devices::migrate");
  constexpr const char* kWhat = "moving a block to another device";
  Spans spans;  // keeps their reservations
  Status status = usable(to);
  if (status.ok() && each.size() != ranges.size()) status = error(EINVAL, "%s: %zu answers", kWhat, each.size());
  if (status.ok()) status = resolve(kWhat, ranges, kMade, &spans);
  for (const Span& span : spans.list) {
    for (size_t i = 0; i < span.count && status.ok(); ++i) {
      if (const int on = span.unit(i).device.load(); by != to && on != by && on != to)
        status = error(EINVAL, "%s: by device %d, from %d to %d", kWhat, by, on, to);
    }
  }
  for (Status& s : each) s = status;
  if (!status.ok()) return status;
  if (!shared()) migrate_pieces(ranges, to, by, each);
  for (size_t i = 0; i < ranges.size() && shared(); ++i) {
    const ReservationPtr r = find(ranges[i].address);
    const Span span{r.get(), r->index(ranges[i].address), ranges[i].size / r->unit};
    used_[to].fetch_add(span.size(), std::memory_order_relaxed);
    core::step("device.migrate");
    each[i] = body_migrate(span, to);
    if (!each[i].ok()) used_[to].fetch_sub(span.size(), std::memory_order_relaxed);
    for (size_t k = 0; k < span.count && each[i].ok(); ++k)
      used_[span.unit(k).device.exchange(static_cast<uint8_t>(to))].fetch_sub(span.unit_size(),
                                                                              std::memory_order_relaxed);
  }
  for (const Status& s : each)
    if (!s.ok()) return s;
  return {};
}

}  // namespace vmem::device
