// The contract of store::Engine. Run on io_uring, threads and the fault-injecting wrapper without
// rules.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "core/step.h"
#include "store/engine.h"
#include "store/engine_base.h"
#include "store_engine_fixture.h"
#include "store_test_util.h"

namespace vmem::store::test {
namespace {

class EngineContract : public EngineFixture {};

TEST_P(EngineContract, RandomBatchesReadBackWhatWasWritten) {
  make(8, 2);
  if (IsSkipped()) return;
  constexpr size_t kBlocks = 512;
  TempFile file(kBlocks * core::kPage, true);
  const FileId id = add(file);
  Buffer written(kBlocks * core::kPage), read(kBlocks * core::kPage);
  std::mt19937_64 random(7);
  written.fill(random);
  for (int round = 0; round < 6; ++round) {
    for (const Io::Op op : {Io::Op::write, Io::Op::read}) {
      char* base = op == Io::Op::write ? written.data() : read.data();
      std::vector<std::pair<size_t, size_t>> cuts;  // start and length in pages
      for (size_t at = 0; at < kBlocks;) {
        const size_t n = std::min<size_t>(kBlocks - at, 1 + random() % (round + 1) * 7);
        cuts.emplace_back(at, n);
        at += n;
      }
      if (round % 2 == 1) std::shuffle(cuts.begin(), cuts.end(), random);
      Batch batch;
      for (const auto& [at, n] : cuts) {
        Io& io = batch.add(op, id, at * core::kPage, base + at * core::kPage, n * core::kPage);
        io.urgency = static_cast<core::Urgency>(random() % core::kUrgencies);
      }
      batch.submit_in_pieces(*engine_, random);
      batch.wait();
      for (const Io& io : batch.ios()) {
        EXPECT_EQ(io.result, 0);
        EXPECT_EQ(io.transferred, io.size);
      }
    }
    ASSERT_EQ(memcmp(written.data(), read.data(), written.size()), 0) << "round " << round;
    written.fill(random);
    read.zero();
  }
  engine_->remove_file(id);
}

TEST_P(EngineContract, TheMostUrgentGoesFirstAtDepthOne) {
  make(1);
  if (IsSkipped()) return;
  TempFile file(1 << 20, true);
  const FileId id = add(file);
  Buffer buffer(1 << 20);
  Batch batch;
  for (size_t n = 0; n < 2 * core::kUrgencies; ++n) {
    // Least urgent first, and never adjacent, so that nothing is merged.
    Io& io = batch.add(Io::Op::read, id, n * 2 * core::kPage, buffer.data() + n * 2 * core::kPage, core::kPage);
    io.urgency = static_cast<core::Urgency>(core::kUrgencies - 1 - n / 2);
  }
  batch.submit(*engine_);
  batch.wait();
  const std::vector<Io*> order = batch.order();
  for (size_t n = 1; n < order.size(); ++n) {
    EXPECT_LE(order[n - 1]->urgency, order[n]->urgency);
    if (order[n - 1]->urgency == order[n]->urgency) {
      EXPECT_LT(order[n - 1]->offset, order[n]->offset) << "first come, first served";
    }
  }
}

std::atomic<int> in_flight{0}, most_in_flight{0};
void count_in_flight(const char* step) {
  if (strcmp(step, "store.issue") == 0) {
    const int now = ++in_flight;
    int most = most_in_flight.load();
    while (now > most && !most_in_flight.compare_exchange_weak(most, now)) {
    }
  } else if (strcmp(step, "store.finish") == 0) {
    --in_flight;
  }
}

TEST_P(EngineContract, NeverMoreInFlightThanTheDepth) {
  make(3, 2);
  if (IsSkipped()) return;
  TempFile file(4 << 20, true);
  const FileId id = add(file);
  Buffer buffer(4 << 20);
  in_flight = most_in_flight = 0;
  core::step_hook = count_in_flight;
  Batch batch;
  for (size_t n = 0; n < 256; ++n) {
    batch.add(Io::Op::read, id, n * 4 * core::kPage, buffer.data() + n * 4 * core::kPage, core::kPage);
  }
  batch.submit(*engine_);
  batch.wait();
  engine_.reset();
  core::step_hook = nullptr;
  EXPECT_LE(most_in_flight.load(), 3);
  EXPECT_GE(most_in_flight.load(), 1);
  EXPECT_EQ(in_flight.load(), 0);
}

TEST_P(EngineContract, AThreadMayMakeAShortReadItself) {
  make(4);
  if (IsSkipped()) return;
  TempFile file(1 << 20, true);
  const FileId id = add(file);
  Buffer buffer(1 << 20), other(1 << 20);
  Io io;
  io.file = id;
  io.offset = 3 * core::kPage;
  io.buffer = buffer.data();
  io.size = 2 * core::kPage;
  Batch batch;
  batch.add(Io::Op::read, id, io.offset, other.data(), io.size);
  batch.submit(*engine_);
  batch.wait();
  if (engine_->read_here(io)) {  // an engine on top of another need not
    EXPECT_EQ(io.result, 0);
    EXPECT_EQ(io.transferred, io.size);
    EXPECT_EQ(memcmp(buffer.data(), other.data(), io.size), 0);
  }
  io.offset = (1 << 20) - core::kPage;
  EXPECT_FALSE(engine_->read_here(io)) << "the file ends before";
  io.offset = 0;
  io.size = 1 << 20;
  EXPECT_FALSE(engine_->read_here(io)) << "it is long";
}

std::atomic<int> looks{0};

TEST_P(EngineContract, AThreadWithoutWorkSleeps) {
  make(4, 2);
  if (IsSkipped()) return;
  TempFile file(1 << 20, true);
  const FileId id = add(file);
  Buffer buffer(1 << 20);
  core::step_hook = [](const char* step) { looks += strcmp(step, "store.spin") == 0 ? 1 : 0; };
  for (size_t n = 0; n < 256; ++n) {
    Batch batch;
    batch.add(Io::Op::read, id, n * core::kPage, buffer.data() + n * core::kPage, core::kPage);
    batch.submit(*engine_);
    batch.wait();
  }
  const int before = looks;
  usleep(100000);
  EXPECT_LE(looks, before + 2) << "at most one look of each thread";
  engine_.reset();
  core::step_hook = nullptr;
}

TEST_P(EngineContract, NeighboursOfOneBatchAreMergedAndEachIsDone) {
  make(4);
  if (IsSkipped()) return;
  constexpr size_t kCount = 600;  // more than two vectored calls of 256 pieces
  TempFile file(kCount * core::kPage, true);
  const FileId id = add(file);
  Buffer written(kCount * core::kPage), read(kCount * core::kPage);
  std::mt19937_64 random(3);
  written.fill(random);
  ASSERT_EQ(pwrite(file.fd(), written.data(), written.size(), 0), static_cast<ssize_t>(written.size()));
  Batch batch;
  // Buffers in reverse order: adjacent in the file, not in memory.
  for (size_t n = 0; n < kCount; ++n) {
    batch.add(Io::Op::read, id, n * core::kPage, read.data() + (kCount - 1 - n) * core::kPage, core::kPage);
  }
  batch.submit(*engine_);
  batch.wait();
  EXPECT_EQ(batch.order().size(), kCount);
  for (size_t n = 0; n < kCount; ++n) {
    ASSERT_EQ(memcmp(written.data() + n * core::kPage, read.data() + (kCount - 1 - n) * core::kPage, core::kPage), 0);
  }
  EXPECT_EQ(engine_->stats().reads, kCount);
  EXPECT_GE(engine_->stats().merged, kCount - 4);
  EXPECT_LT(engine_->stats().merged, kCount - 1) << "more than 1 MiB went as one transfer";
}

TEST_P(EngineContract, ReadsPastTheEndAreZeroWhereAskedAndErrorsElsewhere) {
  make(4);
  if (IsSkipped()) return;
  for (const bool direct : {false, true}) {
    TempFile file(3 * core::kPage + 100, direct);
    const FileId id = add(file);
    Buffer buffer(16 * core::kPage);
    memset(buffer.data(), 0x55, buffer.size());
    Batch batch;
    Io& zeroed = batch.add(Io::Op::read, id, 2 * core::kPage, buffer.data(), 4 * core::kPage);
    zeroed.short_read_is_zero = true;
    Io& refused = batch.add(Io::Op::read, id, 2 * core::kPage, buffer.data() + 4 * core::kPage, 4 * core::kPage);
    Io& nothing = batch.add(Io::Op::read, id, 8 * core::kPage, buffer.data() + 8 * core::kPage, core::kPage);
    nothing.short_read_is_zero = true;
    batch.submit(*engine_);
    batch.wait();
    EXPECT_EQ(zeroed.result, 0);
    EXPECT_EQ(zeroed.transferred, core::kPage + 100);
    EXPECT_TRUE(file.matches(2 * core::kPage, buffer.data(), core::kPage + 100));
    EXPECT_TRUE(all_zero(buffer.data() + core::kPage + 100, 3 * core::kPage - 100));
    EXPECT_EQ(refused.result, -EIO);
    EXPECT_EQ(refused.transferred, core::kPage + 100);
    EXPECT_EQ(nothing.result, 0);
    EXPECT_EQ(nothing.transferred, 0u);
    EXPECT_TRUE(all_zero(buffer.data() + 8 * core::kPage, core::kPage));
    engine_->remove_file(id);
  }
}

TEST_P(EngineContract, AWriteWithinTheFileNeverMakesItLonger) {
  make(4);
  if (IsSkipped()) return;
  std::mt19937_64 random(8);
  for (const bool direct : {false, true}) {
    for (const size_t end : {size_t{0}, size_t{100}, 2 * core::kPage, 2 * core::kPage + 1, 3 * core::kPage + 511,
                             6 * core::kPage, 9 * core::kPage + 7}) {
      TempFile file(10 * core::kPage, direct);
      ASSERT_EQ(ftruncate(file.fd(), static_cast<off_t>(end)), 0);
      const FileId id = add(file);
      Buffer buffer(16 * core::kPage), back(16 * core::kPage);
      buffer.fill(random);
      Batch batch;  // a run that is merged, and one that ends inside a page
      for (size_t n = 0; n < 3; ++n) {
        batch.add(Io::Op::write, id, n * 2 * core::kPage, buffer.data() + n * 2 * core::kPage, 2 * core::kPage)
            .within_file = true;
      }
      batch.add(Io::Op::write, id, 8 * core::kPage, buffer.data() + 8 * core::kPage, core::kPage + 5).within_file =
          true;
      batch.submit(*engine_);
      batch.wait();
      struct stat st;
      ASSERT_EQ(fstat(file.fd(), &st), 0);
      EXPECT_EQ(static_cast<size_t>(st.st_size), end);
      for (const Io& io : batch.ios()) {
        const size_t inside = end > io.offset ? std::min(io.size, end - io.offset) : 0;
        EXPECT_EQ(io.result, 0) << end << " " << io.offset;
        EXPECT_EQ(io.transferred, inside) << end << " " << io.offset;
        EXPECT_TRUE(file.matches(io.offset, static_cast<char*>(io.buffer), inside)) << end << " " << io.offset;
      }
      EXPECT_EQ((fcntl(file.fd(), F_GETFL) & O_DIRECT) != 0, file.direct());
      engine_->remove_file(id);
    }
  }
}

int cut_fd = -1;

TEST_P(EngineContract, AFileThatBecomesShorterBetweenTheQueueAndTheKernelStaysAsItIs) {
  make(4);
  if (IsSkipped()) return;
  for (const bool direct : {false, true}) {
    TempFile file(10 * core::kPage, direct);
    const FileId id = add(file);
    Buffer buffer(8 * core::kPage);
    cut_fd = file.fd();
    core::step_hook = [](const char* step) {
      if (strcmp(step, "store.issue") == 0 && ftruncate(cut_fd, 3 * core::kPage + 9) != 0) abort();
    };
    {
      Batch batch;
      batch.add(Io::Op::write, id, 0, buffer.data(), buffer.size()).within_file = true;
      batch.submit(*engine_);
      batch.wait();
      core::step_hook = nullptr;
      EXPECT_EQ(batch.ios()[0].result, 0);
      EXPECT_EQ(batch.ios()[0].transferred, 3 * core::kPage + 9);
    }
    struct stat st;
    ASSERT_EQ(fstat(file.fd(), &st), 0);
    EXPECT_EQ(static_cast<size_t>(st.st_size), 3 * core::kPage + 9);
    engine_->remove_file(id);
  }
}

// A direct read of a file that ends at a full sector inside a page stops there each time and never
// returns 0.
TEST_P(EngineContract, AFileMayEndAnywhereInAPage) {
  make(4);
  if (IsSkipped()) return;
  for (const bool direct : {false, true}) {
    for (const size_t tail : {1, 100, 512, 1024, 2048, 3584, 4095}) {
      for (const size_t pages : {0, 3}) {
        const size_t size = pages * core::kPage + tail;
        TempFile file(size, direct);
        const FileId id = add(file);
        Buffer buffer(8 * core::kPage);
        memset(buffer.data(), 0x55, buffer.size());
        Batch batch;
        Io& zeroed = batch.add(Io::Op::read, id, 0, buffer.data(), 4 * core::kPage);
        zeroed.short_read_is_zero = true;
        Io& refused = batch.add(Io::Op::read, id, 0, buffer.data() + 4 * core::kPage, 4 * core::kPage);
        batch.submit(*engine_);
        batch.wait();
        EXPECT_EQ(zeroed.result, 0) << size;
        EXPECT_EQ(zeroed.transferred, size);
        EXPECT_TRUE(file.matches(0, buffer.data(), size));
        EXPECT_TRUE(all_zero(buffer.data() + size, 4 * core::kPage - size));
        EXPECT_EQ(refused.result, -EIO) << size;
        EXPECT_EQ(refused.transferred, size);
        engine_->remove_file(id);
      }
    }
  }
}

TEST_P(EngineContract, AMergedRunThatMeetsTheEndGivesEachItsOwnAnswer) {
  make(4);
  if (IsSkipped()) return;
  TempFile file(2 * core::kPage + 100, true);
  const FileId id = add(file);
  Buffer buffer(4 * core::kPage);
  memset(buffer.data(), 0x55, buffer.size());
  Batch batch;
  for (size_t n = 0; n < 4; ++n) {
    Io& io = batch.add(Io::Op::read, id, n * core::kPage, buffer.data() + n * core::kPage, core::kPage);
    io.short_read_is_zero = n != 3;
  }
  batch.submit(*engine_);
  batch.wait();
  EXPECT_EQ(engine_->stats().merged, 3u);
  const int expected[] = {0, 0, 0, -EIO};
  const size_t moved[] = {core::kPage, core::kPage, 100, 0};
  for (size_t n = 0; n < 4; ++n) {
    EXPECT_EQ(batch.ios()[n].result, expected[n]) << n;
    EXPECT_EQ(batch.ios()[n].transferred, moved[n]) << n;
  }
  EXPECT_TRUE(all_zero(buffer.data() + 2 * core::kPage + 100, core::kPage - 100));
}

TEST_P(EngineContract, AFullDiskIsSaidToBeFullAndSparesTheOthersOfTheRun) {
  make(4);
  if (IsSkipped()) return;
  SmallTmpfs disk(16);  // pages
  if (!disk.ok()) GTEST_SKIP() << "a small tmpfs cannot be mounted: " << disk.why();
  TempFile file(disk.path());
  const FileId id = add(file);
  Buffer buffer(32 * core::kPage);
  Batch batch;
  for (size_t n = 0; n < 32; ++n) {
    batch.add(Io::Op::write, id, n * core::kPage, buffer.data() + n * core::kPage, core::kPage);
  }
  batch.submit(*engine_);
  batch.wait();
  for (size_t n = 0; n < 32; ++n) {
    EXPECT_EQ(batch.ios()[n].result, n < 16 ? 0 : -ENOSPC) << n;
  }
  EXPECT_EQ(engine_->stats().errors, 16u);
}

TEST_P(EngineContract, ALimitOnFileSizeIsAnErrorAndNotADeath) {
  make(4);
  if (IsSkipped()) return;
  TempFile file(4 * core::kPage, false);
  const FileId id = add(file);
  Buffer buffer(8 * core::kPage);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{6 * core::kPage, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  Batch batch;
  for (size_t n = 0; n < 8; ++n) {
    batch.add(Io::Op::write, id, n * core::kPage, buffer.data() + n * core::kPage, core::kPage);
  }
  batch.submit(*engine_);
  batch.wait();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  for (size_t n = 0; n < 8; ++n) {
    EXPECT_EQ(batch.ios()[n].result, n < 6 ? 0 : -EFBIG) << n;
  }
}

TEST_P(EngineContract, AFlushSucceedsAndABadFileFails) {
  make(4);
  if (IsSkipped()) return;
  TempFile file(core::kPage, false);
  const FileId id = add(file);
  Buffer buffer(core::kPage);
  Batch batch;
  Io& flush = batch.add(Io::Op::flush, id, 0, nullptr, 0);
  Io& nothing = batch.add(Io::Op::read, id, 0, buffer.data(), 0);
  Io& unknown = batch.add(Io::Op::read, id + 77, 0, buffer.data(), core::kPage);
  Io& unknown_flush = batch.add(Io::Op::flush, id + 77, 0, nullptr, 0);
  batch.submit(*engine_);
  batch.wait();
  EXPECT_EQ(flush.result, 0);
  EXPECT_EQ(nothing.result, 0);
  EXPECT_EQ(unknown.result, -EBADF);
  EXPECT_EQ(unknown_flush.result, -EBADF);
  FileId refused = 0;
  EXPECT_EQ(engine_->add_file(-1, &refused).code(), -EBADF);
}

TEST_P(EngineContract, TheDestructorWaitsForEverythingSubmitted) {
  make(2, 2);
  if (IsSkipped()) return;
  TempFile file(4 << 20, true);
  const FileId id = add(file);
  Buffer buffer(4 << 20);
  Batch batch;
  for (size_t n = 0; n < 64; ++n) {
    batch.add(Io::Op::read, id, n * 8 * core::kPage, buffer.data() + n * 8 * core::kPage, core::kPage);
  }
  batch.submit(*engine_);
  engine_.reset();
  EXPECT_EQ(batch.order().size(), 64u);
}

struct Chain {
  Engine* engine;
  int left;
  std::atomic<int> done{0};
};

void resubmit(Io& io) {
  auto* chain = static_cast<Chain*>(io.user);
  ++chain->done;
  if (--chain->left == 0) return;
  Io* const again = &io;
  chain->engine->submit({&again, 1});
}

TEST_P(EngineContract, DoneMaySubmitAlsoWhileTheEngineIsBeingDestroyed) {
  make(2);
  if (IsSkipped()) return;
  TempFile file(core::kPage, true);
  const FileId id = add(file);
  Buffer buffer(core::kPage);
  Chain chain{engine_.get(), 200};
  Io io;
  io.file = id;
  io.buffer = buffer.data();
  io.size = core::kPage;
  io.done = resubmit;
  io.user = &chain;
  Io* const first = &io;
  engine_->submit({&first, 1});
  engine_.reset();
  EXPECT_EQ(chain.done.load(), 200);
}

TEST_P(EngineContract, ManyThreadsMaySubmitAtOnce) {
  make(6, 3);
  if (IsSkipped()) return;
  constexpr size_t kThreads = 4, kEach = 150;
  TempFile file(kThreads * kEach * core::kPage, true);
  const FileId id = add(file);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      Buffer written(kEach * core::kPage), read(kEach * core::kPage);
      written.fill(random);
      for (const Io::Op op : {Io::Op::write, Io::Op::read}) {
        Batch batch;
        for (size_t n = 0; n < kEach; ++n) {
          char* base = op == Io::Op::write ? written.data() : read.data();
          batch.add(op, id, (t * kEach + n) * core::kPage, base + n * core::kPage, core::kPage);
        }
        batch.submit_in_pieces(*engine_, random);
        batch.wait();
        for (const Io& io : batch.ios()) wrong += io.result != 0;
      }
      wrong += memcmp(written.data(), read.data(), written.size()) != 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
}

void dawdle(const char* step) {
  static std::atomic<uint64_t> calls{0};
  if (strncmp(step, "store.", 6) != 0) return;
  const uint64_t call = ++calls * 0x9e3779b97f4a7c15;
  if (call >> 62 == 0) std::this_thread::sleep_for(std::chrono::microseconds(call >> 40 & 1023));
  if (call >> 62 == 1) std::this_thread::yield();
}

TEST_P(EngineContract, DelaysAtEveryStepLoseNothing) {
  make(3, 3);
  if (IsSkipped()) return;
  constexpr size_t kThreads = 3, kEach = 120;
  TempFile file(kThreads * kEach * core::kPage, true);
  const FileId id = add(file);
  core::step_hook = dawdle;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t + 50);
      Buffer buffer(kEach * core::kPage);
      Batch batch;
      for (size_t n = 0; n < kEach; ++n) {
        Io& io =
            batch.add(Io::Op::read, id, (t * kEach + n) * core::kPage, buffer.data() + n * core::kPage, core::kPage);
        io.urgency = static_cast<core::Urgency>(random() % core::kUrgencies);
      }
      batch.submit_in_pieces(*engine_, random);
      batch.wait();
      wrong += !file.matches(t * kEach * core::kPage, buffer.data(), buffer.size());
    });
  }
  for (std::thread& thread : threads) thread.join();
  engine_.reset();
  core::step_hook = nullptr;
  EXPECT_EQ(wrong.load(), 0);
}

