// Faults that cannot drop mmap_lock, in a process that may have a device (it has an mmu notifier),
// while another thread wants the lock for writing. The fault does not delay that thread for long; a
// device, which drops the lock, may wait as usual.
#include <mutex>

#include "kmod/context.h"
#include "kmod/peek/peek.h"

namespace kmod_test {
namespace {

// Far more than a lock may be held, far less than a fault may wait.
const double kSoon = 10.0 * vmem::test::patience();
// Longer than a lock may be held.
constexpr double kLong = 2.5;

// Maps and unmaps memory until destroyed, which takes mmap_lock for writing.
class Writer {
 public:
  Writer()
      : thread_([this] {
          while (!done_) {
            const double start = now();
            void* m = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (m != MAP_FAILED) munmap(m, kPage);
            longest_ = std::max(longest_.load(), now() - start);
          }
        }) {}
  // Returns the seconds of the longest pair of the two calls.
  double end() {
    done_ = true;
    if (thread_.joinable()) thread_.join();
    return longest_;
  }
  ~Writer() { end(); }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

 private:
  std::atomic<bool> done_{false};
  std::atomic<double> longest_{0};
  std::thread thread_;
};

}  // namespace

class KmodHeld : public Kmod {
 protected:
  void SetUp() override {
    Kmod::SetUp();
    if (IsSkipped()) return;
    device_ = open("/dev/vmem-peek", O_RDWR | O_CLOEXEC);
    if (device_ < 0) GTEST_SKIP() << "the module peek is not loaded";
    old_ = knob("fault_timeout_ms");
    ASSERT_EQ(set_knob("fault_timeout_ms", std::to_string(30000ul * vmem::test::patience())), 0);
  }
  void TearDown() override {
    if (device_ < 0) return;
    close(device_);
    EXPECT_EQ(set_knob("fault_timeout_ms", std::to_string(old_)), 0);
  }
  // Lets a kernel thread read one of our words.
  peek look(const volatile uint64_t* word, uint32_t how) const {
    peek p{reinterpret_cast<uintptr_t>(word), 0, 0, how | PEEK_WITH_NOTIFIER, 0};
    EXPECT_EQ(call(device_, PEEK, &p), 0);
    return p;
  }

