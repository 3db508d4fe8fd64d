// Streams of simulated devices, and kernels on them, for the application and the device tier.
#include "device/sim/sim_stream.h"

#include <errno.h>

#include <algorithm>

namespace vmem::device {

namespace {
thread_local int current_device = 0;
}  // namespace

SimDevices::Stream* SimDevices::stream_of(void* stream, int device_if_null) {
  if (stream == nullptr) return devices_[static_cast<size_t>(device_if_null)]->default_stream.get();
  std::lock_guard lock(mutex_);
  return live_streams_.count(stream) != 0 ? static_cast<Stream*>(stream) : nullptr;
}

void SimDevices::set_current_device(int device) {
  current_device = device;
}

void* SimDevices::create_stream(int device) {
  auto* stream = new Stream(device, options_.queue_limit != 0 ? options_.queue_limit : SIZE_MAX);
  std::lock_guard lock(mutex_);
  live_streams_.insert(stream);
  return stream;
}

void SimDevices::destroy_stream(void* stream) {
  forget_stream(stream);
  delete static_cast<Stream*>(stream);
}

size_t SimDevices::waiting() {
  return waiting_.load();
}

bool SimDevices::captures(int device) const {
  std::lock_guard lock(mutex_);
  return std::any_of(live_streams_.begin(), live_streams_.end(), [&](void* s) {
    const auto* stream = static_cast<const Stream*>(s);
    return stream->capturing.load() && (device < 0 || stream->device == device);
  });
}

void SimDevices::capture(void* stream, bool on) {
  if (Stream* s = stream_of(stream, current_device); s != nullptr) s->capturing.store(on);
}

Status SimDevices::checked_stream(void* stream, int device, Stream** out) {
  if (Status s = usable(device); !s.ok()) return s;
  Stream* s = stream_of(stream, device);
  if (s == nullptr) return error(EINVAL, "%p is not a stream", stream);
  if (s->device != device)
    return error(EINVAL, "the stream %p is device %d's, not device %d's", stream, s->device, device);
  if (s->capturing.load() || (stream == nullptr && captures(device)))
    return error(EBUSY, "the stream %p captures a graph: acquire, launch the graph, release", stream);
  *out = s;
  return probe(device);
}

Status SimDevices::check_stream(void* stream, int device) {
  core::must_be_outside("Devices::check_stream");
  Stream* s = nullptr;
  if (Status c = checked_stream(stream, device, &s); !c.ok()) return c;
  if (stream == nullptr && current_device != device)
    return error(EINVAL, "the default stream of this thread is device %d's, not device %d's (cudaSetDevice)",
                 current_device, device);
  return {};
}

Status SimDevices::order_after(const Ticket& ticket, void* stream, int device_of_stream) {
  core::must_be_outside("Devices::order_after");
  Stream* s = nullptr;
  if (Status c = checked_stream(stream, device_of_stream, &s); !c.ok()) return c;
  if (ticket == nullptr) return {};
  auto event = std::static_pointer_cast<SimEvent>(ticket);
  if (Status h = health(event->device); !h.ok()) return h;
  return enqueue(s, [this, event] {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return event->reached || devices_[static_cast<size_t>(event->device)]->lost; });
  });
}

Status SimDevices::record(void* stream, int device, Ticket* out) {
  core::must_be_outside("Devices::record");
  Stream* s = nullptr;
  if (Status c = checked_stream(stream, device, &s); !c.ok()) return c;
  if (Status c = run_hook(SimOp::record, device, 0, 0); !c.ok()) return c;
  std::shared_ptr<SimEvent> event;
  try {
    event = std::make_shared<SimEvent>(device);
  } catch (const std::bad_alloc&) {
    return error(ENOMEM, "no memory for an event");
  }
  Status queued = enqueue(s, [this, life = life_, event] {
    const std::lock_guard living(life->mutex);
    if (life->over) return;
    // Set under the lock: the thread that sees it may end these devices, while this stream is the
    // application's.
    std::lock_guard lock(mutex_);
    event->reached = true;
    changed_.notify_all();
  });
  if (queued.ok()) *out = std::move(event);
  return queued;
}

Status SimDevices::poll(const Ticket& ticket, bool* done) {
  core::must_be_outside("Devices::poll");
  *done = true;
  if (ticket == nullptr) return {};
  const auto* event = static_cast<const SimEvent*>(ticket.get());
  if (Status s = probe(event->device); !s.ok()) return s;
  if (Status s = run_hook(SimOp::poll, event->device, 0, 0); !s.ok()) return s;
  std::lock_guard lock(mutex_);
  *done = event->reached;
  return {};
}

Status SimDevices::wait(const Ticket& ticket) {
  core::must_be_outside("Devices::wait");
  if (ticket == nullptr) return {};
  const auto* event = static_cast<const SimEvent*>(ticket.get());
  if (Status s = run_hook(SimOp::wait, event->device, 0, 0); !s.ok()) return s;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return event->reached || devices_[static_cast<size_t>(event->device)]->lost; });
  }
  return health(event->device);
}

Status SimDevices::drain(int device) {
  core::must_be_outside("Devices::drain");
  if (Status s = usable(device); !s.ok()) return s;
  if (Status s = run_hook(SimOp::drain, device, 0, 0); !s.ok()) return s;
  if (captures(-1)) return error(EBUSY, "waiting for device %d: a stream captures a graph", device);
  Status s;
  devices_[static_cast<size_t>(device)]->work->drain([&] { return !(s = health(device)).ok(); });
  return s;
}

Status SimDevices::launch(void* stream, SimFunction kernel) {
  Stream* s = stream_of(stream, current_device);
  if (s == nullptr) return error(EINVAL, "%p is not a stream", stream);
  if (Status h = health(s->device); !h.ok()) return h;
  return enqueue(s, [this, life = life_, s, kernel = std::move(kernel),
                     token = SimWork::begin(devices_[static_cast<size_t>(s->device)]->work)] {
    if (const std::lock_guard lock(life->mutex); life->over || !health(s->device).ok()) return;
    SimKernel here(*this, s->device);
    kernel(here);
  });
}

Status SimDevices::synchronize(void* stream) {
  Ticket all;
  Stream* s = stream_of(stream, current_device);
  if (s == nullptr) return error(EINVAL, "%p is not a stream", stream);
  if (Status r = record(stream, s->device, &all); !r.ok()) return r;
  return wait(all);
}

}  // namespace vmem::device
