// Moves units from one device to another.
#include <unistd.h>

#include <array>
#include <optional>
#include <utility>

#include "core/outside_lock.h"
#include "core/step.h"
#include "device/units/units.h"

namespace vmem::device {

void DeviceMemory::migrate_all(Migration& all, int to, int by) {
  while (const std::optional<Range> range = all.next()) {
    Status status;
    migrate({&*range, 1}, to, by, {&status, 1}).ignore();  // `status` has the result
    all.ended(*range, std::move(status));
  }
}

// After an error the unit is where it was. Otherwise it is on the target for every purpose, but its
// bytes are still on their way.
Status UnitDevices::begin_passage(Passage& p, int to, int by) {
  const size_t size = p.unit.unit_size();
  Unit& unit = p.unit.unit(0);
  core::step("device.migrate");
  p.from = unit.device.load();
  p.mapped = unit.state.load() == UnitState::open;
  // Counted on both devices while it moves: the new place is taken before the old one is free.
  used_[to].fetch_add(size, std::memory_order_relaxed);
  // First the call that fails most often, while nothing has changed.
  uint32_t piece = 0;
  Status s = backend_take(to, size, &piece);
  const bool taken = s.ok();
  if (s.ok() && p.mapped) s = backend_hide(p.unit);
  if (s.ok()) {
    s = backend_send_piece(p.unit, to, piece, by, &p.copied);
    if (!s.ok() && p.mapped) unhide(p.unit);
  }
  if (!s.ok()) {
    if (taken) backend_give(to, size, piece);
    used_[to].fetch_sub(size, std::memory_order_relaxed);
    return s;
  }
  p.left = unit.piece.exchange(piece);
  unit.device.store(static_cast<uint8_t>(to));
  p.shown = p.mapped ? backend_show(p.unit) : Status();
  return {};
}

// After an error the unit is where it was.
Status UnitDevices::end_passage(Passage& p, int to, int by) {
  constexpr unsigned kDrainAfter = 100;  // ms
  const size_t size = p.unit.unit_size();
  Unit& unit = p.unit.unit(0);
  Status status = wait(p.copied);
  // No other unit may get the piece before the copy has ended, whatever a wait returns and whatever
  // becomes of the other device. If the ticket does not tell, drain() the device that makes the
  // copy.
  for (unsigned tries = 1; !status.ok() && probe(by).ok(); ++tries) {
    usleep(1000);
    status = tries % kDrainAfter == 0 && drain(by).ok() ? Status() : wait(p.copied);
  }
  p.copied.reset();
  if (status.ok()) status = p.shown;
  // The device that copies is not told that the target is lost. The old bytes are still here then.
  if (status.ok() && by != to) status = probe(to);
  if (status.ok()) {
    backend_give(p.from, size, p.left);
    used_[p.from].fetch_sub(size, std::memory_order_relaxed);
    return {};
  }
  if (p.mapped && p.shown.ok()) hide_insistently(p.unit);
  const uint32_t piece = unit.piece.exchange(p.left);
  unit.device.store(static_cast<uint8_t>(p.from));
  backend_give(to, size, piece);
  used_[to].fetch_sub(size, std::memory_order_relaxed);
  if (p.mapped) unhide(p.unit);
  return status;
}

bool UnitDevices::has_ended(const Passage& p) {
  bool reached = true;
  return p.ends.has_value() || (poll(p.copied, &reached).ok() && reached);
}

// Unmaps each unit, issues its copy and maps it on the target while earlier copies are under way:
// no kernel uses a unit before its own copy has ended. So the copy engines stay busy; unmapping and
// mapping take less time than the copy.
void UnitDevices::migrate_all(Migration& all, int to, int by) {
  core::must_be_outside("Devices::migrate");
  if (unified()) return DeviceMemory::migrate_all(all, to, by);
  constexpr const char* kWhat = "moving a block to another device";
  constexpr size_t kUnderWay = 32;  // half of them are ends of ranges if ranges are single units
  std::array<Passage, kUnderWay> passages;
  size_t first = 0, count = 0;
  Status status;  // of the range that ends next
  const auto end_oldest = [&] {
    Passage p = std::exchange(passages[first++ % kUnderWay], {});
    --count;
    Status s = p.ends ? std::move(p.refused) : end_passage(p, to, by);
    if (status.ok()) status = std::move(s);
    if (p.ends) all.ended(*p.ends, std::exchange(status, {}));
  };
  const auto slot = [&]() -> Passage& {
    if (count == kUnderWay) end_oldest();
    return passages[(first + count) % kUnderWay];
  };
  for (;;) {
    const std::optional<Range> range = all.next();
    if (!range) {
      if (count == 0) return;
      end_oldest();
      continue;
    }
    ReservationPtr keep;
    Span span;
    Status begun = usable(to);
    if (begun.ok()) begun = span_of(kWhat, *range, kMade, &keep, &span);
    for (size_t i = 0; i < span.count && begun.ok(); ++i) {
      const Span unit{span.reservation, span.first + i, 1};
      const int on = unit.unit(0).device.load();
      if (on == to) continue;
      if (by != to && by != on) {
        begun = error(EINVAL, "%s: by device %d, from %d to %d", kWhat, by, on, to);
        break;
      }
      Passage& p = slot();
      p = {.unit = unit, .keep = keep};
      begun = begin_passage(p, to, by);
      count += begun.ok() ? 1 : 0;
    }
    slot() = {.unit = {}, .ends = range, .refused = std::move(begun)};
    ++count;
    while (count != 0 && has_ended(passages[first % kUnderWay])) end_oldest();
  }
}

Status UnitDevices::migrate(std::span<const Range> ranges, int to, int by, std::span<Status> each) {
  core::must_be_outside("Devices::migrate");
  constexpr const char* kWhat = "moving a block to another device";
  Spans spans;  // keeps the reservations alive
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
  struct Named final : Migration {
    Named(std::span<const Range> of, std::span<Status> answers) : ranges(of), each(answers) {}
    std::optional<Range> next() override {
      return named == ranges.size() ? std::nullopt : std::optional<Range>(ranges[named++]);
    }
    void ended(Range, Status s) override { each[answered++] = std::move(s); }
    const std::span<const Range> ranges;
    const std::span<Status> each;
    size_t named = 0, answered = 0;
  };
  if (!unified()) {
    Named named(ranges, each);
    migrate_all(named, to, by);
  }
  for (size_t i = 0; i < ranges.size() && unified(); ++i) {
    const ReservationPtr r = find(ranges[i].address);
    const Span span{r.get(), r->index(ranges[i].address), ranges[i].size / r->unit};
    used_[to].fetch_add(span.size(), std::memory_order_relaxed);
    core::step("device.migrate");
    each[i] = backend_migrate(span, to);
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
