// The library's own allocator: blocks do not overlap, freed memory is used again or returns to the
// kernel, and malloc has no part in it.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "core/os_allocator.h"
#include "core/status.h"

namespace {

using namespace vmem::core;

struct Piece {
  unsigned char* at;
  size_t size;
  unsigned char with;
};

bool whole(const Piece& p) {
  for (size_t i = 0; i < p.size; ++i) {
    if (p.at[i] != p.with) return false;
  }
  return true;
}

void take_and_give(unsigned seed) {
  std::minstd_rand dice(seed);
  std::vector<Piece> pieces;
  for (int round = 0; round < 20000; ++round) {
    if (pieces.size() < 300 && dice() % 5 < 3) {
      const size_t size = dice() % 16 == 0 ? 1 + dice() % 40000 : 1 + dice() % 600;
      auto* const at = static_cast<unsigned char*>(own_allocate(size));
      ASSERT_EQ(reinterpret_cast<uintptr_t>(at) % 16, 0u);
      pieces.push_back({at, size, static_cast<unsigned char>(dice())});
      memset(at, pieces.back().with, size);
    } else if (!pieces.empty()) {
      std::swap(pieces[dice() % pieces.size()], pieces.back());
      ASSERT_TRUE(whole(pieces.back()));
      own_free(pieces.back().at, pieces.back().size);
      pieces.pop_back();
    }
  }
  for (const Piece& p : pieces) {
    ASSERT_TRUE(whole(p));
    own_free(p.at, p.size);
  }
}

TEST(OwnMemory, IsNobodyElses) {
  std::vector<std::thread> threads;
  for (unsigned t = 1; t <= 4; ++t) threads.emplace_back([t] { take_and_give(t); });
  for (std::thread& t : threads) t.join();
}

TEST(OwnMemory, ThatComesBackIsUsedAgain) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer has it";
#endif
  void* const other = own_allocate(100);
  void* const first = own_allocate(100);
  own_free(first, 100);
  EXPECT_EQ(own_allocate(100), first);
  own_free(first, 100);
  own_free(other, 100);
}

TEST(OwnMemory, ARefusalIsBadAllocAndAnErrorHasItsCode) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer has it";
#endif
  memory_hook.store([] { return true; });
  bool refused = false;
  try {
    own_free(own_allocate(8), 8);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  const Status s = error(EBUSY, "a message of more than so many characters as a string has in itself: %d", 7);
  memory_hook.store(nullptr);
  EXPECT_TRUE(refused);
  EXPECT_EQ(s.code(), -EBUSY);
  EXPECT_EQ(s.text(), "out of memory");
  EXPECT_THROW(Own<uint64_t>().allocate(SIZE_MAX / 4), std::bad_alloc);
}

// Other threads use the allocator during the fork.
TEST(OwnMemory, AChildFindsItWhole) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer has it";
#endif
  keep_own_memory_in_children();
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      while (!stop) own_free(own_allocate(64), 64);
    });
  }
  for (int i = 0; i < 100; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (int k = 0; k < 10; ++k) own_free(own_allocate(64), 64);
      _exit(0);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  stop = true;
  for (std::thread& t : threads) t.join();
}

}  // namespace
