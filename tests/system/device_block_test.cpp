// Regions with blocks of their own size, side by side, on devices with page tables of their own:
// the size that the region asks for, or the largest that fits. On simulated devices.
#include <atomic>
#include <random>
#include <string>
#include <vector>

#include "core/clock.h"
#include "device/paging_host.h"
#include "pager/block/stall_clock.h"
#include "sim_support.h"
#include "vmem/detail/paging_group.h"
#include "vmem/detail/paging_view.h"

namespace {

using vmem::device::SimKernel;
using vmem::device::SimOp;
using vmem::paging::Answer;
using vmem::paging::HostAtomics;
using vmem::paging::Intent;

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kSizes[] = {2 * kMiB, 4 * kMiB, 8 * kMiB, 16 * kMiB, 32 * kMiB, 64 * kMiB};

size_t block_of(const vmem::region& r) {
  return r.query().block_size;
}

class DeviceBlocks : public systest::SimTest {
 protected:
  void SetUp() override { start(1, {{"device_budget", "96MiB"}, {"host_budget", "640MiB"}}, true); }
  static vmem::region with_blocks(size_t bytes, size_t block) {
    vmem::attributes wanted;
    wanted.block_size = block;
    return vmem::region(bytes, wanted);
  }
  // The words of a block that tests use: near its ends, and beside the borders that smaller blocks
  // would have.
  static std::vector<uint64_t*> words(const vmem::region& r, size_t b, size_t block) {
    auto* const at = static_cast<std::byte*>(r.data()) + b * block;
    std::vector<uint64_t*> all;
    for (const size_t offset : {size_t{8}, 2 * kMiB - 16, block / 2 + 64, block - 8})
      all.push_back(reinterpret_cast<uint64_t*>(at + offset));
    return all;
  }
  // Kernels store to a word of each block.
  void fill(const vmem::region& r, size_t block) {
    for (size_t at = 0; at < r.size(); at += block)
      store_on_device(reinterpret_cast<uint64_t*>(static_cast<std::byte*>(r.data()) + at), 5 + at);
  }
  static void expect_filled(const vmem::region& r, size_t block) {
    for (size_t at = 0; at < r.size(); at += block)
      ASSERT_EQ(*reinterpret_cast<uint64_t*>(static_cast<std::byte*>(r.data()) + at), 5 + at);
  }
  static uint64_t used() { return device_stats().used_bytes; }
};

// Every block size.
class DeviceBlocksOf : public DeviceBlocks, public ::testing::WithParamInterface<size_t> {
 protected:
  void SetUp() override {
    memory_bytes_ = 256 * kMiB;
    DeviceBlocks::SetUp();
  }
};

TEST_P(DeviceBlocksOf, ARegionHasTheBlocksThatItAsksFor) {
  if (IsSkipped()) return;
  const size_t block = GetParam(), count = 5;
  ASSERT_EQ(vmem_set("device_budget", std::to_string(3 * block).c_str()), 0) << said();
  vmem::region r = with_blocks(count * block, block);
  EXPECT_EQ(block_of(r), block);
  for (size_t b = 0; b < count; ++b)
    for (uint64_t* w : words(r, b, block)) *w = 100 + b;
  ASSERT_EQ(vmem_acquire(words(r, 1, block)[0], 1, VMEM_READ, 0, stream_), 0) << said();
  EXPECT_EQ(r.query().device_bytes, block) << "a lease has whole blocks";
  ASSERT_EQ(vmem_release(words(r, 1, block)[0], 1, stream_), 0) << said();
  // Use more than the device holds, so that blocks leave it, changed and unchanged, and come back.
  for (int round = 0; round < 3; ++round)
    for (size_t b = 0; b < count; ++b) store_on_device(words(r, b, block)[round], 1000 * (round + 1) + b);
  EXPECT_LE(used(), 3 * block);
  ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
  for (size_t b = 0; b < count; ++b) {
    const std::vector<uint64_t*> at = words(r, b, block);
    for (int round = 0; round < 3; ++round) EXPECT_EQ(*at[round], 1000u * (round + 1) + b);
    EXPECT_EQ(*at[3], 100 + b);
  }
}

TEST_P(DeviceBlocksOf, KernelsAskForThem) {
  if (IsSkipped()) return;
  const size_t block = GetParam();
  constexpr uint32_t kBlocks = 6, kFrames = 2;
  ASSERT_EQ(vmem_set("device_budget", std::to_string(3 * block).c_str()), 0) << said();
  vmem::region r = with_blocks(kBlocks * block, block);
  for (uint32_t b = 0; b < kBlocks; ++b)
    for (uint64_t* w : words(r, b, block)) *w = 100 + b;
  struct vmem_kernel* kernel = nullptr;
  vmem_kernel_view opaque;
  ASSERT_EQ(vmem_kernel_begin(&kernel, r.data(), r.size(), VMEM_READ | VMEM_WRITE, 0, kFrames * block, &opaque), 0)
      << said();
  vmem::paging::View<HostAtomics> view;
  memcpy(&view, &opaque, sizeof view);
  EXPECT_EQ(view.table.blocks, kBlocks);
  EXPECT_EQ(view.table.frames, kFrames);
  std::atomic<int> wrong{0}, refused{0};
  const auto rounds = [&](SimKernel& k) {
    vmem::paging::Group<HostAtomics> group(view.table, uint64_t{60} * 1000000000);
    for (uint32_t turn = 0; turn < 3 * kBlocks; ++turn) {
      const uint32_t b = turn * 5 % kBlocks;
      if (group.acquire(b, Intent::write) != Answer::present) {
        ++refused;
        continue;
      }
      for (uint64_t* at : words(r, b, block)) {
        auto* const w = reinterpret_cast<uint64_t*>(k.at(at, 8, true));
        if (w == nullptr || *w != 100 + b + 1000 * (turn / kBlocks)) ++wrong;
        if (w != nullptr) *w += 1000;
      }
      group.release(b);
    }
  };
  ASSERT_TRUE(sim().launch(stream_, rounds).ok());
  ASSERT_EQ(vmem_kernel_end(kernel, stream_), 0) << said();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(refused, 0);
  for (uint32_t b = 0; b < kBlocks; ++b)
    for (const uint64_t* w : words(r, b, block)) EXPECT_EQ(*w, 3100 + b);
}

INSTANTIATE_TEST_SUITE_P(Sizes, DeviceBlocksOf, ::testing::ValuesIn(kSizes),
                         [](const auto& i) { return std::to_string(i.param / kMiB) + "MiB"; });

TEST_F(DeviceBlocks, RegionsOfSeveralSizesShareTheBudgets) {
  start(1, {{"device_budget", "64MiB"}, {"host_budget", "1280MiB"}}, true);
  if (IsSkipped()) return;
  constexpr size_t kBlocks = 5;
  std::vector<vmem::region> regions;
  std::vector<std::vector<uint64_t>> last(std::size(kSizes), std::vector<uint64_t>(kBlocks));
  for (const size_t block : kSizes) regions.push_back(with_blocks(kBlocks * block, block));
  std::minstd_rand random(7);
  for (uint64_t turn = 1; turn <= 200; ++turn) {
    const size_t i = random() % std::size(kSizes), b = random() % kBlocks;
    uint64_t* const at = words(regions[i], b, kSizes[i])[3];
    switch (random() % 4) {
      case 0:
        EXPECT_EQ(*static_cast<volatile uint64_t*>(at), last[i][b]) << turn;
        break;
      case 1:
        *static_cast<volatile uint64_t*>(at) = last[i][b] = turn;
        break;
      default:
        store_on_device(at, last[i][b] = turn);
    }
    if (HasFatalFailure()) return;
    ASSERT_LE(used(), 64 * kMiB);
    ASSERT_LE(sim().taken(0), 64 * kMiB) << "what is kept of one size went where another needed it";
    struct vmem_stats stats = {};
    stats.size = sizeof stats;
    ASSERT_EQ(vmem_stats(&stats), 0);
    ASSERT_LE(stats.host_bytes, 1280 * kMiB);
  }
  for (size_t i = 0; i < std::size(kSizes); ++i)
    for (size_t b = 0; b < kBlocks; ++b) EXPECT_EQ(*words(regions[i], b, kSizes[i])[3], last[i][b]) << i << ' ' << b;
}

TEST_F(DeviceBlocks, ALeaseNeedsWholeBlocksAndSaysSoInNumbers) {
  if (IsSkipped()) return;
  ASSERT_EQ(vmem_set("device_budget", "16MiB"), 0) << said();
  vmem::region large = with_blocks(64 * kMiB, 32 * kMiB), small = with_blocks(8 * kMiB, 2 * kMiB);
  EXPECT_EQ(vmem_acquire(large.data(), 1, VMEM_READ, 0, stream_), -ENOMEM);
  for (const char* part : {"32 MiB, in whole blocks of 32 MiB", "device_budget 16 MiB"})
    EXPECT_NE(said().find(part), std::string::npos) << said();
  EXPECT_EQ(vmem_prefetch(large.data(), 1, 0, nullptr), -ENOMEM);
  EXPECT_NE(said().find("16 MiB of device 0 holds no block of 32 MiB"), std::string::npos) << said();
  store_on_device(static_cast<uint64_t*>(small.data()), 7);
  EXPECT_EQ(*static_cast<uint64_t*>(small.data()), 7u) << "others go on";
  EXPECT_EQ(vmem_set("device_budget", "24MiB"), -EINVAL);
  EXPECT_NE(said().find("holds no block of 32 MiB"), std::string::npos) << said();
}

TEST_F(DeviceBlocks, BlocksThatTheTierDoesNotHaveAreRefused) {
  if (IsSkipped()) return;
  const auto refused = [](size_t block, const char* part) {
    struct vmem_region_attr attr = {};
    attr.size = sizeof attr;
    attr.block_size = block;
    void* p = nullptr;
    EXPECT_EQ(vmem_create(&p, 64 * kMiB, &attr), -EINVAL) << block;
    EXPECT_NE(said().find(part), std::string::npos) << said();
  };
  refused(64 << 10, "block_size 64 KiB: a region with a device tier (sim-handles) has blocks of 2 MiB to 64 MiB");
  refused(128 * kMiB,
          "block_size 134217728 is not accepted; give VMEM_BLOCK_AUTO or a power of two from 4 KiB to 64 MiB");
  start(1);
  if (IsSkipped()) return;
  refused(8 * kMiB, "block_size 8 MiB: a region with a device tier (sim) has blocks of 2 MiB;");
  EXPECT_EQ(block_of(vmem::region(256 * kMiB)), 2 * kMiB);
}

TEST_F(DeviceBlocks, WithoutAWishTheyAreAsLargeAsFits) {
  start(1, {{"device_budget", "128MiB"}, {"host_budget", "512MiB"}, {"device_block_size", "auto"}}, true);
  if (IsSkipped()) return;
  const auto chosen = [](size_t mib) { return block_of(vmem::region(mib * kMiB)) / kMiB; };
  EXPECT_EQ(chosen(1024), 8u);
  EXPECT_EQ(chosen(16), 8u);
  EXPECT_EQ(chosen(12), 4u) << "a third of it would be rounding";
  EXPECT_EQ(chosen(10), 2u);
  EXPECT_EQ(chosen(1), 2u);
  EXPECT_EQ(chosen(255), 8u) << "less than 3 %";
  EXPECT_EQ(block_of(vmem::region(1024 * kMiB, VMEM_HOST_ONLY)), 2 * kMiB) << "setting block_size";
  EXPECT_EQ(block_of(with_blocks(1024 * kMiB, VMEM_BLOCK_AUTO)), 8 * kMiB);
  EXPECT_EQ(block_of(with_blocks(1024 * kMiB, 2 * kMiB)), 2 * kMiB);
  ASSERT_EQ(vmem_set("device_budget", "64MiB"), 0) << said();
  EXPECT_EQ(chosen(1024), 4u) << "16 of them";
  ASSERT_EQ(vmem_set("device_budget", "62MiB"), 0) << said();
  EXPECT_EQ(chosen(1024), 2u);
  ASSERT_EQ(vmem_set("device_budget", "128MiB"), 0) << said();
  ASSERT_EQ(vmem_set("staging_share", "12"), 0) << said();
  EXPECT_EQ(chosen(1024), 2u) << "61 MiB for staging frames";
  EXPECT_EQ(vmem_set("staging_share", "50"), 0) << said();
}

TEST_F(DeviceBlocks, AdviceGivenWithARegionChoosesHowLargeTheyAre) {
  start(1, {{"device_budget", "512MiB"}, {"host_budget", "1GiB"}, {"device_block_size", "auto"}}, true);
  if (IsSkipped()) return;
  struct vmem_region_attr attr = {};
  attr.size = sizeof attr;
  const auto chosen = [&attr](size_t mib, vmem_advice advice) {
    attr.advice = advice;
    void* p = nullptr;
    EXPECT_EQ(vmem_create(&p, mib * kMiB, &attr), 0) << said();
    const auto there = residency(p, kMiB);
    // Advice for an existing region changes its readahead, not its blocks.
    EXPECT_EQ(vmem_advise(p, mib * kMiB, VMEM_ADVISE_RANDOM, VMEM_HOST), 0) << said();
    vmem_residency later = there;
    EXPECT_EQ(vmem_query(p, kMiB, &later), 0) << said();
    EXPECT_EQ(later.block_size, there.block_size);
    EXPECT_EQ(vmem_free(p), 0) << said();
    return there.block_size / kMiB;
  };
  EXPECT_EQ(chosen(1024, VMEM_ADVISE_SEQUENTIAL), 32u);
  EXPECT_EQ(chosen(1024, VMEM_ADVISE_RANDOM), 2u);
  for (const vmem_advice other : {VMEM_ADVISE_NORMAL, VMEM_ADVISE_HOT, VMEM_ADVISE_PRIORITY_LOW})
    EXPECT_EQ(chosen(1024, other), 8u);
  EXPECT_EQ(chosen(48, VMEM_ADVISE_SEQUENTIAL), 16u) << "a quarter of 64 would be rounding";
  attr.block_size = 4 * kMiB;
  EXPECT_EQ(chosen(1024, VMEM_ADVISE_SEQUENTIAL), 4u) << "it says so itself";
  attr.block_size = VMEM_BLOCK_AUTO;
  EXPECT_EQ(chosen(1024, VMEM_ADVISE_SEQUENTIAL), 32u);
  attr.flags = VMEM_HOST_ONLY;
  attr.block_size = 0;
  EXPECT_EQ(chosen(1024, VMEM_ADVISE_SEQUENTIAL), 2u) << "setting block_size";
  attr.flags = 0;
  ASSERT_EQ(vmem_set("device_budget", "256MiB"), 0) << said();
  EXPECT_EQ(chosen(1024, VMEM_ADVISE_SEQUENTIAL), 16u) << "16 of them";
  ASSERT_EQ(vmem_set("device_budget", "512MiB"), 0) << said();
  ASSERT_EQ(vmem_set("staging_share", "12"), 0) << said();
  EXPECT_EQ(chosen(1024, VMEM_ADVISE_SEQUENTIAL), 4u) << "122 MiB for staging frames";
  EXPECT_EQ(vmem_set("staging_share", "50"), 0) << said();
  start(1, {{"device_budget", "512MiB"}, {"host_budget", "1GiB"}, {"device_block_size", "4MiB"}}, true);
  EXPECT_EQ(chosen(1024, VMEM_ADVISE_SEQUENTIAL), 4u) << "the process says so";
  EXPECT_EQ(chosen(1024, VMEM_ADVISE_RANDOM), 4u);
  start(1, {{"device_block_size", "auto"}});
  EXPECT_EQ(chosen(1024, VMEM_ADVISE_SEQUENTIAL), 2u) << "managed memory has one size";
}

TEST_F(DeviceBlocks, FramesOfASizeThatNoRegionHasGoToOthers) {
  start(1, {{"device_budget", "96MiB"}, {"host_budget", "320MiB"}}, true);
  if (IsSkipped()) return;
  vmem::region small = with_blocks(192 * kMiB, 2 * kMiB);
  auto* const at = static_cast<uint64_t*>(small.data());
  for (size_t b = 0; b < 96; ++b) at[b * (2 * kMiB / 8)] = b;
  for (size_t b = 0; b < 96; ++b) store_on_device(at + b * (2 * kMiB / 8) + 1, b);
  struct vmem_region_attr attr = {};
  attr.size = sizeof attr;
  attr.block_size = 32 * kMiB;
  void* p = nullptr;
  EXPECT_EQ(vmem_create(&p, 64 * kMiB, &attr), -ENOMEM) << "160 MiB are for staging frames";
  EXPECT_NE(said().find("at least 128 MiB for blocks of 32 MiB"), std::string::npos) << said();
  for (size_t b = 0; b < 96; ++b) {
    ASSERT_EQ(at[b * (2 * kMiB / 8)], b);
    ASSERT_EQ(at[b * (2 * kMiB / 8) + 1], b);
  }
  small.free();
  vmem::region large = with_blocks(64 * kMiB, 32 * kMiB);
  auto* const word = static_cast<uint64_t*>(large.data()) + 5;
  store_on_device(word, 7);
  EXPECT_EQ(*word, 7u);
}

TEST_F(DeviceBlocks, FramesOfALargeRegionLeaveRoomForThoseOfSmallOnes) {
  start(1, {{"device_budget", "128MiB"}, {"host_budget", "512MiB"}, {"device_block_size", "auto"}}, true);
  if (IsSkipped()) return;
  vmem::region large(448 * kMiB);
  ASSERT_EQ(block_of(large), 8 * kMiB);
  fill(large, 8 * kMiB);
  for (const size_t kib : {size_t{4}, size_t{3} << 10, size_t{9} << 10}) {
    void* p = nullptr;
    ASSERT_EQ(vmem_alloc(&p, kib << 10, 0), 0) << kib << ": " << said();
    store_on_device(static_cast<uint64_t*>(p), kib);
    EXPECT_EQ(*static_cast<uint64_t*>(p), kib);
    EXPECT_EQ(vmem_free(p), 0) << said();
  }
  EXPECT_EQ(block_of(with_blocks(16 * kMiB, 4 * kMiB)), 4 * kMiB);
  expect_filled(large, 8 * kMiB);
}

TEST_F(DeviceBlocks, WhereTheSmallestHaveNoFramesLargerOnesServe) {
  start(1, {{"device_budget", "96MiB"}, {"host_budget", "320MiB"}, {"device_block_size", "auto"}}, true);
  if (IsSkipped()) return;
  const vmem::region largest = with_blocks(64 * kMiB, 32 * kMiB), large = with_blocks(64 * kMiB, 8 * kMiB);
  const vmem::region one(4096);
  EXPECT_EQ(block_of(one), 8 * kMiB) << "128 and 32 of 160 MiB are taken";
  store_on_device(static_cast<uint64_t*>(one.data()), 7);
  EXPECT_EQ(*static_cast<uint64_t*>(one.data()), 7u);
  struct vmem_region_attr attr = {};
  attr.size = sizeof attr;
  attr.block_size = 2 * kMiB;
  void* p = nullptr;
  EXPECT_EQ(vmem_create(&p, 2 * kMiB, &attr), -ENOMEM) << "asked for, it is an error";
  EXPECT_NE(said().find("at least 8 MiB for blocks of 2 MiB"), std::string::npos) << said();
}

TEST_F(DeviceBlocks, ARegionThatIsShortOfFramesGetsThoseThatNobodyUses) {
  start(1, {{"device_budget", "96MiB"}, {"host_budget", "320MiB"}}, true);
  if (IsSkipped()) return;
  vmem::region large = with_blocks(256 * kMiB, 8 * kMiB);
  fill(large, 8 * kMiB);
  const vmem::region small = with_blocks(192 * kMiB, 2 * kMiB);
  large.free();
  stop_at("staging.ending");
  fill(small, 2 * kMiB);
  EXPECT_TRUE(stopped()) << "four frames are for the whole of it, and 144 MiB are nobody's";
  go_on();
  expect_filled(small, 2 * kMiB);
}

TEST_F(DeviceBlocks, WhoWantsFramesWaitsForThoseThatAreBeingGivenBack) {
  start(1, {{"device_budget", "96MiB"}, {"host_budget", "320MiB"}}, true);
  if (IsSkipped()) return;
  { const vmem::region gone = with_blocks(64 * kMiB, 32 * kMiB); }
  const vmem::region small = with_blocks(4 * kMiB, 2 * kMiB);
  stop_at("staging.ending");
  const auto create = [](size_t block, std::atomic<int>* out) {
    struct vmem_region_attr attr = {};
    attr.size = sizeof attr;
    attr.block_size = block;
    void* p = nullptr;
    *out = vmem_create(&p, 64 * kMiB, &attr);
  };
  constexpr int kUnderWay = 1;
  std::atomic<int> first{kUnderWay}, second{kUnderWay};
  aside([&] { create(16 * kMiB, &first); });
  ASSERT_TRUE(stopped());
  aside([&] { create(8 * kMiB, &second); });
  // the thread has looked by now, or will find them returned
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(second, kUnderWay);
  go_on();
  join();
  EXPECT_EQ(first, 0);
  EXPECT_EQ(second, 0);
}

// The test keeps two of four frames in use, and two are reserved for blocks that leave.
TEST_F(DeviceBlocks, ASizeThatIsShortOfFramesHoldsUpNoOther) {
  start(1, {{"device_budget", "112MiB"}, {"host_budget", "640MiB"}}, true);
  if (IsSkipped()) return;
  constexpr size_t kLarge = 16 * kMiB, kSmall = 2 * kMiB;
  const vmem::region large = with_blocks(5 * kLarge, kLarge), small = with_blocks(25 * kSmall, kSmall);
  for (size_t b = 0; b < 5; ++b) *words(large, b, kLarge)[0] = 100 + b;
  ASSERT_EQ(vmem_evict(large.data(), large.size(), VMEM_SSD), 0) << said();
  for (size_t b = 0; b < 24; ++b) store_on_device(words(small, b, kSmall)[0], b);
  ASSERT_EQ(vmem_set("staging_share", "20"), 0) << said();
  std::atomic<bool> opened{false}, there{false};
  sim().set_hook([&](vmem::device::SimOp op, int, uintptr_t, size_t size) {
    while (op == SimOp::copy_in && size == kLarge && !opened) usleep(1000);
    return vmem::core::Status();
  });
  auto* const rest = static_cast<std::byte*>(large.data()) + 2 * kLarge;
  ASSERT_EQ(vmem_acquire(large.data(), 2 * kLarge, VMEM_READ, 0, stream_), 0) << said();
  static std::atomic<bool> waits;
  waits = false;
  vmem::core::step_hook.store([](const char* step) { waits = waits || std::strcmp(step, "acquire.started") == 0; });
  aside([&] { EXPECT_EQ(vmem_acquire(rest, 3 * kLarge, VMEM_READ, 0, stream_), 0) << said(); });
  EXPECT_TRUE(until([] { return waits.load(); }));
  vmem::core::step_hook.store(nullptr);
  uint64_t* const other = words(small, 24, kSmall)[0];
  aside([&] {
    EXPECT_EQ(vmem_acquire(other, 8, VMEM_READ, 0, stream_), 0) << said();
    there = true;
  });
  EXPECT_TRUE(until([&] { return there.load(); }));
  EXPECT_EQ(device_stats().evictions, 0u) << "it is not the device that is short";
  opened = true;
  join();
  sim().set_hook(nullptr);
  EXPECT_EQ(vmem_release(large.data(), 2 * kLarge, stream_), 0) << said();
  EXPECT_EQ(vmem_release(rest, 3 * kLarge, stream_), 0) << said();
  EXPECT_EQ(vmem_release(other, 8, stream_), 0) << said();
  for (size_t b = 0; b < 5; ++b) EXPECT_EQ(*words(large, b, kLarge)[0], 100 + b);
  EXPECT_EQ(vmem_set("staging_share", "50"), 0) << said();
}

// A freed region has left 128 MiB of frames.
class UnusedFrames : public DeviceBlocks {
 protected:
  void SetUp() override {
    start(1, {{"device_budget", "96MiB"}, {"host_budget", "192MiB"}, {"staging_share", "90"}}, true);
    if (IsSkipped()) return;
    { const vmem::region gone = with_blocks(64 * kMiB, 32 * kMiB); }
    ASSERT_EQ(vmem_set("host_budget", "184MiB"), 0) << said();
    ASSERT_GE(vmem::stats().host_bytes, 128 * kMiB);
  }
  void TearDown() override {
    EXPECT_EQ(vmem_set("staging_share", "50"), 0) << said();
    DeviceBlocks::TearDown();
  }
  static int create(size_t bytes, size_t block, unsigned flags, void** out) {
    struct vmem_region_attr attr = {};
    attr.size = sizeof attr;
    attr.block_size = block;
    attr.flags = flags;
    return vmem_create(out, bytes, &attr);
  }
};

TEST_F(UnusedFrames, RefuseNoRegionOfLargeBlocks) {
  if (IsSkipped()) return;
  void* p = nullptr;
  ASSERT_EQ(create(64 * kMiB, 16 * kMiB, 0, &p), 0) << said();
  store_on_device(static_cast<uint64_t*>(p), 7);
  EXPECT_EQ(*static_cast<uint64_t*>(p), 7u);
  EXPECT_EQ(vmem_free(p), 0) << said();
}

TEST_F(UnusedFrames, RefuseNoRegionOnTheHost) {
  if (IsSkipped()) return;
  void* p = nullptr;
  ASSERT_EQ(create(64 * kMiB, 16 * kMiB, VMEM_HOST_ONLY, &p), 0) << said();
  EXPECT_EQ(vmem_free(p), 0) << said();
}

TEST_F(UnusedFrames, RefuseNoLeaseOnTheHost) {
  if (IsSkipped()) return;
  const vmem::region r(128 * kMiB, VMEM_HOST_ONLY);
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, VMEM_HOST, nullptr), 0) << said();
  EXPECT_EQ(vmem_release(r.data(), r.size(), nullptr), 0) << said();
}

