// The promises of trap/trap.h, on every body. Each test names one. A body that this machine does not permit is skipped
// with the reason; a promise that a body does not make (its caps say so) is tested as the refusal it documents.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <vector>

#include "core/step.h"
#include "core/types.h"
#include "trap/trap.h"
#include "trap_bodies.h"

namespace vmem::trap::testing {
namespace {

using core::kHugePage;
using core::kPage;
using core::Status;

#define OK(expression)                           \
  do {                                           \
    const Status status_ = (expression);         \
    ASSERT_TRUE(status_.ok()) << status_.text(); \
  } while (0)

// One way to hold a block: its size and how its bytes travel.
struct Kind {
  size_t size;
  Transfer transfer;
};

class TrapContract : public ::testing::TestWithParam<Body> {
 protected:
  void SetUp() override {
    const Status s = GetParam().make(&trap_);
    if (s.code() == -EPERM || s.code() == -ENOSYS) GTEST_SKIP() << s.text();
    ASSERT_TRUE(s.ok()) << s.text();
  }

  // Every size the design names, by every transfer the body has.
  std::vector<Kind> kinds() const {
    std::vector<Kind> out;
    for (size_t size : {kPage, size_t{64} << 10, kHugePage, size_t{32} << 20}) {
      out.push_back({size, Transfer::copy});
      if (trap_->caps().move && size % kHugePage == 0) out.push_back({size, Transfer::move});
    }
    return out;
  }

  struct Block {
    Trap* trap = nullptr;
    Kind kind{};
    uint64_t* words = nullptr;  // trapped
    std::byte* frame = nullptr;
    std::byte* slot = nullptr;  // empty: for take()
    size_t count() const { return kind.size / sizeof(uint64_t); }
    Status fill(Protect protect = Protect::no) { return trap->fill(words, kind.size, frame, kind.transfer, protect); }
    Status take() { return trap->take(words, kind.size, slot, kind.transfer); }
    void empty_slot() { madvise(slot, kind.size, MADV_DONTNEED); }
    void release() {
      EXPECT_TRUE(trap->detach(words, kind.size).ok());
      EXPECT_TRUE(trap->unmap(words, kind.size).ok());
      munmap(frame, kind.size);
      munmap(slot, kind.size);
    }
  };

  void make_block(Kind kind, Block* out) {
    void *words, *frame, *slot;
    OK(trap_->attach(kind.size, kPage, kind.transfer, &words));
    OK(trap_->reserve_frames(kind.size, kind.size >= kHugePage, &frame));
    OK(trap_->reserve_frames(kind.size, kind.size >= kHugePage, &slot));
    *out = {trap_.get(), kind, static_cast<uint64_t*>(words), static_cast<std::byte*>(frame),
            static_cast<std::byte*>(slot)};
  }

