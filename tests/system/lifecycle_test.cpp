// Freeing, sync, eviction and limits as a program sees them.
#include <dirent.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <atomic>
#include <fstream>
#include <sstream>
#include <thread>

#include "common/patience.h"
#include "core/step.h"
#include "support.h"

namespace {

using systest::stamp;
using systest::SystemTest;

constexpr size_t kMiB = 1 << 20;

size_t count_entries(const char* folder) {
  size_t n = 0;
  DIR* d = opendir(folder);
  while (readdir(d) != nullptr) ++n;
  closedir(d);
  return n;
}

size_t count_lines(const char* path) {
  std::ifstream in(path);
  size_t n = 0;
  for (std::string line; std::getline(in, line);) ++n;
  return n;
}

bool on_module() {
  return access("/dev/vmem", R_OK | W_OK) == 0;
}

// The kernel counts a frame of the module as file memory once for each mapping that it is in; the
// module counts it once.
size_t resident_bytes(pid_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/statm");
  size_t pages = 0, resident = 0, file = 0, frames = 0;
  in >> pages >> resident >> file;
  if (!on_module()) return resident * 4096;
  std::ifstream("/sys/class/misc/vmem/frame_bytes") >> frames;
  return (resident - file) * 4096 + frames;
}

class Lifecycle : public SystemTest {};

TEST_F(Lifecycle, ThreadsFaultingInARegionBeingFreedGetSigbusNotAHang) {
  configure({{"host_budget", "32MiB"}});
  if (IsSkipped()) return;
  for (const char* block : {"2MiB", "64KiB"}) {
    ASSERT_EQ(vmem_set("block_size", block), 0);
    // A signal (SIGBUS or SIGSEGV) ends the child: it must neither hang nor exit with 0.
    const int status = systest::wait_for_child(
        systest::start_child("LifecycleChild.DISABLED_FreesUnderFaults", {{"VMEM_TEST_BLOCK", block}}), 120);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 55) << status;
  }
}

// Run by the test above: a thread that touches a region gets a signal when the region is freed.
TEST(LifecycleChild, DISABLED_FreesUnderFaults) {
  ASSERT_EQ(vmem_set("host_budget", "32MiB"), 0);
  ASSERT_EQ(vmem_set("block_size", getenv("VMEM_TEST_BLOCK")), 0);
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, 256 * kMiB, VMEM_HOST_ONLY), 0) << vmem_last_error();
  auto* bytes = static_cast<volatile unsigned char*>(p);
  struct sigaction action = {};
  action.sa_handler = [](int) { _exit(55); };
  sigaction(SIGBUS, &action, nullptr);
  sigaction(SIGSEGV, &action, nullptr);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([=] {
      for (uint64_t state = t + 1;;) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        bytes[state % (256 * kMiB)] = 1;
      }
    });
  }
  usleep(100000);
  if (vmem_free(p) != 0) _exit(56);
  for (std::thread& t : threads) t.join();
}

TEST_F(Lifecycle, MappingsDescriptorsMemoryAndDiskDoNotGrowWithRegions) {
  configure({{"host_budget", "64MiB"}});
  if (IsSkipped()) return;
  const auto cycle = [](size_t i) {
    void* p = nullptr;
    ASSERT_EQ(vmem_alloc(&p, 4096 + i % 5 * 30000, VMEM_HOST_ONLY), 0) << vmem_last_error();
    *static_cast<uint64_t*>(p) = i;
    if (i % 16 == 0) vmem_evict(p, 4096, VMEM_SSD);
    ASSERT_EQ(vmem_free(p), 0) << vmem_last_error();
  };
  for (size_t i = 0; i < 2000; ++i) cycle(i);
  const size_t maps = count_lines("/proc/self/maps"), files = count_entries("/proc/self/fd");
  const size_t memory = resident_bytes(getpid());
  const size_t more = getenv("VMEM_LONG") != nullptr ? 100000 : 6000;
  for (size_t i = 0; i < more; ++i) cycle(i);
  EXPECT_LE(count_lines("/proc/self/maps"), maps + 4);
  EXPECT_EQ(count_entries("/proc/self/fd"), files);
  // AddressSanitizer keeps up to 256 MiB of freed memory in quarantine.
  if (!systest::kSanitized) {
    EXPECT_LE(resident_bytes(getpid()), memory + 4 * kMiB);
  }
  EXPECT_EQ(vmem::stats().ssd_bytes, 0u);
}

