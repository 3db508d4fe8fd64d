// The engine without io_uring: as many workers as transfers in flight, each in pread or pwrite.
#include <algorithm>
#include <condition_variable>
#include <thread>

#include "core/mutex.h"
#include "core/step.h"
#include "core/thread.h"
#include "store/engine_base.h"

namespace vmem::store {

namespace {

class ThreadEngine final : public EngineBase {
 public:
  explicit ThreadEngine(const EngineOptions& options) : EngineBase(options.depth) {}
  ~ThreadEngine() override;
  core::Status start();
  const char* name() const override { return "threads"; }

 private:
  uint64_t pick_sleepers(size_t count) override VMEM_REQUIRES(mutex_) { return std::min<size_t>(count, sleeping_); }
  void wake(uint64_t sleepers) override;
  void run() noexcept;

  std::condition_variable work_;  // with mutex_
  size_t sleeping_ VMEM_GUARDED_BY(mutex_) = 0;
  std::vector<std::thread> workers_;
};

core::Status ThreadEngine::start() {
  workers_.reserve(depth());
  for (unsigned n = 0; n < depth(); ++n) {
    std::thread worker;
    core::Status status = core::start_thread(
        core::strprintf("vmem-io-%u", n).c_str(), [this] { run(); }, &worker);
    // Fewer workers are slower; none cannot work.
    if (!status.ok()) return workers_.empty() ? status : core::Status();
    workers_.push_back(std::move(worker));
  }
  return {};
}

ThreadEngine::~ThreadEngine() {
  {
    core::MutexLock lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadEngine::wake(uint64_t sleepers) {
  while (sleepers-- != 0) work_.notify_one();
}

void ThreadEngine::run() noexcept {
  core::MutexLock lock(mutex_);
  for (;;) {
    Io* const io = next_finished();
    Io* const told = io == nullptr ? next_to_tell() : nullptr;
    if (io != nullptr || told != nullptr) {
      const bool others_can_start = sleeping_ != 0 && launchable();
      lock.unlock();
      if (others_can_start) work_.notify_one();
      if (io != nullptr) {
        deliver(io);
      } else {
        tell(told);
      }
      lock.lock();
      if (io != nullptr) --outstanding_;
      continue;
    }
    Transfer* transfer = take();
    if (transfer != nullptr) {
      lock.unlock();
      core::step("store.issue");
      while (!transfer->advance(perform(transfer->prepare(injector())))) core::step("store.issue");
      core::step("store.finish");
      lock.lock();
      retire(transfer);
      continue;
    }
    if (stopping_ && idle()) {
      work_.notify_all();
      return;
    }
    ++sleeping_;
    mutex_.wait(work_);
    --sleeping_;
  }
}

}  // namespace

core::Status make_thread_engine(const EngineOptions& options, std::unique_ptr<Engine>* out) {
  auto engine = std::make_unique<ThreadEngine>(options);
  core::Status status = engine->start();
  if (status.ok()) *out = std::move(engine);
  return status;
}

}  // namespace vmem::store
