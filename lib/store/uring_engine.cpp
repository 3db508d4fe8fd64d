// The io_uring engine: a few threads, each the only submitter to its own ring.
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "core/fault_server.h"
#include "core/log.h"
#include "core/mutex.h"
#include "core/process/descriptor.h"
#include "core/process/fork.h"
#include "core/scheduling.h"
#include "core/step.h"
#include "core/thread.h"
#include "store/engine_base.h"
#include "store/wait_spin.h"

namespace vmem::store {

namespace {

constexpr unsigned kMaxRings = 16;
constexpr unsigned kCoresToSpin = 4;              // with fewer, the program's own threads need them
constexpr unsigned kFileTable = 1024;             // files known to the kernel; later ones go by descriptor
constexpr size_t kAsyncBytes = size_t{64} << 10;  // kernel workers copy buffered transfers of this size or more

// Once the ring's thread runs, only that thread uses these fields, except `sleeping`.
struct Ring {
  io_uring uring{};
  bool created = false;
  int wake_fd = -1;  // eventfd; the ring always reads it, so that a wake is one more completion
  uint64_t wake_value = 0;
  bool wake_armed = false;
  bool sleeping = false;            // protected by EngineBase::mutex_
  bool watch_armed = false;         // a poll of the watched descriptor is in the ring
  bool watch_ready = false;         // the poll has fired
  unsigned in_kernel = 0;           // transfers issued and not reaped
  WaitSpin idle_spin, disk_spin;    // for waits without transfers in the kernel, and with
  std::vector<Transfer*> prepared;  // submission entries that the kernel has not taken; nullptr: the wake read
  std::thread thread;
};

// Stands for the poll of the watched descriptor in place of a Transfer.
Transfer* const kWatch = reinterpret_cast<Transfer*>(uintptr_t{1});

class UringEngine final : public EngineBase {
 public:
  explicit UringEngine(const EngineOptions& options)
      : EngineBase(options.depth), rings_(std::clamp(options.threads, 1u, kMaxRings)) {}
  ~UringEngine() override;
  core::Status start();
  const char* name() const override { return "io_uring"; }
  bool watch(int fd, void (*ready)(void*), void* user) override;
  void unwatch() override;
  void run_errand(Errand& errand) override;

 private:
  struct Watch {
    int fd = -1;
    void (*ready)(void*) = nullptr;
    void* user = nullptr;
    bool running = false;
  };
  struct Handed {  // linked by next_free
    Transfer* head = nullptr;
    Transfer* tail = nullptr;
  };
  uint64_t pick_sleepers(size_t count) override VMEM_REQUIRES(mutex_);
  void wake(uint64_t sleepers) override;
  void file_added(FileId id, FileSlot slot) override;
  void file_removed(FileId id) override;

  core::Status create_ring(Ring& ring);
  void place_workers(Ring& ring);
  void run(Ring& ring) noexcept;
  void reap(Ring& ring);
  void finish(Transfer* transfer);
  void hand_over(Transfer* transfer);
  void run_patient() noexcept;
  void issue(Ring& ring, Transfer* transfer);
  void arm_wake(Ring& ring);
  void arm_watch(Ring& ring, int fd);
  void serve_watch(Ring& ring);
  void enter(Ring& ring, bool wait);
  void wait(Ring& ring);
  void give_up(Ring& ring, int error);

