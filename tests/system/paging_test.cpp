// Data several times the budget, through plain pointers, with every combination of block size and
// fallback.
#include <map>
#include <thread>

#include "support.h"

namespace systest {
namespace {

struct Case {
  const char* name;
  size_t block;
  const char* budget;
  size_t bytes;
  Settings more;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

// The distance of the words that a sequential pass checks. Under a sanitizer each word costs a
// check, and each page costs several pages of shadow memory. So a pass checks every 13th word, or
// every 1021st with large blocks. Both distances meet every block and every offset in a page.
size_t stride(size_t block) {
  if (!kSanitized) return 1;
  return block > 2 << 20 ? 1021 : 13;
}

class Paging : public SystemTest, public ::testing::WithParamInterface<Case> {
 protected:
  void start() {
    Settings settings{{"block_size", std::to_string(GetParam().block)}, {"host_budget", GetParam().budget}};
    settings.insert(settings.end(), GetParam().more.begin(), GetParam().more.end());
    configure(settings);
  }
};

TEST_P(Paging, EveryWordComesBackAfterSequentialWritesOfFourBudgets) {
  start();
  if (IsSkipped()) return;
  vmem::region region(GetParam().bytes, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  const size_t step = stride(GetParam().block);
  for (uint64_t round = 0; round < 2; ++round) {
    for (size_t i = 0; i < words.size(); i += step) {
      if (round > 0) {
        ASSERT_EQ(words[i], stamp(i, round - 1)) << i;
      }
      words[i] = stamp(i, round);
    }
  }
  for (size_t i = 0; i < words.size(); i += step) ASSERT_EQ(words[i], stamp(i, 1)) << i;
  const auto stats = vmem::stats();
  EXPECT_GT(stats.write_bytes, 0u);
  EXPECT_GT(stats.read_bytes, 0u);
  EXPECT_LE(stats.host_bytes, stats.host_budget);
  EXPECT_EQ(stats.checksum_errors, 0u);
}

TEST_P(Paging, RandomWritesBySeveralThreadsAreAllKept) {
  start();
  if (IsSkipped()) return;
  vmem::region region(GetParam().bytes, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  constexpr unsigned kThreads = 4;
  // About 1 GiB of traffic for every block size.
  const size_t touches = std::clamp<size_t>((size_t{1} << 30) / GetParam().block / kThreads, 12, 8000);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      // Thread t owns the words congruent to t, so that adjacent words in a cache line and block
      // belong to different threads.
      uint64_t state = t + 1;
      for (size_t n = 0; n < touches; ++n) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        const size_t i = state % (words.size() / kThreads) * kThreads + t;
        words[i] = words[i] + stamp(i, 7);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  std::map<size_t, uint64_t> written;  // index of a word -> number of stores
  for (unsigned t = 0; t < kThreads; ++t) {
    uint64_t state = t + 1;
    for (size_t n = 0; n < touches; ++n) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      ++written[state % (words.size() / kThreads) * kThreads + t];
    }
  }
  // One pass in address order: checks all words that were written, and zeros at a stride between
  // them.
  const size_t step = stride(GetParam().block);
  auto next = written.begin();
  for (size_t i = 0; i < words.size(); i += step) {
    for (; next != written.end() && next->first < i; ++next) {
      ASSERT_EQ(words[next->first], next->second * stamp(next->first, 7)) << next->first;
    }
    const bool hit = next != written.end() && next->first == i;
    ASSERT_EQ(words[i], hit ? next->second * stamp(i, 7) : 0) << i;
  }
  for (; next != written.end(); ++next) {
    ASSERT_EQ(words[next->first], next->second * stamp(next->first, 7)) << next->first;
  }
}

TEST_P(Paging, BlocksNeverWrittenReadZeroAndCostNothing) {
  start();
  if (IsSkipped()) return;
  vmem::region region(GetParam().bytes, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  for (size_t i = 0; i < words.size(); i += 512) ASSERT_EQ(words[i], 0u);
  const auto stats = vmem::stats();
  EXPECT_EQ(stats.write_bytes, 0u);
  EXPECT_EQ(stats.read_bytes, 0u);
  EXPECT_EQ(stats.ssd_bytes, 0u);
}

constexpr size_t kMiB = 1 << 20;
const Case kCases[] = {
    {"move_2m", 2 * kMiB, "32MiB", 128 * kMiB + 12345, {}},
    {"move_32m", 32 * kMiB, "160MiB", 640 * kMiB + 4097, {}},
    {"move_64m", 64 * kMiB, "320MiB", 512 * kMiB + 4097, {}},
    {"copy_4k", 4096, "16MiB", 64 * kMiB + 777, {}},
    {"copy_64k", 65536, "16MiB", 64 * kMiB + 65537, {}},
    {"copy_2m_forced", 2 * kMiB, "32MiB", 128 * kMiB + 1, {{"transfer", "copy"}}},
    {"copy_32m_forced", 32 * kMiB, "224MiB", 896 * kMiB, {{"transfer", "copy"}}},
    {"copy_64m_forced", 64 * kMiB, "448MiB", 640 * kMiB, {{"transfer", "copy"}}},
    {"threads_engine", 2 * kMiB, "32MiB", 128 * kMiB + 9, {{"io_engine", "threads"}}},
    {"buffered", 2 * kMiB, "32MiB", 128 * kMiB + 9, {{"direct_io", "off"}}},
    {"lz4", 2 * kMiB, "48MiB", 192 * kMiB + 9, {{"compression", "lz4"}}},
    {"zstd_64k", 65536, "24MiB", 96 * kMiB + 9, {{"compression", "zstd"}}},
    {"no_checksum", 2 * kMiB, "32MiB", 128 * kMiB + 9, {{"checksum", "off"}}},
    {"no_readahead", 65536, "16MiB", 64 * kMiB + 9, {{"readahead", "0"}}},
    {"depth_1", 2 * kMiB, "32MiB", 128 * kMiB, {{"io_depth", "1"}}},
    {"more_threads", 65536, "16MiB", 64 * kMiB + 9, {{"io_threads", "3"}, {"evict_threads", "3"}}},
};
INSTANTIATE_TEST_SUITE_P(, Paging, ::testing::ValuesIn(kCases), [](const auto& p) { return p.param.name; });

class PagingMore : public SystemTest {};

TEST_F(PagingMore, OneBlockFaultedByManyThreadsAtOnceIsReadOnceAndSeenByAll) {
  configure({{"host_budget", "32MiB"}});
  if (IsSkipped()) return;
  vmem::region region(8 << 20, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  for (size_t i = 0; i < words.size(); ++i) words[i] = stamp(i, 3);
  for (int round = 0; round < 20; ++round) {
    region.evict();
    const uint64_t before = vmem::stats().read_bytes;
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([&, t] {
        for (size_t i = static_cast<size_t>(t); i < (2 << 20) / 8; i += 4096) wrong += words[i] != stamp(i, 3);
      });
    }
    for (std::thread& t : threads) t.join();
    ASSERT_EQ(wrong, 0);
    EXPECT_LE(vmem::stats().read_bytes - before, uint64_t{8} << 20) << "each block is read at most once";
  }
}

TEST_F(PagingMore, ASparseRegionOf16TiBWorks) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer's layout has no 16 TiB of addresses free";
#endif
  configure({{"host_budget", "64MiB"}});
  if (IsSkipped()) return;
  vmem::region region(size_t{16} << 40, VMEM_HOST_ONLY);
  auto* bytes = static_cast<unsigned char*>(region.data());
  for (uint64_t i = 0; i < 100; ++i) bytes[i * (region.size() / 100) + i] = static_cast<unsigned char>(i + 1);
  for (uint64_t i = 0; i < 100; ++i) ASSERT_EQ(bytes[i * (region.size() / 100) + i], i + 1);
  const auto q = region.query();
  EXPECT_EQ(q.zero_bytes + q.ssd_bytes + q.host_bytes + q.device_bytes, region.size());
}

TEST_F(PagingMore, TenThousandRegionsLiveTogether) {
  configure({{"host_budget", "64MiB"}});
  if (IsSkipped()) return;
  std::vector<vmem::region> regions;
  for (size_t i = 0; i < 10000; ++i) {
    regions.emplace_back(size_t{4096} + i % 3 * 5000, VMEM_HOST_ONLY);
    *static_cast<uint64_t*>(regions.back().data()) = stamp(i, 1);
  }
  EXPECT_EQ(vmem::stats().regions, 10000u);
  for (size_t i = 0; i < regions.size(); ++i) ASSERT_EQ(*static_cast<uint64_t*>(regions[i].data()), stamp(i, 1));
}

TEST_F(PagingMore, ACyclicScanOverFourBudgetsStillHits) {
  configure({{"host_budget", "64MiB"}, {"readahead", "0"}, {"block_size", "2MiB"}});
  if (IsSkipped()) return;
  TempFile file(256 << 20, 5);
  vmem::region region(256 << 20, file.path(), 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
  auto* bytes = static_cast<volatile unsigned char*>(region.data());
  const auto pass = [&] {
    for (size_t at = 0; at < region.size(); at += 2 << 20) (void)bytes[at];
  };
  for (int i = 0; i < 6; ++i) pass();
  const uint64_t before = vmem::stats().read_bytes;
  for (int i = 0; i < 4; ++i) pass();
  const double missed =
      static_cast<double>(vmem::stats().read_bytes - before) / (4.0 * static_cast<double>(region.size()));
  EXPECT_LT(missed, 0.95) << "at least a part of the data stays resident";
}

}  // namespace
}  // namespace systest
