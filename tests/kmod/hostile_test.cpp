// Attacks of a user who has /dev/vmem open on other users: making a dying task, a lock or a frozen
// group wait, or using more than his share. Faults may wait for 30 s here, so that a wait shows;
// all tested operations must end much sooner.
#include <linux/futex.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include <optional>

#include "kmod/context.h"
#include "kmod/peek/peek.h"

namespace kmod_test {
namespace {

// Seconds; a third of the time that a fault may wait. This is no requirement on speed: it
// distinguishes waiting from not waiting.
const double kSoon = 10.0 * vmem::test::patience();

}  // namespace

class KmodHostile : public Kmod {
 protected:
  void SetUp() override {
    Kmod::SetUp();
    if (IsSkipped()) return;
    if (getuid() != 0) GTEST_SKIP() << "needs root, to become others and to turn knobs";
    chmod(kDevice, 0666);
    timeout_.emplace("fault_timeout_ms", 30000ul * vmem::test::patience());
  }
  void TearDown() override {
    if (timeout_) chmod(kDevice, 0600);
  }

 private:
  std::optional<KnobGuard> timeout_;
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

// The module frees its blocks one by one, and each frame with its entries.
TEST_F(KmodHostile, AKilledTaskThatHoldsThousandsOfBlocksIsGone) {
  constexpr uint32_t kBlocks = 8192;
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const uint64_t before = knob("frame_bytes");
  const pid_t child = fork();
  if (child == 0) {
    Context c;
    Pair p(c, kBlocks, kPage);
    std::vector<vmem_op> ops(1024);
    for (uint32_t i = 0; i < kBlocks; ++i) {
      vmem_op& op = ops[i % ops.size()];
      op = {};
      op.op = VMEM_OP_INSTALL;
      op.block = p.block(i);
      op.frame = p.frame(i);
      if (i % ops.size() == ops.size() - 1 && c.batch(&ops) != 0) _exit(1);
    }
    for (uint32_t i = 0; i < kBlocks; ++i) p.word(i) = i;
    if (write(ends[1], "x", 1) != 1) _exit(2);
    for (;;) pause();
  }
  close(ends[1]);
  char ready = 0;
  ASSERT_EQ(read(ends[0], &ready, 1), 1);
  const double start = now();
  kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  printf("[   note   ] %u blocks: gone after %.2f s\n", kBlocks, now() - start);
  EXPECT_LT(now() - start, kSoon);
  EXPECT_TRUE(eventually([&] { return knob("frame_bytes") == before; }));
  close(ends[0]);
}

// A call that takes many blocks out of many mappings ends when its caller is killed, and leaves the
// rest unchanged. It once took 45 s.
TEST_F(KmodHostile, AKilledTaskThatTakesBlocksOutOfThousandsOfMappingsIsGone) {
  constexpr uint32_t kBlocks = 1024;
  const uint32_t mappings = checked_kernel() ? 6000 : 24000;
  Context c;
  Pair p(c, 2 * kBlocks, kPage);
  std::vector<vmem_op> ops(kBlocks);
  for (uint32_t i = 0; i < kBlocks; ++i) {  // every other one, so that each is unmapped separately
    ASSERT_EQ(c.install(p.block(2 * i), p.frame(2 * i)), 0);
    ops[i].op = VMEM_OP_REMOVE;
    ops[i].block = p.block(2 * i);
  }
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    for (uint32_t i = 0; i < mappings; ++i)
      if (mmap(nullptr, 2 * kBlocks * kPage, PROT_READ, MAP_SHARED, c.fd, static_cast<off_t>(p.region)) == MAP_FAILED)
        _exit(1);
    if (write(ends[1], "x", 1) != 1) _exit(2);
    _exit(c.batch(&ops));
  }
  close(ends[1]);
  char ready = 0;
  ASSERT_EQ(read(ends[0], &ready, 1), 1);
  close(ends[0]);
  usleep(200000);  // it is in the call, and has not been for long
  const double start = now();
  kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  printf("[   note   ] %u blocks in %u mappings: gone after %.2f s\n", kBlocks, mappings, now() - start);
  EXPECT_TRUE(WIFSIGNALED(status)) << "the call had ended by itself";
  EXPECT_LT(now() - start, kSoon);
  for (uint32_t i = 0; i < kBlocks; ++i) {
    const uint32_t state = c.state(p.block(2 * i));
    ASSERT_EQ(load(&p.word(2 * i)), 0) << "block " << i << " was left half way, state " << state;
    ASSERT_EQ(c.remove(p.block(2 * i)), 0) << i;
  }
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
  // If the module refuses such a wait, the child has ended, and the group has nothing left to
  // freeze.
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

// A read of /proc/PID/mem holds mmap_lock while it requests a page, however often it retries.
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

// Returns whether a child that runs `work` exits normally, and soon.
testing::AssertionResult ends_soon(const std::function<void()>& work) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    _exit(0);
  }
  int status = 0;
  const double start = now();
  pid_t ended = 0;
  while ((ended = waitpid(child, &status, WNOHANG)) == 0 && now() - start < kSoon) usleep(10000);
  if (ended != child) {
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return testing::AssertionFailure() << "it goes on and on";
  }
  return status == 0 ? testing::AssertionSuccess() : testing::AssertionFailure() << "wait status " << status;
}

