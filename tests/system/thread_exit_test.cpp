// Memory that the kernel accesses for an ending thread. The kernel does not wait for a block there,
// so that memory has to be leased (docs/reliability.md, "Threads that wait or end").
#include <pthread.h>

#include <atomic>
#include <ctime>
#include <thread>

#include "support.h"

namespace {

using systest::SystemTest;

constexpr size_t kMiB = 1 << 20, kSize = 4 * kMiB;

// While it lives, blocks keep leaving memory.
class Pressure {
 public:
  Pressure()
      : region_(64 * kMiB, VMEM_HOST_ONLY), thread_([this] {
          while (goes_on_) memset(region_.data(), 1, region_.size());
        }) {}
  ~Pressure() {
    goes_on_ = false;
    thread_.join();
  }
  Pressure(const Pressure&) = delete;
  Pressure& operator=(const Pressure&) = delete;

 private:
  vmem::region region_;
  std::atomic<bool> goes_on_{true};
  std::thread thread_;
};

class ThreadExit : public SystemTest, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    configure({{"device", "none"}, {"host_budget", "24MiB"}, {"block_size", GetParam()}});
  }
};
INSTANTIATE_TEST_SUITE_P(Blocks, ThreadExit, testing::Values("4KiB", "64KiB", "2MiB"));

void make_robust(pthread_mutex_t* mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  EXPECT_EQ(pthread_mutex_init(mutex, &attributes), 0);
}

int lock_for_seconds(pthread_mutex_t* mutex, time_t seconds) {
  timespec end{};
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += static_cast<time_t>(vmem::test::patience()) * seconds;
  return pthread_mutex_timedlock(mutex, &end);
}

TEST_P(ThreadExit, ARobustMutexInALeasedBlockTellsOfItsOwnersEnd) {
  if (IsSkipped()) return;
  vmem::region region(kSize, VMEM_HOST_ONLY);
  auto* const inside = reinterpret_cast<pthread_mutex_t*>(region.view<char>().data() + 128);
  pthread_mutex_t outside;
  make_robust(inside);
  make_robust(&outside);
  ASSERT_EQ(vmem_acquire(inside, sizeof *inside, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr), 0) << vmem_last_error();
  const Pressure pressure;
  std::thread([&] {
    EXPECT_EQ(pthread_mutex_lock(&outside), 0);  // comes after it in the thread's list
    EXPECT_EQ(pthread_mutex_lock(inside), 0);
    vmem_evict(region.data(), region.size(), VMEM_SSD);
  }).join();
  EXPECT_EQ(lock_for_seconds(inside, 20), EOWNERDEAD);
  EXPECT_EQ(lock_for_seconds(&outside, 20), EOWNERDEAD);
  EXPECT_EQ(vmem_release(inside, sizeof *inside, nullptr), 0) << vmem_last_error();
}

// The C library keeps its data about the thread at the end of its stack: a thread that joins it
// waits for a word there.
TEST_P(ThreadExit, AThreadWhoseStackLiesInALeasedRegionEnds) {
  if (IsSkipped()) return;
  if (systest::kSanitized) GTEST_SKIP() << "a sanitizer keeps stacks itself";
  vmem::region stack(kSize, VMEM_HOST_ONLY);
  ASSERT_EQ(vmem_acquire(stack.data(), kSize, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr), 0) << vmem_last_error();
  const Pressure pressure;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  ASSERT_EQ(pthread_attr_setstack(&attributes, stack.data(), kSize), 0);
  for (int i = 0; i < 20; ++i) {
    pthread_t thread;
    ASSERT_EQ(pthread_create(
                  &thread, &attributes,
                  [](void*) -> void* {
                    volatile char deep[kSize / 2];
                    for (size_t at = 0; at < sizeof deep; at += 4096) deep[at] = 1;
                    return nullptr;
                  },
                  nullptr),
              0);
    vmem_evict(stack.data(), kSize, VMEM_SSD);
    ASSERT_EQ(pthread_join(thread, nullptr), 0);
  }
  pthread_attr_destroy(&attributes);
  EXPECT_EQ(vmem_release(stack.data(), kSize, nullptr), 0) << vmem_last_error();
}

}  // namespace