  std::unique_ptr<Trap> trap_;
};

INSTANTIATE_TEST_SUITE_P(Bodies, TrapContract, ::testing::ValuesIn(bodies()),
                         [](const auto& body) { return body.param.name; });

TEST_P(TrapContract, TouchParksUntilTheBlockIsFilled) {
  for (const Kind kind : kinds()) {
    SCOPED_TRACE(kind.size);
    Block b;
    make_block(kind, &b);
    const size_t last = b.count() - 1;
    std::atomic<bool> returned{false};
    std::atomic<uint32_t> thread_id{0};
    uint64_t seen = 0;
    std::thread toucher([&] {
      thread_id = static_cast<uint32_t>(syscall(SYS_gettid));
      EXPECT_EQ(load(b.words + last, &seen), 0);
      returned = true;
    });
    const Fault fault = next_fault(*trap_);
    EXPECT_FALSE(returned);
    EXPECT_EQ(fault.address, core::round_down(reinterpret_cast<uintptr_t>(b.words + last), kPage));
    EXPECT_EQ(fault.kind, FaultKind::read);
    EXPECT_EQ(fault.thread, thread_id);
    write_pattern(b.frame, kind.size, 7);
    OK(b.fill());
    toucher.join();
    EXPECT_EQ(seen, pattern(7, last));
    EXPECT_EQ(first_wrong(b.words, kind.size, 7), -1);
    b.release();
  }
}

TEST_P(TrapContract, AStoreIsReportedAsAWriteAndKept) {
  Block b;
  make_block({kPage, Transfer::copy}, &b);
  std::thread toucher([&] { __atomic_store_n(b.words + 1, 99, __ATOMIC_RELAXED); });
  EXPECT_EQ(next_fault(*trap_).kind, FaultKind::write);
  write_pattern(b.frame, kPage, 1);
  OK(b.fill());
  toucher.join();
  EXPECT_EQ(b.words[0], pattern(1, 0));
  EXPECT_EQ(b.words[1], 99u);
  b.release();
}

TEST_P(TrapContract, ManyThreadsOnOneBlockAllSeeTheData) {
  for (const Kind kind : kinds()) {
    if (kind.size > kHugePage) continue;
    Block b;
    make_block(kind, &b);
    constexpr size_t kThreads = 8;
    std::array<uint64_t, kThreads> seen{};
    std::array<std::thread, kThreads> threads;
    for (size_t i = 0; i < kThreads; ++i) {
      threads[i] = std::thread([&, i] { EXPECT_EQ(load(b.words + i * (b.count() / kThreads), &seen[i]), 0); });
    }
    for (size_t i = 0; i < kThreads; ++i) next_fault(*trap_);  // all are parked now
    write_pattern(b.frame, kind.size, 3);
    OK(b.fill());
    for (size_t i = 0; i < kThreads; ++i) {
      threads[i].join();
      EXPECT_EQ(seen[i], pattern(3, i * (b.count() / kThreads)));
    }
    b.release();
  }
}

TEST_P(TrapContract, ObserversSeeAllOfABlockOrPark) {
  for (const Kind kind : kinds()) {
    if (kind.size > kHugePage) continue;
    SCOPED_TRACE(kind.size);
    Block b;
    make_block(kind, &b);
    const uint64_t rounds = kind.size >= kHugePage ? 40 : 300;
    std::atomic<bool> stop{false};
    std::atomic<int> wrong{0};
    const auto observe = [&] {
      uint64_t newest = 0;
      while (!stop) {
        for (size_t i = 0; i < b.count(); ++i) {
          const uint64_t word = __atomic_load_n(b.words + i, __ATOMIC_RELAXED);
          // Right word, and never older than what was seen before.
          if ((word & 0xffffffff) != i + 1 || word >> 32 < newest) ++wrong;
          newest = std::max(newest, word >> 32);
        }
      }
    };
    Server server(*trap_, [](const Fault&) {});  // the next fill wakes whoever parked
    std::thread first(observe), second(observe);
    for (uint64_t round = 0; round < rounds; ++round) {
      write_pattern(b.frame, kind.size, round);
      OK(b.fill());
      if (round + 1 == rounds) break;
      OK(b.take());
      EXPECT_EQ(first_wrong(b.slot, kind.size, round), -1);
      b.empty_slot();
    }
    stop = true;
    first.join();
    second.join();
    EXPECT_EQ(wrong, 0);
    b.release();
  }
}

TEST_P(TrapContract, TakeUnderWritersLosesNoStore) {
  for (const Kind kind : kinds()) {
    if (kind.size > kHugePage) continue;
    SCOPED_TRACE(kind.size);
    Block b;
    make_block(kind, &b);
    memset(b.frame, 0, kind.size);
    OK(b.fill());
    constexpr size_t kWriters = 3;
    std::atomic<bool> stop{false};
    std::vector<std::vector<uint64_t>> shadow(kWriters, std::vector<uint64_t>(b.count()));
    Server server(*trap_, [](const Fault&) {});
    std::vector<std::thread> writers;
    for (size_t w = 0; w < kWriters; ++w) {
      writers.emplace_back([&, w] {
        uint64_t at = w * 977;
        while (!stop) {
          at = (at * 6364136223846793005u + 1442695040888963407u);
          const size_t i = (at >> 33) % b.count();
          __atomic_fetch_add(b.words + i, 1, __ATOMIC_RELAXED);
          ++shadow[w][i];
        }
      });
    }
    const int rounds = kind.size >= kHugePage ? 60 : 400;
    for (int round = 0; round < rounds; ++round) {
      OK(b.take());
      // What a block evicted and read back goes through: its bytes come back from where they were put.
      std::swap(b.frame, b.slot);
      OK(b.fill());
      madvise(b.frame, kind.size, MADV_DONTNEED);
      madvise(b.slot, kind.size, MADV_DONTNEED);
    }
    stop = true;
    for (std::thread& t : writers) t.join();
    for (size_t i = 0; i < b.count(); ++i) {
      uint64_t expected = 0;
      for (const auto& s : shadow) expected += s[i];
      ASSERT_EQ(b.words[i], expected) << "word " << i;
    }
    b.release();
  }
}

TEST_P(TrapContract, TakeLeavesTheRangeTrappedAndTheFrameUsableForIo) {
  for (const Kind kind : kinds()) {
    SCOPED_TRACE(kind.size);
    Block b;
    make_block(kind, &b);
    write_pattern(b.frame, kind.size, 1);
    OK(b.fill());
    OK(b.take());
    EXPECT_EQ(first_wrong(b.slot, kind.size, 1), -1);
    // The slot is ordinary memory: dropped, it reads as zeros at once, also inside a system call.
    b.empty_slot();
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    ASSERT_EQ(write(ends[1], "ab", 2), 2);
    EXPECT_EQ(read(ends[0], b.slot, 2), 2);
    EXPECT_EQ(static_cast<char>(b.slot[1]), 'b');
    EXPECT_EQ(static_cast<char>(b.slot[2]), 0);
    close(ends[0]);
    close(ends[1]);
    // The range is absent: a touch parks.
    uint64_t seen = 0;
    std::thread toucher([&] { EXPECT_EQ(load(b.words, &seen), 0); });
    next_fault(*trap_);
    write_pattern(b.frame, kind.size, 2);
    OK(b.fill());
    toucher.join();
    EXPECT_EQ(seen, pattern(2, 0));
    b.release();
  }
}

TEST_P(TrapContract, AbsentPagesOfATakenRangeReadAsZeros) {
  Block b;
  make_block({size_t{64} << 10, Transfer::copy}, &b);
  write_pattern(b.frame, kPage, 4);
  OK(trap_->fill(b.words + 512, kPage, b.frame, Transfer::copy, Protect::no));
  OK(b.take());
  EXPECT_EQ(first_wrong(b.slot + kPage, kPage, 4), -1);
  EXPECT_EQ(*reinterpret_cast<uint64_t*>(b.slot), 0u);
  EXPECT_EQ(*reinterpret_cast<uint64_t*>(b.slot + 2 * kPage), 0u);
  b.release();
}

TEST_P(TrapContract, AFrameThatWasNeverTouchedFillsWithZeros) {
  for (const Kind kind : kinds()) {
    if (kind.size > kHugePage) continue;
    Block b;
    make_block(kind, &b);
    *reinterpret_cast<uint64_t*>(b.frame) = 5;
    OK(b.fill());
    EXPECT_EQ(b.words[0], 5u);
    EXPECT_EQ(b.words[b.count() - 1], 0u);
    OK(b.take());
    b.empty_slot();
    madvise(b.frame, kind.size, MADV_DONTNEED);
    OK(b.fill());
    EXPECT_EQ(b.words[0], 0u);
    b.release();
  }
}

TEST_P(TrapContract, FillZeroGivesZerosAndStoresStick) {
  Block b;
  make_block({size_t{64} << 10, Transfer::copy}, &b);
  std::thread toucher([&] { __atomic_store_n(b.words + 3, 8, __ATOMIC_RELAXED); });
  next_fault(*trap_);
  OK(trap_->fill_zero(b.words, b.kind.size));
  toucher.join();
  EXPECT_EQ(b.words[2], 0u);
  EXPECT_EQ(b.words[3], 8u);
  EXPECT_EQ(trap_->fill_zero(b.words, b.kind.size).code(), -EEXIST);
  b.release();
}

TEST_P(TrapContract, ProtectHoldsStoresButNotLoads) {
  Block b;
  make_block({size_t{64} << 10, Transfer::copy}, &b);
  write_pattern(b.frame, b.kind.size, 1);
  if (!trap_->caps().write_protect) {
    EXPECT_EQ(b.fill(Protect::yes).code(), -EOPNOTSUPP);
    OK(b.fill());
    EXPECT_EQ(trap_->protect(b.words, b.kind.size).code(), -EOPNOTSUPP);
    EXPECT_EQ(trap_->unprotect(b.words, b.kind.size).code(), -EOPNOTSUPP);
    b.release();
    return;
  }
  OK(b.fill(Protect::yes));
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(b.words[9], round == 0 ? pattern(1, 9) : 100u);
    std::atomic<bool> stored{false};
    std::thread writer([&] {
      __atomic_store_n(b.words + 9, 100 + static_cast<uint64_t>(round), __ATOMIC_RELAXED);
      stored = true;
    });
    EXPECT_EQ(next_fault(*trap_).kind, FaultKind::write_protect);
    EXPECT_FALSE(stored);
    OK(trap_->unprotect(b.words, b.kind.size));
    writer.join();
    EXPECT_EQ(b.words[9], 100u + static_cast<uint64_t>(round));
    OK(trap_->protect(b.words, b.kind.size));  // the second round: protected after the fill
  }
  // A protected block can be taken, and its frame is not protected.
  OK(b.take());
  *reinterpret_cast<uint64_t*>(b.slot) = 1;
  EXPECT_EQ(reinterpret_cast<uint64_t*>(b.slot)[9], 101u);
  b.release();
}

TEST_P(TrapContract, AFailedBlockRaisesSigbusUntilItIsUnfailed) {
  for (const Kind kind : kinds()) {
    if (kind.size > kHugePage) continue;
    SCOPED_TRACE(kind.size);
    Block b;
    make_block(kind, &b);
    uint64_t value = 0;
    int parked_signal = 0;
    std::thread parked([&] { parked_signal = load(b.words, &value); });
    next_fault(*trap_);
    OK(trap_->fail(b.words, kind.size));
    parked.join();
    EXPECT_EQ(parked_signal, SIGBUS);
    EXPECT_EQ(load(b.words + b.count() - 1, &value), SIGBUS);
    OK(trap_->unfail(b.words, kind.size));
    std::thread again([&] { EXPECT_EQ(load(b.words + 1, &value), 0); });
    next_fault(*trap_);
    write_pattern(b.frame, kind.size, 6);
    OK(b.fill());
    again.join();
    EXPECT_EQ(value, pattern(6, 1));
    EXPECT_EQ(first_wrong(b.words, kind.size, 6), -1);
    b.release();
  }
}

TEST_P(TrapContract, DetachEndsParkedThreadsAndLaterTouchesWithSigbus) {
  for (const Kind kind : kinds()) {
    if (kind.size > kHugePage) continue;
    Block b;
    make_block(kind, &b);
    std::array<int, 3> signals{};
    std::array<std::thread, 3> threads;
    uint64_t ignored[3];
    for (size_t i = 0; i < 3; ++i) threads[i] = std::thread([&, i] { signals[i] = load(b.words + i, &ignored[i]); });
    next_fault(*trap_);  // one was read; the others may be queued still, or on their way
    OK(trap_->detach(b.words, kind.size));
    for (std::thread& t : threads) t.join();
    for (int s : signals) EXPECT_EQ(s, SIGBUS);
    EXPECT_EQ(load(b.words, ignored), SIGBUS);
    // Messages of a range that is gone, and waking it, harm nobody.
    OK(trap_->wake(b.words, kind.size));
    OK(trap_->unmap(b.words, kind.size));
    OK(trap_->wake(b.words, kind.size));
    EXPECT_EQ(load(b.words, ignored), SIGSEGV);
    munmap(b.frame, kind.size);
    munmap(b.slot, kind.size);
  }
}

TEST_P(TrapContract, AttachAtNeverShowsAnAccessibleEmptyPage) {
  for (const Kind kind : {Kind{size_t{64} << 10, Transfer::copy}, Kind{kHugePage, Transfer::move}}) {
    if (kind.transfer == Transfer::move && !trap_->caps().move) continue;
    Block b;
    make_block(kind, &b);
    const size_t room = 2 * kHugePage;
    void* managed = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(managed, MAP_FAILED);
    uint64_t* hole = reinterpret_cast<uint64_t*>(core::round_up(reinterpret_cast<uintptr_t>(managed), kHugePage));
    std::atomic<bool> stop{false};
    std::atomic<int> wrong{0}, seen{0};
    std::thread toucher([&] {
      while (!stop) {
        uint64_t value = 0;
        const int signal_number = load(hole + 5, &value);
        if (signal_number == 0) {
          ++seen;
          if (value != pattern(8, 5)) ++wrong;
        } else if (signal_number != SIGSEGV) {
          ++wrong;
        }
      }
    });
    Server server(*trap_, [](const Fault&) {});
    write_pattern(b.frame, kind.size, 8);
    for (int round = 0; round < 50; ++round) {
      OK(trap_->attach_at(hole, kind.size, kind.transfer));
      OK(trap_->fill(hole, kind.size, b.frame, kind.transfer, Protect::no));
      if (kind.transfer == Transfer::move) {
        OK(trap_->take(hole, kind.size, b.frame, kind.transfer));
        OK(trap_->fill(hole, kind.size, b.frame, kind.transfer, Protect::no));
      }
      const int before = seen;
      while (seen == before) std::this_thread::yield();
      if (kind.transfer == Transfer::move) {
        OK(trap_->take(hole, kind.size, b.frame, kind.transfer));
      }
      // The managed range gets the address back, shut; whoever parked in the trap meets it there.
      ASSERT_NE(
          syscall(SYS_mmap, hole, kind.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0),
          -1);
      OK(trap_->wake(hole, kind.size));
    }
    stop = true;
    toucher.join();
    EXPECT_EQ(wrong, 0);
    munmap(managed, room);
    b.release();
  }
}

TEST_P(TrapContract, NeighboursAttachedOneByOneShareAMapping) {
  constexpr size_t kBlocks = 64, kSize = 16 * kPage;
  void* space = mmap(nullptr, kBlocks * kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(space, MAP_FAILED);
  const size_t before = count_mappings();
  for (size_t i = 0; i < kBlocks; ++i)
    OK(trap_->attach_at(static_cast<std::byte*>(space) + i * kSize, kSize, Transfer::copy));
  EXPECT_LE(count_mappings(), before + 4);
  munmap(space, kBlocks * kSize);
}

TEST_P(TrapContract, SystemCallsIntoAbsentBlocksAreServedOrRefusedAsTheCapsSay) {
  Block b;
  make_block({size_t{64} << 10, Transfer::copy}, &b);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  write_pattern(b.frame, b.kind.size, 2);
  Server server(*trap_, [&](const Fault& fault) {
    const uintptr_t offset = fault.address - reinterpret_cast<uintptr_t>(b.words);
    const Status s =
        trap_->fill(reinterpret_cast<void*>(fault.address), kPage, b.frame + offset, Transfer::copy, Protect::no);
    EXPECT_TRUE(s.ok() || s.code() == -EEXIST) << s.text();
  });
  const uint64_t word = 4711;
  // Out of an absent page, into an absent page.
  const ssize_t wrote = write(ends[1], b.words + 512, 8);
  const int write_error = errno;
  if (trap_->caps().system_calls) {
    EXPECT_EQ(wrote, 8);
    uint64_t got = 0;
    EXPECT_EQ(read(ends[0], &got, 8), 8);
    EXPECT_EQ(got, pattern(2, 512));
  } else {
    EXPECT_EQ(wrote, -1);
    EXPECT_EQ(write_error, EFAULT);
  }
  ASSERT_EQ(write(ends[1], &word, 8), 8);
  const ssize_t got = read(ends[0], b.words + 1024, 8);
  if (trap_->caps().system_calls) {
    EXPECT_EQ(got, 8);
    EXPECT_EQ(b.words[1024], 4711u);
    EXPECT_EQ(b.words[1025], pattern(2, 1025));
  } else {
    EXPECT_EQ(got, -1);
    EXPECT_EQ(errno, EFAULT);
  }
  close(ends[0]);
  close(ends[1]);
  b.release();
}

TEST_P(TrapContract, AForkedChildHasNeitherRangesNorFrames) {
  for (const Kind kind : kinds()) {
    if (kind.size != kHugePage) continue;
    Block b;
    make_block(kind, &b);
    write_pattern(b.frame, kind.size, 1);
    OK(b.fill());
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      unsigned char resident[512];
      int present = 0;
      for (void* at : {static_cast<void*>(b.words), static_cast<void*>(b.frame), static_cast<void*>(b.slot)}) {
        if (mincore(at, kPage, resident) == 0 || errno != ENOMEM) ++present;  // ENOMEM: nothing is mapped there
      }
      _exit(present);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 0);
    // And the parent's block can still travel: no page became shared.
    EXPECT_EQ(first_wrong(b.words, kind.size, 1), -1);
    OK(b.take());
    b.release();
  }
}

TEST_P(TrapContract, DropMakesRangesAbsentAndLeavesTheRest) {
  constexpr size_t kSize = 4 * kPage, kBlocks = 200;  // more than one batch
  void *region, *frame;
  OK(trap_->attach(kBlocks * kSize, kPage, Transfer::copy, &region));
  OK(trap_->reserve_frames(kHugePage, false, &frame));
  std::byte* base = static_cast<std::byte*>(region);
  std::vector<Range> ranges;
  for (size_t i = 0; i < kBlocks; ++i) {
    write_pattern(frame, kSize, i);
    OK(trap_->fill(base + i * kSize, kSize, frame, Transfer::copy, Protect::no));
    if (i % 3 != 0) ranges.push_back({reinterpret_cast<uintptr_t>(base + i * kSize), kSize});
  }
  OK(trap_->drop(ranges));
  OK(trap_->drop({}));
  for (size_t i = 0; i < kBlocks; ++i) {
    write_pattern(frame, kSize, 1000 + i);
    const Status s = trap_->fill(base + i * kSize, kSize, frame, Transfer::copy, Protect::no);
    EXPECT_EQ(s.code(), i % 3 == 0 ? -EEXIST : 0) << i;
    EXPECT_EQ(first_wrong(base + i * kSize, kSize, i % 3 == 0 ? i : 1000 + i), -1) << i;
  }
  const Range bad{reinterpret_cast<uintptr_t>(base) + 1, kPage};
  EXPECT_EQ(trap_->drop({&bad, 1}).code(), -EINVAL);
  OK(trap_->detach(region, kBlocks * kSize));
  OK(trap_->unmap(region, kBlocks * kSize));
  munmap(frame, kHugePage);
}

// What the step hook below does, once each: puts a page in the way of a fill, and stores into what it had put in place.
struct Interference {
  Trap* trap;
  uint64_t *obstacle, *stored;
  void* page;
  bool placed, done;
} interference;

TEST_P(TrapContract, AFillThatStopsHalfWayIsUndoneAndKeepsStoresMadeMeanwhile) {
  for (const Kind kind : kinds()) {
    const bool moves = kind.transfer == Transfer::move;
    if (kind.size != (moves ? size_t{32} << 20 : size_t{64} << 10)) continue;
    SCOPED_TRACE(kind.size);
    Block b;
    make_block(kind, &b);
    write_pattern(b.frame, kind.size, 1);
    void* page;
    OK(trap_->reserve_frames(kHugePage, false, &page));
    write_pattern(page, kPage, 9);
    uint64_t* obstacle = b.words + 3 * (moves ? kHugePage : kPage) / sizeof(uint64_t);
    interference = {trap_.get(), obstacle, b.words + 7, page, false, false};
    core::step_hook = [](const char* step) {
      if (std::string_view(step) == "trap.fill.begin" && !interference.placed) {
        interference.placed = true;
        const Status s =
            interference.trap->fill(interference.obstacle, kPage, interference.page, Transfer::copy, Protect::no);
        EXPECT_TRUE(s.ok()) << s.text();
      } else if (std::string_view(step) == "trap.fill.undo" && !interference.done) {
        interference.done = true;
        __atomic_store_n(interference.stored, 77, __ATOMIC_RELAXED);
      }
    };
    const Status s = b.fill();
    core::step_hook = nullptr;
    EXPECT_EQ(s.code(), -EEXIST) << s.text();
    EXPECT_TRUE(interference.done);
    EXPECT_EQ(first_wrong(obstacle, kPage, 9), -1);
    // The frame is complete, with the store; the range is absent, so the same fill works once the obstacle is gone.
    uint64_t* frame_words = reinterpret_cast<uint64_t*>(b.frame);
    EXPECT_EQ(frame_words[7], 77u);
    frame_words[7] = pattern(1, 7);
    EXPECT_EQ(first_wrong(b.frame, kind.size, 1), -1);
    const Range range{reinterpret_cast<uintptr_t>(obstacle), kPage};
    OK(trap_->drop({&range, 1}));
    OK(b.fill());
    EXPECT_EQ(first_wrong(b.words, kind.size, 1), -1);
    munmap(page, kHugePage);
    b.release();
  }
}

TEST_P(TrapContract, AttachingAndDetachingLeavesNoMapping) {
  const auto cycle = [&](size_t i) {
    const bool moves = trap_->caps().move && i % 2 == 0;
    void* region;
    OK(trap_->attach(kHugePage, kHugePage, moves ? Transfer::move : Transfer::copy, &region));
    if (i % 3 == 0) {
      OK(trap_->fail(region, kHugePage));
      OK(trap_->unfail(region, kHugePage));
    }
    OK(trap_->detach(region, kHugePage));
    OK(trap_->unmap(region, kHugePage));
  };
  for (size_t i = 0; i < 6; ++i) cycle(i);
  const size_t before = count_mappings();
  for (size_t i = 0; i < 1000; ++i) cycle(i);
  EXPECT_LE(count_mappings(), before + 8);  // the test's own heap may grow
}

TEST_P(TrapContract, ARangeLeftAttachedAtTheEndRaisesSigbusInsteadOfShowingZeros) {
  void* region;
  OK(trap_->attach(kPage, kPage, Transfer::copy, &region));
  ::testing::internal::CaptureStderr();
  trap_.reset();
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("still attached"), std::string::npos);
  uint64_t value = 0;
  EXPECT_EQ(load(static_cast<uint64_t*>(region), &value), SIGBUS);
  munmap(region, kPage);
}

