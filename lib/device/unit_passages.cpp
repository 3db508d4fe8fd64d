// Units on their way from one device to another.
#include <unistd.h>

#include <array>
#include <utility>

#include "core/big_lock.h"
#include "core/step.h"
#include "device/units.h"

namespace vmem::device {

// On error it is where it was. Else it has a piece on the other device to be sent to.
Status UnitDevices::begin_passage(Passage& p, int to) {
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
  return {};
}

// Of the first one, and of those that lie behind it without a gap: so many. On error they are where they were.
size_t UnitDevices::hide_passages(std::span<Passage> passages, int to, Status* status) {
  Span run = passages[0].unit;
  const auto follows = [&](const Passage& p) {
    return p.mapped && p.unit.reservation == run.reservation && p.unit.first == run.first + run.count;
  };
  while (passages[0].mapped && run.count < passages.size() && follows(passages[run.count])) ++run.count;
  *status = passages[0].mapped ? body_hide(run) : Status();
  for (Passage& p : passages.first(run.count)) {
    p.sent = status->ok();
    if (p.sent) continue;
    body_give(to, p.unit.unit_size(), p.piece);
    used_[to].fetch_sub(p.unit.unit_size(), std::memory_order_relaxed);
  }
  return run.count;
}

// On error it is where it was, and nothing is under way.
Status UnitDevices::send_passage(Passage& p, int to, int by) {
  Status status = body_send_piece(p.unit, to, p.piece, by, &p.copied);
  p.sent = status.ok();
  if (p.sent) return status;
  body_give(to, p.unit.unit_size(), p.piece);
  used_[to].fetch_sub(p.unit.unit_size(), std::memory_order_relaxed);
  if (p.mapped && !show_again(p.unit)) mark(p.unit, UnitState::shut);
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

// By groups: all are unmapped, then all are copied, and each is mapped in its new place while the next are copied. Not
// unmapped meanwhile: the driver takes three times as long for that while copies between devices are under way (32 MiB:
// 35 us alone, 108 beside them, two H100, NVLink, driver 580).
void UnitDevices::migrate_pieces(std::span<const Range> ranges, int to, int by, std::span<Status> each) {
  constexpr size_t kUnderWay = 16;
  std::array<Passage, kUnderWay> passages;
  size_t count = 0;
  const auto note = [&](size_t range, const Status& s) {
    if (!s.ok() && each[range].ok()) each[range] = s;
  };
  const auto carry = [&] {
    const std::span<Passage> group(passages.data(), std::exchange(count, 0));
    for (size_t done = 0; done < group.size();) {
      Status s;
      const size_t hidden = hide_passages(group.subspan(done), to, &s);
      for (const Passage& p : group.subspan(done, hidden)) note(p.range, s);
      done += hidden;
    }
    for (Passage& p : group)
      if (p.sent) note(p.range, send_passage(p, to, by));
    for (Passage& p : group)
      if (p.sent) note(p.range, end_passage(p, to));
  };
  for (size_t i = 0; i < ranges.size(); ++i) {
    const ReservationPtr r = find(ranges[i].address);
    for (size_t k = 0; k < ranges[i].size / r->unit && each[i].ok(); ++k) {
      const Span unit{r.get(), r->index(ranges[i].address) + k, 1};
      if (unit.unit(0).device.load() == to) continue;
      if (count == kUnderWay) carry();
      if (!each[i].ok()) break;
      Passage& p = passages[count];
      p.unit = unit;
      p.range = i;
      const Status s = begin_passage(p, to);
      count += s.ok() ? 1 : 0;
      note(i, s);
    }
  }
  carry();
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
