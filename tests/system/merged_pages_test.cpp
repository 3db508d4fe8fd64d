// A process whose equal pages the kernel merges (PR_SET_MEMORY_MERGE, a unit's MemoryKSM=yes):
// pages of regions are excluded, since a merged page loses its write protection. Checked by the
// flag "mg" of the mapping.
#include <sys/mman.h>
#include <sys/prctl.h>

#include "mapping_flags.h"
#include "support.h"

#ifndef PR_SET_MEMORY_MERGE
#define PR_SET_MEMORY_MERGE 67
#endif

namespace {

using systest::bytes_with_flag;
using systest::SystemTest;

constexpr size_t kBlock = size_t{2} << 20, kSize = 16 * kBlock;

class MergedPages : public SystemTest, public ::testing::WithParamInterface<const char*> {
 protected:
  void TearDown() override {
    if (!systest::kSanitized) prctl(PR_SET_MEMORY_MERGE, 0, 0, 0, 0);
    SystemTest::TearDown();
    EXPECT_EQ(vmem_set("trap", "auto"), 0);
  }
};

TEST_P(MergedPages, AreNoneOfARegion) {
  configure({{"trap", "uffd"}, {"transfer", GetParam()}, {"host_budget", "32MiB"}});
  if (IsSkipped()) return;
  // To end merging, the kernel walks all addresses, and a sanitizer has terabytes of them.
  if (systest::kSanitized) GTEST_SKIP() << "takes minutes with a sanitizer";
  if (prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0) != 0) GTEST_SKIP() << "this kernel merges no pages of whole processes";
  void* const plain = mmap(nullptr, kBlock, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(plain, MAP_FAILED);
  EXPECT_EQ(bytes_with_flag(plain, kBlock, "mg"), kBlock) << "others are merged";
  munmap(plain, kBlock);
  const vmem::region region(kSize);
  auto* const bytes = static_cast<char*>(region.data());
  EXPECT_EQ(bytes_with_flag(bytes, kSize, "mg"), 0u);
  for (int turn = 0; turn < 2; ++turn) {  // blocks come and go
    for (size_t at = 0; at < kSize; at += kBlock) bytes[at] = 1;
    ASSERT_EQ(vmem_evict(bytes, kSize, VMEM_SSD), 0) << vmem_last_error();
  }
  EXPECT_EQ(bytes_with_flag(bytes, kSize, "mg"), 0u);
}

INSTANTIATE_TEST_SUITE_P(Transfers, MergedPages, ::testing::Values("copy", "auto"));

}  // namespace