  std::vector<Ring> rings_;
  // Makes calls that may wait for faults, for the ring that serves faults.
  std::thread patient_;
  std::condition_variable handed_;
  std::array<Handed, core::kUrgencies> transfers_handed_ VMEM_GUARDED_BY(mutex_);
  Errand* errands_ VMEM_GUARDED_BY(mutex_) = nullptr;  // newest first
  bool rings_ended_ VMEM_GUARDED_BY(mutex_) = false;
  Watch watch_ VMEM_GUARDED_BY(mutex_);  // served by the first ring
  std::condition_variable watch_idle_;
  unsigned next_ring_ VMEM_GUARDED_BY(mutex_) = 0;
  const bool spins_ = std::thread::hardware_concurrency() >= kCoresToSpin;
  bool file_table_ = false;  // set before the threads start
  std::array<std::atomic<bool>, kFileTable> in_table_{};
};

core::Status UringEngine::create_ring(Ring& ring) {
  // One entry for each transfer in flight, one for the wake read and one for the watched
  // descriptor. So neither queue can overflow (the completion queue has twice the entries).
  const unsigned entries = depth() + 2;
  // Completions wait for the thread's next system call and do not interrupt it in done().
  // TASKRUN_FLAG shows that some wait. Needs Linux 5.19 and liburing 2.2, which checks the flag;
  // the ring works without.
#if defined(IORING_SETUP_COOP_TASKRUN) && defined(IORING_SETUP_TASKRUN_FLAG)
  constexpr unsigned kQuietly = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
#else
  constexpr unsigned kQuietly = 0;
#endif
  std::optional<core::StandardTaken> taken(std::in_place);
  int rc = io_uring_queue_init(entries, &ring.uring, kQuietly);
  if (rc == -EINVAL) rc = io_uring_queue_init(entries, &ring.uring, 0);
  taken.reset();
  if (rc < 0) return core::system_error(rc, "io_uring_setup of %u entries failed", entries);
  ring.created = true;
  // A child keeps neither the mapping nor, by O_CLOEXEC, the descriptor past exec.
  io_uring_ring_dontfork(&ring.uring);
  core::close_in_children(ring.uring.ring_fd);  // the descriptor keeps the registered files open
  ring.prepared.reserve(2 * size_t{entries});
  ring.wake_fd = core::keep_from_children(eventfd(0, EFD_CLOEXEC));
  if (ring.wake_fd < 0) return core::system_error(errno, "no eventfd for an I/O thread");
  return {};
}

namespace {

// A filter of system calls may permit io_uring_setup and forbid io_uring_enter; then every transfer
// would fail.
core::Status try_ring(io_uring* ring) {
  io_uring_prep_nop(io_uring_get_sqe(ring));
  int rc = 0;
  do {
    rc = io_uring_submit_and_wait(ring, 1);
  } while (rc == -EINTR);
  io_uring_cqe* end = nullptr;
  if (rc < 0 || io_uring_peek_cqe(ring, &end) != 0)
    return core::system_error(rc < 0 ? rc : -EIO, "io_uring_enter failed");
  io_uring_cqe_seen(ring, end);
  return {};
}

// RLIMIT_NPROC limits a ring's workers from the start, for every user, root included. If it is 0,
// requests for workers wait forever.
core::Status check_workers() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NPROC, &limit) != 0 || limit.rlim_cur != 0) return {};
  return core::error(EAGAIN, "io_uring can have no workers where RLIMIT_NPROC is 0");
}

}  // namespace

core::Status UringEngine::start() {
  if (core::Status status = check_workers(); !status.ok()) return status;
  for (Ring& ring : rings_) {
    if (core::Status status = create_ring(ring); !status.ok()) return status;
  }
  if (core::Status status = try_ring(&rings_[0].uring); !status.ok()) return status;
  io_uring_probe* probe = io_uring_get_probe_ring(&rings_[0].uring);
  const bool usable = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) &&
                      io_uring_opcode_supported(probe, IORING_OP_WRITEV) &&
                      io_uring_opcode_supported(probe, IORING_OP_FSYNC);
  if (probe != nullptr) io_uring_free_probe(probe);
  if (!usable) return core::error(ENOSYS, "this kernel's io_uring cannot read and write (Linux 5.6 or later can)");

  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  file_table_ = limit.rlim_cur >= kFileTable;
  std::array<int, kFileTable> none;
  none.fill(-1);
  for (Ring& ring : rings_) {
    file_table_ = file_table_ && io_uring_register_files(&ring.uring, none.data(), kFileTable) == 0;
  }

  for (size_t n = 0; n < rings_.size(); ++n) {
    const std::string name = core::strprintf("vmem-io-%zu", n);
    core::Status status = core::start_thread(
        name.c_str(), [this, n] { run(rings_[n]); }, &rings_[n].thread);
    if (!status.ok()) return status;
  }
  return core::start_thread(
      "vmem-patient", [this] { run_patient(); }, &patient_);
}

