// vmem::pool on real regions: the promises of its header, with data four times the host budget.
#include "vmem/pool.hpp"

#include <map>
#include <memory_resource>
#include <mutex>
#include <random>
#include <thread>

#include "support.h"

namespace {

using systest::stamp;
using systest::SystemTest;

constexpr size_t kMiB = 1 << 20;
// The host memory that libvmem keeps for I/O while regions are empty.
constexpr size_t kKept = 4 * kMiB;
constexpr size_t kGranule = vmem::pool::granule_bytes;

vmem::pool_options shared_regions_of(size_t bytes) {
  vmem::pool_options options;
  options.region_bytes = bytes;
  options.flags = VMEM_HOST_ONLY;
  return options;
}

// An allocation. The bytes at the beginning of each granule and at the end identify the allocation
// and the place.
struct Piece {
  std::byte* at = nullptr;
  size_t bytes = 0;
  uint64_t id = 0;

  void fill() const {
    visit([](std::byte& b, std::byte right) { b = right; });
  }
  bool intact() const {
    size_t wrong = 0;
    visit([&](const std::byte& b, std::byte right) { wrong += b != right; });
    return wrong == 0;
  }

 private:
  template <typename Byte>
  void visit(Byte byte) const {
    const auto some = [&](size_t from, size_t to) {
      for (size_t i = from; i < to; ++i) byte(at[i], static_cast<std::byte>(stamp(i / 8, id) >> i % 8 * 8));
    };
    for (size_t i = 0; i < bytes; i += kGranule) some(i, std::min(i + 8, bytes));
    some(bytes - std::min<size_t>(bytes, 8), bytes);
  }
};

Piece allocate(vmem::pool& pool, size_t bytes, uint64_t id) {
  Piece piece{static_cast<std::byte*>(pool.allocate(bytes)), bytes, id};
  piece.fill();
  return piece;
}
void deallocate(vmem::pool& pool, const Piece& piece) {
  pool.deallocate(piece.at, piece.bytes);
}

class Pool : public SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    configure({{"host_budget", "32MiB"}, {"block_size", "65536"}});
  }
  static std::string refused(vmem::pool& pool, size_t bytes, size_t alignment = 8) {
    try {
      void* p = pool.allocate(bytes, alignment);
      pool.deallocate(p, bytes, alignment);
      return "";
    } catch (const std::bad_alloc& e) {
      return e.what();
    }
  }
  static uint64_t held() {
    const auto s = vmem::stats();
    return s.host_bytes + s.ssd_bytes;
  }
};

TEST_F(Pool, StandardContainersHoldFourTimesTheBudget) {
  vmem::pool pool(shared_regions_of(32 * kMiB));
  const size_t count = 64 * kMiB / sizeof(uint64_t);
  const uint64_t entries = systest::kSanitized ? 100000 : 400000;
  {
    std::pmr::vector<uint64_t> numbers(count, &pool);
    for (size_t i = 0; i < count; i += 64) numbers[i] = stamp(i, 1);
    std::pmr::unsynchronized_pool_resource small(&pool);
    std::pmr::map<uint64_t, std::pmr::string> words(&small);
    const std::string tail(64, 'x');
    for (uint64_t i = 0; i < entries; ++i) words.emplace_hint(words.end(), i, std::to_string(stamp(i, 2)) + tail);
    EXPECT_GE(pool.stats().in_use_bytes, (systest::kSanitized ? 80 : 128) * kMiB);
    for (size_t i = 0; i < count; i += 64) ASSERT_EQ(numbers[i], stamp(i, 1)) << i;
    uint64_t next = 0;
    for (const auto& [key, word] : words) {
      ASSERT_EQ(key, next++);
      ASSERT_EQ(word, (std::to_string(stamp(key, 2)) + tail).c_str());
    }
    EXPECT_EQ(next, entries);
    const auto s = vmem::stats();
    EXPECT_GT(s.evictions, 0u) << "it did not fit";
    EXPECT_LE(s.host_bytes, s.host_budget);
  }
  const auto s = pool.stats();
  EXPECT_EQ(s.in_use_bytes, 0u);
  EXPECT_EQ(s.allocations, 0u);
  EXPECT_EQ(pool.trim(), s.reserved_bytes);
  EXPECT_EQ(vmem::stats().regions, 0u);
}

