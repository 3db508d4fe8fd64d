// Blocks in host memory that may hold changes their shared file lacks, oldest first. Also the
// faults that wait because there are too many such blocks (setting dirty_limit).
//
// - A listed block is in host memory and belongs to a shared file. bytes() counts the listed
//   blocks.
// - since() never decreases along the list: a block joins at its end, and returns there when it is
//   put off.
// - An overdue block was due and was put off. It is overdue until its write begins.
// - A block leaves the list when its file has its bytes, or when it leaves host memory.
// - A reclaim thread is woken when the list becomes non-empty, and when it becomes long.
//
// Not thread-safe: the pager's lock protects it. slow() may need memory; nothing else does.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <string>

#include "core/types.h"
#include "pager/block/config.h"
#include "pager/block/frame_table.h"
#include "pager/block/pooled_list.h"
#include "pager/block/requests.h"

namespace vmem::pager {

class DirtyBlocks {
 public:
  static constexpr size_t kMostSlowed = 1024;
  static constexpr uint64_t kMostWriting = uint64_t{32} << 20;  // bytes at once: the disk serves other transfers too
  static constexpr uint64_t kLeastLimit = uint64_t{64} << 20;   // the least default limit: any disk writes it quickly

  DirtyBlocks(FrameTable& frame_table, const Tunables& tunables) : frame_table_(frame_table), tunables_(tunables) {}
  // The condition variable in which reclaim threads sleep.
  void set_bell(std::condition_variable* bell) { bell_ = bell; }

  // Lists the block. It keeps its place if it is listed already.
  void add(core::FrameId id, uint64_t now_ns);
  void remove(core::FrameId id);
  // Moves the block to the end of the list.
  void put_off(core::FrameId id, uint64_t now_ns, DirtyFrame::Overdue overdue = DirtyFrame::Overdue::no);
  // Overdue, and the end of a lease or of a transition makes it due.
  bool overdue(core::FrameId id) const {
    const DirtyFrame::Overdue overdue = frame_table_[id].dirty.overdue;
    return overdue == DirtyFrame::Overdue::yes || overdue == DirtyFrame::Overdue::leased;
  }
  bool failed(core::FrameId id) const { return frame_table_[id].dirty.overdue == DirtyFrame::Overdue::failed; }
  // Moves an overdue block to the head of the list, so that it is due now.
  void bring_forward(core::FrameId id, uint64_t now_ns);
  bool listed(core::FrameId id) const { return frame_table_[id].dirty.since_ns != 0; }
  core::FrameId first() const { return first_; }  // kNoFrame: the list is empty
  uint64_t since(core::FrameId id) const { return frame_table_[id].dirty.since_ns; }
  uint64_t bytes() const { return bytes_; }
  // bytes() less the overdue blocks under WRITE leases: these would not become fewer while a store
  // waits.
  uint64_t writable() const { return bytes_ - leased_; }

  // Background writes of listed blocks. If writes_enough(), the next one begins when one has ended,
  // which wakes a reclaim thread.
  void write_begins(uint64_t bytes) { writing_ += bytes; }
  void write_ends(uint64_t bytes, uint64_t now_ns);
  uint64_t writing() const { return writing_; }
  bool writes_enough() const { return writing_ >= kMostWriting; }
  // Counts blocks that joined or came forward, and writes that ended.
  uint64_t changes() const { return changes_; }

  // The settings in force. interval_ns() 0: blocks are written only when they leave memory, or for
  // a call; then there is no limit.
  uint64_t interval_ns() const { return tunables_.writeback_interval_ns; }
  uint64_t limit() const {
    return tunables_.dirty_limit != 0 ? tunables_.dirty_limit : std::max(tunables_.host_budget / 4, kLeastLimit);
  }
  // So many blocks are dirty that they are written whatever their age, so that stores seldom meet
  // the limit.
  bool many() const { return interval_ns() != 0 && writable() >= limit() / 2; }
  void settings_changed();

  // Whether a fault that would make one more block dirty must wait.
  bool slows(uint64_t now_ns) const {
    return interval_ns() != 0 && writable() != 0 && writable() >= limit() && now_ns >= lifted_until_ns_;
  }
  // Queues such a fault. Returns false if the queue is full or there is no memory for it.
  bool slow(Region& r, core::BlockIndex b, uint64_t now_ns);
  // No block can be written: faults do not wait before `until_ns`.
  void lift(uint64_t until_ns) { lifted_until_ns_ = until_ns; }
  bool any_slowed() const { return !slowed_.empty(); }
  // For how long faults have waited without the end of any write.
  uint64_t stuck_ns(uint64_t now_ns) const;
  // Dequeues a fault that may go on, or returns a null region. woken: the bytes of faults that were
  // dequeued just now.
  BlockSpan wake_one(uint64_t now_ns, uint64_t woken);
  // Drops the waiting faults of a region that is being freed.
  void forget(const Region& r);

  // For tests: recounts everything. Returns what is wrong, or an empty string.
  std::string check() const;

 private:
  void append(core::FrameId id, uint64_t now_ns);
  void prepend(core::FrameId id, uint64_t since_ns);
  void unlink(core::FrameId id);
  void ring() {
    if (bell_ != nullptr) bell_->notify_one();
  }

  FrameTable& frame_table_;
  const Tunables& tunables_;
  std::condition_variable* bell_ = nullptr;
  core::FrameId first_ = core::kNoFrame, last_ = core::kNoFrame;
  uint64_t bytes_ = 0, leased_ = 0, writing_ = 0, changes_ = 0;
  uint64_t ended_ns_ = 0, slowing_since_ns_ = 0, lifted_until_ns_ = 0;
  PooledList<BlockSpan> slowed_;
};

}  // namespace vmem::pager
