// Regions with a block size of auto, on real traps and files: every byte is right, and few unused
// bytes are read.
#include <numeric>
#include <random>
#include <thread>

#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;

constexpr size_t kKiB = 1024, kMiB = kKiB * 1024, kBlock = 64 * kKiB, kGroup = 2 * kMiB;

class Adapting : public SystemTest {
 protected:
  static void start(const char* budget, const char* readahead) {
    configure({{"block_size", "auto"}, {"host_budget", budget}, {"readahead", readahead}, {"device", "none"}});
  }
  static vmem::region map(const TempFile& file, size_t bytes, unsigned how = VMEM_MAP_READ) {
    return vmem::region(bytes, file.path(), 0, how | VMEM_HOST_ONLY);
  }
};

TEST_F(Adapting, RandomReadsOfAWordReadABlockEach) {
  start("24MiB", "64MiB");
  if (IsSkipped()) return;
  constexpr size_t kBytes = 64 * kMiB, kReads = 6000;
  const TempFile file(kBytes);
  const std::vector<unsigned char> want = TempFile::content(kBytes, 1);
  const vmem::region region = map(file, kBytes);
  const auto bytes = region.view<volatile unsigned char>();
  std::mt19937_64 random(1);
  size_t wrong = 0;
  for (size_t i = 0; i < kReads; ++i) {
    const size_t at = random() % kBytes;
    wrong += bytes[at] != want[at];
  }
  EXPECT_EQ(wrong, 0u);
  const struct vmem_stats s = vmem::stats();
  EXPECT_GT(s.faults, kReads / 4);
  EXPECT_LE(s.read_bytes, s.faults * kBlock * 5 / 4);
}

// Reads each group from its beginning, with the groups in an order that is no stream. Nothing is
// read twice, and most of a group does not need a fault of its own.
TEST_F(Adapting, GroupsThatAreReadThroughAreReadTogether) {
  start("64MiB", "0");
  if (IsSkipped()) return;
  constexpr size_t kBytes = 16 * kMiB, kGroups = kBytes / kGroup;
  const TempFile file(kBytes);
  const std::vector<unsigned char> want = TempFile::content(kBytes, 1);
  const vmem::region region = map(file, kBytes);
  const auto bytes = region.view<unsigned char>();
  for (const size_t group : {5, 2, 7, 0, 3, 6, 1, 4}) {
    for (size_t at = group * kGroup; at < (group + 1) * kGroup; at += kBlock)
      ASSERT_EQ(memcmp(&bytes[at], &want[at], kBlock), 0) << at;
  }
  const struct vmem_stats s = vmem::stats();
  EXPECT_EQ(s.read_bytes, kBytes);
  EXPECT_EQ(s.fault_around_blocks, kGroups * (kGroup / kBlock - 6));
}

// Reads records repeatedly in less memory. Blocks of 2 MiB would read four times as much.
TEST_F(Adapting, RecordsAreReadWithLittleBesides) {
  start("24MiB", "0");
  if (IsSkipped()) return;
  constexpr size_t kBytes = 64 * kMiB, kRecord = 512 * kKiB, kReads = 600;
  const TempFile file(kBytes);
  const std::vector<unsigned char> want = TempFile::content(kBytes, 1);
  const vmem::region region = map(file, kBytes);
  const auto bytes = region.view<unsigned char>();
  std::mt19937_64 random(1);
  for (size_t i = 0; i < kReads; ++i) {
    const size_t at = random() % (kBytes / kRecord) * kRecord;
    ASSERT_EQ(memcmp(&bytes[at], &want[at], kRecord), 0) << at;
  }
  const struct vmem_stats s = vmem::stats();
  EXPECT_LE(s.read_bytes, kReads * kRecord);
}

TEST_F(Adapting, AScanReadsTheFileOnce) {
  start("96MiB", "64MiB");
  if (IsSkipped()) return;
  constexpr size_t kBytes = 64 * kMiB;
  const TempFile file(kBytes);
  const std::vector<unsigned char> want = TempFile::content(kBytes, 1);
  const vmem::region region = map(file, kBytes);
  const auto bytes = region.view<unsigned char>();
  for (size_t at = 0; at < kBytes; at += kBlock) ASSERT_EQ(memcmp(&bytes[at], &want[at], kBlock), 0) << at;
  const struct vmem_stats s = vmem::stats();
  EXPECT_EQ(s.read_bytes, kBytes);
}

