// Copies, the application's streams, and tickets.
#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <new>
#include <thread>
#include <utility>

#include "core/inplace_vector.h"
#include "core/outside_lock.h"
#include "device/cuda/cuda_devices.h"

namespace vmem::device {

using cuda::Enter;
using cuda::Timeline;

// How long a thread polls for a copy from a device, one thread per device. Waking from a sleep can
// take longer than the copy, the longer the sleep the more.
static constexpr std::chrono::milliseconds kWatch{1};
static constexpr useconds_t kLookEvery = 50;  // us; after kWatch, or while another thread watches

Status CudaDevices::take_event(Gpu& g, std::shared_ptr<CudaEvent>* out, Waits waits) {
  EventPool& pool = g.events[static_cast<size_t>(waits)];
  CUevent event = nullptr;
  try {
    std::lock_guard lock(g.mutex);
    if (!pool.idle.empty()) {
      event = pool.idle.back();
      pool.idle.pop_back();
    } else {
      make_room(pool.idle, ++pool.made);
    }
  } catch (const std::bad_alloc&) {
    return error(ENOMEM, "no memory to record an event");
  }
  if (event == nullptr) {
    // Blocking: a waiting thread sleeps instead of spinning. Recording such an event takes longer,
    // even if no thread waits, and makes copies between devices slower.
    const CUresult e = driver_.event_create(
        &event, CU_EVENT_DISABLE_TIMING | (waits == Waits::asleep ? CU_EVENT_BLOCKING_SYNC : CU_EVENT_DEFAULT));
    if (Status s = result(g, e, "creating an event"); !s.ok()) return s;
  }
  try {
    *out = std::make_shared<CudaEvent>(g, event, waits);
    return {};
  } catch (const std::bad_alloc&) {
    std::lock_guard lock(g.mutex);
    pool.idle.push_back(event);
    return error(ENOMEM, "no memory to record an event");
  }
}

Status CudaDevices::backend_copy(int device, Direction direction, std::span<const Copy> copies, Ticket* done) {
  const bool in = direction == Direction::in;
  Timeline timeline(in ? "copy in" : "copy out");
  Gpu& g = gpu(device);
  Enter here(driver_, g.context);
  std::shared_ptr<CudaEvent> event;
  if (Status s = take_event(g, &event); !s.ok()) return s;
  const auto side = static_cast<size_t>(direction);
  CUstream stream = g.copy[side][g.next[side].fetch_add(1) % kCopyStreams];
  CUresult e = CUDA_SUCCESS;
  core::InplaceVector<cuda::Clearing::Part, kMostRanges> zeros;
  bool only_zeros = true;
  const auto clear_them = [&] {
    if (e == CUDA_SUCCESS && !zeros.empty()) e = clear(g, zeros.all(), stream);
    zeros.clear();
  };
  for (const Copy& copy : copies)
    for (size_t offset = 0, size = 0; offset < copy.size && e == CUDA_SUCCESS; offset += size) {
      size_t run = 0;
      const uintptr_t at = window_of(copy.block + offset, &run);
      size = std::min(copy.size - offset, run);
      if (copy.frame == nullptr) {
        if (zeros.full()) {
          only_zeros = false;
          clear_them();
        }
        zeros.push_back({at, size});
        continue;
      }
      only_zeros = false;
      size = std::min(size, copy_piece());
      void* const frame = static_cast<std::byte*>(copy.frame) + offset;
      e = in ? driver_.copy_in(at, frame, size, stream) : driver_.copy_out(frame, at, size, stream);
    }
  for (const Copy& copy : copies) {
    if (copy.after == nullptr) continue;
    only_zeros = false;
    if (e == CUDA_SUCCESS) e = driver_.stream_wait_event(stream, static_cast<CudaEvent*>(copy.after.get())->event, 0);
  }
  // The copy stream does not wait for the kernel: it would hold the engine by which the driver
  // maps.
  if (only_zeros && e == CUDA_SUCCESS && clear_by_kernel(g, zeros.all(), *event, nullptr)) {
    *done = std::move(event);
    return {};
  }
  clear_them();
  if (e == CUDA_SUCCESS) e = driver_.event_record(event->event, stream);
  // Copies already issued still use their frames, which the caller takes back on error.
  if (e != CUDA_SUCCESS) return finish(g, stream, e, in ? "copying to it" : "copying from it");
  event->out = !in;
  *done = std::move(event);
  return {};
}

Status CudaDevices::not_capturing(Gpu& g, CUstream stream) {
  auto capture = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult e = driver_.stream_capturing(stream, &capture);
  if (e == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || capture != CU_STREAM_CAPTURE_STATUS_NONE)
    return error(EBUSY, "the stream captures a graph: acquire first, launch the finished graph, then release");
  return result(g, e, "looking at a stream");
}

Status CudaDevices::check_stream(void* stream, int device) {
  core::must_be_outside("Devices::check_stream");
  if (Status s = usable(device); !s.ok()) return s;
  Gpu& g = gpu(device);
  auto* const handle = static_cast<CUstream>(stream);
  CUcontext context = nullptr;
  const bool by_name = handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD;
  if (by_name) {
    driver_.ctx_current(&context);  // none yet: CUDA's runtime would use device 0
  } else if (const CUresult e = driver_.stream_ctx(handle, &context); e != CUDA_SUCCESS) {
    // This call also returns the error that ended the context, which need not be the device's.
    if (Status s = notice(g); !s.ok()) return s;
    return error(EINVAL, "%p is not a CUDA stream of this process, or its context has ended (CUDA error %d)", stream,
                 static_cast<int>(e));
  }
  if (context != g.context) {
    CUdevice owner = 0;
    if (context != nullptr) {
      Enter there(driver_, context);
      if (!there.ok() || driver_.ctx_device(&owner) != CUDA_SUCCESS)
        return error(EINVAL, "the context of stream %p is gone", stream);
    }
    if (owner != device)
      return error(EINVAL, "the stream %p is device %d's, not device %d's%s", stream, owner, device,
                   handle == nullptr ? " (the default stream follows cudaSetDevice)" : "");
    // record() and order_after() would find another default stream, and events do not cross
    // contexts.
    if (context != nullptr)
      return error(EINVAL,
                   "the stream %p is in a context that was made by cuCtxCreate or is a green one; libvmem orders "
                   "itself with streams of device %d's primary context only (what the CUDA runtime uses)",
                   stream, device);
  }
  // Usually the stream captures nothing, and the driver says so without its context being current.
  auto capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  if (!by_name && driver_.stream_capturing(handle, &capture) == CUDA_SUCCESS &&
      capture == CU_STREAM_CAPTURE_STATUS_NONE)
    return {};
  Enter here(driver_, g.context);
  return not_capturing(g, handle);
}

Status CudaDevices::order_after(const Ticket& ticket, void* stream, int device_of_stream) {
  core::must_be_outside("Devices::order_after");
  if (Status s = usable(device_of_stream); !s.ok()) return s;
  Gpu& g = gpu(device_of_stream);
  auto* const handle = static_cast<CUstream>(stream);
  {
    Enter here(driver_, g.context);
    if (Status s = not_capturing(g, handle); !s.ok()) return s;
  }
  bool done = false;
  if (Status s = poll(ticket, &done); !s.ok() || done) return s;
  auto* const event = static_cast<CudaEvent*>(ticket.get());
  Enter here(driver_, g.context);
  Status s = result(g, driver_.stream_wait_event(handle, event->event, 0), "ordering a stream after a copy");
  if (!s.ok()) notice(event->gpu).ignore();
  return s;
}

Status CudaDevices::record(void* stream, int device, Ticket* out) {
  core::must_be_outside("Devices::record");
  if (Status s = usable(device); !s.ok()) return s;
  Gpu& g = gpu(device);
  auto* const handle = static_cast<CUstream>(stream);
  Enter here(driver_, g.context);
  if (Status s = not_capturing(g, handle); !s.ok()) return s;
  std::shared_ptr<CudaEvent> event;
  if (Status s = take_event(g, &event); !s.ok()) return s;
  const CUresult e = driver_.event_record(event->event, handle);
  if (e == CUDA_ERROR_INVALID_HANDLE) return error(EINVAL, "the stream %p is not device %d's", stream, device);
  if (Status s = result(g, e, "marking a stream"); !s.ok()) return s;
  *out = std::move(event);
  return {};
}

Status CudaDevices::poll(const Ticket& ticket, bool* done) {
  core::must_be_outside("Devices::poll");
  *done = true;
  if (ticket == nullptr) return {};
  auto* event = static_cast<CudaEvent*>(ticket.get());
  if (Status s = health(event->gpu.device); !s.ok()) return s;
  if (event->reached.load(std::memory_order_acquire)) return {};
  Enter here(driver_, event->gpu.context);
  const CUresult e = driver_.event_query(event->event);
  if (e == CUDA_ERROR_NOT_READY) {
    *done = false;
    return {};
  }
  if (Status s = result(event->gpu, e, "waiting for a stream"); !s.ok()) return s;
  event->reached.store(true, std::memory_order_release);
  return {};
}

Status CudaDevices::wait(const Ticket& ticket) {
  core::must_be_outside("Devices::wait");
  bool done = false;
  if (Status s = poll(ticket, &done); !s.ok() || done) return s;
  auto* event = static_cast<CudaEvent*>(ticket.get());
  Gpu& g = event->gpu;
  Enter here(driver_, g.context);
  auto e = CUDA_ERROR_NOT_READY;
  if ((event->out || event->waits == Waits::looking) && !g.watched.exchange(true)) {
    const auto until = std::chrono::steady_clock::now() + kWatch;
    do {
      std::this_thread::yield();
      e = driver_.event_query(event->event);
    } while (e == CUDA_ERROR_NOT_READY && std::chrono::steady_clock::now() < until);
    g.watched.store(false);
  }
  while (e == CUDA_ERROR_NOT_READY && event->waits == Waits::looking) {
    usleep(kLookEvery);
    e = driver_.event_query(event->event);
  }
  if (e == CUDA_ERROR_NOT_READY) e = driver_.event_synchronize(event->event);
  if (Status s = result(g, e, "waiting for a stream"); !s.ok()) return s;
  event->reached.store(true, std::memory_order_release);
  return {};
}

Status CudaDevices::drain(int device) {
  core::must_be_outside("Devices::drain");
  if (Status s = usable(device); !s.ok()) return s;
  Gpu& g = gpu(device);
  Enter here(driver_, g.context);
  return result(g, driver_.ctx_synchronize(), "waiting for a device");
}

}  // namespace vmem::device
