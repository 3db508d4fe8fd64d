// Units on their way from one device to another.
#include <unistd.h>

#include <array>
#include <utility>

#include "core/big_lock.h"
#include "core/step.h"
#include "device/units.h"

namespace vmem::device {

using core::error;
using core::Status;

// On error it is where it was, and nothing is under way.
Status UnitDevices::begin_passage(Passage& p, int to, int by) {
  const size_t size = p.unit.unit_size();
  core::step("device.migrate");
  p.mapped = p.unit.unit(0).state.load() == UnitState::open;
  // Counted on both while it moves: the new place is taken before the old one is free.
  used_[to].fetch_add(size, std::memory_order_relaxed);
  // First what is refused most often, while nothing has changed.
  if (Status s = body_take(to, size, &p.piece); !s.ok()) {
    used_[to].fetch_sub(size, std::memory_order_relaxed);
    return s;
  }
  Status status = p.mapped ? body_hide(p.unit) : Status();
  const bool hidden = p.mapped && status.ok();
  if (status.ok()) status = body_send_piece(p.unit, to, p.piece, by, &p.copied);
  if (status.ok()) return status;
  body_give(to, size, p.piece);
  used_[to].fetch_sub(size, std::memory_order_relaxed);
  if (hidden && !show_again(p.unit)) mark(p.unit, UnitState::shut);
  return status;
}

// On error it is where it was.
Status UnitDevices::end_passage(Passage& p, int to) {
  const size_t size = p.unit.unit_size();
  Unit& unit = p.unit.unit(0);
  const int from = unit.device.load();
  Status status = wait(p.copied);
  // Nobody else may have the piece before the copy has ended, whatever a wait says.
  while (!status.ok() && probe(from).ok() && probe(to).ok()) {
    usleep(1000);
    status = wait(p.copied);
  }
  p.copied.reset();
  if (status.ok()) {
    const uint32_t before = unit.piece.exchange(p.piece);
    unit.device.store(static_cast<uint8_t>(to));
    if (p.mapped) status = body_show(p.unit);
    if (status.ok()) {
      body_give(from, size, before);
      used_[from].fetch_sub(size, std::memory_order_relaxed);
      return status;
    }
    unit.piece.store(before);
    unit.device.store(static_cast<uint8_t>(from));
  }
  body_give(to, size, p.piece);
  used_[to].fetch_sub(size, std::memory_order_relaxed);
  if (p.mapped && !show_again(p.unit)) mark(p.unit, UnitState::shut);
  return status;
}

// The next is unmapped while one is copied, and one is mapped in its new place while the next are copied.
void UnitDevices::migrate_pieces(std::span<const Range> ranges, int to, int by, std::span<Status> each) {
  constexpr size_t kUnderWay = 16;
  std::array<Passage, kUnderWay> passages;
  size_t oldest = 0, count = 0;
  const auto end_oldest = [&] {
    Passage& p = passages[oldest++ % kUnderWay];
    --count;
    if (Status s = end_passage(p, to); !s.ok() && each[p.range].ok()) each[p.range] = std::move(s);
  };
  for (size_t i = 0; i < ranges.size(); ++i) {
    const ReservationPtr r = find(ranges[i].address);
    for (size_t k = 0; k < ranges[i].size / r->unit && each[i].ok(); ++k) {
      const Span unit{r.get(), r->index(ranges[i].address) + k, 1};
      if (unit.unit(0).device.load() == to) continue;
      if (count == kUnderWay) end_oldest();
      Passage& p = passages[(oldest + count) % kUnderWay];
      p.unit = unit;
      p.range = i;
      Status s = begin_passage(p, to, by);
      count += s.ok() ? 1 : 0;
      if (!s.ok() && each[i].ok()) each[i] = std::move(s);
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
