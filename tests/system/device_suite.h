// What the device tier promises through the C API, with the data four times the device budget. Instantiated for the
// simulated devices in device_tier_test.cpp and for CUDA in tests/gpu/pager_cuda_test.cpp. Tests of suite
// DeviceTierLoss end with a lost device: on CUDA each needs a process of its own.
#pragma once

#include <unistd.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/patience.h"
#include "core/step.h"
#include "store/faulty_engine.h"
#include "support.h"

namespace systest {

// The application's side: streams and kernels, all asynchronous.
class GpuApp {
 public:
  virtual ~GpuApp() = default;
  // Called before vmem_init(): says how many devices there are, makes the simulated ones known.
  virtual int prepare() = 0;
  virtual void* stream(int device) = 0;
  virtual void destroy(void* stream) = 0;
  // words[i] = stamp(first + i, round), where first + i is a multiple of kStampStride
  virtual void set(void* stream, uint64_t* words, size_t count, uint64_t first, uint64_t round) = 0;
  // Counts words that are not stamp(first + i, round).
  virtual void check(void* stream, const uint64_t* words, size_t count, uint64_t first, uint64_t round) = 0;
  // Counts words that are not 0.
  virtual void check_zero(void* stream, const uint64_t* words, size_t count) = 0;
  virtual void stand_still(void* stream, std::atomic<uint32_t>* gate) = 0;
  // A word of memory that stand_still() can see.
  virtual std::atomic<uint32_t>* gate() = 0;
  virtual vmem::core::Status synchronize(void* stream) = 0;
  // Of all checks so far whose streams were synchronised.
  virtual uint64_t wrong() = 0;
  virtual void capture(void* stream, bool on) = 0;
  virtual void lose(int device) = 0;
  // What a simulated device saw that no correct program does.
  virtual std::vector<std::string> violations() { return {}; }
};

struct GpuBody {
  const char* name;
  std::unique_ptr<GpuApp> (*make)(std::string* skip);
};
inline void PrintTo(const GpuBody& body, std::ostream* os) {
  *os << body.name;
}

inline constexpr size_t kMiB = 1 << 20;
// Words whose index is a multiple of this carry stamps.
inline constexpr size_t kStampStride = kSanitized ? 13 : 1;
inline size_t first_stamped(uint64_t first) {
  return (kStampStride - first % kStampStride) % kStampStride;
}

#define VMEM_DO(call) ASSERT_EQ((call), 0) << vmem_last_error()

class DeviceTier : public SystemTest, public ::testing::WithParamInterface<GpuBody> {
 protected:
  static constexpr size_t kWordsPerMiB = kMiB / sizeof(uint64_t);

  void SetUp() override {
    SystemTest::SetUp();
    std::string skip;
    app_ = GetParam().make(&skip);
    if (app_ == nullptr) GTEST_SKIP() << skip;
    devices_ = app_->prepare();
    vmem_set("device_budget", "32MiB");
  }
  void TearDown() override {
    if (app_ != nullptr) {
      vmem::core::step_hook.store(nullptr);
      for (void* s : streams_) app_->destroy(s);
      streams_.clear();
      for (const std::string& v : app_->violations()) ADD_FAILURE() << v;
    }
    SystemTest::TearDown();
    vmem_set("device", "auto");
    app_.reset();
  }
  void start(const Settings& more = {}) {
    Settings settings{{"device", GetParam().name}, {"host_budget", "96MiB"}};
    settings.insert(settings.end(), more.begin(), more.end());
    configure(settings);
  }
  void* stream(int device = 0) {
    streams_.push_back(app_->stream(device));
    return streams_.back();
  }
  static uint64_t* words(vmem::region& r) { return static_cast<uint64_t*>(r.data()); }
  // The CPU's side, like set() and check().
  static void cpu_set(uint64_t* w, size_t count, uint64_t first, uint64_t round) {
    for (size_t i = first_stamped(first); i < count; i += kStampStride) w[i] = stamp(first + i, round);
  }
  static size_t cpu_wrong(const uint64_t* w, size_t count, uint64_t first, uint64_t round) {
    size_t wrong = 0;
    for (size_t i = first_stamped(first); i < count; i += kStampStride) wrong += w[i] != stamp(first + i, round);
    return wrong;
  }
  struct vmem_device_stats device_stats(int d = 0) {
    struct vmem_device_stats s = {};
    s.size = sizeof s;
    EXPECT_EQ(vmem_device_stats(d, &s), 0) << vmem_last_error();
    return s;
  }
  void within_budget(int d = 0) {
    const auto s = device_stats(d);
    EXPECT_LE(s.used_bytes, s.budget);
    const auto all = vmem::stats();
    EXPECT_LE(all.host_bytes, all.host_budget);
  }
  // Leases [at, at + count) words for a kernel.
  int acquire(const uint64_t* at, size_t count, unsigned access, void* s, int d = 0) {
    return vmem_acquire(at, count * 8, access, d, s);
  }
  int release(const uint64_t* at, size_t count, void* s) { return vmem_release(at, count * 8, s); }

  static bool until(auto condition) { return vmem::test::eventually(condition); }

  // A step hook: a block that is out of sight stays on its way out.
  static void stay_taken(const char* step) {
    if (std::strcmp(step, "evict.taken") != 0) return;
    on_its_way_ = true;
    while (on_its_way_) std::this_thread::yield();
  }
  // A step hook: the preparation of a block waits until the toucher sleeps in its page fault, or long enough.
  static void wait_for_touch(const char* step) {
    // Not by the count of faults: a report of the block before may be counted late.
    if (std::strcmp(step, "fault.read") == 0) ++reads_;
    if (std::strcmp(step, "device.preparing") != 0) return;
    const uint64_t before = reads_;
    on_its_way_ = true;
    int looks = 0;
    vmem::test::eventually([&] { return (looks = reads_ != before && in_page_fault(toucher_) ? looks + 1 : 0) == 3; },
                           std::chrono::seconds(4), std::chrono::milliseconds(1));
  }
  // Asleep, and not in a system call; true also where the kernel does not say.
  static bool in_page_fault(pid_t thread) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/syscall");
    std::string word;
    return !(file >> word) || word == "-1";
  }
  // With that hook: sends each block from the SSD to the device, and touches it when its preparation waits.
  static void touch_what_comes(vmem::region& r) {
    const size_t n = r.size() / 8, part = 2 * kWordsPerMiB;
    cpu_set(words(r), n, 0, 1);
    r.evict();
    for (size_t at = 0; at < n; at += part) {
      send(words(r) + at, part);
      ASSERT_EQ(cpu_wrong(words(r) + at, part, at, 1), 0u);
      EXPECT_GT(vmem::stats().faults, faults_) << "the touch did not meet the trap";
    }
  }
  // .. one block.
  static void send(const uint64_t* w, size_t count) {
    on_its_way_ = false;
    toucher_ = gettid();
    faults_ = vmem::stats().faults;
    VMEM_DO(vmem_prefetch(w, count * 8, 0, nullptr));
    while (!on_its_way_) std::this_thread::yield();
  }
  static inline std::atomic<bool> on_its_way_{false};
  static inline std::atomic<uint64_t> faults_{0};
  static inline std::atomic<uint64_t> reads_{0};  // of the trap's reports
  static inline std::atomic<pid_t> toucher_{0};