TEST_F(Pool, RandomAllocationsKeepTheirBytesWhileOthersComeAndGo) {
  vmem::pool pool(shared_regions_of(24 * kMiB));
  std::mt19937_64 random(3);
  std::vector<Piece> live;
  size_t live_bytes = 0, most = 0;
  for (uint64_t n = 0; n < 3000; ++n) {
    if (live_bytes < 128 * kMiB && (live.empty() || random() % 3 != 0)) {
      const size_t bytes = 1 + random() % (size_t{1} << (3 + random() % 19));
      live.push_back(allocate(pool, bytes, n));
      live_bytes += bytes;
      most = std::max(most, live_bytes);
    } else {
      const size_t i = random() % live.size();
      ASSERT_TRUE(live[i].intact()) << live[i].bytes << " bytes of step " << live[i].id;
      deallocate(pool, live[i]);
      live_bytes -= live[i].bytes;
      live[i] = live.back();
      live.pop_back();
    }
    if (n % 1000 == 999) pool.trim();
  }
  EXPECT_GT(most, 90 * kMiB);
  EXPECT_EQ(pool.stats().allocations, live.size());
  for (const Piece& piece : live) {
    ASSERT_TRUE(piece.intact()) << piece.bytes << " bytes of step " << piece.id;
    deallocate(pool, piece);
  }
  EXPECT_EQ(pool.stats().fragmentation, 0.0);
  pool.trim();
  EXPECT_EQ(pool.stats().reserved_bytes, 0u);
}

