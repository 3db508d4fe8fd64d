// Streams of requests: blocks arrive before a kernel requests them. Simulated devices, whose
// kernels are threads.
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernel_fixture.h"

namespace systest {
namespace {

class KernelAhead : public KernelPaging {
 protected:
  void SetUp() override { with_readahead("8MiB"); }
  void with_readahead(const std::string& bytes) {
    start(1,
          {{"readahead", bytes}, {"device_budget", "100MiB"}, {"host_budget", "200MiB"}, {"device_block_size", "2MiB"}},
          true);
  }
  static uint64_t came() { return device_stats().in_bytes / kBlock; }
  // A kernel acquires these blocks one after the other, and holds each as long as it takes to page
  // in another one. Returns how many were present at their acquire.
  int had_at_once(const View& view, const std::vector<uint32_t>& list) {
    std::atomic<int> there{0}, failed{0};
    launch(stream_, [&, view](SimKernel&) {
      Group group(view.table, long_enough());
      for (const uint32_t b : list) {
        Answer answer = group.try_acquire(b, Intent::read);
        there += answer == Answer::present ? 1 : 0;
        if (answer == Answer::not_yet) answer = group.acquire(b, Intent::read);
        failed += answer == Answer::present ? 0 : 1;
        for (unsigned i = 0; i < 20 * vmem::test::patience(); ++i)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (answer == Answer::present) group.release(b);
      }
    });
    EXPECT_TRUE(sim().synchronize(stream_).ok());
    EXPECT_EQ(failed, 0);
    return there;
  }
  static constexpr uint32_t kBlocks = 24;
};

std::vector<uint32_t> every(uint32_t stride, uint32_t blocks) {
  std::vector<uint32_t> list;
  for (uint32_t b = 0; b < blocks; b += stride) list.push_back(b);
  return list;
}

TEST_F(KernelAhead, WhatFollowsInAStreamOfRequestsComesBeforeItIsAskedFor) {
  if (IsSkipped()) return;
  vmem::region r(3 * kBlocks * kBlock);
  memset(r.data(), 1, r.size());
  Open open(r.data(), r.size(), VMEM_READ, stream_, kBlocks * kBlock);
  const std::vector<uint32_t> in_order = every(1, kBlocks), strided = every(3, 3 * kBlocks);
  EXPECT_GE(had_at_once(open.view(), in_order), static_cast<int>(kBlocks) / 2);
  EXPECT_GE(had_at_once(open.view(), {strided.rbegin(), strided.rend()}), static_cast<int>(kBlocks) / 2);
  open.end();
}

// The blocks repeat in an order that no stream has, and are more than the range may hold at once.
TEST_F(KernelAhead, WhatIsGoneThroughAgainComesBeforeItIsAskedFor) {
  if (IsSkipped()) return;
  vmem::region r(4096 * kBlock);
  Open open(r.data(), r.size(), VMEM_READ, stream_, kBlocks * kBlock);
  std::vector<uint32_t> list;
  for (uint32_t i = 0; i < 2 * kBlocks; ++i) list.push_back((i * i * 97 + 31) % 4093);
  EXPECT_LE(had_at_once(open.view(), list), static_cast<int>(kBlocks) / 4) << "the first time";
  EXPECT_GE(had_at_once(open.view(), list), static_cast<int>(kBlocks));
  EXPECT_GE(had_at_once(open.view(), list), static_cast<int>(kBlocks)) << "the third";
  open.end();
}

TEST_F(KernelAhead, NothingElseComes) {
  if (IsSkipped()) return;
  vmem::region r(3 * kBlocks * kBlock);
  memset(r.data(), 1, r.size());
  const std::vector<uint32_t> list{22, 1, 34, 9, 0, 32, 4, 15};  // no two distances are equal
  {
    Open open(r.data(), r.size(), VMEM_READ, stream_, kBlocks * kBlock);
    EXPECT_EQ(had_at_once(open.view(), list), 0);
  }
  EXPECT_EQ(came(), list.size()) << "blocks that lie anywhere are no stream";
  r.free();
  vmem_shutdown();
  with_readahead("0");
  if (IsSkipped()) return;
  vmem::region other(kBlocks * kBlock);
  Open open(other.data(), other.size(), VMEM_READ, stream_, kBlocks * kBlock);
  EXPECT_EQ(had_at_once(open.view(), every(1, 8)), 0) << "read-ahead is off";
  open.end();
}

}  // namespace
}  // namespace systest