TEST_F(Lifecycle, ResidentMemorySeenFromOutsideStaysWithinBudgetPlus32MiB) {
  if (systest::kSanitized) GTEST_SKIP() << "a sanitizer's shadow memory counts as resident";
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  for (const char* block : {"2MiB", "64KiB", "4KiB"}) {
    int ready[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ready), 0);
    const pid_t child = systest::start_child("LifecycleChild.DISABLED_UsesFourBudgets",
                                             {{"VMEM_TEST_BLOCK", block}, {"VMEM_TEST_FD", std::to_string(ready[1])}});
    close(ready[1]);
    char byte = 0;
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    const size_t base = resident_bytes(child);
    ASSERT_EQ(write(ready[0], "x", 1), 1);
    size_t most = base;
    int status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
      most = std::max(most, resident_bytes(child));
      usleep(1000);
    }
    close(ready[0]);
    EXPECT_EQ(WEXITSTATUS(status), 0) << block;
    EXPECT_LE(most - base, (96 + 32) * kMiB) << block;
    EXPECT_GT(most - base, 48 * kMiB) << "the measurement sees the blocks, " << block;
  }
}

TEST(LifecycleChild, DISABLED_UsesFourBudgets) {
  ASSERT_EQ(vmem_set("host_budget", "96MiB"), 0);
  ASSERT_EQ(vmem_set("block_size", getenv("VMEM_TEST_BLOCK")), 0);
  ASSERT_EQ(vmem_init(), 0) << vmem_last_error();
  const int parent = atoi(getenv("VMEM_TEST_FD"));
  char byte = 0;
  ASSERT_EQ(write(parent, "x", 1), 1);
  ASSERT_EQ(read(parent, &byte, 1), 1) << "it has looked how much memory this has";
  vmem::region region(384 * kMiB, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  for (size_t i = 0; i < words.size(); ++i) words[i] = stamp(i, 1);
  for (size_t i = 0; i < words.size(); i += 64) ASSERT_EQ(words[i], stamp(i, 1));
  region.sync();
}

TEST_F(Lifecycle, SyncLeavesACopyOnTheSsdAndTheBlocksWhereTheyAre) {
  for (const char* block : {"2MiB", "64KiB", "4KiB"}) {
    vmem_shutdown();
    configure({{"host_budget", "64MiB"}, {"block_size", block}});
    if (IsSkipped()) return;
    vmem::region region(16 * kMiB, VMEM_HOST_ONLY);
    auto words = region.view<uint64_t>();
    for (size_t i = 0; i < words.size(); ++i) words[i] = stamp(i, 1);
    region.sync();
    EXPECT_EQ(vmem::stats().write_bytes, 16 * kMiB);
    EXPECT_EQ(region.query().host_bytes, 16 * kMiB);
    words[5] = 77;  // must be seen although the block was write-protected
    region.evict();
    const auto stats = vmem::stats();
    EXPECT_GT(stats.write_bytes, 16 * kMiB);
    EXPECT_LT(stats.write_bytes, 32 * kMiB) << "unchanged blocks are dropped without a write";
    EXPECT_EQ(words[5], 77u);
    for (size_t i = 6; i < words.size(); ++i) ASSERT_EQ(words[i], stamp(i, 1));
  }
}

TEST_F(Lifecycle, StoresDuringSyncAreNeverLost) {
  for (const char* block : {"2MiB", "4KiB"}) {
    vmem_shutdown();
    configure({{"host_budget", "64MiB"}, {"block_size", block}});
    if (IsSkipped()) return;
    vmem::region region(8 * kMiB, VMEM_HOST_ONLY);
    auto words = region.view<uint64_t>();
    std::atomic<bool> stop{false};
    std::vector<uint64_t> counts(words.size());
    std::thread writer([&] {
      for (uint64_t state = 1; !stop;) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        const size_t i = state % words.size();
        words[i] = ++counts[i];
      }
    });
    for (int i = 0; i < 30; ++i) {
      region.sync();
      if (i % 3 == 0) region.evict();
    }
    stop = true;
    writer.join();
    region.evict();
    for (size_t i = 0; i < words.size(); ++i) ASSERT_EQ(words[i], counts[i]) << i << " " << block;
  }
}

