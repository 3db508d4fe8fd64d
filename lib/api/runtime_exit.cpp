// Writes changed blocks of shared files when the process exits.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <thread>

#include "api/runtime.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/mutex.h"
#include "core/process/at_exit.h"
#include "core/process/fork.h"
#include "core/thread.h"
#include "pager/block/stall_clock.h"
#include "pager/pager.h"

namespace vmem::api {

using core::Status;

namespace {

// How long exit waits without progress; shorter if the exiting thread may itself hold what it waits
// for.
constexpr uint64_t kExitPatience = 30000000000, kExitPatienceInside = 5000000000;  // ns
constexpr uint64_t kExitPatienceKernels = 4000000000;  // ns; for threads that serve kernels; leaves time to write

}  // namespace

// The state of exit(), which waits while another thread writes.
struct Runtime::Finishing {
  Finishing* before = nullptr;
  core::Mutex mutex;
  std::condition_variable changed;
  bool done VMEM_GUARDED_BY(mutex) = false;
  const core::Counters* counters VMEM_GUARDED_BY(mutex) = nullptr;  // the pager's, while it writes
};

void Runtime::hide() {
  if (!setup_.try_lock()) return;  // any thread may hold it when exit() is called
  const FairLock setup(setup_, std::adopt_lock);
  if (publisher_ != nullptr) publisher_->retire();
}

// Writes changes of shared files, as with mmap; all else dies with the process.
void Runtime::write_shared_files(Finishing* finishing) {
  if (nothing_to_write_) return;
  Use pager;
  gate_.use_at_exit(&pager);
  if (!pager) return;
  const auto tell = [&](const core::Counters* counters) {
    if (finishing == nullptr) return;
    const core::MutexLock lock(finishing->mutex);
    finishing->counters = counters;
  };
  tell(&pager->counters());
  pager->flush_host().ignore();  // flush_shared() tries failed writes again
  if (gave_up_) return tell(nullptr);
  kernels_.stop(*pager, kExitPatienceKernels);
  if (core::debug()) pager->look_for_loss();
  pager->flush_shared().ignore();  // it has logged errors
  tell(nullptr);
}

namespace {

// Logs why shared files may lack changes.
void say_given_up(bool inside, uint64_t patience) {
  if (core::at_our_end()) {
    core::log(core::Level::error,
              "the process ends for the reason above: changes of shared files that could not be written because of it, "
              "or were not written when nothing made progress for %u s, are lost",
              static_cast<unsigned>(patience / 1000000000));
    return;
  }
  if (inside) {
    core::log(core::Level::error,
              "exit was called inside a call of libvmem (by a signal handler), and shared files cannot be written "
              "during that call: changes that vmem_sync had not written are lost");
    return;
  }
  core::log(core::Level::error,
            "at exit no write and no copy from a device made progress for %u s: changes of shared files that were not "
            "written by then are lost",
            static_cast<unsigned>(patience / 1000000000));
}

}  // namespace

void Runtime::finish() {
  if (core::in_child()) return;
  // Inside a call, or on a thread of ours, this thread may hold what the write waits for.
  const bool inside = Call::may_hold_locks();
  core::leave_sink();
  // So another thread writes, and this one waits while that makes progress. Neither a stream that
  // never ends nor a disk that never answers keeps the process.
  if (gave_up_ && inside) return;
  static std::atomic<Finishing*> left_behind{nullptr};  // the other thread may use it late
  auto* finishing = new Finishing;
  finishing->before = left_behind.exchange(finishing);
  std::thread writer;
  const Status started = core::start_thread(
      "vmem-exit",
      [this, finishing] {
        hide();
        write_shared_files(finishing);
        const core::MutexLock lock(finishing->mutex);
        finishing->done = true;
        finishing->changed.notify_all();
      },
      &writer);
  if (!started.ok() && !inside) {
    const core::SignalsDeferred deferred;
    hide();
    return write_shared_files(nullptr);
  }
  if (started.ok()) writer.detach();
  const core::MutexLock lock(finishing->mutex);
  const uint64_t patience = inside || gave_up_ ? kExitPatienceInside : kExitPatience;
  pager::StallClock progress;
  progress.look(core::now_ns(), true);
  uint64_t seen = 0;
  while (started.ok() && !finishing->done) {
    finishing->mutex.wait_until(finishing->changed, std::chrono::steady_clock::now() + std::chrono::milliseconds(50));
    const core::Counters* counters = finishing->counters;
    const uint64_t now = counters != nullptr ? counters->write_bytes.load() + counters->swept_blocks.load() : 0;
    if (now != seen) progress.made();
    seen = now;
    progress.look(core::now_ns(), false);
    if (progress.over(0, patience)) break;
  }
  if (finishing->done) return;
  gave_up_ = true;
  say_given_up(inside, patience);
}

}  // namespace vmem::api
