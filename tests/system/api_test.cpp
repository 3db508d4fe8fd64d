// Bad input gets a specific error and a message, and changes nothing.
#include <sys/wait.h>

#include <filesystem>
#include <thread>

#include "support.h"

namespace {

using systest::stamp;
using systest::SystemTest;

class Api : public SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    configure({});
  }
  void expect_words(const char* text) {
    EXPECT_NE(std::string(vmem_last_error()).find(text), std::string::npos) << vmem_last_error();
  }
};

TEST_F(Api, AllocRefusesBadArgumentsWithWords) {
  void* p = reinterpret_cast<void*>(1);
  EXPECT_EQ(vmem_alloc(nullptr, 4096, 0), -EINVAL);
  EXPECT_EQ(vmem_alloc(&p, 0, 0), -EINVAL);
  expect_words("size is 0");
  EXPECT_EQ(vmem_alloc(&p, SIZE_MAX, 0), -EINVAL);
  EXPECT_EQ(vmem_alloc(&p, SIZE_MAX - 4095, 0), -EINVAL);
  EXPECT_EQ(vmem_alloc(&p, 4096, 0x80), -EINVAL);
  expect_words("0x80");
  EXPECT_EQ(p, reinterpret_cast<void*>(1)) << "nothing is stored on failure";
  EXPECT_EQ(vmem::stats().regions, 0u);
}

TEST_F(Api, RangesMustLieInsideOneRegion) {
  vmem::region region(1 << 20, VMEM_HOST_ONLY);
  vmem::region other(1 << 20, VMEM_HOST_ONLY);
  auto* p = static_cast<char*>(region.data());
  int local = 0;
  for (int rc :
       {vmem_prefetch(nullptr, 1, VMEM_HOST, nullptr), vmem_prefetch(&local, 4, VMEM_HOST, nullptr),
        vmem_prefetch(p, 0, VMEM_HOST, nullptr), vmem_prefetch(p, (1 << 20) + 1, VMEM_HOST, nullptr),
        vmem_prefetch(p + (1 << 20), 1, VMEM_HOST, nullptr), vmem_prefetch(p - 1, 2, VMEM_HOST, nullptr),
        vmem_sync(p, SIZE_MAX), vmem_evict(p + 5, SIZE_MAX - 4, VMEM_SSD), vmem_advise(p, 0, VMEM_ADVISE_HOT, 0),
        vmem_acquire(p, (2 << 20), VMEM_READ, VMEM_HOST, nullptr), vmem_release(p, 4096, nullptr)}) {
    EXPECT_EQ(rc, -EINVAL);
  }
  EXPECT_STRNE(vmem_last_error(), "");
}

TEST_F(Api, UnknownAdviceAccessFlagsAndLocationsAreNamed) {
  vmem::region region(1 << 20, VMEM_HOST_ONLY);
  EXPECT_EQ(vmem_advise(region.data(), 4096, 999, 0), -EINVAL);
  expect_words("999");
  EXPECT_EQ(vmem_acquire(region.data(), 4096, 8, VMEM_HOST, nullptr), -EINVAL);
  expect_words("0x8");
  EXPECT_EQ(vmem_acquire(region.data(), 4096, 0, VMEM_HOST, nullptr), -EINVAL);
  EXPECT_EQ(vmem_acquire(region.data(), 4096, VMEM_READ, VMEM_SSD, nullptr), -EINVAL);
  EXPECT_EQ(vmem_acquire(region.data(), 4096, VMEM_READ, -77, nullptr), -EINVAL);
  expect_words("-77");
  EXPECT_EQ(vmem_evict(region.data(), 4096, 0), -EINVAL);
}

TEST_F(Api, CallsThatNeedADeviceSayThatThereIsNone) {
  vmem::region region(1 << 20, VMEM_HOST_ONLY);
  EXPECT_EQ(vmem_acquire(region.data(), 4096, VMEM_READ, 0, nullptr), -ENODEV);
  expect_words("device 0");
  EXPECT_EQ(vmem_prefetch(region.data(), 4096, 3, nullptr), -ENODEV);
  struct vmem_device_stats d = {};
  d.size = sizeof d;
  EXPECT_EQ(vmem_device_stats(0, &d), -ENODEV);
}