 private:
  int device_ = -1;
  uint64_t old_ = 0;
};

TEST_F(KmodHeld, AThreadThatDoesNotLetGoKeepsMmapLockFromNoWriterForLong) {
  Context c(true, false);
  Pair p(c, 1, kPage);
  const uint64_t timeouts = knob("timeouts");
  Writer writer;
  const peek absent = look(&p.word(0), 0);
  EXPECT_EQ(absent.result, -EFAULT);
  EXPECT_EQ(knob("timeouts"), timeouts) << "it held the lock until the fault's time had passed";
  EXPECT_LT(static_cast<double>(absent.held_us) / 1e6, kSoon);
  EXPECT_LT(writer.end(), kSoon);
}

TEST_F(KmodHeld, AnswersThatBringNoBlockGiveNobodyTheLockForLonger) {
  Context c(true, false);
  Pair p(c, 1, kPage);
  const uint64_t timeouts = knob("timeouts");
  const double end = now() + 2 * kSoon;
  // The server wakes the waiting thread, or shows the block for a moment, again and again.
  for (const bool show : {false, true}) {
    SCOPED_TRACE(show);
    Server server(c, [&](const vmem_event& e) {
      if (now() > end) return;
      if (show) {
        (void)c.install(e.offset, p.frame(0));
        (void)c.remove(e.offset);
      } else {
        (void)c.op(VMEM_OP_WAKE, e.offset);
      }
    });
    Writer writer;
    const peek absent = look(&p.word(0), 0);
    if (!show) {
      EXPECT_EQ(absent.result, -EFAULT);
    }
    EXPECT_EQ(knob("timeouts"), timeouts);
    EXPECT_LT(static_cast<double>(absent.held_us) / 1e6, kSoon);
    EXPECT_LT(writer.end(), kSoon);
  }
}

TEST_F(KmodHeld, ADeviceThatLetsGoWaitsForASlowBlockAlthoughManyWantToWrite) {
  for (const bool wake : {false, true}) {
    SCOPED_TRACE(wake);
    Context c(true, false);
    Pair p(c, 1, kPage);
    p.frame_word(0) = 7;
    const double end = now() + kLong;
    Server server(c, [&](const vmem_event& e) {
      if (wake && now() < end) {
        (void)c.op(VMEM_OP_WAKE, e.offset);
        return;
      }
      if (!wake) usleep(static_cast<useconds_t>(kLong * 1e6));
      EXPECT_EQ(c.install(e.offset, p.frame(0)), 0);
    });
    Writer one, two, three;
    const peek late = look(&p.word(0), PEEK_LETS_GO);
    EXPECT_EQ(late.result, 0);
    EXPECT_EQ(late.value, 7u);
    EXPECT_GT(static_cast<double>(late.held_us) / 1e6, kLong / 2);
  }
}

// One fault does not drop the lock, and gets an error. The other one is from a device of the same
// process, and is served.
TEST_F(KmodHeld, ADeviceIsServedAlthoughAnotherFaultOfItsProcessKeptTheLockForTooLong) {
  const int mem = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  if (mem < 0) GTEST_SKIP() << "no /proc/self/mem";
  Context c(true, false);
  Pair p(c, 2, kPage);
  p.frame_word(0) = 7;
  const uint64_t timeouts = knob("timeouts");
  Writer writer;
  peek device{};
  std::thread on_device([&] { device = look(&p.word(0), PEEK_LETS_GO); });
  vmem_event e{};
  EXPECT_TRUE(c.event(&e));
  EXPECT_EQ(e.offset, p.block(0));
  uint64_t value = 0;
  for (int i = 0; i < 3; ++i) {
    const double start = now();
    EXPECT_EQ(pread(mem, &value, 8, static_cast<off_t>(reinterpret_cast<uintptr_t>(&p.word(1)))), -1);
    EXPECT_LT(now() - start, kSoon);
  }
  EXPECT_EQ(knob("timeouts"), timeouts);
  EXPECT_EQ(c.install(p.block(0), p.frame(0)), 0);
  on_device.join();
  EXPECT_EQ(device.result, 0);
  EXPECT_EQ(device.value, 7u);
  EXPECT_LT(writer.end(), kSoon);
  close(mem);
}

// A suspend first freezes all tasks, and fails if one does not freeze. A task that waits here with
// mmap_lock held must therefore not be frozen: a task that waits for the lock could not freeze. The
// test tries only this first step.
TEST_F(KmodHeld, AMachineFreezesForASuspendAlthoughTasksWait) {
  const std::string test = "/sys/power/pm_test", delay = "/sys/module/suspend/parameters/pm_test_delay";
  if (text(test).find("freezer") == std::string::npos) GTEST_SKIP() << "this kernel cannot try a suspend: no " << test;
  const std::string seconds = text(delay);
  Context c;
  if ((c.features & VMEM_FEATURE_KERNEL_FAULTS) == 0) GTEST_SKIP() << "this user may not let system calls wait";
  Pair p(c, 3, kPage);
  p.frame_word(1) = 7;
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const uint64_t waits = knob("waits");
  std::thread user([&] { touch(p.word(0)); });
  std::thread caller([&] { EXPECT_EQ(write(ends[1], p.blocks + kPage, 8), 8) << strerror(errno); });
  EXPECT_TRUE(vmem::test::eventually([&] { return knob("waits") >= waits + 2; }, std::chrono::seconds(10)));
  std::atomic<bool> done{false};
  std::thread holder([&] {  // the longest hold of mmap_lock, in each of its waits
    const int mem = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    uint64_t value = 0;
    while (!done) {
      EXPECT_EQ(pread(mem, &value, 8, static_cast<off_t>(reinterpret_cast<uintptr_t>(&p.word(2)))), -1);
    }
    close(mem);
  });
  Writer writer;
  EXPECT_TRUE(put(delay, "1"));
  EXPECT_TRUE(put(test, "freezer"));
  for (int i = 0; i < 5; ++i) {
    usleep(100000);
    const double start = now();
    EXPECT_TRUE(put("/sys/power/state", "freeze")) << "a task that waits keeps the machine from being suspended";
    printf("[   note   ] frozen for a second and thawed after %.2f s\n", now() - start);
  }
  EXPECT_TRUE(put(test, "none"));
  EXPECT_TRUE(put(delay, seconds));
  done = true;
  holder.join();
  EXPECT_EQ(c.install(p.block(0), p.frame(0)), 0);
  EXPECT_EQ(c.install(p.block(1), p.frame(1)), 0);
  user.join();
  caller.join();
  uint64_t value = 0;
  EXPECT_EQ(read(ends[0], &value, sizeof value), 8);
  EXPECT_EQ(value, 7u);
  close(ends[0]);
  close(ends[1]);
}

}  // namespace kmod_test
