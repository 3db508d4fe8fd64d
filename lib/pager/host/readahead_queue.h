// What is to be read before anybody accesses it: prefetches to host memory and read-ahead windows, taken block by
// block; and how much of it is being read.
//
//   at most kMost wait; what is in flight = the blocks of the transitions that are being read for it, each counted once
//
// Not thread-safe: the pager's lock protects it. Needs memory for an entry more than reserve() made room for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/pooled_list.h"
#include "core/types.h"
#include "policy/readahead.h"

namespace vmem::pager {

struct Transition;
struct Region;

struct Speculative {
  Region* region;
  core::BlockIndex next;
  int64_t stride;
  uint64_t count;
  core::BlockIndex marker;  // read-ahead only
  core::Urgency urgency;

  void advance(uint64_t blocks) {
    next = static_cast<core::BlockIndex>(static_cast<int64_t>(next) + static_cast<int64_t>(blocks) * stride);
    count -= blocks;
  }
};

class ReadaheadQueue {
 public:
  static constexpr size_t kMost = 1024;

  bool empty() const { return queue_.empty(); }
  size_t size() const { return queue_.size(); }
  Speculative& front() { return queue_.front(); }
  void pop() { queue_.pop_front(); }
  // Room for so many. False: no memory for that.
  [[nodiscard]] bool reserve(size_t entries) noexcept { return queue_.reserve(entries); }
  // False: that many wait already, or there is no memory. Nothing comes of it then.
  [[nodiscard]] bool add(const Speculative& what) { return queue_.size() < kMost && queue_.push_back(what); }
  // Nobody waits for the run any more: what waits of it is not read.
  void forget(const Region& r, const policy::Run& run);
  // The region goes.
  void forget(const Region& r);

  // Whether so many bytes more may be read at once. One block may in any case.
  bool may_start(uint64_t bytes, uint64_t most) const { return in_flight_ == 0 || in_flight_ + bytes <= most; }
  // The transition reads a block ahead; it has been read, or there was no memory for it. Of any other transition:
  // nothing.
  void started(Transition& m);
  void ended(Transition& m);
  uint64_t in_flight() const { return in_flight_; }

  // Tests: recounts the pager's moves. What is wrong; empty: nothing.
  std::string check(std::span<const std::unique_ptr<Transition>> transitions) const;

 private:
  PooledList<Speculative> queue_;
  uint64_t in_flight_ = 0;  // bytes
};

}  // namespace vmem::pager