TEST_P(EngineContract, FilesComeAndGoAndNumbersAreReused) {
  make(4);
  if (IsSkipped()) return;
  Buffer buffer(core::kPage);
  FileId highest = 0;
  for (int n = 0; n < 40; ++n) {
    TempFile file(core::kPage, n % 2 == 0);
    const FileId id = add(file);
    highest = std::max(highest, id);
    Batch batch;
    batch.add(Io::Op::read, id, 0, buffer.data(), core::kPage);
    batch.submit(*engine_);
    batch.wait();
    EXPECT_EQ(batch.ios()[0].result, 0);
    EXPECT_TRUE(file.matches(0, buffer.data(), core::kPage));
    engine_->remove_file(id);
  }
  EXPECT_EQ(highest, 0u);
}

// Limits every attempt, so that each transfer needs several.
struct Halver final : Injector {
  size_t attempt_limit(const Io&, size_t want) override { return want > core::kPage ? want / 2 : want; }
};

TEST_P(EngineContract, ShortTransfersAreContinued) {
  make(4);
  if (IsSkipped()) return;
  EngineBase* base = base_of(*engine_);
  ASSERT_NE(base, nullptr);
  for (const bool direct : {false, true}) {
    Halver halver;
    base->set_injector(&halver);
    constexpr size_t kCount = 64;
    TempFile file(kCount * core::kPage, direct);
    const FileId id = add(file);
    Buffer written(kCount * core::kPage), read(kCount * core::kPage);
    std::mt19937_64 random(11);
    written.fill(random);
    for (const Io::Op op : {Io::Op::write, Io::Op::read}) {
      Batch batch;
      char* buffer = op == Io::Op::write ? written.data() : read.data();
      for (size_t n = 0; n < kCount / 2; ++n) {
        batch.add(op, id, n * core::kPage, buffer + n * core::kPage, core::kPage);
      }
      batch.add(op, id, kCount / 2 * core::kPage, buffer + kCount / 2 * core::kPage, kCount / 2 * core::kPage);
      batch.submit(*engine_);
      batch.wait();
      for (const Io& io : batch.ios()) EXPECT_EQ(io.result, 0);
    }
    EXPECT_EQ(memcmp(written.data(), read.data(), written.size()), 0);
    EXPECT_GT(engine_->stats().retries, 0u);
    engine_->remove_file(id);
    base->set_injector(nullptr);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, EngineContract, testing::ValuesIn(engine_names()),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace vmem::store::test