TEST_P(TrapContract, WaitReturnsOnInterruptOnTimeoutAndInPortions) {
  std::array<Fault, 2> faults;
  size_t count = 9;
  trap_->interrupt();
  OK(trap_->wait(faults, -1, &count));
  EXPECT_EQ(count, 0u);
  OK(trap_->wait(faults, 0, &count));
  EXPECT_EQ(count, 0u);
  EXPECT_EQ(trap_->wait({}, 0, &count).code(), -EINVAL);
  Block b;
  make_block({size_t{64} << 10, Transfer::copy}, &b);
  std::array<std::thread, 5> threads;
  std::array<uint64_t, 5> values{};
  for (size_t i = 0; i < 5; ++i) threads[i] = std::thread([&, i] { load(b.words + 512 * i, &values[i]); });
  size_t total = 0;
  while (total < 5) {
    OK(trap_->wait(faults, -1, &count));
    EXPECT_LE(count, faults.size());
    total += count;
  }
  EXPECT_EQ(total, 5u);  // each reported once, none lost
  // A wake without a fill: they park, and are reported, again.
  OK(trap_->wake(b.words, b.kind.size));
  next_fault(*trap_);
  write_pattern(b.frame, b.kind.size, 1);
  OK(b.fill());
  for (std::thread& t : threads) t.join();
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(values[i], pattern(1, 512 * i));
  b.release();
}

