// What every body of device::Devices promises. Instantiated for the simulated one in device_contract_test.cpp and for
// CUDA in tests/gpu/device_cuda_test.cpp. Tests of suite DeviceLoss end with a lost device: on CUDA each needs a
// process of its own.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/patience.h"
#include "core/step.h"
#include "device/device.h"
#include "device/park.h"

namespace vmem::device::testing {

// The application's side of a body: streams and kernels. All kernels are asynchronous.
class Bench {
 public:
  virtual ~Bench() = default;
  virtual Devices& devices() = 0;
  virtual void* stream(int device) = 0;
  virtual void destroy(void* stream) = 0;
  virtual void set_current_device(int device) = 0;
  // words[i] += value
  virtual void add(void* stream, uint64_t* words, size_t count, uint64_t value) = 0;
  // *sum (pinned host memory) = sum of words
  virtual void sum(void* stream, const uint64_t* words, size_t count, uint64_t* sum) = 0;
  // The stream stands still until *gate (pinned) is not 0.
  virtual void stand_still(void* stream, std::atomic<uint32_t>* gate) = 0;
  // Ok, or why its work failed.
  virtual core::Status synchronize(void* stream) = 0;
  virtual void begin_capture(void* stream) = 0;
  virtual void end_capture(void* stream) = 0;
  // cudaDeviceReset
  virtual void reset(int device) = 0;
  // Do kernels reach ordinary host memory (HMM)?
  virtual bool reaches_host_memory() const { return false; }
  // Memory the body's application could otherwise use went up or down with ours; bytes of tolerance.
  virtual uint64_t free_memory_slack() const = 0;
};

struct Body {
  const char* name;
  // Null with the reason in *skip.
  std::unique_ptr<Bench> (*make)(std::string* skip);
};
inline void PrintTo(const Body& body, std::ostream* os) {
  *os << body.name;
}

#define VMEM_OK(call)                                                   \
  do {                                                                  \
    const ::vmem::core::Status vmem_s = (call);                         \
    ASSERT_TRUE(vmem_s.ok()) << vmem_s.code() << ": " << vmem_s.text(); \
  } while (0)
// Fails with that errno, and says something.
#define VMEM_REFUSED(err, call)                              \
  do {                                                       \
    const ::vmem::core::Status vmem_s = (call);              \
    ASSERT_EQ(vmem_s.code(), -(err)) << vmem_s.text();       \
    ASSERT_GT(vmem_s.text().size(), 15u) << "without words"; \
  } while (0)

class DeviceContract : public ::testing::TestWithParam<Body> {
 protected:
  static constexpr size_t kWords = kUnit / sizeof(uint64_t);
  static constexpr size_t kFrames = 32;
  // Of the result page.
  static constexpr size_t kGate = 0, kSum = 8;