UringEngine::~UringEngine() {
  uint64_t sleepers;
  {
    core::MutexLock lock(mutex_);
    stopping_ = true;
    sleepers = pick_sleepers(rings_.size());
  }
  wake(sleepers);
  // Join all of them first: an ending thread still wakes the others, through descriptors that must
  // be open until then.
  for (Ring& ring : rings_) {
    if (ring.thread.joinable()) ring.thread.join();
  }
  {
    core::MutexLock lock(mutex_);
    rings_ended_ = true;
  }
  handed_.notify_one();
  if (patient_.joinable()) patient_.join();
  for (Ring& ring : rings_) {
    if (ring.created) {
      core::forget_in_children(ring.uring.ring_fd);
      io_uring_queue_exit(&ring.uring);
    }
    core::close_and_forget(ring.wake_fd);
  }
}

uint64_t UringEngine::pick_sleepers(size_t count) {
  // Parallelism comes from kernel workers and the device: one thread can issue a whole batch with
  // one system call. Several are woken only to run callbacks or to stop.
  count = stopping_ ? rings_.size() : std::min<size_t>(count, 1);
  uint64_t picked = 0;
  for (size_t n = 0; n < rings_.size() && count != 0; ++n) {
    const unsigned at = static_cast<unsigned>((next_ring_ + n) % rings_.size());
    if (!rings_[at].sleeping) continue;
    rings_[at].sleeping = false;
    picked |= uint64_t{1} << at;
    --count;
    if (!stopping_) next_ring_ = at + 1;
  }
  return picked;
}

