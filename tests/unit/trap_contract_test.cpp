// The contract of trap/trap.h about bytes, on every backend. Each test covers one promise. A
// backend that this machine does not permit is skipped with the reason. If a backend's caps exclude
// a promise, its documented refusal is tested.
#include "trap_contract.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "core/step.h"

namespace vmem::trap::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Backends, TrapContract, ::testing::ValuesIn(backends()),
                         [](const auto& backend) { return backend.param.name; });

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
  make_block(plain(kPage), &b);
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
    const size_t reports = trap_->caps().one_report ? 1 : kThreads;
    for (size_t i = 0; i < reports; ++i) next_fault(*trap_);  // all are parked now, or about to park
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
          // The right word, and never older than one seen before.
          if ((word & 0xffffffff) != i + 1 || word >> 32 < newest) ++wrong;
          newest = std::max(newest, word >> 32);
        }
      }
    };
    Server server(*trap_, [](const Fault&) {});  // the next fill wakes parked threads
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
      // As for a block that was evicted and read back: its bytes return from the slot.
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
    if (kind.transfer != Transfer::install) {
      EXPECT_EQ(static_cast<char>(b.slot[2]), 0);
    }
    close(ends[0]);
    close(ends[1]);
    // The range is absent: an access parks.
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
  if (trap_->caps().install) GTEST_SKIP() << "blocks of this body travel whole";
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
    OK(trap_->release_frames(b.frame, kind.size));
    OK(trap_->populate_frames(b.frame, kind.size, -1));
    OK(b.fill());
    EXPECT_EQ(b.words[0], 0u);
    b.release();
  }
}

TEST_P(TrapContract, FramesThatHaveMemoryAreZerosAfterwards) {
  if (trap_->caps().install) GTEST_SKIP() << "the module refuses frames that have memory";
  constexpr size_t kSize = 2 * kHugePage;
  void* frame;
  OK(trap_->reserve_arena(kSize, kHugePage, &frame));
  auto* const bytes = static_cast<std::byte*>(frame);
  bytes[kPage] = bytes[kSize - 1] = std::byte{1};  // the first now has memory, or a part of it; so has the second
  OK(trap_->populate_frames(frame, kSize, -1));
  for (size_t i = 0; i < kSize; ++i) ASSERT_EQ(bytes[i], std::byte{0}) << i;
  OK(trap_->release_arena(frame, kSize));
}

TEST_P(TrapContract, FillZeroGivesZerosAndStoresStick) {
  if (trap_->caps().install) GTEST_SKIP() << "blocks of this body travel whole";
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
  make_block(plain(size_t{64} << 10), &b);
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
    OK(trap_->protect(b.words, b.kind.size));  // second round: protected after the fill
  }
  // A protected block can be taken, and its frame is not protected.
  OK(b.take());
  *reinterpret_cast<uint64_t*>(b.slot) = 1;
  EXPECT_EQ(reinterpret_cast<uint64_t*>(b.slot)[9], 101u);
  b.release();
}

TEST_P(TrapContract, DropMakesRangesAbsentAndLeavesTheRest) {
  constexpr size_t kSize = 4 * kPage, kBlocks = 200;  // more than one batch
  void *region, *frame;
  const Transfer transfer = plain(kSize).transfer;
  const bool installs = transfer == Transfer::install;
  OK(trap_->attach_blocks(kBlocks * kSize, kPage, kSize, transfer, 0, &region));
  OK(trap_->reserve_arena(2 * kBlocks * kSize, kSize, &frame));
  OK(trap_->populate_frames(frame, 2 * kBlocks * kSize, -1));
  std::byte* base = static_cast<std::byte*>(region);
  std::vector<Range> ranges;
  for (size_t i = 0; i < kBlocks; ++i) {
    std::byte* from = static_cast<std::byte*>(frame) + (installs ? i * kSize : 0);
    write_pattern(from, kSize, i);
    OK(trap_->fill(base + i * kSize, kSize, from, transfer, Protect::no));
    if (i % 3 != 0) ranges.push_back({reinterpret_cast<uintptr_t>(base + i * kSize), kSize});
  }
  OK(trap_->drop(ranges));
  OK(trap_->drop({}));
  for (size_t i = 0; i < kBlocks; ++i) {
    std::byte* from = static_cast<std::byte*>(frame) + (installs ? (kBlocks + i) * kSize : 0);
    write_pattern(from, kSize, 1000 + i);
    const Status s = trap_->fill(base + i * kSize, kSize, from, transfer, Protect::no);
    EXPECT_EQ(s.code(), i % 3 == 0 ? -EEXIST : 0) << i;
    EXPECT_EQ(first_wrong(base + i * kSize, kSize, i % 3 == 0 ? i : 1000 + i), -1) << i;
  }
  const Range bad{reinterpret_cast<uintptr_t>(base) + 1, kPage};
  EXPECT_EQ(trap_->drop({&bad, 1}).code(), -EINVAL);
  OK(trap_->detach(region, kBlocks * kSize));
  OK(trap_->unmap(region, kBlocks * kSize));
  OK(trap_->release_arena(frame, 2 * kBlocks * kSize));
}

