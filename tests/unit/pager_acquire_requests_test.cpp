// Requests that callers do not wait for: acquires, ranges opened to kernels, exported memory.
#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <utility>

#include "pager/calls/export.h"
#include "pager/lease/acquire_requests.h"
#include "pager/tier/kernel_ranges.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

vmem_range range_of(const Region& r, BlockIndex first, BlockIndex last, unsigned access = VMEM_READ) {
  return {r.address(first), (last - first + 1) * r.block_size, access, 0};
}

// Devices with streams that may belong to a thread. They share blocks and make words as the test
// says.
class RangeDevices final : public FakeDevices {
 public:
  bool of_thread(void* stream) const override { return stream == nullptr; }
  Status share(device::Range range, device::Export, int* descriptor) override {
    shared_bytes += range.size;
    *descriptor = 77;
    return share_error != 0 ? error(share_error, "as the test wants it") : Status();
  }
  Status make_paging_words(int, uint32_t blocks, uint32_t frames, std::unique_ptr<device::PagingWords>*) override {
    words_of = {blocks, frames};
    return words_error != 0 ? error(words_error, "as the test wants it") : Status();
  }
  uint64_t shared_bytes = 0;
  int share_error = 0, words_error = 0;
  std::pair<uint32_t, uint32_t> words_of;
};

class RangeParts : public PromotionParts {
 protected:
  RangeParts() : PromotionParts(std::make_unique<RangeDevices>()) {}
  void SetUp() override {
    PromotionParts::SetUp();
    devices.streams = true;
  }
  RangeDevices& others = static_cast<RangeDevices&>(devices);
};

class PagerAcquireRequests : public RangeParts {
 protected:
  uint32_t asked(const Region& r) {
    BigLock lock(map.mutex());
    return r.counts.asked;
  }
  Status check(Region& r, const AcquireRequest& ask) {
    BigLock lock(map.mutex());
    const BlockSpan span{&r, 0, 0};
    return check_asked({&span, 1}, &ask);
  }
  AcquireRequests& acquire_requests = leases_.acquire_requests;
};

TEST_F(PagerAcquireRequests, RegionsAreAskedForUntilTheAskIsWithdrawn) {
  Region& r = region(4);
  Region& s = region(1);
  const std::array ranges = {range_of(r, 0, 0), range_of(s, 0, 0), range_of(r, 2, 3)};
  AcquireRequest ask;
  ASSERT_TRUE(acquire_requests.ask(ranges, VMEM_HOST, nullptr, &ask).ok());
  EXPECT_EQ(asked(r), 2u);
  EXPECT_EQ(asked(s), 1u);
  EXPECT_TRUE(check(r, ask).ok());
  acquire_requests.withdraw(ranges, &ask);
  EXPECT_EQ(asked(r), 0u);
  EXPECT_EQ(asked(s), 0u);
  acquire_requests.withdraw(ranges, &ask);
  EXPECT_EQ(asked(r), 0u) << "once";
}

TEST_F(PagerAcquireRequests, OneThatIsRefusedAsksForNothing) {
  Region& r = region(2);
  const std::array ranges = {range_of(r, 0, 0), vmem_range{r.address(1), 2 * kBlock, VMEM_READ, 0}};
  AcquireRequest ask;
  EXPECT_EQ(acquire_requests.ask(ranges, VMEM_HOST, nullptr, &ask).code(), -EINVAL);
  EXPECT_EQ(acquire_requests.ask({ranges.data(), 1}, 9, nullptr, &ask).code(), -ENODEV);
  EXPECT_EQ(acquire_requests.ask({ranges.data(), 1}, 0, nullptr, &ask).code(), -EINVAL)
      << "another stream on each thread";
  EXPECT_EQ(asked(r), 0u);
}

TEST_F(PagerAcquireRequests, AnotherRegionInItsPlaceIsNotTheOneThatWasAskedFor) {
  Region& r = region(1);
  const vmem_range range = range_of(r, 0, 0);
  AcquireRequest ask;
  ASSERT_TRUE(acquire_requests.ask({&range, 1}, VMEM_HOST, nullptr, &ask).ok());
  const uint64_t id = std::exchange(r.id, 99);
  EXPECT_EQ(check(r, ask).code(), -EINVAL);
  acquire_requests.withdraw({&range, 1}, &ask);
  EXPECT_EQ(asked(r), 1u) << "nobody asked for this one";
  r.id = id;
  r.counts.asked = 0;
}

TEST_F(PagerAcquireRequests, OneThatIsCancelledSaysSo) {
  Region& r = region(1);
  const vmem_range range = range_of(r, 0, 0);
  AcquireRequest ask;
  ASSERT_TRUE(acquire_requests.ask({&range, 1}, VMEM_HOST, nullptr, &ask).ok());
  ask.cancelled = true;
  EXPECT_EQ(check(r, ask).code(), -ECANCELED);
  acquire_requests.withdraw({&range, 1}, &ask);
}

