// Pages whose rights the program changes: guard pages, a collector's barriers, holes.
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <span>
#include <string>
#include <thread>

#include "child.h"
#include "support.h"

namespace {

using systest::stamp;
using systest::SystemTest;

constexpr size_t kMiB = size_t{1} << 20, kPage = 4096, kWords = kPage / sizeof(uint64_t);

struct Way {
  const char *name, *block, *compression, *encryption;
};

void PrintTo(const Way& way, std::ostream* out) {
  *out << way.name;
}

// Blocks of 2 MiB are moved, where the kernel can, and others copied.
class Rights : public SystemTest, public testing::WithParamInterface<Way> {
 protected:
  void begin(const char* budget = "64MiB") {
    const Way& way = GetParam();
    configure({{"host_budget", budget},
               {"block_size", way.block},
               {"compression", way.compression},
               {"encryption", way.encryption}});
  }
};

// A word of each page.
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

// A collector's barrier comes and goes while blocks leave, at whatever point of that.
TEST_P(Rights, ABarrierMayComeAtAnyMoment) {
  begin();
  if (IsSkipped()) return;
  constexpr size_t kSize = 8 * kMiB;
  vmem::region region(kSize, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  char* const at = static_cast<char*>(region.data());
  fill(words, 1);
  // One change has to have been seen (docs/reliability.md, "Not promised").
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

// Not promised, but no thread of the library dies of it, and none hangs.
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
  // Nobody else may get the addresses before the region is freed.
  ASSERT_NE(mmap(at + 5 * kPage, kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), MAP_FAILED);
}

// Without /proc nobody can read it: it stays, whoever asks is told, and it is written when the right is back.
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
  EXPECT_EQ(vmem_evict(at, kMiB, VMEM_SSD), -EFAULT);
  EXPECT_EQ(region.query().host_bytes, size_t{64} << 10) << "the others have left";
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
                                         Way{"encrypted", "64KiB", "none", "on"}));

}  // namespace
