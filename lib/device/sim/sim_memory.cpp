// The simulated devices: their start and health, their memory, copies and accesses of kernels.
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "core/outside_lock.h"
#include "core/process/at_exit.h"
#include "core/process/map_over.h"
#include "core/step.h"
#include "device/backend.h"
#include "device/managed/fault_gate.h"
#include "device/sim/sim_device.h"
#include "device/sim/sim_stream.h"

namespace vmem::device {

using core::strprintf;

namespace {
std::atomic<SimDevices*> current{nullptr};
constexpr uint8_t kCopyingOut = 0x80;  // Unit::moving: bit 7 a copy out, else the number of copies in

// Each size of unit has its own part.
size_t window_bytes(size_t devices, const SimOptions& options) {
  return kUnitSizes * devices * options.memory_bytes;
}
}  // namespace

SimDevices::SimDevices(const SimOptions& options)
    : UnitDevices(options.handles ? nullptr : &fault_gate::cpu_gate(), options.unit), options_(options) {
  for (int d = 0; d < options.devices; ++d) {
    Info info{d, strprintf("simulated device %d", d), "", -1, options.memory_bytes, {}};
    for (int other = 0; other < options.devices; ++other) info.links.push_back(other == d ? Link::self : options.link);
    infos_.push_back(std::move(info));
    auto device = std::make_unique<Device>();
    device->default_stream = std::make_unique<Stream>(d);
    for (auto& streams : device->copy_streams)
      for (int i = 0; i < 2; ++i) streams.push_back(std::make_unique<Stream>(d));
    devices_.push_back(std::move(device));
  }
}

Status SimDevices::start() {
  memfd_ = memfd_create("vmem-sim-device", MFD_CLOEXEC);
  if (memfd_ < 0) return core::system_error(errno, "no memory file for simulated devices");
  Status s;
  if (unified()) {
    s = cpu_gate()->install();
  } else {
    const size_t all = window_bytes(infos_.size(), options_);
    void* window = MAP_FAILED;
    if (ftruncate(memfd_, static_cast<off_t>(all)) == 0)
      window = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memfd_, 0);
    if (window == MAP_FAILED) {
      s = core::system_error(errno, "no window of %zu bytes for simulated devices", all);
    } else {
      madvise(window, all, MADV_DONTFORK);
      window_ = static_cast<std::byte*>(window);
    }
  }
  if (!s.ok()) {
    close(memfd_);
    memfd_ = -1;
    return s;
  }
  core::be_strict_about_big_locks(true);
  current.store(this);
  return {};
}

SimDevices::~SimDevices() {
  SimDevices* self = this;
  current.compare_exchange_strong(self, nullptr);
  life_->end();
  for (auto& d : devices_) {
    d->default_stream->finish();
    for (auto& streams : d->copy_streams)
      for (auto& s : streams) s->finish();
  }
  if (memfd_ < 0) return;
  if (unified()) {
    cpu_gate()->uninstall();
  } else {
    munmap(window_, window_bytes(infos_.size(), options_));
  }
  close(memfd_);
}

const char* SimDevices::name() const {
  return unified() ? "sim" : "sim-handles";
}

SimDevices* current_sim() {
  return current.load();
}

// --- health and refusals --------------------------------------------------------------------------------------------

Status SimDevices::health(int device) {
  core::must_be_outside("Devices::health");
  if (!opened_.exchange(true)) core::do_exit_work_before_this();
  std::lock_guard lock(mutex_);
  const Device& d = *devices_[static_cast<size_t>(device)];
  if (d.lost) return error(EIO, "device %d is lost: %s", device, d.reason.c_str());
  return {};
}

void SimDevices::lose(int device, std::string_view reason) {
  {
    std::lock_guard lock(mutex_);
    Device& d = *devices_[static_cast<size_t>(device)];
    if (!std::exchange(d.lost, true)) {
      try {
        d.reason = reason;
      } catch (const std::bad_alloc&) {  // lost without a reason
      }
    }
  }
  changed_.notify_all();
}

void SimDevices::fail(int device, std::string_view reason) {
  std::lock_guard lock(mutex_);
  Device& d = *devices_[static_cast<size_t>(device)];
  if (d.lost) return;
  d.fails = true;
  d.reason = reason;
}