void UringEngine::wake(uint64_t sleepers) {
  const uint64_t one = 1;
  for (size_t n = 0; n < rings_.size(); ++n) {
    if ((sleepers >> n & 1) == 0) continue;
    while (write(rings_[n].wake_fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }
}

void UringEngine::file_added(FileId id, FileSlot slot) {
  if (!file_table_ || id >= kFileTable) return;
  bool everywhere = true;
  for (Ring& ring : rings_) everywhere &= io_uring_register_files_update(&ring.uring, id, &slot.fd, 1) == 1;
  if (everywhere) {
    in_table_[id].store(true, std::memory_order_release);
  } else {
    file_removed(id);  // some rings may hold it; the descriptor works in all
  }
}

void UringEngine::file_removed(FileId id) {
  if (!file_table_ || id >= kFileTable) return;
  in_table_[id].store(false, std::memory_order_release);
  int none = -1;
  for (Ring& ring : rings_) io_uring_register_files_update(&ring.uring, id, &none, 1);
}

void UringEngine::issue(Ring& ring, Transfer* transfer) {
  core::step("store.issue");
  const Attempt attempt = transfer->prepare(injector());
  if (attempt.part_of_page) return hand_over(transfer);
  io_uring_sqe* sqe = io_uring_get_sqe(&ring.uring);  // never null: one entry for each slot of the depth
  const bool in_table = attempt.file < kFileTable && in_table_[attempt.file].load(std::memory_order_acquire);
  const int fd = in_table ? static_cast<int>(attempt.file) : attempt.slot.fd;
  const unsigned pieces = static_cast<unsigned>(attempt.pieces.size());
  if (attempt.op == Io::Op::flush) {
    io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
  } else if (attempt.op == Io::Op::read) {
    if (pieces == 1) {
      io_uring_prep_read(sqe, fd, attempt.pieces[0].iov_base, static_cast<unsigned>(attempt.bytes), attempt.offset);
    } else {
      io_uring_prep_readv(sqe, fd, attempt.pieces.data(), pieces, attempt.offset);
    }
  } else {
    if (pieces == 1) {
      io_uring_prep_write(sqe, fd, attempt.pieces[0].iov_base, static_cast<unsigned>(attempt.bytes), attempt.offset);
    } else {
      io_uring_prep_writev(sqe, fd, attempt.pieces.data(), pieces, attempt.offset);
    }
  }
  unsigned flags = in_table ? IOSQE_FIXED_FILE : 0u;
  // The issuing thread copies to and from the page cache, and clears new buffer memory. Leave long
  // work of that kind to kernel workers, which run in parallel. If the kernel can start no worker
  // (RLIMIT_NPROC, pids.max) it cancels the request, and vmem-patient makes it.
  const bool long_work = (attempt.unpopulated || !attempt.slot.direct) && attempt.bytes >= kAsyncBytes;
  const bool may_fault = attempt.in_region && core::serves_faults;
  if (may_fault || (long_work && !attempt.stalled)) flags |= IOSQE_ASYNC;
  io_uring_sqe_set_flags(sqe, flags);
  io_uring_sqe_set_data(sqe, transfer);
  ring.prepared.push_back(transfer);
  ++ring.in_kernel;
}

void UringEngine::arm_wake(Ring& ring) {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring.uring);
  io_uring_prep_read(sqe, ring.wake_fd, &ring.wake_value, sizeof ring.wake_value, 0);
  io_uring_sqe_set_data(sqe, nullptr);
  ring.prepared.push_back(nullptr);
  ring.wake_armed = true;
}

void UringEngine::arm_watch(Ring& ring, int fd) {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring.uring);
  io_uring_prep_poll_add(sqe, fd, POLLIN);
  io_uring_sqe_set_data(sqe, kWatch);
  ring.prepared.push_back(kWatch);
  ring.watch_armed = true;
}

bool UringEngine::watch(int fd, void (*ready)(void*), void* user) {
  uint64_t sleepers = 0;
  {
    core::MutexLock lock(mutex_);
    watch_ = {fd, ready, user, false};
    if (rings_[0].sleeping) {
      rings_[0].sleeping = false;
      sleepers = 1;
    }
  }
  wake(sleepers);
  return true;
}

void UringEngine::unwatch() {
  core::MutexLock lock(mutex_);
  watch_.fd = -1;  // a poll that fires later calls nothing
  while (watch_.running) mutex_.wait(watch_idle_);
}

void UringEngine::serve_watch(Ring& ring) {
  ring.watch_ready = false;
  Watch watch;
  {
    core::MutexLock lock(mutex_);
    if (watch_.fd < 0) return;
    watch_.running = true;
    watch = watch_;
  }
  watch.ready(watch.user);
  core::MutexLock lock(mutex_);
  watch_.running = false;
  watch_idle_.notify_all();
}

void UringEngine::finish(Transfer* transfer) {
  core::step("store.finish");
  core::MutexLock lock(mutex_);
  retire(transfer);
}

// Gives vmem-patient a transfer that no ring can make: a partial page of a direct file, which
// io_uring cannot write, or one for which the kernel can start no worker (RLIMIT_NPROC, pids.max).
// A flush would always be cancelled again.
void UringEngine::hand_over(Transfer* transfer) {
  {
    core::MutexLock lock(mutex_);
    Handed& list = transfers_handed_[lane(*transfer->chain())];
    transfer->next_free = nullptr;
    (list.head == nullptr ? list.head : list.tail->next_free) = transfer;
    list.tail = transfer;
  }
  handed_.notify_one();
}

void UringEngine::run_errand(Errand& errand) {
  if (!core::serves_faults) return errand.run(errand);
  {
    core::MutexLock lock(mutex_);
    errand.next = std::exchange(errands_, &errand);
    ++outstanding_;  // it may submit
  }
  handed_.notify_one();
}

