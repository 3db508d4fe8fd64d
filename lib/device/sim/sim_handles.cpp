// Simulated devices with page tables of their own (SimOptions::handles): pieces of their memory
// behind units, and the device's view of a range, which is its second view.
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "core/outside_lock.h"
#include "core/process/map_over.h"
#include "device/sim/sim_stream.h"

namespace vmem::device {

Status SimDevices::make_piece(int device, size_t size, uint32_t number, Piece* out) {
  const uint64_t part = unit_class(size) * devices_.size() + static_cast<uint64_t>(device);
  const uint64_t at = part * options_.memory_bytes + number * uint64_t{size};
  if ((number + 1) * uint64_t{size} > options_.memory_bytes)
    return error(ENOMEM, "device %d has no memory for another piece", device);
  *out = {at, reinterpret_cast<uintptr_t>(window_ + at)};
  return {};
}

Status SimDevices::take_piece(int device, size_t size, uint32_t* out) {
  return devices_[static_cast<size_t>(device)]->pieces.take(
      size, out, [&](size_t bytes, uint32_t n, Piece* piece) { return make_piece(device, bytes, n, piece); },
      [&](size_t bytes, const Piece& piece) { return destroy_piece(bytes, piece); });
}

bool SimDevices::destroy_piece(size_t size, const Piece& piece) {
  if (piece.shared) return false;  // its bytes stay those of the descriptor's holder
  fallocate(memfd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(piece.handle),
            static_cast<off_t>(size));
  return true;
}

Status SimDevices::backend_back(const Span& span, int device) {
  if (Status s = oversubscribed(device); !s.ok()) return s;
  if (Status s = run_hook(SimOp::populate, device, span.address(), span.size()); !s.ok()) return s;
  if (Status s = probe(device); !s.ok()) return s;
  PiecePool& pool = devices_[static_cast<size_t>(device)]->pieces.of(span.unit_size());
  for (size_t i = 0; i < span.count; ++i) {
    uint32_t piece = 0;
    Status s = take_piece(device, span.unit_size(), &piece);
    for (size_t k = 0; !s.ok() && k < i; ++k) backend_give(device, pool.size(), span.unit(k).piece.load());
    if (!s.ok()) return s;
    span.unit(i).piece.store(piece);
  }
  return {};
}

void SimDevices::backend_unback(const Span& span) {
  run_hook(SimOp::unmapped, -1, span.address(), span.size()).ignore();
  for (size_t i = 0; i < span.count; ++i)
    backend_give(span.unit(i).device.load(), span.unit_size(), span.unit(i).piece.load());
}

Status SimDevices::backend_take(int device, size_t size, uint32_t* piece) {
  if (Status s = oversubscribed(device); !s.ok()) return s;
  if (Status s = health(device); !s.ok()) return s;
  return take_piece(device, size, piece);
}

std::byte* SimDevices::window(int device, size_t size, uint32_t piece) const {
  return reinterpret_cast<std::byte*>(devices_[static_cast<size_t>(device)]->pieces.of(size).window(piece));
}

void SimDevices::backend_give(int device, size_t size, uint32_t piece) {
  if (is_sent(window(device, size, piece)))
    violation(core::strprintf("piece %u of device %d given up while it is sent to another device", piece, device));
  devices_[static_cast<size_t>(device)]->pieces.of(size).give(
      piece, [&](const Piece& left) { return destroy_piece(size, left); });
}

Status SimDevices::backend_send_piece(const Span& span, int device, uint32_t piece, int by, Ticket* done) try {
  done->reset();
  if (Status s = run_hook(SimOp::migrate, device, span.address(), span.size()); !s.ok()) return s;
  if (span.unit(0).moving.load() != 0)
    violation(core::strprintf("unit at %#zx moved to device %d while it is being copied", span.address(), device));
  for (const int d : {device, static_cast<int>(span.unit(0).device.load())})
    if (Status s = probe(d); !s.ok()) return s;
  Device& copier = *devices_[static_cast<size_t>(by)];
  const auto side = static_cast<size_t>(by == device ? Direction::in : Direction::out);
  Stream* const stream =
      copier.copy_streams[side][copier.next[side].fetch_add(1) % copier.copy_streams[side].size()].get();
  const size_t size = span.unit_size();
  size_t run = 0;
  const std::byte* const source = window(*span.reservation, span.address(), &run);
  std::byte* const target = window(device, size, piece);
  auto event = std::make_shared<SimEvent>(by);
  auto token = SimWork::begin(copier.work);
  {
    std::lock_guard lock(mutex_);
    sending_.push_back({source, target, by});
  }
  const auto end = [this, target, event] {
    {
      std::lock_guard lock(mutex_);
      std::erase_if(sending_, [&](const Sending& s) { return s.target == target; });
      event->reached = true;
    }
    changed_.notify_all();
  };
  Status queued = enqueue(stream, [this, at = span.address(), size, source, target, by, end, token = std::move(token)] {
    core::step("device.sending");
    if (Status s = run_hook(SimOp::send, by, at, size); !s.ok()) lose(by, s.text());
    copying_.fetch_add(1);  // before the check: reset() waits for copies that find the device well
    if (health(by).ok()) std::memcpy(target, source, size);
    copying_.fetch_sub(1);
    end();
  });
  if (!queued.ok()) {
    end();
    return queued;
  }
  *done = std::move(event);
  return {};
} catch (const std::bad_alloc&) {
  return error(ENOMEM, "no memory to record a copy");
}

bool SimDevices::is_sent(const std::byte* piece) const {
  std::lock_guard lock(mutex_);
  return std::any_of(sending_.begin(), sending_.end(), [&](const Sending& s) {
    return (s.source == piece || s.target == piece) && !devices_[static_cast<size_t>(s.by)]->lost;
  });
}

Status SimDevices::backend_zero(const Span& span) {
  for (uintptr_t at = span.address(); at < span.address() + span.size(); at += span.unit_size()) {
    size_t run = 0;
    std::byte* const bytes = window(*span.reservation, at, &run);
    memset(bytes, 0, span.unit_size());
  }
  return {};
}

bool SimDevices::mapped_for(int device, uintptr_t unit) {
  const std::lock_guard lock(mutex_);
  const auto at = mapped_for_.find(unit);
  return at != mapped_for_.end() && (at->second >> device & 1) != 0;
}

Status SimDevices::let_see(uintptr_t unit, int device, bool set) try {
  const std::lock_guard lock(mutex_);
  uint64_t& devices = mapped_for_[unit];
  devices = set ? devices | uint64_t{1} << device : devices & ~(uint64_t{1} << device);
  return {};
} catch (const std::bad_alloc&) {
  return error(ENOMEM, "no memory for a simulated mapping");
}

Status SimDevices::backend_show_to(const Span& span, int device, bool set) {
  bool mapped = true;
  for (size_t i = 0; i < span.count; ++i) {
    const std::lock_guard lock(mutex_);
    mapped &= mapped_for_.contains(span.address() + i * span.unit_size());
  }
  if (Status s = run_hook(SimOp::advise, device, span.address(), span.size()); !s.ok()) return s;
  if (!mapped) return error(EINVAL, "letting device %d at %#zx, where nothing is mapped", device, span.address());
  Status s;
  for (size_t i = 0; i < span.count && s.ok(); ++i) s = let_see(span.address() + i * span.unit_size(), device, set);
  return s;
}

Status SimDevices::backend_show(const Span& span) {
  // The devices are chosen here: backend_show_to() follows later advice.
  for (size_t i = 0; i < span.count; ++i) {
    const uint64_t devices = seers(span.unit(i));
    for (int d = 0; devices >> d != 0; ++d) {
      Status s = let_see(span.address() + i * span.unit_size(), d, (devices >> d & 1) != 0);
      if (!s.ok()) return s;
    }
  }
  if (Status s = run_hook(SimOp::map, -1, span.address(), span.size()); !s.ok()) return s;
  if (Status s = probe(span.unit(0).device.load()); !s.ok()) return s;
  const size_t unit = span.unit_size();
  for (size_t i = 0; i < span.count; ++i) {
    const uintptr_t at = span.address() + i * unit;
    size_t run = 0;
    const auto offset = static_cast<uint64_t>(window(*span.reservation, at, &run) - window_);
    const int rc = core::map_over(reinterpret_cast<uintptr_t>(view(*span.reservation, at)), unit,
                                  PROT_READ | PROT_WRITE, MAP_SHARED, memfd_, offset);
    if (rc == 0) continue;
    for (size_t k = 0; k < i; ++k)
      core::map_over(reinterpret_cast<uintptr_t>(view(*span.reservation, span.address() + k * unit)), unit,
                     PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return core::system_error(-rc, "mapping %zu bytes at %#zx (raise vm.max_map_count?)", span.size(), span.address());
  }
  madvise(view(*span.reservation, span.address()), span.size(), MADV_DONTFORK);
  return {};
}

Status SimDevices::backend_hide(const Span& span) {
  if (Status s = run_hook(SimOp::hold, -1, span.address(), span.size()); !s.ok()) return s;
  const size_t unit = span.unit_size();
  Status status;
  Span gone{span.reservation, span.first, 0};
  for (; gone.count < span.count; ++gone.count) {
    if (span.count == 1) continue;
    status = run_hook(SimOp::hold_units, span.unit(gone.count).device.load(), span.address() + gone.count * unit, unit);
    if (!status.ok()) break;
  }
  if (gone.count == 0) return status;
  // A kernel that runs on here accesses memory that nothing reads; its next at() is an illegal
  // address.
  const int rc = core::map_over(reinterpret_cast<uintptr_t>(view(*span.reservation, span.address())), gone.size(),
                                PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (rc != 0) return core::system_error(-rc, "unmapping %zu bytes at %#zx", gone.size(), span.address());
  {
    const std::lock_guard lock(mutex_);
    for (size_t k = 0; k < gone.count; ++k) mapped_for_.erase(span.address() + k * unit);
  }
  madvise(view(*span.reservation, span.address()), gone.size(), MADV_DONTFORK);
  if (!status.ok()) unhide(gone);
  return status;
}

// The descriptor covers the memory of all simulated devices; its offset is where the units begin.
Status SimDevices::backend_share(const Span& span, Export, int* descriptor) {
  PiecePool& pool = devices_[span.unit(0).device.load()]->pieces.of(span.unit_size());
  const uint64_t first = pool.handle(span.unit(0).piece.load());
  for (size_t i = 0; i < span.count; ++i) {
    pool.share(span.unit(i).piece.load());
    if (pool.handle(span.unit(i).piece.load()) != first + i * span.unit_size())
      return error(EOPNOTSUPP, "simulated devices export blocks that lie side by side in their memory alone");
  }
  if (Status s = run_hook(SimOp::share, span.unit(0).device.load(), span.address(), span.size()); !s.ok()) return s;
  const int fd = ::open(("/proc/thread-self/fd/" + std::to_string(memfd_)).c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return core::system_error(errno, "no descriptor of a block");
  lseek(fd, static_cast<off_t>(first), SEEK_SET);
  *descriptor = fd;
  return {};
}

Status SimDevices::trim(int device, uint64_t keep) {
  core::must_be_outside("Devices::trim");
  if (Status s = usable(device); !s.ok() || unified()) return s;
  devices_[static_cast<size_t>(device)]->pieces.trim(
      keep, [&](size_t size, const Piece& piece) { return destroy_piece(size, piece); });
  return {};
}

}  // namespace vmem::device
