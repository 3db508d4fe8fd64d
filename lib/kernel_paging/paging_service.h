// Serves the requests of kernels for the blocks of one open range, as a client of the pager.
//
// A requested block is leased to the range's own stream of arrivals. The stream waits for the copy
// of its bytes, then stores the state that tells the kernels. So the pager maps and copies as for
// any lease, and the kernels' pins only say which leases may end.
//
//   requested ──lease──> leased, present ──begin_eviction, no pins──> lease ended: may be evicted
//
// A block from which groups load only a few rows need not come. If the pager has it in a staging
// frame, the service lends the frame and tells the groups its address. The loan ends when another
// thread or a kernel wants the block, or when loads from it have cost as much as its promotion.
//
//   requested for rows ──lend──> in place ──begin_eviction, no pins──> not present, or requested
//
// Requests that follow each other form a stream, as the pager's faults do. The service requests the
// next blocks as hints, and more of them when a group has used the marker block among them. It also
// records the order of requests, and reads ahead in that order when kernels go through the same
// blocks again.
//
// - The service leases no more blocks than the range has frames. In addition, a block that leaves
//   still counts as leased until the device has reached its release.
// - An error goes to the kernels that request the block.
// - One thread calls. Other threads may call cancel(), end_asking(), and of range().words those
//   functions that PagingWords allows them.
// - The service has no lock of its own, and waits for nothing that needs a kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "device/paging_server.h"
#include "pager/lease/acquire_requests.h"
#include "pager/tier/kernel_ranges.h"
#include "policy/readahead.h"
#include "policy/recorded_order.h"
#include "vmem/vmem.h"

namespace vmem::pager {
class Pager;
}

namespace vmem::api {

class PagingService {
 public:
  // Allocates all memory that the service needs, except what leases need.
  PagingService(pager::KernelRange range, unsigned access);

  pager::KernelRange& range() { return range_; }
  // Serves the requests that have come. Returns false if there was nothing to do.
  bool round(pager::Pager& pager);
  // Ends every acquire of kernels, now and from here on.
  void end_asking();
  // After end_asking(): takes blocks back as running kernels release them, for at most half a
  // second. A block that a kernel keeps longer stays leased.
  void take_back(pager::Pager& pager);
  // Ends all leases and loans, after the last kernel has ended or will never access the range
  // again. Returns false if memory was short: call it again.
  bool give_leases_back(pager::Pager& pager);
  // Makes the lease that is being taken fail, and every later one. Call AcquireRequests::wake()
  // after it.
  void cancel();

 private:
  using Request = paging::Request;
  // Applies to the words what the protocol's server does (Port of device/paging_server.h).
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

  // A queue that has each block at most once.
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
  enum class Ahead : uint8_t { no, stream, record };  // why a block that no group requested was read
  struct Frame {
    uint32_t block = 0;
    bool used = false;
    uint64_t mark = 0;      // of its arrival
    uint64_t since_ns = 0;  // when it was leased
    uint32_t takes = 0;     // takes_of() when the clock last came by
    uint32_t came = 0;      // takes_of() on arrival
    Ahead ahead = Ahead::no;
  };
  struct Marker {  // of a window that was read ahead
    uint32_t block = 0, takes = 0;
    bool came = false;
    Ahead kind = Ahead::stream;
  };
  struct Loan {
    uint32_t block = 0;
    uint32_t takes = 0;  // takes_of() at the last look
    uint64_t loads = 0;  // pins that looks have counted
    bool over = false;   // recalled
    bool comes = false;  // recalled for promotion
  };

  // How the thread spent its time, for the log.
  struct Spent {
    uint64_t leases = 0, blocks = 0, looks = 0, passed = 0;  // looks at pins; victims in use
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
  std::vector<uint64_t> failed_ns_;       // by block: when it failed
  std::vector<paging::Urgency> urgency_;  // by block: that of its request
  std::vector<Frame> frames_;
  policy::ReadAhead readahead_;
  policy::RecordedOrder recorded_;
  std::vector<Ahead> ahead_;  // by block: why, if only as a hint
  std::vector<Marker> markers_;
  std::vector<uint32_t> free_, victims_, batch_;
  std::vector<vmem_range> ranges_;
  std::vector<vmem_range> over_, unwritten_;  // leases to end; those of blocks that no kernel stored to
  std::vector<Loan> loans_;
  std::vector<uint32_t> loan_of_, asking_;  // by block: index in loans_; blocks to ask the pager about
  std::vector<const std::byte*> homes_;
  size_t recalled_ = 0, looked_ = 0;  // recalled loans; index of the next to look at
  uint64_t looked_ns_ = 0, promoted_ns_ = 0, settled_ns_ = 0, look_took_ns_ = 0;
  size_t hand_ = 0;
  uint64_t marks_ = 0, progress_ = 0;
  pager::AcquireRequest ask_;
  Spent spent_;
  bool broken_ = false;
};

}  // namespace vmem::api