// Body of vmem-patient. It may wait for faults: the ring that serves them needs no help from this
// thread.
void UringEngine::run_patient() noexcept {
  core::MutexLock lock(mutex_);
  for (;;) {
    uint64_t sleepers = 0;
    const auto list = std::find_if(transfers_handed_.begin(), transfers_handed_.end(),
                                   [](const Handed& l) { return l.head != nullptr; });
    if (Errand* const errand = errands_; errand != nullptr) {
      errands_ = errand->next;
      lock.unlock();
      errand->run(*errand);
      lock.lock();
      --outstanding_;
      if (stopping_ && idle()) sleepers = pick_sleepers(rings_.size());
    } else if (list != transfers_handed_.end()) {
      Transfer* const transfer = std::exchange(list->head, list->head->next_free);
      lock.unlock();
      core::step("store.issue");
      while (!transfer->advance(perform(transfer->prepare(injector())))) core::step("store.issue");
      core::step("store.finish");
      lock.lock();
      retire(transfer);
      sleepers = pick_sleepers(1);
    } else if (rings_ended_) {
      return;
    } else {
      mutex_.wait(handed_);
      continue;
    }
    lock.unlock();
    if (sleepers != 0) wake(sleepers);
    lock.lock();
  }
}

void UringEngine::reap(Ring& ring) {
  io_uring_cqe* cqe;
  while (io_uring_peek_cqe(&ring.uring, &cqe) == 0) {
    auto* transfer = static_cast<Transfer*>(io_uring_cqe_get_data(cqe));
    const int result = cqe->res;
    io_uring_cqe_seen(&ring.uring, cqe);
    if (transfer == nullptr) {
      ring.wake_armed = false;
    } else if (transfer == kWatch) {
      ring.watch_armed = false;
      ring.watch_ready = true;
    } else {
      --ring.in_kernel;
      if (transfer->advance(result)) {
        finish(transfer);
      } else if (result == -ECANCELED) {
        hand_over(transfer);
      } else {
        issue(ring, transfer);
      }
    }
  }
}

// The kernel refuses this ring for good, for example by a seccomp filter installed after the start.
// Transfers that it has not taken fail, and so will later ones, with the same error. The failure is
// visible, and no thread waits forever.
void UringEngine::give_up(Ring& ring, int error) {
  VMEM_LOG_ONCE(core::Level::error,
                "io_uring_enter failed for good: %s (errno %d); reads and writes fail from now on. Was system call "
                "io_uring_enter forbidden after libvmem had started? Start with io_engine=threads instead.",
                strerror(error), error);
  for (Transfer* transfer : ring.prepared) {
    if (transfer == nullptr) {
      ring.wake_armed = false;
      continue;
    }
    if (transfer == kWatch) {
      ring.watch_armed = false;
      ring.watch_ready = true;  // there is no poll now: look every time
      continue;
    }
    --ring.in_kernel;
    while (!transfer->advance(-error)) {
    }
    finish(transfer);
  }
  ring.prepared.clear();
  // Remove the refused entries from the submission queue.
  ring.uring.sq.sqe_head = ring.uring.sq.sqe_tail = *ring.uring.sq.khead;
  io_uring_smp_store_release(ring.uring.sq.ktail, *ring.uring.sq.khead);
  usleep(1000);
}

void UringEngine::enter(Ring& ring, bool wait) {
  const int rc = io_uring_submit_and_wait(&ring.uring, wait ? 1 : 0);
  if (rc >= 0) {
    ring.prepared.erase(ring.prepared.begin(),
                        ring.prepared.begin() + std::min<ptrdiff_t>(rc, std::ssize(ring.prepared)));
  } else if (rc == -EAGAIN || rc == -ENOMEM || rc == -EBUSY) {
    usleep(1000);  // the kernel is short of memory: entries stay queued and go with the next call
  } else if (rc != -EINTR) {
    give_up(ring, -rc);
  }
}

