// Physical handles: device memory without an address, in pieces. Each piece is mapped for life in
// its device's window, through which it is copied, and at a block's address while the device holds
// that block. Mappings of the process at the same addresses stay as they are.
//
// The driver's calls wait for no kernel. Their cost is per handle, whatever its size, so a handle
// is a whole unit of its range (2 to 64 MiB).
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>
#include <utility>

#include "core/inplace_vector.h"
#include "core/log.h"
#include "core/outside_lock.h"
#include "core/process/map_over.h"
#include "core/scope_guard.h"
#include "device/cuda/cuda_devices.h"

namespace vmem::device {

using cuda::Enter;
using cuda::Timeline;

namespace {

constexpr unsigned kSayAfter = 1000;  // refused tries, 1 ms apart, before the log says so
// A kernel makes zeros of this many bytes or more. The caller then waits until the kernel has begun,
// but for no copy: worse for small blocks, much better for large ones.
constexpr size_t kClearedByKernel = size_t{8} << 20;
// Mapping of units of this size and more is ordered against copies and unmapping. Smaller units take
// as long to map as to copy: the two go on side by side in any order, and waiting for an order costs
// what the order saves.
constexpr size_t kMappedInTurn = size_t{8} << 20;
// Most units that one call gives access to. During the call no other thread maps or unmaps, which
// takes long beside copies that mapping waits for.
constexpr size_t kMappedTogether = 4;

CUmemLocation place(int device) {
  CUmemLocation location = {};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

CUmemAccessDesc access_of(int device) {
  CUmemAccessDesc desc = {};
  desc.location = place(device);
  desc.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return desc;
}

}  // namespace

// Calls on addresses and handles do not report that a kernel has ended the context: ask a stream.
Status CudaDevices::notice(Gpu& g) {
  Enter here(driver_, g.context);
  const CUresult e = driver_.stream_query(g.copy[0][0]);
  return result(g, e == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : e, "looking after it");
}

Status CudaDevices::probe(int device) {
  core::must_be_outside("Devices::probe");
  if (Status s = usable(device); !s.ok()) return s;
  return notice(gpu(device));
}

Status CudaDevices::backend_reserve(Reservation& r) {
  Gpu& g = gpu(r.device);
  Enter here(driver_, g.context);
  CUdeviceptr at = 0;
  if (Status s = result(g, driver_.address_reserve(&at, r.size, r.unit, 0, 0), "reserving addresses"); !s.ok())
    return s;
  // Replaces the driver's mapping there; its reservation stays.
  r.base = at;
  r.backend = pointer(at);
  r.backend_size = r.size;
  place_hole(r.base, r.size);
  return {};
}

void CudaDevices::backend_release(Reservation& r) {
  Gpu& g = gpu(r.device);
  if (health(r.device).ok()) {
    // The driver may use the addresses, and what is mapped there, for its next reservation. Leave
    // nothing of ours there, nor memory that the program has mapped there since.
    core::map_over(r.base, r.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    Enter here(driver_, g.context);
    const Status s = result(g, driver_.address_free(r.base, r.size), "giving addresses back");
    if (s.ok()) return;
    core::log(core::Level::warning, "%.*s", static_cast<int>(s.text().size()), s.text().data());
  }
  // The driver believes that it owns them, and could take a later mapping away.
  place_hole(r.base, r.size);
}

// Once per device and size: reserves addresses for as many pieces as the device has memory.
Status CudaDevices::make_window(Gpu& g, size_t size) {
  std::lock_guard lock(g.open_mutex);
  CUdeviceptr& window = g.windows[unit_class(size)];
  if (window != 0) return {};
  if (g.window_size == 0)
    g.window_size = core::round_up(infos_[static_cast<size_t>(g.device)].total_bytes, kLargestUnit);
  Enter here(driver_, g.context);
  CUdeviceptr at = 0;
  if (Status s = result(g, driver_.address_reserve(&at, g.window_size, size, 0, 0), "reserving a window"); !s.ok())
    return s;
  window = at;
  return {};
}

// The handle can be exported, and reached by other devices, if this device can do that.
Status CudaDevices::make_handle(Gpu& g, size_t size, CUmemGenericAllocationHandle* out) {
  CUmemAllocationProp what = {};
  what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  what.location = place(g.device);
  if (!g.plain.load()) {
    if (g.exports) what.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (g.rdma) what.allocFlags.gpuDirectRDMACapable = 1;
  }
  CUresult r = driver_.mem_create(out, size, &what, 0);
  if (r != CUDA_SUCCESS && r != CUDA_ERROR_OUT_OF_MEMORY && !g.plain.load() && (g.exports || g.rdma)) {
    what.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    what.allocFlags.gpuDirectRDMACapable = 0;
    r = driver_.mem_create(out, size, &what, 0);
    if (r == CUDA_SUCCESS && !g.plain.exchange(true))
      core::log(core::Level::warning, "device %d makes no memory that can be exported: vmem_export is refused",
                g.device);
  }
  return result(g, r, "making a handle");
}

Status CudaDevices::make_piece(Gpu& g, size_t size, uint32_t number, Piece* out) {
  if ((number + 1) * uint64_t{size} > g.window_size)
    return error(ENOMEM, "device %d has no addresses for another piece", g.device);
  Enter here(driver_, g.context);
  CUmemGenericAllocationHandle handle = 0;
  if (Status s = make_handle(g, size, &handle); !s.ok()) return s;
  const CUdeviceptr at = g.windows[unit_class(size)] + number * uint64_t{size};
  Status s = result(g, driver_.mem_map(at, size, 0, handle, 0), "mapping a handle in the window");
  uint64_t seen_by = 0;
  if (s.ok()) {
    // Devices that may copy from the piece get access, too.
    core::InplaceVector<CUmemAccessDesc, kMaxDevices> access;
    access.push_back(access_of(g.device));
    const Info& info = infos_[static_cast<size_t>(g.device)];
    for (size_t d = 0; d < info.links.size(); ++d) {
      if (info.links[d] != Link::self && info.links[d] != Link::none && gpus_[d]->opened.load() &&
          !gpus_[d]->lost.load()) {
        access.push_back(access_of(static_cast<int>(d)));
        seen_by |= uint64_t{1} << d;
      }
    }
    // A device that gets no access, or has been lost since, copies through host memory, if at all.
    CUresult given = driver_.mem_set_access(at, size, &access[0], access.size());
    if (given != CUDA_SUCCESS && access.size() > 1) {
      given = driver_.mem_set_access(at, size, &access[0], 1);
      seen_by = 0;
    }
    s = result(g, given, "giving access to the window");
    if (!s.ok()) driver_.mem_unmap(at, size);
  }
  if (!s.ok()) {
    driver_.mem_release(handle);
    return s;
  }
  *out = {.handle = handle, .window = at, .seen_by = seen_by};
  return {};
}

bool CudaDevices::destroy_piece(size_t size, const Piece& piece) {
  // The memory goes with its last mapping: give nothing up unless that has gone.
  if (driver_.mem_unmap(piece.window, size) != CUDA_SUCCESS) return false;
  driver_.mem_release(piece.handle);
  return true;
}

Status CudaDevices::trim(int device, uint64_t keep) {
  core::must_be_outside("Devices::trim");
  if (Status s = usable(device); !s.ok()) return s;
  Gpu& g = gpu(device);
  Enter here(driver_, g.context);
  g.pieces.trim(keep, [this](size_t size, const Piece& piece) { return destroy_piece(size, piece); });
  return {};
}

Status CudaDevices::take_piece(Gpu& g, size_t size, uint32_t* out) {
  if (Status s = make_window(g, size); !s.ok()) return s;
  return g.pieces.take(
      size, out, [&](size_t bytes, uint32_t number, Piece* piece) { return make_piece(g, bytes, number, piece); },
      [&](size_t bytes, const Piece& piece) {
        Enter here(driver_, g.context);
        return destroy_piece(bytes, piece);
      });
}

Status CudaDevices::backend_back(const Span& span, int device) {
  Timeline timeline("prepare");
  Gpu& g = gpu(device);
  if (Status s = notice(g); !s.ok()) return s;
  for (size_t i = 0; i < span.count; ++i) {
    uint32_t piece = 0;
    Status s = take_piece(g, span.unit_size(), &piece);
    for (size_t k = 0; !s.ok() && k < i; ++k) backend_give(device, span.unit_size(), span.unit(k).piece.load());
    if (!s.ok()) return s;
    span.unit(i).piece.store(piece);
  }
  return {};
}

void CudaDevices::backend_unback(const Span& span) {
  for (size_t i = 0; i < span.count; ++i)
    backend_give(span.unit(i).device.load(), span.unit_size(), span.unit(i).piece.load());
}

Status CudaDevices::make_zeros(Gpu& g) {
  void* const zeros = mmap(nullptr, kUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (zeros == MAP_FAILED) return core::system_error(errno, "no memory for a block of zeros");
  madvise(zeros, kUnit, MADV_DONTFORK);
  Status s = result(g, driver_.host_register(zeros, kUnit, 0), "pinning a block of zeros");
  if (s.ok()) {
    g.zeros = static_cast<std::byte*>(zeros);
  } else {
    munmap(zeros, kUnit);
  }
  return s;
}

void CudaDevices::free_zeros(Gpu& g) {
  if (g.zeros == nullptr) return;
  driver_.host_unregister(g.zeros);
  munmap(g.zeros, kUnit);
}

// The driver writes page tables by a copy engine. On some hosts that is the engine that copies to
// the device, and mapping waits for such copies. Tried with 32 MiB of zeros, twice, since a call
// may take long for other reasons.
bool CudaDevices::mapping_waits_for_copies(Gpu& g) {
  constexpr unsigned kCopies = 16, kTries = 2;
  const CUmemAccessDesc access = access_of(g.device);
  CUmemAllocationProp what = {};
  what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  what.location = place(g.device);
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr at = 0;
  if (driver_.mem_create(&handle, kUnit, &what, 0) != CUDA_SUCCESS) return false;
  const core::ScopeGuard release([&] { driver_.mem_release(handle); });
  if (driver_.address_reserve(&at, 2 * kUnit, kUnit, 0, 0) != CUDA_SUCCESS) return false;
  const core::ScopeGuard free([&] { driver_.address_free(at, 2 * kUnit); });
  const auto map = [&](size_t i) {
    if (driver_.mem_map(at + i * kUnit, kUnit, 0, handle, 0) != CUDA_SUCCESS) return false;
    if (driver_.mem_set_access(at + i * kUnit, kUnit, &access, 1) == CUDA_SUCCESS) return true;
    driver_.mem_unmap(at + i * kUnit, kUnit);
    return false;
  };
  if (!map(0)) return false;
  const core::ScopeGuard unmap([&] { driver_.mem_unmap(at, kUnit); });
  const CUstream stream = g.copy[static_cast<size_t>(Direction::in)][0];
  bool waits = true;
  for (unsigned i = 0; i < kTries && waits; ++i) {
    if (!map(1)) return false;  // the first time takes longer
    driver_.mem_unmap(at + kUnit, kUnit);
    for (unsigned k = 0; k < kCopies && waits; ++k) waits = driver_.copy_in(at, g.zeros, kUnit, stream) == CUDA_SUCCESS;
    const bool mapped = waits && map(1);
    waits = mapped && driver_.stream_query(stream) == CUDA_SUCCESS;
    driver_.stream_synchronize(stream);
    if (mapped) driver_.mem_unmap(at + kUnit, kUnit);
  }
  return waits;
}

bool CudaDevices::maps_ahead(int device, size_t unit) {
  return unit >= kMappedInTurn && gpu(device).maps_ahead.load(std::memory_order_relaxed);
}

void CudaDevices::start_clearing(Gpu& g) {
  std::unique_ptr<cuda::Clearing> clearing(new (std::nothrow) cuda::Clearing(driver_));
  if (clearing != nullptr && clearing->start()) {
    g.clearing = std::move(clearing);
  } else {
    core::log(core::Level::info, "device %d cannot run libvmem's kernel: zeros are copied over its link", g.device);
  }
}

bool CudaDevices::clear_by_kernel(Gpu& g, std::span<const cuda::Clearing::Part> parts, const CudaEvent& cleared,
                                  const CUstream* then) {
  size_t bytes = 0;
  for (const cuda::Clearing::Part& part : parts) bytes += part.size;
  return bytes >= kClearedByKernel && g.clearing != nullptr &&
         g.clearing->clear(
             parts, [&] { return notice(g).ok(); }, cleared.event, then);
}

CUresult CudaDevices::clear(Gpu& g, std::span<const cuda::Clearing::Part> parts, CUstream stream) {
  std::shared_ptr<CudaEvent> cleared;
  if (take_event(g, &cleared).ok() && clear_by_kernel(g, parts, *cleared, &stream)) return CUDA_SUCCESS;
  CUresult e = CUDA_SUCCESS;
  for (const cuda::Clearing::Part& part : parts)
    for (size_t offset = 0, size = 0; offset < part.size && e == CUDA_SUCCESS; offset += size) {
      size = std::min(part.size - offset, kUnit);
      e = driver_.copy_in(part.at + offset, g.zeros, size, stream);
    }
  return e;
}

Status CudaDevices::backend_zero(const Span& span) {
  for (size_t i = 0; i < span.count;) {
    Gpu& g = gpu(span.unit(i).device.load());
    Enter here(driver_, g.context);
    CUstream stream = nullptr;
    if (Status s = take_stream(g, &stream); !s.ok()) return s;
    PiecePool& pool = g.pieces.of(span.unit_size());
    core::InplaceVector<cuda::Clearing::Part, kMostRanges> parts;
    for (; i < span.count && span.unit(i).device.load() == g.device && parts.size() < kMostRanges; ++i)
      parts.push_back({pool.window(span.unit(i).piece.load()), pool.size()});
    Status s = finish(g, stream, clear(g, parts.all(), stream), "clearing a block");
    if (!g.lost.load()) give_stream(g, stream);
    if (!s.ok()) return s;
  }
  return {};
}

void CudaDevices::let_unmapping_go_first() {
  constexpr std::chrono::microseconds kMost{500};
  if (unmapping_.load() == 0) return;
  const auto until = std::chrono::steady_clock::now() + kMost;
  while (unmapping_.load() != 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
}

// Gives access to several adjacent units by one call. Alone that takes as long as a call for each;
// it helps if other threads call the driver at the same time (the cause is not profiled).
Status CudaDevices::backend_show(const Span& span) {
  Timeline timeline("map");
  if (Status s = notice(gpu(span.unit(0).device.load())); !s.ok()) return s;
  const size_t size = span.unit_size();
  // A caller that is told that a unit is not mapped gives its piece to the next block: retry.
  const auto take_back = [&](size_t i) {
    Gpu& g = gpu(span.unit(i).device.load());
    Enter here(driver_, g.context);
    for (unsigned tries = 1; !g.lost.load(); ++tries) {
      const Status s = result(g, driver_.mem_unmap(span.address() + i * size, size), "unmapping a block");
      if (s.ok()) return;
      if (tries == kSayAfter) {
        VMEM_LOG_OFTEN(core::Level::error,
                       "a part of a block that cannot be mapped is still mapped, and unmapping it is tried again: %.*s",
                       static_cast<int>(s.text().size()), s.text().data());
      }
      usleep(1000);
    }
  };
  for (size_t i = 0, next = 0; i < span.count; i = next) {
    Gpu& g = gpu(span.unit(i).device.load());
    Enter here(driver_, g.context);
    core::InplaceVector<CUmemAccessDesc, kMaxDevices> access;
    access.push_back(access_of(g.device));
    const uint64_t seen_by = seers(span.unit(i));
    for (size_t d = 0; d < gpus_.size(); ++d) {
      const Gpu& other = *gpus_[d];
      if (other.device != g.device && (seen_by >> d & 1) != 0 && other.opened.load() && !other.lost.load())
        access.push_back(access_of(other.device));
    }
    PiecePool& pool = g.pieces.of(size);
    Status s;
    next = i;
    do {
      const CUdeviceptr at = span.address() + next * size;
      s = result(g, driver_.mem_map(at, size, 0, pool.handle(span.unit(next).piece.load()), 0), "mapping a block");
      if (s.ok()) ++next;
    } while (s.ok() && next < span.count && next - i < kMappedTogether && span.unit(next).device.load() == g.device &&
             seers(span.unit(next)) == seen_by);
    if (s.ok()) {
      if (size >= kMappedInTurn) let_unmapping_go_first();
      const CUdeviceptr at = span.address() + i * size;
      const size_t run = (next - i) * size;
      // Access for other devices is only advice: go on without if it is refused.
      CUresult given = driver_.mem_set_access(at, run, &access[0], access.size());
      if (given != CUDA_SUCCESS && access.size() > 1) given = driver_.mem_set_access(at, run, &access[0], 1);
      s = result(g, given, "giving access to a block");
      if (s.ok()) continue;
    }
    for (size_t k = 0; k < next; ++k) take_back(k);
    return s;
  }
  return {};
}

Status CudaDevices::backend_show_to(const Span& span, int device, bool set) {
  Gpu& g = gpu(span.unit(0).device.load());
  Enter here(driver_, g.context);
  CUmemAccessDesc access = access_of(device);
  if (!set) access.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return result(g, driver_.mem_set_access(span.address(), span.size(), &access, 1),
                set ? "giving another device access to a block" : "taking access to a block from another device");
}

Status CudaDevices::backend_hide(const Span& span) {
  Timeline timeline("unmap");
  ++unmapping_;
  const core::ScopeGuard done([this] { --unmapping_; });
  const size_t size = span.unit_size();
  for (size_t i = 0, next = 0; i < span.count; i = next) {
    const int device = span.unit(i).device.load();
    Gpu& g = gpu(device);
    Enter here(driver_, g.context);
    // One call for adjacent units.
    for (next = i + 1; next < span.count && span.unit(next).device.load() == device;) ++next;
    if (next - i > 1 && driver_.mem_unmap(span.address() + i * size, (next - i) * size) == CUDA_SUCCESS) continue;
    next = i + 1;
    Status s = result(g, driver_.mem_unmap(span.address() + i * size, size), "unmapping a block");
    if (s.ok() || g.lost.load()) continue;
    // The unit is still mapped, unless the joint call took it away and failed: then map it again.
    backend_show({span.reservation, span.first + i, 1}).ignore();
    unhide({span.reservation, span.first, i});
    return s;
  }
  return {};
}

Status CudaDevices::backend_take(int device, size_t size, uint32_t* piece) {
  return take_piece(gpu(device), size, piece);
}

void CudaDevices::backend_give(int device, size_t size, uint32_t piece) {
  Gpu& g = gpu(device);
  g.pieces.of(size).give(piece, [&](const Piece& left) {
    if (g.lost.load()) return false;  // its handles went with the context
    Enter here(driver_, g.context);
    return destroy_piece(size, left);
  });
}

Status CudaDevices::backend_share(const Span& span, Export how, int* descriptor) {
  Gpu& g = gpu(span.unit(0).device.load());
  if (Status s = notice(g); !s.ok()) return s;
  const bool can = how == Export::handle ? g.exports && driver_.mem_export != nullptr && !g.plain.load()
                                         : g.dma_buf && driver_.range_handle != nullptr;
  if (!can) {
    return error(EOPNOTSUPP, "device %d, or its driver, exports no memory as %s", g.device,
                 how == Export::handle ? "a file descriptor" : "a dma-buf");
  }
  PiecePool& pool = g.pieces.of(span.unit_size());
  for (size_t i = 0; i < span.count; ++i) pool.share(span.unit(i).piece.load());
  Enter here(driver_, g.context);
  int fd = -1;
  const CUresult r =
      how == Export::handle
          ? driver_.mem_export(&fd, pool.handle(span.unit(0).piece.load()), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
          : driver_.range_handle(&fd, span.address(), span.size(), CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  if (Status s = result(g, r, "exporting a block"); !s.ok()) return s;
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  *descriptor = fd;
  return {};
}

// True if the device may copy through the window of another device's piece. Gives it access to a
// piece that was made before the device was opened.
bool CudaDevices::may_see(PiecePool& pool, uint32_t piece, int device, const Gpu& owner) {
  if (pool.seen_by(piece, device)) return true;
  const Link link = infos_[static_cast<size_t>(device)].links[static_cast<size_t>(owner.device)];
  const CUmemAccessDesc access = access_of(device);
  if (link == Link::none || driver_.mem_set_access(pool.window(piece), pool.size(), &access, 1) != CUDA_SUCCESS)
    return false;
  pool.set_seen_by(piece, device);
  return true;
}

Status CudaDevices::backend_send_piece(const Span& span, int device, uint32_t piece, int by, Ticket* done) {
  Timeline timeline("migrate");
  const Unit& unit = span.unit(0);
  Gpu& source = gpu(unit.device.load());
  Gpu& target = gpu(device);
  Gpu& g = gpu(by);
  for (const Gpu* end : {&source, &target})
    if (Status s = health(end->device); !s.ok()) return s;
  const size_t size = span.unit_size();
  Enter here(driver_, g.context);
  std::shared_ptr<CudaEvent> event;
  if (Status s = take_event(g, &event, Waits::looking); !s.ok()) return s;
  const bool in = by == device;
  const auto side = static_cast<size_t>(in ? Direction::in : Direction::out);
  CUstream stream = g.copy[side][g.next[side].fetch_add(1) % kCopyStreams];
  PiecePool& from = source.pieces.of(size);
  PiecePool& to = target.pieces.of(size);
  const CUdeviceptr there = to.window(piece), mine = from.window(unit.piece.load());
  // A device that sees the other's memory copies as if in its own. That is faster than a peer copy,
  // and unmapping beside it is faster, too.
  const bool sees = in ? may_see(from, unit.piece.load(), by, source) : may_see(to, piece, by, target);
  CUresult e = sees ? driver_.copy_within(there, mine, size, stream)
                    : driver_.copy_peer(there, target.context, mine, source.context, size, stream);
  if (e == CUDA_SUCCESS) e = driver_.event_record(event->event, stream);
  if (e != CUDA_SUCCESS) {
    Status s = finish(g, stream, e, "moving a block to another device", in ? &source : &target);
    notice(in ? source : target).ignore();  // the error may be the other device's
    return s;
  }
  *done = std::move(event);
  return {};
}

uintptr_t CudaDevices::window_of(uintptr_t block, size_t* run) {
  const ReservationPtr r = find(block);
  *run = r->unit - (block - r->base) % r->unit;
  const Unit& unit = r->units[r->index(block)];
  PiecePool& pool = gpu(unit.device.load()).pieces.of(r->unit);
  return pool.window(unit.piece.load()) + (block - r->base) % r->unit;
}

Status CudaDevices::try_device(int device) {
  void* base = nullptr;
  if (Status s = reserve(unit_, device, &base); !s.ok()) return s;
  const Range unit{reinterpret_cast<uintptr_t>(base), unit_};
  const std::span<const Range> range(&unit, 1);
  constexpr size_t kWords = core::kPage / sizeof(uint64_t);
  auto* page = static_cast<uint64_t*>(std::aligned_alloc(core::kPage, core::kPage));
  Status status = page == nullptr ? error(ENOMEM, "no memory for a page") : pin(page, core::kPage);
  const bool pinned = status.ok();
  const auto step = [&](const Status& s) {
    if (status.ok() && !s.ok()) status = error(-s.code(), "%.*s", static_cast<int>(s.text().size()), s.text().data());
    return status.ok();
  };
  for (uint64_t round = 1; round <= 2 && status.ok(); ++round) {
    const Copy first{unit.address, page, core::kPage}, last{unit.address + unit_ - core::kPage, page, core::kPage};
    Ticket done;
    bool torn = false;
    if (!step(populate(range, device, &torn))) break;
    const auto move = [&](const Copy& copy, bool in) {
      return step(in ? copy_in(device, std::span(&copy, 1), &done) : copy_out(device, std::span(&copy, 1), &done)) &&
             step(wait(done));
    };
    for (size_t i = 0; i < kWords; ++i) page[i] = round * 1000003 + i;
    if (move(first, true) && move(last, false))
      for (size_t i = 0; i < kWords; ++i)
        if (page[i] != 0) step(error(EIO, "a new block holds old bytes"));
    for (size_t i = 0; i < kWords; ++i) page[i] = round * 1000003 + i;
    if (move(last, true)) step(map(range));
    for (size_t i = 0; i < kWords; ++i) page[i] = 0;
    step(unmap(range));
    if (move(last, false))
      for (size_t i = 0; i < kWords; ++i)
        if (page[i] != round * 1000003 + i) step(error(EIO, "a block reads wrong"));
    step(punch(range));
  }
  if (!pinned || unpin(page).ok()) std::free(page);  // else it is still pinned, and keeps its address
  Status released = release(base);
  return status.ok() ? released : status;
}

}  // namespace vmem::device
