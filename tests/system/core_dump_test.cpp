// Setting core_dump, and the region's own attribute: whether the kernel leaves regions out of core
// dumps, also after blocks have come, gone and come back, and where a region shows its file.
// Checked by the flag "dd" of the mapping.
#include <sys/mman.h>

#include <map>

#include "mapping_flags.h"
#include "sim_support.h"
#include "support.h"
#include "trap/mapping.h"
#include "vmem/pool.hpp"

namespace systest {
namespace {

constexpr size_t kBlocks = 32;

size_t left_out(const void* address, size_t size) {
  return bytes_with_flag(address, size, "dd");
}

class CoreDumps : public SystemTest, public ::testing::WithParamInterface<const char*> {
 protected:
  void TearDown() override {
    SystemTest::TearDown();
    EXPECT_EQ(vmem_set("trap", "auto"), 0);
  }
  // Stores to and reads twice the budget, so that each block comes and goes.
  static size_t left_out_after_use(const char* setting) {
    configure({{"trap", "uffd"}, {"transfer", GetParam()}, {"host_budget", "32MiB"}, {"core_dump", setting}});
    if (IsSkipped()) return 0;
    const vmem::region r(kBlock * kBlocks);
    auto* bytes = static_cast<char*>(r.data());
    for (size_t b = 0; b < kBlocks; ++b) bytes[b * kBlock] = 1;
    for (size_t b = 0; b < kBlocks; ++b) EXPECT_EQ(bytes[b * kBlock], 1);
    return left_out(bytes, kBlock * kBlocks);
  }
};

TEST_P(CoreDumps, HoldNoRegion) {
  const size_t bytes = left_out_after_use("off");
  if (IsSkipped()) return;
  EXPECT_EQ(bytes, kBlock * kBlocks);
}

TEST_P(CoreDumps, HoldRegionsOnRequest) {
  const size_t bytes = left_out_after_use("on");
  if (IsSkipped()) return;
  EXPECT_EQ(bytes, 0u);
}

TEST_P(CoreDumps, HoldEachRegionAsItWasMadeWhateverTheSettingIs) {
  for (const char* setting : {"off", "on"}) {
    SCOPED_TRACE(setting);
    vmem_shutdown();
    configure({{"trap", "uffd"}, {"transfer", GetParam()}, {"host_budget", "32MiB"}, {"core_dump", setting}});
    if (IsSkipped()) return;
    std::map<int, vmem::region> regions;
    for (const int wanted : {-1, 0, 1}) {
      regions[wanted] = vmem::region(kBlock * kBlocks / 2, vmem::attributes{.core_dump = wanted});
      for (size_t b = 0; b < kBlocks / 2; ++b) regions[wanted].view<char>()[b * kBlock] = 1;
    }
    for (const auto& [wanted, r] : regions) {
      for (size_t b = 0; b < kBlocks / 2; ++b) EXPECT_EQ(r.view<char>()[b * kBlock], 1);
      const bool in = wanted == 1 || (wanted == 0 && setting == std::string("on"));
      EXPECT_EQ(left_out(r.data(), r.size()), in ? 0 : r.size()) << wanted;
    }
  }
}

// Regions that several allocations share, and a region of a single allocation.
TEST_P(CoreDumps, HoldEachPoolAsItWasMade) {
  configure({{"trap", "uffd"}, {"transfer", GetParam()}, {"host_budget", "32MiB"}, {"core_dump", "on"}});
  if (IsSkipped()) return;
  for (const int wanted : {-1, 0, 1}) {
    vmem::pool_options options;
    options.region_bytes = kBlock;
    options.core_dump = wanted;
    vmem::pool pool(options);
    for (const size_t bytes : {kBlock / 2, 4 * kBlock}) {
      void* const at = pool.allocate(bytes);
      memset(at, 1, bytes);
      EXPECT_EQ(left_out(at, bytes), wanted < 0 ? bytes : 0u) << wanted;
      pool.deallocate(at, bytes);
    }
  }
  vmem::pool_options options;
  options.core_dump = 2;
  vmem::pool pool(options);
  EXPECT_THROW(pool.deallocate(pool.allocate(1), 1), vmem::pool_error);
}

// A block that was on a device gets a new trap.
class CoreDumpsOfDevices : public SimTest {
 protected:
  void SetUp() override { start(1, {{"trap", "uffd"}, {"core_dump", "on"}}, handles_); }
  void TearDown() override {
    SimTest::TearDown();
    EXPECT_EQ(vmem_set("trap", "auto"), 0);
  }
  bool handles_ = false;
};

// A block on a device that has a copy for the CPU.
class CoreDumpsOfHandles : public CoreDumpsOfDevices {
 protected:
  CoreDumpsOfHandles() { handles_ = true; }
};

TEST_F(CoreDumpsOfHandles, HoldWhatTheCpuIsShownAsTheRegionSays) {
  if (IsSkipped()) return;
  for (const int wanted : {-1, 1}) {
    const vmem::region r(kBlock * 4, vmem::attributes{.core_dump = wanted});
    auto* const words = static_cast<uint64_t*>(r.data());
    for (size_t b = 0; b < 4; ++b) words[b * kBlock / 8] = b;
    ASSERT_EQ(vmem_acquire(words, r.size(), VMEM_READ, 0, stream_), 0) << vmem_last_error();
    for (size_t b = 0; b < 4; ++b) EXPECT_EQ(words[b * kBlock / 8], b);
    EXPECT_EQ(r.query().device_bytes, r.size());
    EXPECT_EQ(left_out(words, r.size()), wanted < 0 ? r.size() : 0u);
    EXPECT_EQ(vmem_release(words, r.size(), stream_), 0);
    EXPECT_EQ(vmem_evict(words, r.size(), VMEM_SSD), 0);
    EXPECT_EQ(left_out(words, r.size()), wanted < 0 ? r.size() : 0u);
  }
}

TEST_F(CoreDumpsOfDevices, HoldNothingOfARegionThatIsToBeLeftOutWhereverItWas) {
  if (IsSkipped()) return;
  const vmem::region r(kBlock * 4, vmem::attributes{.core_dump = -1});
  auto* const words = static_cast<uint64_t*>(r.data());
  for (size_t b = 0; b < 4; ++b) words[b * kBlock / 8] = b;
  store_on_device(words + kBlock / 8, 7);
  ASSERT_EQ(vmem_acquire(words, r.size(), VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr), 0) << vmem_last_error();
  EXPECT_EQ(words[kBlock / 8], 7u);
  EXPECT_EQ(left_out(words, r.size()), r.size());
  EXPECT_EQ(vmem_release(words, r.size(), nullptr), 0);
}

// A CPU that reads a block on a device reads the device's memory.
TEST_F(CoreDumpsOfDevices, HoldNoBlockThatIsOnADevice) {
  if (IsSkipped()) return;
  const vmem::region r(kBlock * 4);
  auto* const words = static_cast<uint64_t*>(r.data());
  store_on_device(words, 7);
  EXPECT_EQ(words[0], 7u);
  if (r.query().device_bytes == 0) GTEST_SKIP() << "the load brought it to host memory";
  EXPECT_EQ(left_out(words, kBlock), kBlock);
}

// Adjacent regions whose blocks leave their device together.
class CoreDumpsOfPeers : public SimTest {
 protected:
  static constexpr size_t kSpace = 64 * kBlock;
  void SetUp() override {
    SystemTest::SetUp();
    void* const all = mmap(nullptr, kSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(all, MAP_FAILED);
    space_ = reinterpret_cast<std::byte*>(vmem::core::round_up(reinterpret_cast<uintptr_t>(all), kBlock));
    vmem::api::test_hooks().make_devices = [](size_t, std::unique_ptr<vmem::device::Devices>* out) {
      vmem::device::SimOptions options;
      options.memory_bytes = 128 << 20;
      options.space = space_;
      std::unique_ptr<vmem::device::SimDevices> made;
      vmem::core::Status s = vmem::device::make_sim_devices(options, &made);
      *out = std::move(made);
      return s;
    };
    configure({{"device_budget", "8MiB"}, {"host_budget", "96MiB"}, {"readahead", "0"}, {"trap", "uffd"}});
    if (!IsSkipped()) stream_ = stream(0);
  }
  void TearDown() override {
    SimTest::TearDown();
    EXPECT_EQ(vmem_set("trap", "auto"), 0);
  }
  static inline std::byte* space_ = nullptr;
};

TEST_F(CoreDumpsOfPeers, HoldWhatEachRegionSays) {
  if (IsSkipped()) return;
  const vmem::region in(2 * kBlock, vmem::attributes{.core_dump = 1});
  const vmem::region out(2 * kBlock, vmem::attributes{.core_dump = -1});
  const vmem::region other(4 * kBlock);
  auto* const words = static_cast<uint64_t*>(in.data());
  ASSERT_EQ(static_cast<std::byte*>(in.data()) + in.size(), out.data());
  for (int round = 0; round < 4; ++round) {
    for (size_t b = 0; b < 4; ++b) store_on_device(words + b * kBlock / 8, b + 1);
    // All four blocks leave to make room.
    ASSERT_EQ(vmem_acquire(other.data(), other.size(), VMEM_READ, 0, stream_), 0) << vmem_last_error();
    EXPECT_TRUE(until([&] { return in.query().device_bytes + out.query().device_bytes == 0; }));
    ASSERT_EQ(vmem_release(other.data(), other.size(), stream_), 0) << vmem_last_error();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
    for (size_t b = 0; b < 4; ++b) EXPECT_EQ(words[b * kBlock / 8], b + 1);
    EXPECT_EQ(left_out(in.data(), in.size()), 0u);
    EXPECT_EQ(left_out(out.data(), out.size()), out.size());
  }
}

// A block of a PRIVATE region that shows its file: data stored there belongs to the process, and
// would be dumped.
TEST(CoreDumpsOfFiles, HoldNothingOfABlockThatShowsItsFile) {
  const int fd = memfd_create("vmem-core-dump", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(fd, kBlock), 0);
  for (const auto dump : {vmem::trap::CoreDump::no, vmem::trap::CoreDump::yes}) {
    uintptr_t start = 0;
    ASSERT_TRUE(vmem::trap::reserve_space(kBlock, kBlock, &start).ok());
    ASSERT_TRUE(vmem::trap::replace_with_file(fd, 0, false, start, kBlock, dump).ok());
    auto* const bytes = reinterpret_cast<char*>(start);
    bytes[0] = 1;
    EXPECT_EQ(left_out(bytes, kBlock), dump == vmem::trap::CoreDump::no ? kBlock : 0);
    munmap(bytes, kBlock);
  }
  close(fd);
}

INSTANTIATE_TEST_SUITE_P(Transfers, CoreDumps, ::testing::Values("auto", "copy"),
                         [](const auto& tested) { return std::string(tested.param); });

}  // namespace
}  // namespace systest
