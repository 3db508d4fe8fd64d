// Memory runs out inside a call: that call fails, and leaves nothing half done.
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <new>
#include <random>
#include <thread>

#include "child.h"
#include "core/os_allocator.h"
#include "core/process/mappings.h"
#include "core/thread.h"
#include "refusals.h"
#include "support.h"

namespace {

using namespace systest;

std::atomic<uint64_t> asked{0};

bool refuse() {
  if (const uint64_t every = refuse_every.load(std::memory_order_relaxed); every != 0) {
    if ((starving || vmem::core::on_library_thread()) && asked.fetch_add(1) % every == every - 1) return true;
  }
  if (refused_in < 0 || refused_in-- > 0) return false;
  if (!once) refused_in = 0;
  ++refusals;
  return true;
}

// Covers allocations that do not use operator new.
const bool hooked = (vmem::core::memory_hook.store(refuse), true);

}  // namespace

// The allocator of the whole binary.
void* operator new(size_t size) {
  void* const p = refuse() ? nullptr : malloc(size != 0 ? size : 1);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
void operator delete(void* p) noexcept {
  free(p);
}
void operator delete(void* p, size_t) noexcept {
  free(p);
}

namespace {

constexpr size_t kBlock = 64 << 10, kBlocks = 256;

class Memory : public SystemTest {};

TEST_F(Memory, AnErrorNeedsNone) {
  configure({});
  if (IsSkipped()) return;
  vmem::region region(kBlock, VMEM_HOST_ONLY);
  auto* const inside = static_cast<char*>(region.data()) + 1;
  refuse_each([&](int) { return vmem_free(inside); },
              [&](int, int rc) { EXPECT_TRUE(rc == -EINVAL || rc == -ENOMEM) << rc; });
  refuse_each([&](int) { return vmem_set("host_budget", "much"); },
              [&](int, int rc) { EXPECT_TRUE(rc == -EINVAL || rc == -ENOMEM) << rc; });
  refuse_each([&](int) { return vmem_set("no_such_setting", "1"); },
              [&](int, int rc) { EXPECT_TRUE(rc == -ENOENT || rc == -ENOMEM) << rc; });
  vmem_free(inside);
  EXPECT_NE(std::string(vmem_last_error()).find("1 bytes inside"), std::string::npos) << vmem_last_error();
}

TEST_F(Memory, AnAcquireThatFailsHasLeasedNothing) {
  configure({{"block_size", "64KiB"}, {"host_budget", "64MiB"}});
  if (IsSkipped()) return;
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, kBlocks * kBlock, VMEM_HOST_ONLY), 0) << vmem_last_error();
  auto* const bytes = static_cast<char*>(p);
  const auto word = [&](size_t block) { return reinterpret_cast<uint64_t*>(bytes + block * kBlock + 8); };
  for (size_t b = 0; b < kBlocks; b += 2) *word(b) = stamp(b, 1);
  ASSERT_EQ(vmem_evict(p, kBlocks * kBlock, VMEM_SSD), 0) << vmem_last_error();
  // Acquire two blocks in two ranges, one of them never stored to; other blocks at each try.
  const auto first = [](int n) { return static_cast<size_t>(n) * 2 % kBlocks; };
  size_t failed = 0;
  refuse_each(
      [&](int n) {
        return vmem_acquire(bytes + first(n) * kBlock, 2 * kBlock, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr);
      },
      [&](int n, int rc) {
        if (rc == 0) {
          EXPECT_EQ(vmem_release(bytes + first(n) * kBlock, 2 * kBlock, nullptr), 0) << vmem_last_error();
        } else {
          ++failed;
          EXPECT_EQ(rc, -ENOMEM) << vmem_last_error();
          for (size_t b : {first(n), first(n) + 1}) {
            EXPECT_EQ(vmem_release(bytes + b * kBlock, kBlock, nullptr), -EINVAL) << "block " << b << " is leased";
          }
        }
        EXPECT_EQ(*word(first(n)), stamp(first(n), 1));
      });
  EXPECT_GT(failed, 4u);
  const auto ranges = [&](size_t b) {
    return std::vector<vmem_range>{{bytes + b * kBlock, kBlock, VMEM_READ, 0},
                                   {bytes + (b + 1) * kBlock, kBlock, VMEM_WRITE, 0}};
  };
  refuse_each(
      [&](int n) {
        const std::array<vmem_range, 2> two{{{bytes + first(n) * kBlock, kBlock, VMEM_READ, 0},
                                             {bytes + (first(n) + 1) * kBlock, kBlock, VMEM_WRITE, 0}}};
        return vmem_acquire_ranges(two.data(), two.size(), VMEM_HOST, nullptr);
      },
      [&](int n, int rc) {
        const auto two = ranges(first(n));
        EXPECT_EQ(vmem_release_ranges(two.data(), 2, nullptr), rc == 0 ? 0 : -EINVAL) << vmem_last_error();
      });
  // A release that fails has released nothing.
  ASSERT_EQ(vmem_acquire(p, 2 * kBlock, VMEM_READ, VMEM_HOST, nullptr), 0);
  refuse_each([&](int) { return vmem_release(p, 2 * kBlock, nullptr); },
              [&](int, int rc) {
                if (rc != 0) return;
                EXPECT_EQ(vmem_acquire(p, 2 * kBlock, VMEM_READ, VMEM_HOST, nullptr), 0);
              });
  EXPECT_EQ(vmem_release(p, 2 * kBlock, nullptr), 0) << vmem_last_error();
  for (size_t b = 0; b < kBlocks; ++b) ASSERT_EQ(*word(b), b % 2 == 0 ? stamp(b, 1) : 0) << b;
  EXPECT_EQ(vmem_free(p), 0) << vmem_last_error();
}

