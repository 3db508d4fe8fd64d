// The contract of trap/trap.h about ranges and waits, on every backend.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <string_view>

#include "core/big_lock.h"
#include "core/log.h"
#include "core/os_allocator.h"
#include "core/process/map_over.h"
#include "core/step.h"
#include "trap_contract.h"

namespace vmem::trap::testing {
namespace {

class TrapRanges : public TrapContract {
 protected:
  // The block is absent: an access waits, and meets the bytes that are put in place.
  void expect_trapped(Block& b) {
    uint64_t value = 0;
    std::thread waiting([&] { EXPECT_EQ(load(b.words + 1, &value), 0); });
    next_fault(*trap_);
    write_pattern(b.frame, b.kind.size, 6);
    OK(b.fill());
    waiting.join();
    EXPECT_EQ(value, pattern(6, 1));
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, TrapRanges, ::testing::ValuesIn(backends()),
                         [](const auto& backend) { return backend.param.name; });

TEST_P(TrapRanges, AFailedBlockRaisesSigbusUntilItIsUnfailed) {
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

// The kernel refuses a call in the middle of the range: another file is mapped there, which
// userfaultfd does not support.
TEST_P(TrapRanges, ATrapThatCannotBeMadeAnewLeavesSigbusAndCanBeTriedAgain) {
  static std::atomic<uint64_t*> words{nullptr};
  static std::atomic<size_t> size{0};
  static const int other = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  ASSERT_GE(other, 0);
  for (const Kind kind : kinds()) {
    if (kind.size > kHugePage) continue;
    SCOPED_TRACE(kind.size);
    Block b;
    make_block(kind, &b);
    const int file = memfd_create("shown", MFD_CLOEXEC);
    ASSERT_EQ(ftruncate(file, static_cast<off_t>(kind.size)), 0);
    const uint64_t in_file = 7;
    ASSERT_EQ(pwrite(file, &in_file, sizeof in_file, 0), ssize_t{sizeof in_file});
    uint64_t value = 0;
    // From both states: failed, and showing a file.
    for (const bool shown : {false, true}) {
      SCOPED_TRACE(shown ? "unmap_file" : "unfail");
      const Status there = shown ? trap_->map_file(b.words, kind.size, file, 0, true) : trap_->fail(b.words, kind.size);
      if (there.code() == -EOPNOTSUPP) continue;
      OK(there);
      EXPECT_EQ(load(b.words, &value), shown ? 0 : SIGBUS);
      EXPECT_EQ(value, shown ? in_file : 0);
      words = b.words;
      size = kind.size;
      core::step_hook.store([](const char* step) {
        if (strcmp(step, "trap.anew.shut") == 0)
          core::map_over(reinterpret_cast<uintptr_t>(words.load()), size, PROT_NONE, MAP_SHARED, other, 0);
      });
      const auto back = [&] {
        return shown ? trap_->unmap_file(b.words, kind.size) : trap_->unfail(b.words, kind.size);
      };
      const Status refused = back();
      core::step_hook.store(nullptr);
      EXPECT_TRUE(!shown || !refused.ok());
      if (!refused.ok()) {
        EXPECT_EQ(load(b.words, &value), SIGBUS);
        EXPECT_EQ(load(b.words + b.count() - 1, &value), SIGBUS);
        OK(back());
      }
      expect_trapped(b);
      const Range range{reinterpret_cast<uintptr_t>(b.words), kind.size};
      OK(trap_->drop({&range, 1}));
      value = 0;
    }
    close(file);
    b.release();
  }
}

// Unmaps one page of a block that is being mapped. The hole is too small for the sanitizer's own
// mappings: in a hole of the block's size it put its memory there, the trap came to stand over it,
// and the sanitizer waited for its own page.
void make_hole(const uint64_t* words) {
  munmap(const_cast<uint64_t*>(words) + core::kPage / 8, core::kPage);
}

// As above, for a range that was never failed: it then gives SIGBUS, which is taken back like any
// other.
TEST_P(TrapRanges, WhatCouldNeitherShowAFileNorBeTrappedAgainIsUnfailed) {
  static std::atomic<uint64_t*> words{nullptr};
  static std::atomic<size_t> size{0};
  static std::atomic<bool> mapped{false};
  static const int other = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  ASSERT_GE(other, 0);
  const Kind kind = plain(size_t{64} << 10);
  Block b;
  make_block(kind, &b);
  const int file = memfd_create("shown", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(file, static_cast<off_t>(kind.size)), 0);
  words = b.words;
  size = kind.size;
  mapped = false;
  core::step_hook.store([](const char* step) {
    if (strcmp(step, "trap.file.mapped") == 0 && !mapped.exchange(true)) make_hole(words);
    if (strcmp(step, "trap.anew.shut") == 0)
      core::map_over(reinterpret_cast<uintptr_t>(words.load()), size, PROT_NONE, MAP_SHARED, other, 0);
  });
  const Status s = trap_->map_file(b.words, kind.size, file, 0, true);
  core::step_hook.store(nullptr);
  close(file);
  if (s.code() == -EOPNOTSUPP) GTEST_SKIP() << "this body shows no files";
  EXPECT_FALSE(s.ok());
  uint64_t value = 0;
  EXPECT_EQ(load(b.words, &value), SIGBUS);
  OK(trap_->unfail(b.words, kind.size));
  expect_trapped(b);
  b.release();
}

TEST_P(TrapRanges, AFileThatCannotBeMappedWholeLeavesTheTrap) {
  static std::atomic<uint64_t*> words{nullptr};
  static std::atomic<size_t> size{0};
  const Kind kind = plain(size_t{64} << 10);
  Block b;
  make_block(kind, &b);
  const int file = memfd_create("shown", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(file, static_cast<off_t>(kind.size)), 0);
  words = b.words;
  size = kind.size;
  core::step_hook.store([](const char* step) {
    if (strcmp(step, "trap.file.mapped") == 0) make_hole(words);
  });
  const Status s = trap_->map_file(b.words, kind.size, file, 0, true);
  core::step_hook.store(nullptr);
  close(file);
  if (s.code() != -EOPNOTSUPP) {
    EXPECT_EQ(s.code(), -ENOMEM);
    expect_trapped(b);
  }
  b.release();
}

TEST_P(TrapRanges, DetachEndsParkedThreadsAndLaterTouchesWithSigbus) {
  for (const Kind kind : kinds()) {
    if (kind.size > kHugePage) continue;
    Block b;
    make_block(kind, &b);
    std::array<int, 3> signals{};
    std::array<std::thread, 3> threads;
    uint64_t ignored[3];
    for (size_t i = 0; i < 3; ++i) threads[i] = std::thread([&, i] { signals[i] = load(b.words + i, &ignored[i]); });
    next_fault(*trap_);  // the others may still be queued, or about to be
    OK(trap_->detach(b.words, kind.size));
    for (std::thread& t : threads) t.join();
    for (int s : signals) EXPECT_EQ(s, SIGBUS);
    EXPECT_EQ(load(b.words, ignored), SIGBUS);
    // Messages of a range that is gone, and a wake of it, do no harm.
    OK(trap_->wake(b.words, kind.size));
    OK(trap_->unmap(b.words, kind.size));
    OK(trap_->wake(b.words, kind.size));
    EXPECT_EQ(load(b.words, ignored), SIGSEGV);
    munmap(b.frame, kind.size);
    if (b.slot != b.frame) munmap(b.slot, kind.size);
  }
}

TEST_P(TrapRanges, AttachAtNeverShowsAnAccessibleEmptyPage) {
  if (GetParam().name == "signal") GTEST_SKIP() << "this trap is for host memory alone, which nothing attaches there";
  for (const Kind kind : {plain(size_t{64} << 10), Kind{kHugePage, Transfer::move}, Kind{kHugePage, Transfer::install},
                          Kind{kHugePage, Transfer::copy}}) {
    if (kind.transfer == Transfer::move && !trap_->caps().move) continue;
    if (kind.transfer == Transfer::install && !trap_->caps().install) continue;
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
      if (kind.transfer != Transfer::copy) {
        OK(trap_->take(hole, kind.size, b.frame, kind.transfer));
        OK(trap_->fill(hole, kind.size, b.frame, kind.transfer, Protect::no));
      }
      const int before = seen;
      while (seen == before) std::this_thread::yield();
      if (kind.transfer != Transfer::copy) {
        OK(trap_->take(hole, kind.size, b.frame, kind.transfer));
      }
      // The managed range gets the address back, shut; threads parked in the trap meet it there.
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

TEST_P(TrapRanges, NeighboursAttachedOneByOneShareAMapping) {
  if (trap_->caps().install) GTEST_SKIP() << "blocks of this body travel whole";
  constexpr size_t kBlocks = 64, kSize = 16 * kPage;
  void* space = mmap(nullptr, kBlocks * kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(space, MAP_FAILED);
  const size_t before = count_mappings();
  for (size_t i = 0; i < kBlocks; ++i)
    OK(trap_->attach_at(static_cast<std::byte*>(space) + i * kSize, kSize, Transfer::copy));
  EXPECT_LE(count_mappings(), before + 4);
  munmap(space, kBlocks * kSize);
}

// As when a block goes to a device and returns: another mapping replaces the middle of a range,
// then the trap returns.
TEST_P(TrapRanges, AHoleAttachedAgainIsAbsentAndItsNeighboursKeepTheirBytes) {
  constexpr size_t kSize = kHugePage;
  void* space = nullptr;
  ASSERT_NE(space = mmap(nullptr, 4 * kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0),
            MAP_FAILED);
  auto* base = reinterpret_cast<std::byte*>(core::round_up(reinterpret_cast<uintptr_t>(space), kSize));
  OK(trap_->attach_at(base, 3 * kSize, Transfer::copy));
  void* frame = nullptr;
  OK(trap_->reserve_frames(kSize, true, &frame));
  for (uint64_t i = 0; i < 3; ++i) {
    write_pattern(frame, kSize, i + 1);
    OK(trap_->fill(base + i * kSize, kSize, frame, Transfer::copy, Protect::no));
  }
  for (int round = 0; round < 3; ++round) {
    const Range middle{reinterpret_cast<uintptr_t>(base + kSize), kSize};
    // Once with the block still in place, as when its bytes no longer matter.
    if (round != 1) OK(trap_->drop({&middle, 1}));
    ASSERT_NE(mmap(base + kSize, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
              MAP_FAILED);
    OK(trap_->attach_at(base + kSize, kSize, Transfer::copy));
    uint64_t value = 0;
    std::thread toucher([&] { EXPECT_EQ(load(reinterpret_cast<uint64_t*>(base + kSize) + 7, &value), 0); });
    EXPECT_EQ(next_fault(*trap_).address / kSize, reinterpret_cast<uintptr_t>(base + kSize) / kSize);
    write_pattern(frame, kSize, 20);
    OK(trap_->fill(base + kSize, kSize, frame, Transfer::copy, Protect::no));
    toucher.join();
    EXPECT_EQ(value, pattern(20, 7));
    EXPECT_EQ(first_wrong(base, kSize, 1), -1);
    EXPECT_EQ(first_wrong(base + 2 * kSize, kSize, 3), -1);
  }
  OK(trap_->detach(base, 3 * kSize));
  OK(trap_->release_arena(frame, kSize));
  munmap(space, 4 * kSize);
}

TEST_P(TrapRanges, SystemCallsIntoAbsentBlocksAreServedOrRefusedAsTheCapsSay) {
  Block b;
  make_block(plain(size_t{64} << 10), &b);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  write_pattern(b.frame, b.kind.size, 2);
  Server server(*trap_, [&](const Fault& fault) {
    const uintptr_t offset = fault.address - reinterpret_cast<uintptr_t>(b.words);
    const Status s = b.kind.transfer == Transfer::install ? b.fill()
                                                          : trap_->fill(reinterpret_cast<void*>(fault.address), kPage,
                                                                        b.frame + offset, Transfer::copy, Protect::no);
    EXPECT_TRUE(s.ok() || s.code() == -EEXIST) << s.text();
  });
  const uint64_t word = 4711;
  // From an absent page, and to an absent page.
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

TEST_P(TrapRanges, AForkedChildHasNeitherRangesNorFrames) {
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
    // The parent's block can still travel: no page became shared.
    EXPECT_EQ(first_wrong(b.words, kind.size, 1), -1);
    OK(b.take());
    b.release();
  }
}

TEST_P(TrapRanges, AttachingAndDetachingLeavesNoMapping) {
  const auto cycle = [&](size_t i) {
    const bool moves = trap_->caps().move && i % 2 == 0;
    void* region;
    OK(trap_->attach(kHugePage, kHugePage, moves ? Transfer::move : plain(kHugePage).transfer, &region));
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

// A large range is detached in pieces; that must not be visible.
TEST_P(TrapRanges, EveryPageOfALargeRangeThatIsDetachedGivesSigbus) {
  constexpr size_t kLarge = (size_t{64} << 20) * 2 + kHugePage;
  void* region;
  OK(trap_->attach(kLarge, kHugePage, plain(kHugePage).transfer, &region));
  const size_t before = count_mappings();
  OK(trap_->detach(region, kLarge));
  EXPECT_LE(count_mappings(), before + 2);
  uint64_t value = 0;
  for (size_t at = 0; at < kLarge; at += kHugePage) {
    ASSERT_EQ(load(reinterpret_cast<uint64_t*>(static_cast<std::byte*>(region) + at), &value), SIGBUS) << at;
  }
  OK(trap_->unmap(region, kLarge));
}

// A process with the maximum number of mappings can still free a large range.
TEST_P(TrapRanges, ALargeRangeIsDetachedWhereNoMappingCanBeDivided) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer needs mappings of its own";
#endif
  constexpr size_t kLarge = (size_t{64} << 20) * 2, kSpace = size_t{1} << 30;
  void* region;
  OK(trap_->attach(kLarge, kHugePage, plain(kHugePage).transfer, &region));
  auto* const space =
      static_cast<std::byte*>(mmap(nullptr, kSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  ASSERT_NE(static_cast<void*>(space), MAP_FAILED);
  size_t at = 0;
  while (at + kPage < kSpace && mprotect(space + at, kPage, PROT_READ) == 0) at += 2 * kPage;
  const bool full = at + kPage < kSpace;
  const core::Status s = trap_->detach(region, kLarge);
  munmap(space, kSpace);
  if (!full) GTEST_SKIP() << "this process may have more mappings than the test makes";
  EXPECT_TRUE(s.ok()) << s.text();
  uint64_t value = 0;
  EXPECT_EQ(load(static_cast<uint64_t*>(region), &value), SIGBUS);
  OK(trap_->unmap(region, kLarge));
}

TEST_P(TrapRanges, ARangeLeftAttachedAtTheEndRaisesSigbusInsteadOfShowingZeros) {
  void* region;
  OK(trap_->attach(kPage, kPage, plain(kPage).transfer, &region));
  ::testing::internal::CaptureStderr();
  trap_.reset();
  core::flush_log();
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("still attached"), std::string::npos);
  uint64_t value = 0;
  EXPECT_EQ(load(static_cast<uint64_t*>(region), &value), SIGBUS);
  munmap(region, kPage);
}

TEST_P(TrapRanges, CallsThatMayBlockEndTheProcessUnderThePagersLock) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  core::BigMutex mutex;
  const auto held = [&](auto call) {
    core::BigLock lock(mutex);
    (trap_.get()->*call)(nullptr, 0).ignore();
  };
  EXPECT_DEATH(held(&Trap::protect), "Trap::protect is called under the pager");
  EXPECT_DEATH(held(&Trap::detach), "Trap::detach is called under the pager");
  EXPECT_DEATH(held(&Trap::unmap), "Trap::unmap is called under the pager");
  const auto also = [&](auto call) {
    core::BigLock lock(mutex);
    call();
  };
  void* address = nullptr;
  size_t count = 0;
  std::array<Event, 1> events;
  EXPECT_DEATH(also([&] { trap_->attach(kPage, kPage, Transfer::copy, &address).ignore(); }),
               "Trap::attach.* is called");
  EXPECT_DEATH(also([&] { trap_->attach_at(nullptr, 0, Transfer::copy).ignore(); }), "Trap::attach_at is called");
  EXPECT_DEATH(also([&] { trap_->wait(events, 0, &count).ignore(); }), "Trap::wait is called");
  EXPECT_DEATH(also([&] { trap_->fill(nullptr, 0, nullptr, Transfer::copy, Protect::no).ignore(); }), "Trap::fill is");
  EXPECT_DEATH(also([&] { trap_->take(nullptr, 0, nullptr, Transfer::copy).ignore(); }), "Trap::take is called");
  EXPECT_DEATH(also([&] { trap_->drop({}).ignore(); }), "Trap::drop is called");
  // Calls that a decision about one block needs at once never wait, so they are allowed under the
  // lock.
  Block b;
  make_block(plain(kHugePage), &b);
  core::BigLock lock(mutex);
  OK(trap_->wake(b.words, kHugePage));
  OK(trap_->fail(b.words, kHugePage));
  OK(trap_->unfail(b.words, kHugePage));
}

TEST_P(TrapRanges, WaitReturnsOnInterruptOnTimeoutAndInPortions) {
  std::array<Event, 2> events;
  size_t count = 9;
  trap_->interrupt();
  OK(trap_->wait(events, -1, &count));
  EXPECT_EQ(count, 0u);
  OK(trap_->wait(events, 0, &count));
  EXPECT_EQ(count, 0u);
  EXPECT_EQ(trap_->wait({}, 0, &count).code(), -EINVAL);
  Block b;
  make_block(plain(size_t{64} << 10), &b);
  std::array<std::thread, 5> threads;
  std::array<uint64_t, 5> values{};
  for (size_t i = 0; i < 5; ++i) threads[i] = std::thread([&, i] { load(b.words + 512 * i, &values[i]); });
  size_t total = 0;
  const size_t reports = trap_->caps().one_report ? 1 : 5;
  while (total < reports) {
    OK(trap_->wait(events, -1, &count));
    EXPECT_LE(count, events.size());
    total += count;
  }
  EXPECT_EQ(total, reports);  // each reported once, none lost
  // A wake without a fill: they park, and are reported, again.
  OK(trap_->wake(b.words, b.kind.size));
  next_fault(*trap_);
  write_pattern(b.frame, b.kind.size, 1);
  OK(b.fill());
  for (std::thread& t : threads) t.join();
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(values[i], pattern(1, 512 * i));
  b.release();
}

TEST_P(TrapRanges, MalformedCallsAreRefused) {
  Block b;
  make_block(plain(size_t{64} << 10), &b);
  const Transfer transfer = b.kind.transfer;
  std::byte* at = reinterpret_cast<std::byte*>(b.words);
  void* out = nullptr;
  EXPECT_EQ(trap_->attach(0, kPage, transfer, &out).code(), -EINVAL);
  EXPECT_EQ(trap_->attach(kPage + 1, kPage, transfer, &out).code(), -EINVAL);
  EXPECT_EQ(trap_->attach(kPage, 3 * kPage, transfer, &out).code(), -EINVAL);
  EXPECT_EQ(trap_->attach(kPage, 512, transfer, &out).code(), -EINVAL);
  EXPECT_EQ(trap_->attach(SIZE_MAX - kPage + 1, kPage, transfer, &out).code(), -ENOMEM);
  EXPECT_EQ(out, nullptr);
  EXPECT_EQ(trap_->fill(at + 1, kPage, b.frame, transfer, Protect::no).code(), -EINVAL);
  EXPECT_EQ(trap_->fill(at, kPage, b.frame + 1, transfer, Protect::no).code(), -EINVAL);
  EXPECT_EQ(trap_->fill(at, 0, b.frame, transfer, Protect::no).code(), -EINVAL);
  const int move_error = trap_->caps().move ? -EINVAL : -EOPNOTSUPP;
  if (!trap_->caps().copy) {
    EXPECT_EQ(trap_->attach(kPage, kPage, Transfer::copy, &out).code(), -EOPNOTSUPP);
  }
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
  // A present block can be neither filled again nor failed; nothing changes.
  write_pattern(b.frame, b.kind.size, 1);
  OK(b.fill());
  const uint64_t in_frame = transfer == Transfer::install ? 1 : 2;  // an installed frame is the block
  write_pattern(b.frame, b.kind.size, in_frame);
  EXPECT_EQ(b.fill().code(), -EEXIST);
  EXPECT_EQ(first_wrong(b.words, b.kind.size, 1), -1);
  EXPECT_EQ(first_wrong(b.frame, b.kind.size, in_frame), -1);
  if (trap_->caps().poison) {
    EXPECT_EQ(trap_->fail(b.words, b.kind.size).code(), -EEXIST);
  }
  // Memory that no trap owns.
  void* other = nullptr;
  OK(trap_->reserve_frames(kPage, false, &other));
  write_pattern(other, kPage, 3);
  EXPECT_FALSE(trap_->fill(other, kPage, b.frame, transfer, Protect::no).ok());
  EXPECT_EQ(first_wrong(other, kPage, 3), -1);
  OK(trap_->release_arena(other, kPage));
  b.release();
}

// A step hook: refuses address space for the next mapping, until no_more_space_ends().
void no_more_space(const char* step) {
  if (step != std::string_view("trap.created")) return;
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = 1;
  setrlimit(RLIMIT_AS, &limit);
}
void no_more_space_ends() {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_AS, &limit);
}

TEST_P(TrapRanges, WhatCannotBeAttachedLeavesNothingInTheModule) {
  if (!trap_->caps().install) GTEST_SKIP() << "for the module alone";
  const auto records = [] {  // one for each range
    uint64_t value = 0;
    std::ifstream("/sys/class/misc/vmem/records") >> value;
    return value;
  };
  Block b;
  make_block({kHugePage, Transfer::install}, &b);
  write_pattern(b.frame, kHugePage, 1);
  OK(b.fill());
  const uint64_t before = records();
  const size_t mappings = count_mappings();
  for (const bool memory : {true, false}) {
    SCOPED_TRACE(memory ? "no memory" : "no address space");
    const auto refused = [&](auto&& call) {
      if (memory) {
        core::memory_hook.store([] { return true; });
      } else {
        core::step_hook.store(no_more_space);
      }
      const int code = call().code();
      core::memory_hook.store(nullptr);
      core::step_hook.store(nullptr);
      no_more_space_ends();
      EXPECT_EQ(code, -ENOMEM);
      EXPECT_EQ(records(), before);
      EXPECT_EQ(count_mappings(), mappings);
    };
    void* at = nullptr;
    refused([&] { return trap_->attach_blocks(kHugePage, kHugePage, kPage, Transfer::install, 0, &at); });
    refused([&] { return trap_->reserve_arena(kHugePage, kPage, &at); });
    refused([&] { return trap_->attach_at(b.words, kHugePage, Transfer::install); });
    EXPECT_EQ(at, nullptr);
    EXPECT_EQ(first_wrong(b.words, kHugePage, 1), -1) << "the range that was there is as it was";
  }
  OK(b.take());
  b.release();
}

}  // namespace
}  // namespace vmem::trap::testing
