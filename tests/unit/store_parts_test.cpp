// Long transfers, which go in parts: what is issued, and how they end.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <random>
#include <vector>

#include "core/scope_guard.h"
#include "store_hand_engine.h"

namespace vmem::store::test {
namespace {

TEST(StoreParts, TheyEndAtMultiplesOfTheirSizeAndAreIssuedInOrder) {
  HandEngine engine(16);
  TempFile file(16 * kMiB, true);
  FileId id = 0;
  ASSERT_TRUE(engine.add_file(file.fd(), &id).ok());
  Buffer buffer(16 * kMiB);
  std::array<Io, 2> ios;
  for (size_t n = 0; n < 2; ++n) {
    ios[n].file = id;
    ios[n].offset = n * 8 * kMiB + kMiB;
    ios[n].buffer = buffer.data() + n * 8 * kMiB;
    ios[n].size = 5 * kMiB + core::kPage;
    Io* const one = &ios[n];
    engine.submit({&one, 1});
  }
  ASSERT_EQ(engine.issue(), 8u);
  const uint64_t offsets[] = {1 * kMiB, 2 * kMiB, 4 * kMiB, 6 * kMiB};
  const size_t sizes[] = {kMiB, 2 * kMiB, 2 * kMiB, core::kPage};
  for (size_t n = 0; n < 8; ++n) {
    EXPECT_EQ(engine.io(n).offset, n / 4 * 8 * kMiB + offsets[n % 4]) << "the younger one's follow the older one's";
    EXPECT_EQ(engine.io(n).size, sizes[n % 4]);
    EXPECT_EQ(engine.io(n).buffer, static_cast<char*>(ios[n / 4].buffer) + offsets[n % 4] - kMiB);
    engine.move(n);
  }
  EXPECT_EQ(engine.deliver_all(), 2u);
}

TEST(StoreParts, WhatIsNoLongerThanOneGoesAsItIs) {
  Long read(4, Io::Op::read, 8 * kMiB, kMiB, kPartBytes);
  read.submit();
  ASSERT_EQ(read.engine.issue(), 1u);
  EXPECT_TRUE(read.engine.is(0, read.io));
  read.engine.move(0);
  EXPECT_EQ(read.engine.deliver_all(), 1u);
  read.expect_read(kPartBytes);
}

TEST(StoreParts, WhatIsMoreUrgentPassesBetweenThem) {
  Long slow(2, Io::Op::read, 16 * kMiB, 0, 16 * kMiB);
  slow.io.urgency = core::Urgency::prefetch;
  Buffer buffer(12 * kMiB);
  std::array<Io, 2> urgent;  // a short one, and a long one
  for (size_t n = 0; n < 2; ++n) {
    urgent[n].file = slow.id;
    urgent[n].buffer = buffer.data() + n * 6 * kMiB;
    urgent[n].size = n == 0 ? core::kPage : 6 * kMiB;
  }
  slow.submit();
  ASSERT_EQ(slow.engine.issue(), 2u) << "no more than the depth";
  for (Io& io : urgent) {
    Io* const one = &io;
    slow.engine.submit({&one, 1});
  }
  ASSERT_EQ(slow.engine.issue(), 0u);
  const auto next = [&](size_t ends) {
    slow.engine.move(ends);
    return slow.engine.issue();
  };
  for (size_t n = 0; n < 8; ++n) ASSERT_EQ(next(n), 1u);
  for (size_t n = 2; n < 6; ++n) EXPECT_EQ(slow.engine.io(n).urgency, core::Urgency::fault) << n;
  EXPECT_EQ(slow.engine.deliver_all(), 2u);
  EXPECT_EQ(slow.done, 0);
  for (size_t n = 6; n < 10; ++n) EXPECT_EQ(slow.engine.io(n).offset, (n - 4) * kPartBytes);
  for (size_t n = 8; n < 12; ++n) slow.engine.move(n), slow.engine.issue();
  EXPECT_EQ(slow.engine.deliver_all(), 1u);
  slow.expect_read(16 * kMiB);
}

TEST(StoreParts, EachIsASlotOfWhatTheBackgroundMayUse) {
  Long slow(8, Io::Op::read, 32 * kMiB, 0, 32 * kMiB);
  slow.io.urgency = core::Urgency::readahead;
  slow.submit();
  EXPECT_EQ(slow.engine.issue(), 7u) << "a slot is kept for faults";
  for (size_t n = 0; n < 16; ++n) slow.engine.move(n), slow.engine.issue();
  EXPECT_EQ(slow.engine.deliver_all(), 1u);
  slow.expect_read(32 * kMiB);
}

TEST(StoreParts, TheyMayEndInAnyOrderAndDoneComesOnceAfterTheLast) {
  for (const Io::Op op : {Io::Op::read, Io::Op::write}) {
    Long io(16, op, 8 * kMiB, core::kPage, 7 * kMiB);
    size_t issued = 0;
    int rounds = 0;
    each_order(4, [&](const std::vector<size_t>& order) {
      io.buffer.data()[rounds] ^= 1;
      io.submit();
      ASSERT_EQ(io.engine.issue(), 4u);
      for (const size_t n : order) {
        EXPECT_EQ(io.engine.deliver_all(), 0u);
        io.engine.move(issued + n);
      }
      issued += 4;
      ++rounds;
      EXPECT_EQ(io.engine.deliver_all(), 1u);
      EXPECT_EQ(io.done, rounds);
      EXPECT_EQ(io.io.result, 0);
      EXPECT_EQ(io.io.transferred, 7 * kMiB);
      EXPECT_TRUE(io.file.matches(core::kPage, io.buffer.data(), 7 * kMiB));
      EXPECT_TRUE(io.engine.quiet());
      const EngineStats stats = io.engine.stats();
      EXPECT_EQ(stats.reads + stats.writes, static_cast<uint64_t>(rounds));
      EXPECT_EQ(stats.read_bytes + stats.write_bytes, static_cast<uint64_t>(rounds) * 7 * kMiB);
    });
  }
}

// Each part fails or not, and in each order.
TEST(StoreParts, TheFirstByOffsetThatFailedSaysTheResultWhenAllHaveEnded) {
  constexpr int kErrors[] = {EIO, ENOSPC, EFAULT, ENOMEM};
  for (const Io::Op op : {Io::Op::read, Io::Op::write}) {
    Long io(16, op, 8 * kMiB, 0, 8 * kMiB);
    io.io.short_read_is_zero = op == Io::Op::read;
    size_t issued = 0, errors = 0;
    for (unsigned failing = 1; failing < 16; ++failing) {
      const auto first = static_cast<size_t>(__builtin_ctz(failing));
      each_order(4, [&](const std::vector<size_t>& order) {
        io.submit();
        ASSERT_EQ(io.engine.issue(), 4u);
        for (const size_t n : order) {
          EXPECT_EQ(io.engine.deliver_all(), 0u) << "somebody may still write to the buffer";
          if ((failing >> n & 1) != 0) {
            io.engine.fail(issued + n, kErrors[n], n % 2 * core::kPage);
          } else {
            io.engine.move(issued + n);
          }
        }
        EXPECT_EQ(io.engine.deliver_all(), 1u);
        EXPECT_EQ(io.io.result, -kErrors[first]);
        EXPECT_EQ(io.io.transferred, first * kPartBytes + first % 2 * core::kPage);
        issued += 4;
        EXPECT_EQ(io.engine.stats().errors, ++errors);
      });
    }
  }
}

TEST(StoreParts, WhatHasNotBeenIssuedWhenOneFailsIsNot) {
  for (const size_t fails : {0, 1, 2}) {
    Long io(3, Io::Op::read, 16 * kMiB, 0, 16 * kMiB);
    Io after;  // it waits behind it
    Buffer page(core::kPage);
    after.file = io.id;
    after.buffer = page.data();
    after.size = page.size();
    io.submit();
    Io* const one = &after;
    io.engine.submit({&one, 1});
    ASSERT_EQ(io.engine.issue(), 3u);
    io.engine.fail(fails, EIO);
    ASSERT_EQ(io.engine.issue(), 1u);
    EXPECT_TRUE(io.engine.is(3, after));
    for (size_t n = 0; n < 3; ++n) {
      if (n == fails) continue;
      EXPECT_EQ(io.engine.deliver_all(), 0u) << "one is under way";
      io.engine.move(n);
    }
    EXPECT_EQ(io.engine.deliver_all(), 1u);
    EXPECT_EQ(io.done, 1);
    EXPECT_EQ(io.io.result, -EIO);
    EXPECT_EQ(io.io.transferred, fails * kPartBytes);
    io.engine.move(3);
    EXPECT_EQ(io.engine.deliver_all(), 1u);
    EXPECT_TRUE(io.engine.quiet());
  }
}

TEST(StoreParts, TheFileMayEndInAnyOfThem) {
  for (const bool direct : {false, true}) {
    for (const size_t end : {size_t{0}, size_t{100}, 2 * kMiB - 1, 2 * kMiB, 2 * kMiB + 512, 5 * kMiB + 7, 6 * kMiB,
                             8 * kMiB - 1, 8 * kMiB}) {
      for (const bool zero : {false, true}) {
        for (const bool backwards : {false, true}) {
          Long io(4, Io::Op::read, end, 0, 8 * kMiB, direct);
          io.io.short_read_is_zero = zero;
          io.submit();
          ASSERT_EQ(io.engine.issue(), 4u);
          for (size_t n = 0; n < 4; ++n) io.engine.move(backwards ? 3 - n : n);
          ASSERT_EQ(io.engine.deliver_all(), 1u);
          EXPECT_EQ(io.io.result, zero || end == 8 * kMiB ? 0 : -EIO) << end;
          io.expect_read(end);
        }
      }
    }
  }
}

TEST(StoreParts, WithinTheFileNoneMakesItLonger) {
  for (const bool direct : {false, true}) {
    for (const size_t end : {size_t{0}, size_t{100}, 2 * kMiB, 2 * kMiB + 512, 5 * kMiB + 7, 8 * kMiB}) {
      for (const bool backwards : {false, true}) {
        Long io(4, Io::Op::write, end, 0, 8 * kMiB, direct);
        io.io.within_file = true;
        io.submit();
        ASSERT_EQ(io.engine.issue(), 4u);
        for (size_t n = 0; n < 4; ++n) io.engine.move(backwards ? 3 - n : n);
        ASSERT_EQ(io.engine.deliver_all(), 1u);
        struct stat st;
        ASSERT_EQ(fstat(io.file.fd(), &st), 0);
        EXPECT_EQ(static_cast<size_t>(st.st_size), end);
        EXPECT_EQ(io.io.result, 0);
        EXPECT_EQ(io.io.transferred, end);
        EXPECT_TRUE(io.file.matches(0, io.buffer.data(), end));
      }
    }
  }
}

// The file ended in the second part, and was longer again when the third was read.
TEST(StoreParts, BehindTheEndAreZerosAlsoWhereTheFileGrowsMeanwhile) {
  Long io(4, Io::Op::read, 8 * kMiB, 0, 8 * kMiB);
  io.io.short_read_is_zero = true;
  ASSERT_EQ(ftruncate(io.file.fd(), 3 * kMiB), 0);
  io.submit();
  ASSERT_EQ(io.engine.issue(), 4u);
  io.engine.move(0);
  io.engine.move(1);
  Buffer ones(4 * kMiB);
  memset(ones.data(), 1, ones.size());
  ASSERT_EQ(pwrite(io.file.fd(), ones.data(), ones.size(), 4 * kMiB), static_cast<ssize_t>(ones.size()));
  io.engine.move(3);
  io.engine.move(2);
  ASSERT_EQ(io.engine.deliver_all(), 1u);
  EXPECT_EQ(io.io.result, 0);
  io.expect_read(3 * kMiB);
}

}  // namespace
}  // namespace vmem::store::test