TEST_F(Pool, ThreadsAllocateAndFreeEachOthersMemory) {
  vmem::pool pool(shared_regions_of(16 * kMiB));
  std::mutex mutex;
  std::vector<Piece> market;  // protected by mutex
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (uint64_t n = 0; n < 500; ++n) {
        Piece piece = allocate(pool, 1 + random() % (512 << 10), (uint64_t{t} << 32) + n);
        {
          std::lock_guard lock(mutex);
          market.push_back(piece);
          if (market.size() < 400) continue;
          std::swap(market[random() % market.size()], market.back());
          piece = market.back();
          market.pop_back();
        }
        wrong += !piece.intact() || !pool.owns(piece.at);
        deallocate(pool, piece);
        if (n % 100 == 0) pool.trim();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(pool.stats().allocations, market.size());
  for (const Piece& piece : market) {
    EXPECT_TRUE(piece.intact());
    deallocate(pool, piece);
  }
  EXPECT_EQ(pool.stats().in_use_bytes, 0u);
  EXPECT_GT(vmem::stats().evictions, 0u);
}

// Allocates random sizes of 1 byte to 2^largest_log2, and frees as many bytes, chosen at random:
// 256 MiB stay in use.
class Mix {
 public:
  Mix() : pool_(shared_regions_of(16 * kMiB)) {}
  ~Mix() {
    for (const Piece& piece : live_) deallocate(pool_, piece);
    EXPECT_EQ(pool_.stats().fragmentation, 0.0) << "what was freed was joined";
    EXPECT_EQ(pool_.stats().in_use_bytes, 0u);
  }
  // Returns the largest ratio of reserved bytes to bytes in use.
  double run(unsigned largest_log2, int steps) {
    double worst = 0;
    for (int n = 1; n <= steps; ++n) {
      const size_t bytes = 1 + random_() % (size_t{1} << (10 + random_() % (largest_log2 - 9)));
      live_.push_back({static_cast<std::byte*>(pool_.allocate(bytes)), bytes, 0});
      in_use_ += bytes;
      while (in_use_ > 256 * kMiB) {
        std::swap(live_[random_() % live_.size()], live_.back());
        deallocate(pool_, live_.back());
        in_use_ -= live_.back().bytes;
        live_.pop_back();
      }
      if (n % 500 != 0 || in_use_ < 240 * kMiB) continue;
      const auto s = pool_.stats();
      worst = std::max(worst, static_cast<double>(s.reserved_bytes) / static_cast<double>(s.in_use_bytes));
    }
    return worst;
  }
  size_t regions() const { return pool_.stats().regions; }

 private:
  vmem::pool pool_;
  std::mt19937_64 random_{11};
  std::vector<Piece> live_;
  size_t in_use_ = 0;
};

TEST_F(Pool, ALongMixOfSteadySizeStaysNearTheBytesInUse) {
  for (const unsigned largest_log2 : {16u, 18u, 20u, 21u}) {
    Mix mix;
    const double first = mix.run(largest_log2, 60000);
    const size_t regions = mix.regions();
    EXPECT_GT(first, 1.0) << largest_log2;
    EXPECT_LT(first, 1.35) << largest_log2;
    EXPECT_LT(mix.run(largest_log2, 60000), 1.35) << largest_log2;
    EXPECT_EQ(mix.regions(), regions) << "it does not creep up, largest 2^" << largest_log2;
  }
  EXPECT_EQ(vmem::stats().faults, 0u);
}

// Small allocations everywhere are the worst case for large ones: no free place is large enough.
TEST_F(Pool, AMixWhoseSizesChangeReservesLessThanTwiceTheBytesInUse) {
  Mix mix;
  for (const unsigned largest_log2 : {18u, 20u, 16u, 21u, 14u, 20u}) {
    EXPECT_LT(mix.run(largest_log2, 60000), 2.0) << largest_log2;
  }
}

TEST_F(Pool, BookKeepingTouchesNoByteOfARegion) {
  vmem::pool pool(shared_regions_of(16 * kMiB));
  std::vector<Piece> pieces;
  for (uint64_t i = 0; i < 200; ++i) pieces.push_back(allocate(pool, 60000, i));
  void* base = pieces[0].at;
  vmem::check(vmem_evict(base, 200 * 61440, VMEM_SSD));
  const auto before = vmem::stats();
  for (size_t i = 0; i < 200; i += 2) deallocate(pool, pieces[i]);
  for (size_t i = 0; i < 200; i += 2) pieces[i].at = static_cast<std::byte*>(pool.allocate(60000));
  EXPECT_EQ(vmem::stats().faults, before.faults);
  EXPECT_EQ(vmem::stats().read_bytes, before.read_bytes);
}

TEST_F(Pool, TrimGivesMemoryAndDiskOfFreedBytesBack) {
  vmem::pool pool(shared_regions_of(32 * kMiB));
  std::vector<Piece> pieces;
  const size_t size = 512 << 10, count = 128 * kMiB / size;
  for (uint64_t i = 0; i < count; ++i) pieces.push_back(allocate(pool, size, i));
  EXPECT_GE(held(), 120 * kMiB);
  EXPECT_GT(vmem::stats().ssd_bytes, 64 * kMiB);
  for (size_t i = 0; i < count; i += 2) deallocate(pool, pieces[i]);
  EXPECT_GE(held(), 120 * kMiB) << "freed memory is not given back before trim()";
  EXPECT_EQ(pool.trim(), 0u) << "no region is empty";
  EXPECT_LE(held(), 64 * kMiB + kKept);
  for (size_t i = 1; i < count; i += 2) ASSERT_TRUE(pieces[i].intact()) << i;
  const size_t reserved = pool.stats().reserved_bytes;
  for (size_t i = 1; i < count; i += 2) deallocate(pool, pieces[i]);
  EXPECT_EQ(pool.trim(), reserved);
  EXPECT_EQ(vmem::stats().ssd_bytes, 0u);
  EXPECT_LE(held(), kKept);
  EXPECT_EQ(vmem::stats().regions, 0u);
  EXPECT_EQ(pool.stats().regions, 0u);
}

TEST_F(Pool, WhatIsLargerThanARegionGetsOneAndTakesItAlong) {
  vmem::pool pool(shared_regions_of(8 * kMiB));
  const Piece large = allocate(pool, 40 * kMiB + 1, 1);
  const Piece small = allocate(pool, 100, 2);
  auto s = pool.stats();
  EXPECT_EQ(s.own_regions, 1u);
  EXPECT_EQ(s.regions, 2u);
  EXPECT_EQ(s.in_use_bytes, 40 * kMiB + 2 * kGranule);
  EXPECT_EQ(s.largest_free_bytes, 8 * kMiB - kGranule);
  EXPECT_TRUE(large.intact());
  deallocate(pool, large);
  s = pool.stats();
  EXPECT_EQ(s.own_regions, 0u);
  EXPECT_EQ(s.reserved_bytes, 8 * kMiB);
  EXPECT_LE(held(), kKept + 65536) << "its memory and disk went at once";
  EXPECT_FALSE(pool.owns(large.at));
  EXPECT_TRUE(small.intact());
}

TEST_F(Pool, RegionsGrowByDoublingUpToTheirLimit) {
  vmem::pool_options options = shared_regions_of(4 * kMiB);
  options.region_limit_bytes = 16 * kMiB;
  vmem::pool pool(options);
  std::vector<size_t> reserved;
  for (int i = 0; i < 11; ++i) {
    (void)pool.allocate(4 * kMiB);
    reserved.push_back(pool.stats().reserved_bytes / kMiB);
  }
  EXPECT_EQ(reserved, (std::vector<size_t>{4, 12, 12, 28, 28, 28, 28, 44, 44, 44, 44}));
  pool.release();
  EXPECT_EQ(pool.stats().allocations, 0u);
  EXPECT_EQ(pool.stats().reserved_bytes, 0u);
  EXPECT_EQ(vmem::stats().regions, 0u);
}

TEST_F(Pool, AnyPowerOfTwoIsAnAlignment) {
  vmem::pool pool(shared_regions_of(16 * kMiB));
  std::vector<std::pair<void*, size_t>> taken;
  for (size_t alignment = 1; alignment <= 256 * kMiB; alignment *= 2) {
    for (int i = 0; i < 2; ++i) {
      void* p = pool.allocate(5000, alignment);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % alignment, 0u) << alignment;
      memset(p, 7, 5000);
      taken.emplace_back(p, alignment);
    }
  }
  EXPECT_EQ(pool.stats().in_use_bytes, taken.size() * 2 * kGranule) << "what alignment skips stays free";
  for (const auto& [p, alignment] : taken) pool.deallocate(p, 5000, alignment);
  EXPECT_EQ(pool.stats().in_use_bytes, 0u);
  EXPECT_EQ(pool.stats().own_regions, 0u);
  EXPECT_NE(refused(pool, 4096, 24).find("alignment 24 for 4096 bytes"), std::string::npos);
  EXPECT_NE(refused(pool, 4096, 0), "");
}

