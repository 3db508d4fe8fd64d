// Pages whose access rights the program changes: guard pages, a collector's barriers, holes.
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "child.h"
#include "core/process/guarded_read.h"
#include "core/step.h"
#include "support.h"

namespace {

using systest::stamp;
using systest::SystemTest;

constexpr size_t kMiB = size_t{1} << 20, kPage = 4096, kWords = kPage / sizeof(uint64_t);

struct Way {
  const char *name, *block, *compression, *encryption, *transfer = "auto";
};

void PrintTo(const Way& way, std::ostream* out) {
  *out << way.name;
}

// Blocks of 2 MiB are moved if the kernel can; others are copied.
class Rights : public SystemTest, public testing::WithParamInterface<Way> {
 protected:
  void begin(const char* budget = "64MiB") {
    const Way& way = GetParam();
    configure({{"host_budget", budget},
               {"block_size", way.block},
               {"compression", way.compression},
               {"encryption", way.encryption},
               {"transfer", way.transfer}});
  }
};

// Fills one word of each page.
void fill(std::span<uint64_t> words, uint64_t generation) {
  for (size_t i = 0; i < words.size(); i += kWords) words[i] = stamp(i, generation);
}
size_t wrong(std::span<const uint64_t> words, uint64_t generation) {
  size_t n = 0;
  for (size_t i = 0; i < words.size(); i += kWords) n += words[i] != stamp(i, generation);
  return n;
}

TEST_P(Rights, WhatTheProgramMayNotReadIsWrittenAndComesBack) {
  begin();
  if (IsSkipped()) return;
  for (const int rights : {PROT_NONE, PROT_READ}) {
    SCOPED_TRACE(rights);
    vmem::region region(8 * kMiB, VMEM_HOST_ONLY);
    auto words = region.view<uint64_t>();
    char* const at = static_cast<char*>(region.data());
    fill(words, 1);
    ASSERT_EQ(mprotect(at + 5 * kPage, 2 * kPage, rights), 0);
    ASSERT_EQ(mprotect(at + 5 * kMiB, kPage, rights), 0);
    EXPECT_EQ(vmem_sync(at, region.size()), 0) << vmem_last_error();
    EXPECT_EQ(vmem_evict(at, region.size(), VMEM_SSD), 0) << vmem_last_error();
    EXPECT_EQ(region.query().host_bytes, 0u);
    EXPECT_EQ(words[0], stamp(0, 1)) << "its block comes back beside a page without rights";
    EXPECT_EQ(vmem_evict(at, region.size(), VMEM_SSD), 0) << vmem_last_error();
    ASSERT_EQ(mprotect(at, region.size(), PROT_READ | PROT_WRITE), 0);
    EXPECT_EQ(wrong(words, 1), 0u);
    fill(words, 2);
    EXPECT_EQ(vmem_evict(at, region.size(), VMEM_SSD), 0) << vmem_last_error();
    EXPECT_EQ(wrong(words, 2), 0u);
  }
}

TEST_P(Rights, ASyncOfAPageThatTheProgramMayNotReadIsInTheFile) {
  begin();
  if (IsSkipped()) return;
  systest::TempFile file(8 * kMiB, 3);
  vmem::region region(8 * kMiB, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  char* const at = static_cast<char*>(region.data());
  fill(words, 1);
  for (size_t i = 0; i < 8; ++i) ASSERT_EQ(mprotect(at + i * kMiB + 7 * kPage, kPage, PROT_NONE), 0);
  ASSERT_EQ(vmem_sync(at, region.size()), 0) << vmem_last_error();
  const auto bytes = file.read();
  EXPECT_EQ(wrong({reinterpret_cast<const uint64_t*>(bytes.data()), bytes.size() / sizeof(uint64_t)}, 1), 0u);
  ASSERT_EQ(vmem_evict(at, region.size(), VMEM_SSD), 0) << vmem_last_error();
  ASSERT_EQ(mprotect(at, region.size(), PROT_READ | PROT_WRITE), 0);
  EXPECT_EQ(wrong(words, 1), 0u);
}

TEST_P(Rights, GuardPagesDoNotKeepMemory) {
  begin("32MiB");
  if (IsSkipped()) return;
  constexpr size_t kSize = 64 * kMiB, kStep = 2 * kMiB;
  vmem::region region(kSize, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  char* const at = static_cast<char*>(region.data());
  for (size_t from = 0; from < kSize; from += kStep) {
    fill(words.subspan(from / 8, kStep / 8), from);
    ASSERT_EQ(mprotect(at + from + kPage, kPage, PROT_NONE), 0) << from;
  }
  EXPECT_LE(region.query().host_bytes, size_t{32} << 20);
  for (size_t from = 0; from < kSize; from += kStep) {
    ASSERT_EQ(mprotect(at + from + kPage, kPage, PROT_READ | PROT_WRITE), 0) << from;
    EXPECT_EQ(wrong(words.subspan(from / 8, kStep / 8), from), 0u) << from;
  }
}

// Each block is written from a copy, and there is no frame for one.
TEST_P(Rights, GuardPagesInAllOfAFullBudgetLeaveWhenAsked) {
  begin("32MiB");
  if (IsSkipped()) return;
  constexpr size_t kStep = 64 << 10;
  vmem::region region(64 * kMiB, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  char* const at = static_cast<char*>(region.data());
  for (size_t from = 0; from < region.size(); from += kStep) {
    fill(words.subspan(from / 8, kStep / 8), from);
    ASSERT_EQ(mprotect(at + from + kPage, kPage, PROT_NONE), 0) << from;
  }
  EXPECT_EQ(vmem_sync(at, region.size()), 0) << vmem_last_error();
  for (size_t from = 0; from < region.size(); from += kStep) words[from / 8] = 1;
  EXPECT_EQ(vmem_evict(at, region.size(), VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(region.query().host_bytes, 0u);
  ASSERT_EQ(mprotect(at, region.size(), PROT_READ | PROT_WRITE), 0);
  for (size_t from = 0; from < region.size(); from += kStep) {
    EXPECT_EQ(std::exchange(words[from / 8], stamp(0, from)), 1u) << from;
    EXPECT_EQ(wrong(words.subspan(from / 8, kStep / 8), from), 0u) << from;
  }
}

// MADV_GUARD_INSTALL, on kernels that report such pages (Linux 6.15; PAGEMAP_SCAN does since 6.16).
// Guard pages do not change a mapping.
constexpr int kGuard = 102, kUnguard = 103;

bool has_guards() {
  void* const page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  uint64_t state = 0;  // bit 58 of the page map: since Linux 6.15
  const int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  const bool can =
      madvise(page, kPage, kGuard) == 0 &&
      pread(map, &state, sizeof state, static_cast<off_t>(reinterpret_cast<uintptr_t>(page) / kPage * 8)) == 8 &&
      (state >> 58 & 1) != 0;
  close(map);
  munmap(page, kPage);
  return can;
}

TEST_P(Rights, GuardPagesHaveNoContentsAndTakeNoneFromOthers) {
  if (!has_guards()) GTEST_SKIP() << "this kernel has no guard pages, or does not tell";
  begin();
  if (IsSkipped()) return;
  for (const bool seen : {false, true}) {  // whether rights of the region have been changed before
    SCOPED_TRACE(seen);
    vmem::region region(8 * kMiB, VMEM_HOST_ONLY);
    auto words = region.view<uint64_t>();
    char* const at = static_cast<char*>(region.data());
    fill(words, 1);
    if (seen) {
      ASSERT_EQ(mprotect(at + 6 * kMiB, kPage, PROT_READ), 0);
    }
    if (madvise(at + 5 * kPage, 2 * kPage, kGuard) != 0) GTEST_SKIP() << "none in this memory: the module's";
    ASSERT_EQ(madvise(at + 5 * kMiB, kPage, kGuard), 0);
    EXPECT_EQ(vmem_sync(at, region.size()), 0) << vmem_last_error();
    EXPECT_EQ(vmem_evict(at, region.size(), VMEM_SSD), 0) << vmem_last_error();
    EXPECT_EQ(region.query().host_bytes, 0u);
    EXPECT_EQ(words[4 * kWords], stamp(4 * kWords, 1)) << "its block comes back around the guard pages";
    EXPECT_EQ(words[7 * kWords], stamp(7 * kWords, 1));
    EXPECT_EQ(vmem_evict(at, region.size(), VMEM_SSD), 0) << vmem_last_error();
    // They come to an absent block.
    ASSERT_EQ(madvise(at + 3 * kMiB, kPage, kGuard), 0);
    EXPECT_EQ(words[3 * kMiB / 8 + kWords], stamp(3 * kMiB / 8 + kWords, 1));
    char byte = 0;
    EXPECT_EQ(vmem::core::read_guarded_untrapped(&byte, at + 3 * kMiB, 1, vmem::core::Guards::refused), -EFAULT)
        << "it is one still";
    ASSERT_EQ(madvise(at, region.size(), kUnguard), 0);
    if (seen) {
      ASSERT_EQ(mprotect(at, region.size(), PROT_READ | PROT_WRITE), 0);
    }
    for (const size_t page : {size_t{5}, size_t{6}, 5 * kMiB / kPage}) {
      EXPECT_EQ(words[page * kWords], 0u) << page;
      words[page * kWords] = stamp(page * kWords, 1);
    }
    words[3 * kMiB / 8] = stamp(3 * kMiB / 8, 1);
    EXPECT_EQ(wrong(words, 1), 0u);
    EXPECT_EQ(vmem_evict(at, region.size(), VMEM_SSD), 0) << vmem_last_error();
    EXPECT_EQ(wrong(words, 1), 0u);
  }
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

TEST_P(Rights, ASyncBesideGuardPagesIsInTheFile) {
  if (!has_guards()) GTEST_SKIP() << "this kernel has no guard pages, or does not tell";
  begin();
  if (IsSkipped()) return;
  systest::TempFile file(8 * kMiB, 3);
  vmem::region region(8 * kMiB, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  char* const at = static_cast<char*>(region.data());
  fill(words, 1);
  if (madvise(at + 7 * kPage, kPage, kGuard) != 0) GTEST_SKIP() << "none in this memory: the module's";
  ASSERT_EQ(vmem_sync(at, region.size()), 0) << vmem_last_error();
  const auto bytes = file.read();
  EXPECT_EQ(wrong({reinterpret_cast<const uint64_t*>(bytes.data()), bytes.size() / sizeof(uint64_t)}, 1), 1u);
  ASSERT_EQ(vmem_evict(at, region.size(), VMEM_SSD), 0) << vmem_last_error();
  ASSERT_EQ(madvise(at, region.size(), kUnguard), 0);
  EXPECT_EQ(wrong(words, 1), 1u);
}

// A guard page comes at any step of its block's transition: the digest always matches the bytes
// written.
TEST_P(Rights, AGuardPageMayComeAtAnyMoment) {
  if (!has_guards()) GTEST_SKIP() << "this kernel has no guard pages, or does not tell";
  begin();
  if (IsSkipped()) return;
  static std::atomic<char*> base;
  static std::atomic<size_t> next;
  constexpr size_t kSize = 8 * kMiB;
  vmem::region region(kSize, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  char* const at = static_cast<char*>(region.data());
  fill(words, 0);
  // One guard page must have been seen (docs/reliability.md, "Not promised").
  if (madvise(at + kPage, kPage, kGuard) != 0) GTEST_SKIP() << "none in this memory: the module's";
  EXPECT_EQ(vmem_sync(at, kSize), 0) << vmem_last_error();
  ASSERT_EQ(madvise(at + kPage, kPage, kUnguard), 0);
  for (uint64_t turn = 1; turn < 5; ++turn) {
    for (size_t i = 0; i < words.size(); i += kWords) words[i] = stamp(i, turn);
    base = at;
    vmem::core::step_hook = [](const char*) {  // odd pages; every third is removed at once
      char* const page = base + (2 * (next++ * 13 % (kSize / kPage / 2)) + 1) * kPage;
      EXPECT_EQ(madvise(page, kPage, kGuard), 0);
      if (next % 3 != 0) return;
      EXPECT_EQ(madvise(page, kPage, kUnguard), 0);
    };
    EXPECT_EQ(turn % 2 == 0 ? vmem_sync(at, kSize) : vmem_evict(at, kSize, VMEM_SSD), 0) << vmem_last_error();
    vmem::core::step_hook = nullptr;
    EXPECT_EQ(vmem_evict(at, kSize, VMEM_SSD), 0) << vmem_last_error();
    ASSERT_EQ(madvise(at, kSize, kUnguard), 0);
    for (size_t i = 0; i < words.size(); i += kWords) {
      const uint64_t odd = i / kWords % 2;
      ASSERT_TRUE(words[i] == stamp(i, turn) || (odd != 0 && (words[i] == 0 || words[i] == stamp(i, turn - 1)))) << i;
    }
  }
  EXPECT_GT(next, 100u);
  const struct vmem_stats stats = vmem::stats();
  EXPECT_EQ(stats.checksum_errors, 0u);
  EXPECT_EQ(stats.lost_blocks, 0u);
}

// A collector's barrier comes and goes at any moment while blocks leave.
TEST_P(Rights, ABarrierMayComeAtAnyMoment) {
  begin();
  if (IsSkipped()) return;
  constexpr size_t kSize = 8 * kMiB;
  vmem::region region(kSize, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  char* const at = static_cast<char*>(region.data());
  fill(words, 1);
  // One change must have been seen (docs/reliability.md, "Not promised").
  ASSERT_EQ(mprotect(at + kPage, kPage, PROT_NONE), 0);
  EXPECT_EQ(vmem_sync(at, kSize), 0) << vmem_last_error();
  ASSERT_EQ(mprotect(at + kPage, kPage, PROT_READ | PROT_WRITE), 0);
  std::atomic<bool> stop{false};
  std::thread barrier([&] {  // odd pages
    for (size_t i = 0; !stop; ++i) {
      char* const page = at + (2 * (i * 13 % (kSize / kPage / 2)) + 1) * kPage;
      EXPECT_EQ(mprotect(page, kPage, PROT_NONE), 0);
      EXPECT_EQ(mprotect(page, kPage, PROT_READ | PROT_WRITE), 0);
    }
  });
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(1000);
  uint64_t turns = 0;
  for (; std::chrono::steady_clock::now() < until || turns == 0; ++turns) {
    for (size_t i = 0; i < words.size(); i += 2 * kWords) words[i] = stamp(i, turns);
    EXPECT_EQ(vmem_sync(at, kSize), 0) << vmem_last_error();
    for (size_t i = 0; i < words.size(); i += 2 * kWords) words[i] = stamp(i, turns + 1);
    EXPECT_EQ(vmem_evict(at, kSize, VMEM_SSD), 0) << vmem_last_error();
  }
  stop = true;
  barrier.join();
  for (size_t i = 0; i < words.size(); i += kWords) ASSERT_EQ(words[i], stamp(i, i / kWords % 2 == 0 ? turns : 1)) << i;
}

// Not promised, but no thread of the library dies or hangs because of it.
TEST_P(Rights, AHoleInARegionStopsNothingElse) {
  begin();
  if (IsSkipped()) return;
  vmem::region other(4 * kMiB, VMEM_HOST_ONLY), region(8 * kMiB, VMEM_HOST_ONLY);
  auto words = other.view<uint64_t>();
  char* const at = static_cast<char*>(region.data());
  fill(words, 1);
  fill(region.view<uint64_t>(), 1);
  ASSERT_EQ(munmap(at + 5 * kPage, kPage), 0);
  vmem_sync(at, region.size());
  vmem_evict(at, region.size(), VMEM_SSD);
  EXPECT_EQ(vmem_evict(words.data(), other.size(), VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(wrong(words, 1), 0u);
  const auto rest = region.view<uint64_t>();
  for (size_t i = 4 * kMiB / 8; i < rest.size(); i += kWords) EXPECT_EQ(rest[i], stamp(i, 1)) << i;
  // Keep the addresses reserved until the region is freed.
  ASSERT_NE(mmap(at + 5 * kPage, kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), MAP_FAILED);
}

// Without /proc no thread can read the page: the block stays, callers get an error, and it is
// written when the right is restored.
TEST(RightsWithoutProc, WhatNobodyCanReadStaysAndASyncSaysSo) {
  const int status = systest::wait_for_child(
      systest::start_child("RightsChild.DISABLED_HasNoProc", {{"VMEM_BLOCK_SIZE", "64KiB"},
                                                              {"VMEM_HOST_BUDGET", "32MiB"},
                                                              {"VMEM_DEVICE", "none"},
                                                              {"ASAN_OPTIONS", systest::without_leak_check()}}),
      60);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "userfaultfd or chroot is not permitted here";
  EXPECT_EQ(status, 0) << (status == -1 ? "hung" : "");
}

TEST(RightsChild, DISABLED_HasNoProc) {
  if (vmem_init() != 0) _exit(77);
  systest::TempFile file(kMiB, 3);
  vmem::region region(kMiB, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  char* const at = static_cast<char*>(region.data());
  fill(words, 1);
  const int root = open("/", O_PATH | O_CLOEXEC);
  std::string empty = systest::temp_folder() + "/vmem-empty.XXXXXX";
  ASSERT_NE(mkdtemp(empty.data()), nullptr);
  if (chroot(empty.c_str()) != 0) _exit(rmdir(empty.c_str()) == 0 ? 77 : 98);
  ASSERT_EQ(mprotect(at + kPage, kPage, PROT_NONE), 0);
  EXPECT_EQ(vmem_sync(at, kMiB), -EFAULT);
  EXPECT_NE(std::string(vmem_last_error()).find("mprotect"), std::string::npos) << vmem_last_error();
  // If the kernel moves pages, the block leaves with them, and can be read then.
  const int rc = vmem_evict(at, kMiB, VMEM_SSD);
  EXPECT_TRUE(rc == 0 || rc == -EFAULT) << rc << ' ' << vmem_last_error();
  EXPECT_EQ(region.query().host_bytes, rc == 0 ? 0 : size_t{64} << 10) << "the others have left";
  ASSERT_EQ(mprotect(at + kPage, kPage, PROT_READ | PROT_WRITE), 0);
  EXPECT_EQ(vmem_sync(at, kMiB), 0) << vmem_last_error();
  EXPECT_EQ(vmem_evict(at, kMiB, VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(wrong(words, 1), 0u);
  ASSERT_EQ(fchdir(root) + chroot("."), 0);
  EXPECT_EQ(rmdir(empty.c_str()), 0);
  const auto bytes = file.read();
  EXPECT_EQ(wrong({reinterpret_cast<const uint64_t*>(bytes.data()), bytes.size() / sizeof(uint64_t)}, 1), 0u);
}

INSTANTIATE_TEST_SUITE_P(Ways, Rights,
                         testing::Values(Way{"moved", "2MiB", "none", "off"}, Way{"copied", "64KiB", "none", "off"},
                                         Way{"pages", "4KiB", "none", "off"}, Way{"compressed", "64KiB", "lz4", "off"},
                                         Way{"moved, compressed", "2MiB", "lz4", "off"},
                                         Way{"encrypted", "64KiB", "none", "on"},
                                         Way{"all copied", "2MiB", "none", "off", "copy"}));

}  // namespace