TEST_F(UnusedFrames, LetALeaseOnTheHostWaitForKernelsThatCameMeanwhile) {
  if (IsSkipped()) return;
  const vmem::region host(128 * kMiB, VMEM_HOST_ONLY), small = with_blocks(2 * kMiB, 2 * kMiB);
  const vmem_range ranges[] = {{host.data(), host.size(), VMEM_READ, 0}, {small.data(), small.size(), VMEM_READ, 0}};
  std::atomic<int> result{1};
  std::atomic<bool> stored{false};
  stop_at("staging.ending");
  aside([&] { result = vmem_acquire_ranges(ranges, 2, VMEM_HOST, nullptr); });
  ASSERT_TRUE(stopped());
  auto* const word = static_cast<uint64_t*>(small.data());
  ASSERT_EQ(vmem_acquire(word, small.size(), VMEM_READ | VMEM_WRITE, 0, stream_), 0) << said();
  launch_store(stream_, word, 7, &stored);
  ASSERT_EQ(vmem_release(word, small.size(), stream_), 0) << said();
  go_on();
  vmem::test::eventually([&] { return result != 1; }, std::chrono::milliseconds(200));  // it must not return
  stored = true;
  join();
  ASSERT_EQ(result, 0);
  EXPECT_EQ(*word, 7u);
  EXPECT_EQ(vmem_release_ranges(ranges, 2, nullptr), 0) << said();
}

