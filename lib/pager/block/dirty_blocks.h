// Blocks in host memory that may hold what their shared file lacks, oldest first; and the faults that wait because
// there are too many of them (setting dirty_limit).
//
// - A listed block is in host memory, and a shared file's. bytes() counts the listed blocks.
// - since() never decreases along the list: a block joins at its end, and goes back there when it is put off.
// - An overdue block is one that was put off when it was due. It is overdue until its write begins.
// - A block leaves the list when its file has its bytes, or when it leaves host memory.
// - Reclaim threads are woken when the list is not empty any more, and when it is long.
//
// Not thread-safe: the pager's lock protects it. slow() may need memory; nothing else does.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <string>

#include "core/pooled_list.h"
#include "core/types.h"
#include "pager/account/requests.h"
#include "pager/block/config.h"
#include "pager/block/frame_table.h"

namespace vmem::pager {

class DirtyBlocks {
 public:
  static constexpr size_t kMostSlowed = 1024;
  static constexpr uint64_t kMostWriting = uint64_t{32} << 20;  // bytes at once: the disk serves others, too
  static constexpr uint64_t kLeastLimit = uint64_t{64} << 20;   // by default: any disk writes it in no time

  DirtyBlocks(FrameTable& frame_table, const Config& config) : frame_table_(frame_table), config_(config) {}
  // The reclaim threads sleep there.
  void set_bell(std::condition_variable* bell) { bell_ = bell; }

  // The block keeps its place if it is listed already.
  void add(core::FrameId id, uint64_t now_ns);
  void remove(core::FrameId id);
  void put_off(core::FrameId id, uint64_t now_ns, Frame::Overdue overdue = Frame::Overdue::no);
  bool overdue(core::FrameId id) const { return frame_table_[id].overdue != Frame::Overdue::no; }
  void bring_forward(core::FrameId id, uint64_t now_ns);
  bool listed(core::FrameId id) const { return frame_table_[id].dirty_since_ns != 0; }
  core::FrameId first() const { return first_; }  // kNoFrame: the list is empty
  uint64_t since(core::FrameId id) const { return frame_table_[id].dirty_since_ns; }
  uint64_t bytes() const { return bytes_; }
  // Without overdue blocks under WRITE leases: a store that waits would not make them fewer.
  uint64_t writable() const { return bytes_ - leased_; }

  // Writes of listed blocks that nobody waits for. Enough are under way: the next begins when one has ended, which
  // wakes a reclaim thread.
  void write_begins(uint64_t bytes) { writing_ += bytes; }
  void write_ends(uint64_t bytes, uint64_t now_ns);
  uint64_t writing() const { return writing_; }
  bool writes_enough() const { return writing_ >= kMostWriting; }
  // Counts blocks that joined or came forward, and writes that ended.
  uint64_t changes() const { return changes_; }

  // Settings in force. 0: blocks are written only when they leave memory, or for a call; there is no limit then.
  uint64_t interval_ns() const { return config_.writeback_interval_ns; }
  uint64_t limit() const {
    return config_.dirty_limit != 0 ? config_.dirty_limit : std::max(config_.host_budget / 4, kLeastLimit);
  }
  // From here on blocks are written whatever their age, so that writers seldom meet the limit.
  bool many() const { return interval_ns() != 0 && writable() >= limit() / 2; }
  void settings_changed();

  // A fault that would make one more block dirty is to wait.
  bool slows(uint64_t now_ns) const {
    return interval_ns() != 0 && writable() != 0 && writable() >= limit() && now_ns >= lifted_until_ns_;
  }
  // It waits. False: nobody can remember it.
  bool slow(Region& r, core::BlockIndex b, uint64_t now_ns);
  // Nothing can be written: faults do not wait until then.
  void lift(uint64_t until_ns) { lifted_until_ns_ = until_ns; }
  bool any_slowed() const { return !slowed_.empty(); }
  // For how long faults have waited, and no write has ended.
  uint64_t stuck_ns(uint64_t now_ns) const;
  // Takes out a fault that may go on; a null region: none may. woken: bytes of those that did just now.
  BlockSpan wake_one(uint64_t now_ns, uint64_t woken);
  // The region goes.
  void forget(const Region& r);

  // Tests: recounts all. What is wrong; empty: nothing.
  std::string check() const;

 private:
  void append(core::FrameId id, uint64_t now_ns);
  void prepend(core::FrameId id, uint64_t since_ns);
  void unlink(core::FrameId id);
  void ring() {
    if (bell_ != nullptr) bell_->notify_one();
  }

  FrameTable& frame_table_;
  const Config& config_;
  std::condition_variable* bell_ = nullptr;
  core::FrameId first_ = core::kNoFrame, last_ = core::kNoFrame;
  uint64_t bytes_ = 0, leased_ = 0, writing_ = 0, changes_ = 0;
  uint64_t ended_ns_ = 0, slowing_since_ns_ = 0, lifted_until_ns_ = 0;
  PooledList<BlockSpan> slowed_;
};

}  // namespace vmem::pager
