// The host budget: a freed region returns its part, and the call refuses what does not fit, not a
// later touch.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "support.h"

namespace {

using systest::stamp;
using systest::SystemTest;

constexpr size_t kMiB = 1 << 20;

uint64_t held() {
  struct vmem_stats stats = {};
  stats.size = sizeof(stats);
  EXPECT_EQ(vmem_stats(&stats), 0);
  return stats.host_bytes;
}

class Budget : public SystemTest {};

// A budget beyond the machine's memory: a warning must come before the system swaps or ends the
// process.
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

// Single bytes in a region whose tables alone exceed the budget. Accesses end with SIGBUS at once
// and the log has the numbers. The stored data is right, and another region is not affected.
TEST_F(Budget, SparseDataWhoseTablesAreLargerThanTheBudgetIsRefusedWithTheNumbers) {
  constexpr size_t kBlock = 4096, kStride = 128 * kBlock, kPages = 16384;
  configure({{"host_budget", "16MiB"}, {"block_size", "4KiB"}, {"fault_timeout_ms", "600000"}});
  if (IsSkipped()) return;
  systest::LogLines lines;
  vmem::region sparse(kPages * kStride, VMEM_HOST_ONLY), other(8 << 20, VMEM_HOST_ONLY);
  const auto word = [&](size_t n) {
    return reinterpret_cast<volatile uint64_t*>(static_cast<char*>(sparse.data()) + n * kStride);
  };
  auto words = other.view<uint64_t>();
  for (size_t i = 0; i < words.size(); i += 512) words[i] = stamp(i, 1);
  size_t n = 0;
  while (n < kPages && !systest::raises_sigbus([&] { *word(n) = stamp(n, 2); })) ++n;
  ASSERT_GT(n, 2000u);
  ASSERT_LT(n, kPages);
  EXPECT_TRUE(lines.contains("host_budget 16 MiB has no room for more of the tables of blocks"));
  EXPECT_EQ(vmem_acquire(const_cast<uint64_t*>(word(n + 1)), kBlock, VMEM_READ, VMEM_HOST, nullptr), -ENOMEM);
  EXPECT_NE(std::string(vmem_last_error()).find("16 MiB"), std::string::npos) << vmem_last_error();
  for (size_t i = 0; i < words.size(); i += 512) ASSERT_EQ(words[i], stamp(i, 1)) << i;
  for (size_t i = 0; i < n; i += 5) ASSERT_EQ(*word(i), stamp(i, 2)) << i;
  ASSERT_EQ(vmem_set("host_budget", "32MiB"), 0) << vmem_last_error();
  EXPECT_EQ(*word(n), 0u);
}

}  // namespace
