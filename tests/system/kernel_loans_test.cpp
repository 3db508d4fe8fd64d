// Blocks that kernels load in place: lent staging frames, and threads that want such a block at
// that time. Simulated devices, whose kernels are threads.
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "core/step.h"
#include "kernel_fixture.h"
#include "refusals.h"

namespace systest {
namespace {

using vmem::paging::Gathered;
using vmem::paging::Piece;

constexpr uint32_t kBlocks = 8;
constexpr uint64_t kRow = 64;  // words

// The same row of each block.
struct RowOfEach {
  uint64_t row;
  uint64_t offset(uint64_t block) const { return block * kBlock + row * kRow * 8; }
  uint64_t bytes(uint64_t) const { return kRow * 8; }
};

class KernelLoans : public KernelPaging {
 protected:
  void SetUp() override {
    KernelPaging::SetUp();
    if (IsSkipped()) return;
    region_ = vmem::region(kBlocks * kBlock);
    for (uint64_t w = 0; w < kBlocks * kWords; w += kRow) words(region_)[w] = w;
    to_staging();
  }
  void TearDown() override {
    if (region_) {
      EXPECT_EQ(vmem_sync(region_.data(), region_.size()), 0) << "nothing moves then";
    }
    KernelPaging::TearDown();
  }
  // Brings the blocks to where they are after leaving a device.
  void to_staging() {
    ASSERT_EQ(vmem_prefetch(region_.data(), region_.size(), 0, nullptr), 0) << vmem_last_error();
    ASSERT_TRUE(until([&] { return on_device() == region_.size(); }));
    ASSERT_EQ(vmem_evict(region_.data(), region_.size(), VMEM_HOST), 0) << vmem_last_error();
    ASSERT_EQ(on_device(), 0u);
  }
  uint64_t on_device() { return residency(region_.data(), region_.size()).device_bytes; }
  static uint64_t came() { return device_stats().in_bytes; }
  // Gathers the first words of these rows.
  static Gathered gather(SimKernel& k, const View& view, uint64_t row, uint64_t* out) {
    Group group(view.table, long_enough());
    return vmem::paging::gather(
        view, &group, vmem::paging::LoneTeam(), RowOfEach{row}, kBlocks, 1, [&](uint64_t block, const Piece& piece) {
          const std::byte* const from = bytes_of(k, view, piece);
          if (from == nullptr) return;
          __atomic_store_n(&out[block], __atomic_load_n(reinterpret_cast<const uint64_t*>(from), __ATOMIC_RELAXED),
                           __ATOMIC_RELAXED);
        });
  }
  // A kernel that gathers a row of each block repeatedly until stopped, and records what it found
  // last.
  struct Reader {
    std::atomic<bool> over{false};
    std::atomic<int> turns{0};
    std::atomic<int> failed{0}, decreased{0};
    uint64_t found[kBlocks] = {};
  };
  static void launch_reader(void* stream, const View& view, uint64_t row, Reader* reader) {
    launch(stream, [=](SimKernel& k) {
      uint64_t last[kBlocks] = {};
      while (!reader->over) {
        if (!gather(k, view, row, reader->found)) ++reader->failed;
        for (uint32_t b = 0; b < kBlocks; ++b) {
          const uint64_t found = __atomic_load_n(&reader->found[b], __ATOMIC_RELAXED);
          reader->decreased += found < last[b] ? 1 : 0;
          last[b] = found;
        }
        ++reader->turns;
        std::this_thread::yield();
      }
    });
  }
  static bool sees(const Reader& reader, uint32_t block, uint64_t value) {
    return until([&] { return __atomic_load_n(&reader.found[block], __ATOMIC_RELAXED) == value; });
  }

