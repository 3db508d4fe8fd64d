// The application, its kernels and the fixture for the promises of the device tier through the C
// API, with data four times the device budget. The tests are in device_suite.h.
#pragma once

#include <unistd.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "common/patience.h"
#include "core/step.h"
#include "support.h"

namespace systest {

// The application's streams and kernels, all asynchronous.
class GpuApp {
 public:
  virtual ~GpuApp() = default;
  // Called before vmem_init(): returns the number of devices, and registers the simulated ones.
  virtual int prepare() = 0;
  virtual void* stream(int device) = 0;
  virtual void destroy(void* stream) = 0;
  // Sets words[i] = stamp(first + i, round) where first + i is a multiple of kStampStride.
  virtual void set(void* stream, uint64_t* words, size_t count, uint64_t first, uint64_t round) = 0;
  // Counts words that are not stamp(first + i, round).
  virtual void check(void* stream, const uint64_t* words, size_t count, uint64_t first, uint64_t round) = 0;
  // Counts words that are not 0.
  virtual void check_zero(void* stream, const uint64_t* words, size_t count) = 0;
  virtual void stand_still(void* stream, std::atomic<uint32_t>* gate) = 0;
  // Returns a word of memory that stand_still() can read.
  virtual std::atomic<uint32_t>* gate() = 0;
  virtual vmem::core::Status synchronize(void* stream) = 0;
  // The total of all checks whose streams have been synchronised.
  virtual uint64_t wrong() = 0;
  virtual void capture(void* stream, bool on) = 0;
  virtual void lose(int device) = 0;
  // Returns whether blocks without room on one device may spill to the other.
  virtual bool linked(int a, int b) = 0;
  // Returns the accesses that a simulated device saw and that no correct program makes.
  virtual std::vector<std::string> violations() { return {}; }
};

struct GpuBackend {
  const char* name;
  std::unique_ptr<GpuApp> (*make)(std::string* skip);
  const char* setting = nullptr;  // for the setting `device`; null: the name
  bool own_page_tables = false;   // the CPU does not see the devices' memory directly
  const char* device() const { return setting != nullptr ? setting : name; }
};
inline void PrintTo(const GpuBackend& backend, std::ostream* os) {
  *os << backend.name;
}

inline constexpr size_t kMiB = 1 << 20;
// Only words whose index is a multiple of this have stamps.
inline const size_t kStampStride = kSanitized ? 13 : 1;
inline size_t first_stamped(uint64_t first) {
  return (kStampStride - first % kStampStride) % kStampStride;
}

#define VMEM_DO(call) ASSERT_EQ((call), 0) << vmem_last_error()

class DeviceTier : public SystemTest, public ::testing::WithParamInterface<GpuBackend> {
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
    Settings settings{{"device", GetParam().device()}, {"host_budget", "96MiB"}};
    settings.insert(settings.end(), more.begin(), more.end());
    configure(settings);
  }
  void* stream(int device = 0) {
    streams_.push_back(app_->stream(device));
    return streams_.back();
  }
  static uint64_t* words(vmem::region& r) { return static_cast<uint64_t*>(r.data()); }
  // The CPU's counterparts of set() and check().
  static void cpu_set(uint64_t* w, size_t count, uint64_t first, uint64_t round) {
    for (size_t i = first_stamped(first); i < count; i += kStampStride) w[i] = stamp(first + i, round);
  }
  static size_t cpu_wrong(const uint64_t* w, size_t count, uint64_t first, uint64_t round) {
    size_t wrong = 0;
    for (size_t i = first_stamped(first); i < count; i += kStampStride) wrong += w[i] != stamp(first + i, round);
    return wrong;
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

  // A step hook: stops an isolated block on its way out.
  static void stay_taken(const char* step) {
    if (std::strcmp(step, "evict.taken") != 0) return;
    on_its_way_ = true;
    while (on_its_way_) std::this_thread::yield();
  }
  // A step hook: delays the preparation of a block until the thread that touches it sleeps in its
  // page fault, up to a limit.
  static void wait_for_touch(const char* step) {
    // The count of faults would not do: the fault of the previous block may be counted late.
    if (std::strcmp(step, "fault.read") == 0) ++reads_;
    if (std::strcmp(step, "device.preparing") != 0) return;
    const uint64_t before = reads_;
    on_its_way_ = true;
    int looks = 0;
    vmem::test::eventually([&] { return (looks = reads_ != before && in_page_fault(toucher_) ? looks + 1 : 0) == 3; },
                           std::chrono::seconds(4), std::chrono::milliseconds(1));
  }
  // Returns whether the thread sleeps, and not in a system call; also true if the kernel does not
  // tell.
  static bool in_page_fault(pid_t thread) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/syscall");
    std::string word;
    return !(file >> word) || word == "-1";
  }
  // With that hook: sends each block from the SSD to the device, and touches it while its
  // preparation waits.
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
  // Sends one block.
  static void send(const uint64_t* w, size_t count) {
    on_its_way_ = false;
    toucher_ = gettid();
    faults_ = vmem::stats().faults;
    VMEM_DO(vmem_prefetch(w, count * 8, 0, nullptr));
    while (!on_its_way_) std::this_thread::yield();
  }
  static inline std::atomic<bool> on_its_way_{false};
  static inline std::atomic<uint64_t> faults_{0};
  static inline std::atomic<uint64_t> reads_{0};  // reports of the trap
  static inline std::atomic<pid_t> toucher_{0};

  std::unique_ptr<GpuApp> app_;
  int devices_ = 0;
  std::vector<void*> streams_;
};

class DeviceTierLoss : public DeviceTier {};

}  // namespace systest