class PagerKernelRanges : public RangeParts {
 protected:
  Status open(const vmem_range& range, uint64_t bytes, KernelRange* out) { return ranges.open(range, 0, bytes, out); }
  uint32_t open_in(const Region& r) {
    BigLock lock(map.mutex());
    EXPECT_EQ(staging.kernel_ranges, r.counts.kernels) << "it is the only region";
    return r.counts.kernels;
  }
  KernelRanges& ranges = tier.kernel_ranges;
};

TEST_F(PagerKernelRanges, TheRegionKnowsOfItUntilItIsClosed) {
  Region& r = device_region(8);
  KernelRange out;
  ASSERT_TRUE(open(range_of(r, 2, 5), 2 * kUnit, &out).ok());
  EXPECT_EQ(open_in(r), 1u);
  EXPECT_EQ(out.first, reinterpret_cast<uintptr_t>(r.address(2)));
  EXPECT_EQ(out.end, reinterpret_cast<uintptr_t>(r.address(6)));
  EXPECT_EQ(others.words_of, std::make_pair(4u, 2u)) << "4 blocks, of which the budget holds 2";
  ranges.close(&out);
  EXPECT_EQ(open_in(r), 0u);
}

TEST_F(PagerKernelRanges, WithoutABudgetItHasHalfOfTheDevices) {
  Region& r = device_region(8);
  KernelRange out;
  ASSERT_TRUE(open(range_of(r, 0, 7), 0, &out).ok());
  EXPECT_EQ(out.frames, 2u) << "of 4 blocks";
  ranges.close(&out);
}

TEST_F(PagerKernelRanges, WhatIsRefusedIsNotOpen) {
  Region& r = device_region(8);
  Region& at_host = region(1);
  KernelRange out;
  EXPECT_EQ(open(range_of(at_host, 0, 0), 0, &out).code(), -EINVAL) << "no device tier";
  EXPECT_EQ(open(range_of(r, 0, 7), 5 * kUnit, &out).code(), -ENOMEM) << "more than the device has";
  EXPECT_EQ(open(range_of(r, 0, 7), kUnit - 1, &out).code(), -EINVAL) << "less than a block";
  EXPECT_EQ(ranges.open(range_of(r, 0, 7), VMEM_HOST, 0, &out).code(), -EINVAL);
  others.words_error = ENOMEM;
  EXPECT_EQ(open(range_of(r, 0, 7), 0, &out).code(), -ENOMEM);
  r.backing = Backing::file_read;
  EXPECT_EQ(open(range_of(r, 0, 7, VMEM_WRITE), 0, &out).code(), -EACCES);
  r.backing = Backing::anonymous;
  EXPECT_EQ(open_in(r), 0u);
}

class PagerExport : public RangeParts {
 protected:
  // Blocks 0 and 1 are on device 0 and leased there.
  Region& leased_region() {
    Region& r = device_region(3);
    BigLock lock(map.mutex());
    place(r, 0, 0);
    place(r, 1, 0);
    EXPECT_TRUE(lease_manager.grant({&r, 0, 1}, VMEM_READ, 0, this).ok());
    return r;
  }
  void end(Region& r) {
    BigLock lock(map.mutex());
    lease_manager.take_back({&r, 0, 1}, VMEM_READ, 0, this);
    map.match_holds(lock, {&r, 0, 1});
    remove(r, 0);
    remove(r, 1);
  }
  Status take(const Region& r, BlockIndex first, BlockIndex last, device::Export how = device::Export::dma_buf) {
    return exports.export_range(r.address(first), (last - first + 1) * r.block_size, how, &descriptor);
  }
  int descriptor = -1;
  Export& exports = calls.exports;
};

TEST_F(PagerExport, LeasedBlocksAreSharedAndAtRestAfterwards) {
  Region& r = leased_region();
  ASSERT_TRUE(take(r, 0, 1).ok());
  EXPECT_EQ(descriptor, 77);
  EXPECT_EQ(others.shared_bytes, 2 * kUnit);
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_EQ(r.counts.in_flight, 0u);
  EXPECT_NE(freed, 0u) << "whoever waits looks again";
  others.share_error = EOPNOTSUPP;
  EXPECT_EQ(take(r, 0, 0).code(), -EOPNOTSUPP);
  EXPECT_EQ(state(r, 0), State::on_device) << "also when the driver refuses";
  end(r);
}

TEST_F(PagerExport, OnlyWhatIsUnderALiveLeaseAtADevice) {
  Region& r = leased_region();
  Region& at_host = region(1);
  EXPECT_EQ(take(r, 0, 2).code(), -EINVAL) << "block 2 is not leased";
  EXPECT_EQ(take(r, 0, 1, device::Export::handle).code(), -EINVAL) << "a descriptor is of one";
  EXPECT_EQ(take(at_host, 0, 0).code(), -EOPNOTSUPP);
  EXPECT_EQ(others.shared_bytes, 0u);
  EXPECT_EQ(r.counts.in_flight, 0u);
  end(r);
}

}  // namespace
}  // namespace vmem::pager::test