TEST_F(Lifecycle, PagesTheProgramDropsItselfStopNothing) {
  for (const char* block : {"2MiB", "64KiB"}) {
    vmem_shutdown();
    configure({{"host_budget", "64MiB"}, {"block_size", block}});
    if (IsSkipped()) return;
    vmem::region region(8 * kMiB, VMEM_HOST_ONLY);
    auto bytes = region.view<unsigned char>();
    memset(bytes.data(), 7, bytes.size());
    ASSERT_EQ(madvise(&bytes[4096], 8192, MADV_DONTNEED), 0);
    region.sync();
    ASSERT_EQ(madvise(&bytes[5 * kMiB], 4096, MADV_DONTNEED), 0);
    region.evict();
    // The module's mapping is shared memory: the advice drops entries of the page table, never the
    // contents of a frame.
    EXPECT_EQ(bytes[4096], on_module() ? 7 : 0);
    // The page was dropped after the sync, so the store's copy may come back.
    EXPECT_TRUE(bytes[5 * kMiB] == 0 || bytes[5 * kMiB] == 7);
    EXPECT_EQ(bytes[4095], 7);
    EXPECT_EQ(bytes[8 * kMiB - 1], 7);
  }
}

// Like an allocator that gives pages back to the system and uses them again.
TEST_F(Lifecycle, StoresToPagesThatTheProgramDroppedAreKept) {
  for (const char* block : {"2MiB", "64KiB"}) {
    for (const bool read_back : {false, true}) {
      vmem_shutdown();
      configure({{"host_budget", "64MiB"}, {"block_size", block}});
      if (IsSkipped()) return;
      vmem::region region(8 * kMiB, VMEM_HOST_ONLY);
      auto bytes = region.view<unsigned char>();
      memset(bytes.data(), 7, bytes.size());
      region.sync();  // from here on equal to the store, and write-protected
      if (read_back) region.evict();
      for (size_t i = 0; i < bytes.size(); i += 64 << 10) {
        ASSERT_EQ(bytes[i + 4096], 7);
        ASSERT_EQ(madvise(&bytes[i], 4096, MADV_DONTNEED), 0);
        bytes[i] = 42;
      }
      region.sync();
      region.evict();
      for (size_t i = 0; i < bytes.size(); i += 64 << 10) {
        ASSERT_EQ(bytes[i], 42) << block << " " << read_back << " " << i;
        ASSERT_EQ(bytes[i + 4096], 7);
      }
    }
  }
}

// The thread that serves faults may meet such a page in its own write, and the data written may
// differ from the data compared before.
TEST_F(Lifecycle, PagesThatTheProgramDropsWhileTheirBlockIsWrittenStopNothing) {
  static std::atomic<unsigned char*> dropped;
  for (const char* block : {"2MiB", "64KiB"}) {
    vmem_shutdown();
    configure({{"host_budget", "64MiB"}, {"block_size", block}, {"io_threads", "1"}});
    if (IsSkipped()) return;
    vmem::region region(2 * kMiB, VMEM_HOST_ONLY);
    auto bytes = region.view<unsigned char>();
    memset(bytes.data(), 7, bytes.size());
    dropped = bytes.data();
    vmem::core::step_hook = [](const char* s) {
      unsigned char* const page = s == std::string_view("evict.decided") ? dropped.exchange(nullptr) : nullptr;
      if (page != nullptr) madvise(page, 4096, MADV_DONTNEED);
    };
    block == std::string_view("2MiB") ? region.sync() : region.evict();
    vmem::core::step_hook = nullptr;
    EXPECT_EQ(dropped, nullptr);
    region.evict();
    EXPECT_TRUE(bytes[0] == 0 || bytes[0] == 7);
    for (size_t i = 4096; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], 7) << block << " " << i;
    EXPECT_EQ(vmem::stats().checksum_errors, 0u);
  }
}

TEST_F(Lifecycle, AStoreToAPageThatTheProgramDropsWhileItsCleanBlockLeavesIsKept) {
  static std::atomic<unsigned char*> dropped;
  systest::move_no_pages();
  configure({{"host_budget", "64MiB"}, {"block_size", "64KiB"}});
  if (IsSkipped()) return;
  if (on_module()) GTEST_SKIP() << "the store would wait for the thread that makes it";
  vmem::region region(kMiB, VMEM_HOST_ONLY);
  auto bytes = region.view<unsigned char>();
  memset(bytes.data(), 7, bytes.size());
  region.evict();
  for (size_t i = 0; i < bytes.size(); i += 4096) ASSERT_EQ(bytes[i], 7);  // clean
  dropped = bytes.data();
  vmem::core::step_hook = [](const char* s) {
    unsigned char* const page = s == std::string_view("evict.taken") ? dropped.exchange(nullptr) : nullptr;
    if (page == nullptr || madvise(page, 4096, MADV_DONTNEED) != 0) return;
    *static_cast<volatile unsigned char*>(page) = 42;
  };
  region.evict();
  vmem::core::step_hook = nullptr;
  EXPECT_EQ(dropped, nullptr);
  EXPECT_EQ(bytes[0], 42);
  region.evict();
  EXPECT_EQ(bytes[0], 42);
  for (size_t i = 4096; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], 7) << i;
}