// Returns when a completion may have come. With a fast disk the next one comes sooner than the kernel
// wakes a thread, and so does the next fault of a busy program. With several transfers in the kernel
// the thread sleeps: it then finds several completions at once.
void UringEngine::wait(Ring& ring) {
  WaitSpin& spin = ring.in_kernel != 0 ? ring.disk_spin : ring.idle_spin;
  const uint64_t began = core::now_ns();
  if (spins_ && ring.in_kernel <= 1 && spin.worth_it(began)) {
    enter(ring, false);
    core::step("store.spin");
    io_uring_cqe* cqe = nullptr;
    if (!spin.look(began, [&] { return io_uring_peek_cqe(&ring.uring, &cqe) == 0; })) enter(ring, true);
  } else {
    enter(ring, true);
  }
  spin.waited(core::now_ns() - began);
}

// By default, kernel workers use the CPUs of the process's cpuset. The kernel knows a ring's
// workers only after its first entry, so submit one first.
void UringEngine::place_workers(Ring& ring) {
  const core::CpuMask* const mask = core::thread_cpus();
  if (mask == nullptr) return;
  arm_wake(ring);
  enter(ring, false);
  cpu_set_t cpus[sizeof mask->words / sizeof(cpu_set_t)];
  memcpy(cpus, mask->words.data(), sizeof cpus);
  // Linux 5.14; before that, workers run on any CPU.
  io_uring_register_iowq_aff(&ring.uring, mask->bytes, cpus);
}

void UringEngine::run(Ring& ring) noexcept {
  own_thread = this;
  place_workers(ring);
  std::optional<core::ServesFaults> serves;
  if (&ring == &rings_[0]) serves.emplace();
  bool delivered = false;
  for (;;) {
    reap(ring);
    if (ring.watch_ready) serve_watch(ring);
    int watched = -1;
    Io* io = nullptr;
    Io* told = nullptr;
    bool wait = false;
    bool over = false;
    uint64_t helpers = 0;
    {
      core::MutexLock lock(mutex_);
      ring.sleeping = false;
      if (&ring == &rings_[0] && !stopping_) watched = watch_.fd;
      if (delivered) --outstanding_;
      delivered = false;
      while (Transfer* transfer = take()) {
        lock.unlock();
        issue(ring, transfer);
        lock.lock();
      }
      io = next_finished();
      if (io != nullptr) {
        if (finished_is_heavy()) helpers = pick_sleepers(1);
      } else if ((told = next_to_tell()) != nullptr) {
        // Issue first, then call it.
      } else if (stopping_ && idle()) {
        over = true;
        helpers = pick_sleepers(rings_.size());
      } else {
        wait = ring.sleeping = true;
      }
    }
    if (helpers != 0) wake(helpers);
    if (over) return;
    if (wait && !ring.wake_armed) arm_wake(ring);
    if (watched >= 0 && !ring.watch_armed) arm_watch(ring, watched);
    if (wait) {
      this->wait(ring);
    } else if (io_uring_sq_ready(&ring.uring) != 0) {
      enter(ring, false);
    }
    if (io != nullptr) {
      deliver(io);
      delivered = true;
    } else if (told != nullptr) {
      tell(told);
    }
  }
}

}  // namespace

const char* advice_on_uring(int error) {
  return error == EPERM || error == EACCES
             ? "Allow it in the container's seccomp profile and set kernel.io_uring_disabled=0"
         : error == ENOSYS ? "The kernel lacks it or a seccomp profile hides it"
                           : "The limits on memory, descriptors or processes may be too low";
}

core::Status make_uring_engine(const EngineOptions& options, std::unique_ptr<Engine>* out) {
  auto engine = std::make_unique<UringEngine>(options);
  core::Status status = engine->start();
  if (status.ok()) *out = std::move(engine);
  return status;
}

}  // namespace vmem::store
