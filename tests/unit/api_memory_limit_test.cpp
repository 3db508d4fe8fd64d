// How much memory a process may use, read from fake /proc and /sys trees.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "api/memory_limit.h"

namespace {

namespace fs = std::filesystem;
using vmem::api::usable_memory;

constexpr uint64_t kMiB = 1 << 20;

class ApiMemoryLimit : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "vmem-limit.XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root = name;
    put("/proc/meminfo", "MemTotal:       33554432 kB\nMemFree:  1048576 kB\nMemAvailable:   16777216 kB\n");
  }
  void TearDown() override { fs::remove_all(root); }
  void put(const std::string& path, const std::string& text) const {
    fs::create_directories(fs::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  }
  // This process is in a cgroup "job" with that limit, of version 2.
  void put_job(const char* bytes) const {
    put("/proc/self/cgroup", "0::/job\n");
    put("/sys/fs/cgroup/job/memory.max", std::string(bytes) + "\n");
  }
  std::string root;
  static constexpr uint64_t kAvailable = 16384 * kMiB;
};

TEST_F(ApiMemoryLimit, WithoutCgroupsIsWhatIsAvailable) {
  EXPECT_EQ(usable_memory(root), kAvailable);
}

TEST_F(ApiMemoryLimit, AV2LimitCounts) {
  put("/proc/self/cgroup", "0::/user.slice/job\n");
  put("/sys/fs/cgroup/user.slice/job/memory.max", "1073741824\n");
  EXPECT_EQ(usable_memory(root), 1024 * kMiB);
}

TEST_F(ApiMemoryLimit, V2WithoutALimitSaysMax) {
  put("/proc/self/cgroup", "0::/user.slice\n");
  put("/sys/fs/cgroup/user.slice/memory.max", "max\n");
  EXPECT_EQ(usable_memory(root), kAvailable);
}

TEST_F(ApiMemoryLimit, TheSmallestOfNestedV2LimitsCounts) {
  put("/proc/self/cgroup", "0::/a/b/c\n");
  put("/sys/fs/cgroup/a/memory.max", "536870912\n");
  put("/sys/fs/cgroup/a/b/memory.max", "max\n");
  put("/sys/fs/cgroup/a/b/c/memory.max", "2147483648\n");
  EXPECT_EQ(usable_memory(root), 512 * kMiB);
}

TEST_F(ApiMemoryLimit, InsideAContainerTheRootHasTheLimit) {
  put("/proc/self/cgroup", "0::/\n");
  put("/sys/fs/cgroup/memory.max", "268435456\n");
  EXPECT_EQ(usable_memory(root), 256 * kMiB);
}

TEST_F(ApiMemoryLimit, AV1LimitCounts) {
  put("/proc/self/cgroup", "12:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/y\n");
  put("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "805306368\n");
  put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(usable_memory(root), 768 * kMiB);
}

TEST_F(ApiMemoryLimit, V1WithoutALimitSaysANumberNearTwoToThe63) {
  put("/proc/self/cgroup", "4:memory:/\n");
  put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(usable_memory(root), kAvailable);
}

TEST_F(ApiMemoryLimit, InAV1ContainerThatCannotSeeItsOwnFolderTheMountedRootCounts) {
  put("/proc/self/cgroup", "4:memory:/docker/abc\n");
  put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "134217728\n");
  EXPECT_EQ(usable_memory(root), 128 * kMiB);
}

TEST_F(ApiMemoryLimit, OnAHybridSystemBothHierarchiesCount) {
  put("/proc/self/cgroup", "4:memory:/m\n0::/u\n");
  put("/sys/fs/cgroup/memory/m/memory.limit_in_bytes", "1073741824\n");
  put("/sys/fs/cgroup/unified/u/memory.max", "536870912\n");
  EXPECT_EQ(usable_memory(root), 512 * kMiB);
}

TEST_F(ApiMemoryLimit, ALimitAboveWhatIsAvailableChangesNothing) {
  put_job("68719476736");
  EXPECT_EQ(usable_memory(root), kAvailable);
}

TEST_F(ApiMemoryLimit, NeverAnswersNothing) {
  put("/proc/self/cgroup", "garbage\n::\n0::/job\n");
  put("/sys/fs/cgroup/job/memory.max", "0\n");
  EXPECT_EQ(usable_memory(root), 16 * kMiB);
  fs::remove_all(root);
  EXPECT_EQ(usable_memory(root), 1024 * kMiB);
}

TEST_F(ApiMemoryLimit, ABudgetAboveTheLimitIsWarnedOfWithBothNumbers) {
  put_job("268435456");
  EXPECT_EQ(vmem::api::warn_of_budget(256 * kMiB, 0, root), "");
  const std::string line = vmem::api::warn_of_budget(512 * kMiB, 0, root);
  EXPECT_NE(line.find("512 MiB"), std::string::npos) << line;
  EXPECT_NE(line.find("256 MiB"), std::string::npos) << line;
  EXPECT_NE(vmem::api::warn_of_budget(512 * kMiB, 256 * kMiB, root), "") << "the limit counts what is held";
}

TEST_F(ApiMemoryLimit, ABudgetAboveALimitThatIsTooSmallForAnyIsWarnedOf) {
  put_job("14680064");
  const std::string line = vmem::api::warn_of_budget(16 * kMiB, 0, root);
  EXPECT_NE(line.find("14 MiB"), std::string::npos) << line;
  EXPECT_EQ(vmem::api::warn_of_budget(14 * kMiB, 0, root), "");
}

TEST_F(ApiMemoryLimit, WhatIsHeldAlreadyIsNotAmongWhatIsAvailable) {
  EXPECT_NE(vmem::api::warn_of_budget(kAvailable + 256 * kMiB, 0, root), "");
  EXPECT_EQ(vmem::api::warn_of_budget(kAvailable + 256 * kMiB, 256 * kMiB, root), "");
}

TEST_F(ApiMemoryLimit, AV2ThrottleCountsAsALimitAtEveryLevel) {
  put("/proc/self/cgroup", "0::/a/b\n");
  put("/sys/fs/cgroup/a/memory.max", "max\n");
  put("/sys/fs/cgroup/a/memory.high", "402653184\n");
  put("/sys/fs/cgroup/a/b/memory.max", "536870912\n");
  put("/sys/fs/cgroup/a/b/memory.high", "max\n");
  EXPECT_EQ(usable_memory(root), 384 * kMiB);
}

TEST_F(ApiMemoryLimit, TheSmallestOfNestedV1LimitsCounts) {
  put("/proc/self/cgroup", "4:memory:/a/b\n");
  put("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "805306368\n");
  put("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "134217728\n");
  EXPECT_EQ(usable_memory(root), 128 * kMiB);
}

TEST_F(ApiMemoryLimit, AnotherProcessHasLimitsOfItsOwn) {
  put_job("268435456");
  put("/proc/77/cgroup", "0::/other\n");
  put("/sys/fs/cgroup/other/memory.max", "536870912\n");
  EXPECT_EQ(usable_memory(root, 0, "77"), 512 * kMiB);
  EXPECT_EQ(vmem::api::warn_of_budget(512 * kMiB, 0, root, "77"), "");
}

TEST_F(ApiMemoryLimit, ThisMachineHasAnAnswer) {
  EXPECT_GE(usable_memory(""), 16 * kMiB);
}

}  // namespace