// State of the step hook below. Once each, it puts a page in the way of a fill, and stores to a
// page that the fill had put in place.
struct Interference {
  Trap* trap;
  uint64_t *obstacle, *stored;
  void* page;
  bool placed, done;
} interference;

TEST_P(TrapContract, AFillThatStopsHalfWayIsUndoneAndKeepsStoresMadeMeanwhile) {
  if (trap_->caps().install) GTEST_SKIP() << "blocks of this body travel whole";
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
    // The frame is complete, with the store; the range is absent, so the same fill works once the
    // obstacle is gone.
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

// Calls of the program on a part of its memory give that part its own mapping.
TEST_P(TrapContract, ABlockThatLiesInSeveralMappingsTravelsLikeAnyOther) {
  if (trap_->caps().install) GTEST_SKIP() << "blocks of this body travel whole";
  struct Way {
    const char* name;
    int (*split)(void* part, size_t size);
  };
  const Way ways[] = {
      {"madvise", [](void* part, size_t size) { return madvise(part, size, MADV_RANDOM); }},
      {"mlock", [](void* part, size_t size) { return mlock2(part, size, MLOCK_ONFAULT); }},
      {"mprotect", [](void* part, size_t size) { return mprotect(part, size, PROT_READ); }},
  };
  for (const Kind kind : kinds()) {
    if (kind.size < 8 * kPage || kind.size > kHugePage) continue;
    for (const Way& way : ways) {
      // Linux got page moves after write protection: no kernel has the one without the other.
      if (kind.transfer == Transfer::move && !trap_->caps().write_protect) continue;
      SCOPED_TRACE(way.name + std::string(kind.transfer == Transfer::move ? ", moved" : ", copied"));
      Block b;
      make_block(kind, &b);
      write_pattern(b.frame, kind.size, 1);
      ASSERT_EQ(way.split(reinterpret_cast<std::byte*>(b.words) + 3 * kPage, 2 * kPage), 0) << strerror(errno);
      OK(b.fill());
      EXPECT_EQ(first_wrong(b.words, kind.size, 1), -1);
      if (trap_->caps().write_protect && kind.transfer == Transfer::copy) {
        OK(trap_->protect(b.words, kind.size));
        OK(trap_->unprotect(b.words, kind.size));
      }
      EXPECT_EQ(first_wrong(b.words, kind.size, 1), -1);
      const Range range{reinterpret_cast<uintptr_t>(b.words), kind.size};
      OK(trap_->drop({&range, 1}));
      OK(trap_->fail(b.words, kind.size));
      OK(trap_->unfail(b.words, kind.size));
      write_pattern(b.frame, kind.size, 2);
      OK(b.fill());
      EXPECT_EQ(first_wrong(b.words, kind.size, 2), -1);
      b.release();
    }
  }
}

// Guard pages and barriers: a page without rights for the program must leave, too.
TEST_P(TrapContract, ABlockIsTakenWhateverTheProgramMayDoWithItsPages) {
  for (const int rights : {PROT_READ, PROT_NONE}) {
    for (const Kind kind : kinds()) {
      if (kind.size < 8 * kPage || kind.size > kHugePage || kind.transfer != Transfer::move) continue;
      if (!trap_->caps().write_protect) continue;  // it could not be filled: no kernel has the one without the other
      SCOPED_TRACE(rights);
      Block b;
      make_block(kind, &b);
      write_pattern(b.frame, kind.size, 1);
      OK(b.fill());
      std::byte* const part = reinterpret_cast<std::byte*>(b.words) + 3 * kPage;
      ASSERT_EQ(mprotect(part, 2 * kPage, rights), 0) << strerror(errno);
      ASSERT_EQ(mprotect(part + 9 * kPage, kPage, rights), 0) << strerror(errno);
      ASSERT_EQ(madvise(part + 20 * kPage, kPage, MADV_DONTNEED), 0);
      OK(b.take());
      ASSERT_EQ(first_wrong(b.slot, 23 * kPage, 1), -1);
      uint64_t* const hole = reinterpret_cast<uint64_t*>(b.slot + 23 * kPage);
      EXPECT_EQ(hole[0], 0u);
      for (size_t i = 0; i < kPage / sizeof(uint64_t); ++i) hole[i] = pattern(1, 23 * kPage / sizeof(uint64_t) + i);
      EXPECT_EQ(first_wrong(b.slot, kind.size, 1), -1);
      std::swap(b.frame, b.slot);
      OK(b.fill());  // the take left nothing in place
      ASSERT_EQ(mprotect(b.words, kind.size, PROT_READ | PROT_WRITE), 0) << strerror(errno);
      EXPECT_EQ(first_wrong(b.words, kind.size, 1), -1);
      OK(b.take());
      EXPECT_EQ(first_wrong(b.slot, kind.size, 1), -1);
      b.release();
    }
  }
}

}  // namespace
}  // namespace vmem::trap::testing
