// Kernels that page data in, through the C API. Simulated devices with page tables of their own,
// whose kernels are threads and make the same requests as a GPU's. A kernel that accesses an absent
// block, or one that is being copied, loses the device, which records it.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "kernel_fixture.h"

namespace systest {
namespace {

TEST_F(KernelPaging, AKernelGetsTheBlocksThatItAsksForAndTheHostWhatItStored) {
  if (IsSkipped()) return;
  vmem::region r(8 * kBlock);
  for (size_t b = 0; b < 8; ++b) words(r)[b * kWords] = 100 + b;
  Open open(words(r), 8 * kBlock, kBoth, stream_);
  EXPECT_EQ(open.view().table.blocks, 8u);
  EXPECT_EQ(open.view().table.frames, 8u) << "half of device_budget";
  std::atomic<int> told[8];
  for (uint32_t b = 0; b < 8; ++b) launch_add(stream_, open.view(), b, &told[b]);
  open.end();
  for (size_t b = 0; b < 8; ++b) {
    EXPECT_EQ(told[b], kPresent);
    EXPECT_EQ(words(r)[b * kWords], 101 + b);
  }
}

TEST_F(KernelPaging, ARangeObjectIsOpenForItsLife) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  EXPECT_THROW(vmem::kernel_range(r.view<uint64_t>(), VMEM_WRITE, 0, stream_), vmem::error);
  std::atomic<int> told[2];
  {
    vmem::kernel_range first(r.view<uint64_t>(), kBoth, 0, stream_, 2 * kBlock);
    vmem::kernel_range open(std::move(first));
    EXPECT_EQ(first.get(), nullptr);
    View view;
    memcpy(&view, &open.view(), sizeof view);
    EXPECT_EQ(view.table.frames, 2u);
    for (uint32_t b = 0; b < 2; ++b) launch_add(stream_, view, b, &told[b]);
    EXPECT_EQ(vmem_free(r.data()), -EBUSY);
  }
  for (const auto& t : told) EXPECT_EQ(t, kPresent) << "its end waits for the kernels";
  vmem::kernel_range open(r.data(), kBlock, VMEM_READ, 0, stream_);
  void* const other = stream(0);
  open.end(other);
  EXPECT_EQ(open.get(), nullptr);
  r.free();
}

// The last block ends with the region.
TEST_F(KernelPaging, TheLastBlockOfARegionThatEndsInsideIt) {
  if (IsSkipped()) return;
  TempFile file(kBlock + 5000);
  vmem::region memory(2 * kBlock + 4096), mapped(kBlock + 5000, file.path(), 0, VMEM_MAP_SHARED);
  for (auto* r : {&memory, &mapped}) {
    const auto last = static_cast<uint32_t>(r->size() / kBlock);
    const uint64_t before = words(*r)[last * kWords];
    Open open(r->data(), r->size(), kBoth, stream_);
    ASSERT_EQ(open.view().table.blocks, last + 1);
    std::atomic<int> told;
    launch_add(stream_, open.view(), last, &told);
    open.end();
    EXPECT_EQ(told, kPresent);
    EXPECT_EQ(words(*r)[last * kWords], before + 1);
  }
}

// Each thread stores to its own words in every block, and checks the values that it stored last,
// and the words that are never stored to. It takes one block or two at a time; the blocks are four
// times what the range may hold at once.
TEST_F(KernelPaging, KernelsFindTheirWordsWhileBlocksComeAndGo) {
  if (IsSkipped()) return;
  constexpr uint32_t kBlocks = 32, kWarps = 4;
  constexpr size_t kAt[] = {1, 511, 4096, kWords / 2, kWords - 1};
  const int turns = kSanitized ? 60 : 200;
  vmem::region r(kBlocks * kBlock);
  for (uint32_t b = 0; b < kBlocks; ++b)
    for (const size_t at : kAt) words(r)[b * kWords + at] = b * kWords + at;
  Open open(words(r), kBlocks * kBlock, kBoth, stream_, 8 * kBlock);
  const View view = open.view();
  ASSERT_EQ(view.table.frames, 8u);
  std::vector<std::vector<uint64_t>> stored(kWarps, std::vector<uint64_t>(kBlocks));
  std::atomic<int> wrong{0}, refused{0};
  std::vector<void*> streams;
  for (uint32_t warp = 0; warp < kWarps; ++warp) {
    streams.push_back(stream(0));
    launch(streams.back(), [&, warp, view](SimKernel& k) {
      std::minstd_rand random(warp + 1);
      Group group(view.table, long_enough());
      for (int turn = 0; turn < turns; ++turn) {
        const uint32_t list[] = {static_cast<uint32_t>(random() % kBlocks), static_cast<uint32_t>(random() % kBlocks)};
        const uint32_t count = turn % 8 == 0 ? 2 : 1;
        const Intent intent = turn % 2 == 0 ? Intent::write : Intent::read;
        if (turn % 5 == 0) group.prefetch(static_cast<uint32_t>(random() % kBlocks));
        if (group.acquire_all(list, count, intent) != Answer::present) {
          ++refused;
          continue;
        }
        for (uint32_t i = 0; i < count; ++i) {
          const uint32_t b = list[i];
          for (const size_t at : kAt) {
            const auto* w = word(k, view, b, at, false);
            wrong += w == nullptr || w->load(std::memory_order_relaxed) != b * kWords + at ? 1 : 0;
          }
          auto* own = word(k, view, b, 16 + warp, intent == Intent::write);
          wrong += own == nullptr || own->load(std::memory_order_relaxed) != stored[warp][b] ? 1 : 0;
          if (intent == Intent::write && own != nullptr)
            own->store(stored[warp][b] = random(), std::memory_order_relaxed);
        }
        group.release_all(list, count);
      }
    });
  }
  for (void* s : streams) ASSERT_TRUE(sim().synchronize(s).ok());
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(refused, 0);
  auto stats = device_stats();
  EXPECT_GT(stats.in_bytes, kBlocks * kBlock) << "blocks came more than once";
  EXPECT_TRUE(until([&] { return vmem_device_stats(0, &stats) == 0 && stats.leased_bytes <= 8 * kBlock; }))
      << "what was on its way out has left";
  open.end();
  ASSERT_EQ(vmem_device_stats(0, &stats), 0);
  EXPECT_EQ(stats.leased_bytes, 0u);
  for (uint32_t b = 0; b < kBlocks; ++b) {
    for (const size_t at : kAt) EXPECT_EQ(words(r)[b * kWords + at], b * kWords + at);
    for (uint32_t warp = 0; warp < kWarps; ++warp) EXPECT_EQ(words(r)[b * kWords + 16 + warp], stored[warp][b]);
  }
}

// Groups that run one after the other, each until it waits: no group is overtaken because its
// thread gets no processor time.
struct InTurn : HostAtomics {
  static constexpr uint32_t kGroups = 48;
  static inline std::vector<std::unique_ptr<std::binary_semaphore>> may_run;
  static inline bool over[kGroups];
  static inline thread_local uint32_t me;
  static inline thread_local uint64_t pauses;

