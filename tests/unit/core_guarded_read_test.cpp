#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/process/guarded_read.h"
#include "core/types.h"

namespace {

using vmem::core::Absent;
using vmem::core::kPage;

// Four pages of memory.
class GuardedRead : public testing::Test {
 protected:
  void map(int flags, int fd = -1) {
    void* const p = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, flags, fd, 0);
    ASSERT_NE(p, MAP_FAILED);
    at_ = static_cast<char*>(p);
    for (size_t i = 0; i < kSize; ++i) at_[i] = byte(i);
  }
  void TearDown() override {
    if (at_ != nullptr) munmap(at_, kSize);
  }
  static char byte(size_t i) { return static_cast<char>(i / kPage + i % 7 + 1); }
  // Expects the pages from `first` on to have their bytes, except one of zeros.
  void expect(const char* got, size_t first, size_t pages, size_t zeros) {
    for (size_t i = 0; i < pages * kPage; ++i) {
      const size_t here = first * kPage + i;
      ASSERT_EQ(got[i], here / kPage == zeros ? 0 : byte(here)) << "byte " << here;
    }
  }

  static constexpr size_t kSize = 4 * kPage, kNone = ~size_t{0};
  char* at_ = nullptr;
  std::array<char, kSize> got_{};
};

TEST_F(GuardedRead, WhatTheProgramMayNotReadIsRead) {
  map(MAP_PRIVATE | MAP_ANONYMOUS);
  ASSERT_EQ(mprotect(at_ + kPage, kPage, PROT_NONE), 0);
  for (const Absent absent : {Absent::zeros, Absent::elsewhere}) {
    got_.fill(-1);
    ASSERT_EQ(vmem::core::read_guarded(got_.data(), at_, kSize, absent), 0);
    expect(got_.data(), 0, 4, kNone);
    got_.fill(-1);
    ASSERT_EQ(vmem::core::read_guarded_at_once(got_.data(), at_, kSize, absent), 0);
    expect(got_.data(), 0, 4, kNone);
  }
}

TEST_F(GuardedRead, AnAbsentPageOfAnonymousMemoryIsZeros) {
  map(MAP_PRIVATE | MAP_ANONYMOUS);
  ASSERT_EQ(madvise(at_ + kPage, kPage, MADV_DONTNEED), 0);
  ASSERT_EQ(mprotect(at_ + kPage, 2 * kPage, PROT_NONE), 0);
  got_.fill(-1);
  ASSERT_EQ(vmem::core::read_guarded(got_.data(), at_, kSize, Absent::zeros), 0);
  expect(got_.data(), 0, 4, 1);
  got_.fill(-1);
  ASSERT_EQ(vmem::core::read_guarded_at_once(got_.data(), at_, kSize, Absent::zeros), 0);
  expect(got_.data(), 0, 4, 1);
}

// As in a mapping of the module, which removes a protected block's pages from the page tables.
TEST_F(GuardedRead, WhatIsElsewhereIsReadThoughNoPageTableHasIt) {
  const int fd = memfd_create("vmem-test", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(fd, kSize), 0);
  map(MAP_SHARED, fd);
  close(fd);
  ASSERT_EQ(madvise(at_, kSize, MADV_DONTNEED), 0);
  ASSERT_EQ(mprotect(at_ + kPage, kPage, PROT_NONE), 0);
  got_.fill(-1);
  ASSERT_EQ(vmem::core::read_guarded_at_once(got_.data(), at_ + kPage, 2 * kPage, Absent::elsewhere), 0);
  expect(got_.data(), 1, 2, kNone);
  ASSERT_EQ(madvise(at_, kSize, MADV_DONTNEED), 0);
  got_.fill(-1);
  ASSERT_EQ(vmem::core::read_guarded(got_.data(), at_, kSize, Absent::elsewhere), 0);
  expect(got_.data(), 0, 4, kNone);
}

TEST_F(GuardedRead, WhatNobodyMapsIsRefused) {
  map(MAP_PRIVATE | MAP_ANONYMOUS);
  char* const at = std::exchange(at_, nullptr);
  ASSERT_EQ(munmap(at + 2 * kPage, kPage), 0);
  for (const Absent absent : {Absent::zeros, Absent::elsewhere}) {
    // A page of no mapping is not in the page tables, either; it reads as zeros if the caller asks
    // for zeros.
    const int refused = absent == Absent::elsewhere ? -EFAULT : 0;
    EXPECT_EQ(vmem::core::read_guarded_at_once(got_.data(), at, kSize, absent), refused);
  }
  munmap(at, 2 * kPage);
  munmap(at + 3 * kPage, kPage);
}

TEST_F(GuardedRead, AReaderThatIsOpenNeedsNoDescriptorAndTakesNoOtherFileForItsOwn) {
  map(MAP_PRIVATE | MAP_ANONYMOUS);
  ASSERT_EQ(madvise(at_ + kPage, kPage, MADV_DONTNEED), 0);
  ASSERT_EQ(mprotect(at_ + 2 * kPage, kPage, PROT_NONE), 0);
  const int next = dup(STDIN_FILENO);  // the number that the reader gets
  close(next);
  const vmem::core::GuardedReader reader;
  const auto right = [&] {
    got_.fill(-1);
    ASSERT_EQ(reader.read_at_once(got_.data(), at_, kSize, Absent::zeros), 0);
    expect(got_.data(), 0, 4, 1);
  };
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const rlimit none{0, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  right();
  setrlimit(RLIMIT_NOFILE, &limit);
  close(next);  // as a program that closes what it has not opened
  right();
  ASSERT_EQ(open("/dev/zero", O_RDONLY | O_CLOEXEC), next);
  right();
}

}  // namespace