// An answer that brings no block does not make the reader retry with mmap_lock held.
TEST_F(KmodHostile, AReadThroughProcMemEndsHoweverOftenItsBlockIsAnswered) {
  EXPECT_TRUE(ends_soon([] {
    Context c;
    Pair p(c, 1, kPage);
    std::thread([&] {
      for (;;) (void)c.op(VMEM_OP_WAKE, p.block(0));
    }).detach();
    const int fd = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    uint64_t value = 0;
    for (int i = 0; i < 20; ++i)
      if (pread(fd, &value, 8, static_cast<off_t>(reinterpret_cast<uintptr_t>(p.blocks))) != -1) _exit(1);
    _exit(0);
  }));
}

// Nor does a frame that RELEASE would take again and again but cannot, because a pipe refers to it.
TEST_F(KmodHostile, AReadThroughProcMemEndsHoweverOftenItsFrameIsReleased) {
  EXPECT_TRUE(ends_soon([] {
    Context c;
    Pair p(c, 1, kPage);
    int ends[2];
    p.frame_word(0) = 1;
    iovec v{p.frames, 8};
    if (pipe2(ends, O_CLOEXEC) != 0 || vmsplice(ends[1], &v, 1, 0) != 8) _exit(1);
    std::thread([&] {
      for (;;) (void)c.release(p.pool, 1);
    }).detach();
    const int fd = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    uint64_t value = 0;
    for (int i = 0; i < 500; ++i) {
      if (pread(fd, &value, 8, static_cast<off_t>(reinterpret_cast<uintptr_t>(p.frames))) == 8 && value != 1) _exit(2);
    }
    _exit(0);
  }));
}

