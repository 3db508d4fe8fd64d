// Serves the requests of kernels for the blocks of one open range, as a client of the pager: a block that is requested
// is leased to the range's own stream of arrivals, which copies of its bytes come before, and behind them the kernels
// are told. So the pager maps and copies as for any lease; the kernels' pins only say which leases may end.
//
//   requested ──lease──> leased, told ──begin_eviction, nobody has it──> lease ended: the pager may evict it
//
// What a group only loads a little of need not come: where the pager has it in a staging frame, that is lent, and the
// group is told where it is. Such a loan ends when somebody wants the block, here or elsewhere, or when so much was
// loaded from it that it had better come.
//
//   requested by a gather ──lend──> in place ──recall: begin_eviction, nobody has it──> not present, or requested
//
// Requests that follow each other are streams, as the pager's faults are: what comes next is asked for as a hint, and
// when a group has had the marker in it, more. The order of requests is recorded, and what comes next in it is asked
// for in the same way when kernels go through the same blocks again.
//
// No more blocks are leased than the range has frames; beside them, what is leaving counts until the device has got
// there. Whatever fails goes to the kernels that ask for the block.
// One thread calls, but for end_asking() and idle(). Locks: none of its own. What it waits for needs no kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "device/paging_server.h"
#include "pager/lease/acquire_request.h"
#include "pager/tier/kernel_range.h"
#include "policy/readahead.h"
#include "policy/recorded_order.h"
#include "vmem/vmem.h"

namespace vmem::pager {
class Pager;
}

namespace vmem::api {

class PagingService {
 public:
  // Has all the memory that it needs from here on, but for what leases need.
  PagingService(pager::KernelRange range, unsigned access);

  pager::KernelRange& range() { return range_; }
  // Serves what was requested meanwhile. False: there was nothing to do.
  bool round(pager::Pager& pager);
  // Every acquire ends, whatever kernels do from here on.
  void end_asking();
  // After that, for a while: takes the blocks from kernels that still run. What a kernel has all the time stays leased.
  void take_back(pager::Pager& pager);
  // The last kernel has ended, or will never access the range again. False: it is to be called again, for there was no
  // memory to end leases with.
  bool give_leases_back(pager::Pager& pager);
  // By any thread: a lease that is being taken is given up, once somebody wakes the pager's askers.
  void cancel();

 private:
  using Request = paging::Request;
  // What the protocol's server does to words.
  struct Port {
    device::PagingWords* words;
    bool arrives = false, progressed = false;
    core::Status failure = {};  // the first
    void set_state(uint32_t block, uint64_t word) { keep(words->set_state(block, word, arrives)); }
    void settle() { keep(words->settle()); }
    uint32_t use(uint32_t block) const { return words->use(block); }
    uint64_t written(uint32_t block) const { return words->written(block); }
    void taken(uint64_t cells) { keep(words->taken(cells)); }
    void progress() { progressed = true; }
    void end(paging::Answer why) { keep(words->end(why)); }
    void keep(core::Status s) {
      if (failure.ok()) failure = std::move(s);
    }
  };
  using States = paging::BlockStates<Port>;

  // Blocks in the order in which they came, each once.
  class BlockQueue {
   public:
    explicit BlockQueue(uint32_t blocks) : list_(blocks), in_(blocks) {}
    bool empty() const { return size_ == 0; }
    size_t size() const { return size_; }
    void push(uint32_t block) {
      if (in_[block]) return;
      in_[block] = true;
      list_[(first_ + size_++) % list_.size()] = block;
    }
    uint32_t front() const { return list_[first_]; }
    void pop() {
      in_[list_[first_]] = false;
      first_ = (first_ + 1) % list_.size();
      --size_;
    }

