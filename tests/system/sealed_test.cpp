// Regions that the program seals (mseal, Linux 6.10): they stay, can be used, and end with the
// process.
#include <sys/mman.h>
#include <sys/syscall.h>

#include <cerrno>
#include <span>
#include <string>

#include "core/process/guarded_read.h"
#include "support.h"

#ifndef SYS_mseal
#define SYS_mseal 462
#endif

namespace {

using systest::stamp;
using systest::SystemTest;

constexpr size_t kMiB = size_t{1} << 20, kSize = 32 * kMiB;

// 0: the whole region, 1: its first half, 2: every other page
struct Way {
  const char* block;
  int part;
  bool read_only;
};

void PrintTo(const Way& way, std::ostream* out) {
  *out << "blocks of " << way.block << ", part " << way.part << (way.read_only ? ", read-only" : "");
}

class Sealed : public SystemTest, public testing::WithParamInterface<Way> {
 protected:
  static void fill(std::span<uint64_t> words, uint64_t generation) {
    for (size_t i = 0; i < words.size(); ++i) words[i] = stamp(i, generation);
  }
  static size_t wrong(std::span<const uint64_t> words, uint64_t generation) {
    size_t n = 0;
    for (size_t i = 0; i < words.size(); ++i) n += words[i] != stamp(i, generation);
    return n;
  }
  // Returns false if this kernel cannot seal.
  static bool seal(std::byte* at, const Way& way) {
    const size_t step = way.part == 2 ? size_t{1} << 20 : kSize, size = way.part == 0   ? kSize
                                                                        : way.part == 1 ? kSize / 2
                                                                                        : 4096;
    for (size_t i = 0; i < kSize; i += step) {
      if (way.read_only && mprotect(at + i, size, PROT_READ) != 0) return false;
      if (syscall(SYS_mseal, at + i, size, 0) != 0) return false;
    }
    return true;
  }
};

TEST_P(Sealed, ARegionStaysAndCanBeUsed) {
  const Way& way = GetParam();
  configure({{"host_budget", "64MiB"}, {"block_size", way.block}});
  if (IsSkipped()) return;
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, kSize, VMEM_HOST_ONLY), 0) << vmem_last_error();
  auto* const at = static_cast<std::byte*>(p);
  const std::span<uint64_t> words(static_cast<uint64_t*>(p), kSize / 8);
  fill(words, 1);
  if (!seal(at, way)) {
    vmem_free(p);
    GTEST_SKIP() << "mseal: " << strerror(errno);
  }
  if (!vmem::core::MappingQuery().sealed(p, kSize)) GTEST_SKIP() << "this kernel does not tell what is sealed";
  EXPECT_EQ(wrong(words, 1), 0u);
  if (!way.read_only) fill(words, 2);
  const uint64_t now = way.read_only ? 1 : 2;
  const int evicted = vmem_evict(p, kSize, VMEM_SSD);
  if (!way.read_only) {
    EXPECT_EQ(evicted, 0) << vmem_last_error();
    EXPECT_EQ(vmem_sync(p, kSize), 0) << vmem_last_error();
  }
  EXPECT_EQ(wrong(words, now), 0u) << "whether it could leave or not";
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(vmem_free(p), -EPERM);
    EXPECT_NE(std::string(vmem_last_error()).find("mseal"), std::string::npos) << vmem_last_error();
    EXPECT_EQ(vmem::stats().regions, 1u) << "it is not forgotten";
    EXPECT_EQ(wrong(words, now), 0u);
  }
  if (!way.read_only) {
    EXPECT_EQ(vmem_advise(p, kSize, VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error();
    EXPECT_EQ(words[0], 0u);
  }
  vmem::region other(kSize, VMEM_HOST_ONLY);
  fill(other.view<uint64_t>(), 5);
  EXPECT_EQ(wrong(other.view<uint64_t>(), 5), 0u);
  other = {};
  vmem_shutdown();
  uint64_t sum = 0;
  if (!way.read_only) {
    EXPECT_TRUE(systest::raises_sigbus([&] { sum += words[0]; })) << "and hangs nobody";
  }
  ASSERT_EQ(vmem_init(), 0) << vmem_last_error();
  vmem::region next(kSize, VMEM_HOST_ONLY);
  fill(next.view<uint64_t>(), 6);
  EXPECT_EQ(wrong(next.view<uint64_t>(), 6), 0u);
}

INSTANTIATE_TEST_SUITE_P(Ways, Sealed,
                         testing::Values(Way{"64KiB", 0, false}, Way{"2MiB", 0, false}, Way{"64KiB", 1, false},
                                         Way{"2MiB", 2, false}, Way{"64KiB", 0, true}, Way{"2MiB", 0, true},
                                         Way{"64KiB", 1, true}, Way{"64KiB", 2, true}, Way{"2MiB", 2, true}));

}  // namespace
