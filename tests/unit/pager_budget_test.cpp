// The memory that a region needs beside its blocks: charged when it is made, credited when it goes,
// and refused with the numbers if it does not fit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "common/patience.h"
#include "pager_steps.h"

namespace vmem::pager::test {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class PagerBudget : public PagerSteps {
 protected:
  Status create(size_t size, size_t block_size, void** at) {
    RegionSpec what;
    what.size = size;
    what.block_size = block_size;
    return pager->create(what, at);
  }
  uint64_t held() { return stats().host_bytes; }
  void expect_numbers(const Status& s, int code, std::initializer_list<const char*> numbers) {
    EXPECT_EQ(s.code(), code) << s.text();
    for (const char* n : numbers) EXPECT_NE(s.text().find(n), std::string_view::npos) << n << " in: " << s.text();
  }
};

TEST_F(PagerBudget, BuffersGoWithTheLastRegionOfTheirSize) {
  start(config(8 * kMiB));
  for (size_t block = 4096; block <= kMiB; block *= 2) {
    std::byte* first = region(4, block);
    std::byte* second = region(4, block);
    put(first, 1);
    EXPECT_TRUE(pager->destroy(first, false).ok());
    EXPECT_GE(held(), 2 * kMiB) << "the second region's buffers";
    put(second, 2);
    EXPECT_EQ(get(second + 3 * block), 0u);
    EXPECT_TRUE(pager->destroy(second, false).ok());
    EXPECT_EQ(held(), 0u) << block;
  }
}

// Each copied compressed block takes two buffers.
TEST_F(PagerBudget, APrefetchOfCompressedBlocksLeavesBuffersToFaults) {
  start(config(16 * kMiB));
  constexpr size_t kBlocks = 64, kBuffers = 2 * kMiB / kSmall;  // kBuffers: an eighth of the budget
  RegionSpec what;
  what.block_size = kSmall;
  what.size = kBlocks * what.block_size;
  what.codec = store::Codec::lz4;
  void* at = nullptr;
  ASSERT_TRUE(pager->create(what, &at).ok());
  auto* const r = static_cast<std::byte*>(at);
  for (size_t i = 0; i < kBlocks; ++i) put(r + i * what.block_size, i + 1);
  evict(r, what.size);
  EXPECT_LT(space->used(), what.size) << "they shrank";
  engine->hold(Io::Op::read, true);
  EXPECT_TRUE(pager->prefetch(r, what.size / 2, VMEM_HOST).ok());
  EXPECT_EQ(engine->held(), kBuffers / 4);
  for (size_t i = 1; i <= kBuffers / 4; ++i) {
    trap->report(r + (kBlocks - i) * what.block_size, trap::FaultKind::read);
    trap->until_quiet();
    EXPECT_EQ(engine->held(), kBuffers / 4 + i) << "a fault is read for";
  }
  engine->hold(Io::Op::read, false);
  engine->let_go();
  engine->until_idle();
  for (size_t i = 0; i < kBlocks; ++i) EXPECT_EQ(get(r + i * what.block_size), i + 1);
}

TEST_F(PagerBudget, ARegionThatIsGrantedIsServedAndOneThatCannotBeIsRefusedWithTheNumbers) {
  start(config(8 * kMiB));
  for (size_t block : {size_t{4096}, size_t{16} << 10, size_t{64} << 10}) put(region(4, block), 7);
  void* at = nullptr;
  expect_numbers(create(4 * kMiB, 128 << 10, &at), -ENOMEM, {"8 MiB", "2 MiB"});
  expect_numbers(create(4 * kMiB, kMiB, &at), -ENOMEM, {"8 MiB", "1 MiB", "6 MiB"});
  // The refused region took nothing, and the existing ones are served.
  std::byte* another = region(64, 64 << 10);
  for (size_t i = 0; i < 64; ++i) put(another + i * (64 << 10), i);
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(get(another + i * (64 << 10)), i);
}

TEST_F(PagerBudget, LeasesLeaveRoomForTheFirstTouchOfEachRegion) {
  Settings c = config(16 * kMiB);
  c.fault_timeout_ms = 200;
  start(c);
  constexpr size_t kBlock = 4 * kMiB;
  std::byte* r = region(8, kBlock);
  size_t leased = 0;
  for (; leased < 8; ++leased) {
    const vmem_range one = range(r + leased * kBlock, kBlock);
    if (!pager->acquire({&one, 1}, VMEM_HOST, nullptr).ok()) break;
  }
  EXPECT_EQ(leased, 3u);
  put(r + 7 * kBlock, 7);
  put(r + 6 * kBlock, 6);
  EXPECT_EQ(get(r + 7 * kBlock), 7u);
  void* at = nullptr;
  expect_numbers(create(4 * kMiB, 64 << 10, &at), -ENOMEM, {"16 MiB", "2 MiB"});
  const vmem_range all = range(r, leased * kBlock);
  EXPECT_TRUE(pager->release({&all, 1}, nullptr).ok());
  put(region(4), 1);
}

TEST_F(PagerBudget, TheReserveShrinksWithTheRegionThatNeededIt) {
  start(config(1024 * kMiB));
  std::byte* large = region(4, 32 * kMiB);
  std::byte* small = region(4);
  expect_numbers(pager->tunables_update().set_host_budget(64 * kMiB), -EBUSY, {"64 MiB", "128 MiB", "32 MiB"});
  EXPECT_TRUE(pager->destroy(large, false).ok());
  const Status s = pager->tunables_update().set_host_budget(64 * kMiB);
  EXPECT_TRUE(s.ok()) << s.text();
  const vmem_range one = range(small, 1);
  EXPECT_TRUE(pager->acquire({&one, 1}, VMEM_HOST, nullptr).ok());
  EXPECT_TRUE(pager->release({&one, 1}, nullptr).ok());
}

TEST_F(PagerBudget, ABudgetBelowWhatIsNeededIsRefusedWithTheNumbersAndTheOldOneStays) {
  start(config(64 * kMiB));
  std::byte* r = region(32, kMiB);
  std::byte* small = region(4);
  expect_numbers(pager->tunables_update().set_host_budget(7 * kMiB), -EBUSY, {"7 MiB", "8 MiB", "4 MiB", "1 MiB"});
  const vmem_range some = range(r, 10 * kMiB);
  ASSERT_TRUE(pager->acquire({&some, 1}, VMEM_HOST, nullptr).ok());
  expect_numbers(pager->tunables_update().set_host_budget(12 * kMiB), -EBUSY, {"12 MiB", "10 MiB"});
  for (size_t i = 0; i < 32; ++i) put(r + i * kMiB, i);
  EXPECT_TRUE(pager->release({&some, 1}, nullptr).ok());
  const Status s = pager->tunables_update().set_host_budget(8 * kMiB);
  ASSERT_TRUE(s.ok()) << s.text();
  for (size_t i = 0; i < 32; ++i) EXPECT_EQ(get(r + i * kMiB), i);
  put(small, 3);
  EXPECT_EQ(get(small), 3u);
}

// The reserve is a fraction of the memory for blocks, not of a budget that other uses mostly take.
TEST_F(PagerBudget, BlocksStayInWhatFixedMemoryLeavesThem) {
  Settings c = config(64 * kMiB);
  c.io_buffer_bytes = 57 * kMiB;  // plus 2 MiB of buffers
  start(std::move(c));
  std::byte* const r = region(8, kMiB);
  put(r, 1);
  put(r + kMiB, 2);
  // The reclaim thread makes a round before each of these, and one after the first.
  for (int round = 0; round < 2; ++round) {
    put(r + 7 * kMiB, 3);
    ASSERT_TRUE(pager->prefetch(r + 7 * kMiB, kMiB, VMEM_SSD).ok());
    ASSERT_TRUE(vmem::test::eventually([&] { return ssd(r + 7 * kMiB, kMiB) == kMiB; }));
  }
  EXPECT_EQ(ssd(r, 2 * kMiB), 0u) << "evicted as soon as they were there";
  for (size_t i = 0; i < 64; ++i) put(r + i % 8 * kMiB, i);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(get(r + i * kMiB), 56 + i);
}

// A prefetch leaves to faults no more than reclaim threads keep free for both: else it would wait
// without end.
TEST_F(PagerBudget, APrefetchFindsTheRoomThatEvictorsKeep) {
  start(config(34 * kMiB));
  std::byte* const r = region(48, kMiB);
  std::byte* const wanted = r + 40 * kMiB;
  put(wanted, 40);
  evict(wanted, kMiB);
  for (size_t i = 0; i < 28; ++i) put(r + i * kMiB, i);
  ASSERT_EQ(pager->counters().evictions, 1u) << "as much is free as evictors want";
  ASSERT_TRUE(pager->prefetch(wanted, kMiB, VMEM_HOST).ok());
  EXPECT_TRUE(vmem::test::eventually([&] { return ssd(wanted, kMiB) == 0; }));
  for (size_t i = 0; i < 28; ++i) EXPECT_EQ(get(r + i * kMiB), i);
  EXPECT_EQ(get(wanted), 40u);
}

// One byte in each page of a table: the tables of stored blocks end at the budget. The access that
// needs one more table gets SIGBUS, an acquire the numbers. Present blocks and other regions
// continue.
TEST_F(PagerBudget, TablesOfSparseDataEndAtTheBudgetAndHarmNobodyElse) {
  constexpr size_t kBlock = 4096, kStride = 128 * kBlock, kPages = 8192;
  start(config(8 * kMiB));
  std::byte* const other = region(2048, kBlock);
  for (size_t b = 0; b < 2048; b += 64) put(other + b * kBlock, b + 1);
  std::byte* const sparse = region(kPages * 128, kBlock);
  size_t n = 0;
  uint64_t most = 0;  // a table grows if it fits, and evicts frames first
  for (; n < kPages && trap->store(sparse + n * kStride, n + 1); ++n) most = std::max(most, held());
  EXPECT_LE(most, 8 * kMiB);
  ASSERT_GT(n, 1500u) << "the floor, and what every process can spare";
  ASSERT_LT(n, kPages);
  EXPECT_LE(held(), 8 * kMiB);
  for (size_t more : {n, n + 1, kPages - 1}) EXPECT_TRUE(bus(sparse + more * kStride)) << more;
  const vmem_range missing = range(sparse + (n + 2) * kStride, kBlock);
  expect_numbers(pager->acquire({&missing, 1}, VMEM_HOST, nullptr), -ENOMEM, {"8 MiB", "tables"});
  for (size_t b = 0; b < 2048; b += 64) EXPECT_EQ(get(other + b * kBlock), b + 1);
  for (size_t b = 1; b < 2048; b += 64) put(other + b * kBlock, b);
  for (size_t i = 0; i < n; i += 7) ASSERT_EQ(get(sparse + i * kStride), i + 1);
  put(sparse + kBlock, 5);
  // Memory comes from dropped contents and from a larger budget.
  EXPECT_TRUE(pager->advise(sparse, 64 * kStride, VMEM_ADVISE_DONT_NEED, 0).ok());
  EXPECT_EQ(get(sparse + n * kStride), 0u);
  put(sparse + (kPages - 1) * kStride, 9);
  while (trap->store(sparse + n * kStride, n + 1)) ++n;
  EXPECT_TRUE(pager->tunables_update().set_host_budget(12 * kMiB).ok());
  put(sparse + n * kStride, n + 1);
  EXPECT_EQ(get(sparse + n * kStride), n + 1);
  EXPECT_EQ(get(sparse + (kPages - 1) * kStride), 9u);
  EXPECT_EQ(get(sparse + kBlock), 0u) << "dropped with its neighbour";
}

// However many accesses were refused, each is retried when there is memory.
TEST_F(PagerBudget, EveryRefusedAccessIsAskedAgainWhenThereIsRoom) {
  constexpr size_t kBlock = 4096, kStride = 128 * kBlock, kPages = 8192;
  start(config(8 * kMiB));
  std::byte* const sparse = region(kPages * 128, kBlock);
  size_t n = 0;
  while (n < kPages && trap->store(sparse + n * kStride, n + 1)) ++n;
  ASSERT_LT(n + 600, kPages);
  for (size_t i = n; i < n + 600; ++i) ASSERT_TRUE(bus(sparse + i * kStride)) << i;
  EXPECT_TRUE(pager->tunables_update().set_host_budget(16 * kMiB).ok());
  for (size_t i = n; i < n + 600; ++i) ASSERT_EQ(get(sparse + i * kStride), 0u) << i;
}

// The trap does not take back the SIGBUS of an access that another refusal replaces: it is retried.
TEST_F(PagerBudget, ARefusedAccessThatTheTrapDoesNotTakeBackIsNotForgotten) {
  constexpr size_t kBlock = 4096, kStride = 128 * kBlock, kPages = 8192;
  start(config(8 * kMiB));
  std::byte* const sparse = region(kPages * 128, kBlock);
  size_t n = 0;
  while (n < kPages && trap->store(sparse + n * kStride, n + 1)) ++n;
  ASSERT_LT(n + 300, kPages);
  for (size_t i = n; i < n + 300; ++i) {
    if (i == n + 256) trap->refuse_unfail(20);  // more than are tried at once
    ASSERT_TRUE(bus(sparse + i * kStride)) << i;
  }
  ASSERT_EQ(trap->calls("unfail refused"), 20u);
  EXPECT_TRUE(pager->tunables_update().set_host_budget(16 * kMiB).ok());
  for (size_t i = n; i < n + 300; ++i) ASSERT_EQ(get(sparse + i * kStride), 0u) << i;
}

}  // namespace
}  // namespace vmem::pager::test
