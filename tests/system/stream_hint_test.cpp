// vmem_prefetch with a stream: the hint takes effect when the stream reaches it, and not before.
#include <cerrno>

#include "pager/calls/query.h"
#include "pager/pager.h"
#include "sim_support.h"

namespace systest {
namespace {

class StreamHints : public SimTest {
 protected:
  void SetUp() override {
    SimTest::SetUp();
    go = false;
  }
  void TearDown() override {
    go = true;
    SimTest::TearDown();
  }
  static uint64_t* word(const vmem::region& r, size_t block) { return r.view<uint64_t>().data() + block * kBlock / 8; }
  static uint64_t on_device(const vmem::region& r, size_t block) { return residency(word(r, block), 8).device_bytes; }
  // Work queued on the stream from now on runs after `go`.
  void hold(void* stream) {
    ASSERT_TRUE(sim()
                    .launch(stream,
                            [this](vmem::device::SimKernel&) {
                              while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                            })
                    .ok());
  }
  static vmem::region filled(size_t blocks) {
    vmem::region r(blocks * kBlock);
    for (size_t b = 0; b < blocks; ++b) *word(r, b) = stamp(b, 1);
    return r;
  }

  std::atomic<bool> go{false};
};

TEST_F(StreamHints, TakeEffectWhenTheStreamGetsThere) {
  if (IsSkipped()) return;
  const vmem::region r = filled(3);
  hold(stream_);
  ASSERT_EQ(vmem_prefetch(word(r, 0), 8, 0, stream_), 0) << said();
  ASSERT_EQ(vmem_prefetch(word(r, 1), 8, 0, nullptr), 0) << said();
  void* const idle = stream(0);
  ASSERT_EQ(vmem_prefetch(word(r, 2), 8, 0, idle), 0) << said();
  EXPECT_TRUE(until([&] { return on_device(r, 1) != 0 && on_device(r, 2) != 0; }))
      << "without a stream: now; a stream that is held keeps no other";
  EXPECT_EQ(on_device(r, 0), 0u) << "its stream has not got there";
  go = true;
  EXPECT_TRUE(until([&] { return on_device(r, 0) != 0; }));
  for (size_t b = 0; b < 3; ++b) EXPECT_EQ(*word(r, b), stamp(b, 1));
}

TEST_F(StreamHints, AwayFromADeviceToo) {
  if (IsSkipped()) return;
  const vmem::region r = filled(2);
  store_on_device(word(r, 0), 5);
  store_on_device(word(r, 1), 6);
  ASSERT_TRUE(on_device(r, 0) != 0 && on_device(r, 1) != 0);
  hold(stream_);
  ASSERT_EQ(vmem_prefetch(word(r, 0), 8, VMEM_HOST, stream_), 0) << said();
  ASSERT_EQ(vmem_prefetch(word(r, 1), 8, VMEM_SSD, nullptr), 0) << said();
  EXPECT_TRUE(until([&] { return on_device(r, 1) == 0; }));
  EXPECT_NE(on_device(r, 0), 0u) << "its stream has not got there";
  go = true;
  EXPECT_TRUE(until([&] { return on_device(r, 0) == 0; }));
  EXPECT_EQ(*word(r, 0), 5u);
  EXPECT_EQ(*word(r, 1), 6u);
}

TEST_F(StreamHints, ARegionIsFreedWithoutAWaitForThem) {
  if (IsSkipped()) return;
  vmem::region r = filled(1);
  void* const at = r.data();
  hold(stream_);
  ASSERT_EQ(vmem_prefetch(at, kBlock, 0, stream_), 0) << said();
  r.free();
  const vmem::region later = filled(1);
  go = true;
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  ASSERT_EQ(vmem_prefetch(later.data(), 8, 0, stream_), 0) << said();
  EXPECT_TRUE(until([&] { return on_device(later, 0) != 0; })) << "hints of before were looked at, and forgotten";
  EXPECT_EQ(*word(later, 0), stamp(0, 1));
}

TEST_F(StreamHints, RefusalsSayWhy) {
  if (IsSkipped()) return;
  const vmem::region r = filled(1), host(kBlock, VMEM_HOST_ONLY);
  sim().capture(stream_, true);
  EXPECT_EQ(vmem_prefetch(r.data(), 8, 0, stream_), -EBUSY);
  sim().capture(stream_, false);
  int no_stream = 0;
  EXPECT_EQ(vmem_prefetch(r.data(), 8, 0, &no_stream), -EINVAL);
  EXPECT_EQ(vmem_prefetch(r.data(), 8, 9, stream_), -ENODEV);
  EXPECT_EQ(vmem_prefetch(host.data(), 8, 0, stream_), -EINVAL);
  EXPECT_EQ(vmem_prefetch(host.data(), 8, VMEM_HOST, &no_stream), 0) << "without a device tier no stream counts";
}

TEST_F(StreamHints, OfALostDeviceHoldNothing) {
  if (IsSkipped()) return;
  const vmem::region r = filled(1);
  hold(stream_);
  ASSERT_EQ(vmem_prefetch(r.data(), 8, 0, stream_), 0) << said();
  sim().lose(0, "a test");
  go = true;
  EXPECT_EQ(*word(r, 0), stamp(0, 1));
  vmem_shutdown();
  new (const_cast<vmem::region*>(&r)) vmem::region();
}

// Hints beyond the number that the library keeps are dropped, which is allowed.
TEST_F(StreamHints, ManyAreDroppedAndNoneFails) {
  if (IsSkipped()) return;
  const vmem::region r = filled(1);
  hold(stream_);
  for (int i = 0; i < 1500; ++i) ASSERT_EQ(vmem_prefetch(r.data(), 8, 0, stream_), 0) << said();
  EXPECT_EQ(on_device(r, 0), 0u);
  go = true;
  EXPECT_TRUE(until([&] { return on_device(r, 0) != 0; }));
}

// The block is written back, which does not matter for the hint, and leaves the device before any
// lease has used it.
TEST_F(StreamHints, AChangedBlockThatNoLeaseUsesIsAWasteAndNoHit) {
  if (IsSkipped()) return;
  const vmem::region r = filled(2);
  const auto before = vmem::stats();
  ASSERT_EQ(vmem_prefetch(word(r, 0), kBlock, 0, nullptr), 0) << said();
  ASSERT_TRUE(until([&] { return on_device(r, 0) != 0; }));
  ASSERT_EQ(vmem_sync(word(r, 0), kBlock), 0) << said();
  EXPECT_GT(vmem::stats().write_bytes, before.write_bytes);
  ASSERT_EQ(vmem_evict(word(r, 0), kBlock, VMEM_SSD), 0) << said();
  EXPECT_EQ(vmem::stats().prefetched_blocks - before.prefetched_blocks, 1u);
  EXPECT_EQ(vmem::stats().prefetch_wasted - before.prefetch_wasted, 1u);
  EXPECT_EQ(vmem::stats().prefetch_hits, before.prefetch_hits);
  EXPECT_EQ(*word(r, 0), stamp(0, 1));
}

// The published counters and vmem_query agree about a block in transition.
TEST_F(StreamHints, ABlockOnItsWayIsCountedWhereQueryCountsIt) {
  if (IsSkipped()) return;
  for (const char* step : {"device.preparing", "device.issued"}) {
    SCOPED_TRACE(step);
    vmem::region r = filled(2);
    r.evict();
    stop_at(step);
    ASSERT_EQ(vmem_prefetch(word(r, 0), kBlock, 0, nullptr), 0) << said();
    ASSERT_TRUE(stopped());
    const auto agree = [&] {
      vmem::pager::Snapshot census;
      vmem::api::Runtime::Use pager;
      EXPECT_TRUE(vmem::api::Runtime::get().use_if_running(&pager).ok());
      pager->queries().census(1, &census);
      ASSERT_EQ(census.regions.size(), 1u);
      const auto where = r.query();
      EXPECT_EQ(census.regions[0].host_bytes, where.host_bytes);
      EXPECT_EQ(census.regions[0].device_bytes, where.device_bytes);
      EXPECT_EQ(census.regions[0].ssd_bytes, where.ssd_bytes);
      EXPECT_EQ(where.host_bytes + where.device_bytes, kBlock);
    };
    agree();
    go_on();
    // waits for the block
    EXPECT_EQ(vmem_advise(word(r, 0), kBlock, VMEM_ADVISE_UNSET_READ_MOSTLY, 0), 0) << said();
    agree();
    EXPECT_EQ(r.query().device_bytes, kBlock);
    r.free();
  }
}

}  // namespace
}  // namespace systest
