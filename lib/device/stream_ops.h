// Orders the work of devices: streams, and points on them that copies and callers wait for.
// device.h has the rules for callers.
#pragma once

#include <memory>

#include "core/status.h"

namespace vmem::device {

// A point on a stream. Copies of a ticket refer to the same point. An empty ticket counts as done.
// A ticket must not outlive its Devices.
struct Event {
  virtual ~Event() = default;
};
using Ticket = std::shared_ptr<Event>;

class StreamOps {
 public:
  // Ok, or -EIO with the reason. Notices a reset at once, a sticky error after another call met it.
  virtual core::Status health(int device) = 0;
  // As health(), and asks the device on a stream of our own, so that errors of kernels are noticed.
  // Does not block. If probe() fails and health() is ok, the device's state is unknown.
  virtual core::Status probe(int device) { return health(device); }

  // Checks that work of this device may be ordered with a cudaStream_t: nullptr is the legacy
  // default stream in the thread's current context, cudaStreamPerThread the calling thread's.
  // -EINVAL: of another device or outside the primary context. -EBUSY: it captures. -EIO: lost.
  virtual core::Status check_stream(void* stream, int device) = 0;
  // True if `stream` names another stream on each thread.
  virtual bool of_thread(void* stream) const {
    (void)stream;
    return false;
  }
  // Work put on the stream (of any device) after this call runs after the ticket. Never blocks.
  virtual core::Status order_after(const Ticket& ticket, void* stream, int device_of_stream) = 0;
  // *out is reached when all work now on the stream is done.
  virtual core::Status record(void* stream, int device, Ticket* out) = 0;
  // If poll() fails, the work may still be under way, and a later poll() tells. Once health() says
  // that the device is lost, nothing runs there and no poll() tells.
  virtual core::Status poll(const Ticket& ticket, bool* done) = 0;
  // Sleeps until the ticket is reached; waking takes longer than polling, more so after a long
  // sleep. For copies only: a user's stream may never end.
  virtual core::Status wait(const Ticket& ticket) = 0;

  // Returns when all work put before on any stream of the device, destroyed ones included, has
  // ended. Blocks as long as a kernel runs. -EIO: the device is lost and runs nothing. -EBUSY: a
  // stream captures a graph; the call has made the capture fail, and work may still run.
  virtual core::Status drain(int device) = 0;

 protected:
  ~StreamOps() = default;
};

}  // namespace vmem::device