TEST_F(UnusedFrames, RefuseNoBudget) {
  if (IsSkipped()) return;
  EXPECT_EQ(vmem_set("host_budget", "96MiB"), 0) << said();
  EXPECT_LE(vmem::stats().host_bytes, 96 * kMiB);
}

// The driver may wait for kernels before it frees the frames.
TEST_F(UnusedFrames, StayWhileKernelsAsk) {
  if (IsSkipped()) return;
  const vmem::region small = with_blocks(4 * kMiB, 2 * kMiB);
  struct vmem_kernel* kernel = nullptr;
  vmem_kernel_view view;
  ASSERT_EQ(vmem_kernel_begin(&kernel, small.data(), small.size(), VMEM_READ, 0, 0, &view), 0) << said();
  EXPECT_EQ(vmem_set("host_budget", "96MiB"), -EBUSY);
  ASSERT_EQ(vmem_kernel_end(kernel, stream_), 0) << said();
  EXPECT_EQ(vmem_set("host_budget", "96MiB"), 0) << said();
}

// The host budget is full of blocks that cannot be written. One size has waited for an hour by the
// library's clock when the next is tried. The next one does not wait again, even though half an
// hour is the time-out by then.
TEST_F(DeviceBlocks, SizesThatAreTriedInTurnWaitForMemoryOnce) {
  start(1,
        {{"device_budget", "128MiB"},
         {"host_budget", "256MiB"},
         {"device_block_size", "auto"},
         {"ssd_budget", "0"},
         {"fault_timeout_ms", "100"}},
        true);
  if (IsSkipped()) return;
  vmem::region full(512 * kMiB, VMEM_HOST_ONLY);
  auto* at = static_cast<uint64_t*>(full.data());
  while (!systest::raises_sigbus([&] { *static_cast<volatile uint64_t*>(at) = 1; })) at += 2 * kMiB / 8;
  ASSERT_EQ(vmem_set("fault_timeout_ms", "3600000"), 0) << said();
  static std::atomic<int> tried;
  static std::atomic<bool> may_go_on;
  static thread_local bool creates = false;
  tried = 0, may_go_on = false;
  vmem::core::step_hook.store([](const char* step) {
    if (!creates || std::strcmp(step, "create.trying") != 0 || ++tried != 2) return;
    while (!may_go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  std::atomic<bool> ended{false};
  aside([&] {
    creates = true;
    void* p = nullptr;
    EXPECT_EQ(vmem_alloc(&p, 64 * kMiB, 0), -ENOMEM);
    ended = true;
  });
  // Creating a region reads the clock.
  const auto pass_time = [] {
    vmem::core::clock_jumped_ns += vmem::pager::StallClock::kSlice;
    struct vmem_region_attr attr = {};
    attr.size = sizeof attr;
    attr.address = reinterpret_cast<void*>(uintptr_t{1});
    void* p = nullptr;
    EXPECT_EQ(vmem_create(&p, 64 * kMiB, &attr), -EINVAL);
  };
  while (tried < 2 && !ended) pass_time();
  EXPECT_EQ(tried, 2);
  EXPECT_EQ(vmem_set("fault_timeout_ms", "1800000"), 0) << said();
  may_go_on = true;
  EXPECT_TRUE(until([&] { return ended.load(); })) << tried << " sizes were tried";
  while (!ended) pass_time();
  EXPECT_GT(tried, 2);
  vmem::core::step_hook.store(nullptr);
}

TEST_F(DeviceBlocks, NoFramesAreGivenBackWhileKernelsAsk) {
  start(1, {{"device_budget", "96MiB"}, {"host_budget", "320MiB"}}, true);
  if (IsSkipped()) return;
  { const vmem::region gone = with_blocks(64 * kMiB, 32 * kMiB); }
  const vmem::region small = with_blocks(4 * kMiB, 2 * kMiB);
  struct vmem_region_attr attr = {};
  attr.size = sizeof attr;
  attr.block_size = 16 * kMiB;
  struct vmem_kernel* kernel = nullptr;
  vmem_kernel_view view;
  ASSERT_EQ(vmem_kernel_begin(&kernel, small.data(), small.size(), VMEM_READ, 0, 0, &view), 0) << said();
  void* p = nullptr;
  EXPECT_EQ(vmem_create(&p, 64 * kMiB, &attr), -ENOMEM) << "a driver may wait for kernels before it lets go of them";
  ASSERT_EQ(vmem_kernel_end(kernel, stream_), 0) << said();
  ASSERT_EQ(vmem_create(&p, 64 * kMiB, &attr), 0) << said();
  EXPECT_EQ(vmem_free(p), 0) << said();
}

TEST_F(DeviceBlocks, AnAddressNeedNotSuitBlocksThatTheLibraryChooses) {
  start(1, {{"device_budget", "128MiB"}, {"host_budget", "512MiB"}, {"device_block_size", "auto"}}, true);
  if (IsSkipped()) return;
  struct vmem_region_attr attr = {};
  attr.size = sizeof attr;
  attr.address = reinterpret_cast<void*>(uintptr_t{0x200000000000} + 2 * kMiB);
  void* p = nullptr;
  ASSERT_EQ(vmem_create(&p, 64 * kMiB, &attr), 0) << said();
  EXPECT_EQ(vmem_free(p), 0) << said();
  attr.block_size = 8 * kMiB;
  EXPECT_EQ(vmem_create(&p, 64 * kMiB, &attr), -EINVAL) << "who says how large they are knows";
}

}  // namespace