// Several threads read and write runs of pages at random places, in less memory than the data
// needs. Each thread owns every fourth page.
TEST_F(Adapting, EveryByteOfWhatThreadsStoreIsThere) {
  for (const char* codec : {"none", "lz4"}) {
    start("16MiB", "8MiB");
    if (IsSkipped()) return;
    constexpr size_t kBytes = 40 * kMiB, kPage = 4096, kPages = kBytes / kPage;
    const size_t runs = systest::kSanitized ? 40 : 150;
    constexpr unsigned kThreads = 4;
    vmem::region region(kBytes,
                        vmem::attributes{.flags = VMEM_HOST_ONLY, .block_size = VMEM_BLOCK_AUTO, .codec = codec});
    auto* const base = static_cast<unsigned char*>(region.data());
    std::vector<uint64_t> version(kPages);
    const auto check = [&](size_t page) {
      const auto* const words = reinterpret_cast<const uint64_t*>(base + page * kPage);
      for (size_t w = 0; w < kPage / sizeof(uint64_t); ++w)
        if (words[w] != (version[page] == 0 ? 0 : systest::stamp(page, version[page]) + w)) return false;
      return true;
    };
    std::atomic<size_t> wrong{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937_64 random(t);
        for (size_t i = 0; i < runs; ++i) {
          const size_t first = random() % kPages, count = 1 + random() % 200;
          const bool back = random() % 4 == 0, stores = random() % 2 == 0;
          for (size_t k = 0; k < count; ++k) {
            const size_t page = back ? first - k : first + k;
            if (page >= kPages || page % kThreads != t) continue;
            if (!check(page)) ++wrong;
            if (!stores) continue;
            ++version[page];
            auto* const words = reinterpret_cast<uint64_t*>(base + page * kPage);
            for (size_t w = 0; w < kPage / sizeof(uint64_t); ++w) words[w] = systest::stamp(page, version[page]) + w;
          }
        }
      });
    }
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(wrong, 0u);
    for (size_t page = 0; page < kPages; ++page) ASSERT_TRUE(check(page)) << page << ' ' << codec;
    region.free();
    EXPECT_EQ(vmem::api::Runtime::get().check(), "");
    vmem_shutdown();
  }
}

TEST_F(Adapting, StoresReachASharedFile) {
  start("8MiB", "8MiB");
  if (IsSkipped()) return;
  constexpr size_t kBytes = 24 * kMiB + 4096 + 12;  // ends inside a block
  const TempFile file(kBytes);
  std::vector<unsigned char> want = TempFile::content(kBytes, 1);
  {
    vmem::region region = map(file, kBytes, VMEM_MAP_SHARED);
    const auto bytes = region.view<unsigned char>();
    for (size_t at = 5; at < kBytes; at += 30 * kKiB) bytes[at] = want[at] = static_cast<unsigned char>(~want[at]);
    EXPECT_EQ(memcmp(bytes.data(), want.data(), kBytes), 0);
    region.free();
  }
  EXPECT_EQ(file.read(), want);
}

TEST_F(Adapting, RegionsOfAnySizeWork) {
  start("64MiB", "8MiB");
  if (IsSkipped()) return;
  for (const size_t size : {size_t{1}, size_t{4096}, 70 * kKiB, kGroup, kGroup + 1, 3 * kGroup - 1}) {
    vmem::region region(size, VMEM_HOST_ONLY);
    auto* const bytes = static_cast<unsigned char*>(region.data());
    for (size_t at = 0; at < size; ++at) bytes[at] = static_cast<unsigned char>(at * 7 >> 3);
    region.evict();
    size_t wrong = 0;
    for (size_t at = 0; at < size; ++at) wrong += bytes[at] != static_cast<unsigned char>(at * 7 >> 3);
    EXPECT_EQ(wrong, 0u) << size;
  }
}

}  // namespace