TEST_F(Api, FreeTakesOnlyTheStartOfALiveRegion) {
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, 1 << 20, VMEM_HOST_ONLY), 0);
  EXPECT_EQ(vmem_free(static_cast<char*>(p) + 4096), -EINVAL);
  expect_words("4096 bytes inside");
  EXPECT_EQ(vmem_free(p), 0);
  EXPECT_EQ(vmem_free(p), -EINVAL);
  EXPECT_EQ(vmem_free(nullptr), 0);
  int local = 0;
  EXPECT_EQ(vmem_free(&local), -EINVAL);
}

TEST_F(Api, SettingsAreCheckedAndReadBack) {
  char value[64];
  EXPECT_EQ(vmem_set("no_such_setting", "1"), -ENOENT);
  EXPECT_EQ(vmem_set("host_budget", "many"), -EINVAL);
  expect_words("such as 512MiB");
  EXPECT_EQ(vmem_set("block_size", "3MiB"), -EINVAL);
  expect_words("power of two");
  EXPECT_EQ(vmem_set(nullptr, "1"), -EINVAL);
  EXPECT_EQ(vmem_get("host_budget", value, sizeof value), 0);
  EXPECT_STREQ(value, "67108864");
  EXPECT_EQ(vmem_get("host_budget", value, 3), -ERANGE);
  EXPECT_EQ(vmem_get("nothing", value, sizeof value), -ENOENT);
  vmem::region region(1 << 20, VMEM_HOST_ONLY);
  EXPECT_EQ(vmem_set("io_depth", "4"), -EBUSY) << "not while regions exist";
  EXPECT_EQ(vmem_set("host_budget", "128M"), 0) << "live";
  EXPECT_EQ(vmem::stats().host_budget, uint64_t{128} << 20);
}

TEST_F(Api, BudgetBelowFourBlocksIsRefusedWithTheNumbers) {
  ASSERT_EQ(vmem_set("block_size", "32MiB"), 0);
  void* p = nullptr;
  EXPECT_EQ(vmem_alloc(&p, size_t{1} << 30, VMEM_HOST_ONLY), -ENOMEM);
  expect_words("32 MiB");
  expect_words("64 MiB");
}

TEST_F(Api, ABudgetOfDevicesMayBeSetWhereThereAreNone) {
  ASSERT_EQ(vmem_set("device", "none"), 0);
  configure({});
  vmem::region region(1 << 20);
  EXPECT_EQ(vmem_set("device_budget", "64MiB"), 0) << vmem_last_error();
  char value[64];
  ASSERT_EQ(vmem_get("device_budget", value, sizeof value), 0);
  EXPECT_STREQ(value, "67108864");
  EXPECT_EQ(vmem_set("device_budget", "1MiB"), -EINVAL);
}

TEST_F(Api, ARefusedValueLeavesTheSettingAsItWas) {
  ASSERT_EQ(vmem_set("device", "sim"), 0);
  configure({});
  {
    vmem::region region(4 << 20);
    ASSERT_EQ(vmem_acquire(region.data(), region.size(), VMEM_READ, 0, nullptr), 0) << vmem_last_error();
    ASSERT_EQ(vmem_release(region.data(), region.size(), nullptr), 0) << vmem_last_error();
    char before[64], after[64];
    ASSERT_EQ(vmem_get("device_budget", before, sizeof before), 0);
    EXPECT_EQ(vmem_set("device_budget", "1024T"), -ENOMEM) << "no device has that much";
    ASSERT_EQ(vmem_get("device_budget", after, sizeof after), 0);
    EXPECT_STREQ(before, after);
    EXPECT_EQ(vmem_set("device_budget", "1024TX"), -EINVAL);
    ASSERT_EQ(vmem_get("device_budget", after, sizeof after), 0);
    EXPECT_STREQ(before, after);
  }
  vmem_shutdown();
  ASSERT_EQ(vmem_set("device", "auto"), 0);
}