Status SimDevices::probe(int device) {
  core::must_be_outside("Devices::probe");
  bool lost = false;
  {
    std::lock_guard lock(mutex_);
    Device& d = *devices_[static_cast<size_t>(device)];
    lost = std::exchange(d.fails, false) && !std::exchange(d.lost, true);
  }
  if (lost) changed_.notify_all();
  return health(device);
}

void SimDevices::reset(std::string_view reason) {
  reset_ = true;
  for (int d = 0; d < count(); ++d) lose(d, reason);
  while (copying_.load() != 0) std::this_thread::yield();
}

Status SimDevices::backend_present(const Reservation& r) {
  return reset_ ? error(EIO, "a reset released the addresses of the range at %#zx", r.base) : Status();
}

void SimDevices::violation(std::string what) {
  std::lock_guard lock(mutex_);
  violations_.push_back(std::move(what));
}

std::vector<std::string> SimDevices::violations() const {
  std::lock_guard lock(mutex_);
  return violations_;
}

void SimDevices::set_hook(SimHook hook) {
  std::lock_guard lock(hook_mutex_);
  hook_ = hook ? std::make_shared<SimHook>(std::move(hook)) : nullptr;
}

Status SimDevices::run_hook(SimOp op, int device, uintptr_t address, size_t size) {
  std::shared_ptr<SimHook> hook;
  {
    std::lock_guard lock(hook_mutex_);
    hook = hook_;
  }
  return hook ? (*hook)(op, device, address, size) : Status();
}

// --- memory ---------------------------------------------------------------------------------------------------------

Status SimDevices::backend_memory(int device, Memory* out) {
  out->total = options_.memory_bytes;
  const uint64_t taken = used(device) + devices_[static_cast<size_t>(device)]->others.load();
  out->free = options_.memory_bytes - std::min(options_.memory_bytes, taken);
  out->kept = devices_[static_cast<size_t>(device)]->pieces.idle_bytes();
  return {};
}

std::byte* SimDevices::view(const Reservation& r, uintptr_t address) const {
  return static_cast<std::byte*>(r.backend) + (address - r.base);
}

static off_t file_offset(const Reservation& r, uintptr_t address) {
  return static_cast<off_t>(r.backend_offset + (address - r.base));
}

// Frees the bytes behind [address, address + size).
static void discard(int memfd, const Reservation& r, uintptr_t address, size_t size) {
  fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, file_offset(r, address), static_cast<off_t>(size));
}

// Reserves aligned address space for the range.
Status SimDevices::address_space(Reservation& r) {
  if (options_.space != nullptr) {
    r.base = reinterpret_cast<uintptr_t>(options_.space) + placed_.fetch_add(r.size);
    return {};
  }
  const size_t span = r.size + r.unit;
  void* space = mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return core::system_error(errno, "no address space for a range of %zu bytes", r.size);
  const uintptr_t start = reinterpret_cast<uintptr_t>(space);
  r.base = core::round_up(start, r.unit);
  if (r.base > start) munmap(space, r.base - start);
  if (start + span > r.base + r.size) munmap(reinterpret_cast<void*>(r.base + r.size), start + span - r.base - r.size);
  return {};
}

Status SimDevices::backend_reserve(Reservation& r) {
  if (Status s = run_hook(SimOp::reserve, r.device, 0, r.size); !s.ok()) return s;
  if (!unified()) return reserve_pages(r);
  uint64_t offset;
  {
    std::lock_guard lock(mutex_);
    offset = file_end_;
    if (ftruncate(memfd_, static_cast<off_t>(offset + r.size)) != 0)
      return core::system_error(errno, "no room for %zu more simulated bytes", r.size);
    file_end_ += r.size;
  }
  if (Status s = address_space(r); !s.ok()) return s;
  void* second = mmap(nullptr, r.size, PROT_READ | PROT_WRITE, MAP_SHARED, memfd_, static_cast<off_t>(offset));
  if (second == MAP_FAILED) {
    const int err = errno;
    munmap(reinterpret_cast<void*>(r.base), r.size);
    return core::system_error(err, "no address space for the second view of %zu bytes", r.size);
  }
  r.backend = second;
  r.backend_size = r.size;
  r.backend_offset = offset;
  madvise(second, r.size, MADV_DONTFORK);
  place_hole(r.base, r.size);
  return {};
}