TEST_F(Pool, SizesFromNothingToAllAddresses) {
  vmem::pool pool(shared_regions_of(4 * kMiB));
  void* nothing = pool.allocate(0);
  void* one = pool.allocate(1);
  EXPECT_NE(nothing, one) << "no bytes have an address of their own";
  EXPECT_EQ(pool.stats().in_use_bytes, 2 * kGranule);
  pool.deallocate(nothing, 0);
  pool.deallocate(one, 1);
  pool.deallocate(pool.allocate(kGranule + 1), kGranule + 1);
  const auto before = pool.stats();
  for (const size_t bytes :
       {SIZE_MAX, SIZE_MAX - 4095, SIZE_MAX - 4096, SIZE_MAX / 2, size_t{1} << 62, size_t{1} << 56}) {
    EXPECT_NE(refused(pool, bytes).find(std::to_string(bytes)), std::string::npos) << refused(pool, bytes);
    EXPECT_NE(refused(pool, bytes, 64 * kMiB), "");
    EXPECT_NE(refused(pool, 1, std::bit_floor(bytes)), "") << "alignment";
  }
  EXPECT_EQ(pool.stats().reserved_bytes, before.reserved_bytes);
  EXPECT_EQ(vmem::stats().regions, 1u);
}

TEST_F(Pool, TheLimitIsAnErrorWithTheNumbersAndEmptyRegionsMakeRoom) {
  vmem::pool_options options = shared_regions_of(8 * kMiB);
  options.limit_bytes = 20 * kMiB;
  vmem::pool pool(options);
  std::vector<void*> all;
  while (all.size() < 100) {
    try {
      all.push_back(pool.allocate(kMiB));
    } catch (const vmem::pool_error& e) {
      EXPECT_NE(std::string(e.what()).find("limit_bytes 20971520"), std::string::npos) << e.what();
      break;
    }
  }
  EXPECT_EQ(all.size(), 20u) << "the last region is smaller, so that the limit is used";
  EXPECT_NE(refused(pool, 1).find("in whole 2 MiB"), std::string::npos) << refused(pool, 1);
  for (void* p : all) pool.deallocate(p, kMiB);
  EXPECT_EQ(refused(pool, 18 * kMiB), "") << "empty regions are in nobody's way";
  EXPECT_NE(refused(pool, 21 * kMiB), "");
}