   private:
    std::vector<uint32_t> list_;
    std::vector<bool> in_;
    size_t first_ = 0, size_ = 0;
  };
  enum class Ahead : uint8_t { no, stream, record };  // nobody had asked for it; why it came
  struct Frame {
    uint32_t block = 0;
    bool used = false;
    uint64_t mark = 0;      // of its arrival
    uint64_t since_ns = 0;  // it was leased
    uint32_t takes = 0;     // when the clock came by last
    uint32_t came = 0;      // .. when it arrived
    Ahead ahead = Ahead::no;
  };
  struct Marker {  // of a window that was read ahead
    uint32_t block = 0, takes = 0;
    bool came = false;
    Ahead kind = Ahead::stream;
  };
  struct Loan {
    uint32_t block = 0;
    uint32_t takes = 0;  // when it was looked at last
    uint64_t loads = 0;  // by groups that had it, as far as was seen
    bool over = false;   // recalled
    bool comes = false;  // .. to come to the device
  };

  // Where the thread's time went, for the log.
  struct Spent {
    uint64_t leases = 0, blocks = 0, looks = 0, passed = 0;  // looks at pins; victims that somebody had
    uint64_t staging_loans = 0, ahead = 0, wasted = 0;       // blocks
    uint64_t serving_ns = 0, leasing_ns = 0, looking_ns = 0, ending_ns = 0, lending_ns = 0;
  };

  bool take_requests();
  void read_ahead(uint32_t block, bool marker);
  void read_recorded(uint32_t block);
  bool hint(uint64_t block, Ahead why);
  void look_at_markers(uint64_t now);
  BlockQueue& queue_of(uint32_t block);
  void serve(pager::Pager& pager, BlockQueue& queue, size_t most);
  void bring(pager::Pager& pager);
  bool bring_alone(pager::Pager& pager, uint32_t block);
  core::Status lease(pager::Pager& pager, const uint32_t* blocks, size_t count);
  void publish(const uint32_t* blocks, size_t count);
  void fail(uint32_t block, const core::Status& why);
  void retry_failed(uint64_t now);
  void lend(pager::Pager& pager);
  void recall(Loan& loan);
  void look_after_loans(pager::Pager& pager, uint64_t now);
  void end_loans(pager::Pager& pager);
  void end_recalled(pager::Pager& pager);
  void end_loans_of_broken(pager::Pager& pager);
  void end_all_loans(pager::Pager& pager);
  void promote(pager::Pager& pager, uint64_t now);
  size_t choose_victims(size_t most, uint64_t now, size_t looks);
  size_t make_room(pager::Pager& pager, size_t frames, size_t looks = SIZE_MAX);
  void settle();
  void is_over(uint32_t block);
  void end_leases(pager::Pager& pager);
  void tell();
  void say_what_it_took();
  bool broken();
  vmem_range bytes_of(uint32_t block) const;

  pager::KernelRange range_;
  const unsigned access_;
  Port port_;
  std::vector<States::Known> known_;
  States states_;
  paging::RequestQueue<paging::HostAtomics> requests_;
  BlockQueue first_, needed_, rows_, prefetch_, failed_;
  std::vector<uint64_t> failed_ns_;       // by block, of those that are failed
  std::vector<paging::Urgency> urgency_;  // by block, of those that are requested
  std::vector<Frame> frames_;
  policy::ReadAhead readahead_;
  policy::RecordedOrder recorded_;
  std::vector<Ahead> ahead_;  // by block: asked for by nobody else
  std::vector<Marker> markers_;
  std::vector<uint32_t> free_, victims_, batch_;
  std::vector<vmem_range> ranges_;
  std::vector<vmem_range> over_, unwritten_;  // leases that are to end; .. of blocks that no kernel stored to
  std::vector<Loan> loans_;
  std::vector<uint32_t> loan_of_, asking_;  // by block: which; blocks to ask the pager about
  std::vector<const std::byte*> homes_;
  size_t recalled_ = 0, looked_ = 0;  // loans that are; the one to be looked at next
  uint64_t looked_ns_ = 0, promoted_ns_ = 0, settled_ns_ = 0, look_took_ns_ = 0;
  size_t hand_ = 0;
  uint64_t marks_ = 0, progress_ = 0;
  pager::AcquireRequest ask_;
  Spent spent_;
  bool broken_ = false;
};

}  // namespace vmem::api
