// The host budget: what a region needs comes back when it goes, and what does not fit is refused by the call, not by a
// touch.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "support.h"

namespace {

using systest::SystemTest;

constexpr size_t kMiB = 1 << 20;

uint64_t held() {
  struct vmem_stats stats = {};
  stats.size = sizeof(stats);
  EXPECT_EQ(vmem_stats(&stats), 0);
  return stats.host_bytes;
}

class Budget : public SystemTest {};

// More than the machine has: the first sign must not be that the system swaps, or ends the process.
TEST_F(Budget, MoreThanTheMachineCanGiveIsWarnedOfAtStartAndWhenSet) {
  const std::string warning = "is above the memory that the process may use, ";
  systest::LogLines lines;
  configure({{"host_budget", "4TiB"}, {"device", "none"}});
  if (IsSkipped()) return;
  EXPECT_TRUE(lines.contains("host_budget 4 TiB " + warning));
  ASSERT_EQ(vmem_set("host_budget", "64MiB"), 0) << vmem_last_error();
  EXPECT_FALSE(lines.contains("host_budget 64 MiB " + warning));
  ASSERT_EQ(vmem_set("host_budget", "8TiB"), 0) << vmem_last_error();
  EXPECT_TRUE(lines.contains("host_budget 8 TiB " + warning));
}

TEST_F(Budget, RegionsOfEverySizeOneAfterTheOtherFitTheLeastBudget) {
  configure({{"host_budget", "8MiB"}, {"device", "none"}});
  for (const char* block : {"4KiB", "16KiB", "64KiB", "128KiB", "256KiB", "512KiB", "1MiB"}) {
    ASSERT_EQ(vmem_set("block_size", block), 0);
    void* at = nullptr;
    ASSERT_EQ(vmem_alloc(&at, 4 * kMiB, VMEM_HOST_ONLY), 0) << block << ": " << vmem_last_error();
    memset(at, 1, 4 * kMiB);
    EXPECT_EQ(static_cast<char*>(at)[3 * kMiB], 1);
    EXPECT_EQ(vmem_free(at), 0);
  }
}

TEST_F(Budget, WhatLargeBlocksNeededIsNoHindranceAfterwards) {
  configure({{"host_budget", "256MiB"}, {"device", "none"}, {"block_size", "32MiB"}, {"compression", "lz4"}});
  void* at = nullptr;
  ASSERT_EQ(vmem_alloc(&at, 128 * kMiB, VMEM_HOST_ONLY), 0) << vmem_last_error();
  static_cast<char*>(at)[0] = 1;
  ASSERT_EQ(vmem_evict(at, 128 * kMiB, VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(static_cast<char*>(at)[0], 1);
  EXPECT_EQ(vmem_set("host_budget", "64MiB"), -EBUSY);
  EXPECT_NE(std::string(vmem_last_error()).find("32 MiB"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(vmem_free(at), 0);
  EXPECT_EQ(vmem_set("host_budget", "16MiB"), 0) << vmem_last_error();
  EXPECT_LE(held(), 16 * kMiB);
}

}  // namespace