  std::unique_ptr<GpuApp> app_;
  int devices_ = 0;
  std::vector<void*> streams_;
};

class DeviceTierLoss : public DeviceTier {};

TEST_P(DeviceTier, KernelsSeeWhatTheCpuWroteThoughItWentToTheSsd) {
  start();
  vmem::region r(128 * kMiB, 0);
  const size_t n = r.size() / 8, part = 8 * kWordsPerMiB;
  cpu_set(words(r), n, 0, 1);
  r.evict();
  EXPECT_EQ(r.query().ssd_bytes, r.size());
  void* s = stream();
  for (int pass = 0; pass < 2; ++pass) {
    for (size_t at = 0; at < n; at += part) {
      VMEM_DO(acquire(words(r) + at, part, VMEM_READ, s));
      app_->check(s, words(r) + at, part, at, 1);
      VMEM_DO(release(words(r) + at, part, s));
      within_budget();
    }
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
  const auto stats = device_stats();
  EXPECT_EQ(stats.out_bytes, 0u) << "blocks that nobody wrote are dropped without a copy";
  EXPECT_GT(stats.clean_drops, 0u);
  EXPECT_GT(r.query().device_bytes, 0u);
}

TEST_P(DeviceTier, WhatKernelsWroteComesBackToTheCpuAndToKernels) {
  start();
  vmem::region r(128 * kMiB, 0);
  const size_t n = r.size() / 8, part = 8 * kWordsPerMiB;
  void* s = stream();
  for (uint64_t round = 1; round <= 3; ++round) {
    for (size_t at = 0; at < n; at += part) {
      VMEM_DO(acquire(words(r) + at, part, VMEM_READ | VMEM_WRITE, s));
      if (round > 1) app_->check(s, words(r) + at, part, at, round - 1);
      app_->set(s, words(r) + at, part, at, round);
      VMEM_DO(release(words(r) + at, part, s));
    }
    within_budget();
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 3), 0u);
  r.evict();
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 3), 0u);
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
}

