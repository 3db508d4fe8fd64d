// Long transfers, which go in parts, on every implementation of store::Engine: the contract is that
// of short ones.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "common/patience.h"
#include "core/step.h"
#include "store/engine.h"
#include "store_engine_fixture.h"
#include "store_test_util.h"

namespace vmem::store::test {
namespace {

class EngineLongTransfers : public EngineFixture {};

TEST_P(EngineLongTransfers, LongTransfersReadBackWhatWasWritten) {
  constexpr size_t kSize = size_t{24} << 20;
  for (const unsigned depth : {1u, 3u, 16u}) {
    make(depth, 2);
    if (IsSkipped()) return;
    for (const bool direct : {false, true}) {
      TempFile file(kSize, direct);
      const FileId id = add(file);
      Buffer written(kSize), read(kSize);
      std::mt19937_64 random(depth);
      written.fill(random);
      for (const Io::Op op : {Io::Op::write, Io::Op::read}) {
        char* base = op == Io::Op::write ? written.data() : read.data();
        Batch batch;
        for (size_t at = 0; at < kSize;) {
          const size_t n = std::min(kSize - at, (1 + random() % 2000) * core::kPage);
          Io& io = batch.add(op, id, at, base + at, n);
          io.urgency = static_cast<core::Urgency>(random() % core::kUrgencies);
          at += n;
        }
        batch.submit_in_pieces(*engine_, random);
        batch.wait();
        EXPECT_EQ(batch.order().size(), batch.ios().size());
        for (const Io& io : batch.ios()) {
          EXPECT_EQ(io.result, 0);
          EXPECT_EQ(io.transferred, io.size);
        }
      }
      EXPECT_EQ(memcmp(written.data(), read.data(), kSize), 0) << depth;
      engine_->remove_file(id);
    }
  }
}

TEST_P(EngineLongTransfers, ALongReadMeetsTheEndInAnyOfItsParts) {
  make(4);
  if (IsSkipped()) return;
  constexpr size_t kMiB = size_t{1} << 20;
  for (const bool direct : {false, true}) {
    for (const size_t end : {size_t{0}, size_t{100}, 2 * kMiB, 3 * kMiB + 512, 6 * kMiB - 1, 7 * kMiB + 5}) {
      TempFile file(end, direct);
      const FileId id = add(file);
      Buffer buffer(16 * kMiB);
      memset(buffer.data(), 0x55, buffer.size());
      Batch batch;
      Io& zeroed = batch.add(Io::Op::read, id, 0, buffer.data(), 8 * kMiB);
      zeroed.short_read_is_zero = true;
      Io& refused = batch.add(Io::Op::read, id, 0, buffer.data() + 8 * kMiB, 8 * kMiB);
      batch.submit(*engine_);
      batch.wait();
      EXPECT_EQ(zeroed.result, 0) << end;
      EXPECT_EQ(zeroed.transferred, end);
      EXPECT_TRUE(file.matches(0, buffer.data(), end));
      EXPECT_TRUE(all_zero(buffer.data() + end, 8 * kMiB - end));
      EXPECT_EQ(refused.result, -EIO) << end;
      EXPECT_EQ(refused.transferred, end);
      engine_->remove_file(id);
    }
  }
}

struct Watched {
  const char* expected;
  size_t told = 0;
  bool inside = false, over = false;
  std::atomic<int>* wrong;
};

// Reported bytes have arrived. Reports come in order, one at a time, and not after the end.
TEST_P(EngineLongTransfers, OfALongReadWhatIsToldHasCome) {
  for (const unsigned depth : {1u, 4u, 16u}) {
    make(depth, 3);
    if (IsSkipped()) return;
    constexpr size_t kSize = size_t{48} << 20, kCount = 6;
    TempFile file(kSize, true);
    const FileId id = add(file);
    Buffer expected(kSize), buffer(kSize);
    ASSERT_EQ(pread(file.fd(), expected.data(), kSize, 0), static_cast<ssize_t>(kSize));
    std::atomic<int> wrong{0};
    std::vector<Watched> watched(kCount);
    std::vector<Io> ios(kCount);
    for (size_t n = 0; n < kCount; ++n) {
      Io& io = ios[n];
      io.urgency = static_cast<core::Urgency>(n % core::kUrgencies);
      io.file = id;
      io.offset = n * (kSize / kCount);
      io.buffer = buffer.data() + io.offset;
      io.size = kSize / kCount - n * core::kPage;
      watched[n].expected = expected.data() + io.offset;
      watched[n].wrong = &wrong;
      io.user = &watched[n];
      io.progress = [](Io& at, size_t bytes) {
        Watched& w = *static_cast<Watched*>(at.user);
        *w.wrong += w.inside || w.over || bytes <= w.told || bytes >= at.size;
        w.inside = true;
        *w.wrong += memcmp(w.expected + w.told, static_cast<char*>(at.buffer) + w.told, bytes - w.told) != 0;
        w.told = bytes;
        w.inside = false;
      };
      io.done = [](Io& at) {
        Watched& w = *static_cast<Watched*>(at.user);
        *w.wrong += w.inside || w.over || at.result != 0 || memcmp(w.expected, at.buffer, at.size) != 0;
        w.over = true;
      };
      Io* const one = &io;
      engine_->submit({&one, 1});
    }
    engine_.reset();
    EXPECT_EQ(wrong.load(), 0) << depth;
    size_t told = 0;
    for (const Watched& w : watched) {
      EXPECT_TRUE(w.over);
      told += w.told;
    }
    if (depth == 1) {
      EXPECT_GT(told, 0u) << "each part ends while the next one has not begun";
    }
  }
}

// Memory that may not be written is an error of the part that it is in.
TEST_P(EngineLongTransfers, ALongReadFailsInAnyOfItsPartsWithoutTheOthers) {
  make(4);
  if (IsSkipped()) return;
  constexpr size_t kPart = size_t{2} << 20, kParts = 6;
  TempFile file(kParts * kPart, true);
  const FileId id = add(file);
  for (size_t bad = 0; bad < kParts; ++bad) {
    Buffer buffer(kParts * kPart);
    ASSERT_EQ(mprotect(buffer.data() + bad * kPart, kPart, PROT_NONE), 0);
    Batch batch;
    Io& io = batch.add(Io::Op::read, id, 0, buffer.data(), buffer.size());
    batch.submit(*engine_);
    batch.wait();
    EXPECT_EQ(io.result, -EFAULT) << bad;
    EXPECT_EQ(io.transferred, bad * kPart);
    EXPECT_TRUE(file.matches(0, buffer.data(), bad * kPart)) << "what came before it is there";
    EXPECT_EQ(engine_->stats().errors, bad + 1);
  }
}

TEST_P(EngineLongTransfers, ALongWriteToAFullDiskFailsAsOne) {
  make(4);
  if (IsSkipped()) return;
  constexpr size_t kMiB = size_t{1} << 20;
  for (const size_t room : {1, 3, 6}) {  // MiB
    SmallTmpfs disk(room * kMiB / core::kPage);
    if (!disk.ok()) GTEST_SKIP() << "a small tmpfs cannot be mounted: " << disk.why();
    TempFile file(disk.path());
    const FileId id = add(file);
    Buffer buffer(8 * kMiB);
    Batch batch;
    Io& io = batch.add(Io::Op::write, id, 0, buffer.data(), buffer.size());
    batch.submit(*engine_);
    batch.wait();
    EXPECT_EQ(io.result, -ENOSPC);
    EXPECT_LE(io.transferred, room * kMiB);
    engine_->remove_file(id);
  }
}

std::atomic<int> met{0};

// As many workers begin as the read has parts, so that these are under way together.
TEST(ThreadEngine, PartsAreUnderWayAtOnce) {
  std::unique_ptr<Engine> engine;
  ASSERT_TRUE(make_named_engine("threads", 6, 1, &engine).ok());
  constexpr size_t kSize = size_t{8} << 20;
  TempFile file(kSize, true);
  FileId id = 0;
  ASSERT_TRUE(engine->add_file(file.fd(), &id).ok());
  Buffer buffer(kSize);
  met = 0;
  core::step_hook = [](const char* step) {
    if (strcmp(step, "store.issue") != 0) return;
    ++met;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (met < 4 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    if (met < 4) abort();
  };
  Batch batch;
  batch.add(Io::Op::read, id, 0, buffer.data(), kSize);
  batch.submit(*engine);
  batch.wait();
  core::step_hook = nullptr;
  EXPECT_EQ(met, 4);
  EXPECT_TRUE(file.matches(0, buffer.data(), kSize));
}

// A request that is read alone gives up that restriction when another is queued behind it: the
// other then waits only for a slot.
TEST(ThreadEngine, WorkersBeginWithAllPartsOfOneThatIsReadAloneNoMore) {
  std::unique_ptr<Engine> engine;
  ASSERT_TRUE(make_named_engine("threads", 16, 1, &engine).ok());
  constexpr size_t kSize = size_t{24} << 20;
  constexpr int kAll = 12 + 1;
  TempFile file(kSize, true);
  FileId id = 0;
  ASSERT_TRUE(engine->add_file(file.fd(), &id).ok());
  Buffer buffer(kSize), page(core::kPage);
  met = 0;
  static std::atomic<bool> gives_up;
  gives_up = false;
  core::step_hook = [](const char* step) {
    if (strcmp(step, "store.issue") != 0) return;
    ++met;
    while (met < kAll && !gives_up) std::this_thread::yield();
  };
  Batch alone, behind;
  alone.add(Io::Op::read, id, 0, buffer.data(), kSize);
  alone.ios().front().progress = [](Io&, size_t) {};
  alone.submit(*engine);
  EXPECT_TRUE(vmem::test::eventually([] { return met == 4; }));
  behind.add(Io::Op::read, id, 0, page.data(), page.size());
  behind.submit(*engine);
  EXPECT_TRUE(vmem::test::eventually([] { return met == kAll; })) << met;
  gives_up = true;
  alone.wait();
  behind.wait();
  core::step_hook = nullptr;
  EXPECT_TRUE(file.matches(0, buffer.data(), kSize));
}

INSTANTIATE_TEST_SUITE_P(Backends, EngineLongTransfers, testing::ValuesIn(engine_names()),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace vmem::store::test