TEST_F(Api, ABudgetBelowLiveLeasesIsRefused) {
  vmem::region region(32 << 20, VMEM_HOST_ONLY);
  vmem::lease lease(region.data(), 32 << 20, VMEM_READ);
  EXPECT_EQ(vmem_set("host_budget", "16MiB"), -EBUSY);
  expect_words("live leases");
  EXPECT_EQ(vmem::stats().host_budget, uint64_t{64} << 20) << "nothing changed";
}

TEST_F(Api, StructsMayBeOfAnotherVersion) {
  struct vmem_stats s;
  memset(&s, 0x5a, sizeof s);
  s.size = 2 * sizeof(uint64_t);
  EXPECT_EQ(vmem_stats(&s), 0);
  EXPECT_EQ(s.size, 2 * sizeof(uint64_t));
  EXPECT_EQ(s.fault_ns_total, 0x5a5a5a5a5a5a5a5au) << "fields beyond the caller's size are not written";
  s.size = 0;
  EXPECT_EQ(vmem_stats(&s), -EINVAL);
  EXPECT_EQ(vmem_stats(nullptr), -EINVAL);
}

TEST_F(Api, NamesAppearInMessages) {
  vmem::region region(1 << 20, VMEM_HOST_ONLY);
  region.name("weights");
  EXPECT_EQ(vmem_sync(region.data(), 2 << 20), -EINVAL);
  expect_words("weights");
  EXPECT_EQ(vmem_name(region.data(), nullptr), -EINVAL);
}

TEST_F(Api, ErrorsHaveStrings) {
  EXPECT_STREQ(vmem_strerror(0), "success");
  EXPECT_STREQ(vmem_strerror(-ENOSPC), vmem_strerror(ENOSPC));
  EXPECT_STREQ(vmem_strerror(-999999), "unknown error");
}

TEST_F(Api, LastErrorBelongsToTheThread) {
  EXPECT_EQ(vmem_set("host_budget", "bad"), -EINVAL);
  const std::string mine = vmem_last_error();
  std::string theirs = "unset";
  std::thread([&] { theirs = vmem_last_error(); }).join();
  EXPECT_EQ(theirs, "");
  EXPECT_EQ(mine, vmem_last_error());
}

TEST_F(Api, ArgumentsAndResultsMayLieInARegionThatIsAbsent) {
  vmem::region region(8 << 20, VMEM_HOST_ONLY);
  vmem::region table(4 << 20, VMEM_HOST_ONLY);
  auto* ranges = static_cast<vmem_range*>(table.data());
  ranges[0] = {region.data(), 4096, VMEM_READ, 0};
  auto* residency = reinterpret_cast<vmem_residency*>(static_cast<char*>(table.data()) + (2 << 20));
  residency->size = sizeof *residency;
  table.evict();
  ASSERT_EQ(vmem_acquire_ranges(ranges, 1, VMEM_HOST, nullptr), 0) << vmem_last_error();
  table.evict();
  ASSERT_EQ(vmem_release_ranges(ranges, 1, nullptr), 0) << vmem_last_error();
  table.evict();
  ASSERT_EQ(vmem_query(region.data(), region.size(), residency), 0);
  EXPECT_EQ(residency->zero_bytes + residency->ssd_bytes + residency->host_bytes, region.size());
}

TEST_F(Api, ABadEnvironmentVariableStopsInitWithNameValueAndForm) {
  vmem_shutdown();
  const pid_t child =
      systest::start_child("ApiChild.DISABLED_InitPrintsItsError", {{"VMEM_IO_DEPTH", "lots"}, {"LD_PRELOAD", ""}});
  EXPECT_EQ(systest::wait_for_child(child, 60), 0);
}

// Run by the test above in its own process.
TEST(ApiChild, DISABLED_InitPrintsItsError) {
  ASSERT_EQ(vmem_init(), -EINVAL);
  const std::string words = vmem_last_error();
  EXPECT_NE(words.find("VMEM_IO_DEPTH"), std::string::npos) << words;
  EXPECT_NE(words.find("lots"), std::string::npos) << words;
  EXPECT_NE(words.find("1 to 1024"), std::string::npos) << words;
  EXPECT_EQ(vmem_init(), -EINVAL) << "again until it is mended";
  setenv("VMEM_IO_DEPTH", "8", 1);
  EXPECT_EQ(vmem_init(), 0) << vmem_last_error();
}