  vmem::region region_;
};

TEST_F(KernelLoans, RowsAreLoadedFromWhereTheyAre) {
  if (IsSkipped()) return;
  const uint64_t before = came();
  Open open(region_.data(), region_.size(), VMEM_READ, stream_, kBlock);
  const View view = open.view();
  uint64_t out[2][kBlocks] = {};
  Gathered got[2];
  launch(stream_, [&, view](SimKernel& k) {
    got[0] = gather(k, view, 3, out[0]);
    got[1] = gather(k, view, 77, out[1]);
  });
  open.end();
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(got[i]) << static_cast<int>(got[i].answer);
    for (uint64_t b = 0; b < kBlocks; ++b) EXPECT_EQ(out[i][b], b * kWords + (i == 0 ? 3 : 77) * kRow);
  }
  EXPECT_EQ(came(), before) << "no block came for a row";
  for (uint64_t b = 0; b < kBlocks; ++b) EXPECT_EQ(words(region_)[b * kWords + 3 * kRow], b * kWords + 3 * kRow);
}

TEST_F(KernelLoans, WhatWasLentStaysInHostMemory) {
  if (IsSkipped()) return;
  Open open(region_.data(), region_.size(), VMEM_READ, stream_, kBlock);
  const View view = open.view();
  uint64_t out[kBlocks] = {};
  launch(stream_, [&, view](SimKernel& k) { EXPECT_TRUE(gather(k, view, 3, out)); });
  open.end();
  const uint64_t evictions = vmem::stats().evictions;
  usleep(200000);  // a request would have been served by now
  EXPECT_EQ(vmem::stats().evictions, evictions);
  EXPECT_EQ(region_.query().host_bytes, region_.size());
}

// Several rows of one block: beyond a certain number, the block should move.
TEST_F(KernelLoans, WhatIsLoadedFromAgainAndAgainComes) {
  if (IsSkipped()) return;
  const uint64_t before = came();
  Open open(region_.data(), region_.size(), VMEM_READ, stream_, 4 * kBlock);
  Reader reader;
  launch_reader(stream_, open.view(), 3, &reader);
  EXPECT_TRUE(until([&] { return came() > before; }));
  reader.over = true;
  open.end();
  EXPECT_EQ(reader.failed, 0);
  EXPECT_EQ(reader.decreased, 0);
}

TEST_F(KernelLoans, TheCpuGetsABlockThatIsLentAndKernelsSeeWhatItStored) {
  if (IsSkipped()) return;
  Open open(region_.data(), region_.size(), VMEM_READ, stream_, kBlock);
  Reader reader;
  launch_reader(stream_, open.view(), 3, &reader);
  ASSERT_TRUE(until([&] { return reader.turns > 2; }));
  for (uint64_t b = 0; b < kBlocks; b += 3) {
    uint64_t* const w = words(region_) + b * kWords + 3 * kRow;
    EXPECT_EQ(*w, b * kWords + 3 * kRow);
    __atomic_store_n(w, *w + 1, __ATOMIC_RELAXED);
    EXPECT_TRUE(sees(reader, static_cast<uint32_t>(b), b * kWords + 3 * kRow + 1));
  }
  reader.over = true;
  open.end();
  EXPECT_EQ(reader.failed, 0);
  EXPECT_EQ(reader.decreased, 0);
}

TEST_F(KernelLoans, AnAcquireOfABlockThatIsLentBringsIt) {
  if (IsSkipped()) return;
  Open open(region_.data(), region_.size(), kBoth, stream_, 2 * kBlock);
  Reader reader;
  launch_reader(stream_, open.view(), 0, &reader);
  ASSERT_TRUE(until([&] { return reader.turns > 2; }));
  std::atomic<int> told[kBlocks];
  void* const other = stream(0);
  for (uint32_t b = 0; b < kBlocks; ++b) launch_add(other, open.view(), b, &told[b]);
  ASSERT_TRUE(sim().synchronize(other).ok());
  for (uint32_t b = 0; b < kBlocks; ++b) {
    EXPECT_EQ(told[b], kPresent);
    EXPECT_TRUE(sees(reader, b, b * kWords + 1));
  }
  reader.over = true;
  open.end();
  EXPECT_EQ(reader.failed, 0);
  EXPECT_EQ(reader.decreased, 0);
  for (uint64_t b = 0; b < kBlocks; ++b) EXPECT_EQ(words(region_)[b * kWords], b * kWords + 1);
}

// Calls that wait for blocks in transition do not wait for the end of the range.
TEST_F(KernelLoans, CallsGetBlocksThatAreLent) {
  if (IsSkipped()) return;
  Open open(region_.data(), region_.size(), VMEM_READ, stream_, kBlock);
  Reader reader;
  launch_reader(stream_, open.view(), 5, &reader);
  const auto again = [&] {
    const int turns = reader.turns;
    return until([&] { return reader.turns > turns + 2; });
  };
  ASSERT_TRUE(again());
  EXPECT_EQ(vmem_sync(region_.data(), region_.size()), 0) << vmem_last_error();
  EXPECT_TRUE(again());
  void* const other = stream(0);
  EXPECT_EQ(vmem_acquire(words(region_) + 4 * kWords, 2 * kBlock, VMEM_READ, 0, other), 0) << vmem_last_error();
  EXPECT_EQ(vmem_release(words(region_) + 4 * kWords, 2 * kBlock, other), 0) << vmem_last_error();
  EXPECT_TRUE(again());
  EXPECT_EQ(vmem_evict(region_.data(), region_.size(), VMEM_SSD), 0) << vmem_last_error();
  EXPECT_TRUE(again());
  EXPECT_EQ(vmem_evict(region_.data(), region_.size(), VMEM_HOST), 0) << vmem_last_error();
  reader.over = true;
  open.end();
  EXPECT_EQ(reader.failed, 0);
  EXPECT_EQ(reader.decreased, 0);
}

// Everything at once: kernels that gather, one that adds, and the CPU, which adds elsewhere in the
// same blocks.
TEST_F(KernelLoans, NothingIsLostOrStaleWhileBlocksAreLentAndRecalled) {
  if (IsSkipped()) return;
  const int turns = kSanitized ? 6 : 20;
  Open open(region_.data(), region_.size(), kBoth, stream_, 3 * kBlock);
  const View view = open.view();
  Reader of_kernels, of_cpu;
  void* const streams[] = {stream(0), stream(0)};
  launch_reader(streams[0], view, 0, &of_kernels);
  launch_reader(streams[1], view, 9, &of_cpu);
  std::atomic<int> told[kBlocks];
  void* const other = stream(0);
  for (int turn = 0; turn < turns; ++turn) {
    for (uint32_t b = 0; b < kBlocks; ++b) launch_add(other, view, b, &told[b]);
    for (uint32_t b = 0; b < kBlocks; b += 2)
      __atomic_fetch_add(words(region_) + b * kWords + 9 * kRow, 1, __ATOMIC_RELAXED);
    ASSERT_TRUE(sim().synchronize(other).ok());
    if (turn % 3 != 0) continue;
    EXPECT_EQ(vmem_evict(region_.data(), region_.size(), VMEM_HOST), 0) << vmem_last_error();
  }
  for (uint32_t b = 0; b < kBlocks; ++b) {
    EXPECT_TRUE(sees(of_kernels, b, b * kWords + static_cast<uint64_t>(turns)));
    EXPECT_TRUE(sees(of_cpu, b, b * kWords + 9 * kRow + (b % 2 == 0 ? static_cast<uint64_t>(turns) : 0)));
  }
  of_kernels.over = of_cpu.over = true;
  // the end of the range waits for another stream
  for (void* s : streams) ASSERT_TRUE(sim().synchronize(s).ok());
  open.end();
  for (const Reader* reader : {&of_kernels, &of_cpu}) {
    EXPECT_EQ(reader->failed, 0);
    EXPECT_EQ(reader->decreased, 0);
  }
}

// Works without ending the range, since the thread that would end it may be the one that loads.
TEST_F(KernelLoans, ALostDeviceGivesBackWhatWasLent) {
  if (IsSkipped()) return;
  Open open(region_.data(), region_.size(), VMEM_READ, stream_, kBlock);
  uint64_t out[kBlocks] = {};
  Gathered got;
  launch(stream_, [&, view = open.view()](SimKernel& k) { got = gather(k, view, 3, out); });
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_TRUE(got);
  sim().lose(0, "as the test wants it");
  for (uint64_t b = 0; b < kBlocks; ++b) EXPECT_EQ(words(region_)[b * kWords + 3 * kRow], b * kWords + 3 * kRow);
  open.end();
}

// Lent blocks also return before the range ends if a word for the kernels cannot be stored for want
// of memory.
TEST_F(KernelLoans, AWordThatCannotBeStoredGivesBackWhatIsLentThoughTheDeviceIsWell) {
  if (IsSkipped()) return;
  Open open(region_.data(), region_.size(), VMEM_READ, stream_, kBlock);
  Reader reader;
  launch_reader(stream_, open.view(), 3, &reader);
  ASSERT_TRUE(until([&] { return reader.turns > 2; }));
  vmem::core::step_hook = [](const char* step) {
    if (strcmp(step, "asking.publishing") != 0) return;
    once = true;
    refused_in = 0;
  };
  std::atomic<Answer> told{Answer::present};
  void* const other = stream(0);
  // Both of these must move, as there is one frame.
  for (uint32_t b = 0; b < 2; ++b) {
    launch(other, [b, view = open.view(), &told](SimKernel&) {
      Group group(view.table, long_enough());
      told = group.acquire(b, Intent::read);
      if (told == Answer::present) group.release(b);
    });
  }
  ASSERT_TRUE(sim().synchronize(other).ok());
  vmem::core::step_hook = nullptr;
  EXPECT_EQ(told, Answer::ended);
  std::atomic<bool> loaded{false};
  std::thread cpu([&] {
    for (uint64_t b = 0; b < kBlocks; ++b) EXPECT_EQ(words(region_)[b * kWords + kRow], b * kWords + kRow);
    loaded = true;
  });
  EXPECT_TRUE(until([&] { return loaded.load(); }));
  reader.over = true;
  open.end();
  cpu.join();
}

TEST_F(KernelLoans, ShutdownTakesWhatIsLentBack) {
  if (IsSkipped()) return;
  struct vmem_kernel* kernel = nullptr;
  vmem_kernel_view opaque;
  ASSERT_EQ(vmem_kernel_begin(&kernel, region_.data(), region_.size(), VMEM_READ, 0, kBlock, &opaque), 0)
      << vmem_last_error();
  View view;
  memcpy(&view, &opaque, sizeof view);
  uint64_t out[kBlocks] = {};
  Gathered got;
  launch(stream_, [&, view](SimKernel& k) { got = gather(k, view, 3, out); });
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_TRUE(got);
  region_ = vmem::region();
  vmem_shutdown();
  EXPECT_EQ(vmem_kernel_end(kernel, stream_), 0) << vmem_last_error();
}

}  // namespace
}  // namespace systest
