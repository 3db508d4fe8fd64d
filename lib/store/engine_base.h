// Common part of all engines: five queues in order of urgency, the depth limit, merging, parts,
// the file table and delivery of done(). An engine adds its threads and its way to issue a
// Transfer.
//
// Only the engine's own threads submit to the kernel; submit() queues and wakes them. If threads of
// the application submitted:
//
// - Reads could deadlock. The kernel posts an io_uring completion in the context of the submitting
//   thread. If that thread is blocked in the kernel on a fault that waits for this read, neither
//   ends (seen on Linux 6.18).
// - System calls such as epoll_wait would return EINTR there.
// - A thread that exits would cancel what it submitted.
//
// mutex_ is a leaf. No system call, callback or log line happens under it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "core/mutex.h"
#include "store/engine.h"
#include "store/transfer.h"

namespace vmem::store {

class EngineBase : public Engine {
 public:
  void submit(std::span<Io* const> batch) final;
  bool read_here(Io& io) final;
  core::Status add_file(int fd, FileId* id) final;
  void remove_file(FileId id) final;
  EngineStats stats() const final;

  // Tests only; not owned. nullptr removes it. Attempts in progress may still call the old one.
  void set_injector(Injector* injector) { injector_.store(injector, std::memory_order_release); }
  unsigned depth() const { return depth_; }

 protected:
  explicit EngineBase(unsigned depth);

  // A list of Ios linked by next.
  struct List {
    Io* head = nullptr;
    Io* tail = nullptr;
    void push(Io* io);
    Io* pop();
  };

  // Called with mutex_ held after work for `count` transfers arrived. Marks up to `count` sleeping
  // threads as woken and returns them as an argument for wake(), or 0 for none.
  virtual uint64_t pick_sleepers(size_t count) VMEM_REQUIRES(mutex_) = 0;
  // Wakes them. Called without the lock.
  virtual void wake(uint64_t sleepers) = 0;
  // Update the kernel's file table, if there is one. Called without the lock, one id at a time.
  virtual void file_added(FileId, FileSlot) {}
  virtual void file_removed(FileId) {}

  bool launchable() const VMEM_REQUIRES(mutex_);  // take() would return a transfer
  // Puts the next transfer in flight. Returns nullptr if nothing is queued or no slot is free.
  Transfer* take() VMEM_REQUIRES(mutex_);
  void retire(Transfer* transfer) VMEM_REQUIRES(mutex_);  // frees its slot; its Ios await delivery
  Io* next_finished() VMEM_REQUIRES(mutex_);              // most urgent first
  // Returns the most urgent Io whose progress() is due, for tell(). Finished Ios go first: their
  // submitters wait for them.
  Io* next_to_tell() VMEM_REQUIRES(mutex_);
  bool finished_is_heavy() const VMEM_REQUIRES(mutex_) { return finished_bytes_ >= kHeavyBytes; }
  bool idle() const VMEM_REQUIRES(mutex_) { return outstanding_ == 0; }

  // Calls done(), which may free the Io. Call without the lock; then take it and decrement
  // outstanding_.
  static void deliver(Io* io);
  void tell(Io* io);  // call without the lock
  Injector* injector() const { return injector_.load(std::memory_order_acquire); }

  mutable core::Mutex mutex_;
  uint64_t outstanding_ VMEM_GUARDED_BY(mutex_) = 0;  // Ios submitted whose done() has not returned
  bool stopping_ VMEM_GUARDED_BY(mutex_) = false;     // the destructor waits

  // A thread that checks the queues again right after done() sets this to its engine. Its submits
  // wake no other thread.
  static thread_local const EngineBase* own_thread;
  static size_t lane(const Io& io) { return std::min(static_cast<size_t>(io.urgency), core::kUrgencies - 1); }

 private:
  static constexpr size_t kHeavyBytes = size_t{512} << 10;  // finished bytes worth waking another thread for
  static bool joins(const Io& before, const Io& next, size_t bytes);
  static bool in_parts(const Io& io) { return io.size > kPartBytes && io.op != Io::Op::flush; }
  // Limits the parts in flight of a read that has progress() and nothing queued behind it. This
  // many keep a disk busy (see Engine); with more, all would arrive together at the end.
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
    int lost = 0;          // error of a flush that also covered this file's bytes, not yet reported
  };

  const unsigned depth_;
  // Limit for prefetch, read-ahead and write-back, so that a fault finds a free slot.
  const unsigned background_depth_;
  std::atomic<Injector*> injector_{nullptr};

  std::array<List, core::kUrgencies> queues_ VMEM_GUARDED_BY(mutex_);
  std::array<List, core::kUrgencies> finished_ VMEM_GUARDED_BY(mutex_);
  size_t finished_bytes_ VMEM_GUARDED_BY(mutex_) = 0;
  std::vector<Io*> to_tell_ VMEM_GUARDED_BY(mutex_);  // capacity for every Io that has begun and not ended
  std::vector<Transfer> transfers_ VMEM_GUARDED_BY(mutex_);
  Transfer* free_ VMEM_GUARDED_BY(mutex_) = nullptr;
  unsigned in_flight_ VMEM_GUARDED_BY(mutex_) = 0;
  unsigned background_in_flight_ VMEM_GUARDED_BY(mutex_) = 0;
  std::vector<File> files_ VMEM_GUARDED_BY(mutex_);
  std::vector<FileId> free_files_ VMEM_GUARDED_BY(mutex_);
  EngineStats stats_ VMEM_GUARDED_BY(mutex_){};

  core::Mutex file_mutex_;  // serializes changes of the file table; taken before mutex_
};

}  // namespace vmem::store
