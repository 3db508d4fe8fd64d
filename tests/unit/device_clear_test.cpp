// Zeroing by a kernel that the host can call off: the host's side, with threads in place of the
// device's streams.
#include <gtest/gtest.h>

#ifdef VMEM_HAVE_CUDA
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/patience.h"
#include "device/cuda/cuda_clear.h"

namespace {

using vmem::device::cuda::Clearing;
using vmem::device::cuda::Driver;
using Part = Clearing::Part;

constexpr size_t kSize = size_t{256} << 10;
constexpr std::chrono::milliseconds kPatience{5};

// Runs its work in order.
class Stream {
 public:
  Stream() : thread_([this] { run(); }) {}
  ~Stream() {
    put(nullptr);
    thread_.join();
  }
  void put(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return queue_.empty();
  }

 private:
  void run() {
    for (std::unique_lock lock(mutex_);;) {
      changed_.wait(lock, [this] { return !queue_.empty(); });
      const std::function<void()> work = queue_.front();
      lock.unlock();
      if (work != nullptr) work();
      lock.lock();
      queue_.pop_front();
      if (work == nullptr) return;
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

// State of the fake device, and the calls that its driver refuses.
struct Device {
  std::set<std::unique_ptr<Stream>> streams;
  std::atomic<int> free_blocks{1 << 30};  // how many thread blocks may begin
  std::atomic<int> launches{0}, launches_until_error{1 << 30};
  std::atomic<bool> records{true}, orders{true}, loads{true};
  std::function<void()> at_begun;   // by a thread block, before it checks whether it may clear
  std::function<void()> at_clear;   // by the thread blocks that may clear, before they do
  std::function<void()> at_record;  // by the host
};
std::unique_ptr<Device> device;

struct Row {
  uint64_t at, share;
};

// Runs as many thread blocks at once as may begin.
void run_kernel(uint32_t blocks, uint32_t* words, uint32_t generation, std::span<const Row> rows) {
  std::vector<std::pair<uint32_t, bool>> begun;
  const auto end_all = [&] {
    if (device->at_clear) device->at_clear();
    for (const auto& [i, may] : begun) {
      for (const Row& row : rows)
        if (may) memset(reinterpret_cast<void*>(row.at + i * row.share), 0, row.share);
      std::atomic_ref(words[1 + i]).store(2 * generation + 1, std::memory_order_release);
      device->free_blocks.fetch_add(1);
    }
    begun.clear();
  };
  for (uint32_t i = 0; i < blocks; ++i) {
    while (device->free_blocks.fetch_sub(1) <= 0) {
      device->free_blocks.fetch_add(1);
      end_all();
      std::this_thread::yield();
    }
    std::atomic_ref(words[1 + i]).exchange(2 * generation, std::memory_order_seq_cst);
    if (device->at_begun) device->at_begun();
    begun.emplace_back(i, std::atomic_ref(words[0]).load(std::memory_order_seq_cst) != generation);
  }
  end_all();
}

Driver fake() {
  Driver d = {};
  d.host_register = [](void*, size_t, unsigned) { return CUDA_SUCCESS; };
  d.host_unregister = [](void*) { return CUDA_SUCCESS; };
  d.stream_priorities = [](int* least, int* greatest) { return *least = *greatest = 0, CUDA_SUCCESS; };
  d.stream_create = [](CUstream* out, unsigned, int) {
    auto stream = std::make_unique<Stream>();
    *out = reinterpret_cast<CUstream>(stream.get());
    device->streams.insert(std::move(stream));
    return CUDA_SUCCESS;
  };
  d.stream_destroy = [](CUstream) { return CUDA_SUCCESS; };
  d.stream_query = [](CUstream s) {
    return reinterpret_cast<Stream*>(s)->idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  };
  d.event_record = [](CUevent e, CUstream s) {
    if (!device->records) return CUDA_ERROR_UNKNOWN;
    if (device->at_record) device->at_record();
    auto* const reached = reinterpret_cast<std::atomic<bool>*>(e);
    reinterpret_cast<Stream*>(s)->put([reached] { reached->store(true); });
    return CUDA_SUCCESS;
  };
  d.stream_wait_event = [](CUstream, CUevent, unsigned) { return device->orders ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN; };
  d.module_load = [](CUmodule*, const void*) { return device->loads ? CUDA_SUCCESS : CUDA_ERROR_INVALID_PTX; };
  d.module_function = [](CUfunction* f, CUmodule, const char*) {
    *f = reinterpret_cast<CUfunction>(8);
    return CUDA_SUCCESS;
  };
  d.module_unload = [](CUmodule) { return CUDA_SUCCESS; };
  d.function_attribute = [](int*, CUfunction_attribute, CUfunction) { return CUDA_SUCCESS; };
  d.launch_kernel = [](CUfunction, unsigned blocks, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       CUstream s, void** p, void**) {
    if (device->launches.fetch_add(1) >= device->launches_until_error) return CUDA_ERROR_LAUNCH_FAILED;
    auto* const words = *static_cast<uint32_t**>(p[0]);
    const auto generation = *static_cast<uint32_t*>(p[1]);
    const auto* const rows = static_cast<const Row*>(p[3]);
    const std::vector<Row> copied(rows, rows + *static_cast<uint32_t*>(p[2]));
    reinterpret_cast<Stream*>(s)->put([=] { run_kernel(blocks, words, generation, copied); });
    return CUDA_SUCCESS;
  };
  return d;
}

class DeviceClear : public ::testing::Test {
 protected:
  void SetUp() override {
    device = std::make_unique<Device>();
    clearing_ = std::make_unique<Clearing>(driver_, kPatience);
    ASSERT_TRUE(clearing_->start());
    fill(1);
  }
  void TearDown() override {
    device->free_blocks = 1 << 30;
    settle();
    EXPECT_TRUE(clearing_->end());
    device.reset();
  }
  void fill(int value) { memset(memory_.data(), value, memory_.size()); }
  Part part(size_t i) { return {reinterpret_cast<uintptr_t>(memory_.data() + i * kSize), kSize}; }
  bool holds(size_t i, int value) const {
    const auto begin = memory_.begin() + static_cast<ptrdiff_t>(i * kSize);
    return std::all_of(begin, begin + kSize, [value](unsigned char c) { return c == value; });
  }
  static void settle() {
    for (const auto& stream : device->streams) ASSERT_TRUE(vmem::test::eventually([&] { return stream->idle(); }));
  }
  static CUevent event(std::atomic<bool>& reached) { return reinterpret_cast<CUevent>(&reached); }
  // Calls clear() until a kernel is launched: after a refusal it refuses for a while.
  bool clear(std::vector<Part> parts, std::atomic<bool>& after) {
    const int before = device->launches;
    bool cleared = false;
    EXPECT_TRUE(vmem::test::eventually([&] {
      cleared = clearing_->clear(
          parts, [this] { return alive_.load(); }, event(after), nullptr);
      return cleared || device->launches > before;
    }));
    return cleared;
  }

  const Driver driver_ = fake();
  std::unique_ptr<Clearing> clearing_;
  std::vector<unsigned char> memory_ = std::vector<unsigned char>(64 * kSize);
  std::atomic<bool> alive_{true};
};

TEST_F(DeviceClear, AllPartsAndNothingElse) {
  std::atomic<bool> after{false};
  // On a busy machine a thread may take longer to begin than clear() waits.
  ASSERT_TRUE(vmem::test::eventually([&] { return clear({part(1), part(3), part(4)}, after); }));
  ASSERT_TRUE(vmem::test::eventually([&] { return after.load(); }));
  for (const size_t i : {1, 3, 4}) EXPECT_TRUE(holds(i, 0)) << i;
  for (const size_t i : {0, 2, 5}) EXPECT_TRUE(holds(i, 1)) << i;
}

TEST_F(DeviceClear, WhatHasNotBegunClearsNothingLater) {
  device->free_blocks = 0;
  std::atomic<bool> after{false};
  EXPECT_FALSE(clear({part(0), part(1)}, after));
  fill(2);
  device->free_blocks = 1 << 30;
  settle();
  EXPECT_TRUE(holds(0, 2) && holds(1, 2));
  EXPECT_FALSE(after) << "nobody waits for it";
}

TEST_F(DeviceClear, WhatHasBegunIsWaitedFor) {
  device->free_blocks = 1;
  std::atomic<int> begun{0};
  device->at_begun = [&] {
    if (++begun == 20) device->free_blocks = -1;  // the one that has begun continues, and no other begins
  };
  std::atomic<bool> after{false};
  EXPECT_FALSE(clear({part(0)}, after));
  fill(2);
  device->free_blocks = 1 << 30;
  settle();
  EXPECT_TRUE(holds(0, 2));
}

// The host calls the kernel off after a thread block has stored that it began and before it checks.
TEST_F(DeviceClear, WhoeverLooksAfterwardsFindsItCalledOff) {
  std::atomic<bool> goes_on{false};
  device->at_begun = [&] {
    while (!goes_on) std::this_thread::yield();
  };
  std::atomic<bool> after{false};
  std::thread later([&] {  // when the host waits for the one that has begun
    EXPECT_TRUE(vmem::test::eventually([] { return device->launches > 0; }));
    std::this_thread::sleep_for(2 * kPatience);
    goes_on = true;
  });
  const bool cleared = clear({part(0), part(1)}, after);
  later.join();
  if (!cleared) fill(2);
  settle();
  EXPECT_TRUE(cleared ? holds(0, 0) && holds(1, 0) : holds(0, 2) && holds(1, 2));
}

TEST_F(DeviceClear, KernelsThatStillWaitAreLeftAloneAndTheirPlaceComesBack) {
  device->free_blocks = 0;
  std::atomic<bool> after{false};
  int tried = 0;
  while (device->launches < 4) {
    EXPECT_FALSE(clear({part(0)}, after));
    ++tried;
  }
  EXPECT_EQ(tried, 4);
  std::this_thread::sleep_for(2 * Clearing::kRest);
  EXPECT_FALSE(clearing_->clear(
      std::vector{part(0)}, [] { return true; }, event(after), nullptr));
  EXPECT_EQ(device->launches, 4) << "no place is left";
  EXPECT_FALSE(clearing_->end()) << "the driver has its memory";
  device->free_blocks = 1 << 30;
  settle();
  for (int i = 0; i < 8; ++i) {
    fill(3);
    after = false;
    ASSERT_TRUE(vmem::test::eventually([&] { return clear({part(0)}, after); }));
    ASSERT_TRUE(vmem::test::eventually([&] { return after.load(); }));
    EXPECT_TRUE(holds(0, 0)) << i;
  }
}

// Another thread's kernel that does not begin must not come between a kernel and its event.
TEST_F(DeviceClear, AnEventWaitsForItsOwnKernelAlone) {
  std::atomic<bool> after{false}, never{false};
  int recorded = 0;
  device->at_record = [&] {
    if (++recorded != 1) return;
    const int before = device->launches;
    device->free_blocks = -(1 << 20);  // also after those of the first have ended
    std::thread other([&] {
      EXPECT_FALSE(clearing_->clear(
          std::vector{part(1)}, [] { return true; }, event(never), nullptr));
    });
    other.join();
    EXPECT_EQ(device->launches, before + 1);
  };
  ASSERT_TRUE(vmem::test::eventually([&] { return clear({part(0)}, after); }));
  EXPECT_TRUE(vmem::test::eventually([&] { return after.load(); })) << "it waits for a kernel that does not begin";
  EXPECT_TRUE(holds(0, 0) && holds(1, 1));
}

TEST_F(DeviceClear, ALaunchOrAnEventThatIsRefusedLeavesNothingUnderWay) {
  device->launches_until_error = 0;
  std::atomic<bool> after{false};
  EXPECT_FALSE(clear({part(0), part(1), part(2)}, after));
  fill(2);
  settle();
  EXPECT_TRUE(holds(0, 2) && holds(1, 2) && holds(2, 2));
  device->launches_until_error = 1 << 30;
  device->records = false;
  EXPECT_FALSE(clear({part(0)}, after));
  fill(3);
  settle();
  EXPECT_TRUE(holds(0, 3));
}

// The whole kernel has begun, and no stream is ordered after it. The caller will make the zeros
// another way: the kernel must not clear them again after another kernel has stored there.
TEST_F(DeviceClear, WhatNoStreamComesAfterIsWaitedFor) {
  std::atomic<bool> goes_on{false}, after{false};
  device->at_clear = [&] {
    while (!goes_on) std::this_thread::yield();
  };
  device->orders = false;
  const CUstream stream = nullptr;
  EXPECT_TRUE(vmem::test::eventually([&] {
    goes_on = false;
    EXPECT_FALSE(clearing_->clear(
        std::vector{part(0)}, [&] { return goes_on = true; }, event(after), &stream));
    return goes_on.exchange(true);
  }));
  fill(2);
  settle();
  EXPECT_TRUE(holds(0, 2));
}

TEST_F(DeviceClear, ALostDeviceIsNotWaitedFor) {
  std::atomic<bool> goes_on{false};
  device->at_begun = [&] {
    while (!goes_on) std::this_thread::yield();
  };
  alive_ = false;
  std::atomic<bool> after{false};
  EXPECT_FALSE(clear({part(0), part(1)}, after)) << "the first thread block never ends";
  goes_on = true;
  settle();
}

TEST_F(DeviceClear, SixtyFourPartsAndWhatDoesNotFit) {
  std::vector<Part> parts;
  for (size_t i = 0; i < 64; ++i) parts.push_back(part(i));
  std::atomic<bool> after{false};
  ASSERT_TRUE(vmem::test::eventually([&] { return clear(parts, after); }));
  ASSERT_TRUE(vmem::test::eventually([&] { return after.load(); }));
  for (size_t i = 0; i < 64; ++i) EXPECT_TRUE(holds(i, 0)) << i;
  const int before = device->launches;
  parts.push_back(part(0));
  EXPECT_FALSE(clearing_->clear(
      parts, [] { return true; }, event(after), nullptr));
  parts.resize(1);
  parts[0].size -= 4096;
  EXPECT_FALSE(clearing_->clear(
      parts, [] { return true; }, event(after), nullptr));
  EXPECT_FALSE(clearing_->clear(
      {}, [] { return true; }, event(after), nullptr));
  EXPECT_EQ(device->launches, before);
}

TEST_F(DeviceClear, ManyThreadsOnADeviceThatIsFullAtTimes) {
  std::atomic<bool> stop{false};
  std::thread filling([&] {
    for (bool full = false; !stop; full = !full) {
      device->free_blocks.fetch_add(full ? 1 << 20 : -(1 << 20));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  device->free_blocks = 1 << 20;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 60; ++round) {
        auto* const bytes = reinterpret_cast<unsigned char*>(part(t).at);
        memset(bytes, 1, kSize);
        std::atomic<bool> after{false};
        const bool cleared = clearing_->clear(
            std::vector{part(t)}, [] { return true; }, event(after), nullptr);
        if (cleared && !vmem::test::eventually([&] { return after.load(); })) ++wrong;
        if (!cleared) memset(bytes, 0, kSize);
        for (size_t i = 0; i < kSize; i += 512) wrong += bytes[i] != 0;
        memset(bytes, 2, kSize);
        std::this_thread::sleep_for(std::chrono::microseconds(500));
        for (size_t i = 0; i < kSize; i += 512) wrong += bytes[i] != 2;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  filling.join();
  EXPECT_EQ(wrong, 0);
}

TEST(DeviceClearStart, WhereTheDriverTakesNoKernelItSaysSo) {
  device = std::make_unique<Device>();
  device->loads = false;
  const Driver driver = fake();
  Clearing clearing(driver);
  EXPECT_FALSE(clearing.start());
  std::atomic<bool> after{false};
  const Part part{4096, kSize};
  EXPECT_FALSE(clearing.clear(
      {&part, 1}, [] { return true; }, reinterpret_cast<CUevent>(&after), nullptr));
  device.reset();
}

// Assembles the kernel for the oldest architecture (sm_75) and for newer ones.
TEST(DeviceClearStart, TheKernelIsCodeForEveryDevice) {
  if (system("command -v ptxas >/dev/null || test -x /usr/local/cuda/bin/ptxas") != 0)
    GTEST_SKIP() << "no ptxas of the CUDA toolkit";
  std::string path = ::testing::TempDir() + "vmem-clear.XXXXXX";
  const int fd = mkstemp(path.data());
  ASSERT_GE(fd, 0);
  FILE* const file = fdopen(fd, "w");
  ASSERT_NE(file, nullptr);
  EXPECT_NE(std::fputs(vmem::device::cuda::kClearKernel, file), EOF);
  ASSERT_EQ(std::fclose(file), 0);
  for (const char* arch : {"sm_75", "sm_80", "sm_90"}) {
    const std::string command =
        std::string("PATH=$PATH:/usr/local/cuda/bin ptxas -arch=") + arch + " " + path + " -o /dev/null 2>&1";
    EXPECT_EQ(system(command.c_str()), 0) << arch;
  }
  unlink(path.c_str());
}

}  // namespace
#else
TEST(DeviceClear, NeedsCuda) {
  GTEST_SKIP() << "built without the CUDA toolkit";
}
#endif
