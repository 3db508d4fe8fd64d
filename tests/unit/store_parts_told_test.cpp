// Progress of long reads, which go in parts, and its reports.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cerrno>
#include <functional>
#include <vector>

#include "store_hand_engine.h"

namespace vmem::store::test {
namespace {

// A read that reports progress; checks the bytes that have arrived.
struct Told : Long {
  Told(unsigned depth, size_t size, uint64_t offset = 0, size_t file_size = 0)
      : Long(depth, Io::Op::read, file_size != 0 ? file_size : offset + size, offset, size) {
    io.user = this;
    io.done = [](Io& over) { ++static_cast<Told*>(over.user)->done; };
    io.progress = [](Io& over, size_t bytes) { static_cast<Told*>(over.user)->come(bytes); };
  }
  void come(size_t bytes) {
    EXPECT_EQ(done, ended_before) << "never after done()";
    EXPECT_FALSE(inside) << "never two at once";
    inside = true;
    const size_t before = told.empty() ? 0 : told.back();
    EXPECT_GT(bytes, before);
    EXPECT_LE(bytes - before, kPartBytes);
    EXPECT_LT(bytes, io.size);
    EXPECT_TRUE(file.matches(io.offset + before, buffer.data() + before, bytes - before));
    told.push_back(bytes);
    if (meanwhile) meanwhile();
    inside = false;
  }
  void again() {
    buffer.zero();
    told.clear();
    ended_before = done;
    submit();
  }
  std::vector<size_t> told;
  std::function<void()> meanwhile;
  int ended_before = 0;
  bool inside = false;
};

TEST(StorePartsTold, ItHasComeAsFarAsNoPartIsMissingInWhateverOrderTheyEnd) {
  Told read(16, 7 * kMiB, core::kPage);
  constexpr size_t kEnds[] = {2 * kMiB - core::kPage, 4 * kMiB - core::kPage, 6 * kMiB - core::kPage};
  size_t issued = 0;
  each_order(4, [&](const std::vector<size_t>& order) {
    read.again();
    ASSERT_EQ(read.engine.issue(), 4u);
    unsigned ended = 0;
    for (const size_t n : order) {
      read.engine.move(issued + n);
      ended |= 1u << n;
      const auto whole = static_cast<size_t>(std::countr_one(ended));
      read.engine.tell();
      const bool over = whole == 4;
      if (!over) {
        EXPECT_EQ(read.told.size(), whole);
      }
      EXPECT_EQ(read.engine.deliver_all(), over ? 1u : 0u);
    }
    for (size_t n = 0; n < read.told.size(); ++n) EXPECT_EQ(read.told[n], kEnds[n]);
    EXPECT_EQ(read.engine.tell(), 0u) << "never after done()";
    issued += 4;
  });
}

TEST(StorePartsTold, WhatIsOverIsNotToldOfAnyMore) {
  Told read(16, 8 * kMiB);
  read.submit();
  ASSERT_EQ(read.engine.issue(), 4u);
  for (size_t n = 0; n < 3; ++n) read.engine.move(n);
  EXPECT_EQ(read.engine.tell(1), 1u);
  read.engine.move(3);
  EXPECT_EQ(read.engine.tell(), 0u);
  EXPECT_EQ(read.engine.deliver_all(), 1u);
  EXPECT_EQ(read.told, std::vector<size_t>{kPartBytes});
}

TEST(StorePartsTold, DoneWaitsForItAndItIsNotCalledInsideItself) {
  Told read(16, 8 * kMiB);
  read.submit();
  ASSERT_EQ(read.engine.issue(), 4u);
  read.meanwhile = [&] {
    if (read.told.size() != 1) return;
    for (size_t n = 1; n < 4; ++n) {
      read.engine.move(n);
      EXPECT_EQ(read.engine.tell(), 0u);
      EXPECT_EQ(read.engine.deliver_all(), 0u);
    }
  };
  read.engine.move(0);
  EXPECT_EQ(read.engine.tell(), 1u);
  EXPECT_EQ(read.engine.deliver_all(), 1u);
  EXPECT_EQ(read.io.result, 0);
  read.expect_read(8 * kMiB);
}

TEST(StorePartsTold, WhatEndsMeanwhileIsToldAfterwards) {
  Told read(16, 8 * kMiB);
  read.submit();
  ASSERT_EQ(read.engine.issue(), 4u);
  read.meanwhile = [&] {
    if (read.told.size() == 1) read.engine.move(1), read.engine.move(2);
  };
  read.engine.move(0);
  EXPECT_EQ(read.engine.tell(), 3u);
  read.engine.move(3);
  EXPECT_EQ(read.engine.deliver_all(), 1u);
}

// Each part fails: before or after the others have ended, or during their report.
TEST(StorePartsTold, NothingIsToldOfAReadThatFailed) {
  for (size_t fails = 0; fails < 4; ++fails) {
    for (const bool first : {false, true}) {
      Told read(16, 8 * kMiB);
      read.submit();
      ASSERT_EQ(read.engine.issue(), 4u);
      if (first) read.engine.fail(fails, EIO);
      for (size_t n = 0; n < 4; ++n) {
        if (n != fails) read.engine.move(n);
        if (first) {
          EXPECT_EQ(read.engine.tell(), 0u);
        }
      }
      if (!first && fails != 0) {
        EXPECT_EQ(read.engine.tell(1), 1u);
      }
      if (!first) read.engine.fail(fails, EIO);
      EXPECT_EQ(read.engine.tell(), 0u);
      EXPECT_EQ(read.engine.deliver_all(), 1u);
      EXPECT_EQ(read.io.result, -EIO);
    }
    Told read(16, 8 * kMiB);
    if (fails == 0) continue;
    read.submit();
    ASSERT_EQ(read.engine.issue(), 4u);
    read.meanwhile = [&] {
      read.engine.fail(fails, EIO);
      for (size_t n = 1; n < 4; ++n) {
        if (n != fails) read.engine.move(n);
      }
    };
    read.engine.move(0);
    EXPECT_EQ(read.engine.tell(), 1u);
    EXPECT_EQ(read.engine.deliver_all(), 1u);
    EXPECT_EQ(read.io.result, -EIO);
  }
}

TEST(StorePartsTold, ItEndsWhereTheFileDoes) {
  for (const size_t end : {size_t{100}, 2 * kMiB, 2 * kMiB + 512, 5 * kMiB + 7}) {
    Told read(4, 8 * kMiB, 0, end);
    read.io.short_read_is_zero = true;
    read.submit();
    ASSERT_EQ(read.engine.issue(), 4u);
    for (size_t n = 0; n < 3; ++n) {
      read.engine.move(n);
      read.engine.tell();
    }
    EXPECT_LE(read.told.empty() ? 0 : read.told.back(), end);
    read.engine.move(3);
    EXPECT_EQ(read.engine.deliver_all(), 1u);
    read.expect_read(end);
  }
}

TEST(StorePartsTold, TheMoreUrgentIsToldFirst) {
  Told slow(16, 8 * kMiB);
  Io fast = slow.io;
  Buffer buffer(8 * kMiB);
  std::vector<core::Urgency> order;
  slow.io.urgency = core::Urgency::prefetch;
  fast.buffer = buffer.data();
  for (Io* const io : {&slow.io, &fast}) {
    io->user = &order;
    io->done = nullptr;
    io->progress = [](Io& told, size_t) {
      static_cast<std::vector<core::Urgency>*>(told.user)->push_back(told.urgency);
    };
    slow.engine.submit({&io, 1});
    slow.engine.issue();
  }
  slow.engine.move(0);
  slow.engine.move(4);
  EXPECT_EQ(slow.engine.tell(), 2u);
  EXPECT_EQ(order, (std::vector{core::Urgency::fault, core::Urgency::prefetch}));
  for (const size_t n : {1, 2, 3, 5, 6, 7}) slow.engine.move(static_cast<size_t>(n));
  EXPECT_EQ(slow.engine.tell(), 0u);
  EXPECT_EQ(slow.engine.deliver_all(), 2u);
}

// If all parts were under way at once, all would arrive at the same time, at the end.
TEST(StorePartsTold, OfOneThatIsReadAloneFourAreUnderWay) {
  Told read(16, 24 * kMiB);
  read.io.urgency = core::Urgency::acquire;
  read.submit();
  ASSERT_EQ(read.engine.issue(), 4u);
  for (size_t n = 0; n < 8; ++n) {
    read.engine.move(n);
    EXPECT_EQ(read.engine.issue(), 1u) << n;
    EXPECT_EQ(read.engine.tell(), 1u) << n;
  }
  EXPECT_EQ(read.engine.issue(), 0u) << "all have been";
  for (size_t n = 8; n < 12; ++n) read.engine.move(n);
  EXPECT_EQ(read.engine.deliver_all(), 1u);
  read.expect_read(24 * kMiB);
  // Without progress reports: as many as there are slots.
  read.io.progress = nullptr;
  read.again();
  EXPECT_EQ(read.engine.issue(), 12u);
  for (size_t n = 12; n < 24; ++n) read.engine.move(n);
  EXPECT_EQ(read.engine.deliver_all(), 1u);
}

TEST(StorePartsTold, WhatIsMoreUrgentPassesOneThatIsReadAloneAndWhatIsLessDoesNot) {
  Told read(16, 32 * kMiB);
  read.io.urgency = core::Urgency::acquire;
  Buffer buffer(core::kPage);
  std::array<Io, 2> ios;
  for (Io& io : ios) {
    io.file = read.id;
    io.buffer = buffer.data();
    io.size = core::kPage;
  }
  ios[0].urgency = core::Urgency::prefetch;
  ios[1].urgency = core::Urgency::fault;
  read.submit();
  ASSERT_EQ(read.engine.issue(), 4u);
  for (Io& io : ios) {
    Io* const one = &io;
    read.engine.submit({&one, 1});
  }
  ASSERT_EQ(read.engine.issue(), 1u);
  EXPECT_TRUE(read.engine.is(4, ios[1]));
  for (size_t n = 0; n < 12; ++n) {
    read.engine.move(n < 4 ? n : n + 1);
    ASSERT_EQ(read.engine.issue(1), 1u);
    EXPECT_NE(read.engine.io(n + 5).urgency, core::Urgency::prefetch) << n;
  }
  ASSERT_EQ(read.engine.issue(), 1u) << "all of it has been issued";
  EXPECT_TRUE(read.engine.is(17, ios[0]));
  for (const size_t n : {4, 13, 14, 15, 16, 17}) read.engine.move(static_cast<size_t>(n));
  EXPECT_EQ(read.engine.deliver_all(), 3u);
}

// The disk of the read may stall while that of the others does not.
TEST(StorePartsTold, WhatIsLessUrgentHasTheSlotsThatItWouldNotHaveHad) {
  for (const core::Urgency less : {core::Urgency::acquire, core::Urgency::writeback}) {
    Told read(16, 20 * kMiB);  // ten parts
    Buffer buffer(core::kPage);
    std::array<Io, 12> others;
    read.submit();
    ASSERT_EQ(read.engine.issue(), 4u);
    for (size_t n = 0; n < others.size(); ++n) {
      others[n].urgency = less;
      others[n].file = read.id;
      others[n].offset = 2 * n * core::kPage;
      others[n].buffer = buffer.data();
      others[n].size = core::kPage;
      Io* const one = &others[n];
      read.engine.submit({&one, 1});
    }
    ASSERT_EQ(read.engine.issue(), 6u) << "six parts wait for those that are under way";
    for (size_t n = 4; n < 10; ++n) EXPECT_EQ(read.engine.io(n).urgency, less);
    read.engine.move(0);
    ASSERT_EQ(read.engine.issue(), 2u);
    EXPECT_EQ(read.engine.io(10).urgency, core::Urgency::fault);
    EXPECT_EQ(read.engine.io(11).urgency, less);
    for (size_t n = 1; !read.engine.quiet(); ++n) {
      read.engine.move(n);
      read.engine.issue();
      read.engine.tell();
      read.engine.deliver_all();
    }
    EXPECT_EQ(read.engine.issued(), 10 + others.size());
    read.expect_read(20 * kMiB);
  }
}

TEST(StorePartsTold, WhatIsReadAloneInTheBackgroundLeavesItsSlotsToFaults) {
  Told read(16, 40 * kMiB);
  read.io.urgency = core::Urgency::prefetch;
  Buffer buffer(core::kPage);
  std::array<Io, 2> others;
  read.submit();
  ASSERT_EQ(read.engine.issue(), 4u);
  for (size_t n = 0; n < 2; ++n) {
    others[n].urgency = n == 0 ? core::Urgency::writeback : core::Urgency::fault;
    others[n].file = read.id;
    others[n].buffer = buffer.data();
    others[n].size = core::kPage;
    Io* const one = &others[n];
    read.engine.submit({&one, 1});
  }
  ASSERT_EQ(read.engine.issue(), 1u);
  EXPECT_TRUE(read.engine.is(4, others[1]));
  read.engine.move(4);
  // Twenty parts, of which background I/O may have fourteen under way.
  for (size_t n = 0; n < 6; ++n) {
    read.engine.move(n < 4 ? n : n + 1);
    ASSERT_EQ(read.engine.issue(), 1u) << n;
    EXPECT_EQ(read.engine.io(n + 5).urgency, core::Urgency::prefetch);
  }
  read.engine.move(7);
  ASSERT_EQ(read.engine.issue(), 2u);
  EXPECT_TRUE(read.engine.is(12, others[0]));
  for (size_t n = 8; !read.engine.quiet(); ++n) {
    read.engine.move(n);
    read.engine.issue();
    read.engine.tell();
    read.engine.deliver_all();
  }
  read.expect_read(40 * kMiB);
}

TEST(StorePartsTold, WhereAnotherStandsBehindItAllSlotsAreUsed) {
  Told read(16, 24 * kMiB);
  read.submit();
  ASSERT_EQ(read.engine.issue(), 4u);
  Io next = read.io;
  Buffer buffer(24 * kMiB);
  next.buffer = buffer.data();
  next.done = nullptr;
  Io* const one = &next;
  read.engine.submit({&one, 1});
  ASSERT_EQ(read.engine.issue(), 8u + 4u) << "the rest of it, and of the next";
  read.engine.move(12);
  EXPECT_EQ(read.engine.issue(), 1u);
  for (size_t n = 0; n < 24; ++n) {
    if (n != 12) read.engine.move(n);
    read.engine.issue();
  }
  read.engine.tell();
  EXPECT_EQ(read.engine.deliver_all(), 2u);
}

TEST(StorePartsTold, WritesAreNot) {
  Told write(16, 8 * kMiB);
  write.io.op = Io::Op::write;
  write.submit();
  ASSERT_EQ(write.engine.issue(), 4u);
  for (size_t n = 0; n < 3; ++n) write.engine.move(n);
  EXPECT_EQ(write.engine.tell(), 0u);
  write.engine.move(3);
  EXPECT_EQ(write.engine.deliver_all(), 1u);
}

}  // namespace
}  // namespace vmem::store::test
