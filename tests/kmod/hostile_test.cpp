// What a user with /dev/vmem open may try against others: to keep a dead task, a lock or a frozen group waiting, to use
// memory that has failed. The time that a fault may wait is left at 30 s, so that a wait shows; what must end, ends
// long before.
#include <linux/futex.h>
#include <sys/syscall.h>

#include "kmod/context.h"

#ifndef MADV_HWPOISON
#define MADV_HWPOISON 100
#endif

namespace kmod_test {
namespace {

constexpr double kSoon = 10;  // seconds: a third of what a fault may wait

bool put(const std::string& path, const std::string& value) {
  std::ofstream out(path);
  out << value;
  return out.flush().good();
}
std::string text(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

class KmodHostile : public Kmod {
 protected:
  KmodHostile() : timeout_("fault_timeout_ms", 30000) {}

 private:
  KnobGuard timeout_;
};

TEST_F(KmodHostile, AKilledTaskWhoseRobustListLeadsIntoAnAbsentBlockIsGone) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    Context c;
    Pair p(c, 1, kPage);
    static robust_list_head head;
    head.list.next = reinterpret_cast<robust_list*>(p.blocks);
    head.futex_offset = 64;
    syscall(SYS_set_robust_list, &head, sizeof head);
    if (write(ends[1], "x", 1) != 1) _exit(1);
    for (;;) pause();
  }
  char ready = 0;
  ASSERT_EQ(read(ends[0], &ready, 1), 1);
  const double start = now();
  kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_LT(now() - start, kSoon) << "a task that exits waited for a block";
  close(ends[0]);
  close(ends[1]);
}

TEST_F(KmodHostile, AGroupOfProcessesFreezesAlthoughOneWaitsInASystemCall) {
  const std::string group = "/sys/fs/cgroup/vmem-frozen";
  if (mkdir(group.c_str(), 0755) != 0) GTEST_SKIP() << "no control groups here";
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (!put(group + "/cgroup.procs", "0")) _exit(1);
    Context c;
    Pair p(c, 1, kPage);
    _exit(write(ends[1], p.blocks, 8) == -1 && errno == EFAULT ? 0 : 2);
  }
  const uint64_t waits = knob("waits");
  // Where such a wait is refused there is nothing to freeze but a process that has ended.
  eventually([&] { return knob("waits") > waits || waitpid(child, nullptr, WNOHANG | WNOWAIT) == child; });
  const double start = now();
  ASSERT_TRUE(put(group + "/cgroup.freeze", "1"));
  while (text(group + "/cgroup.events").find("frozen 1") == std::string::npos && now() - start < 2 * kSoon)
    usleep(10000);
  EXPECT_LT(now() - start, kSoon) << "a wait inside a system call keeps the group from freezing";
  EXPECT_TRUE(put(group + "/cgroup.freeze", "0"));
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "the call that waited says EFAULT";
  EXPECT_TRUE(eventually([&] { return rmdir(group.c_str()) == 0; }));
  close(ends[0]);
  close(ends[1]);
}

// /proc/PID/mem keeps mmap_lock while it asks for a page, however often it asks.
TEST_F(KmodHostile, AReadThroughProcMemDoesNotKeepMmapLock) {
  Context c;
  Pair p(c, 2, kPage);
  ASSERT_EQ(c.install(p.block(1), p.frame(1)), 0);
  p.word(1) = 7;
  const std::string path = "/proc/" + std::to_string(getpid()) + "/mem";
  const double start = now();
  std::atomic<bool> done{false};
  const pid_t other = fork();
  if (other == 0) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    uint64_t value = 0;
    if (fd < 0 || pread(fd, &value, 8, static_cast<off_t>(reinterpret_cast<uintptr_t>(p.blocks + kPage))) != 8 ||
        value != 7)
      _exit(1);
    _exit(pread(fd, &value, 8, static_cast<off_t>(reinterpret_cast<uintptr_t>(p.blocks))) == -1 ? 0 : 2);
  }
  int status = 0;
  std::thread writer([&] {
    while (!done) {
      void* m = mmap(nullptr, kPage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      munmap(m, kPage);
      usleep(1000);
    }
  });
  ASSERT_EQ(waitpid(other, &status, 0), other);
  done = true;
  writer.join();
  EXPECT_EQ(status, 0) << "a present block is read, an absent one is an error";
  const int self = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  uint64_t value = 0;
  EXPECT_EQ(pread(self, &value, 8, static_cast<off_t>(reinterpret_cast<uintptr_t>(p.blocks))), -1);
  close(self);
  EXPECT_LT(now() - start, kSoon);
}

// Errors in the memory of frames, large ones and small ones, wherever the frame is.
TEST_F(KmodHostile, AMemoryErrorIsSigbusForWhoTouchesItAndItsFrameIsRetired) {
  for (const size_t unit : {kPage, kHuge}) {
    SCOPED_TRACE(unit);
    Context c;
    Pair p(c, 3, unit);
    const size_t at = unit / kPage / 2 * kPage;
    for (uint32_t i = 0; i < 3; ++i) p.frame_word(i, at) = i;
    ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
    ASSERT_EQ(c.install(p.block(1), p.frame(1)), 0);
    p.word(1, at) = 1;  // mapped; block 0 is not
    const uint64_t broken = knob("broken_bytes");
    for (uint32_t i = 0; i < 3; ++i) {
      if (madvise(p.frames + i * unit + at, kPage, MADV_HWPOISON) != 0 && errno == EINVAL)
        GTEST_SKIP() << "a kernel without memory failure handling";
    }
    EXPECT_EQ(load(&p.word(0, at)), SIGBUS) << "not mapped before";
    EXPECT_EQ(c.install(p.block(2), p.frame(2)), -EHWPOISON) << "free";
    for (uint32_t i = 0; i < 2; ++i) {
      EXPECT_EQ(c.remove(p.block(i)), 0) << i;
      EXPECT_EQ(c.install(p.block(i), p.frame(i)), -EHWPOISON) << i;
    }
    munmap(p.frames, 3 * unit);
    p.frames = c.map(p.pool, 3 * unit);
    EXPECT_EQ(load(&p.frame_word(1, at)), SIGBUS);
    EXPECT_EQ(c.release(p.pool, 3), 0);
    EXPECT_EQ(knob("broken_bytes"), broken + 3 * unit);
    ASSERT_EQ(c.populate(p.pool, 3), 0) << "the slots are as good as new";
    ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
    EXPECT_EQ(p.word(0, at), 0u);
  }
}

}  // namespace kmod_test
