// The runtime on the kernel module: it uses the module if it is loaded, follows its limits, and
// reports if it is missing.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/patience.h"
#include "device/sim/sim_device.h"
#include "pager/pager.h"
#include "support.h"

namespace {

using systest::SystemTest;

constexpr size_t kMiB = 1 << 20;
constexpr const char* kSysfs = "/sys/class/misc/vmem/";

uint64_t knob(const std::string& name) {
  uint64_t value = UINT64_MAX;
  std::ifstream(kSysfs + name) >> value;
  return value;
}

bool set_knob(const std::string& name, uint64_t value) {
  std::ofstream out(kSysfs + name);
  out << value << std::flush;
  return out.good();
}

struct Stats : ::vmem_stats {
  Stats() : ::vmem_stats{} {
    size = sizeof(struct ::vmem_stats);
    EXPECT_EQ(::vmem_stats(this), 0);
  }
};

// Waits for an event from another thread. An event that never comes fails the test with a message.
template <typename Condition>
bool comes(Condition condition) {
  return vmem::test::eventually(condition, std::chrono::seconds(60));
}

class Module : public SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    if (access("/dev/vmem", F_OK) != 0) GTEST_SKIP() << "the module vmem is not loaded: no /dev/vmem";
    if (access("/dev/vmem", R_OK | W_OK) != 0) GTEST_SKIP() << "this user may not open /dev/vmem";
  }
  void TearDown() override {
    SystemTest::TearDown();
    vmem_set("trap", "auto");
  }
};

TEST_F(Module, IsTakenWhereItIsLoadedAndNothingIsCopied) {
  configure({{"host_budget", "32MiB"}});
  vmem::region r(96 * kMiB, VMEM_HOST_ONLY);
  auto* words = static_cast<uint64_t*>(r.data());
  const size_t count = r.size() / 8;
  for (size_t i = 0; i < count; i += 512) words[i] = i * 7 + 1;
  EXPECT_NE(knob("frame_bytes"), 0u) << "its frames are the module's";
  EXPECT_NE(knob("installed_bytes"), 0u);
  EXPECT_LE(knob("frame_bytes"), 32 * kMiB);
  for (size_t i = 0; i < count; i += 512) ASSERT_EQ(words[i], i * 7 + 1) << i;
  const Stats s;
  EXPECT_GE(s.write_bytes, 60 * kMiB);
  EXPECT_GE(s.read_bytes, 60 * kMiB);
  EXPECT_EQ(s.copied_bytes, 0u);
}