TEST_F(Pool, AFullSsdIsAnErrorUnderALimitAndSigbusWithoutOne) {
  for (const auto& [name, value] : systest::Settings{{"ssd_budget", "0"}, {"fault_timeout_ms", "100"}}) {
    ASSERT_EQ(vmem_set(name, value.c_str()), 0) << vmem_last_error();
  }
  const size_t size = 256 << 10;
  {
    vmem::pool_options options = shared_regions_of(8 * kMiB);
    options.limit_bytes = 24 * kMiB;
    vmem::pool bounded(options);
    std::vector<Piece> pieces;
    EXPECT_THROW(for (uint64_t i = 0; i < 1000; ++i) pieces.push_back(allocate(bounded, size, i)), vmem::pool_error);
    EXPECT_EQ(pieces.size(), 96u);
    for (const Piece& piece : pieces) EXPECT_TRUE(piece.intact());
  }
  vmem::pool pool(shared_regions_of(8 * kMiB));
  std::vector<Piece> pieces;
  bool full = false;
  for (uint64_t i = 0; i < 256 && !full; ++i) {
    Piece piece{static_cast<std::byte*>(pool.allocate(size)), size, i};
    full = systest::raises_sigbus([&] { piece.fill(); });
    full ? deallocate(pool, piece) : pieces.push_back(piece);
  }
  ASSERT_TRUE(full) << "64 MiB do not fit into 32";
  ASSERT_GT(pieces.size(), 16u);
  for (const Piece& piece : pieces) EXPECT_TRUE(piece.intact()) << piece.id;
  // Half of the memory, freed and trimmed, makes room for other allocations.
  const size_t half = pieces.size() / 2;
  for (size_t i = 0; i < half; ++i) deallocate(pool, pieces[i]);
  pieces.erase(pieces.begin(), pieces.begin() + static_cast<std::ptrdiff_t>(half));
  pool.trim();
  vmem::pool other(shared_regions_of(8 * kMiB));
  for (size_t i = 0; i < half - 8; ++i) pieces.push_back(allocate(other, size, 1000 + i));
  for (const Piece& piece : pieces) EXPECT_TRUE(piece.intact()) << piece.id;
}

struct Misuses {
  std::vector<std::string> words;
  static void add(const char* text, void* user) { static_cast<Misuses*>(user)->words.emplace_back(text); }
};