TEST_P(DeviceTier, BlocksNeverWrittenAreZerosOnTheDeviceAndCostNoTransfer) {
  start();
  vmem::region r(64 * kMiB, 0);
  const size_t n = r.size() / 8, part = 16 * kWordsPerMiB;
  void* s = stream();
  for (size_t at = 0; at < n; at += part) {
    VMEM_DO(acquire(words(r) + at, part, VMEM_READ, s));
    app_->check_zero(s, words(r) + at, part);
    VMEM_DO(release(words(r) + at, part, s));
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
  EXPECT_EQ(vmem::stats().read_bytes, 0u);
  EXPECT_EQ(vmem::stats().write_bytes, 0u);
  EXPECT_EQ(device_stats().in_bytes, 0u);
  EXPECT_EQ(device_stats().out_bytes, 0u);
}

TEST_P(DeviceTier, ACpuStoreUnderAReadLeaseIsKept) {
  start();
  vmem::region r(8 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  r.evict();
  void* s = stream();
  VMEM_DO(acquire(words(r), n, VMEM_READ, s));
  EXPECT_EQ(words(r)[5 * kStampStride], stamp(5 * kStampStride, 1));
  words(r)[7] = 4711;
  words(r)[n - 1] = 4712;
  VMEM_DO(release(words(r), n, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  r.evict();
  EXPECT_EQ(words(r)[7], 4711u);
  EXPECT_EQ(words(r)[n - 1], 4712u);
}

TEST_P(DeviceTier, RefusalsNameWhatWasWrongAndChangeNothing) {
  start();
  vmem::region r(128 * kMiB, 0), host(4 * kMiB, VMEM_HOST_ONLY);
  void* s = stream();
  const size_t n = 4 * kWordsPerMiB;
  EXPECT_EQ(acquire(words(r), n, VMEM_READ, s, devices_), -ENODEV);
  EXPECT_EQ(acquire(words(host), n, VMEM_READ, s), -EINVAL);
  EXPECT_EQ(release(words(r), n, s), -EINVAL) << "nothing is leased";
  EXPECT_EQ(acquire(words(r), r.size() / 8, VMEM_READ, s), -ENOMEM) << "larger than any budget";
  EXPECT_NE(std::string(vmem_last_error()).find("device_budget 32"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(vmem_prefetch(r.data(), r.size(), devices_, nullptr), -ENODEV);
  std::vector<uint64_t> heap(64);
  EXPECT_EQ(acquire(heap.data(), 8, VMEM_READ, s), -EINVAL);
  // What live leases hold is not waited for.
  VMEM_DO(acquire(words(r), 24 * kWordsPerMiB, VMEM_READ, s));
  EXPECT_EQ(acquire(words(r) + 64 * kWordsPerMiB, 16 * kWordsPerMiB, VMEM_READ, s), -ENOMEM);
  EXPECT_EQ(vmem_acquire(r.data(), 4096, VMEM_READ, VMEM_HOST, nullptr), -EBUSY) << "live at another location";
  EXPECT_EQ(vmem_free(r.data()), -EBUSY);
  vmem_range two[2] = {{words(r) + 100 * kWordsPerMiB, 2 * kMiB, VMEM_READ, 0}, {words(r), 2 * kMiB, VMEM_READ, 7}};
  EXPECT_EQ(vmem_acquire_ranges(two, 2, 0, s), -EINVAL);
  two[1] = {words(r) + 64 * kWordsPerMiB, 16 * kMiB, VMEM_READ, 0};
  EXPECT_EQ(vmem_acquire_ranges(two, 2, 0, s), -ENOMEM) << "all or nothing";
  EXPECT_EQ(release(two[0].ptr == nullptr ? nullptr : words(r) + 100 * kWordsPerMiB, 8, s), -EINVAL);
  VMEM_DO(release(words(r), 24 * kWordsPerMiB, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  VMEM_DO(vmem_acquire(r.data(), 4096, VMEM_READ, VMEM_HOST, nullptr));
  EXPECT_EQ(acquire(words(r), 8, VMEM_READ, s), -EBUSY) << "held at the host";
  VMEM_DO(vmem_release(r.data(), 4096, nullptr));
  EXPECT_EQ(device_stats().leased_bytes, 0u);
}

TEST_P(DeviceTier, CapturingAGraphIsRefusedAndReplayUnderALeaseIsTheWay) {
  start();
  vmem::region r(8 * kMiB, 0);
  void* s = stream();
  app_->capture(s, true);
  EXPECT_EQ(acquire(words(r), 8, VMEM_READ, s), -EBUSY);
  EXPECT_NE(std::string(vmem_last_error()).find("captur"), std::string::npos) << vmem_last_error();
  app_->capture(s, false);
  VMEM_DO(acquire(words(r), 8, VMEM_READ, s));
  VMEM_DO(release(words(r), 8, s));
}

TEST_P(DeviceTier, AnAcquireWaitsForStreamsThatHaveBeenToldToEndAndForNothingElse) {
  start();
  vmem::region r(64 * kMiB, 0);
  void *a = stream(), *b = stream();
  auto* gate = app_->gate();
  *gate = 0;
  app_->stand_still(a, gate);
  VMEM_DO(acquire(words(r), 24 * kWordsPerMiB, VMEM_READ | VMEM_WRITE, a));
  app_->set(a, words(r), 24 * kWordsPerMiB, 0, 1);
  VMEM_DO(release(words(r), 24 * kWordsPerMiB, a));  // the stream has not got there
  EXPECT_EQ(device_stats().leased_bytes, 24 * kMiB);
  std::atomic<bool> through{false};
  std::thread other([&] {
    EXPECT_EQ(acquire(words(r) + 32 * kWordsPerMiB, 24 * kWordsPerMiB, VMEM_READ, b), 0) << vmem_last_error();
    through = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_FALSE(through) << "the budget holds one of the two";
  *gate = 1;
  other.join();
  app_->check_zero(b, words(r) + 32 * kWordsPerMiB, 24 * kWordsPerMiB);
  VMEM_DO(release(words(r) + 32 * kWordsPerMiB, 24 * kWordsPerMiB, b));
  ASSERT_TRUE(app_->synchronize(b).ok());
  EXPECT_EQ(cpu_wrong(words(r), 24 * kWordsPerMiB, 0, 1), 0u);
  EXPECT_EQ(app_->wrong(), 0u);
}

TEST_P(DeviceTier, SyncEvictDontNeedAndFreeRespectLeases) {
  start();
  vmem::region r(16 * kMiB, 0);
  const size_t n = r.size() / 8, half = n / 2;
  void* s = stream();
  VMEM_DO(acquire(words(r), n, VMEM_READ | VMEM_WRITE, s));
  app_->set(s, words(r), n, 0, 1);
  EXPECT_EQ(vmem_sync(r.data(), r.size()), -EBUSY) << "all of it is under a live WRITE lease";
  VMEM_DO(release(words(r), half, s));
  EXPECT_EQ(vmem_sync(r.data(), r.size()), -EBUSY);
  EXPECT_EQ(vmem::stats().write_bytes, r.size() / 2) << "the released half is on the SSD";
  EXPECT_EQ(r.query().device_bytes, r.size()) << "and stays where it is";
  VMEM_DO(vmem_evict(r.data(), r.size(), VMEM_HOST));
  EXPECT_EQ(r.query().device_bytes, r.size() / 2) << "leased blocks are skipped";
  EXPECT_EQ(vmem_advise(r.data(), r.size(), VMEM_ADVISE_DONT_NEED, 0), -EBUSY);
  VMEM_DO(release(words(r) + half, half, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(cpu_wrong(words(r) + half, half, half, 1), 0u);
  for (size_t i = 0; i < half; i += 4096) ASSERT_EQ(words(r)[i], 0u) << "dropped";
  VMEM_DO(vmem_sync(r.data(), r.size()));
  VMEM_DO(acquire(words(r), n, VMEM_READ, s));
  app_->check(s, words(r) + half, half, half, 1);
  app_->check_zero(s, words(r), half);
  VMEM_DO(release(words(r), n, s));
  r.free();  // waits for the stream
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
}

TEST_P(DeviceTier, PrefetchMovesBetweenAllTiers) {
  start();
  vmem::region r(16 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  r.evict();
  VMEM_DO(vmem_prefetch(r.data(), r.size(), 0, nullptr));
  EXPECT_TRUE(until([&] { return r.query().device_bytes == r.size(); }));
  VMEM_DO(vmem_prefetch(r.data(), r.size(), VMEM_HOST, nullptr));
  EXPECT_TRUE(until([&] { return r.query().host_bytes == r.size(); }));
  void* s = stream();
  VMEM_DO(acquire(words(r), n, VMEM_READ | VMEM_WRITE, s));
  const uint64_t read = vmem::stats().read_bytes;
  app_->check(s, words(r), n, 0, 1);
  app_->set(s, words(r), n, 0, 2);
  VMEM_DO(release(words(r), n, s));
  EXPECT_EQ(vmem::stats().read_bytes, read);
  ASSERT_TRUE(app_->synchronize(s).ok());
  VMEM_DO(vmem_prefetch(r.data(), r.size(), VMEM_SSD, nullptr));
  EXPECT_TRUE(until([&] { return r.query().ssd_bytes == r.size(); }));
  VMEM_DO(vmem_prefetch(r.data(), r.size(), VMEM_HOST, nullptr));
  EXPECT_TRUE(until([&] { return r.query().host_bytes == r.size(); }));
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 2), 0u);
  EXPECT_EQ(app_->wrong(), 0u);
}

// The leases end after the hint's blocks have come: by time of use alone those would be the first to go.
TEST_P(DeviceTier, OfAColdRegionWhatAHintBroughtStaysUntilItIsUsed) {
  start({{"block_size", "2MiB"}});
  vmem::region r(64 * kMiB, 0);
  const size_t n = r.size() / 8, mib = kWordsPerMiB;
  cpu_set(words(r), n, 0, 1);
  r.evict();
  r.advise(VMEM_ADVISE_COLD, 0);
  const auto there = [&](size_t at, size_t size) {
    struct vmem_residency where = {};
    where.size = sizeof where;
    EXPECT_EQ(vmem_query(words(r) + at * mib, size * kMiB, &where), 0) << vmem_last_error();
    return where.device_bytes == size * kMiB;
  };
  const auto before = vmem::stats();
  void* s = stream();
  VMEM_DO(acquire(words(r), 20 * mib, VMEM_READ, s));
  app_->check(s, words(r), 20 * mib, 0, 1);
  VMEM_DO(vmem_prefetch(words(r) + 20 * mib, 8 * kMiB, 0, nullptr));
  EXPECT_TRUE(until([&] { return there(20, 8); }));
  VMEM_DO(release(words(r), 20 * mib, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_TRUE(until([&] { return device_stats().leased_bytes == 0; }));
  VMEM_DO(vmem_prefetch(words(r) + 28 * mib, 8 * kMiB, 0, nullptr));
  EXPECT_TRUE(until([&] { return there(28, 8); }));
  EXPECT_TRUE(there(20, 8));
  VMEM_DO(acquire(words(r) + 20 * mib, 16 * mib, VMEM_READ, s));
  app_->check(s, words(r) + 20 * mib, 16 * mib, 20 * mib, 1);
  VMEM_DO(release(words(r) + 20 * mib, 16 * mib, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
  const auto after = vmem::stats();
  EXPECT_EQ(after.prefetched_blocks - before.prefetched_blocks, 8u);
  EXPECT_EQ(after.prefetch_hits - before.prefetch_hits, 8u);
  EXPECT_EQ(after.prefetch_wasted, before.prefetch_wasted);
  // Not used: these are the waste.
  VMEM_DO(vmem_prefetch(words(r) + 36 * mib, 4 * kMiB, 0, nullptr));
  EXPECT_TRUE(until([&] { return there(36, 4); }));
  VMEM_DO(vmem_prefetch(words(r) + 36 * mib, 4 * kMiB, VMEM_SSD, nullptr));
  EXPECT_TRUE(until([&] { return vmem::stats().prefetch_wasted == before.prefetch_wasted + 2; }));
}

TEST_P(DeviceTier, AHintForABlockThatIsStillOnItsWayOutIsKept) {
  start({{"block_size", "2MiB"}});
  vmem::region r(4 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  on_its_way_ = false;
  vmem::core::step_hook.store(&stay_taken);
  VMEM_DO(vmem_prefetch(r.data(), 2 * kMiB, VMEM_SSD, nullptr));
  while (!on_its_way_) std::this_thread::yield();
  EXPECT_EQ(vmem_prefetch(r.data(), r.size(), 0, nullptr), 0) << vmem_last_error();
  EXPECT_TRUE(until([&] { return r.query().device_bytes == r.size() / 2; })) << "the rest need not wait for it";
  vmem::core::step_hook.store(nullptr);
  on_its_way_ = false;
  EXPECT_TRUE(until([&] { return r.query().device_bytes == r.size(); }));
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
}

TEST_P(DeviceTier, WhatAsksABlockElsewhereEndsTheHintThatWaitsForIt) {
  start({{"block_size", "2MiB"}});
  vmem::region r(2 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  on_its_way_ = false;
  vmem::core::step_hook.store(&stay_taken);
  VMEM_DO(vmem_prefetch(r.data(), r.size(), VMEM_SSD, nullptr));
  while (!on_its_way_) std::this_thread::yield();
  EXPECT_EQ(vmem_prefetch(r.data(), r.size(), 0, nullptr), 0) << vmem_last_error();
  EXPECT_EQ(vmem_prefetch(r.data(), r.size(), VMEM_SSD, nullptr), 0) << vmem_last_error();
  vmem::core::step_hook.store(nullptr);
  on_its_way_ = false;
  r.evict();
  EXPECT_EQ(r.query().ssd_bytes, r.size());
  EXPECT_EQ(device_stats().in_bytes, 0u);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
}

// Everything on the device is leased, so the hint waits for room.
TEST_P(DeviceTier, OnlyWhatIsAskedElsewhereIsTakenOutOfAHint) {
  start({{"device_budget", "8MiB"}});
  vmem::region a(8 * kMiB, 0), b(6 * kMiB, 0);
  const size_t n = b.size() / 8, block = 2 * kWordsPerMiB;
  cpu_set(words(b), n, 0, 1);
  void* s = stream();
  VMEM_DO(acquire(words(a), a.size() / 8, VMEM_READ, s));
  VMEM_DO(vmem_prefetch(b.data(), b.size(), 0, nullptr));
  VMEM_DO(vmem_evict(words(b) + block, block * 8, VMEM_SSD));
  EXPECT_EQ(b.query().device_bytes, 0u);
  VMEM_DO(release(words(a), a.size() / 8, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_TRUE(until([&] { return b.query().device_bytes == 2 * block * 8; }));
  struct vmem_residency middle = {};
  middle.size = sizeof middle;
  VMEM_DO(vmem_query(words(b) + block, block * 8, &middle));
  EXPECT_EQ(middle.ssd_bytes, block * 8);
  EXPECT_EQ(cpu_wrong(words(b), n, 0, 1), 0u);
}

// The reserve for faults is kept from the largest share too, for the largest blocks; a region that comes later and does
// not fit beside it is refused.
TEST_P(DeviceTier, TheLargestShareLeavesFaultsTheirReserve) {
  start({{"host_budget", "256MiB"}, {"device_budget", "8MiB"}, {"staging_share", "90"}, {"block_size", "32MiB"}});
  vmem::region large(96 * kMiB, VMEM_HOST_ONLY);
  ASSERT_EQ(vmem_set("block_size", "2MiB"), 0);
  vmem::region r(240 * kMiB, 0);
  void* s = stream();
  cpu_set(words(r), r.size() / 8, 0, 1);
  r.evict();
  for (size_t at = 0; at < r.size() / 8; at += 2 * kWordsPerMiB) {
    VMEM_DO(acquire(words(r) + at, 2 * kWordsPerMiB, VMEM_READ, s));
    VMEM_DO(release(words(r) + at, 2 * kWordsPerMiB, s));
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  cpu_set(words(large), large.size() / 8, 0, 2);
  EXPECT_EQ(cpu_wrong(words(large), large.size() / 8, 0, 2), 0u);
  within_budget();
  ASSERT_EQ(vmem_set("block_size", "32MiB"), 0);
  EXPECT_THROW(vmem::region(64 * kMiB, VMEM_HOST_ONLY).size(), std::exception);
  EXPECT_EQ(vmem_set("block_size", "2MiB"), 0);
  EXPECT_EQ(vmem_set("staging_share", "50"), 0);
}

// Host memory holds all of it: after the first pass nothing comes from the disk, and nothing comes back from the
// device.
TEST_P(DeviceTier, WhatLeavesUnchangedIsStillInHostMemory) {
  for (const bool on_disk : {true, false}) {
    start({{"host_budget", "256MiB"}});
    vmem::region r(48 * kMiB, 0);
    const size_t n = r.size() / 8, part = 8 * kWordsPerMiB;
    cpu_set(words(r), n, 0, 6);
    if (on_disk) r.evict();
    void* s = stream();
    uint64_t read = 0, written = 0, back = 0;
    for (int pass = 0; pass < 3; ++pass) {
      for (size_t at = 0; at < n; at += part) {
        VMEM_DO(acquire(words(r) + at, part, VMEM_READ, s));
        app_->check(s, words(r) + at, part, at, 6);
        VMEM_DO(release(words(r) + at, part, s));
      }
      within_budget();
      if (pass != 0) continue;
      read = vmem::stats().read_bytes;
      written = vmem::stats().write_bytes;
      back = device_stats().out_bytes;
    }
    ASSERT_TRUE(app_->synchronize(s).ok());
    EXPECT_EQ(app_->wrong(), 0u);
    EXPECT_EQ(vmem::stats().read_bytes, read);
    EXPECT_EQ(vmem::stats().write_bytes, written);
    EXPECT_EQ(device_stats().out_bytes, back);
    EXPECT_EQ(back, 0u);
    EXPECT_EQ(cpu_wrong(words(r), n, 0, 6), 0u);
    r.evict();  // what only host memory had is written
    EXPECT_EQ(r.query().ssd_bytes, r.size());
    EXPECT_EQ(cpu_wrong(words(r), n, 0, 6), 0u);
  }
}

// A tenth of 256 MiB and the device together cannot hold all of it; half can, half of that kept free.
TEST_P(DeviceTier, TheShareOfHostMemoryForTheDeviceTierIsASetting) {
  for (const char* share : {"10", "50"}) {
    start({{"host_budget", "256MiB"}, {"device_budget", "8MiB"}, {"staging_share", share}});
    vmem::region r(50 * kMiB, 0);
    const size_t n = r.size() / 8, part = 2 * kWordsPerMiB;
    cpu_set(words(r), n, 0, 6);
    r.evict();
    void* s = stream();
    uint64_t read = 0;
    for (int pass = 0; pass < 4; ++pass) {
      if (pass == 2) read = vmem::stats().read_bytes;
      for (size_t at = 0; at < n; at += part) {
        VMEM_DO(acquire(words(r) + at, part, VMEM_READ, s));
        app_->check(s, words(r) + at, part, at, 6);
        VMEM_DO(release(words(r) + at, part, s));
      }
      within_budget();
    }
    ASSERT_TRUE(app_->synchronize(s).ok());
    EXPECT_EQ(app_->wrong(), 0u);
    EXPECT_EQ(vmem::stats().read_bytes == read, share == std::string("50")) << vmem::stats().read_bytes - read;
  }
  EXPECT_EQ(vmem_set("staging_share", "91"), -EINVAL);
  EXPECT_EQ(vmem_set("staging_share", "50"), 0);
}

// Every way a block can change on its device, with a copy of what it was in host memory.
TEST_P(DeviceTier, AHostCopyOfWhatChangedIsNotUsed) {
  start({{"host_budget", "192MiB"}});
  vmem::region r(16 * kMiB, 0), other(64 * kMiB, 0);
  const size_t n = r.size() / 8, half = n / 2, all = other.size() / 8, part = 8 * kWordsPerMiB;
  void* s = stream();
  const auto make_room = [&] {
    for (size_t at = 0; at < all; at += part) {
      VMEM_DO(acquire(words(other) + at, part, VMEM_READ, s));
      VMEM_DO(release(words(other) + at, part, s));
    }
  };
  cpu_set(words(r), n, 0, 1);
  for (uint64_t round = 2; round < 8; ++round) {
    VMEM_DO(acquire(words(r), n, VMEM_READ, s));
    app_->check(s, words(r), n, 0, round - 1);
    if (round % 3 == 0) {  // the CPU, under the lease, when the kernel has looked
      ASSERT_TRUE(app_->synchronize(s).ok());
      cpu_set(words(r), half, 0, round);
      VMEM_DO(release(words(r), n, s));
    } else {
      if (round % 3 == 1) {
        VMEM_DO(release(words(r), n, s));
      }
      VMEM_DO(acquire(words(r), half, VMEM_READ | VMEM_WRITE, s));
      app_->set(s, words(r), half, 0, round);
      VMEM_DO(release(words(r), half, s));
      if (round % 3 == 2) {
        VMEM_DO(release(words(r), n, s));
      }
    }
    VMEM_DO(acquire(words(r) + half, n - half, VMEM_WRITE, s));
    app_->set(s, words(r) + half, n - half, half, round);
    VMEM_DO(release(words(r) + half, n - half, s));
    if (round % 2 == 0) r.sync();
    make_room();
    if (round > 4) r.evict();
    EXPECT_EQ(cpu_wrong(words(r), n, 0, round), 0u) << round;
    if (round == 6) make_room();
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
}

// Copies never keep others from memory: a load of changed blocks beside one of unchanged ones, in frames for neither.
TEST_P(DeviceTier, HostCopiesGiveWay) {
  start({{"host_budget", "64MiB"}});
  vmem::region read(64 * kMiB, 0), changed(64 * kMiB, 0);
  const size_t n = read.size() / 8, part = 4 * kWordsPerMiB;
  cpu_set(words(read), n, 0, 3);
  void* s = stream();
  for (uint64_t pass = 1; pass < 3; ++pass) {
    for (size_t at = 0; at < n; at += part) {
      VMEM_DO(acquire(words(read) + at, part, VMEM_READ, s));
      app_->check(s, words(read) + at, part, at, 3);
      VMEM_DO(release(words(read) + at, part, s));
      VMEM_DO(acquire(words(changed) + at, part, VMEM_READ | VMEM_WRITE, s));
      if (pass == 1) app_->check_zero(s, words(changed) + at, part);
      if (pass == 2) app_->check(s, words(changed) + at, part, at, 1);
      app_->set(s, words(changed) + at, part, at, pass);
      VMEM_DO(release(words(changed) + at, part, s));
      if (at % (4 * part) == 0) within_budget();
    }
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
  EXPECT_EQ(cpu_wrong(words(changed), n, 0, 2), 0u);
  EXPECT_EQ(cpu_wrong(words(read), n, 0, 3), 0u);
}

// Host memory is full of what the CPU uses, so that the staging pool may grow and cannot.
TEST_P(DeviceTier, AStagingPoolThatCannotGrowServesTheDevice) {
  start({{"host_budget", "320MiB"}});
  vmem::region cpu(320 * kMiB, VMEM_HOST_ONLY), r(96 * kMiB, 0);
  const size_t n = r.size() / 8, part = 8 * kWordsPerMiB;
  void* s = stream();
  for (uint64_t round = 1; round < 4; ++round) {
    cpu_set(words(cpu), cpu.size() / 8, 0, round);
    for (size_t at = 0; at < n; at += part) {
      // Not what the CPU reads next: a touch may then fall between the mapping of a block and its shutting.
      if (round != 3 || at + part < n) {
        VMEM_DO(vmem_prefetch(words(r) + (at + part) % n, part * 8, 0, s));
      }
      VMEM_DO(acquire(words(r) + at, part, VMEM_READ | VMEM_WRITE, s));
      if (round != 1) app_->check(s, words(r) + at, part, at, round - 1);
      app_->set(s, words(r) + at, part, at, round);
      VMEM_DO(release(words(r) + at, part, s));
    }
    within_budget();
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 3), 0u);
  EXPECT_EQ(cpu_wrong(words(cpu), cpu.size() / 8, 0, 3), 0u);
}

// A thread that touched a block on its way from the SSD to the device sleeps until the block is made. Were it sent
// round, it would meet the block between its mapping and its shutting, which is as long here as a busy machine may make
// it.
TEST_P(DeviceTier, ATouchOfABlockOnItsWayWaitsUntilItIsMade) {
  start();
  vmem::region r(16 * kMiB, 0);
  vmem::core::step_hook.store([](const char* step) {
    wait_for_touch(step);
    if (std::strcmp(step, "device.mapped") == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  });
  touch_what_comes(r);
  vmem::core::step_hook.store(nullptr);
}

// A CPU that reads what is on a device makes the driver take host pages, beside every budget.
TEST_P(DeviceTier, HostPagesOfTheDriverAreCountedAndGivenBack) {
  start();
  vmem::region r(16 * kMiB, 0);
  const size_t n = r.size() / 8;
  void* s = stream();
  VMEM_DO(acquire(words(r), n, VMEM_WRITE, s));
  app_->set(s, words(r), n, 0, 1);
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
  EXPECT_EQ(device_stats().driver_host_bytes, r.size()) << "a lease keeps them where they are";
  VMEM_DO(release(words(r), n, s));
  for (int i = 0; i < 4000 && r.query().device_bytes != 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(device_stats().driver_host_bytes, 0u);
  EXPECT_EQ(r.query().device_bytes, 0u);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
  within_budget();
}

TEST_P(DeviceTier, MappedFilesAreReadAndChangedByKernels) {
  start();
  TempFile file(32 * kMiB, 3);
  const size_t n = 32 * kWordsPerMiB;
  void* s = stream();
  {
    vmem::region r(32 * kMiB, file.path(), 0, VMEM_MAP_SHARED);
    VMEM_DO(acquire(words(r), n / 2, VMEM_READ | VMEM_WRITE, s));
    app_->set(s, words(r), n / 2, 0, 5);
    VMEM_DO(release(words(r), n / 2, s));
    VMEM_DO(vmem_sync(r.data(), r.size()));
    const auto bytes = file.read();
    EXPECT_EQ(cpu_wrong(reinterpret_cast<const uint64_t*>(bytes.data()), n / 2, 0, 5), 0u);
    VMEM_DO(acquire(words(r) + n / 2, n / 2, VMEM_READ | VMEM_WRITE, s));
    app_->set(s, words(r) + n / 2, n / 2, n / 2, 6);
    VMEM_DO(release(words(r) + n / 2, n / 2, s));
  }
  const auto bytes = file.read();
  EXPECT_EQ(cpu_wrong(reinterpret_cast<const uint64_t*>(bytes.data()) + n / 2, n / 2, n / 2, 6), 0u)
      << "free writes what kernels changed";
  vmem::region again(32 * kMiB, file.path(), 0, VMEM_MAP_READ);
  EXPECT_EQ(acquire(words(again), n, VMEM_WRITE, s), -EACCES);
  VMEM_DO(acquire(words(again), n / 2, VMEM_READ, s));
  app_->check(s, words(again), n / 2, 0, 5);
  VMEM_DO(release(words(again), n / 2, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
}

TEST_P(DeviceTier, AReadErrorAndAFlippedBitFailTheAcquireAndLeaseNothing) {
  vmem::store::FaultyEngine* disk = nullptr;
  vmem::api::test_hooks().wrap_engine = [&](std::unique_ptr<vmem::store::Engine> engine) {
    std::unique_ptr<vmem::store::FaultyEngine> wrapped;
    EXPECT_TRUE(vmem::store::FaultyEngine::wrap(std::move(engine), 1, &wrapped).ok());
    disk = wrapped.get();
    return wrapped;
  };
  start();
  vmem::region r(16 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  r.evict();
  LogLines log;
  void* s = stream();
  using Fault = vmem::store::Fault;
  for (const auto action : {Fault::Action::error, Fault::Action::flip_bit}) {
    Fault fault;
    fault.action = action;
    fault.op = vmem::store::Io::Op::read;
    disk->add_rule(fault);
    EXPECT_EQ(acquire(words(r), n, VMEM_READ, s), -EIO);
    EXPECT_EQ(device_stats().leased_bytes, 0u);
    disk->clear_rules();
    VMEM_DO(acquire(words(r), n, VMEM_READ, s));
    app_->check(s, words(r), n, 0, 1);
    VMEM_DO(release(words(r), n, s));
    ASSERT_TRUE(app_->synchronize(s).ok());
    r.evict();
  }
  EXPECT_EQ(app_->wrong(), 0u);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
}

TEST_P(DeviceTier, ASlowDiskDelaysAnAcquireAndNobodyElse) {
  vmem::store::FaultyEngine* disk = nullptr;
  vmem::api::test_hooks().wrap_engine = [&](std::unique_ptr<vmem::store::Engine> engine) {
    std::unique_ptr<vmem::store::FaultyEngine> wrapped;
    EXPECT_TRUE(vmem::store::FaultyEngine::wrap(std::move(engine), 1, &wrapped).ok());
    disk = wrapped.get();
    return wrapped;
  };
  start();
  vmem::region cold(8 * kMiB, 0), warm(8 * kMiB, 0);
  const size_t n = cold.size() / 8;
  cpu_set(words(cold), n, 0, 1);
  cold.evict();
  void *a = stream(), *b = stream();
  VMEM_DO(acquire(words(warm), n, VMEM_READ | VMEM_WRITE, b));
  vmem::store::Fault slow;
  slow.action = vmem::store::Fault::Action::delay;
  slow.delay_ms = kSanitized ? 500 : 2000;
  slow.op = vmem::store::Io::Op::read;
  disk->add_rule(slow);
  std::atomic<bool> there{false};
  std::thread waits([&] {
    EXPECT_EQ(acquire(words(cold), n, VMEM_READ, a), 0) << vmem_last_error();
    there = true;
  });
  for (uint64_t round = 1; round <= 200 && !there; ++round) {
    app_->set(b, words(warm), n, 0, round);
    ASSERT_TRUE(app_->synchronize(b).ok());
    app_->check(b, words(warm), n, 0, round);
  }
  waits.join();
  app_->check(a, words(cold), n, 0, 1);
  VMEM_DO(release(words(cold), n, a));
  VMEM_DO(release(words(warm), n, b));
  ASSERT_TRUE(app_->synchronize(a).ok());
  ASSERT_TRUE(app_->synchronize(b).ok());
  EXPECT_EQ(app_->wrong(), 0u);
}

// Touches without a lease while blocks are on the device, leave it and come back to the host. (While a block enters, a
// touch without a lease is the program's error: docs/internals.md.)
TEST_P(DeviceTier, CpuReadersAndWritersBesideBlocksThatLeaveLoseNothing) {
  start();
  vmem::region r(24 * kMiB, 0);
  const size_t n = r.size() / 8;
  constexpr size_t kPiece = 8192;  // words; the last of each is the CPU's, kernels only read the others
  cpu_set(words(r), n, 0, 1);
  std::vector<uint64_t> counts(n / kPiece);
  void* s = stream();
  for (int pass = 0; pass < (kSanitized ? 4 : 12); ++pass) {
    VMEM_DO(acquire(words(r), n, VMEM_READ, s));
    for (size_t p = 0; p < n; p += 8 * kPiece) app_->check(s, words(r) + p, kPiece - 1, p, 1);
    VMEM_DO(release(words(r), n, s));
    std::atomic<bool> stop{false};
    std::atomic<size_t> bad{0};
    std::vector<std::thread> cpus;
    for (size_t t = 0; t < 3; ++t) {
      cpus.emplace_back([&, t] {
        std::mt19937_64 random(t + 10 * static_cast<uint64_t>(pass));
        while (!stop) {
          const size_t i = random() % (counts.size() / 3) * 3 + t, at = i * kPiece + kPiece - 1;
          volatile uint64_t* w = words(r) + at;
          if (counts[i] != 0 ? *w != counts[i] : at % kStampStride == 0 && *w != stamp(at, 1)) ++bad;
          *w = ++counts[i];
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    VMEM_DO(vmem_evict(r.data(), r.size(), pass % 2 == 0 ? VMEM_SSD : VMEM_HOST));
    std::this_thread::sleep_for(std::chrono::milliseconds(pass % 3 * 5));
    stop = true;
    for (std::thread& t : cpus) t.join();
    ASSERT_EQ(bad, 0u) << pass;
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
  r.evict();
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    ASSERT_EQ(words(r)[i * kPiece + kPiece - 1], counts[i]) << i;
  }
}

// Kernels of several streams and CPU threads check every word of a block and change it, in turns, while blocks are
// prefetched, evicted, synced, advised, and regions come and go. Lasts a fixed number of turns, or VMEM_SOAK_SECONDS.
TEST_P(DeviceTier, CpuAndKernelsTakeTurnsByLeases) {
  start();
  vmem::region r(128 * kMiB, 0);
  const size_t block = 2 * kWordsPerMiB, blocks = r.size() / (2 * kMiB);
  const char* soak = getenv("VMEM_SOAK_SECONDS");
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(soak != nullptr ? atoi(soak) : 0);
  const int turns = kSanitized ? 40 : 120;
  std::vector<uint64_t> rounds(blocks);
  std::vector<std::mutex> owners(blocks);  // who changes a block
  std::atomic<size_t> bad{0}, all_turns{0};
  const auto must = [&](int rc, const char* what) {
    if (rc == 0) return;
    if (bad++ < 5) ADD_FAILURE() << what << ": " << rc << " " << vmem_last_error();
  };
  const auto party = [&](unsigned seed, void* s, int device) {
    std::mt19937_64 random(seed);
    for (int turn = 0; soak != nullptr ? std::chrono::steady_clock::now() < end && bad == 0 : turn < turns; ++turn) {
      // Every third turn on blocks of its own: there the stream is not waited for.
      const size_t b = turn % 3 != 0 ? random() % (blocks / 2) : blocks / 2 + random() % (blocks / 16) * 8 + seed - 1;
      std::lock_guard owner(owners[b]);
      uint64_t* w = words(r) + b * block;
      const uint64_t round = rounds[b]++;
      if (s == nullptr) {
        must(vmem_acquire(w, block * 8, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr), "host lease");
        if (round != 0) bad += cpu_wrong(w, block, b * block, round);
        cpu_set(w, block, b * block, round + 1);
        must(vmem_release(w, block * 8, nullptr), "host release");
      } else {
        must(acquire(w, block, VMEM_READ | VMEM_WRITE, s, device), "lease");
        if (round != 0) app_->check(s, w, block, b * block, round);
        app_->set(s, w, block, b * block, round + 1);
        must(release(w, block, s), "release");
        // Leases order a block's moves, not the kernels of two streams.
        if (turn % 3 != 0 && !app_->synchronize(s).ok()) ++bad;
      }
      if (turn % 7 == 0) must(vmem_evict(w, block * 8, turn % 2 == 0 ? VMEM_SSD : VMEM_HOST), "evict");
      if (turn % 11 == 0) must(vmem_prefetch(w, block * 8, turn % 3 - 2, nullptr), "prefetch");
      if (turn % 13 == 0) must(vmem_sync(w, block * 8), "sync");
      if (turn % 17 == 0) must(vmem_advise(w, block * 8, VMEM_ADVISE_SET_READ_MOSTLY + turn % 2, 0), "advise");
      if (turn % 29 == 0) {
        vmem::region other(6 * kMiB, 0);
        other.view<uint64_t>()[5] = turn;
        other.prefetch(0);
        if (s != nullptr) {
          must(acquire(words(other), other.size() / 8, VMEM_READ | VMEM_WRITE, s, device), "lease of another region");
          app_->set(s, words(other), other.size() / 8, 0, 9);
          must(release(words(other), other.size() / 8, s), "release of another region");
        }
      }  // freed with work in flight
      ++all_turns;
    }
  };
  std::vector<void*> s;
  for (int i = 0; i < 4; ++i) s.push_back(stream(i % devices_));
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 4; ++i) threads.emplace_back(party, i + 1, s[i], static_cast<int>(i) % devices_);
  for (unsigned i = 4; i < 8; ++i) threads.emplace_back(party, i + 1, nullptr, 0);
  for (std::thread& t : threads) t.join();
  for (void* one : s) ASSERT_TRUE(app_->synchronize(one).ok());
  EXPECT_EQ(bad, 0u);
  EXPECT_EQ(app_->wrong(), 0u);
  for (size_t k = 0; k < blocks; ++k) {
    if (rounds[k] == 0) continue;
    ASSERT_EQ(cpu_wrong(words(r) + k * block, block, k * block, rounds[k]), 0u) << k;
  }
  const auto v = vmem::stats();
  std::printf("%zu turns, %llu MiB in, %llu MiB out, %llu MiB read, %llu MiB written, %llu faults\n", all_turns.load(),
              static_cast<unsigned long long>(v.host_to_device_bytes >> 20),
              static_cast<unsigned long long>(v.device_to_host_bytes >> 20),
              static_cast<unsigned long long>(v.read_bytes >> 20), static_cast<unsigned long long>(v.write_bytes >> 20),
              static_cast<unsigned long long>(v.faults));
}

TEST_P(DeviceTier, BlocksMoveBetweenDevicesByLeases) {
  if (devices_ < 2) GTEST_SKIP() << "one device";
  start();
  vmem::region r(16 * kMiB, 0);
  const size_t n = r.size() / 8;
  std::vector<void*> s;
  for (int d = 0; d < devices_; ++d) s.push_back(stream(d));
  uint64_t round = 0;
  for (int turn = 0; turn < 3 * devices_; ++turn) {
    const int d = turn % devices_;
    VMEM_DO(acquire(words(r), n, VMEM_READ | VMEM_WRITE, s[static_cast<size_t>(d)], d));
    if (round != 0) app_->check(s[static_cast<size_t>(d)], words(r), n, 0, round);
    app_->set(s[static_cast<size_t>(d)], words(r), n, 0, ++round);
    if (turn % 2 == 0) {
      EXPECT_EQ(acquire(words(r), 8, VMEM_READ, s[static_cast<size_t>((d + 1) % devices_)], (d + 1) % devices_),
                -EBUSY);
    }
    VMEM_DO(release(words(r), n, s[static_cast<size_t>(d)]));
    within_budget(d);
  }
  EXPECT_EQ(acquire(words(r), 8, VMEM_READ, s[1], 0), -EINVAL) << "a stream of another device";
  for (void* one : s) ASSERT_TRUE(app_->synchronize(one).ok());
  EXPECT_EQ(cpu_wrong(words(r), n, 0, round), 0u);
  EXPECT_EQ(app_->wrong(), 0u);
}

// Until the last byte has been moved, both devices hold the block.
TEST_P(DeviceTier, ABlockOnItsWayBetweenDevicesCountsForBoth) {
  if (devices_ < 2) GTEST_SKIP() << "one device";
  start();
  vmem::region r(8 * kMiB, 0);
  const size_t n = r.size() / 8;
  void* s[] = {stream(0), stream(1)};
  VMEM_DO(acquire(words(r), n, VMEM_READ | VMEM_WRITE, s[0], 0));
  app_->set(s[0], words(r), n, 0, 1);
  VMEM_DO(release(words(r), n, s[0]));
  ASSERT_TRUE(app_->synchronize(s[0]).ok());
  on_its_way_ = false;
  vmem::core::step_hook.store([](const char* step) {
    if (std::strcmp(step, "device.migrating") != 0) return;
    on_its_way_ = true;
    while (on_its_way_) std::this_thread::yield();
  });
  VMEM_DO(vmem_prefetch(r.data(), r.size(), 1, nullptr));
  while (!on_its_way_) std::this_thread::yield();
  EXPECT_EQ(device_stats(0).used_bytes, r.size());
  EXPECT_EQ(device_stats(1).used_bytes, r.size());
  vmem::core::step_hook.store(nullptr);
  on_its_way_ = false;
  EXPECT_TRUE(until([&] { return device_stats(0).used_bytes == 0; }));
  EXPECT_EQ(device_stats(1).used_bytes, r.size());
  EXPECT_EQ(device_stats(1).in_bytes, r.size());
  VMEM_DO(acquire(words(r), n, VMEM_READ, s[1], 1));
  app_->check(s[1], words(r), n, 0, 1);
  VMEM_DO(release(words(r), n, s[1]));
  ASSERT_TRUE(app_->synchronize(s[1]).ok());
  EXPECT_EQ(app_->wrong(), 0u);
}

TEST_P(DeviceTierLoss, ALostDeviceIsAnErrorWithWordsAndNothingHangs) {
  start();
  vmem::region r(32 * kMiB, 0), other(8 * kMiB, VMEM_HOST_ONLY);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  r.evict();
  void* s = stream();
  VMEM_DO(acquire(words(r), n / 2, VMEM_READ, s));
  app_->check(s, words(r), n / 2, 0, 1);
  VMEM_DO(release(words(r), n / 2, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  LogLines log;
  app_->lose(0);
  EXPECT_EQ(acquire(words(r) + n / 2, n / 2, VMEM_READ, s), -EIO);
  EXPECT_GT(std::string(vmem_last_error()).size(), 20u);
  EXPECT_EQ(cpu_wrong(words(r) + n / 2, n / 2, n / 2, 1), 0u) << "what was elsewhere is there";
  words(other)[0] = 1;
  other.evict();
  EXPECT_EQ(words(other)[0], 1u);
}

}  // namespace systest