  void SetUp() override {
    std::string skip;
    bench_ = GetParam().make(&skip);
    if (bench_ == nullptr) GTEST_SKIP() << skip;
    d_ = &bench_->devices();
    void* p = mmap(nullptr, kFrames * kUnit + kUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(p, MAP_FAILED);
    frame_map_ = p;
    frames_ = reinterpret_cast<uint64_t*>(core::round_up(reinterpret_cast<uintptr_t>(p), kUnit));
    VMEM_OK(d_->pin(frames_, kFrames * kUnit));
    p = mmap(nullptr, core::kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(p, MAP_FAILED);
    result_ = static_cast<std::byte*>(p);
    VMEM_OK(d_->pin(result_, core::kPage));
    stream_ = bench_->stream(0);
  }
  void TearDown() override {
    if (bench_ == nullptr) return;
    core::step_hook.store(nullptr);
    park::set_hook(nullptr).ignore();
    if (stream_ != nullptr) bench_->destroy(stream_);
    for (void* base : ranges_) {
      const core::Status s = d_->release(base);
      EXPECT_TRUE(s.ok()) << s.text();
    }
    d_->unpin(frames_).ignore();  // a lost device answers -EIO
    d_->unpin(result_).ignore();
    bench_.reset();
    munmap(frame_map_, kFrames * kUnit + kUnit);
    munmap(result_, core::kPage);
  }

  // A range of n units, released at the end.
  uint64_t* reserve(size_t units, int device = 0) {
    void* base = nullptr;
    const core::Status s = d_->reserve(units * kUnit, device, &base);
    EXPECT_TRUE(s.ok()) << s.text();
    if (s.ok()) ranges_.push_back(base);
    return static_cast<uint64_t*>(base);
  }
  void release(void* base) {
    std::erase(ranges_, base);
    VMEM_OK(d_->release(base));
  }
  static uintptr_t at(const void* p) { return reinterpret_cast<uintptr_t>(p); }
  static std::vector<Range> range(const uint64_t* base, size_t first, size_t count) {
    return {Range{at(base) + first * kUnit, count * kUnit}};
  }
  core::Status prepare(std::vector<Range> ranges, int device = 0) {
    bool torn = false;
    core::Status s = d_->prepare(ranges, device, &torn);
    EXPECT_TRUE(s.ok() || s.code() == -EINVAL || s.code() == -ENODEV || s.code() == -EIO || torn);
    return s;
  }
  uint64_t* frame(size_t i) { return frames_ + i * kWords; }
  void fill_frame(size_t i, uint64_t first) {
    for (size_t w = 0; w < kWords; ++w) frame(i)[w] = first + w;
  }
  static uint64_t sum_of(uint64_t first, size_t n = kWords) { return n * first + n * (n - 1) / 2; }
  // Unit `u` on the device with first, first + 1, ..; shut.
  void bring(uint64_t* base, size_t u, uint64_t first, int device = 0) {
    VMEM_OK(prepare(range(base, u, 1), device));
    fill_frame(0, first);
    copy_in(base, u, 0, device);
  }
  void copy_in(uint64_t* base, size_t u, size_t f, int device = 0) {
    Ticket done;
    const Copy copy{at(base) + u * kUnit, frame(f), kUnit};
    VMEM_OK(d_->copy_in(device, std::span(&copy, 1), &done));
    VMEM_OK(d_->wait(done));
  }
  void copy_out(uint64_t* base, size_t u, size_t f, int device = 0) {
    Ticket done;
    const Copy copy{at(base) + u * kUnit, frame(f), kUnit};
    VMEM_OK(d_->copy_out(device, std::span(&copy, 1), &done));
    VMEM_OK(d_->wait(done));
  }
  // Unit `u` leaves the device; its hole is settled.
  void drop(uint64_t* base, size_t u) {
    VMEM_OK(d_->hold(range(base, u, 1), Access::none));
    VMEM_OK(d_->punch(range(base, u, 1)));
    VMEM_OK(d_->settle(range(base, u, 1)));
  }
  uint64_t* sum_cell(size_t i = 0) { return reinterpret_cast<uint64_t*>(result_ + kSum) + i; }
  uint64_t kernel_sum(const uint64_t* words, size_t n) {
    *sum_cell() = ~uint64_t{0};
    bench_->sum(stream_, words, n, sum_cell());
    const core::Status s = bench_->synchronize(stream_);
    EXPECT_TRUE(s.ok()) << s.text();
    return *sum_cell();
  }
  std::atomic<uint32_t>* gate() { return reinterpret_cast<std::atomic<uint32_t>*>(result_ + kGate); }
  uint64_t used(int device = 0) {
    Memory m{};
    const core::Status s = d_->memory(device, &m);
    EXPECT_TRUE(s.ok()) << s.text();
    return m.used;
  }
  // Returns when `n` threads are parked in the SIGSEGV handler.
  static void until_parked(uint32_t n) {
    while (park::stats().waiting < n) std::this_thread::yield();
  }
  static bool anything_mapped(uintptr_t address, size_t size) {
    for (uintptr_t p = address; p < address + size; p += core::kPage) {
      unsigned char byte;
      if (mincore(reinterpret_cast<void*>(p), core::kPage, &byte) == 0) return true;
    }
    return false;
  }

  std::unique_ptr<Bench> bench_;
  Devices* d_ = nullptr;
  void* stream_ = nullptr;
  void* frame_map_ = nullptr;
  uint64_t* frames_ = nullptr;
  std::byte* result_ = nullptr;
  std::vector<void*> ranges_;
};

class DeviceLoss : public DeviceContract {};

// --- ranges and memory ----------------------------------------------------------------------------------------------

TEST_P(DeviceContract, ReserveGivesAlignedAddressSpaceWithoutMemory) {
  uint64_t* base = reserve(64);
  ASSERT_NE(base, nullptr);
  EXPECT_EQ(at(base) % kUnit, 0u);
  EXPECT_EQ(used(), 0u);
  uint64_t bytes = 1;
  VMEM_OK(d_->host_resident_bytes({at(base), 64 * kUnit}, &bytes));
  EXPECT_EQ(bytes, 0u);
}

TEST_P(DeviceContract, APreparedBlockIsZerosForKernelsAndCpu) {
  uint64_t* base = reserve(4);
  VMEM_OK(prepare(range(base, 0, 4)));
  EXPECT_EQ(kernel_sum(base, 4 * kWords), 0u);
  VMEM_OK(d_->open(range(base, 0, 4), Access::read_write));
  for (size_t w = 0; w < 4 * kWords; w += 512) ASSERT_EQ(base[w], 0u) << w;
}

TEST_P(DeviceContract, BytesCopiedInAreSeenByKernelAndCpu) {
  uint64_t* base = reserve(3);
  bring(base, 1, 1000);
  EXPECT_EQ(kernel_sum(base + kWords, kWords), sum_of(1000));
  VMEM_OK(d_->open(range(base, 1, 1), Access::read_write));
  for (size_t w = 0; w < kWords; w += 101) ASSERT_EQ(base[kWords + w], 1000 + w);
}

TEST_P(DeviceContract, CpuStoresAfterOpenAreSeenByKernels) {
  uint64_t* base = reserve(1);
  bring(base, 0, 5);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  base[7] += 100;
  EXPECT_EQ(kernel_sum(base, kWords), sum_of(5) + 100);
  EXPECT_EQ(base[7], 112u);
}

TEST_P(DeviceContract, CopyOutBringsWhatKernelsStored) {
  uint64_t* base = reserve(2);
  bring(base, 0, 77);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  bench_->add(stream_, base, kWords, 3);
  VMEM_OK(bench_->synchronize(stream_));
  VMEM_OK(d_->hold(range(base, 0, 1), Access::read));
  copy_out(base, 0, 1);
  for (size_t w = 0; w < kWords; ++w) ASSERT_EQ(frame(1)[w], 80 + w);
}

TEST_P(DeviceContract, CopyOutBringsWhatTheCpuStored) {
  uint64_t* base = reserve(1);
  bring(base, 0, 10);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  base[kWords - 1] = 4711;
  base[0] = 4712;
  VMEM_OK(d_->hold(range(base, 0, 1), Access::read));
  copy_out(base, 0, 1);
  EXPECT_EQ(frame(1)[0], 4712u);
  EXPECT_EQ(frame(1)[1], 11u);
  EXPECT_EQ(frame(1)[kWords - 1], 4711u);
}

TEST_P(DeviceContract, CopyOutBringsWhatTheCpuStoredAlsoWhenItMayNoLongerLoad) {
  uint64_t* base = reserve(1);
  bring(base, 0, 10);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  base[kWords / 2] = 4711;
  VMEM_OK(d_->hold(range(base, 0, 1), Access::none));
  copy_out(base, 0, 1);
  EXPECT_EQ(frame(1)[kWords / 2], 4711u);
  EXPECT_EQ(frame(1)[kWords / 2 + 1], 10 + kWords / 2 + 1);
}

TEST_P(DeviceContract, ABlockOpenForReadingIsReadByCpuAndKernelsInTurn) {
  uint64_t* base = reserve(1);
  bring(base, 0, 10);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read));
  for (size_t w = 0; w < kWords; w += 512) {
    EXPECT_EQ(base[w], 10 + w);
    if (w % 65536 == 0) {
      EXPECT_EQ(kernel_sum(base, kWords), sum_of(10));
    }
  }
  VMEM_OK(d_->hold(range(base, 0, 1), Access::read));
  EXPECT_EQ(kernel_sum(base, kWords), sum_of(10));
  copy_out(base, 0, 1);
  for (size_t w = 0; w < kWords; ++w) ASSERT_EQ(frame(1)[w], 10 + w);
}

TEST_P(DeviceContract, PartsOfBlocksAndCopiesAcrossBlocksArrive) {
  uint64_t* base = reserve(2);
  VMEM_OK(prepare(range(base, 0, 2)));
  fill_frame(0, 1);
  const Copy copies[] = {{at(base) + 4096, frame(0), 4096}, {at(base) + kUnit - 8192, frame(0), 16384}};
  Ticket done;
  VMEM_OK(d_->copy_in(0, copies, &done));
  VMEM_OK(d_->wait(done));
  EXPECT_EQ(kernel_sum(base, 2 * kWords), sum_of(1, 512) + sum_of(1, 2048));
}

TEST_P(DeviceContract, PunchGivesTheMemoryBackAtOnce) {
  uint64_t* base = reserve(64);
  Memory before{}, full{}, after{};
  VMEM_OK(prepare(range(base, 0, 64)));  // the first use of a device costs more than the units
  VMEM_OK(d_->punch(range(base, 0, 64)));
  VMEM_OK(d_->memory(0, &before));
  VMEM_OK(prepare(range(base, 0, 64)));
  VMEM_OK(d_->memory(0, &full));
  EXPECT_EQ(full.used, 64 * kUnit);
  VMEM_OK(d_->punch(range(base, 0, 64)));
  VMEM_OK(d_->memory(0, &after));
  EXPECT_EQ(after.used, 0u);
  const uint64_t slack = bench_->free_memory_slack();
  EXPECT_LE(full.free, before.free - 64 * kUnit + slack);
  EXPECT_GE(after.free + slack, before.free);
  VMEM_OK(d_->settle(range(base, 0, 64)));
}

TEST_P(DeviceContract, ARemadeBlockNeverShowsOldBytes) {
  uint64_t* base = reserve(2);
  for (int round = 0; round < 5; ++round) {
    bring(base, 0, 1 + static_cast<uint64_t>(round));
    drop(base, 0);
    VMEM_OK(prepare(range(base, 0, 1)));
    EXPECT_EQ(kernel_sum(base, kWords), 0u);
    drop(base, 0);
  }
}

TEST_P(DeviceContract, OneBlockOfAGroupLeavesAndItsNeighboursStay) {
  uint64_t* base = reserve(8);
  VMEM_OK(prepare({{at(base) + 4 * kUnit, 4 * kUnit}, {at(base), 4 * kUnit}}));  // joined, whatever the order
  for (size_t u = 0; u < 8; ++u) {
    fill_frame(u, 100 * u);
    copy_in(base, u, u);
  }
  drop(base, 3);
  EXPECT_EQ(used(), 7 * kUnit);
  VMEM_OK(d_->open(range(base, 0, 3), Access::read));
  VMEM_OK(d_->open(range(base, 4, 4), Access::read_write));
  for (size_t u = 0; u < 8; ++u)
    if (u != 3) {
      EXPECT_EQ(kernel_sum(base + u * kWords, kWords), sum_of(100 * u)) << u;
      EXPECT_EQ(base[u * kWords + 9], 100 * u + 9) << u;
    }
  bring(base, 3, 42);
  EXPECT_EQ(kernel_sum(base + 3 * kWords, kWords), sum_of(42));
}

TEST_P(DeviceContract, ManyThreadsMakeFillCheckAndDestroyAtOnce) {
  uint64_t* base = reserve(16);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      void* stream = bench_->stream(0);
      for (uint64_t round = 0; round < 8; ++round) {
        const size_t u = t * 4 + round % 4;
        const uint64_t first = 1000 * t + round;
        fill_frame(t, first);
        Ticket in, used_up, out;
        const Copy copy{at(base) + u * kUnit, frame(t), kUnit};
        bool ok = prepare(range(base, u, 1)).ok() && d_->copy_in(0, std::span(&copy, 1), &in).ok() &&
                  d_->order_after(in, stream, 0).ok();
        if (ok) bench_->add(stream, base + u * kWords, kWords, 7);
        ok = ok && d_->record(stream, 0, &used_up).ok() && d_->wait(in).ok() &&
             d_->open(range(base, u, 1), Access::read).ok() && d_->wait(used_up).ok() &&
             d_->hold(range(base, u, 1), Access::read).ok() && d_->copy_out(0, std::span(&copy, 1), &out).ok() &&
             d_->wait(out).ok() && d_->punch(range(base, u, 1)).ok() && d_->settle(range(base, u, 1)).ok();
        for (size_t w = 0; w < kWords && ok; ++w) ok = frame(t)[w] == first + 7 + w;
        if (!ok) ++wrong;
      }
      bench_->destroy(stream);
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(used(), 0u);
}

TEST_P(DeviceContract, ReleaseWorksWithHolesMadePartsAndForeignMappingsInside) {
  uint64_t* base = reserve(6);
  bring(base, 0, 1);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  bring(base, 2, 2);
  drop(base, 2);
  bring(base, 3, 3);
  VMEM_OK(d_->punch(range(base, 3, 1)));
  void* foreign =
      mmap(base + 2 * kWords, kUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  ASSERT_EQ(foreign, base + 2 * kWords);
  base[2 * kWords] = 5;
  release(base);
  EXPECT_FALSE(anything_mapped(at(base), 6 * kUnit));
  EXPECT_EQ(used(), 0u);
}

TEST_P(DeviceContract, ManySmallRangesComeAndGoWithoutATrace) {
  for (int i = 0; i < 50; ++i) {
    uint64_t* base = reserve(1);
    ASSERT_NE(base, nullptr);
    VMEM_OK(prepare(range(base, 0, 1)));
    EXPECT_EQ(kernel_sum(base, kWords), 0u);
    release(base);
    EXPECT_FALSE(anything_mapped(at(base), kUnit));
  }
  EXPECT_EQ(used(), 0u);
}

TEST_P(DeviceContract, NoOtherMappingLandsInAHole) {
  uint64_t* base = reserve(8);
  std::atomic<bool> stop{false};
  std::atomic<int> inside{0};
  std::thread mapper([&] {
    while (!stop) {
      void* p = mmap(nullptr, kUnit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at(p) + kUnit > at(base) && at(p) < at(base) + 8 * kUnit) ++inside;
      munmap(p, kUnit);
    }
  });
  for (int i = 0; i < 200; ++i) {
    VMEM_OK(prepare(range(base, 0, 8)));
    VMEM_OK(d_->punch(range(base, 0, 8)));
    VMEM_OK(d_->settle(range(base, 0, 8)));
  }
  stop = true;
  mapper.join();
  EXPECT_EQ(inside, 0);
}

TEST_P(DeviceContract, ForkedChildrenDoNotInheritARange) {
  uint64_t* base = reserve(2);
  bring(base, 0, 3);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  for (size_t u = 0; u < 2; ++u) {
    const pid_t child = fork();
    if (child == 0) {
      // Nobody would ever open anything in the child: the touch must kill it, not park it.
      signal(SIGALRM, SIG_DFL);
      alarm(20 * vmem::test::patience());
      volatile uint64_t* words = base + u * kWords;
      const uint64_t seen = *words;
      _exit(seen == 3 ? 41 : 42);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    // A sanitizer's own handler turns the signal into an exit code.
    EXPECT_TRUE(WIFSIGNALED(status)
                    ? WTERMSIG(status) == SIGSEGV || WTERMSIG(status) == SIGBUS
                    : WEXITSTATUS(status) != 0 && WEXITSTATUS(status) != 41 && WEXITSTATUS(status) != 42)
        << status;
  }
  EXPECT_EQ(base[0], 3u);
}

// --- the CPU's side of a move ---------------------------------------------------------------------------------------

TEST_P(DeviceContract, CpuTouchesOfAMovingBlockParkAndSeeTheNewBytes) {
  uint64_t* base = reserve(1);
  VMEM_OK(prepare(range(base, 0, 1)));
  std::atomic<uint64_t> seen{0};
  const uint32_t parked = park::stats().waiting;
  std::thread reader([&] { seen = *static_cast<volatile uint64_t*>(base + 5); });
  std::thread writer([&] { *static_cast<volatile uint64_t*>(base + 6) = 9; });
  until_parked(parked + 2);
  fill_frame(0, 500);
  copy_in(base, 0, 0);
  EXPECT_EQ(seen, 0u);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  reader.join();
  writer.join();
  EXPECT_EQ(seen, 505u);
  EXPECT_EQ(base[6], 9u);
}

TEST_P(DeviceContract, HeldWritersParkWhileLoadsGoOn) {
  uint64_t* base = reserve(1);
  bring(base, 0, 1);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  VMEM_OK(d_->hold(range(base, 0, 1), Access::read));
  const uint32_t parked = park::stats().waiting;
  std::thread writer([&] { *static_cast<volatile uint64_t*>(base + 6) = 900; });
  until_parked(parked + 1);
  EXPECT_EQ(base[5], 6u);
  copy_out(base, 0, 1);
  EXPECT_EQ(frame(1)[6], 7u);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  writer.join();
  EXPECT_EQ(base[6], 900u);
}

TEST_P(DeviceContract, TouchesOfAPunchedHoleParkUntilSomethingElseStandsThere) {
  uint64_t* base = reserve(2);
  bring(base, 1, 1);
  VMEM_OK(d_->punch(range(base, 1, 1)));
  std::atomic<uint64_t> seen{0};
  const uint32_t parked = park::stats().waiting;
  std::thread reader([&] { seen = *static_cast<volatile uint64_t*>(base + kWords); });
  until_parked(parked + 1);
  ASSERT_EQ(mmap(base + kWords, kUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
            base + kWords);
  base[kWords] = 31;
  VMEM_OK(d_->settle(range(base, 1, 1)));
  reader.join();
  EXPECT_EQ(seen, 31u);
  // .. and the device takes the place back.
  bring(base, 1, 8);
  VMEM_OK(d_->open(range(base, 1, 1), Access::read));
  EXPECT_EQ(base[kWords], 8u);
}

TEST_P(DeviceContract, AStoreToABlockOpenForReadingAsksFirst) {
  uint64_t* base = reserve(2);
  bring(base, 1, 1);
  VMEM_OK(d_->open(range(base, 1, 1), Access::read));
  std::atomic<int> asked{0};
  std::atomic<uintptr_t> where{0};
  VMEM_OK(park::set_hook([&](uintptr_t address, bool store) {
    EXPECT_TRUE(store);
    ++asked;
    where = address;
    return d_->open(range(base, 1, 1), Access::read_write).ok();
  }));
  EXPECT_EQ(base[kWords + 3], 4u);
  EXPECT_EQ(asked, 0);
  *static_cast<volatile uint64_t*>(base + kWords + 3) = 99;
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(where, at(base + kWords + 3));
  EXPECT_EQ(base[kWords + 3], 99u);
  EXPECT_EQ(kernel_sum(base + kWords, kWords), sum_of(1) - 4 + 99);
}

TEST_P(DeviceContract, TakingStoresAwayMakesTheNextOneAskAgain) {
  uint64_t* base = reserve(1);
  bring(base, 0, 1);
  std::atomic<int> asked{0};
  VMEM_OK(park::set_hook([&](uintptr_t, bool) {
    ++asked;
    return d_->open(range(base, 0, 1), Access::read_write).ok();
  }));
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  *static_cast<volatile uint64_t*>(base) = 2;
  EXPECT_EQ(asked, 0);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read));
  *static_cast<volatile uint64_t*>(base) = 3;
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(base[0], 3u);
}

TEST_P(DeviceContract, SystemCallsIntoAMovingBlockAnswerEfault) {
  uint64_t* base = reserve(1);
  bring(base, 0, 1);
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  EXPECT_EQ(write(pipes[1], base, 64), -1);
  EXPECT_EQ(errno, EFAULT);
  ASSERT_EQ(write(pipes[1], "12345678", 8), 8);
  EXPECT_EQ(read(pipes[0], base, 8), -1);
  EXPECT_EQ(errno, EFAULT);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  EXPECT_EQ(write(pipes[1], base + 1, 8), 8);
  uint64_t word = 0;
  EXPECT_EQ(read(pipes[0], &word, 8), 8);  // the bytes a refused read has not taken
  EXPECT_EQ(std::memcmp(&word, "12345678", 8), 0);
  EXPECT_EQ(read(pipes[0], base, 8), 8);
  EXPECT_EQ(base[0], 2u);
  close(pipes[0]);
  close(pipes[1]);
}

inline std::atomic<uint64_t*> intruded_word{nullptr};

TEST_P(DeviceContract, AnIntruderBetweenMapAndShutIsNoticed) {
  uint64_t* base = reserve(3);
  intruded_word = base + kWords + 77;
  core::step_hook.store([](const char* step) {
    if (std::strcmp(step, "device.mapped") == 0) *static_cast<volatile uint64_t*>(intruded_word.load()) = 1;
  });
  bool torn = false;
  VMEM_REFUSED(kIntruder, d_->prepare(range(base, 0, 3), 0, &torn));
  core::step_hook.store(nullptr);
  EXPECT_TRUE(torn);
  EXPECT_EQ(used(), 0u);
  VMEM_OK(d_->settle(range(base, 0, 3)));
  VMEM_OK(prepare(range(base, 0, 3)));
}

TEST_P(DeviceContract, PagesTheCpuTouchesAreCounted) {
  uint64_t* base = reserve(4);
  VMEM_OK(prepare(range(base, 0, 4)));
  VMEM_OK(d_->open(range(base, 0, 4), Access::read_write));
  uint64_t bytes = 1;
  VMEM_OK(d_->host_resident_bytes({at(base), 4 * kUnit}, &bytes));
  EXPECT_EQ(bytes, 0u);
  base[kWords] = 1;
  VMEM_OK(d_->host_resident_bytes({at(base), 4 * kUnit}, &bytes));
  EXPECT_GE(bytes, core::kPage);
  EXPECT_LE(bytes, kUnit);
  drop(base, 1);
  VMEM_OK(d_->host_resident_bytes({at(base), 4 * kUnit}, &bytes));
  EXPECT_EQ(bytes, 0u);
}

// --- order ----------------------------------------------------------------------------------------------------------

TEST_P(DeviceContract, WorkPutOnAStreamAfterTheTicketSeesTheData) {
  constexpr size_t kUnits = 16;
  uint64_t* base = reserve(kUnits);
  VMEM_OK(prepare(range(base, 0, kUnits)));
  std::vector<Copy> copies;
  uint64_t expected = 0;
  for (size_t u = 0; u < kUnits; ++u) {
    fill_frame(u, 3 * u);
    expected += sum_of(3 * u);
    copies.push_back({at(base) + u * kUnit, frame(u), kUnit});
  }
  Ticket done;
  VMEM_OK(d_->copy_in(0, copies, &done));
  VMEM_OK(d_->order_after(done, stream_, 0));
  // Thousands of launches behind one ticket: nothing may depend on a queue that is long enough.
  bench_->sum(stream_, base, kUnits * kWords, sum_cell(0));
  for (int i = 0; i < 3000; ++i) bench_->add(stream_, base + 5 * kWords, 64, 1);
  bench_->sum(stream_, base, kUnits * kWords, sum_cell(1));
  VMEM_OK(bench_->synchronize(stream_));
  EXPECT_EQ(*sum_cell(0), expected);
  EXPECT_EQ(*sum_cell(1), expected + 3000 * 64);
}

TEST_P(DeviceContract, ARecordedTicketIsReachedWhenTheStreamGetsThere) {
  *gate() = 0;
  bench_->stand_still(stream_, gate());
  Ticket ticket;
  VMEM_OK(d_->record(stream_, 0, &ticket));
  bool done = true;
  VMEM_OK(d_->poll(ticket, &done));
  EXPECT_FALSE(done);
  *gate() = 1;
  VMEM_OK(bench_->synchronize(stream_));
  VMEM_OK(d_->poll(ticket, &done));
  EXPECT_TRUE(done);
  VMEM_OK(d_->wait(ticket));
}

TEST_P(DeviceContract, MovesGoOnWhileAUsersStreamStandsStill) {
  uint64_t* base = reserve(4);
  *gate() = 0;
  bench_->stand_still(stream_, gate());
  bring(base, 0, 12);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  EXPECT_EQ(base[2], 14u);
  VMEM_OK(d_->hold(range(base, 0, 1), Access::read));
  copy_out(base, 0, 3);
  EXPECT_EQ(frame(3)[4], 16u);
  drop(base, 0);
  *gate() = 1;
  VMEM_OK(bench_->synchronize(stream_));
}

TEST_P(DeviceContract, TheDefaultStreamMayHoldALease) {
  uint64_t* base = reserve(1);
  bench_->set_current_device(0);
  VMEM_OK(d_->check_stream(nullptr, 0));
  VMEM_OK(prepare(range(base, 0, 1)));
  fill_frame(0, 9);
  Ticket in, out;
  const Copy copy{at(base), frame(0), kUnit};
  VMEM_OK(d_->copy_in(0, std::span(&copy, 1), &in));
  VMEM_OK(d_->order_after(in, nullptr, 0));
  bench_->sum(nullptr, base, kWords, sum_cell());
  VMEM_OK(d_->record(nullptr, 0, &out));
  VMEM_OK(d_->wait(out));
  EXPECT_EQ(*sum_cell(), sum_of(9));
}

TEST_P(DeviceContract, AnEmptyTicketIsDone) {
  bool done = false;
  VMEM_OK(d_->poll(Ticket(), &done));
  EXPECT_TRUE(done);
  VMEM_OK(d_->wait(Ticket()));
  VMEM_OK(d_->order_after(Ticket(), stream_, 0));
}

TEST_P(DeviceContract, ManyTicketsLiveAtOnce) {
  std::vector<Ticket> tickets(5000);
  for (Ticket& t : tickets) VMEM_OK(d_->record(stream_, 0, &t));
  VMEM_OK(bench_->synchronize(stream_));
  for (const Ticket& t : tickets) {
    bool done = false;
    VMEM_OK(d_->poll(t, &done));
    ASSERT_TRUE(done);
  }
}

// --- several devices ------------------------------------------------------------------------------------------------

TEST_P(DeviceContract, EveryDeviceIsDescribed) {
  ASSERT_GE(d_->count(), 1);
  for (int d = 0; d < d_->count(); ++d) {
    const Info& info = d_->info(d);
    EXPECT_EQ(info.device, d);
    EXPECT_FALSE(info.name.empty());
    EXPECT_GT(info.total_bytes, 0u);
    ASSERT_EQ(info.links.size(), static_cast<size_t>(d_->count()));
    EXPECT_EQ(info.links[static_cast<size_t>(d)], Link::self);
  }
}

TEST_P(DeviceContract, BlocksMoveBetweenDevicesWithTheirBytes) {
  if (d_->count() < 2) GTEST_SKIP() << "needs two devices";
  uint64_t* base = reserve(4);
  for (size_t u = 0; u < 4; ++u) bring(base, u, 50 * u);
  VMEM_OK(d_->open(range(base, 0, 2), Access::read_write));
  VMEM_OK(d_->migrate(range(base, 0, 4), 1));
  EXPECT_EQ(used(0), 0u);
  EXPECT_EQ(used(1), 4 * kUnit);
  void* other = bench_->stream(1);
  bench_->sum(other, base, 4 * kWords, sum_cell());
  VMEM_OK(bench_->synchronize(other));
  EXPECT_EQ(*sum_cell(), sum_of(0) + sum_of(50) + sum_of(100) + sum_of(150));
  EXPECT_EQ(base[kWords], 50u);  // still open, still right
  copy_out(base, 3, 1, 1);
  EXPECT_EQ(frame(1)[1], 151u);
  bench_->destroy(other);
}

TEST_P(DeviceContract, ABlockMadeOnTheSecondDeviceIsCountedThere) {
  if (d_->count() < 2) GTEST_SKIP() << "needs two devices";
  uint64_t* base = reserve(2);
  bring(base, 0, 1, 1);
  EXPECT_EQ(used(0), 0u);
  EXPECT_EQ(used(1), kUnit);
  void* other = bench_->stream(1);
  Ticket done;
  VMEM_OK(d_->record(other, 1, &done));
  VMEM_OK(d_->order_after(done, stream_, 0));  // across devices
  VMEM_OK(bench_->synchronize(stream_));
  bench_->destroy(other);
  const Copy copy{at(base), frame(0), kUnit};
  VMEM_REFUSED(EINVAL, d_->copy_in(0, std::span(&copy, 1), &done));
}

TEST_P(DeviceContract, AStreamOfAnotherDeviceIsRefused) {
  if (d_->count() < 2) GTEST_SKIP() << "needs two devices";
  void* other = bench_->stream(1);
  Ticket t;
  VMEM_REFUSED(EINVAL, d_->check_stream(other, 0));
  VMEM_REFUSED(EINVAL, d_->record(other, 0, &t));
  VMEM_OK(d_->check_stream(other, 1));
  bench_->set_current_device(1);
  VMEM_REFUSED(EINVAL, d_->check_stream(nullptr, 0));
  VMEM_OK(d_->check_stream(nullptr, 1));
  bench_->set_current_device(0);
  VMEM_OK(d_->check_stream(nullptr, 0));
  bench_->destroy(other);
}

// --- refusals -------------------------------------------------------------------------------------------------------

TEST_P(DeviceContract, AStreamThatCapturesAGraphIsRefused) {
  VMEM_OK(d_->check_stream(stream_, 0));
  bench_->begin_capture(stream_);
  Ticket t;
  const core::Status checked = d_->check_stream(stream_, 0);
  const core::Status recorded = d_->record(stream_, 0, &t);
  bench_->end_capture(stream_);
  EXPECT_EQ(checked.code(), -EBUSY) << checked.text();
  EXPECT_EQ(recorded.code(), -EBUSY) << recorded.text();
  VMEM_OK(d_->check_stream(stream_, 0));
}

TEST_P(DeviceContract, MovesDoNotDisturbACaptureOnAnotherThread) {
  uint64_t* base = reserve(2);
  bench_->begin_capture(stream_);  // global mode: unsafe calls of any thread would break it
  std::thread([&] {
    bring(base, 0, 1);
    VMEM_OK(d_->open(range(base, 0, 1), Access::read));
    drop(base, 0);
  }).join();
  bench_->end_capture(stream_);  // fails the test when the capture was broken
}

TEST_P(DeviceContract, UnknownDevicesAreRefused) {
  uint64_t* base = reserve(1);
  void* p = nullptr;
  Memory m{};
  for (int bad : {-1, d_->count(), 1000}) {
    VMEM_REFUSED(ENODEV, d_->reserve(kUnit, bad, &p));
    VMEM_REFUSED(ENODEV, prepare(range(base, 0, 1), bad));
    VMEM_REFUSED(ENODEV, d_->memory(bad, &m));
    VMEM_REFUSED(ENODEV, d_->check_stream(stream_, bad));
    if (bad != kHost) VMEM_REFUSED(ENODEV, d_->advise(range(base, 0, 1)[0], Advice::preferred_location, bad, true));
  }
  EXPECT_EQ(used(), 0u);
}

TEST_P(DeviceContract, BadRangesAreRefusedAndChangeNothing) {
  uint64_t* base = reserve(4);
  bring(base, 0, 6);
  void* p = nullptr;
  VMEM_REFUSED(EINVAL, d_->reserve(0, 0, &p));
  VMEM_REFUSED(EINVAL, d_->reserve(kUnit + 4096, 0, &p));
  VMEM_REFUSED(EINVAL, prepare({{at(base) + 4096, kUnit}}));
  VMEM_REFUSED(EINVAL, prepare({{at(base), kUnit / 2}}));
  VMEM_REFUSED(EINVAL, prepare({{at(base), 0}}));
  VMEM_REFUSED(EINVAL, prepare({{at(base) + 2 * kUnit, 3 * kUnit}}));  // beyond the end
  VMEM_REFUSED(EINVAL, prepare({{at(base) + kUnit, kUnit}, {at(base) + kUnit, kUnit}}));
  VMEM_REFUSED(EINVAL, prepare({{at(frames_), kUnit}}));  // not a managed range
  VMEM_REFUSED(EINVAL, d_->punch(std::vector<Range>{{at(frames_), kUnit}}));
  VMEM_REFUSED(EINVAL, d_->release(frames_));
  VMEM_REFUSED(EINVAL, d_->release(base + kWords));
  EXPECT_EQ(used(), kUnit);
  EXPECT_EQ(kernel_sum(base, kWords), sum_of(6));
}

TEST_P(DeviceContract, CallsOutOfOrderAreRefusedAndChangeNothing) {
  uint64_t* base = reserve(2);
  bring(base, 0, 6);
  Ticket t;
  const Copy made{at(base), frame(0), kUnit}, hole{at(base) + kUnit, frame(0), kUnit};
  VMEM_REFUSED(EINVAL, prepare(range(base, 0, 1)));  // would destroy its bytes
  VMEM_REFUSED(EINVAL, prepare(range(base, 0, 2)));
  VMEM_REFUSED(EINVAL, d_->copy_in(0, std::span(&hole, 1), &t));
  VMEM_REFUSED(EINVAL, d_->copy_out(0, std::span(&hole, 1), &t));
  VMEM_REFUSED(EINVAL, d_->open(range(base, 1, 1), Access::read));
  VMEM_REFUSED(EINVAL, d_->open(range(base, 0, 1), Access::none));
  VMEM_REFUSED(EINVAL, d_->hold(range(base, 1, 1), Access::read));
  VMEM_REFUSED(EINVAL, d_->hold(range(base, 0, 1), Access::read_write));
  VMEM_REFUSED(EINVAL, d_->punch(range(base, 1, 1)));
  VMEM_REFUSED(EINVAL, d_->settle(range(base, 0, 1)));
  VMEM_REFUSED(EINVAL, d_->migrate(range(base, 1, 1), 0));
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  VMEM_REFUSED(EINVAL, d_->copy_in(0, std::span(&made, 1), &t));   // the CPU may store to it
  VMEM_REFUSED(EINVAL, d_->copy_out(0, std::span(&made, 1), &t));  // likewise
  VMEM_REFUSED(EINVAL, d_->punch(range(base, 0, 1)));              // likewise
  EXPECT_EQ(base[1], 7u);
  EXPECT_EQ(kernel_sum(base, kWords), sum_of(6));
}

TEST_P(DeviceContract, CopiesFromMemoryThatIsNotPinnedAreRefused) {
  uint64_t* base = reserve(1);
  VMEM_OK(prepare(range(base, 0, 1)));
  std::vector<uint64_t> loose(kWords);
  Ticket t;
  Copy copy{at(base), loose.data(), kUnit};
  VMEM_REFUSED(EINVAL, d_->copy_in(0, std::span(&copy, 1), &t));
  copy = {at(base), frame(kFrames - 1) + 8, kUnit};  // runs over the end
  VMEM_REFUSED(EINVAL, d_->copy_in(0, std::span(&copy, 1), &t));
  copy = {at(base) + 4096, frame(0), kUnit};  // so does this, of the range
  VMEM_REFUSED(EINVAL, d_->copy_in(0, std::span(&copy, 1), &t));
  VMEM_REFUSED(EINVAL, d_->copy_in(0, {}, &t));
}

TEST_P(DeviceContract, PinningTwiceOrHalfPagesIsRefused) {
  VMEM_REFUSED(EEXIST, d_->pin(frames_, kUnit));
  VMEM_REFUSED(EEXIST, d_->pin(frames_ + kWords, kUnit));
  VMEM_REFUSED(EINVAL, d_->pin(reinterpret_cast<std::byte*>(frames_) + 8, 4096));
  VMEM_REFUSED(EINVAL, d_->unpin(frames_ + kWords));
  VMEM_OK(d_->unpin(frames_));
  VMEM_REFUSED(EINVAL, d_->unpin(frames_));
  VMEM_OK(d_->pin(frames_, kFrames * kUnit));
}

TEST_P(DeviceContract, AdviceIsTakenForMadeAndUnmadeParts) {
  uint64_t* base = reserve(4);
  bring(base, 0, 1);
  for (Advice a : {Advice::preferred_location, Advice::read_mostly, Advice::accessed_by}) {
    VMEM_OK(d_->advise(range(base, 0, 4)[0], a, 0, true));
    VMEM_OK(d_->advise(range(base, 1, 2)[0], a, 0, false));
  }
  VMEM_OK(d_->advise(range(base, 0, 4)[0], Advice::accessed_by, kHost, true));
  bring(base, 3, 2);
  EXPECT_EQ(kernel_sum(base, kWords), sum_of(1));
  EXPECT_EQ(kernel_sum(base + 3 * kWords, kWords), sum_of(2));
}

// --- a device is lost -----------------------------------------------------------------------------------------------

TEST_P(DeviceLoss, AHoleIsLoudAndThenEveryCallSaysSo) {
  uint64_t* base = reserve(4);
  bring(base, 0, 1);
  Ticket before;
  VMEM_OK(d_->record(stream_, 0, &before));
  VMEM_OK(bench_->synchronize(stream_));
  bench_->sum(stream_, base + kWords, kWords, sum_cell());  // a hole
  EXPECT_FALSE(bench_->synchronize(stream_).ok());
  Ticket t;
  // The first call that meets the error may be any; it and all after it say so.
  const Copy copy{at(base), frame(0), kUnit};
  VMEM_REFUSED(EIO, d_->copy_in(0, std::span(&copy, 1), &t));
  VMEM_REFUSED(EIO, d_->health(0));
  bool torn = true;
  VMEM_REFUSED(EIO, d_->prepare(range(base, 2, 1), 0, &torn));
  EXPECT_FALSE(torn);
  VMEM_REFUSED(EIO, d_->check_stream(stream_, 0));
  VMEM_REFUSED(EIO, d_->order_after(before, stream_, 0));
  VMEM_REFUSED(EIO, d_->record(stream_, 0, &t));
  VMEM_REFUSED(EIO, d_->wait(before));
  bool done = false;
  VMEM_REFUSED(EIO, d_->poll(before, &done));
  Memory m{};
  VMEM_REFUSED(EIO, d_->memory(0, &m));
  void* p = nullptr;
  VMEM_REFUSED(EIO, d_->reserve(kUnit, 0, &p));
  // What needs no device still works, so that the region can be taken down in order.
  VMEM_OK(d_->hold(range(base, 0, 1), Access::none));
  VMEM_OK(d_->punch(range(base, 0, 1)));
  VMEM_OK(d_->settle(range(base, 0, 1)));
}

TEST_P(DeviceLoss, TheOtherSideOfAHoleIsLoudAlsoWithOrdinaryMemoryThere) {
  if (bench_->reaches_host_memory()) GTEST_SKIP() << "kernels reach ordinary memory here, rightly";
  uint64_t* base = reserve(2);
  ASSERT_EQ(mmap(base, kUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), base);
  base[0] = 1;
  bench_->add(stream_, base, 8, 1);
  EXPECT_FALSE(bench_->synchronize(stream_).ok());
  VMEM_REFUSED(EIO, prepare(range(base, 1, 1)));
}

TEST_P(DeviceLoss, AResetIsNoticedAndNothingHangs) {
  uint64_t* base = reserve(2);
  bring(base, 0, 1);
  Ticket t;
  VMEM_OK(d_->record(stream_, 0, &t));
  VMEM_OK(bench_->synchronize(stream_));
  bench_->destroy(stream_);
  stream_ = nullptr;
  bench_->reset(0);
  VMEM_REFUSED(EIO, d_->health(0));
  bool done = false, torn = false;
  VMEM_REFUSED(EIO, d_->poll(t, &done));
  VMEM_REFUSED(EIO, d_->wait(t));
  VMEM_REFUSED(EIO, d_->prepare(range(base, 1, 1), 0, &torn));
}

}  // namespace vmem::device::testing
