// Physical handles: device memory without an address, in pieces. Each is mapped once for life in its device's window,
// through which it is copied, and at a block's address while the device holds that block. Measured on an H200: to map
// 1, access 29, unmap 20, create 11, release 12 us a handle, whatever its size; none of them waits for kernels. What
// the process has mapped at the same addresses stays as it is.
//
// The cost is per handle, so a handle is a whole unit (unit(), 2 to 32 MiB).
#include <errno.h>

#include <algorithm>
#include <cstdlib>

#include "core/big_lock.h"
#include "core/few.h"
#include "core/log.h"
#include "device/cuda_devices.h"

namespace vmem::device {

using core::error;
using core::Status;
using cuda::Enter;
using cuda::Timeline;

namespace {

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

Status CudaDevices::result(Gpu& g, CUresult r, const char* what) {
  return result(g, static_cast<cudaError_t>(r), what);  // the numbers are the runtime's
}

// The calls on addresses and handles do not say that a kernel has ended the context.
Status CudaDevices::notice(Gpu& g) {
  Enter here(driver_, g.context);
  const CUresult e = driver_.stream_query(g.copy[0][0]);  // the runtime's would leave "not ready" as the last error
  return result(g, e == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : e, "looking after it");
}

Status CudaDevices::reserve_addresses(Reservation& r) {
  Gpu& g = gpu(r.device);
  Enter here(driver_, g.context);
  CUdeviceptr at = 0;
  if (Status s = result(g, driver_.address_reserve(&at, r.size, unit_, 0, 0), "reserving addresses"); !s.ok()) return s;
  // The driver's mapping over them goes, and its reservation stays.
  r.base = at;
  r.body = pointer(at);
  r.body_size = r.size;
  place_hole(r.base, r.size);
  return {};
}

void CudaDevices::release_addresses(Reservation& r) {
  Gpu& g = gpu(r.device);
  if (health(r.device).ok()) {
    Enter here(driver_, g.context);
    const Status s = result(g, driver_.address_free(r.base, r.size), "giving addresses back");
    if (s.ok()) return;
    core::log(core::Level::warning, "%.*s", static_cast<int>(s.text().size()), s.text().data());
  }
  // The driver believes that they are its own, and could take a later mapping away.
  place_hole(r.base, r.size);
}

// Once a device: addresses for as many pieces as it has memory.
Status CudaDevices::make_window(Gpu& g) {
  std::lock_guard lock(g.open_mutex);
  if (g.window != 0) return {};
  const size_t size = core::round_up(infos_[static_cast<size_t>(g.device)].total_bytes, unit_);
  Enter here(driver_, g.context);
  CUdeviceptr at = 0;
  if (Status s = result(g, driver_.address_reserve(&at, size, unit_, 0, 0), "reserving a window"); !s.ok()) return s;
  g.window_size = size;
  g.window = at;
  return {};
}

Status CudaDevices::make_piece(Gpu& g, uint32_t number, Piece* out) {
  if ((number + 1) * uint64_t{unit_} > g.window_size)
    return error(ENOMEM, "device %d has no addresses for another piece", g.device);
  Enter here(driver_, g.context);
  CUmemAllocationProp what = {};
  what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  what.location = place(g.device);
  CUmemGenericAllocationHandle handle = 0;
  if (Status s = result(g, driver_.mem_create(&handle, unit_, &what, 0), "making a handle"); !s.ok()) return s;
  const CUdeviceptr at = g.window + number * uint64_t{unit_};
  Status s = result(g, driver_.mem_map(at, unit_, 0, handle, 0), "mapping a handle in the window");
  if (s.ok()) {
    // For those that may copy from it, too.
    core::Few<CUmemAccessDesc, kMaxDevices> access;
    access.push_back(access_of(g.device));
    const Info& info = infos_[static_cast<size_t>(g.device)];
    for (size_t d = 0; d < info.links.size(); ++d) {
      if (info.links[d] != Link::self && info.links[d] != Link::none && gpus_[d]->opened.load())
        access.push_back(access_of(static_cast<int>(d)));
    }
    s = result(g, driver_.mem_set_access(at, unit_, &access[0], access.size()), "giving access to the window");
    if (!s.ok()) driver_.mem_unmap(at, unit_);
  }
  if (!s.ok()) {
    driver_.mem_release(handle);
    return s;
  }
  *out = {handle, at};
  return {};
}

void CudaDevices::destroy_piece(const Piece& piece) {
  driver_.mem_unmap(piece.window, unit_);
  driver_.mem_release(piece.handle);
}

Status CudaDevices::trim(int device, uint64_t keep) {
  core::must_be_outside("Devices::trim");
  if (Status s = usable(device); !s.ok() || shared()) return s;
  Gpu& g = gpu(device);
  Enter here(driver_, g.context);
  g.pieces.trim(keep, [this](const Piece& piece) { destroy_piece(piece); });
  return {};
}

Status CudaDevices::take_piece(Gpu& g, uint32_t* out) {
  if (Status s = make_window(g); !s.ok()) return s;
  return g.pieces.take({out, 1}, [&](uint32_t number, Piece* piece) { return make_piece(g, number, piece); });
}

Status CudaDevices::body_back(const Span& span, int device) {
  Timeline timeline("prepare");
  Gpu& g = gpu(device);
  if (Status s = notice(g); !s.ok()) return s;
  for (size_t i = 0; i < span.count; ++i) {
    uint32_t piece = 0;
    Status s = take_piece(g, &piece);
    for (size_t k = 0; !s.ok() && k < i; ++k) g.pieces.give(span.unit(k).piece.load());
    if (!s.ok()) return s;
    span.unit(i).piece.store(piece);
  }
  return {};
}

void CudaDevices::body_unback(const Span& span) {
  for (size_t i = 0; i < span.count; ++i) gpu(span.unit(i).device.load()).pieces.give(span.unit(i).piece.load());
}

Status CudaDevices::body_zero(const Span& span) {
  for (size_t i = 0; i < span.count;) {
    Gpu& g = gpu(span.unit(i).device.load());
    Enter here(driver_, g.context);
    cudaStream_t stream = nullptr;
    if (Status s = take_stream(g, &stream); !s.ok()) return s;
    cudaError_t e = cudaSuccess;
    for (; i < span.count && span.unit(i).device.load() == g.device && e == cudaSuccess; ++i)
      e = cudaMemsetAsync(pointer(g.pieces.window(span.unit(i).piece.load())), 0, unit_, stream);
    if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
    Status s = result(g, e, "clearing a block");
    if (!g.lost.load()) give_stream(g, stream);
    if (!s.ok()) return s;
  }
  return {};
}

Status CudaDevices::body_show(const Span& span) {
  Timeline timeline("map");
  if (Status s = notice(gpu(span.unit(0).device.load())); !s.ok()) return s;
  for (size_t i = 0; i < span.count; ++i) {
    Gpu& g = gpu(span.unit(i).device.load());
    Enter here(driver_, g.context);
    const CUdeviceptr at = span.address() + i * unit_;
    const CUmemAccessDesc access = access_of(g.device);
    Status s =
        result(g, driver_.mem_map(at, unit_, 0, g.pieces.handle(span.unit(i).piece.load()), 0), "mapping a block");
    if (s.ok()) {
      s = result(g, driver_.mem_set_access(at, unit_, &access, 1), "giving access to a block");
      if (s.ok()) continue;
      driver_.mem_unmap(at, unit_);
    }
    for (size_t k = 0; k < i; ++k) driver_.mem_unmap(span.address() + k * unit_, unit_);
    return s;
  }
  return {};
}

Status CudaDevices::body_hide(const Span& span) {
  Timeline timeline("unmap");
  for (size_t i = 0; i < span.count; ++i) {
    Gpu& g = gpu(span.unit(i).device.load());
    Enter here(driver_, g.context);
    Status s = result(g, driver_.mem_unmap(span.address() + i * unit_, unit_), "unmapping a block");
    if (s.ok() || g.lost.load()) continue;
    if (i != 0 && !body_show({span.reservation, span.first, i}).ok())
      core::log(core::Level::error,
                "blocks of device %d are not mapped any more: a kernel that uses them meets error 700", g.device);
    return s;
  }
  return {};
}

Status CudaDevices::migrate_handle(const Span& span, int to) {
  Unit& unit = span.unit(0);
  Gpu& source = gpu(unit.device.load());
  Gpu& target = gpu(to);
  if (Status s = health(source.device); !s.ok()) return s;
  uint32_t piece = 0;
  if (Status s = take_piece(target, &piece); !s.ok()) return s;
  Status status;
  {
    Enter here(driver_, target.context);
    cudaStream_t stream = nullptr;
    status = take_stream(target, &stream);
    if (status.ok()) {
      cudaError_t e =
          cudaMemcpyPeerAsync(pointer(target.pieces.window(piece)), to,
                              pointer(source.pieces.window(unit.piece.load())), source.device, unit_, stream);
      if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
      status = result(target, e, "moving a block to another device");
      if (!target.lost.load()) give_stream(target, stream);
    }
  }
  if (!status.ok()) {
    target.pieces.give(piece);
    return status;
  }
  source.pieces.give(unit.piece.exchange(piece));
  return {};
}

uintptr_t CudaDevices::window_of(uintptr_t block) {
  if (shared()) return block;
  const ReservationPtr r = find(block);
  const Unit& unit = r->units[r->index(block)];
  return gpu(unit.device.load()).pieces.window(unit.piece.load()) + (block - r->base) % unit_;
}

// The whole life of one unit: what the device tier stands on.
Status CudaDevices::try_handle(int device) {
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
    if (!step(prepare(range, device, &torn))) break;
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
  if (pinned) unpin(page).ignore();
  std::free(page);
  Status released = release(base);
  return status.ok() ? released : status;
}

}  // namespace vmem::device
