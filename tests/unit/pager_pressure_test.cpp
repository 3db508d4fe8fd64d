// Frames that the machine refuses or wants back, and its administrator's tunables, as the module
// reports them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <future>

#include "common/patience.h"
#include "core/clock.h"
#include "device/sim/sim_device.h"
#include "pager_steps.h"

namespace vmem::pager::test {
namespace {

constexpr size_t kBlock = kSmall;
constexpr uint64_t kBudget = 64 * kBlock;

class PagerPressure : public PagerSteps {
 protected:
  void SetUp() override {
    auto made = std::make_unique<FakeTrap>(false, true, true);
    knobs.frame_limit = uint64_t{1} << 40;
    knobs.readahead_bytes = uint64_t{1} << 30;
    knobs.fault_timeout_ms = 60000;
    made->set_knobs(knobs);
    Settings c = config(kBudget);
    c.readahead_bytes = 16 * kBlock;
    start(std::move(c), std::move(made));
  }
  void TearDown() override {
    PagerSteps::TearDown();
    EXPECT_GE(kBudget, trap->frame_bytes());
  }
  uint64_t budget() { return stats().host_budget; }

  trap::Knobs knobs;
};

// A full file system of the file does not stop writes to the store.
TEST_F(PagerPressure, NoRoomForASharedFileKeepsNothingFromTheStore) {
  start(config());  // 256 blocks, less the memory of buffers
  std::byte* oldest = region(64);
  EXPECT_TRUE(pager->advise(oldest, 64 * kSmall, VMEM_ADVISE_COLD, VMEM_HOST).ok());  // they leave first
  std::byte* stored = region(100);
  std::byte* newest = region(120);
  std::byte* file = shared(kSmall);
  for (size_t i = 0; i < 64; ++i) put(oldest + i * kSmall, i + 1);
  for (size_t i = 0; i < 100; ++i) put(stored + i * kSmall, i + 1);
  EXPECT_TRUE(pager->sync(stored, 100 * kSmall).ok());
  put(file, 1);
  engine->tear(ENOSPC);
  EXPECT_EQ(pager->sync(file, kSmall).code(), -ENOSPC);
  core::clock_jumped_ns += WritebackThrottle::kLongestPause;  // until then only clean blocks leave
  for (size_t i = 0; i < 120; ++i) put(newest + i * kSmall, i + 1);
  EXPECT_GT(ssd(oldest, 64 * kSmall), 0u) << "others went in their place";
}

TEST_F(PagerPressure, ARefusedFrameMakesRoomAmongThoseThereAre) {
  trap->limit_frames(24 * kBlock);
  std::byte* r = region(48);
  for (size_t i = 0; i < 48; ++i) put(r + i * kBlock + 8, 1000 + i);
  EXPECT_LE(trap->frame_bytes(), 24 * kBlock);
  for (size_t i = 0; i < 48; ++i) EXPECT_EQ(get(r + i * kBlock + 8), 1000 + i) << i;
  EXPECT_GT(engine->count(Io::Op::write), 0u) << "what no longer fits is written";
  EXPECT_LT(budget(), kBudget) << "the figure in force is told";
}

TEST_F(PagerPressure, ATouchDoesNotWaitForEverWhereFramesAreRefusedForEver) {
  std::byte* r = region(8);
  // Longer than the pause between two tries, so that the tries are one wait.
  pager->tunables_update().set_fault_timeout(2500);
  trap->limit_frames(0);
  const size_t tries = trap->calls("populate");
  uint64_t value = 0;
  EXPECT_FALSE(trap->load(r, &value)) << "SIGBUS, with the reason in the log";
  EXPECT_GE(trap->calls("populate"), tries + 2) << "it was tried again before it was given up";
  trap->limit_frames(UINT64_MAX);
  trap->tell_tunables();  // ask again at once
  const vmem_range range{r, kBlock, VMEM_READ, 0};
  const Status s = pager->acquire({&range, 1}, VMEM_HOST, nullptr);
  ASSERT_TRUE(s.ok()) << s.text();
  put(r, 11);
  EXPECT_EQ(get(r), 11u);
  EXPECT_TRUE(pager->release({&range, 1}, nullptr).ok());
}

// A block waits in a staging frame, and its place is refused memory: its thread stays parked, and
// the tries are a second apart. This needs its own blocks: those of the fixture need no memory
// beside their frame.
TEST(PagerPressureStaging, ARefusedPlaceIsTriedAgainLaterWithoutWakingTheToucher) {
  Parts parts;
  auto made = std::make_unique<FakeTrap>(false, true, true);
  FakeTrap* const trap = made.get();
  parts.trap = std::move(made);
  parts.engine = std::make_unique<FakeEngine>();
  parts.space = std::make_unique<FakeSpace>();
  std::unique_ptr<device::SimDevices> sim;
  device::SimOptions options;
  options.devices = 1;
  options.memory_bytes = 32 << 20;
  ASSERT_TRUE(device::make_sim_devices(options, &sim).ok());
  parts.devices = std::move(sim);
  Tunables tunables;
  tunables.host_budget = 96 << 20;
  tunables.fault_timeout_ms = 60000;
  Pager pager(std::move(parts), {}, tunables);
  ASSERT_TRUE(pager.start().ok());
  void* at = nullptr;
  RegionSpec what;
  what.size = 4 * kHugePage;
  what.block_size = kHugePage;
  const Status s = pager.create(what, &at);
  ASSERT_TRUE(s.ok()) << s.text();
  auto* const r = static_cast<std::byte*>(at);
  EXPECT_TRUE(trap->store(r, 41));
  ASSERT_TRUE(pager.evict(r, what.size, VMEM_SSD).ok());
  ASSERT_TRUE(pager.prefetch(r, kHugePage, VMEM_HOST).ok());
  struct vmem_residency where = {};
  vmem::test::eventually(
      [&] { return !pager.queries().query(r, kHugePage, &where).ok() || where.host_bytes == kHugePage; });
  ASSERT_EQ(where.host_bytes, kHugePage) << "it waits in a staging frame";
  const size_t fills = trap->calls("fill"), woken = trap->calls("wake");
  trap->fail_fill(ENOMEM, 2);
  uint64_t value = 0;
  EXPECT_TRUE(trap->load(r, &value));
  EXPECT_EQ(value, 41u);
  EXPECT_EQ(trap->calls("fill refused"), 2u);
  EXPECT_EQ(trap->calls("fill"), fills + 1);
  EXPECT_EQ(trap->calls("wake"), woken) << "it waited for memory, it was not sent round";
  pager.shutdown();
  EXPECT_EQ(pager.check(), "");
}

TEST_F(PagerPressure, AcquireAndPrefetchLiveWithARefusalToo) {
  std::byte* r = region(48);
  for (size_t i = 0; i < 48; ++i) put(r + i * kBlock, 5 + i);
  ASSERT_TRUE(pager->evict(r, 48 * kBlock, VMEM_SSD).ok());
  const auto limit_context = [&](uint64_t bytes) {
    knobs.context_limit = bytes;
    trap->set_knobs(knobs);
    trap->tell_tunables();
  };
  limit_context(8 * kBlock);  // returns the other frames
  trap->until_frames_below(16 * kBlock);
  trap->limit_frames(20 * kBlock);
  limit_context(0);
  ASSERT_TRUE(pager->prefetch(r, 48 * kBlock, VMEM_HOST).ok());
  const vmem_range range{r + 40 * kBlock, 8 * kBlock, VMEM_READ, 0};
  const Status s = pager->acquire({&range, 1}, VMEM_HOST, nullptr);
  ASSERT_TRUE(s.ok()) << s.text();
  for (size_t i = 40; i < 48; ++i) EXPECT_EQ(get(r + i * kBlock), 5 + i);
  EXPECT_TRUE(pager->release({&range, 1}, nullptr).ok());
  for (size_t i = 0; i < 48; ++i) EXPECT_EQ(get(r + i * kBlock), 5 + i);
}

TEST_F(PagerPressure, AKnobThatIsRaisedEndsARefusal) {
  trap->limit_frames(24 * kBlock);
  std::byte* r = region(48);
  for (size_t i = 0; i < 48; ++i) put(r + i * kBlock, i + 1);
  ASSERT_LT(budget(), kBudget);
  trap->limit_frames(UINT64_MAX);
  trap->tell_tunables();
  EXPECT_EQ(budget(), kBudget);
  for (size_t i = 0; i < 48; ++i) EXPECT_EQ(get(r + i * kBlock), i + 1);
}

// Leases and new regions are told at once what memory there is, and wake no waiter.
TEST_F(PagerPressure, ARefusalEndsWithItsTimeThoughNobodyAccessesAnything) {
  trap->limit_frames(24 * kBlock);
  std::byte* r = region(48);
  for (size_t i = 0; i < 48; ++i) put(r + i * kBlock, i + 1);
  ASSERT_LT(budget(), kBudget);
  trap->limit_frames(UINT64_MAX);
  EXPECT_TRUE(vmem::test::eventually([&] { return budget() == kBudget; }));
  const vmem_range all{r, 48 * kBlock, VMEM_READ, 0};
  const Status s = pager->acquire({&all, 1}, VMEM_HOST, nullptr);
  ASSERT_TRUE(s.ok()) << s.text();
  EXPECT_TRUE(pager->release({&all, 1}, nullptr).ok());
}

TEST_F(PagerPressure, PressureGivesFramesBackAndLosesNothing) {
  std::byte* r = region(48);
  for (size_t i = 0; i < 48; ++i) put(r + i * kBlock, 77 + i);
  const uint64_t before = trap->frame_bytes();
  trap->press(16 * kBlock);
  trap->until_frames_below(before - 16 * kBlock);
  for (size_t i = 0; i < 48; ++i) EXPECT_EQ(get(r + i * kBlock), 77 + i);
}

// A tunable that changes when memory is short is reported together with the pressure.
TEST_F(PagerPressure, AKnobThatChangesTakesNothingBackOfWhatPressureAskedFor) {
  std::byte* r = region(48);
  for (size_t i = 0; i < 48; ++i) put(r + i * kBlock, 77 + i);
  const uint64_t before = trap->frame_bytes();
  trap->press(16 * kBlock);
  const uint64_t left = budget();
  ASSERT_LT(left, kBudget);
  trap->tell_tunables();
  EXPECT_EQ(budget(), left);
  trap->until_frames_below(before - 16 * kBlock);
  for (size_t i = 0; i < 48; ++i) EXPECT_EQ(get(r + i * kBlock), 77 + i);
}

TEST_F(PagerPressure, PressureLeavesWhatALeaseHolds) {
  std::byte* r = region(40);
  for (size_t i = 0; i < 40; ++i) put(r + i * kBlock, 9 + i);
  const vmem_range range{r, 8 * kBlock, VMEM_READ | VMEM_WRITE, 0};
  ASSERT_TRUE(pager->acquire({&range, 1}, VMEM_HOST, nullptr).ok());
  const uint64_t reads = engine->count(Io::Op::read);
  trap->press(UINT64_MAX);
  trap->until_frames_below(30 * kBlock);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(get(r + i * kBlock), 9 + i);
  EXPECT_EQ(engine->count(Io::Op::read), reads) << "leased blocks stayed";
  EXPECT_TRUE(pager->release({&range, 1}, nullptr).ok());
}

TEST_F(PagerPressure, ALimitThatIsLoweredTakesFramesBack) {
  std::byte* r = region(48);
  for (size_t i = 0; i < 48; ++i) put(r + i * kBlock, 3 + i);
  knobs.context_limit = 24 * kBlock;
  trap->set_knobs(knobs);
  trap->tell_tunables();
  EXPECT_EQ(budget(), 24 * kBlock);
  trap->until_frames_below(24 * kBlock);
  for (size_t i = 0; i < 48; ++i) EXPECT_EQ(get(r + i * kBlock), 3 + i);
  EXPECT_LE(trap->frame_bytes(), 24 * kBlock);
  knobs.context_limit = 0;
  trap->set_knobs(knobs);
  trap->tell_tunables();
  EXPECT_EQ(budget(), kBudget);
}

// The module gives up an access that is not answered within its own fault_timeout_ms. A slow disk
// is no reason for that.
TEST_F(PagerPressure, ATouchThatWaitsLongIsReportedAnewBeforeTheTrapGivesItUp) {
  std::byte* r = region(2);
  put(r, 7);
  ASSERT_TRUE(pager->evict(r, kBlock, VMEM_SSD).ok());
  knobs.fault_timeout_ms = 100;
  trap->set_knobs(knobs);
  trap->tell_tunables();
  engine->hold(Io::Op::read, true);
  auto toucher = std::async(std::launch::async, [&] { return get(r); });
  engine->until_held(1);
  trap->until_called("wake", trap->calls("wake") + 3);
  EXPECT_EQ(engine->held(), 1u) << "one read, however often it was reported";
  engine->hold(Io::Op::read, false);
  engine->let_go();
  EXPECT_EQ(toucher.get(), 7u);
}

TEST_F(PagerPressure, TheSmallerOfSettingAndKnobIsInForce) {
  knobs.readahead_bytes = 0;
  trap->set_knobs(knobs);
  trap->tell_tunables();
  std::byte* r = region(48);
  for (size_t i = 0; i < 48; ++i) put(r + i * kBlock, i + 1);
  ASSERT_TRUE(pager->evict(r, 48 * kBlock, VMEM_SSD).ok());
  uint64_t reads = engine->count(Io::Op::read);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(get(r + i * kBlock), i + 1);
  engine->until_idle();
  EXPECT_EQ(engine->count(Io::Op::read) - reads, 4u) << "no read-ahead while the knob is 0";
  knobs.readahead_bytes = 1 << 30;
  trap->set_knobs(knobs);
  trap->tell_tunables();
  reads = engine->count(Io::Op::read);
  for (size_t i = 4; i < 12; ++i) EXPECT_EQ(get(r + i * kBlock), i + 1);
  engine->until_idle();
  EXPECT_GT(engine->count(Io::Op::read) - reads, 8u) << "the setting again";
}

}  // namespace
}  // namespace vmem::pager::test