  static void next() {
    for (uint32_t i = 1; i <= kGroups; ++i) {
      const uint32_t other = (me + i) % kGroups;
      if (over[other]) continue;
      may_run[other]->release();
      return;
    }
  }
  static void pause() {
    ++pauses;
    next();
    may_run[me]->acquire();
  }
  static void run(const std::function<void(uint32_t)>& group) {
    may_run.clear();
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < kGroups; ++i) {
      may_run.push_back(std::make_unique<std::binary_semaphore>(i == 0 ? 1 : 0));
      over[i] = false;
    }
    for (uint32_t i = 0; i < kGroups; ++i) {
      threads.emplace_back([i, &group] {
        me = i;
        may_run[me]->acquire();
        group(me);
        over[me] = true;
        next();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

// Many groups, some of which want two adjacent blocks at once, and few frames. While a group waits,
// others that waited are served, but only a limited number. The test counts groups, and measures no
// time.
TEST_F(KernelPaging, WhoWaitsIsNotOvertakenWithoutEnd) {
  if (IsSkipped()) return;
  constexpr uint32_t kBlocks = 32, kFrames = 8;
  const uint64_t turns = kSanitized ? 3000 : 6000;
  vmem::region r(kBlocks * kBlock);
  Open open(words(r), kBlocks * kBlock, VMEM_READ, stream_, kFrames * kBlock);
  ASSERT_EQ(open.view().table.frames, kFrames);
  vmem::paging::Table<InTurn> table;
  static_assert(sizeof table == sizeof open.view().table);
  memcpy(&table, &open.view().table, sizeof table);
  uint64_t waited = 0, most[2] = {}, refused = 0;
  InTurn::run([&](uint32_t me) {
    std::minstd_rand random(me + 1);
    vmem::paging::Group<InTurn> group(table, long_enough());
    while (waited < turns && refused == 0) {
      const auto first = static_cast<uint32_t>((random() >> 8) % (kBlocks - 1));
      const uint32_t list[] = {first, first + 1};
      const uint32_t count = random() % 8 == 0 ? 2 : 1;
      const uint64_t before = waited;
      InTurn::pauses = 0;
      if (group.acquire_all(list, count, Intent::read) != Answer::present) {
        ++refused;
        return;
      }
      most[count - 1] = std::max(most[count - 1], waited - before);
      waited += InTurn::pauses != 0 ? 1 : 0;
      InTurn::pause();  // others run while it has the blocks
      group.release_all(list, count);
    }
  });
  EXPECT_EQ(refused, 0u);
  RecordProperty("most", std::to_string(std::max(most[0], most[1])));
  EXPECT_LT(most[0], 10 * InTurn::kGroups) << "beside one that wants one block";
  EXPECT_LT(most[1], 10 * InTurn::kGroups) << "beside one that wants two";
}

TEST_F(KernelPaging, TheLogSaysWhatItTookToServeARange) {
  if (IsSkipped()) return;
  vmem::region r(8 * kBlock);
  ASSERT_EQ(vmem_set("log", "info"), 0) << vmem_last_error();
  LogLines log;
  Open open(words(r), 8 * kBlock, kBoth, stream_, 4 * kBlock);
  std::atomic<int> told[5];
  for (uint32_t b = 0; b < 5; ++b) launch_add(stream_, open.view(), b, &told[b]);
  open.end();
  EXPECT_TRUE(log.contains("device 0 had 5 blocks by 5 leases in "));
  EXPECT_EQ(vmem_set("log", "warning"), 0) << vmem_last_error();
}

TEST_F(KernelPaging, WhatAKernelHasStaysWhateverOthersAskFor) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  Open open(words(r), 4 * kBlock, kBoth, stream_, kBlock);
  const View view = open.view();
  static std::atomic<bool> has, go;
  static std::atomic<int> first, told;
  has = go = false;
  first = -1;
  launch(stream(0), [view](SimKernel& k) {
    Group group(view.table, long_enough());
    // Acquire twice: a block that has not been acquired yet stays for a while in any case.
    if (group.acquire(0, Intent::write) == Answer::present) group.release(0);
    first = static_cast<int>(group.acquire(0, Intent::write));
    has = true;
    while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (auto* w = word(k, view, 0, 3, true); w != nullptr) w->store(33);
    group.release(0);
  });
  EXPECT_TRUE(until([] { return has.load(); }));
  EXPECT_EQ(first, kPresent);
  launch_add(stream_, view, 1, &told);
  // The request has been made and read by now.
  EXPECT_TRUE(until([&] { return HostAtomics::load(&view.table.control->ring_head) >= 2; }));
  for (unsigned i = 0; i < 100 * vmem::test::patience(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(told, -1) << "there is one frame, and a kernel has it";
    if (told != -1) break;
  }
  go = true;
  open.end();
  EXPECT_EQ(told, kPresent);
  EXPECT_EQ(words(r)[3], 33u);
}

TEST_F(KernelPaging, NoKernelIsToldOfABlockBeforeItsBytesAreThere) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  words(r)[kWords] = 5;
  Open open(words(r), 2 * kBlock, kBoth, stream_);
  static std::atomic<bool> copying, goes_on;
  copying = goes_on = false;
  sim().set_hook([](vmem::device::SimOp op, int, uintptr_t, size_t) {
    if (op == vmem::device::SimOp::copy_in) {
      copying = true;
      while (!goes_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return vmem::core::Status();
  });
  std::atomic<int> told{-1};
  launch_add(stream_, open.view(), 1, &told);
  EXPECT_TRUE(until([] { return copying.load(); }));
  for (unsigned i = 0; i < 100 * vmem::test::patience(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(told, -1);
    if (told != -1) break;
  }
  goes_on = true;
  open.end();
  EXPECT_EQ(told, kPresent);
  EXPECT_EQ(words(r)[kWords], 6u);
}

TEST_F(KernelPaging, ABlockThatCannotBeReadIsAnErrorToItsKernelAndMayComeLater) {
  if (IsSkipped()) return;
  start_on_a_faulty_disk();
  if (IsSkipped()) return;
  TempFile file(4 * kBlock);
  vmem::region r(4 * kBlock, file.path(), 0, VMEM_MAP_READ);
  Open open(words(r), 4 * kBlock, VMEM_READ, stream_);
  const View view = open.view();
  EXPECT_EQ(view.writable, 0u);
  vmem::store::Fault fault;
  fault.op = vmem::store::Io::Op::read;
  fault.begin = 2 * kBlock;
  fault.end = 3 * kBlock;
  disk_->add_rule(fault);
  std::atomic<int> first{-1}, later{-1};
  std::atomic<bool> mended{false};
  launch(stream_, [&](SimKernel& k) {
    Group group(view.table, long_enough());
    // Request it together with a block that can come.
    const uint32_t both[] = {1, 2};
    first = static_cast<int>(group.acquire_all(both, 2, Intent::read));
    while (!mended) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Answer answer = Answer::io_error;
    for (int i = 0; answer == Answer::io_error && i < 60000; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      answer = group.acquire(2, Intent::read);
    }
    if (answer == Answer::present) {
      uint64_t seen = 0;
      if (auto* w = word(k, view, 2, 5, false); w != nullptr) seen = w->load();
      later = seen == words(r)[2 * kWords + 5] ? kPresent : -2;
      group.release(2);
    }
  });
  EXPECT_TRUE(until([&] { return first != -1; }));
  EXPECT_EQ(first, static_cast<int>(Answer::io_error));
  disk_->clear_rules();
  mended = true;
  open.end();
  EXPECT_EQ(later, kPresent);
}

TEST_F(KernelPaging, TheEndWaitsForKernelsThatAskYetAndFreeIsRefusedUntilThen) {
  if (IsSkipped()) return;
  void* at = nullptr;
  ASSERT_EQ(vmem_alloc(&at, 4 * kBlock, 0), 0) << vmem_last_error();
  Open open(at, 4 * kBlock, kBoth, stream_);
  const View view = open.view();
  EXPECT_EQ(vmem_free(at), -EBUSY);
  EXPECT_NE(said().find("open to kernels"), std::string::npos) << said();
  std::atomic<bool> go{false};
  std::atomic<int> told{-1};
  launch(stream_, [&](SimKernel&) {
    while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  launch_add(stream_, view, 3, &told);
  aside([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(vmem_free(at), -EBUSY);
    go = true;
  });
  open.end();
  EXPECT_EQ(told, kPresent) << "it was served though the end had been called";
  EXPECT_EQ(static_cast<uint64_t*>(at)[3 * kWords], 1u);
  EXPECT_EQ(vmem_free(at), 0) << vmem_last_error();
}

TEST_F(KernelPaging, ShutdownEndsTheWaitsOfKernels) {
  if (IsSkipped()) return;
  void* at = nullptr;
  ASSERT_EQ(vmem_alloc(&at, 12 * kBlock, 0), 0) << vmem_last_error();
  struct vmem_kernel* kernel = nullptr;
  vmem_kernel_view opaque;
  ASSERT_EQ(vmem_kernel_begin(&kernel, at, 12 * kBlock, kBoth, 0, 2 * kBlock, &opaque), 0) << vmem_last_error();
  View view;
  memcpy(&view, &opaque, sizeof view);
  // One kernel has both frames until another has been told that nothing more comes.
  static std::atomic<int> has, told;
  has = told = -1;
  launch(stream_, [view](SimKernel&) {
    Group group(view.table, long_enough());
    const uint32_t both[] = {0, 1};
    has = static_cast<int>(group.acquire_all(both, 2, Intent::write));
    while (told == -1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    group.release_all(both, 2);
  });
  launch(stream(0), [view](SimKernel&) {
    while (has == -1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Group group(view.table, long_enough());
    told = static_cast<int>(group.acquire(5, Intent::read));
  });
  EXPECT_TRUE(until([] { return has != -1; }));
  vmem_shutdown();
  EXPECT_EQ(has, kPresent);
  EXPECT_EQ(told, static_cast<int>(Answer::ended));
  EXPECT_EQ(vmem_kernel_end(kernel, stream_), 0) << vmem_last_error();
  EXPECT_EQ(vmem_kernel_end(kernel, stream_), -EINVAL);
}

TEST_F(KernelPaging, ShutdownWaitsForKernelsThatHaveGivenUpWhatTheyHad) {
  if (IsSkipped()) return;
  void* at = nullptr;
  ASSERT_EQ(vmem_alloc(&at, 4 * kBlock, 0), 0) << vmem_last_error();
  struct vmem_kernel* kernel = nullptr;
  vmem_kernel_view opaque;
  ASSERT_EQ(vmem_kernel_begin(&kernel, at, 4 * kBlock, kBoth, 0, 0, &opaque), 0) << vmem_last_error();
  View view;
  memcpy(&view, &opaque, sizeof view);
  static std::atomic<bool> has, go, ended;
  has = go = ended = false;
  launch(stream_, [view](SimKernel&) {
    Group group(view.table, long_enough());
    while (group.acquire(0, Intent::write) == Answer::present) {
      has = true;
      group.release(0);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ended = true;
  });
  EXPECT_TRUE(until([] { return has.load(); }));
  stop_at("kernels.stopped");
  aside([] {
    EXPECT_TRUE(stopped());
    struct vmem_device_stats stats = {};
    stats.size = sizeof stats;
    EXPECT_TRUE(until([&] { return vmem_device_stats(0, &stats) == 0 && stats.leased_bytes == 0; }));
    go = true;
    go_on();
  });
  vmem_shutdown();
  EXPECT_TRUE(ended);
  EXPECT_EQ(vmem_kernel_end(kernel, stream_), 0) << vmem_last_error();
}

TEST_F(KernelPaging, NoRangeIsOpenedOnceShutdownHasStoppedTheOthers) {
  if (IsSkipped()) return;
  void* at = nullptr;
  ASSERT_EQ(vmem_alloc(&at, 4 * kBlock, 0), 0) << vmem_last_error();
  static std::atomic<bool> opening, stopped;
  opening = stopped = false;
  vmem::core::step_hook.store([](const char* step) {
    if (std::string_view(step) == "kernels.stopped") stopped = true;
    if (std::string_view(step) != "kernels.opening") return;
    opening = true;
    EXPECT_TRUE(until([] { return stopped.load(); }));
  });
  struct vmem_kernel* kernel = nullptr;
  vmem_kernel_view view;
  int began = 1;
  std::thread begins([&] { began = vmem_kernel_begin(&kernel, at, 4 * kBlock, kBoth, 0, 0, &view); });
  EXPECT_TRUE(until([] { return opening.load(); }));
  vmem_shutdown();
  begins.join();
  vmem::core::step_hook.store(nullptr);
  EXPECT_EQ(began, -ECANCELED);
  EXPECT_EQ(kernel, nullptr);
  // The next start of the library is independent.
  vmem::region r(4 * kBlock);
  Open open(words(r), 4 * kBlock, kBoth, stream(0));
}

// The library's own leases make way for the program's, as long as no kernel has the blocks.
TEST_F(KernelPaging, LeasesOfTheProgramBesideThem) {
  if (IsSkipped()) return;
  vmem::region r(32 * kBlock);
  Open open(words(r), 16 * kBlock, kBoth, stream_, 16 * kBlock);
  Open again(words(r) + 4 * kWords, 4 * kBlock, VMEM_READ, stream_, 4 * kBlock);
  std::atomic<int> told[16];
  for (uint32_t b = 0; b < 16; ++b) launch_add(stream_, open.view(), b, &told[b]);
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  for (const auto& t : told) EXPECT_EQ(t, kPresent);
  EXPECT_EQ(vmem_acquire(words(r), kBlock, VMEM_READ, VMEM_HOST, nullptr), -EBUSY);
  // There is no room for more, so the acquire fails. After the range has ended, the next acquire
  // gets its room.
  EXPECT_EQ(vmem_acquire(words(r) + 16 * kWords, 8 * kBlock, kBoth, 0, stream_), -ENOMEM);
  open.end();
  EXPECT_EQ(vmem_acquire(words(r) + 16 * kWords, 14 * kBlock, kBoth, 0, stream_), 0) << vmem_last_error();
  launch(stream_, [&](SimKernel& k) {
    Group group(again.view().table, long_enough());
    for (uint32_t b = 0; b < 4; ++b) {
      const Answer answer = group.acquire(b, Intent::read);
      const auto* w = answer == Answer::present ? word(k, again.view(), b, 0, false) : nullptr;
      told[b] = w != nullptr && w->load() == 1 ? 77 : static_cast<int>(answer) + 1000;
      if (answer == Answer::present) group.release(b);
    }
  });
  again.end();
  for (uint32_t b = 0; b < 4; ++b) EXPECT_EQ(told[b], 77) << "two frames are left, for four blocks in turn";
  EXPECT_EQ(vmem_release(words(r) + 16 * kWords, 14 * kBlock, stream_), 0) << vmem_last_error();
}

// The leases end after the kernel, which cannot wait for their room and continues with the rest.
TEST_F(KernelPaging, LeasesThatWereReleasedBehindTheKernelDoNotKeepItWaiting) {
  if (IsSkipped()) return;
  vmem::region r(20 * kBlock);
  ASSERT_EQ(vmem_acquire(words(r), 14 * kBlock, kBoth, 0, stream_), 0) << vmem_last_error();
  Open open(words(r) + 16 * kWords, 4 * kBlock, kBoth, stream_, 4 * kBlock);
  std::atomic<bool> go{false};
  std::atomic<int> told[4];
  for (auto& t : told) t = -1;
  launch(stream_, [&](SimKernel& k) {
    while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Group group(open.view().table, long_enough());
    for (uint32_t b = 0; b < 4; ++b) {
      const Answer answer = group.acquire(b, Intent::write);
      if (answer == Answer::present) {
        if (auto* w = word(k, open.view(), b, 0, true); w != nullptr) w->store(b + 7);
        group.release(b);
      }
      told[b] = static_cast<int>(answer);
    }
  });
  EXPECT_EQ(vmem_release(words(r), 14 * kBlock, stream_), 0) << vmem_last_error();
  go = true;
  open.end();
  for (uint32_t b = 0; b < 4; ++b) {
    EXPECT_EQ(told[b], kPresent) << "two frames are left, for four blocks in turn";
    EXPECT_EQ(words(r)[(16 + b) * kWords], b + 7);
  }
}

TEST_F(KernelPaging, TheEndDoesNotWaitForRoomThatIsThereForHintsAlone) {
  if (IsSkipped()) return;
  vmem::region r(20 * kBlock);
  void* const other = stream(0);
  ASSERT_EQ(vmem_acquire(words(r), 15 * kBlock, kBoth, 0, other), 0) << vmem_last_error();
  Open open(words(r) + 16 * kWords, 4 * kBlock, kBoth, stream_, 4 * kBlock);
  const View view = open.view();
  static std::atomic<bool> ended, over;
  ended = over = false;
  launch(other, [](SimKernel&) {
    while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  EXPECT_EQ(vmem_release(words(r), 15 * kBlock, other), 0) << vmem_last_error();
  stop_at("asking.leasing");
  launch(stream_, [view](SimKernel&) {
    Group group(view.table, long_enough());
    for (uint32_t b = 0; b < 4; ++b) group.prefetch(b);
  });
  EXPECT_TRUE(stopped());
  EXPECT_TRUE(sim().synchronize(stream_).ok());
  aside([] {
    EXPECT_TRUE(until([] { return ended.load(); })) << "another stream holds the room";
    over = true;
  });
  go_on();
  open.end();
  ended = true;
}

TEST_F(KernelPaging, WhatIsRefused) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock), host(4 * kBlock, VMEM_HOST_ONLY);
  struct vmem_kernel* kernel = nullptr;
  vmem_kernel_view view;
  const auto begin = [&](const void* at, size_t size, unsigned access, int device, size_t budget) {
    return vmem_kernel_begin(&kernel, at, size, access, device, budget, &view);
  };
  EXPECT_EQ(begin(r.data(), kBlock, 0, 0, 0), -EINVAL);
  EXPECT_EQ(begin(r.data(), kBlock, VMEM_WRITE, 0, 0), -EINVAL);
  EXPECT_EQ(begin(r.data(), 0, kBoth, 0, 0), -EINVAL);
  EXPECT_EQ(begin(r.data(), 5 * kBlock, kBoth, 0, 0), -EINVAL);
  EXPECT_EQ(begin(host.data(), kBlock, kBoth, 0, 0), -EINVAL);
  EXPECT_EQ(begin(r.data(), kBlock, kBoth, 1, 0), -ENODEV);
  EXPECT_EQ(begin(r.data(), kBlock, kBoth, VMEM_HOST, 0), -EINVAL);
  EXPECT_EQ(begin(r.data(), kBlock, kBoth, 0, kBlock - 1), -EINVAL);
  EXPECT_EQ(begin(r.data(), kBlock, kBoth, 0, size_t{1} << 30), -ENOMEM);
  EXPECT_EQ(kernel, nullptr);
  EXPECT_EQ(vmem_kernel_end(nullptr, stream_), 0);
  EXPECT_EQ(vmem_kernel_end(reinterpret_cast<struct vmem_kernel*>(&view), stream_), -EINVAL);
  ASSERT_EQ(begin(r.data(), kBlock, kBoth, 0, 0), 0) << vmem_last_error();
  sim().capture(stream_, true);
  EXPECT_EQ(vmem_kernel_end(kernel, stream_), -EBUSY);
  sim().capture(stream_, false);
  EXPECT_EQ(vmem_kernel_end(kernel, stream_), 0) << vmem_last_error();
}

TEST_F(KernelPaging, ALostDeviceIsToldAndTheRangeEndsAllTheSame) {
  if (IsSkipped()) return;
  vmem::region r(8 * kBlock);
  Open open(words(r), 8 * kBlock, kBoth, stream_);
  std::atomic<int> told{-1};
  launch_add(stream_, open.view(), 0, &told);
  EXPECT_TRUE(until([&] { return told != -1; }));
  sim().lose(0, "as the test wants it");
  Group group(open.view().table, long_enough());
  const Answer answer = group.acquire(1, Intent::read);
  EXPECT_TRUE(answer == Answer::io_error || answer == Answer::ended) << static_cast<int>(answer);
  open.end();
}

TEST_F(KernelPaging, AForkedChildIsRefusedAndTheParentGoesOn) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  Open open(words(r), 4 * kBlock, kBoth, stream_);
  EXPECT_EQ(status_of_fork([&] {
              vmem_kernel_view view;
              struct vmem_kernel* kernel = nullptr;
              const bool right = vmem_kernel_end(open.handle(), nullptr) == -ECHILD &&
                                 vmem_kernel_begin(&kernel, words(r), kBlock, kBoth, 0, 0, &view) == -ECHILD;
              return right ? 0 : 1;
            }),
            0);
  std::atomic<int> told{-1};
  launch_add(stream_, open.view(), 2, &told);
  open.end();
  EXPECT_EQ(told, kPresent);
}

class KernelPagingShared : public SimTest {};

TEST_F(KernelPagingShared, ManagedMemoryIsRefusedWithWhatToSet) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  struct vmem_kernel* kernel = nullptr;
  vmem_kernel_view view;
  EXPECT_EQ(vmem_kernel_begin(&kernel, r.data(), kBlock, kBoth, 0, 0, &view), -EOPNOTSUPP);
  EXPECT_NE(said().find("device"), std::string::npos) << said();
}

}  // namespace
}  // namespace systest
