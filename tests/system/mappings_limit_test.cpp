// The process has as many mappings as it may have (vm.max_map_count): every region still works, and
// can be freed.
#include <sys/mman.h>

#include <span>
#include <vector>

#include "child.h"
#include "core/process/mappings.h"
#include "support.h"

namespace {

using systest::stamp;
using systest::SystemTest;

constexpr size_t kMiB = size_t{1} << 20, kSize = 64 * kMiB, kPage = 4096;

// Takes all remaining mappings with adjacent mappings that cannot merge.
class AllMappings {
 public:
  AllMappings() {
    for (;;) {
      void* const at =
          mmap(nullptr, kPage, count_++ % 2 == 0 ? PROT_NONE : PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (at == MAP_FAILED) return;
      taken_.push_back(at);
    }
  }
  ~AllMappings() {
    for (void* at : taken_) munmap(at, kPage);
  }
  AllMappings(const AllMappings&) = delete;
  AllMappings& operator=(const AllMappings&) = delete;

 private:
  std::vector<void*> taken_ = reserved();
  size_t count_ = 0;
  static std::vector<void*> reserved() {
    std::vector<void*> v;
    v.reserve(vmem::core::count_mappings().most + 1);
    return v;
  }
};

class MappingsLimit : public SystemTest, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    if (systest::kSanitized) GTEST_SKIP() << "the sanitizer needs mappings of its own";
  }
  static size_t wrong(std::span<const uint64_t> words, uint64_t generation) {
    size_t n = 0;
    for (size_t i = 0; i < words.size(); i += kPage / 8) n += words[i] != stamp(i, generation);
    return n;
  }
  static void fill(std::span<uint64_t> words, uint64_t generation) {
    for (size_t i = 0; i < words.size(); i += kPage / 8) words[i] = stamp(i, generation);
  }
};

TEST_P(MappingsLimit, RegionsGoOnWithoutAMappingMore) {
  const size_t most = vmem::core::count_mappings().most;
  if (most == 0 || most > (size_t{1} << 18)) GTEST_SKIP() << "vm.max_map_count is " << most;
  configure({{"host_budget", "24MiB"}, {"block_size", GetParam()}});
  if (IsSkipped()) return;
  std::vector<std::span<uint64_t>> regions;
  for (int i = 0; i < 3; ++i) {
    void* p = nullptr;
    ASSERT_EQ(vmem_alloc(&p, kSize, VMEM_HOST_ONLY), 0) << vmem_last_error();
    regions.emplace_back(static_cast<uint64_t*>(p), kSize / 8);
    fill(regions.back(), 1);
    // One page of each block gets its own access rights, so that the block cannot be moved.
    for (size_t at = kPage; at < kSize; at += 2 * kMiB)
      ASSERT_EQ(mprotect(static_cast<std::byte*>(p) + at, kPage, PROT_READ), 0);
    EXPECT_EQ(wrong(regions.back(), 1), 0u);
  }
  {
    const AllMappings all;
    for (const std::span<uint64_t> r : regions) {
      EXPECT_EQ(wrong(r, 1), 0u);
      for (size_t at = 0; at < kSize; at += 2 * kMiB) r[at / 8] = stamp(at / 8, 1);
      EXPECT_EQ(vmem_sync(r.data(), kSize), 0) << vmem_last_error();
      EXPECT_EQ(vmem_evict(r.data(), kSize, VMEM_SSD), 0) << vmem_last_error();
      EXPECT_EQ(wrong(r, 1), 0u);
    }
    EXPECT_EQ(vmem_free(regions[1].data()), 0) << vmem_last_error();
    EXPECT_EQ(vmem_free(regions[0].data()), 0) << vmem_last_error();
    EXPECT_EQ(vmem::stats().regions, 1u);
    EXPECT_EQ(wrong(regions[2], 1), 0u);
  }
  EXPECT_EQ(vmem_free(regions[2].data()), 0) << vmem_last_error();
}

// Dropped pages are first moved to a place where pins would show: that place is reserved in
// advance.
TEST_P(MappingsLimit, BlocksAreDroppedAndLeaveWithoutAMappingMore) {
  const size_t most = vmem::core::count_mappings().most;
  if (most == 0 || most > (size_t{1} << 18)) GTEST_SKIP() << "vm.max_map_count is " << most;
  configure({{"host_budget", "24MiB"}, {"block_size", GetParam()}});
  if (IsSkipped()) return;
  vmem::region region(kSize, VMEM_HOST_ONLY);
  const std::span<uint64_t> words = region.view<uint64_t>();
  fill(words, 1);
  {
    const AllMappings all;
    EXPECT_EQ(vmem_advise(region.data(), kSize, VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error();
    size_t left = 0;
    for (size_t i = 0; i < words.size(); i += kPage / 8) left += words[i] != 0;
    EXPECT_EQ(left, 0u);
    fill(words, 2);
    EXPECT_EQ(wrong(words, 2), 0u);
    EXPECT_EQ(vmem_evict(region.data(), kSize, VMEM_SSD), 0) << vmem_last_error();
    EXPECT_EQ(wrong(words, 2), 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(Blocks, MappingsLimit, testing::Values("64KiB", "2MiB"));

}  // namespace