// A reader of a directory holds its lock, so only trusted users may wait inside a system call.
TEST_F(KmodHostile, ASystemCallWaitsForABlockOnlyWhereThatWasGrantedAndAskedFor) {
  for (const bool trusted : {true, false}) {
    const pid_t child = fork();
    if (child == 0) {
      if (!trusted && getuid() == 0 && (setresgid(65534, 65534, 65534) != 0 || setresuid(65534, 65534, 65534) != 0))
        _exit(1);
      Context unasked(true, false);
      Pair p(unasked, 1, kPage);
      const int folder = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
      if (syscall(SYS_getdents64, folder, p.blocks, kPage) != -1 || errno != EFAULT) _exit(2);
      std::thread reader([&] { touch(p.word(0)); });  // user code waits as usual
      vmem_event e{};
      if (!unasked.event(&e) || unasked.install(p.block(0), p.frame(0)) != 0) _exit(3);
      reader.join();
      if (syscall(SYS_getdents64, folder, p.blocks, kPage) <= 0) _exit(4);
      vmem_hello h{};
      h.version = VMEM_UAPI_VERSION;
      h.need = VMEM_FEATURE_KERNEL_FAULTS;
      const bool offered = (unasked.features & VMEM_FEATURE_KERNEL_FAULTS) != 0;
      if (call(unasked.fd, VMEM_IOC_HELLO, &h) != (offered ? 0 : -EOPNOTSUPP)) _exit(5);
      _exit(!trusted && offered ? 6 : 0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << (trusted ? "this user" : "nobody") << " failed at step " << WEXITSTATUS(status);
  }
}

// The same for a wait in another process's call: a reader of another process's memory, or a kernel
// worker, must not be delayed. process_vm_readv() drops mmap_lock, so it would wait as long as a
// fault may.
TEST_F(KmodHostile, WhoReadsAnothersMemoryWaitsForABlockOnlyWhereThatWasGranted) {
  for (const bool granted : {false, true}) {
    SCOPED_TRACE(granted);
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const pid_t owner = fork();
    if (owner == 0) {
      Context c(true, granted);
      Pair p(c, 2, kPage);
      if (c.install(p.block(1), p.frame(1)) != 0) _exit(1);
      p.word(1) = 7;
      p.frame_word(0) = 8;
      if (write(ends[1], &p.blocks, sizeof p.blocks) != sizeof p.blocks) _exit(2);
      vmem_event e{};
      if (granted && (!c.event(&e) || (e.flags & VMEM_FAULT_REMOTE) == 0 || c.install(p.block(0), p.frame(0)) != 0))
        _exit(3);
      for (;;) pause();
    }
    char* blocks = nullptr;
    close(ends[1]);
    ASSERT_EQ(read(ends[0], &blocks, sizeof blocks), static_cast<ssize_t>(sizeof blocks)) << "the other has ended";
    const auto read_there = [&](char* at, uint64_t* value) {
      iovec here{value, 8}, there{at, 8};
      return process_vm_readv(owner, &here, 1, &there, 1, 0) == 8 ? 0 : -errno;
    };
    uint64_t value = 0;
    const int present = read_there(blocks + kPage, &value);
    if (present == -ENOSYS) {
      kill(owner, SIGKILL);
      waitpid(owner, nullptr, 0);
      GTEST_SKIP() << "a kernel without process_vm_readv";
    }
    EXPECT_EQ(present, 0);
    EXPECT_EQ(value, 7u);
    const uint64_t waits = knob("waits");
    const double start = now();
    EXPECT_EQ(read_there(blocks, &value), granted ? 0 : -EFAULT);
    if (granted) {
      EXPECT_EQ(value, 8u);
    } else {
      const int mem = open(("/proc/" + std::to_string(owner) + "/mem").c_str(), O_RDONLY | O_CLOEXEC);
      EXPECT_EQ(pread(mem, &value, 8, static_cast<off_t>(reinterpret_cast<uintptr_t>(blocks))), -1);
      close(mem);
      EXPECT_LT(now() - start, kSoon) << "it waited for the other's runtime";
      EXPECT_EQ(knob("waits"), waits);
    }
    kill(owner, SIGKILL);
    waitpid(owner, nullptr, 0);
    close(ends[0]);
  }
}

// A driver's thread that requests a page and cannot drop mmap_lock: present blocks are returned at
// once, absent ones give an error.
TEST_F(KmodHostile, AKernelThreadThatMayNotRetryKeepsMmapLockForNoAbsentBlock) {
  const int device = open("/dev/vmem-peek", O_RDWR | O_CLOEXEC);
  if (device < 0) GTEST_SKIP() << "the module peek is not loaded";
  Context c(true, false);
  Pair plain(c, 2, kPage), longterm(c, 2, kPage, VMEM_CREATE_LONGTERM);
  for (Pair* p : {&plain, &longterm}) {
    ASSERT_EQ(c.install(p->block(1), p->frame(1)), 0);
    p->word(1) = 7;
    for (const uint32_t how : {0, PEEK_LONG_PIN}) {
      SCOPED_TRACE(how);
      peek present{reinterpret_cast<uintptr_t>(p->blocks + kPage), 0, 0, how, 0};
      ASSERT_EQ(call(device, PEEK, &present), 0);
      EXPECT_EQ(present.result, 0);
      EXPECT_EQ(present.value, 7u);
      const uint64_t waits = knob("waits");
      peek absent{reinterpret_cast<uintptr_t>(p->blocks), 0, 0, how, 0};
      ASSERT_EQ(call(device, PEEK, &absent), 0);
      EXPECT_EQ(absent.result, -EFAULT);
      EXPECT_EQ(knob("waits"), waits) << "it slept, and mmap_lock with it";
      EXPECT_LT(static_cast<double>(absent.held_us) / 1e6, kSoon);
    }
  }
  close(device);
}

// If the process has an mmu notifier, such a caller may be a device, which drops mmap_lock between
// its faults and may wait. A caller that does not drop the lock gets an error when the fault's time
// has passed.
TEST_F(KmodHostile, AKernelThreadThatMayBeADevicesKeepsMmapLockForTheTimeOfOneFault) {
  const int device = open("/dev/vmem-peek", O_RDWR | O_CLOEXEC);
  if (device < 0) GTEST_SKIP() << "the module peek is not loaded";
  KnobGuard timeout("fault_timeout_ms", 200);
  Context c(true, false);
  Pair p(c, 1, kPage);
  const uint64_t timeouts = knob("timeouts");
  peek absent{reinterpret_cast<uintptr_t>(p.blocks), 0, 0, PEEK_WITH_NOTIFIER, 0};
  ASSERT_EQ(call(device, PEEK, &absent), 0);
  EXPECT_EQ(absent.result, -EFAULT);
  EXPECT_EQ(knob("timeouts"), timeouts + 1);
  EXPECT_LT(static_cast<double>(absent.held_us) / 1e6, kSoon);
  close(device);
}

// A core dump includes no region, so it never requests a block. A thread that is parked when
// another thread dumps ends.
TEST_F(KmodHostile, ATaskThatDumpsCoreIsGoneAlthoughAThreadOfItWaits) {
  if (access("/proc/self/coredump_filter", F_OK) != 0) GTEST_SKIP() << "a kernel without core dumps";
  const std::string pattern = text("/proc/sys/kernel/core_pattern");
  if (!put("/proc/sys/kernel/core_pattern", "/tmp/vmem-core")) GTEST_SKIP() << "no core_pattern to set";
  const uint64_t waits = knob("waits");
  const double start = now();
  const pid_t child = fork();
  if (child == 0) {
    const rlimit all{RLIM_INFINITY, RLIM_INFINITY};
    if (setrlimit(RLIMIT_CORE, &all) != 0) _exit(1);
    Context c;
    Pair p(c, 1, kPage);
    std::thread([&] { touch(p.word(0)); }).detach();
    if (!eventually([&] { return knob("waits") > waits; })) _exit(2);
    if (madvise(p.blocks, kPage, MADV_DODUMP) == 0) _exit(3);
    abort();
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_LT(now() - start, kSoon);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && WCOREDUMP(status)) << "status " << status;
  unlink("/tmp/vmem-core");
  put("/proc/sys/kernel/core_pattern", pattern);
}

// Runs `attempt` as uid 65534. Returns 0, or the step that failed.
int as_nobody(const std::function<int()>& attempt) {
  const pid_t child = fork();
  if (child == 0) {
    if (setresgid(65534, 65534, 65534) != 0 || setresuid(65534, 65534, 65534) != 0) _exit(100);
    _exit(attempt());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 101;
}

TEST_F(KmodHostile, FramesStayChargedWhileAPipeRefersToThem) {
  const uint64_t before = knob("frame_bytes");
  constexpr uint32_t kCount = 8;
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  {
    Context c;
    Pair p(c, kCount, kPage);
    for (uint32_t i = 0; i < kCount; ++i) {
      p.frame_word(i) = i;
      iovec v{p.frames + i * kPage, 8};
      ASSERT_EQ(vmsplice(ends[1], &v, 1, SPLICE_F_NONBLOCK), 8);
    }
  }
  EXPECT_EQ(knob("frame_bytes"), before + kCount * kPage) << "the context is gone, its memory is not";
  EXPECT_EQ(knob("left_bytes"), kCount * kPage);
  {
    KnobGuard limit("frame_limit_bytes", before + (kCount + 1) * kPage);
    Context c;
    uint64_t pool = 0;
    ASSERT_EQ(c.create(VMEM_KIND_POOL, 2 * kPage, kPage, &pool), 0);
    EXPECT_EQ(c.populate(pool, 2), -EDQUOT) << "the machine's limit counts it";
  }
  uint64_t value = 0;
  for (uint32_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(read(ends[0], &value, 8), 8);
    EXPECT_EQ(value, i);
  }
  close(ends[0]);
  close(ends[1]);
  EXPECT_TRUE(eventually([&] { return knob("frame_bytes") == before && knob("left_bytes") == 0; }));
}

// A context that leaves frame after frame behind does not stop the module from freeing those of
// others.
TEST_F(KmodHostile, FramesThatAreLeftWithoutEndKeepNobodysFromBeingFreed) {
  const uint64_t before = knob("left_bytes");
  uint64_t left = 0;
  bool freed = false;
  std::vector<int> pipes;
  for (; !freed && left < 1000; ++left) {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
    {
      Context c;
      Pair p(c, 1, kPage);
      p.frame_word(0) = 1;
      iovec v{p.frames, 8};
      ASSERT_EQ(vmsplice(ends[1], &v, 1, SPLICE_F_NONBLOCK), 8);
    }
    pipes.insert(pipes.end(), ends, ends + 2);
    if (pipes.size() > 16) {  // the oldest pipe, which is no longer needed
      for (int i = 0; i < 2; ++i) close(pipes[static_cast<size_t>(i)]);
      pipes.erase(pipes.begin(), pipes.begin() + 2);
    }
    freed = knob("left_bytes") < before + (left + 1) * kPage;
  }
  for (const int fd : pipes) close(fd);
  EXPECT_TRUE(freed) << "none of " << left;
  EXPECT_TRUE(eventually([&] { return knob("left_bytes") == before; }));
}

// Data sent without a copy waits in the sender's queue until the receiver has room.
TEST_F(KmodHostile, FramesStayChargedWhileASocketHasYetToSendThem) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  socklen_t length = sizeof address;
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0)
    GTEST_SKIP() << "a kernel without TCP";
  int small = 4096, large = 4 << 20, one = 1;
  ASSERT_EQ(setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &small, sizeof small), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const int sender = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(setsockopt(sender, SOL_SOCKET, SO_SNDBUF, &large, sizeof large), 0);
  ASSERT_EQ(setsockopt(sender, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one), 0);
  ASSERT_EQ(connect(sender, reinterpret_cast<sockaddr*>(&address), length), 0);
  const int receiver = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  ASSERT_GE(receiver, 0);
  // First send more than the receiver takes.
  std::vector<char> filler(64 << 10, 'x');
  ASSERT_EQ(send(sender, filler.data(), filler.size(), MSG_DONTWAIT), static_cast<ssize_t>(filler.size()));
  const uint64_t before = knob("frame_bytes");
  constexpr uint32_t kCount = 4;
  {
    Context c;
    Pair p(c, kCount, kPage);
    for (uint32_t i = 0; i < kCount; ++i) {
      p.frame_word(i) = 100 + i;
      ASSERT_EQ(send(sender, p.frames + i * kPage, kPage, MSG_ZEROCOPY | MSG_DONTWAIT), static_cast<ssize_t>(kPage));
    }
    EXPECT_EQ(c.release(p.pool, 1), -EBUSY);
  }
  EXPECT_EQ(knob("frame_bytes"), before + kCount * kPage) << "the context is gone, its memory is not";
  EXPECT_EQ(knob("left_bytes"), kCount * kPage);
  std::vector<char> all(filler.size() + kCount * kPage);
  ASSERT_EQ(recv(receiver, all.data(), all.size(), MSG_WAITALL), static_cast<ssize_t>(all.size()));
  for (uint32_t i = 0; i < kCount; ++i) {
    uint64_t value = 0;
    memcpy(&value, all.data() + filler.size() + i * kPage, sizeof value);
    EXPECT_EQ(value, 100 + i);
  }
  EXPECT_TRUE(eventually([&] { return knob("frame_bytes") == before && knob("left_bytes") == 0; }));
  for (const int fd : {listener, sender, receiver}) close(fd);
}

TEST_F(KmodHostile, AFrameOutOfADestroyedRegionIsNotInstalledWhileAPipeShowsIt) {
  Context c;
  Pair p(c, 1, kPage), q(c, 1, kPage);
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  p.word(0) = 1;
  iovec v{p.blocks, 8};
  ASSERT_EQ(vmsplice(ends[1], &v, 1, SPLICE_F_NONBLOCK), 8);
  ASSERT_EQ(c.destroy(p.region), 0);
  EXPECT_EQ(c.install(q.block(0), p.frame(0)), -EBUSY) << "the pipe's reader would see what is stored next";
  EXPECT_EQ(c.release(p.pool, 1), -EBUSY);
  uint64_t value = 0;
  ASSERT_EQ(read(ends[0], &value, 8), 8);
  EXPECT_EQ(c.install(q.block(0), p.frame(0)), 0);
  close(ends[0]);
  close(ends[1]);
}

TEST_F(KmodHostile, AUserMeetsALimitOfFramesThatOthersDoNotShare) {
  KnobGuard limit("user_limit_bytes", 4 * kPage);
  uint64_t pool = 0;
  const auto attempt = [&] {
    Context a, b;
    uint64_t one = 0, two = 0;
    if (a.create(VMEM_KIND_POOL, 8 * kPage, kPage, &one) != 0 || b.create(VMEM_KIND_POOL, 8 * kPage, kPage, &two) != 0)
      return 1;
    if (a.populate(one, 3) != 0 || b.populate(two, 1) != 0) return 2;
    if (b.populate(two + kPage, 1) != -EDQUOT) return 3;
    if (a.release(one, 1) != 0 || b.populate(two + kPage, 1) != 0) return 4;
    return 0;
  };
  EXPECT_EQ(as_nobody(attempt), 0);
  Context root;
  ASSERT_EQ(root.create(VMEM_KIND_POOL, 8 * kPage, kPage, &pool), 0);
  EXPECT_EQ(root.populate(pool, 8), 0) << "who may exceed limits is not held by a user's";
}

TEST_F(KmodHostile, RecordsAreLimitedAndGivenBackWhenABlockSaysNothing) {
  constexpr uint64_t kLimit = 2000;
  KnobGuard limit("user_limit_records", kLimit);
  const uint64_t before = knob("records");
  const auto attempt = [&] {
    Context c;
    uint64_t region = 0;
    if (c.create(VMEM_KIND_REGION, 1ull << 40, kPage, &region) != 0) return 1;
    std::vector<vmem_op> ops(1000);
    uint64_t made = 0;
    for (uint64_t round = 0; round < 4; ++round) {
      for (uint64_t i = 0; i < ops.size(); ++i) {
        ops[i] = {};
        ops[i].op = VMEM_OP_FAIL;
        ops[i].block = region + (round * ops.size() + i) * kPage;
      }
      if (c.batch(&ops) != 0) return 2;
      for (const vmem_op& o : ops) {
        if (o.result != 0 && o.result != -EDQUOT) return 3;
        made += o.result == 0;
      }
    }
    if (made < kLimit / 2 || made >= kLimit) return 4;
    // A touch that cannot get a record ends; it neither waits nor triggers the OOM killer.
    char* m = c.map(region + 5000 * kPage, kPage);
    if (m == nullptr || load(reinterpret_cast<uint64_t*>(m)) != SIGBUS) return 5;
    if (c.op(VMEM_OP_UNFAIL, region) != 0 || c.op(VMEM_OP_FAIL, region + 6000 * kPage) != 0) return 6;
    int opened = 0;
    while (opened < 1000 && open(kDevice, O_RDWR | O_CLOEXEC) >= 0) ++opened;
    return opened < 1000 ? 0 : 7;
  };
  EXPECT_EQ(as_nobody(attempt), 0);
  EXPECT_TRUE(eventually([&] { return knob("records") == before; })) << "all of them went with their context";
}

// Runs `attempt` as uid 0 of a user namespace made by `maker`, with a hundred uids. Returns what it
// returns.
int in_user_namespace(uid_t maker, const std::function<int()>& attempt) {
  int up[2], down[2];
  EXPECT_EQ(pipe2(up, O_CLOEXEC), 0);
  EXPECT_EQ(pipe2(down, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    char c = 0;
    if (maker != 0 && (setresgid(maker, maker, maker) != 0 || setresuid(maker, maker, maker) != 0)) _exit(100);
    if (unshare(CLONE_NEWUSER) != 0) _exit(101);
    if (write(up[1], "x", 1) != 1 || read(down[0], &c, 1) != 1) _exit(102);
    if (setresgid(0, 0, 0) != 0 || setresuid(0, 0, 0) != 0) _exit(103);
    _exit(attempt());
  }
  close(up[1]);
  char c = 0;
  if (read(up[0], &c, 1) == 1) {
    const std::string map = maker != 0 ? "0 " + std::to_string(maker) + " 1\n1 300000 99\n" : "0 300000 100\n";
    for (const char* which : {"/gid_map", "/uid_map"}) EXPECT_TRUE(put("/proc/" + std::to_string(child) + which, map));
    EXPECT_EQ(write(down[1], "x", 1), 1);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  for (const int fd : {up[0], down[0], down[1]}) close(fd);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 104;
}

// Takes three pages of frames and pins three. Returns 0, -EDQUOT (no frames) or -ENOMEM (no pins).
int take_three(Context* c) {
  uint64_t pool = 0;
  if (c->create(VMEM_KIND_POOL, 4 * kPage, kPage, &pool) != 0) return 1;
  if (const int err = c->populate(pool, 3); err != 0) return err;
  vmem_pin pin{};
  void* const buffer = mmap(nullptr, 3 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  pin.address = reinterpret_cast<uintptr_t>(buffer);
  pin.size = 3 * kPage;
  return call(c->fd, VMEM_IOC_PIN, &pin);
}

// Runs `attempt` as `uid` of the caller's namespace.
int as_user(uid_t uid, const std::function<int()>& attempt) {
  const pid_t child = fork();
  if (child == 0) _exit(setresuid(uid, uid, uid) != 0 ? 105 : attempt());
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : 106;
}

// A user with subordinate uids, or root in a container, can act as many users.
TEST_F(KmodHostile, TheUsersOfAUserNamespaceShareTheLimitsOfWhoMadeIt) {
  if (access("/proc/self/ns/user", F_OK) != 0) GTEST_SKIP() << "a kernel without user namespaces";
  std::optional<KnobGuard> limit;
  const auto attempt = [&] {
    rlimit pins{4 * kPage, 4 * kPage};
    if (setrlimit(RLIMIT_MEMLOCK, &pins) != 0) return 1;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return 2;
    const pid_t first = fork();
    if (first == 0) {
      if (setresuid(1, 1, 1) != 0) _exit(1);
      Context c;
      const char ok = take_three(&c) == 0 ? 'y' : 'n';
      if (write(ends[1], &ok, 1) != 1) _exit(2);
      for (;;) pause();
    }
    close(ends[1]);
    char ok = 0;
    int step = read(ends[0], &ok, 1) == 1 && ok == 'y' ? 0 : 3;
    // Try another user of the namespace, and its first one.
    for (const uid_t uid : {2, 0}) {
      if (step != 0) break;
      step = as_user(uid, [&] {
        Context c;
        return take_three(&c) == (limit ? -EDQUOT : -ENOMEM) ? 0 : 4;
      });
    }
    kill(first, SIGKILL);
    waitpid(first, nullptr, 0);
    return step;
  };
  for (const uid_t maker : {65534, 0}) {
    for (const bool frames : {true, false}) {
      SCOPED_TRACE(std::to_string(maker) + (frames ? ", frames" : ", pins"));
      if (frames) limit.emplace("user_limit_bytes", 4 * kPage);
      EXPECT_EQ(in_user_namespace(maker, attempt), 0);
      limit.reset();
    }
  }
}

}  // namespace kmod_test
