// Long transfers, which go in parts: on an engine without threads, where the test says what is issued and ends when.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "core/on_exit.h"
#include "store/engine_base.h"
#include "store_test_util.h"

namespace vmem::store {
namespace {

using test::Batch;
using test::Buffer;
using test::TempFile;

constexpr size_t kMiB = size_t{1} << 20;

// Transfers under way are known by their number, in the order in which they were issued.
class HandEngine final : public EngineBase {
 public:
  explicit HandEngine(unsigned depth) : EngineBase(depth) {}
  const char* name() const override { return "hand"; }

  // Issues what the depth has room for, at most `most`; how many those are.
  size_t issue(size_t most = SIZE_MAX) {
    core::MutexLock lock(mutex_);
    size_t count = 0;
    for (Transfer* t; count < most && (t = take()) != nullptr; ++count) issued_.push_back({t, t->chain(), *t->chain()});
    return count;
  }
  size_t issued() const { return issued_.size(); }
  const Io& io(size_t n) const { return issued_.at(n).as_issued; }
  bool is(size_t n, const Io& io) const { return issued_.at(n).chain == &io; }  // .. and not a part of it
  void move(size_t n) {                                                         // as the kernel does
    Transfer* const t = issued_.at(n).transfer;
    while (!t->advance(perform(t->prepare(nullptr)))) {
    }
    end(t);
  }
  void fail(size_t n, int error, size_t after = 0) {
    Transfer* const t = issued_.at(n).transfer;
    t->prepare(nullptr);
    if (after != 0) {
      ASSERT_FALSE(t->advance(static_cast<ssize_t>(after)));
      t->prepare(nullptr);
    }
    ASSERT_TRUE(t->advance(-error));
    end(t);
  }
  // Calls done() of what is over; how many that are.
  size_t deliver_all() {
    size_t count = 0;
    for (;; ++count) {
      Io* io = nullptr;
      {
        core::MutexLock lock(mutex_);
        io = next_finished();
      }
      if (io == nullptr) return count;
      deliver(io);
      core::MutexLock lock(mutex_);
      --outstanding_;
    }
  }
  // Calls progress() as long as there is anything to say, `most` times at most; how often that is.
  size_t tell(size_t most = SIZE_MAX) {
    for (size_t count = 0;; ++count) {
      Io* io = nullptr;
      {
        core::MutexLock lock(mutex_);
        io = count < most ? next_to_tell() : nullptr;
      }
      if (io == nullptr) return count;
      EngineBase::tell(io);
    }
  }
  bool quiet() const {
    core::MutexLock lock(mutex_);
    return idle();
  }

 private:
  uint64_t pick_sleepers(size_t) override VMEM_REQUIRES(mutex_) { return 0; }
  void wake(uint64_t) override {}
  void end(Transfer* t) {
    core::MutexLock lock(mutex_);
    retire(t);
  }
  struct Issued {
    Transfer* transfer;  // for others in time
    const Io* chain;
    Io as_issued;
  };
  std::vector<Issued> issued_;
};

// One read or write of `size` bytes at `offset` of a file.
struct Long {
  Long(unsigned depth, Io::Op op, size_t file_size, uint64_t offset, size_t size, bool direct = true)
      : file(file_size, direct), buffer(size), engine(depth) {
    std::mt19937_64 random(9);
    buffer.fill(random);
    EXPECT_TRUE(engine.add_file(file.fd(), &id).ok());
    io.op = op;
    io.file = id;
    io.offset = offset;
    io.buffer = buffer.data();
    io.size = size;
    io.done = [](Io& over) { ++*static_cast<int*>(over.user); };
    io.user = &done;
  }
  void submit() {
    Io* const one = &io;
    engine.submit({&one, 1});
  }
  // All that has come is the file's, and zeros follow.
  void expect_read(size_t from_file) {
    EXPECT_EQ(io.transferred, from_file);
    EXPECT_TRUE(file.matches(io.offset, buffer.data(), from_file));
    if (io.result == 0) {
      EXPECT_TRUE(test::all_zero(buffer.data() + from_file, io.size - from_file));
    }
  }

  TempFile file;
  Buffer buffer;
  HandEngine engine;
  FileId id = 0;
  Io io;
  int done = 0;
};

// Calls body() with each order of 0 .. count - 1.
template <typename Body>
void each_order(size_t count, Body body) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  do {
    body(order);
  } while (std::next_permutation(order.begin(), order.end()));
}

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

// It ended in the second part, and was longer again when the third was read.
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

// ---- how far a read has come

// It is told of the bytes that have come, and looks at them.
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

// Each part fails, before or after the others have ended, or while it is told of them.
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

// All would come at the same time, in the end, were all under way at once.
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
  // Nobody is told: as many as there are slots.
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

// Its disk may stand still, and theirs not.
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
  // Twenty parts, of which the background may have fourteen under way.
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
}  // namespace vmem::store
