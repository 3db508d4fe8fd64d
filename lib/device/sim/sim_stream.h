// Streams and events of simulated devices, and what the parts of that backend need to put work on a
// stream.
#pragma once

#include <deque>
#include <new>
#include <utility>

#include "core/outside_lock.h"
#include "core/thread.h"
#include "device/sim/sim_device.h"

namespace vmem::device {

struct SimDevices::SimEvent : Event {
  explicit SimEvent(int d) : device(d) {}
  ~SimEvent() override { core::must_be_outside("the end of a ticket"); }
  const int device;
  bool reached = false;  // protected by mutex_
};

// A thread that runs its queue in order, started at the first use.
struct SimDevices::Stream {
  explicit Stream(int d, size_t most = SIZE_MAX) : device(d), limit(most) {}
  ~Stream() { finish(); }
  // Runs queued work, then ends.
  void finish() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    changed.notify_all();
    if (thread.joinable()) thread.join();
  }
  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stop || !queue.empty(); });
      if (queue.empty()) return;
      std::function<void()> work = std::move(queue.front());
      queue.pop_front();
      if (limit != SIZE_MAX) changed.notify_all();
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
    }
  }
  const int device;
  const size_t limit;
  std::atomic<bool> capturing{false};
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;  // protected by mutex
  bool stop = false;                        // protected by mutex; queued work still runs
  std::thread thread;
};

// A template, so that the std::function, which may need memory, is made inside the try.
template <typename Work>
core::Status SimDevices::enqueue(Stream* stream, Work work) try {
  {
    std::unique_lock lock(stream->mutex);
    if (stream->queue.size() >= stream->limit) {
      ++waiting_;
      stream->changed.wait(lock, [&] { return stream->queue.size() < stream->limit; });
      --waiting_;
    }
    if (!stream->thread.joinable()) {
      core::Status s = core::start_thread(
          "vmem-sim", [stream] { stream->run(); }, &stream->thread);
      if (!s.ok()) return s;
    }
    stream->queue.emplace_back(std::move(work));
  }
  stream->changed.notify_all();
  return {};
} catch (const std::bad_alloc&) {
  return core::error(ENOMEM, "no memory to put work on a stream");
}

}  // namespace vmem::device
