// What both engines share: five queues in order of urgency, the depth limit, merging, parts, the file table, delivery
// of done(). An engine adds only threads and the way they issue a Transfer.
//
// Who submits to the kernel: only the engine's own threads. An io_uring completion is posted in the context of the
// thread that submitted; were that a thread of the application, blocked in the kernel on a fault that waits for this
// very read, neither would ever end (seen on Linux 6.18: 16 reads submitted, then read(2) into an absent userfaultfd
// page: no completion for as long as the fault lasts). It also makes system calls such as epoll_wait return EINTR
// there, and a thread that exits cancels what it submitted. So submit() queues and wakes.
//
// Locks: mutex_ is a leaf. No system call, callback or log line happens under it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "core/mutex.h"
#include "store/io.h"
#include "store/transfer.h"

namespace vmem::store {

class EngineBase : public Engine {
 public:
  void submit(std::span<Io* const> batch) final;
  core::Status add_file(int fd, FileId* id) final;
  void remove_file(FileId id) final;
  EngineStats stats() const final;

  // Tests only; not owned. nullptr removes it. The old one may still be called by attempts under way.
  void set_injector(Injector* injector) { injector_.store(injector, std::memory_order_release); }
  unsigned depth() const { return depth_; }

 protected:
  explicit EngineBase(unsigned depth);

  // A run of Ios linked by next.
  struct List {
    Io* head = nullptr;
    Io* tail = nullptr;
    void push(Io* io);
    Io* pop();
  };

  // Called with mutex_ held after work for `count` transfers arrived: marks up to so many sleeping threads as woken and
  // says which, as a value for wake(), 0 for nobody.
  virtual uint64_t pick_sleepers(size_t count) VMEM_REQUIRES(mutex_) = 0;
  // Wakes them. Called without the lock.
  virtual void wake(uint64_t sleepers) = 0;
  // The file table of the kernel, where there is one. Called without the lock, for one id at a time.
  virtual void file_added(FileId, FileSlot) {}
  virtual void file_removed(FileId) {}

  bool launchable() const VMEM_REQUIRES(mutex_);  // take() would find something
  Transfer* take()
      VMEM_REQUIRES(mutex_);  // next in order, in flight from now on; nullptr: nothing queued or no slot free
  void retire(Transfer* transfer) VMEM_REQUIRES(mutex_);  // its slot is free, its Ios await delivery
  Io* next_finished() VMEM_REQUIRES(mutex_);              // most urgent first
  // Whose progress() is to be called, by tell(), the most urgent first. Behind what is finished: somebody waits for
  // that.
  Io* next_to_tell() VMEM_REQUIRES(mutex_);
  bool finished_is_heavy() const VMEM_REQUIRES(mutex_) { return finished_bytes_ >= kHeavyBytes; }
  bool idle() const VMEM_REQUIRES(mutex_) { return outstanding_ == 0; }

  // Without the lock: calls done(), which may free the Io. The caller then takes the lock and lowers outstanding_.
  static void deliver(Io* io);
  void tell(Io* io);  // without the lock
  Injector* injector() const { return injector_.load(std::memory_order_acquire); }

  mutable core::Mutex mutex_;
  uint64_t outstanding_ VMEM_GUARDED_BY(mutex_) = 0;  // Ios submitted whose done() has not returned
  bool stopping_ VMEM_GUARDED_BY(mutex_) = false;     // the destructor waits

  // A thread that looks at the queues again right after done() names its engine here: its submits wake nobody else.
  static thread_local const EngineBase* own_thread;
  static size_t lane(const Io& io) { return std::min(static_cast<size_t>(io.urgency), core::kUrgencies - 1); }

 private:
  static constexpr size_t kHeavyBytes = size_t{512} << 10;  // delivery worth waking another thread for
  static bool joins(const Io& before, const Io& next, size_t bytes);
  static bool in_parts(const Io& io) { return io.size > kPartBytes && io.op != Io::Op::flush; }
  // Of a read that nobody stands behind, and of whose parts progress() is to tell: no more at once than keep a disk
  // busy (see Engine), or all come together at the end.
  static constexpr unsigned kPartsOfOne = 4;
  static bool waits_for_its_parts(const List& queue) {
    const Io& first = *queue.head;
    return first.next == nullptr && first.op == Io::Op::read && first.progress != nullptr && in_parts(first) &&
           first.parts.under_way >= kPartsOfOne;
  }
  static size_t parts_left(const Io& io) { return (io.size - io.parts.begun + kPartBytes - 1) / kPartBytes; }
  size_t next_lane() const VMEM_REQUIRES(mutex_);
  void start_next(List& queue, Transfer* transfer) VMEM_REQUIRES(mutex_);
  void part_ended(Io* whole, const Io& part) VMEM_REQUIRES(mutex_);
  void conclude(Io* whole) VMEM_REQUIRES(mutex_);
  size_t come(const Io& whole) const VMEM_REQUIRES(mutex_);
  void note_progress(Io* whole) VMEM_REQUIRES(mutex_);
  void drop_progress(Io* whole) VMEM_REQUIRES(mutex_);
  void ended(Io* io) VMEM_REQUIRES(mutex_);
  void flush_begins(const Io& io) VMEM_REQUIRES(mutex_);
  void flush_ended(Io& io) VMEM_REQUIRES(mutex_);

  struct File {
    FileSlot slot;
    unsigned flushes = 0;  // in flight
    int lost = 0;          // what a flush failed with that also was for the bytes of this file; nobody has been told
  };

  const unsigned depth_;
  const unsigned background_depth_;  // what prefetch, read-ahead and write-back may use: a fault finds a slot free
  std::atomic<Injector*> injector_{nullptr};

  std::array<List, core::kUrgencies> queues_ VMEM_GUARDED_BY(mutex_);
  std::array<List, core::kUrgencies> finished_ VMEM_GUARDED_BY(mutex_);
  size_t finished_bytes_ VMEM_GUARDED_BY(mutex_) = 0;
  std::vector<Io*> to_tell_ VMEM_GUARDED_BY(mutex_);  // with room for all that have begun and are not over
  std::vector<Transfer> transfers_ VMEM_GUARDED_BY(mutex_);
  Transfer* free_ VMEM_GUARDED_BY(mutex_) = nullptr;
  unsigned in_flight_ VMEM_GUARDED_BY(mutex_) = 0;
  unsigned background_in_flight_ VMEM_GUARDED_BY(mutex_) = 0;
  std::vector<File> files_ VMEM_GUARDED_BY(mutex_);
  std::vector<FileId> free_files_ VMEM_GUARDED_BY(mutex_);
  EngineStats stats_ VMEM_GUARDED_BY(mutex_){};

  core::Mutex file_mutex_;  // one change of the file table at a time; taken before mutex_
};

// Both run their threads with every signal blocked: the application's handlers belong on the application's threads.
core::Status make_uring_engine(const EngineOptions& options, std::unique_ptr<Engine>* out);
core::Status make_thread_engine(const EngineOptions& options, std::unique_ptr<Engine>* out);

}  // namespace vmem::store