// Once regions exist, a lack of memory fails calls, never a touch. Threads store and load, and
// blocks leave and come back, while the library's own threads get no memory (every n-th time, or
// always).
class WithoutMemory : public SystemTest,
                      public testing::WithParamInterface<std::tuple<const char*, const char*, const char*>> {};

TEST_P(WithoutMemory, BlocksMoveAndEveryByteIsRight) {
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  const auto& [every, block, codec] = GetParam();
  const pid_t child = systest::start_child("WithoutMemoryChild.DISABLED_Pages", {{"VMEM_TEST_EVERY", every},
                                                                                 {"VMEM_BLOCK_SIZE", block},
                                                                                 {"VMEM_COMPRESSION", codec},
                                                                                 {"VMEM_HOST_BUDGET", "32MiB"},
                                                                                 {"VMEM_EVICT_THREADS", "2"},
                                                                                 {"VMEM_DEVICE", "none"}});
  EXPECT_EQ(systest::wait_for_child(child, 300), 0);
}
INSTANTIATE_TEST_SUITE_P(Moves, WithoutMemory,
                         testing::Values(std::tuple("7", "64KiB", "none"), std::tuple("1", "64KiB", "none"),
                                         std::tuple("1", "64KiB", "zstd"), std::tuple("1", "4KiB", "lz4"),
                                         std::tuple("1", "2MiB", "none"), std::tuple("7", "2MiB", "zstd")));

constexpr size_t kPage = 4096, kPages = (48 << 20) / kPage, kFilePages = (16 << 20) / kPage, kThreads = 3;

struct Mapped {
  std::byte* at = nullptr;
  size_t pages = 0;
  std::vector<uint64_t> has;  // for each page and thread
  uint64_t* word(size_t page, size_t thread) const { return reinterpret_cast<uint64_t*>(at + page * kPage) + thread; }
};

void store_and_load(std::vector<Mapped>& regions, size_t thread) {
  std::minstd_rand dice(static_cast<unsigned>(thread + 1));
  const uint64_t rounds = getenv("VMEM_BLOCK_SIZE") == std::string("2MiB") ? 600 : 3000;
  for (uint64_t round = 1; round <= rounds; ++round) {
    Mapped& r = regions[dice() % regions.size()];
    const size_t page = dice() % r.pages;
    uint64_t& has = r.has[page * kThreads + thread];
    EXPECT_EQ(*r.word(page, thread), has) << "page " << page << ", thread " << thread;
    if (dice() % 2 == 0) *r.word(page, thread) = has = stamp(page * kThreads + thread, round);
  }
}

void call(const std::vector<Mapped>& regions) {
  std::minstd_rand dice(99);
  for (int i = 0; i < 200; ++i) {
    const Mapped& r = regions[dice() % regions.size()];
    const size_t first = dice() % r.pages, count = 1 + dice() % std::min<size_t>(r.pages - first, 512);
    std::byte* const at = r.at + first * kPage;
    const unsigned what = dice() % 6;
    bool leased = false;
    int rc = 0;
    {
      const Starving on;
      rc = what == 0   ? vmem_sync(at, count * kPage)
           : what == 1 ? vmem_evict(at, count * kPage, VMEM_SSD)
           : what == 2 ? vmem_prefetch(at, count * kPage, VMEM_HOST, nullptr)
           : what == 3 ? vmem_prefetch(at, count * kPage, VMEM_SSD, nullptr)
           : what == 4 ? vmem_advise(at, count * kPage, VMEM_ADVISE_HOT, 0)
                       : vmem_acquire(at, count * kPage, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr);
      leased = what == 5 && rc == 0;
      if (rc != 0) {
        EXPECT_EQ(rc, -ENOMEM) << what << ": " << vmem_last_error();
        EXPECT_STRNE(vmem_last_error(), "") << what;
      }
    }
    if (what == 5) {
      EXPECT_EQ(vmem_release(at, count * kPage, nullptr), leased ? 0 : -EINVAL) << vmem_last_error();
    }
  }
}