TEST_F(Lifecycle, DontNeedDropsOnlyBlocksWhollyInside) {
  configure({{"host_budget", "64MiB"}});
  if (IsSkipped()) return;
  vmem::region region(8 * kMiB, VMEM_HOST_ONLY);
  auto bytes = region.view<unsigned char>();
  memset(bytes.data(), 7, bytes.size());
  ASSERT_EQ(vmem_advise(&bytes[1], 6 * kMiB, VMEM_ADVISE_DONT_NEED, 0), 0);
  EXPECT_EQ(bytes[0], 7);
  EXPECT_EQ(bytes[2 * kMiB - 1], 7);
  EXPECT_EQ(bytes[2 * kMiB], 0);
  EXPECT_EQ(bytes[6 * kMiB - 1], 0);
  EXPECT_EQ(bytes[6 * kMiB], 7);
  region.evict();
  EXPECT_EQ(bytes[3 * kMiB], 0);
  region.advise(VMEM_ADVISE_DONT_NEED);
  EXPECT_EQ(bytes[8 * kMiB - 1], 0);
  EXPECT_EQ(vmem::stats().ssd_bytes, 0u);
}

TEST_F(Lifecycle, PrefetchBringsBlocksBeforeTheyAreTouched) {
  configure({{"host_budget", "64MiB"}});
  if (IsSkipped()) return;
  systest::TempFile file(16 * kMiB, 3);
  vmem::region region(16 * kMiB, file.path(), 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
  region.prefetch();
  vmem::test::eventually([&] { return region.query().host_bytes >= region.size(); });
  EXPECT_EQ(region.query().host_bytes, region.size());
  const auto want = systest::TempFile::content(16 * kMiB, 3);
  EXPECT_EQ(memcmp(region.data(), want.data(), want.size()), 0);
  EXPECT_EQ(vmem::stats().prefetched_blocks, 8u);
  EXPECT_EQ(vmem::stats().read_bytes, region.size()) << "no block is read twice";
  region.prefetch(VMEM_SSD);
  vmem::test::eventually([&] { return region.query().host_bytes == 0; });
  EXPECT_EQ(region.query().host_bytes, 0u);
}

// A block that is arriving or being written when the call comes is handled after that.
TEST_F(Lifecycle, PrefetchToTheSsdAlsoTakesBlocksThatMoveAtTheMoment) {
  static std::atomic<bool> met, asked;
  static std::atomic<const char*> where;
  for (const char* step : {"install.after", "evict.taken"}) {
    configure({{"host_budget", "64MiB"}});
    if (IsSkipped()) return;
    vmem::region region(4 * kMiB, VMEM_HOST_ONLY);
    auto words = region.view<uint64_t>();
    words[0] = 7;
    const bool comes = step == std::string_view("install.after");
    if (comes) region.evict();
    met = asked = false;
    where = step;
    vmem::core::step_hook = [](const char* s) {
      if (s != std::string_view(where.load()) || met.exchange(true)) return;
      while (!asked) usleep(1000);
      usleep(50000);  // time for the call to pass the block over; needed only to see that
    };
    std::thread mover([&] {
      if (comes) {
        EXPECT_EQ(words[0], 7u);
      } else {
        region.sync();
      }
    });
    vmem::test::eventually([&] { return met.load(); });
    EXPECT_TRUE(met);
    region.prefetch(VMEM_SSD);
    asked = true;
    mover.join();
    vmem::core::step_hook = nullptr;
    vmem::test::eventually([&] { return region.query().host_bytes == 0; });
    EXPECT_EQ(region.query().host_bytes, 0u) << step;
    EXPECT_EQ(words[0], 7u);
    vmem_shutdown();
  }
}

TEST_F(Lifecycle, AdviceIsAcceptedAndDataStaysRight) {
  configure({{"host_budget", "16MiB"}});
  if (IsSkipped()) return;
  vmem::region region(64 * kMiB, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  uint64_t round = 0;
  for (int advice : {VMEM_ADVISE_SEQUENTIAL, VMEM_ADVISE_RANDOM, VMEM_ADVISE_NORMAL, VMEM_ADVISE_COLD, VMEM_ADVISE_HOT,
                     VMEM_ADVISE_PIN, VMEM_ADVISE_PRIORITY_HIGH, VMEM_ADVISE_PRIORITY_LOW, VMEM_ADVISE_PRIORITY_NORMAL,
                     VMEM_ADVISE_SET_PREFERRED_LOCATION, VMEM_ADVISE_SET_READ_MOSTLY, VMEM_ADVISE_WILL_NEED}) {
    ASSERT_EQ(vmem_advise(region.data(), region.size(), advice, VMEM_HOST), 0) << vmem_last_error();
    ++round;
    for (size_t i = 0; i < words.size(); i += 256) words[i] = stamp(i, round);
    for (size_t i = 0; i < words.size(); i += 256) ASSERT_EQ(words[i], stamp(i, round));
  }
}

// Undoing a range of advice, or one end of it, takes no entry and is never refused; the 257th range
// is.
TEST_F(Lifecycle, AdviceCanAlwaysBeUndone) {
  configure({{"host_budget", "16MiB"}, {"block_size", "4KiB"}});
  if (IsSkipped()) return;
  constexpr size_t kBlock = 4096;
  vmem::region r(600 * kBlock);
  const auto advise = [&](size_t block, int advice) {
    return vmem_advise(r.view<char>().data() + block * kBlock, kBlock, advice, 0);
  };
  for (size_t i = 0; i < 256; ++i) ASSERT_EQ(advise(2 * i, VMEM_ADVISE_COLD), 0) << vmem_last_error();
  EXPECT_EQ(advise(590, VMEM_ADVISE_COLD), -ENOSPC);
  EXPECT_EQ(advise(590, VMEM_ADVISE_NORMAL), 0) << vmem_last_error();
  EXPECT_EQ(advise(0, VMEM_ADVISE_NORMAL), 0) << vmem_last_error();
  EXPECT_EQ(vmem_advise(r.data(), r.size(), VMEM_ADVISE_NORMAL, 0), 0) << vmem_last_error();
  for (size_t i = 0; i < 256; ++i)
    ASSERT_EQ(vmem_advise(r.view<char>().data() + 2 * i * kBlock, 2 * kBlock, VMEM_ADVISE_COLD, 0), 0);
  for (size_t i = 0; i < 256; ++i) ASSERT_EQ(advise(2 * i + i % 2, VMEM_ADVISE_NORMAL), 0) << vmem_last_error();
}

TEST_F(Lifecycle, HotBlocksOutliveAScan) {
  configure({{"host_budget", "32MiB"}, {"readahead", "0"}});
  if (IsSkipped()) return;
  vmem::region hot(8 * kMiB, VMEM_HOST_ONLY), scan(128 * kMiB, VMEM_HOST_ONLY);
  hot.advise(VMEM_ADVISE_HOT);
  memset(hot.data(), 1, hot.size());
  memset(scan.data(), 2, scan.size());
  EXPECT_EQ(hot.query().host_bytes, hot.size());
}

TEST_F(Lifecycle, KillLeavesNoFileBehind) {
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  std::string folder = systest::temp_folder() + "/vmem-kill.XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = systest::start_child(
      "LifecycleChild.DISABLED_WritesForEver",
      {{"VMEM_SSD_PATH", folder}, {"VMEM_HOST_BUDGET", "16MiB"}, {"VMEM_TEST_FD", std::to_string(ready[1])}});
  close(ready[1]);
  char byte = 0;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  close(ready[0]);
  EXPECT_EQ(count_entries(folder.c_str()), 2u) << "only . and ..";
  EXPECT_EQ(rmdir(folder.c_str()), 0);
}

TEST(LifecycleChild, DISABLED_WritesForEver) {
  vmem::region region(64 * kMiB, VMEM_HOST_ONLY);
  for (unsigned round = 1;; ++round) {
    memset(region.data(), static_cast<int>(round), region.size());
    if (round == 2) {
      ASSERT_EQ(write(atoi(getenv("VMEM_TEST_FD")), "x", 1), 1);
    }
  }
}

}  // namespace
