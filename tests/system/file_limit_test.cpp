// RLIMIT_FSIZE below the size of the store or of a shared file: an error with a number and its
// reason, no SIGXFSZ, no lost data, and no endless wait.
#include <sys/resource.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <string>

#include "support.h"

namespace systest {
namespace {

constexpr size_t kBlock = 64 << 10;
constexpr size_t kWords = kBlock / sizeof(uint64_t);
std::atomic<int> signals{0};

class FileLimit : public SystemTest, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before_), 0);
    signals = 0;
    struct sigaction counts = {};
    counts.sa_handler = [](int) { ++signals; };
    sigaction(SIGXFSZ, &counts, &was_);
  }
  void TearDown() override {
    lift();
    SystemTest::TearDown();
    EXPECT_EQ(signals, 0);
    sigaction(SIGXFSZ, &was_, nullptr);
  }
  void start() {
    configure({{"host_budget", "16MiB"},
               {"block_size", "64KiB"},
               {"readahead", "0"},
               {"io_engine", GetParam()},
               {"fault_timeout_ms", "300"}});
  }
  void limit(size_t more = 0) const {
    const rlimit small{(1 << 20) + more, before_.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  }
  void lift() const { ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before_), 0); }
  static void write(const vmem::region& r, size_t block, uint64_t round) {
    uint64_t* const words = r.view<uint64_t>().data() + block * kWords;
    for (size_t i = 0; i < kWords; i += 512) words[i] = stamp(block * kWords + i, round);
  }
  static bool right(const vmem::region& r, size_t block, uint64_t round) {
    const uint64_t* const words = r.view<uint64_t>().data() + block * kWords;
    for (size_t i = 0; i < kWords; i += 512)
      if (words[i] != stamp(block * kWords + i, round)) return false;
    return true;
  }
  static char* at(const vmem::region& r, size_t block) { return static_cast<char*>(r.data()) + block * kBlock; }

 private:
  rlimit before_{};
  struct sigaction was_ = {};
};

TEST_P(FileLimit, AStoreThatMayNotBeLongerRefusesAndAllThatIsThereCanBeRead) {
  for (const bool early : {true, false}) {
    if (early) limit();
    start();
    if (IsSkipped()) return;
    if (!early) limit();
    vmem::region r(512 * kBlock, VMEM_HOST_ONLY);
    size_t b = 0;
    while (b < 512 && !raises_sigbus([&] { write(r, b, 1); })) ++b;
    ASSERT_GT(b, 100u);
    ASSERT_LT(b, 512u) << "there is no room for all";
    EXPECT_EQ(vmem_sync(r.data(), b * kBlock), -ENOSPC);
    EXPECT_NE(std::string(vmem_last_error()).find("File too large"), std::string::npos) << vmem_last_error();
    // Make room for a block or two, through which all blocks on the SSD come and go.
    const size_t gone = b - 8;
    ASSERT_EQ(vmem_advise(at(r, gone), 8 * kBlock, VMEM_ADVISE_DONT_NEED, VMEM_HOST), 0) << vmem_last_error();
    for (int again = 0; again < 3; ++again)
      for (size_t i = 0; i < gone; ++i) ASSERT_TRUE(right(r, i, 1)) << i;
    lift();
    vmem_sync(r.data(), r.size());  // reports the writes that failed before
    r.sync();
    for (size_t i = 0; i < 512; ++i) {
      vmem::lease lease(at(r, i), kBlock, VMEM_READ | VMEM_WRITE);  // makes the refused block usable again
      write(r, i, 2);
    }
    r.sync();
    for (size_t i = 0; i < 512; ++i) ASSERT_TRUE(right(r, i, 2)) << i;
    r.free();
    vmem_shutdown();
  }
}

TEST_P(FileLimit, WhatLiesBeyondItOfASharedFileStaysInMemory) {
  for (const size_t more : {0, 1, 1000, 4608}) {  // direct I/O cannot write up to an odd limit
    SCOPED_TRACE(more);
    start();
    if (IsSkipped()) return;
    const TempFile file(64 * kBlock);
    vmem::region r(64 * kBlock, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
    for (size_t b = 0; b < 64; ++b) write(r, b, 1);
    limit(more);
    EXPECT_EQ(vmem_sync(r.data(), r.size()), -EFBIG);
    EXPECT_NE(std::string(vmem_last_error()).find("File too large"), std::string::npos) << vmem_last_error();
    EXPECT_EQ(vmem_sync(r.data(), 16 * kBlock), 0) << vmem_last_error();
    EXPECT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), -EFBIG);
    for (size_t b = 0; b < 64; ++b) ASSERT_TRUE(right(r, b, 1)) << b;
    lift();
    vmem_sync(r.data(), r.size());  // reports the writes that failed before
    r.sync();
    const auto bytes = file.read();
    for (size_t b = 0; b < 64; ++b) {
      uint64_t word = 0;
      memcpy(&word, bytes.data() + b * kBlock, sizeof word);
      ASSERT_EQ(word, stamp(b * kWords, 1)) << b;
    }
    r.free();
    vmem_shutdown();
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, FileLimit, ::testing::Values("io_uring", "threads"));

}  // namespace
}  // namespace systest