TEST_F(Pool, MisuseIsReportedWithTheNumbersAndFreesNothing) {
  Misuses misuses;
  vmem::pool_options options = shared_regions_of(4 * kMiB);
  options.on_misuse = Misuses::add;
  options.misuse_user = &misuses;
  vmem::pool pool(options);
  const auto expect = [&](const char* text) {
    ASSERT_FALSE(misuses.words.empty()) << text;
    EXPECT_NE(misuses.words.back().find(text), std::string::npos) << misuses.words.back();
  };
  const Piece piece = allocate(pool, 3 * kGranule, 1), other = allocate(pool, 10, 2),
              large = allocate(pool, 9 * kMiB, 3);
  const size_t in_use = pool.stats().in_use_bytes;
  int local = 0;
  pool.deallocate(&local, 4);
  expect("in none of the 2 regions");
  pool.deallocate(piece.at + kGranule, kGranule);
  expect("4096 bytes from the beginning of the allocation");
  pool.deallocate(piece.at + 8, 3 * kGranule);
  expect("8 bytes from the beginning");
  pool.deallocate(piece.at, 2 * kGranule);
  expect("3 granules of 4 KiB, not 2");
  pool.deallocate(piece.at, SIZE_MAX);
  expect("3 granules of 4 KiB, not 4503599627370496");
  pool.deallocate(large.at + kMiB, 9 * kMiB);
  expect("1048576 bytes from the beginning");
  pool.deallocate(large.at, kMiB);
  expect("2304 granules of 4 KiB, not 256");
  EXPECT_EQ(pool.stats().misuses, 7u);
  EXPECT_EQ(misuses.words.size(), 7u);
  EXPECT_EQ(pool.stats().in_use_bytes, in_use);
  deallocate(pool, piece);
  pool.deallocate(piece.at, piece.bytes);
  expect("freed already");
  deallocate(pool, large);
  pool.deallocate(large.at, large.bytes);
  expect("in none of the 1 regions");
  EXPECT_EQ(pool.stats().misuses, 9u);
  EXPECT_EQ(pool.stats().in_use_bytes, kGranule);
  EXPECT_TRUE(other.intact());
}

TEST(PoolMisuse, EndsTheProgramUnlessItAskedToBeTold) {
  vmem::pool pool;
  int local = 0;
  EXPECT_DEATH(pool.deallocate(&local, 4), "vmem::pool: deallocate.*in none of the 0 regions");
}

TEST_F(Pool, LeasedMemoryOutlivesItsDeallocationUntilTrimFindsItReleased) {
  vmem::pool pool(shared_regions_of(4 * kMiB));
  const Piece large = allocate(pool, 8 * kMiB, 1), small = allocate(pool, 64 << 10, 2), kept = allocate(pool, 10, 3);
  ASSERT_EQ(vmem_acquire(large.at, 4096, VMEM_READ, VMEM_HOST, nullptr), 0) << vmem_last_error();
  ASSERT_EQ(vmem_acquire(small.at, 4096, VMEM_READ, VMEM_HOST, nullptr), 0) << vmem_last_error();
  deallocate(pool, large);
  deallocate(pool, small);
  EXPECT_EQ(pool.stats().own_regions, 1u) << "a lease holds it";
  EXPECT_EQ(pool.trim(), 0u);
  EXPECT_TRUE(small.intact()) << "leased blocks keep their bytes";
  EXPECT_THROW(pool.release(), vmem::error);
  ASSERT_EQ(vmem_release(large.at, 4096, nullptr), 0);
  ASSERT_EQ(vmem_release(small.at, 4096, nullptr), 0);
  EXPECT_EQ(pool.trim(), 8 * kMiB);
  EXPECT_TRUE(kept.intact());
  pool.release();
  EXPECT_EQ(vmem::stats().regions, 0u);
}

TEST_F(Pool, OptionsThatCannotBeAreRefusedWithTheNumbers) {
  const auto words = [](const vmem::pool_options& options) -> std::string {
    try {
      vmem::pool pool(options);
      return "";
    } catch (const vmem::error& e) {
      return e.what();
    }
  };
  EXPECT_NE(words(shared_regions_of(0)).find("region_bytes 0"), std::string::npos);
  EXPECT_NE(words(shared_regions_of(size_t{4} << 40)).find("region_bytes 4398046511104"), std::string::npos);
  vmem::pool_options options = shared_regions_of(8 * kMiB);
  options.region_limit_bytes = 4 * kMiB;
  EXPECT_NE(words(options).find("region_limit_bytes 4194304"), std::string::npos);
  options = shared_regions_of(8 * kMiB);
  options.flags = VMEM_MAP_READ;
  EXPECT_NE(words(options).find("flags 16"), std::string::npos);
  EXPECT_EQ(words(shared_regions_of(1)), "");
}

}  // namespace