// libnuma would print unreadable input unescaped.
TEST_F(Api, NodesThatAreNoListOfNumbersAreRefusedAndNobodyPrintsThemToATerminal) {
  vmem_shutdown();
  for (const char* nodes : {"\033]0;owned\007\xe2\x80\xae", "0\n1", "file:/etc/passwd", "netdev:lo", "nodes"}) {
    ASSERT_EQ(vmem_set("numa_nodes", nodes), 0);
    testing::internal::CaptureStderr();
    EXPECT_EQ(vmem_init(), -EINVAL) << nodes;
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
    const std::string words = vmem_last_error();
    EXPECT_NE(words.find("give nodes of this machine"), std::string::npos) << words;
    EXPECT_EQ(words.find_first_of("\033\007\n"), std::string::npos) << words;
  }
  ASSERT_EQ(vmem_set("numa_nodes", "all"), 0);
  EXPECT_EQ(vmem_init(), 0) << vmem_last_error();
}

TEST_F(Api, AForkedChildHasNoRegionOfItsParentAndThatGoesOn) {
  vmem::region region(8 << 20, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  for (size_t i = 0; i < words.size(); ++i) words[i] = stamp(i, 1);
  region.evict();
  EXPECT_EQ(systest::status_of_fork([&] {
              const bool refused = vmem_free(region.data()) == -ECHILD && vmem_sync(region.data(), 4096) == -ECHILD;
              // The child has no mapping there: a system call fails with EFAULT.
              const int fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
              int pipes[2];
              const bool no_mapping = pipe(pipes) == 0 && write(pipes[1], region.data(), 1) == -1 && errno == EFAULT;
              close(fd);
              return refused && no_mapping ? 0 : 1;
            }),
            0);
  for (size_t i = 0; i < words.size(); ++i) ASSERT_EQ(words[i], stamp(i, 1));
}

TEST_F(Api, ADataLoaderThatForksWorkersWhileBlocksMoveHarmsNothing) {
  vmem::region region(256 << 20, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (size_t i = 0; i < words.size(); i += 64) words[i] = stamp(i, 4);
    stop = true;
  });
  int forks = 0;
  while (!stop || forks < 4) {
    const int status = systest::wait_for_child(systest::fork_child([] { return 7; }), 60);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
    ++forks;
    usleep(2000);
  }
  writer.join();
  for (size_t i = 0; i < words.size(); i += 64) ASSERT_EQ(words[i], stamp(i, 4));
}

// Frees an object that outlives the library: the call starts nothing.
TEST_F(Api, WhatIsFreedAfterShutdownStartsNothing) {
  if (IsSkipped()) return;
  void* r = nullptr;
  ASSERT_EQ(vmem_alloc(&r, 1 << 20, 0), 0) << vmem_last_error();
  vmem_shutdown();
  const auto threads = [] {
    size_t n = 0;
    for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task")) ++n;
    return n;
  };
  const size_t before = threads();
  EXPECT_EQ(vmem_free(r), -EINVAL);
  EXPECT_LE(threads(), before);
}

TEST_F(Api, ShutdownFreesEverythingAndTheNextCallStartsAgain) {
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, 8 << 20, VMEM_HOST_ONLY), 0);
  memset(p, 1, 8 << 20);
  ASSERT_EQ(vmem_acquire(p, 4096, VMEM_READ, VMEM_HOST, nullptr), 0);
  vmem_shutdown();
  vmem_shutdown();
  EXPECT_EQ(vmem_free(p), -EINVAL) << "it went with the shutdown";
  EXPECT_EQ(vmem::stats().regions, 0u);
  vmem::region again(8 << 20, VMEM_HOST_ONLY);
  EXPECT_EQ(again.view<unsigned char>()[5], 0);
}

}  // namespace