void SimDevices::backend_release(Reservation& r) {
  for (size_t i = 0, made = r.made.load(); made != 0; ++i) {
    if (!is_made(r.units[i].state)) continue;
    if (r.units[i].moving.load() != 0)
      violation(strprintf("range %#zx released while unit %zu was being copied", r.base, i));
    --made;
  }
  if (unified()) discard(memfd_, r, r.base, r.size);
  munmap(reinterpret_cast<void*>(r.base), r.size);
  // Work on a lost device runs on here, and may have looked a block up before. It gets addresses
  // that no range will have.
  bool lost = false;
  for (int d = 0; d < count(); ++d) lost |= !health(d).ok();
  if (!lost || core::map_over(reinterpret_cast<uintptr_t>(r.backend), r.backend_size, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != 0)
    munmap(r.backend, r.backend_size);
}

Status SimDevices::backend_map(const Span& span) {
  if (Status s = run_hook(SimOp::map, -1, span.address(), span.size()); !s.ok()) return s;
  // A kernel that outlived the last punch may have written into the hole: do not show its bytes.
  discard(memfd_, *span.reservation, span.address(), span.size());
  const int rc = core::map_over(span.address(), span.size(), PROT_READ | PROT_WRITE, MAP_SHARED, memfd_,
                                static_cast<uint64_t>(file_offset(*span.reservation, span.address())));
  if (rc == 0) return {};
  return core::system_error(-rc, "mapping %zu bytes at %#zx (raise vm.max_map_count?)", span.size(), span.address());
}

void SimDevices::backend_unmapped(const Span& span) {
  run_hook(SimOp::unmapped, -1, span.address(), span.size()).ignore();  // munmap of a made unit cannot fail
  discard(memfd_, *span.reservation, span.address(), span.size());
}

Status SimDevices::oversubscribed(int device) {
  const uint64_t made = used(device);
  if (made <= options_.memory_bytes) {
    if (made + devices_[static_cast<size_t>(device)]->others.load() <= options_.memory_bytes) return {};
    return error(ENOMEM, "other programs use the memory of device %d", device);
  }
  // CUDA would move other blocks to host memory without a word.
  violation(strprintf("device %d oversubscribed: %zu bytes made, it has %zu", device, static_cast<size_t>(made),
                      static_cast<size_t>(options_.memory_bytes)));
  return error(ENOMEM, "device %d has %zu bytes, %zu would be made", device, static_cast<size_t>(options_.memory_bytes),
               static_cast<size_t>(made));
}

Status SimDevices::backend_populate(const Span& span, int device) {
  if (Status s = oversubscribed(device); !s.ok()) return s;
  if (Status s = run_hook(SimOp::populate, device, span.address(), span.size()); !s.ok()) return s;
  return health(device);
}

Status SimDevices::reserve_pages(Reservation& r) {
  if (Status s = address_space(r); !s.ok()) return s;
  r.backend = mmap(nullptr, r.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (r.backend == MAP_FAILED) {
    const int err = errno;
    munmap(reinterpret_cast<void*>(r.base), r.size);
    return core::system_error(err, "no address space for the page table of %zu bytes", r.size);
  }
  r.backend_size = r.size;
  madvise(r.backend, r.size, MADV_DONTFORK);
  place_hole(r.base, r.size);
  return {};
}

std::byte* SimDevices::window(const Reservation& r, uintptr_t address, size_t* run) const {
  if (unified()) {
    *run = r.base + r.size - address;
    return view(r, address);
  }
  const Unit& unit = r.units[r.index(address)];
  const size_t inside = (address - r.base) % r.unit;
  *run = r.unit - inside;
  return window(unit.device.load(), r.unit, unit.piece.load()) + inside;
}

void SimDevices::copy_bytes(const Reservation& r, const Copy& copy, bool in) {
  for (size_t done = 0, run = 0; done < copy.size; done += run) {
    std::byte* const bytes = window(r, copy.block + done, &run);
    std::byte* const frame = copy.frame == nullptr ? nullptr : static_cast<std::byte*>(copy.frame) + done;
    run = std::min(run, copy.size - done);
    frame == nullptr ? std::memset(bytes, 0, run) : std::memcpy(in ? bytes : frame, in ? frame : bytes, run);
  }
}

Status SimDevices::backend_before_write_protect(const Span& span) {
  return run_hook(SimOp::hold, -1, span.address(), span.size());
}

Status SimDevices::backend_before_punch(const Span& span) {
  if (Status s = run_hook(SimOp::punch, -1, span.address(), span.size()); !s.ok()) return s;
  for (size_t i = 0; i < span.count; ++i)
    if (span.unit(i).moving.load() != 0) {
      std::string what = strprintf("punch at %#zx while it is being copied", span.address() + i * span.unit_size());
      if (health(span.unit(i).device.load()).ok()) violation(what);  // else its waiters were told that it is over
      return Status(EBUSY, what);
    }
  return {};
}

Status SimDevices::backend_migrate(const Span& span, int to) {
  if (Status s = run_hook(SimOp::migrate, to, span.address(), span.size()); !s.ok()) return s;
  for (size_t i = 0; i < span.count; ++i)
    if (span.unit(i).moving.load() != 0)
      violation(strprintf("unit at %#zx moved to device %d while it is being copied",
                          span.address() + i * span.unit_size(), to));
  if (Status s = oversubscribed(to); !s.ok()) return s;
  return probe(to);
}

Status SimDevices::backend_advise(Range range, Advice, int location, bool) {
  return run_hook(SimOp::advise, location, range.address, range.size);
}

Status SimDevices::backend_pin(void* frames, size_t size) {
  return run_hook(SimOp::pin, -1, reinterpret_cast<uintptr_t>(frames), size);
}

Status SimDevices::backend_unpin(void* frames) {
  return run_hook(SimOp::unpin, -1, reinterpret_cast<uintptr_t>(frames), 0);
}

// --- copies and kernels ---------------------------------------------------------------------------------------------

Status SimDevices::backend_copy(int device, Direction direction, std::span<const Copy> copies, Ticket* done) {
  const bool in = direction == Direction::in;
  if (Status s = probe(device); !s.ok()) return s;
  if (Status s = run_hook(in ? SimOp::issue_in : SimOp::issue_out, device, copies.front().block, copies.front().size);
      !s.ok())
    return s;
  auto moving = [in](const Reservation& r, const Copy& copy, bool begin) {
    bool clash = false;
    for (size_t i = r.index(copy.block); i <= r.index(copy.block + copy.size - 1); ++i) {
      std::atomic<uint8_t>& m = r.units[i].moving;
      if (in)
        clash |= ((begin ? m.fetch_add(1) : m.fetch_sub(1)) & kCopyingOut) != 0;
      else
        clash |= begin ? m.fetch_or(kCopyingOut) != 0 : (m.fetch_and(static_cast<uint8_t>(~kCopyingOut)), false);
    }
    return clash;
  };
  struct Item {
    ReservationPtr r;
    Copy copy;
  };
  Device& d = *devices_[static_cast<size_t>(device)];
  const auto side = static_cast<size_t>(direction);
  Stream* stream = d.copy_streams[side][d.next[side].fetch_add(1) % d.copy_streams[side].size()].get();
  std::shared_ptr<std::vector<Item>> items;
  std::shared_ptr<SimEvent> event;
  SimWork::Token token;
  try {
    items = std::make_shared<std::vector<Item>>();
    for (const Copy& copy : copies) items->push_back({find(copy.block), copy});
    event = std::make_shared<SimEvent>(device);
    token = SimWork::begin(d.work);
  } catch (const std::bad_alloc&) {
    return error(ENOMEM, "no memory for a list of copies");
  }
  for (const Item& item : *items) {
    bool clash = moving(*item.r, item.copy, true);
    for (size_t i = item.r->index(item.copy.block); i <= item.r->index(item.copy.block + item.copy.size - 1); ++i)
      clash |= is_sent(*item.r, i);
    if (clash) violation(strprintf("two copies of the unit at %#zx at once", item.copy.block));
  }
  Status queued = enqueue(stream, [this, &d, device, in, moving, items, event, token] {
    for (const Item& item : *items) {
      const Copy& copy = item.copy;
      core::step(in ? "device.copying_in" : "device.copying_out");
      Status s = run_hook(in ? SimOp::copy_in : SimOp::copy_out, device, copy.block, copy.size);
      if (!s.ok()) lose(device, s.text());
      copying_.fetch_add(1);  // before the check: reset() waits for copies that find the device well
      if (health(device).ok()) copy_bytes(*item.r, copy, in);
      copying_.fetch_sub(1);
      moving(*item.r, copy, false);
    }
    {
      std::unique_lock lock(mutex_);
      for (const Item& item : *items) {
        const auto* const before = static_cast<const SimEvent*>(item.copy.after.get());
        changed_.wait(lock, [&] { return before == nullptr || before->reached || d.lost; });
      }
      event->reached = true;
    }
    changed_.notify_all();
  });
  if (!queued.ok()) {
    for (const Item& item : *items) moving(*item.r, item.copy, false);
    return queued;
  }
  if (done != nullptr) *done = std::move(event);
  return {};
}

std::byte* SimKernel::at(const void* address, size_t size, bool store) {
  return sim_.kernel_access(device_, reinterpret_cast<uintptr_t>(address), size, store);
}

std::byte* SimDevices::kernel_access(int device, uintptr_t address, size_t size, bool store) {
  if (!health(device).ok()) return nullptr;
  auto illegal = [&](const char* why) -> std::byte* {
    lose(device,
         strprintf("error 700, illegal address: a kernel's %s at %#zx: %s", store ? "store" : "load", address, why));
    return nullptr;
  };
  ReservationPtr r = find(address);
  if (r == nullptr || size == 0 || size > r->base + r->size - address) return illegal("not managed memory");
  for (size_t i = r->index(address); i <= r->index(address + size - 1); ++i) {
    const Unit& unit = r->units[i];
    if (!is_made(unit.state.load())) return illegal("a hole");
    if (!unified() && unit.state.load() != UnitState::open) return illegal("not mapped");
    if (!unified() && !mapped_for(device, r->base + i * r->unit)) return illegal("on another device");
    if (info(device).links[unit.device.load()] == Link::none) return illegal("on a device without peer access");
    const uint8_t moving = unit.moving.load();
    if ((moving & ~kCopyingOut) != 0 || (store && (moving & kCopyingOut) != 0)) {
      violation(strprintf("a kernel's %s at %#zx while it is being copied %s", store ? "store" : "load", address,
                          (moving & kCopyingOut) != 0 ? "out" : "in"));
      return illegal("it is being copied");
    }
    if (is_sent(*r, i)) {
      violation(
          strprintf("a kernel's %s at %#zx while it is sent to another device", store ? "store" : "load", address));
      return illegal("it is on its way between devices");
    }
  }
  return view(*r, address);
}

Status make_sim_devices(const SimOptions& options, std::unique_ptr<SimDevices>* out) {
  if (options.devices < 1 || options.devices > static_cast<int>(kMaxDevices))
    return error(EINVAL, "%d simulated devices are not accepted: give 1 to %u", options.devices, kMaxDevices);
  if (!core::is_power_of_two(options.unit) || options.unit < kUnit || options.unit > kLargestUnit ||
      (!options.handles && options.unit != kUnit))
    return error(EINVAL, "simulated devices%s have no units of %zu bytes", options.handles ? " on handles" : "",
                 options.unit);
  auto sim = std::make_unique<SimDevices>(options);
  if (Status s = sim->start(); !s.ok()) return s;
  *out = std::move(sim);
  return {};
}

Status make_sim_devices(bool handles, size_t unit, std::unique_ptr<Devices>* out) {
  std::unique_ptr<SimDevices> sim;
  SimOptions options;
  options.handles = handles;
  options.unit = unit;
  if (Status s = make_sim_devices(options, &sim); !s.ok()) return s;
  *out = std::move(sim);
  return {};
}

extern const Backend sim_backend, sim_handles_backend;
const Backend sim_backend = {"sim", false, nullptr,
                             [](size_t, std::unique_ptr<Devices>* out) { return make_sim_devices(false, kUnit, out); }};
const Backend sim_handles_backend = {"sim-handles", false, nullptr, [](size_t unit, std::unique_ptr<Devices>* out) {
                                       return make_sim_devices(true, unit, out);
                                     }};

}  // namespace vmem::device
