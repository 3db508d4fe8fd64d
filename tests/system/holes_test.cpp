// Files with holes: a hole is not read, not read ahead, and not written. The next fault sees data
// that another program writes into a hole.
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstring>

#include "store/file.h"
#include "support.h"

namespace systest {
namespace {

constexpr size_t kMiB = size_t{1} << 20, kBlock = 64 << 10;

class Holes : public SystemTest {
 protected:
  // Makes an empty file of that many bytes; skips the test if the library does not trust the file
  // system's report of holes.
  void make(size_t bytes) {
    configure({{"block_size", std::to_string(kBlock)}, {"host_budget", "16MiB"}, {"readahead", "8MiB"}});
    if (IsSkipped()) return;
    ASSERT_EQ(truncate(file_.path().c_str(), static_cast<off_t>(bytes)), 0);
    vmem::store::MappedFile mapped;
    ASSERT_TRUE(vmem::store::open_mapped(file_.path(), false, false, &mapped).ok());
    const bool known = vmem::store::may_have_holes(mapped);
    vmem::store::close_mapped(&mapped);
    if (!known) GTEST_SKIP() << "this file system does not tell holes";
  }
  blkcnt_t allocated() const {
    struct stat st = {};
    EXPECT_EQ(stat(file_.path().c_str(), &st), 0);
    return st.st_blocks;
  }
  TempFile file_;
};

TEST_F(Holes, AWordInEachBlockOfANewFileReadsNothing) {
  constexpr size_t kBytes = 64 * kMiB;
  make(kBytes);
  if (IsSkipped()) return;
  vmem::region region(kBytes, file_.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  const auto words = region.view<uint64_t>();
  const auto before = vmem::stats();
  for (size_t at = 0; at < kBytes / kBlock; ++at) words[at * (kBlock / 8) + 3] = stamp(at, 1);
  region.sync();
  const auto after = vmem::stats();
  EXPECT_EQ(after.read_bytes - before.read_bytes, 0u);
  EXPECT_EQ(after.prefetch_wasted - before.prefetch_wasted, 0u);
  region.free();
  const auto bytes = file_.read();
  ASSERT_EQ(bytes.size(), kBytes);
  for (size_t i = 0; i < kBytes / 8; ++i) {
    uint64_t word;
    memcpy(&word, &bytes[i * 8], 8);
    ASSERT_EQ(word, i % (kBlock / 8) == 3 ? stamp(i / (kBlock / 8), 1) : 0) << i;
  }
}

// Data that was written, evicted and read again is no hole any more.
TEST_F(Holes, WhatWasWrittenComesBack) {
  constexpr size_t kBytes = 64 * kMiB;
  make(kBytes);
  if (IsSkipped()) return;
  vmem::region region(kBytes, file_.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  const auto words = region.view<uint64_t>();
  for (uint64_t round = 1; round <= 3; ++round) {
    for (size_t at = 0; at < kBytes / kBlock; ++at) {
      if (round > 1 && at % 2 == 0) {
        ASSERT_EQ(words[at * (kBlock / 8)], stamp(at, round - 1)) << at;
      }
      if (at % 2 == 0) words[at * (kBlock / 8)] = stamp(at, round);
      ASSERT_EQ(words[at * (kBlock / 8) + 1], 0u) << at;
    }
  }
  region.free();
}

TEST_F(Holes, ReadingThemAllocatesNothing) {
  constexpr size_t kBytes = 32 * kMiB + 5000;
  make(kBytes);
  if (IsSkipped()) return;
  const blkcnt_t before = allocated();
  vmem::region region(kBytes, file_.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  const auto bytes = region.view<unsigned char>();
  for (size_t i = 0; i < kBytes; i += 1000) ASSERT_EQ(bytes[i], 0) << i;
  ASSERT_EQ(bytes[kBytes - 1], 0);
  region.free();
  EXPECT_EQ(allocated(), before);
}

// Another program writes into a hole, after the blocks beside it were found to be one. The next
// fault sees the data.
TEST_F(Holes, WhatSomebodyElseWritesIntoAHoleIsSeen) {
  constexpr size_t kBytes = 8 * kMiB;
  make(kBytes);
  if (IsSkipped()) return;
  const int fd = open(file_.path().c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  vmem::region region(kBytes, file_.path(), 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
  const auto words = region.view<uint64_t>();
  const auto word = [&](size_t block) { return words[block * (kBlock / 8) + 1]; };
  const auto at = [](size_t block) { return static_cast<off_t>(block * kBlock + 8); };
  for (size_t block = 0; block < 8; ++block) ASSERT_EQ(word(block), 0u);

  uint64_t value = 41;  // through the page cache
  ASSERT_EQ(pwrite(fd, &value, sizeof value, at(80)), 8);
  EXPECT_EQ(word(80), 41u);

  // Write into preallocated blocks, which still count as a hole until then.
  if (fallocate(fd, 0, 90 * kBlock, kBlock) == 0) {
    value = 42;
    ASSERT_EQ(pwrite(fd, &value, sizeof value, at(90)), 8);
    EXPECT_EQ(word(90), 42u);
  }

  void* map = mmap(nullptr, kBlock, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 100 * kBlock);
  ASSERT_NE(map, MAP_FAILED);
  static_cast<volatile uint64_t*>(map)[1] = 43;
  EXPECT_EQ(word(100), 43u);
  munmap(map, kBlock);

  close(fd);
  EXPECT_EQ(word(101), 0u);
  EXPECT_EQ(word(127), 0u);
}

TEST_F(Holes, DataBetweenHolesIsRead) {
  constexpr size_t kBytes = 16 * kMiB;
  make(kBytes);
  if (IsSkipped()) return;
  const int fd = open(file_.path().c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  // One page in every third block, at its end.
  for (size_t block = 0; block < kBytes / kBlock; block += 3) {
    const uint64_t value = stamp(block, 5);
    ASSERT_EQ(pwrite(fd, &value, sizeof value, static_cast<off_t>((block + 1) * kBlock - 8)), 8);
  }
  close(fd);
  vmem::region region(kBytes - kBlock / 2, file_.path(), kBlock / 2, VMEM_MAP_READ | VMEM_HOST_ONLY);
  const auto words = region.view<uint64_t>();
  for (size_t block = 0; block < kBytes / kBlock; ++block) {
    const size_t i = ((block + 1) * kBlock - 8 - kBlock / 2) / 8;
    EXPECT_EQ(words[i], block % 3 == 0 ? stamp(block, 5) : 0) << block;
    if (i >= 100) {
      EXPECT_EQ(words[i - 100], 0u) << block;
    }
  }
}

}  // namespace
}  // namespace systest