TEST_P(TrapContract, MalformedCallsAreRefused) {
  Block b;
  make_block({size_t{64} << 10, Transfer::copy}, &b);
  std::byte* at = reinterpret_cast<std::byte*>(b.words);
  void* out = nullptr;
  EXPECT_EQ(trap_->attach(0, kPage, Transfer::copy, &out).code(), -EINVAL);
  EXPECT_EQ(trap_->attach(kPage + 1, kPage, Transfer::copy, &out).code(), -EINVAL);
  EXPECT_EQ(trap_->attach(kPage, 3 * kPage, Transfer::copy, &out).code(), -EINVAL);
  EXPECT_EQ(trap_->attach(kPage, 512, Transfer::copy, &out).code(), -EINVAL);
  EXPECT_EQ(trap_->attach(SIZE_MAX - kPage + 1, kPage, Transfer::copy, &out).code(), -ENOMEM);
  EXPECT_EQ(out, nullptr);
  EXPECT_EQ(trap_->fill(at + 1, kPage, b.frame, Transfer::copy, Protect::no).code(), -EINVAL);
  EXPECT_EQ(trap_->fill(at, kPage, b.frame + 1, Transfer::copy, Protect::no).code(), -EINVAL);
  EXPECT_EQ(trap_->fill(at, 0, b.frame, Transfer::copy, Protect::no).code(), -EINVAL);
  const int move_error = trap_->caps().move ? -EINVAL : -EOPNOTSUPP;
  EXPECT_EQ(trap_->attach(kPage, kPage, Transfer::move, &out).code(), move_error);
  EXPECT_EQ(trap_->fill(at, kPage, b.frame, Transfer::move, Protect::no).code(), move_error);
  EXPECT_EQ(trap_->take(at, kPage, b.frame, Transfer::move).code(), move_error);
  if (!trap_->caps().install) {
    EXPECT_EQ(trap_->attach(kPage, kPage, Transfer::install, &out).code(), -EOPNOTSUPP);
    EXPECT_EQ(trap_->fill(at, kPage, b.frame, Transfer::install, Protect::no).code(), -EOPNOTSUPP);
  }
  for (const auto call : {&Trap::detach, &Trap::unmap, &Trap::fill_zero, &Trap::protect, &Trap::unprotect, &Trap::fail,
                          &Trap::unfail, &Trap::wake}) {
    EXPECT_EQ((trap_.get()->*call)(at + 8, kPage).code(), -EINVAL);
    EXPECT_EQ((trap_.get()->*call)(at, 100).code(), -EINVAL);
  }
  EXPECT_EQ(trap_->reserve_frames(100, false, &out).code(), -EINVAL);
  // A present block: neither filled again nor failed, and nothing changes.
  write_pattern(b.frame, b.kind.size, 1);
  OK(b.fill());
  write_pattern(b.frame, b.kind.size, 2);
  EXPECT_EQ(b.fill().code(), -EEXIST);
  EXPECT_EQ(first_wrong(b.words, b.kind.size, 1), -1);
  EXPECT_EQ(first_wrong(b.frame, b.kind.size, 2), -1);
  if (trap_->caps().poison) {
    EXPECT_EQ(trap_->fail(b.words, b.kind.size).code(), -EEXIST);
  }
  // Memory that is no trap.
  write_pattern(b.slot, kPage, 3);
  EXPECT_FALSE(trap_->fill(b.slot, kPage, b.frame, Transfer::copy, Protect::no).ok());
  EXPECT_EQ(first_wrong(b.slot, kPage, 3), -1);
  b.release();
}

}  // namespace
}  // namespace vmem::trap::testing