// The module identifies a block, wherever the application has moved the mapping.
TEST_F(Module, AnAccessThroughAMappingThatWasMovedIsServed) {
  configure({{"host_budget", "32MiB"}});
  constexpr size_t kBlock = 2 * kMiB;
  vmem::region r(8 * kMiB, VMEM_HOST_ONLY);
  auto* words = static_cast<uint64_t*>(r.data());
  for (size_t i = 0; i < r.size() / 8; i += 512) words[i] = i * 7 + 1;
  r.evict();
  void* const there = mmap(nullptr, kBlock, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(there, MAP_FAILED);
  char* const here = static_cast<char*>(r.data()) + kBlock;
  ASSERT_EQ(mremap(here, kBlock, kBlock, MREMAP_MAYMOVE | MREMAP_FIXED, there), there);
  const auto* moved = static_cast<const volatile uint64_t*>(there);
  for (size_t i = 0; i < kBlock / 8; i += 512) ASSERT_EQ(moved[i], (kBlock / 8 + i) * 7 + 1) << i;
  ASSERT_EQ(mremap(there, kBlock, kBlock, MREMAP_MAYMOVE | MREMAP_FIXED, here), here);
  for (size_t i = 0; i < r.size() / 8; i += 512) ASSERT_EQ(words[i], i * 7 + 1) << i;
}

TEST_F(Module, GivesEverythingBackAtShutdown) {
  for (const std::string block : {"64KiB", "2MiB", "4KiB"}) {
    configure({{"host_budget", "32MiB"}, {"block_size", block}});
    {
      // More than the budget, except with blocks of a page: 10,000 of those took two minutes on a
      // kernel with its checks enabled.
      vmem::region r(block == "4KiB" ? 8 * kMiB : 40 * kMiB, VMEM_HOST_ONLY);
      memset(r.data(), 3, r.size());
      EXPECT_EQ(static_cast<unsigned char*>(r.data())[r.size() - 1], 3);
    }
    vmem_shutdown();
    EXPECT_EQ(knob("frame_bytes"), 0u) << block;
    // io_uring drops the descriptors that it polled shortly after it was closed.
    EXPECT_TRUE(comes([] { return knob("contexts") == 0; })) << block;
  }
}

TEST_F(Module, ARegionThatIsToBeInCoreDumpsIsRefusedAndLeavesNothing) {
  configure({{"host_budget", "32MiB"}});
  const vmem::region r(4 * kMiB, vmem::attributes{.flags = VMEM_HOST_ONLY, .core_dump = -1});
  const uint64_t records = knob("records");
  struct vmem_region_attr attr = {};
  attr.size = sizeof attr;
  attr.flags = VMEM_HOST_ONLY;
  attr.core_dump = 1;
  void* at = nullptr;
  EXPECT_EQ(vmem_create(&at, 4 * kMiB, &attr), -EOPNOTSUPP) << vmem_last_error();
  EXPECT_NE(std::string(vmem_last_error()).find("core dump"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(knob("records"), records);
}

TEST_F(Module, ALimitOfTheAdministratorIsFollowed) {
  if (geteuid() != 0) GTEST_SKIP() << "only root turns the knobs";
  configure({{"host_budget", "48MiB"}});
  vmem::region r(40 * kMiB, VMEM_HOST_ONLY);
  auto* bytes = static_cast<unsigned char*>(r.data());
  for (size_t i = 0; i < r.size(); i += 4096) bytes[i] = static_cast<unsigned char>(i >> 12);
  const uint64_t before = knob("context_limit_bytes");
  ASSERT_TRUE(set_knob("context_limit_bytes", 24 * kMiB));
  EXPECT_TRUE(comes([] { return Stats().host_budget == 24 * kMiB; })) << Stats().host_budget;
  EXPECT_TRUE(comes([] { return knob("frame_bytes") <= 24 * kMiB; })) << knob("frame_bytes");
  for (size_t i = 0; i < r.size(); i += 4096) ASSERT_EQ(bytes[i], static_cast<unsigned char>(i >> 12)) << i;
  EXPECT_LE(knob("frame_bytes"), 24 * kMiB);
  ASSERT_TRUE(set_knob("context_limit_bytes", before));
  EXPECT_TRUE(comes([] { return Stats().host_budget == 48 * kMiB; }));
}

TEST_F(Module, ALimitBelowTheBudgetAtTheStartIsLivedWith) {
  if (geteuid() != 0) GTEST_SKIP() << "only root turns the knobs";
  const uint64_t before = knob("frame_limit_bytes");
  ASSERT_TRUE(set_knob("frame_limit_bytes", 24 * kMiB));
  configure({{"host_budget", "64MiB"}});
  vmem::region r(60 * kMiB, VMEM_HOST_ONLY);
  memset(r.data(), 9, r.size());
  for (size_t i = 0; i < r.size(); i += 4096) ASSERT_EQ(static_cast<unsigned char*>(r.data())[i], 9);
  EXPECT_LE(knob("frame_bytes"), 24 * kMiB);
  ASSERT_TRUE(set_knob("frame_limit_bytes", before));
}

TEST_F(Module, MemoryPressureIsAnswered) {
  std::ofstream drop("/proc/sys/vm/drop_caches");
  if (!drop) GTEST_SKIP() << "only root asks the kernel to shrink";
  configure({{"host_budget", "64MiB"}});
  vmem::region r(60 * kMiB, VMEM_HOST_ONLY);
  memset(r.data(), 5, r.size());
  const uint64_t before = knob("frame_bytes"), percent = knob("pressure_percent");
  ASSERT_TRUE(set_knob("pressure_percent", 101));  // however much memory is available
  drop << 2 << std::flush;                         // calls every shrinker
  if (!comes([&] { return knob("frame_bytes") < before; })) ADD_FAILURE() << "nothing was given back of " << before;
  ASSERT_TRUE(set_knob("pressure_percent", percent));
  for (size_t i = 0; i < r.size(); i += 4096) ASSERT_EQ(static_cast<unsigned char*>(r.data())[i], 5);
}

// The library reads a page that the program may not read. The module has its bytes although no page
// table does.
TEST_F(Module, WhatTheProgramMayNotReadLeavesAndComesBackBesideADevice) {
  ASSERT_EQ(vmem_set("device", "sim"), 0);
  for (const char* block : {"64KiB", "2MiB"}) {
    SCOPED_TRACE(block);
    configure({{"host_budget", "64MiB"}, {"trap", "kmod"}, {"block_size", block}});
    {
      vmem::region r(8 * kMiB);
      auto words = r.view<uint64_t>();
      auto* const at = static_cast<char*>(r.data());
      for (size_t i = 0; i < words.size(); i += 512) words[i] = i + 1;
      for (size_t from = 0; from < r.size(); from += 64 << 10)
        ASSERT_EQ(mprotect(at + from + 8192, 4096, PROT_NONE), 0);
      EXPECT_EQ(vmem_sync(at, r.size()), 0) << vmem_last_error();
      EXPECT_EQ(vmem_evict(at, r.size(), VMEM_SSD), 0) << vmem_last_error();
      EXPECT_EQ(r.query().host_bytes, 0u);
      ASSERT_EQ(mprotect(at, r.size(), PROT_READ | PROT_WRITE), 0);
      size_t wrong = 0;
      for (size_t i = 0; i < words.size(); i += 512) wrong += words[i] != i + 1;
      EXPECT_EQ(wrong, 0u);
    }
    vmem_shutdown();
  }
  ASSERT_EQ(vmem_set("device", "auto"), 0);
}

// Returns the line of /proc/self/maps that contains an address.
std::string mapping_of(uintptr_t address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long first = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx", &first, &end) == 2 && address >= first && address < end) return line;
  }
  return "";
}

TEST_F(Module, WhatDevicesCopyFromAreItsFramesOrPlainMemoryWhereTheyCannotBePinned) {
  for (const bool refused : {false, true}) {
    ASSERT_EQ(vmem_set("device", "sim"), 0);
    configure({{"host_budget", "64MiB"}, {"trap", "kmod"}});
    {
      static std::atomic<bool> refuse;
      static std::mutex mutex;
      static std::vector<std::string> pinned;
      refuse = refused;
      pinned.clear();
      ASSERT_NE(vmem::device::current_sim(), nullptr);
      vmem::device::current_sim()->set_hook([](vmem::device::SimOp op, int, uintptr_t address, size_t) {
        if (op != vmem::device::SimOp::pin) return vmem::core::Status();
        const std::string where = mapping_of(address);
        std::lock_guard lock(mutex);
        pinned.push_back(where);
        const bool modules = where.find("/dev/vmem") != std::string::npos;
        return refuse && modules ? vmem::core::error(EFAULT, "as the test wants it") : vmem::core::Status();
      });
      vmem::region r(16 * kMiB);
      auto* words = static_cast<uint64_t*>(r.data());
      for (size_t i = 0; i < r.size() / 8; i += 512) words[i] = i;
      r.evict();
      ASSERT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, nullptr), 0) << vmem_last_error();
      ASSERT_EQ(vmem_release(r.data(), r.size(), nullptr), 0) << vmem_last_error();
      {
        std::lock_guard lock(mutex);
        ASSERT_FALSE(pinned.empty());
        EXPECT_NE(pinned.front().find("/dev/vmem"), std::string::npos) << pinned.front();
        EXPECT_EQ(pinned.back().find("/dev/vmem") == std::string::npos, refused) << pinned.back();
      }
      r.evict();
      for (size_t i = 0; i < r.size() / 8; i += 512) ASSERT_EQ(words[i], i);
      vmem::device::current_sim()->set_hook(nullptr);
    }
    vmem_shutdown();
    EXPECT_EQ(knob("frame_bytes"), 0u);
  }
  ASSERT_EQ(vmem_set("device", "auto"), 0);
}