TEST(WithoutMemoryChild, DISABLED_Pages) {
  const systest::TempFile shared, copied;
  for (const auto* file : {&shared, &copied}) {
    ASSERT_EQ(truncate(file->path().c_str(), static_cast<off_t>(kFilePages * kPage)), 0);
  }
  std::vector<Mapped> regions(3);
  void* at = nullptr;
  ASSERT_EQ(vmem_alloc(&at, kPages * kPage, VMEM_HOST_ONLY), 0) << vmem_last_error();
  regions[0] = {static_cast<std::byte*>(at), kPages, {}};
  ASSERT_EQ(vmem_map(&at, kFilePages * kPage, shared.path().c_str(), 0, VMEM_MAP_SHARED), 0) << vmem_last_error();
  regions[1] = {static_cast<std::byte*>(at), kFilePages, {}};
  ASSERT_EQ(vmem_map(&at, kFilePages * kPage, copied.path().c_str(), 0, VMEM_MAP_PRIVATE), 0) << vmem_last_error();
  regions[2] = {static_cast<std::byte*>(at), kFilePages, {}};
  for (Mapped& r : regions) r.has.assign(r.pages * kThreads, 0);

  refuse_every = strtoull(getenv("VMEM_TEST_EVERY"), nullptr, 10);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) threads.emplace_back([&, t] { store_and_load(regions, t); });
  threads.emplace_back([&] { call(regions); });
  for (std::thread& t : threads) t.join();
  for (const Mapped& r : regions) {
    for (size_t i = 0; i < r.has.size(); ++i) ASSERT_EQ(*r.word(i / kThreads, i % kThreads), r.has[i]) << i;
  }
  refuse_every = 0;
  // Reports once the writes that failed before.
  vmem_sync(regions[1].at, kPage);
  EXPECT_EQ(vmem_sync(regions[1].at, kFilePages * kPage), 0) << vmem_last_error();
  EXPECT_EQ(vmem::api::Runtime::get().check(), "");
  for (const Mapped& r : regions) EXPECT_EQ(vmem_free(r.at), 0) << vmem_last_error();
  const std::vector<unsigned char> file = shared.read();
  for (size_t i = 0; i < regions[1].has.size(); ++i) {
    uint64_t word;
    memcpy(&word, &file[i / kThreads * kPage + i % kThreads * sizeof word], sizeof word);
    ASSERT_EQ(word, regions[1].has[i]) << i;
  }
  vmem_shutdown();
}

// One region more than the limit of mappings allows: the call fails and names the numbers, and
// everything else continues.
TEST_F(Memory, TheLastMappingIsAnErrorOfTheCallThatWantsIt) {
  if (systest::kSanitized) GTEST_SKIP() << "the sanitizer needs mappings of its own";
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  const pid_t child = systest::start_child(
      "MappingsChild.DISABLED_RunsOut", {{"VMEM_BLOCK_SIZE", "64KiB"}, {"VMEM_DEVICE", "none"}, {"VMEM_LOG", "error"}});
  const int status = systest::wait_for_child(child, 120);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "vm.max_map_count is too large to be reached";
  EXPECT_EQ(status, 0);
}

TEST(MappingsChild, DISABLED_RunsOut) {
  const size_t most = vmem::core::count_mappings().most;
  if (most == 0 || most > 300000) _exit(77);
  ASSERT_EQ(vmem_init(), 0) << vmem_last_error();
  // Take all but 150 mappings: every second page becomes a mapping of its own.
  auto* const crumbs = static_cast<char*>(mmap(nullptr, most * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(crumbs, MAP_FAILED);
  for (size_t i = (most - vmem::core::count_mappings().now - 150) / 2; i > 0; --i) {
    ASSERT_EQ(mprotect(crumbs + 2 * i * kPage, kPage, PROT_READ), 0) << i;
  }
  std::vector<uint64_t*> regions;
  void* at = nullptr;
  int rc = 0;
  while (regions.size() < 1000 && (rc = vmem_alloc(&at, 128 << 10, VMEM_HOST_ONLY)) == 0)
    regions.push_back(static_cast<uint64_t*>(at));
  EXPECT_EQ(rc, -ENOMEM);
  EXPECT_GT(regions.size(), 20u);
  const std::string words = vmem_last_error();
  for (const std::string& part : {std::string("vm.max_map_count"), std::string("sysctl"), std::to_string(most)})
    EXPECT_NE(words.find(part), std::string::npos) << part << " in: " << words;
  for (uint64_t round : {1, 2}) {
    for (size_t i = 0; i < regions.size(); ++i) *regions[i] = stamp(i, round);
    for (size_t i = 0; i < regions.size(); ++i) {
      ASSERT_EQ(vmem_sync(regions[i], 128 << 10), 0) << vmem_last_error();
      ASSERT_EQ(vmem_evict(regions[i], 128 << 10, VMEM_SSD), 0) << vmem_last_error();
    }
    for (size_t i = 0; i < regions.size(); ++i) ASSERT_EQ(*regions[i], stamp(i, round)) << i;
  }
  for (uint64_t* region : regions) EXPECT_EQ(vmem_free(region), 0) << vmem_last_error();
  EXPECT_EQ(vmem_alloc(&at, 128 << 10, VMEM_HOST_ONLY), 0) << vmem_last_error();
  EXPECT_EQ(vmem_free(at), 0) << vmem_last_error();
}

}  // namespace
