#include "device/units/units.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "core/fatal.h"
#include "core/log.h"
#include "core/outside_lock.h"
#include "core/process/map_over.h"
#include "core/step.h"

namespace vmem::device {

namespace {

constexpr unsigned kSayAfter = 1000;  // refused tries, 1 ms apart, before the log says so

Status protect(uintptr_t address, size_t size, int protection) {
  if (mprotect(reinterpret_cast<void*>(address), size, protection) == 0) return {};
  return core::system_error(errno, "changing the CPU's access to %#zx bytes at %#zx failed%s", size, address,
                            errno == ENOMEM ? " (raise vm.max_map_count?)" : "");
}

}  // namespace

const char* unit_state_name(UnitState state) {
  static const char* const kNames[] = {"hole", "punched", "fresh", "shut", "held", "read", "open"};
  return kNames[static_cast<size_t>(state)];
}

void place_hole(uintptr_t address, size_t size) {
  void* const at = reinterpret_cast<void*>(address);
  const int rc = core::map_over(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (rc != 0)
    core::fatal("cannot take %zu bytes at %p out of use: %s. The process would see bytes that are not its own.", size,
                at, strerror(-rc));
  // Failure costs only address space of a child or a dump.
  madvise(at, size, MADV_DONTFORK);
  madvise(at, size, MADV_DONTDUMP);
}

Reservation::~Reservation() {
  if (units != nullptr) munmap(units, size / unit * sizeof(Unit));
}

Status UnitDevices::usable(int device) {
  if (device < 0 || device >= count())
    return error(ENODEV, "there is no device %d: this process has %d", device, count());
  return health(device);
}

ReservationPtr UnitDevices::find(uintptr_t address) const {
  std::shared_lock lock(registry_mutex_);
  auto it = registry_.upper_bound(address);
  if (it == registry_.begin()) return nullptr;
  const ReservationPtr& r = std::prev(it)->second;
  return address - r->base < r->size ? r : nullptr;
}

Status UnitDevices::memory(int device, Memory* out) {
  core::must_be_outside("Devices::memory");
  if (Status s = usable(device); !s.ok()) return s;
  if (Status s = backend_memory(device, out); !s.ok()) return s;
  out->used = used_[device].load(std::memory_order_relaxed);
  return {};
}

Status UnitDevices::reserve(size_t size, size_t unit, int device, void** base) {
  core::must_be_outside("Devices::reserve");
  if (!core::is_power_of_two(unit) || unit < kUnit || unit > largest_unit())
    return error(EINVAL, "a managed range in units of %#zx bytes: they are a power of two from 2 to %zu MiB", unit,
                 largest_unit() >> 20);
  if (size == 0 || size % unit != 0 || size > size_t{1} << 46)
    return error(EINVAL, "a managed range of %#zx bytes: the size must be a multiple of %zu MiB, at most 64 TiB", size,
                 unit >> 20);
  if (Status s = usable(device); !s.ok()) return s;
  try {
    return make_range(size, unit, device, base);
  } catch (const std::bad_alloc&) {
    return error(ENOMEM, "no memory to record a managed range of %#zx bytes", size);
  }
}

Status UnitDevices::make_range(size_t size, size_t unit, int device, void** base) {
  auto r = std::make_shared<Reservation>();
  std::map<uintptr_t, ReservationPtr> alone;  // allocates now what the registry needs later
  alone.emplace(0, r);
  auto node = alone.extract(alone.begin());
  void* units = mmap(nullptr, size / unit * sizeof(Unit), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (units == MAP_FAILED) return core::system_error(errno, "no memory for the state of %zu units", size / unit);
  r->units = static_cast<Unit*>(units);
  r->size = size;
  r->unit = unit;
  r->device = device;
  if (Status s = backend_reserve(*r); !s.ok()) return s;
  void* const at = reinterpret_cast<void*>(r->base);
  if (Status s = unified() ? gate_->add(at, size) : Status(); !s.ok()) {
    backend_release(*r);
    return s;
  }
  node.key() = r->base;
  std::unique_lock lock(registry_mutex_);
  registry_.insert(std::move(node));
  *base = at;
  return {};
}

Status UnitDevices::release(void* base) {
  core::must_be_outside("Devices::release");
  ReservationPtr r;
  {
    std::unique_lock lock(registry_mutex_);
    auto it = registry_.find(reinterpret_cast<uintptr_t>(base));
    if (it == registry_.end()) return error(EINVAL, "%p is not the base of a managed range", base);
    r = it->second;
    registry_.erase(it);
  }
  core::step("device.release");
  if (unified()) gate_->remove(base);
  Patience patience;
  for (size_t i = 0; !unified() && r->made.load() != 0; ++i) {
    const Span unit{r.get(), i, 1};
    if (unit.unit(0).state.load() == UnitState::open && !hide_at_last(unit, &patience)) {
      forget(unit);
    } else if (is_made(unit.unit(0).state.load())) {
      unback(unit);
    }
  }
  if (patience.given_up != 0) {
    const uint64_t all = given_up_.fetch_add(patience.given_up, std::memory_order_relaxed) + patience.given_up;
    core::log(core::Level::error,
              "%llu MiB of device memory are out of use, %llu in all, because a range ended while it was mapped: %.*s",
              static_cast<unsigned long long>(patience.given_up >> 20), static_cast<unsigned long long>(all >> 20),
              static_cast<int>(patience.why.text().size()), patience.why.text().data());
  }
  backend_release(*r);
  size_t made = r->made.load();
  for (size_t i = 0; made != 0; ++i) {
    if (!is_made(r->units[i].state)) continue;
    used_[r->units[i].device].fetch_sub(r->unit, std::memory_order_relaxed);
    --made;
  }
  return {};
}

Status UnitDevices::span_of(const char* what, Range range, unsigned allowed_states, ReservationPtr* keep,
                            Span* out) const {
  *keep = find(range.address);
  const Reservation* const r = keep->get();
  if (r == nullptr || range.size > r->base + r->size - range.address)
    return error(EINVAL, "%s of %#zx bytes at %#zx: not inside one managed range of libvmem", what, range.size,
                 range.address);
  if (range.size == 0 || range.address % r->unit != 0 || range.size % r->unit != 0)
    return error(EINVAL, "%s of %#zx bytes at %#zx: address and size must be multiples of %zu MiB", what, range.size,
                 range.address, r->unit >> 20);
  *out = {keep->get(), r->index(range.address), range.size / r->unit};
  for (size_t i = 0; i < out->count; ++i) {
    const UnitState state = out->unit(i).state.load();
    if ((bit(state) & allowed_states) == 0)
      return error(EINVAL, "%s at %#zx: the unit is %s", what, out->address() + i * r->unit, unit_state_name(state));
  }
  return {};
}

Status UnitDevices::resolve(const char* what, std::span<const Range> ranges, unsigned allowed_states,
                            Spans* out) const {
  if (ranges.size() > kMostRanges)
    return error(EINVAL, "%s: %zu ranges in one call, %zu are the most", what, ranges.size(), kMostRanges);
  core::InplaceVector<Range, kMostRanges> sorted;
  for (const Range& range : ranges) sorted.push_back(range);
  std::sort(sorted.begin(), sorted.end(), [](const Range& a, const Range& b) { return a.address < b.address; });
  uintptr_t end = 0;
  for (const Range& range : sorted) {
    ReservationPtr r;
    Span span;
    if (Status s = span_of(what, range, allowed_states, &r, &span); !s.ok()) return s;
    if (range.address < end) return error(EINVAL, "%s: %#zx is named twice in one call", what, range.address);
    if (!out->list.empty() && out->list.back().reservation == r.get() && end == range.address)
      out->list.back().count += span.count;
    else
      out->list.push_back(span);
    end = range.address + range.size;
    if (out->keep.empty() || out->keep.back() != r) out->keep.push_back(r);
  }
  return {};
}

Status UnitDevices::present(const Spans& spans) {
  if (!unified()) return {};
  for (const ReservationPtr& r : spans.keep)
    if (Status s = backend_present(*r); !s.ok()) return s;
  return {};
}

void UnitDevices::mark(const Span& span, UnitState state) {
  for (size_t i = 0; i < span.count; ++i) span.unit(i).state.store(state);
}

Status UnitDevices::make(const Span& span, int device) {
  const uintptr_t address = span.address();
  gate_->set(address, span.size(), Gate::shut);
  core::step("device.map");
  if (Status s = backend_map(span); !s.ok()) return s;
  core::step("device.mapped");
  if (Status s = protect(address, span.size(), PROT_NONE); !s.ok()) return s;
  core::step("device.shut");
  madvise(reinterpret_cast<void*>(address), span.size(), MADV_DONTFORK);
  madvise(reinterpret_cast<void*>(address), span.size(), MADV_DONTDUMP);
  uint64_t touched = 0;
  if (Status s = gate_->mapped_pages(address, span.size(), true, &touched); !s.ok()) return s;
  if (touched != 0)
    return error(kIntruder,
                 "a thread touched the block at %#zx in the instant between mapping and shutting it, and may have seen "
                 "zeros or lost a store",
                 address);
  for (size_t i = 0; i < span.count; ++i) {
    span.unit(i).device.store(static_cast<uint8_t>(device));
    span.unit(i).state.store(UnitState::shut);
  }
  used_[device].fetch_add(span.size(), std::memory_order_relaxed);
  span.reservation->made.fetch_add(span.count, std::memory_order_relaxed);
  if (Status s = apply_advice(span); !s.ok()) return s;
  core::step("device.populate");
  return backend_populate(span, device);
}

void UnitDevices::unmake(const Span& span) {
  gate_->set(span.address(), span.size(), Gate::shut);
  core::step("device.punch");
  place_hole(span.address(), span.size());
  backend_unmapped(span);
  for (size_t i = 0; i < span.count; ++i) {
    Unit& unit = span.unit(i);
    if (!is_made(unit.state.exchange(UnitState::punched))) continue;
    used_[unit.device.load()].fetch_sub(span.unit_size(), std::memory_order_relaxed);
    span.reservation->made.fetch_sub(1, std::memory_order_relaxed);
  }
}

Status UnitDevices::populate(std::span<const Range> ranges, int device, bool* torn) {
  core::must_be_outside("Devices::populate");
  *torn = false;
  Spans spans;
  if (Status s = usable(device); !s.ok()) return s;
  if (Status s = resolve("making a block", ranges, kHoles, &spans); !s.ok()) return s;
  if (Status s = present(spans); !s.ok()) return s;
  Status status;
  if (!unified()) {
    size_t done = 0;
    for (; done < spans.list.size() && status.ok(); ++done) status = back(spans.list[done], device);
    for (size_t i = 0; !status.ok() && i + 1 < done; ++i) unback(spans.list[i]);
    return status;
  }
  if (Status s = gate_->check(); !s.ok()) return s;
  for (size_t i = 0; i < spans.list.size() && status.ok(); ++i) status = make(spans.list[i], device);
  if (status.ok()) return {};
  for (const Span& span : spans.list) unmake(span);
  *torn = true;
  return status;
}

// An error changes nothing.
Status UnitDevices::back(const Span& span, int device) {
  used_[device].fetch_add(span.size(), std::memory_order_relaxed);
  core::step("device.populate");
  if (Status s = backend_back(span, device); !s.ok()) {
    used_[device].fetch_sub(span.size(), std::memory_order_relaxed);
    return s;
  }
  for (size_t i = 0; i < span.count; ++i) {
    span.unit(i).device.store(static_cast<uint8_t>(device));
    span.unit(i).filled.store(0);
    span.unit(i).state.store(UnitState::fresh);
  }
  span.reservation->made.fetch_add(span.count, std::memory_order_relaxed);
  return {};
}

void UnitDevices::unback(const Span& span) {
  core::step("device.punch");
  backend_unback(span);
  forget(span);
}

void UnitDevices::forget(const Span& span) {
  for (size_t i = 0; i < span.count; ++i) {
    used_[span.unit(i).device.load()].fetch_sub(span.unit_size(), std::memory_order_relaxed);
    span.unit(i).state.store(UnitState::hole);
  }
  span.reservation->made.fetch_sub(span.count, std::memory_order_relaxed);
}

// False: the unit is still mapped. Its piece then goes out of use: another unit with that piece
// would share it with code that uses the old mapping. The whole range has one short patience,
// because the thread that frees it waits.
bool UnitDevices::hide_at_last(const Span& unit, Patience* patience) {
  Status s = backend_hide(unit);
  for (; !s.ok() && patience->tries != 0; --patience->tries) {
    usleep(1000);
    s = backend_hide(unit);
  }
  if (s.ok()) return true;
  patience->given_up += unit.unit_size();
  patience->why = s;
  return false;
}

// Returns when the unit is not mapped, or its device is lost, which then refuses nothing.
void UnitDevices::hide_insistently(const Span& unit) {
  for (unsigned tries = 1;; ++tries) {
    const bool lost = !health(unit.unit(0).device.load()).ok();
    const Status s = backend_hide(unit);
    if (s.ok() || lost) return;
    if (tries == kSayAfter) {
      VMEM_LOG_OFTEN(
          core::Level::error,
          "a block cannot be unmapped at a place that it did not reach, and unmapping it is tried again: %.*s",
          static_cast<int>(s.text().size()), s.text().data());
    }
    usleep(1000);
  }
}

// Zeroes fresh units, so that no program sees old bytes of a piece.
Status UnitDevices::zero_fresh(const Span& span) {
  return span.runs([](const Unit& unit) { return unit.state.load() == UnitState::fresh; },
                   [&](const Span& fresh) {
                     Status s = backend_zero(fresh);
                     if (s.ok()) mark(fresh, UnitState::shut);
                     return s;
                   });
}

bool UnitDevices::show_again(const Span& span) {
  for (unsigned tries = 1;; ++tries) {
    const Status s = backend_show(span);
    if (s.ok()) return true;
    for (size_t i = 0; i < span.count; ++i)
      if (!health(span.unit(i).device.load()).ok()) return false;
    if (tries == kSayAfter) {
      VMEM_LOG_OFTEN(core::Level::error,
                     "blocks cannot be mapped again where they stay, and mapping them is tried again: %.*s",
                     static_cast<int>(s.text().size()), s.text().data());
    }
    usleep(1000);
  }
}

void UnitDevices::unhide(const Span& span) {
  for (size_t i = 0; i < span.count; ++i) {
    const Span unit{span.reservation, span.first + i, 1};
    if (!show_again(unit)) mark(unit, UnitState::shut);
  }
}

Status UnitDevices::map_units(std::span<const Range> ranges, bool zero_them) {
  core::must_be_outside("Devices::map");
  if (unified()) return {};
  Spans spans;
  if (Status s = resolve("mapping a block", ranges, bit(UnitState::fresh) | bit(UnitState::shut), &spans); !s.ok())
    return s;
  Status status;
  size_t done = 0;
  for (; done < spans.list.size(); ++done) {
    const Span& span = spans.list[done];
    core::step("device.map");
    for (size_t i = 0; i < span.count && status.ok(); ++i) {
      status = health(span.unit(i).device.load());
      if (zero_them && span.unit(i).filled.load() != 0)
        status = error(EINVAL, "mapping a block at %#zx: parts of it have not been copied",
                       span.address() + i * span.unit_size());
    }
    if (status.ok() && zero_them) status = zero_fresh(span);
    const uint64_t before = advised_.load();
    if (status.ok()) status = backend_show(span);
    if (!status.ok()) break;
    mark(span, UnitState::open);
    if (advised_.load() != before) show_to_seers(span);
  }
  for (size_t i = 0; !status.ok() && i < done; ++i) {
    if (backend_hide(spans.list[i]).ok()) mark(spans.list[i], UnitState::shut);
  }
  return status;
}

Status UnitDevices::unmap(std::span<const Range> ranges) {
  core::must_be_outside("Devices::unmap");
  if (unified()) return {};
  Spans spans;
  if (Status s = resolve("unmapping a block", ranges, kMade, &spans); !s.ok()) return s;
  for (const Span& span : spans.list) {
    core::step("device.unmap");
    Status s = span.runs([](const Unit& unit) { return unit.state.load() == UnitState::open; },
                         [&](const Span& mapped) {
                           Status hidden = backend_hide(mapped);
                           if (hidden.ok()) mark(mapped, UnitState::shut);
                           return hidden;
                         });
    if (!s.ok()) return s;
  }
  return {};
}

Status UnitDevices::share(Range range, Export how, int* descriptor) {
  core::must_be_outside("Devices::share");
  if (unified()) return error(EOPNOTSUPP, "managed memory cannot be exported: only physical handles can");
  Spans spans;
  if (Status s = resolve("exporting a block", {&range, 1}, bit(UnitState::open), &spans); !s.ok()) return s;
  const Span& span = spans.list[0];
  const int device = span.unit(0).device.load();
  if (how == Export::handle && span.count != 1)
    return error(EINVAL, "a descriptor covers one block, not %zu; export a dma-buf, or each block separately",
                 span.count);
  for (size_t i = 1; i < span.count; ++i) {
    if (span.unit(i).device.load() != device)
      return error(EINVAL, "exporting a block at %#zx: it is on device %d, the first of the range on device %d",
                   span.address() + i * span.unit_size(), int{span.unit(i).device.load()}, device);
  }
  if (Status s = health(device); !s.ok()) return s;
  return backend_share(span, how, descriptor);
}

Status UnitDevices::open(std::span<const Range> ranges, Access access) {
  core::must_be_outside("Devices::open");
  if (access == Access::none) return error(EINVAL, "opening a block without access: write_protect() takes access away");
  Spans spans;
  if (Status s = resolve("opening a block", ranges, kMade, &spans); !s.ok() || !unified()) return s;
  if (Status s = present(spans); !s.ok()) return s;
  const bool store = access == Access::read_write;
  for (const Span& span : spans.list) {
    core::step("device.open");
    if (Status s = protect(span.address(), span.size(), store ? PROT_READ | PROT_WRITE : PROT_READ); !s.ok()) return s;
    mark(span, store ? UnitState::open : UnitState::read);
    gate_->set(span.address(), span.size(), Gate::open);
  }
  return {};
}

Status UnitDevices::write_protect(std::span<const Range> ranges, Access still_allowed) {
  core::must_be_outside("Devices::write_protect");
  if (still_allowed == Access::read_write) return error(EINVAL, "holding a block with full access: open() gives it");
  Spans spans;
  if (Status s = resolve("holding a block", ranges, kMade, &spans); !s.ok() || !unified()) return s;
  if (Status s = present(spans); !s.ok()) return s;
  if (Status s = gate_->check(); !s.ok()) return s;
  const bool loads = still_allowed == Access::read;
  for (const Span& whole : spans.list) {
    if (Status s = backend_before_write_protect(whole); !s.ok()) return s;
    // If loads may go on, shut units stay shut: no thread can have begun to read them.
    for (size_t i = 0; i < whole.count;) {
      if (loads && whole.unit(i).state.load() == UnitState::shut) {
        ++i;
        continue;
      }
      size_t n = 1;
      while (i + n < whole.count && !(loads && whole.unit(i + n).state.load() == UnitState::shut)) ++n;
      const Span span{whole.reservation, whole.first + i, n};
      gate_->set(span.address(), span.size(), loads ? Gate::writers : Gate::shut);
      core::step("device.hold");
      if (Status s = protect(span.address(), span.size(), loads ? PROT_READ : PROT_NONE); !s.ok()) {
        for (size_t k = 0; k < n; ++k) {
          const UnitState state = span.unit(k).state.load();
          gate_->set(span.address() + k * span.unit_size(), span.unit_size(),
                     state == UnitState::shut   ? Gate::shut
                     : state == UnitState::held ? Gate::writers
                                                : Gate::open);
        }
        return s;
      }
      mark(span, loads ? UnitState::held : UnitState::shut);
      i += n;
    }
  }
  return {};
}

Status UnitDevices::punch(std::span<const Range> ranges) {
  core::must_be_outside("Devices::punch");
  Spans spans;
  if (Status s = resolve(unified() ? "destroying a block (hold it first)" : "giving a block up (unmap it first)",
                         ranges, kMade & ~bit(UnitState::open), &spans);
      !s.ok())
    return s;
  if (Status s = present(spans); !s.ok()) return s;
  for (const Span& span : spans.list)
    if (Status s = backend_before_punch(span); !s.ok()) return s;
  for (const Span& span : spans.list) {
    if (!unified()) unback(span);
  }
  if (!unified()) return {};
  if (Status s = gate_->check(); !s.ok()) return s;
  for (const Span& span : spans.list) unmake(span);
  return {};
}

Status UnitDevices::rearm(std::span<const Range> ranges) {
  core::must_be_outside("Devices::rearm");
  Spans spans;
  if (Status s = resolve("settling a hole", ranges, kHoles, &spans); !s.ok() || !unified()) return s;
  for (const Span& span : spans.list) {
    mark(span, UnitState::hole);
    gate_->set(span.address(), span.size(), Gate::open);
  }
  return {};
}

Status UnitDevices::advise(Range range, Advice advice, int location, bool set) {
  core::must_be_outside("Devices::advise");
  if (advice != Advice::read_mostly && location != kHost && (location < 0 || location >= count()))
    return error(ENODEV, "advice for device %d: this process has %d", location, count());
  // Makes its context: without one nothing can be mapped for the device.
  if (!unified() && advice == Advice::accessed_by && set && location != kHost) {
    if (Status s = usable(location); !s.ok()) return s;
  }
  Spans spans;
  if (Status s = resolve("advice", std::span(&range, 1), kAny, &spans); !s.ok()) return s;
  const Span& span = spans.list.front();
  {
    std::lock_guard lock(advice_mutex_);
    for (size_t i = 0; i < span.count; ++i) {
      AdviceSet wanted = advice_table_[span.unit(i).advice.load()];
      if (advice == Advice::preferred_location) wanted.preferred = set ? location : AdviceSet::kNowhere;
      if (advice == Advice::read_mostly) wanted.read_mostly = set;
      if (advice == Advice::accessed_by && location != kHost)
        wanted.accessed_by =
            set ? wanted.accessed_by | uint64_t{1} << location : wanted.accessed_by & ~(uint64_t{1} << location);
      auto known = std::find(advice_table_.begin(), advice_table_.end(), wanted);
      if (known == advice_table_.end()) {
        if (advice_table_.full()) return error(ENOSPC, "more than 255 different combinations of advice");
        advice_table_.push_back(wanted);
        known = advice_table_.end() - 1;
      }
      span.unit(i).advice.store(static_cast<uint8_t>(known - advice_table_.begin()));
    }
  }
  advised_.fetch_add(1);  // before the look at which units are mapped
  if (advice == Advice::accessed_by && location == kHost) return {};
  if (!unified()) return advice == Advice::accessed_by ? show_to(span, location, set) : Status();
  return span.runs([](const Unit& unit) { return is_made(unit.state.load()); },
                   [&](const Span& made) {
                     return backend_advise({made.address(), made.size()}, advice, location, set);
                   });
}

uint64_t UnitDevices::seers(const Unit& unit) const {
  const int device = unit.device.load();
  uint64_t seers = 0;
  {
    std::lock_guard lock(advice_mutex_);
    seers = advice_table_[unit.advice.load()].accessed_by;
  }
  for (size_t d = 0; d < infos_.size(); ++d)
    if (infos_[static_cast<size_t>(device)].links[d] == Link::none) seers &= ~(uint64_t{1} << d);
  return seers | uint64_t{1} << device;
}

// Changes mapped units only; other units get the access when they are mapped.
Status UnitDevices::show_to(const Span& span, int device, bool set) {
  for (size_t i = 0; i < span.count; ++i) {
    const Unit& unit = span.unit(i);
    const int on = unit.device.load();
    if (unit.state.load() != UnitState::open || on == device) continue;
    if (infos_[static_cast<size_t>(on)].links[static_cast<size_t>(device)] == Link::none) continue;
    if (Status s = backend_show_to({span.reservation, span.first + i, 1}, device, set); !s.ok()) return s;
  }
  return {};
}

// Follows advice that was given while the units were being mapped, as far as possible.
void UnitDevices::show_to_seers(const Span& span) {
  for (size_t i = 0; i < span.count; ++i) {
    const Unit& unit = span.unit(i);
    const uint64_t others = seers(unit) & ~(uint64_t{1} << unit.device.load());
    for (int d = 0; others >> d != 0; ++d) {
      if ((others >> d & 1) != 0) (void)backend_show_to({span.reservation, span.first + i, 1}, d, true);
    }
  }
}

Status UnitDevices::apply_advice(const Span& span) {
  for (size_t i = 0; i < span.count;) {
    const uint8_t id = span.unit(i).advice.load();
    size_t n = 1;
    while (i + n < span.count && span.unit(i + n).advice.load() == id) ++n;
    const Range range{span.address() + i * span.unit_size(), n * span.unit_size()};
    i += n;
    if (id == 0) continue;
    AdviceSet set;
    {
      std::lock_guard lock(advice_mutex_);
      set = advice_table_[id];
    }
    Status s;
    if (set.read_mostly) s = backend_advise(range, Advice::read_mostly, 0, true);
    if (s.ok() && set.preferred != AdviceSet::kNowhere)
      s = backend_advise(range, Advice::preferred_location, set.preferred, true);
    for (int d = 0; d < count() && s.ok(); ++d)
      if ((set.accessed_by >> d & 1) != 0) s = backend_advise(range, Advice::accessed_by, d, true);
    if (!s.ok()) return s;
  }
  return {};
}

Status UnitDevices::host_resident_bytes(Range range, uint64_t* bytes) {
  core::must_be_outside("Devices::host_resident_bytes");
  *bytes = 0;
  Spans spans;
  if (Status s = resolve("counting host pages", std::span(&range, 1), kAny, &spans); !s.ok() || !unified()) return s;
  const Span& span = spans.list.front();
  for (size_t i = 0; i < span.count; ++i) {
    if (!is_made(span.unit(i).state.load())) continue;
    uint64_t pages = 0;
    if (Status s = gate_->mapped_pages(span.address() + i * span.unit_size(), span.unit_size(), false, &pages); !s.ok())
      return s;
    *bytes += pages * core::kPage;
  }
  return {};
}

}  // namespace vmem::device