TEST_F(Module, BlocksOfADeviceTierStandInItToo) {
  ASSERT_EQ(vmem_set("device", "sim"), 0);
  configure({{"host_budget", "64MiB"}, {"trap", "kmod"}});
  {
    vmem::region r(16 * kMiB);
    auto* words = static_cast<uint64_t*>(r.data());
    for (size_t i = 0; i < r.size() / 8; i += 512) words[i] = i;
    EXPECT_NE(knob("installed_bytes"), 0u);
    for (int round = 0; round < 3; ++round) {
      ASSERT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, nullptr), 0) << vmem_last_error();
      EXPECT_EQ(knob("installed_bytes"), 0u) << "all of it is on the device";
      ASSERT_EQ(vmem_release(r.data(), r.size(), nullptr), 0) << vmem_last_error();
      ASSERT_EQ(vmem_evict(r.data(), r.size(), round == 1 ? VMEM_SSD : VMEM_HOST), 0) << vmem_last_error();
      for (size_t i = 0; i < r.size() / 8; i += 512) ASSERT_EQ(words[i], i) << round;
    }
  }
  vmem_shutdown();
  EXPECT_EQ(knob("frame_bytes"), 0u);
  ASSERT_EQ(vmem_set("device", "auto"), 0);
}

class ModuleSetting : public SystemTest {
  void TearDown() override {
    SystemTest::TearDown();
    vmem_set("trap", "auto");
  }
};

TEST_F(ModuleSetting, WithTransferCopyIsAContradictionThatIsSaid) {
  ASSERT_EQ(vmem_set("trap", "kmod"), 0);
  ASSERT_EQ(vmem_set("transfer", "copy"), 0);
  EXPECT_EQ(vmem_init(), -EINVAL);
  EXPECT_NE(std::string(vmem_last_error()).find("transfer is copy"), std::string::npos) << vmem_last_error();
}

TEST_F(ModuleSetting, WhereItIsNotLoadedTheErrorSaysHowToLoadIt) {
  if (access("/dev/vmem", F_OK) == 0) GTEST_SKIP() << "the module is loaded";
  ASSERT_EQ(vmem_set("trap", "kmod"), 0);
  EXPECT_EQ(vmem_init(), -ENOENT);
  EXPECT_NE(std::string(vmem_last_error()).find("modprobe vmem"), std::string::npos) << vmem_last_error();
}

TEST_F(ModuleSetting, AutoSaysInOneLineThatItGoesOnWithUserfaultfd) {
  if (access("/dev/vmem", R_OK | W_OK) == 0) GTEST_SKIP() << "the module may be used";
  static std::string lines;
  lines.clear();
  vmem_log([](int, const char* line, void*) { lines += std::string(line) + "\n"; }, nullptr);
  ASSERT_EQ(vmem_set("log", "info"), 0);
  configure({});
  vmem::core::flush_log();
  const size_t at = lines.find("userfaultfd in place of the module");
  ASSERT_NE(at, std::string::npos) << lines;
  EXPECT_EQ(lines.find("userfaultfd in place of the module", at + 1), std::string::npos) << "once";
}

}  // namespace
