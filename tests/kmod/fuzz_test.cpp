// Calls with nearly correct arguments, from several threads, while others touch, fork, map and
// kill, and use the same memory through io_uring, userfaultfd, pipes and remote accesses, in one
// memory cgroup or another. Nothing may hang or leak, and the kernel may report nothing; the
// guest's log is searched afterwards. Makes at least KMOD_FUZZ_CALLS calls, for at least
// KMOD_FUZZ_SECONDS.
#include <sys/eventfd.h>
#include <sys/syscall.h>

#include <filesystem>
#include <random>
#include <sstream>

#include "kmod/context.h"
#include "kmod/neighbours.h"

namespace kmod_test {

class KmodFuzz : public Kmod {};

// A context to which many threads pass nearly correct arguments.
struct Fuzzed {
  explicit Fuzzed(uint32_t seed) : random(seed) {}
  uint64_t pick(std::initializer_list<uint64_t> of) { return of.begin()[random() % of.size()]; }
  // Returns an offset in an existing range, near one, or in none.
  uint64_t offset() {
    uint64_t base = ranges->empty() ? 0 : (*ranges)[random() % ranges->size()];
    switch (random() % 16) {
      case 0:
        return (static_cast<uint64_t>(random()) << 32) | random();
      case 1:
        base += random() % 4096;
        break;
      case 2:
        return pick({0, ~0ull, 1ull << 63, 4096, (1ull << 46)});
      default:
        break;
    }
    return base + (random() % 10) * pick({4096, 65536, kHuge});
  }
  uint64_t pointer() {
    switch (random() % 12) {
      case 0:
        return pick({0, 1, 4096, ~0ull, 1ull << 47});
      case 1:
        return reinterpret_cast<uintptr_t>(blocks) + random() % kHuge / 8 * 8;
      default:
        return reinterpret_cast<uintptr_t>(scratch) + random() % 16 * 8;
    }
  }
  void one_call(int fd) {
    alignas(8) char raw[128];
    memset(raw, 0, sizeof raw);
    switch (random() % 28) {
      case 0: {
        auto* a = reinterpret_cast<vmem_hello*>(raw);
        a->version = static_cast<uint32_t>(pick({1, 1, 1, 0, 2, ~0u}));
        a->need = pick({0, 1, 3, ~0ull});
        call(fd, VMEM_IOC_HELLO, a);
        break;
      }
      case 1: {
        auto* a = reinterpret_cast<vmem_create*>(raw);
        a->kind = static_cast<uint32_t>(pick({1, 2, 1, 2, 0, 3}));
        a->flags = static_cast<uint32_t>(pick({0, 0, 0, 1, 2}));
        a->unit = static_cast<uint32_t>(pick({4096, 65536, kHuge, kHuge, 8 << 20, 5000, 0}));
        a->size = pick({a->unit, 4ull * a->unit, 8ull * a->unit, 1ull << 46, 1ull << 47, ~0ull, 4096});
        const int err = call(fd, VMEM_IOC_CREATE, a);
        // racy on purpose: it only reads numbers
        if (err == 0) (*ranges)[random() % ranges->size()] = a->offset;
        break;
      }
      case 2:
        if (random() % 8 == 0) {
          vmem_destroy d{offset()};
          call(fd, VMEM_IOC_DESTROY, &d);
        }
        break;
      case 3:
      case 4: {
        auto* a = reinterpret_cast<vmem_populate*>(raw);
        a->offset = offset();
        a->count = static_cast<uint32_t>(pick({1, 1, 2, 4, 0, ~0u}));
        a->node = static_cast<int32_t>(pick({~0ull, ~0ull, 0, 1, 77, 1ull << 31}));
        a->flags = static_cast<uint32_t>(pick({0, 0, 1, 2}));
        call(fd, VMEM_IOC_POPULATE, a);
        break;
      }
      case 5: {
        vmem_release r{offset(), static_cast<uint32_t>(pick({1, 1, 2, 0, ~0u})), 0};
        call(fd, VMEM_IOC_RELEASE, &r);
        break;
      }
      case 6: {
        vmem_eventfd e{random() % 2 ? eventfd(0, EFD_NONBLOCK) : static_cast<int>(random() % 40) - 4, 0};
        call(fd, VMEM_IOC_EVENTFD, &e);
        if (e.fd > 2 && random() % 2) {
          vmem_eventfd off{-1, 0};
          call(fd, VMEM_IOC_EVENTFD, &off);
        }
        break;
      }
      case 7: {
        auto* a = reinterpret_cast<vmem_pin*>(raw);
        a->address = pointer() & ~(random() % 8 ? 4095ull : 0);
        a->size = pick({4096, 8192, kHuge, 0, 5000, 1ull << 40});
        a->flags = static_cast<uint32_t>(pick({0, 1, 2}));
        if (call(fd, VMEM_IOC_PIN, a) == 0 && random() % 4) {
          vmem_unpin u{a->id, 0};
          call(fd, VMEM_IOC_UNPIN, &u);
        }
        break;
      }
      case 8: {
        vmem_unpin u{static_cast<uint32_t>(random() % 20), 0};
        call(fd, VMEM_IOC_UNPIN, &u);
        break;
      }
      case 9:
        call(fd, VMEM_IOC_INFO, reinterpret_cast<void*>(pointer()));
        break;
      case 10:  // a wild call
        for (char& byte : raw) byte = static_cast<char>(random());
        call(fd, _IOC(random() % 4, VMEM_IOC_MAGIC, random() % 12, random() % 120), raw);
        break;
      case 11: {
        const ssize_t n = syscall(SYS_read, fd, pointer(), pick({0, 39, 40, 80, 640}));
        (void)n;
        break;
      }
      case 12:
        if (random() % 8 == 0) {
          const size_t size = pick({4096, kHuge, 4 * kHuge});
          void* m = mmap(nullptr, size, PROT_READ | PROT_WRITE, random() % 8 ? MAP_SHARED : MAP_PRIVATE, fd,
                         static_cast<off_t>(offset() & ~4095ull));
          if (m != MAP_FAILED) {
            if (random() % 2) load(static_cast<uint64_t*>(m));
            munmap(m, size);
          }
        }
        break;
      case 13:
      case 14:
        beside();
        break;
      default: {
        std::vector<vmem_op> ops(random() % 8 + (random() % 64 == 0 ? 1000 : 1));
        for (vmem_op& o : ops) {
          o.op = static_cast<uint32_t>(random() % 11);
          o.flags = random() % 4 == 0 ? static_cast<uint32_t>(random() % 5) : 0;
          o.block = offset();
          o.frame = offset();
        }
        vmem_batch b{};
        b.ops = random() % 16 ? reinterpret_cast<uintptr_t>(ops.data()) : pointer();
        b.count = random() % 32 ? static_cast<uint32_t>(ops.size()) : static_cast<uint32_t>(random());
        if (b.ops != reinterpret_cast<uintptr_t>(ops.data()) && b.count > ops.size()) b.count = 1;
        if (b.count > ops.size() && b.count <= 1024) b.count = static_cast<uint32_t>(ops.size());
        call(fd, VMEM_IOC_BATCH, &b);
      }
    }
  }
  // Other system calls on the same memory.
  void beside() {
    const size_t size = pick({kPage, 64 << 10}), at = random() % (kHuge / size) * size + random() % 4 * kHuge;
    const Places places{blocks + at, frames + at, size};
    const auto number = static_cast<uint32_t>(random());
    switch (random() % 5) {
      case 0:
        return io_uring_reads(places, number);
      case 1:
        return a_userfaultfd(places, number);
      case 2:
        return MemoryCgroups::use(number);
      case 3:
        return remote_reads(places, number);
      default:
        return references_in_a_pipe(places, number);
    }
  }
  std::mt19937 random;
  std::vector<uint64_t>* ranges = nullptr;
  char* blocks = nullptr;
  char* frames = nullptr;
  char* scratch = nullptr;
};

// Returns, for root, the state of each thread of a process: state, signals, times in ticks, system
// call, kernel stack.
std::string stacks(pid_t process) {
  const auto text = [](const std::filesystem::path& path) {
    std::ifstream in(path);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  std::string all;
  const std::string tasks = "/proc/" + std::to_string(process) + "/task/";
  for (const auto& task : std::filesystem::directory_iterator(tasks)) {
    all += task.path().filename().string() + ": " + text(task.path() / "stat") + text(task.path() / "syscall");
    std::istringstream status(text(task.path() / "status"));
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("Sig", 0) == 0 || line.rfind("ShdPnd", 0) == 0) all += line + " ";
    }
    all += "\n" + text(task.path() / "stack");
  }
  return all;
}

TEST_F(KmodFuzz, NearlyRightCallsFromManyThreads) {
  const auto set = [](const char* name, uint64_t otherwise) {
    const char* value = getenv(name);
    return value != nullptr ? strtoull(value, nullptr, 10) : otherwise;
  };
  const uint64_t calls = set("KMOD_FUZZ_CALLS", 40000), seconds = set("KMOD_FUZZ_SECONDS", 0);
  KnobGuard timeout("fault_timeout_ms", 100);
  // A call may fill the limit with frames of one page each, and at its end the process frees them
  // one by one.
  KnobGuard limit("frame_limit_bytes", 64ull << 20);
  // Less than that, so that a group runs short now and then, and its OOM killer is the last resort.
  const MemoryCgroups groups(40ull << 20);
  std::atomic<uint64_t> made{0};
  const double start = now();
  const uint64_t contexts = knob("contexts");
  // One process per round: SIGKILL ends it in the middle of its calls, or it runs to the end.
  for (uint32_t round = 0; made < calls || now() - start < static_cast<double>(seconds); ++round) {
    auto* progress = static_cast<std::atomic<uint64_t>*>(
        mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    const pid_t child = fork();
    if (child == 0) {
      Context c;
      Pair* p = new Pair(c, 4);
      std::vector<uint64_t> ranges(8, p->region);
      ranges[1] = ranges[2] = ranges[3] = p->pool;
      fcntl(c.fd, F_SETFL, O_NONBLOCK);
      alignas(4096) static char scratch[2 * 1024 * sizeof(vmem_op)];  // room for the largest batch
      std::vector<std::thread> threads;
      for (uint32_t t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
          Fuzzed f(round * 3 + t);
          f.ranges = &ranges;
          f.blocks = p->blocks;
          f.frames = p->frames;
          f.scratch = scratch;
          for (int i = 0; i < 700; ++i) {
            f.one_call(c.fd);
            progress->fetch_add(1);
          }
        });
      }
      for (uint32_t t = 0; t < 2; ++t) {
        threads.emplace_back([&, t] {
          std::mt19937 random(round + t);
          for (int i = 0; i < 40; ++i) {
            const size_t at = random() % (4 * kHuge / 8) * 8;
            if (random() % 2) {
              load(reinterpret_cast<uint64_t*>(p->blocks + at));
            } else {
              store(reinterpret_cast<uint64_t*>(p->blocks + at), 1);
            }
            load(reinterpret_cast<uint64_t*>(p->frames + at));
            if (random() % 16 == 0) madvise(p->blocks, 4 * kHuge, random() % 2 ? MADV_DONTNEED : MADV_COLD);
          }
        });
      }
      if (round % 3 == 0) {
        usleep(round * 37 % 200 * 1000);
        raise(SIGKILL);
      }
      if (round % 3 == 1) {
        usleep(50000);
        call(c.fd, VMEM_IOC_SHUTDOWN);
      }
      for (std::thread& t : threads) t.join();
      _exit(HasFailure() ? 1 : 0);
    }
    int status = 0;
    // No call may hang: each wait ends after 100 ms, so a round takes seconds on a quiet machine.
    // If a call has filled the limit with frames of one page, freeing them takes minutes on a slow
    // machine. So this limits the time without progress, not the length of the round.
    const auto over = [&] { return waitpid(child, &status, WNOHANG) == child; };
    const auto done = [&] { return progress->load() - knob("frame_bytes") - knob("records"); };
    bool ended = false;
    for (uint64_t before = done() + 1; !ended && done() != before;) {
      before = done();
      ended = vmem::test::eventually(over, std::chrono::seconds(60), std::chrono::milliseconds(20));
    }
    if (!ended) {
      std::string where = stacks(child);
      sleep(1);
      where += "a second later:\n" + stacks(child);
      kill(child, SIGKILL);
      const bool killed = eventually([&] { return waitpid(child, &status, WNOHANG) == child; });
      FAIL() << "round " << round << " after " << progress->load() << " calls; " << (killed ? "" : "not even ")
             << "killed\n"
             << where;
    }
    ASSERT_TRUE(WIFEXITED(status) ? WEXITSTATUS(status) == 0 : WTERMSIG(status) == SIGKILL) << status;
    made += progress->load();
    munmap(progress, kPage);
  }
  printf("[   note   ] %lu calls in %.0f s\n", made.load(), now() - start);
  EXPECT_TRUE(eventually([&] { return knob("contexts") == contexts; }));
  // A frame to which the kernel has a short reference outlives its context and stays charged.
  EXPECT_TRUE(eventually([] { return knob("frame_bytes") == 0; })) << knob("frame_bytes");
  EXPECT_EQ(knob("installed_bytes"), 0u);
  EXPECT_EQ(knob("pinned_bytes"), 0u);
}

// Every allocation of the module may fail: the call returns -ENOMEM (or succeeds), and nothing
// leaks.
TEST_F(KmodFuzz, FailingAllocationsAreReportedAndLeakNothing) {
  if (!put("/sys/kernel/debug/failslab/probability", "0")) GTEST_SKIP() << "a kernel without failslab";
  for (const char* kind : {"failslab", "fail_page_alloc"}) {
    const std::string base = std::string("/sys/kernel/debug/") + kind + "/";
    put(base + "probability", "100");
    put(base + "interval", "1");
    put(base + "times", "-1");
    put(base + "verbose", "0");
    put(base + "task-filter", "1");
    put(base + "ignore-gfp-wait", "0");
    if (std::string(kind) == "fail_page_alloc") put(base + "min-order", "0");
  }
  KnobGuard timeout("fault_timeout_ms", 100);
  const pid_t child = fork();
  if (child == 0) {
    for (int nth = 1; nth < 60; ++nth) {
      // The nth allocation from now on fails, in this thread only; try each n.
      const int fd = open("/proc/thread-self/fail-nth", O_RDWR);
      if (fd < 0) _exit(3);
      const std::string text = std::to_string(nth);
      if (write(fd, text.data(), text.size()) < 0) _exit(3);
      const int device = open(kDevice, O_RDWR | O_CLOEXEC);
      if (device >= 0) {
        vmem_hello h{};
        h.version = VMEM_UAPI_VERSION;
        call(device, VMEM_IOC_HELLO, &h);
        vmem_create c{};
        c.kind = VMEM_KIND_POOL;
        c.size = 4 * kHuge;
        c.unit = kHuge;
        vmem_create r = c;
        r.kind = VMEM_KIND_REGION;
        int err = call(device, VMEM_IOC_CREATE, &c);
        err |= call(device, VMEM_IOC_CREATE, &r);
        vmem_populate p{};
        p.offset = c.offset;
        p.count = 2;
        p.node = -1;
        err |= call(device, VMEM_IOC_POPULATE, &p);
        vmem_op op{VMEM_OP_INSTALL, 0, r.offset, c.offset, 0, 0};
        vmem_batch b{};
        b.ops = reinterpret_cast<uintptr_t>(&op);
        b.count = 1;
        err |= call(device, VMEM_IOC_BATCH, &b);
        void* m = mmap(nullptr, kHuge, PROT_READ | PROT_WRITE, MAP_SHARED, device, static_cast<off_t>(r.offset));
        if (m != MAP_FAILED && op.result == 0 && err == 0) load(static_cast<uint64_t*>(m));
        vmem_pin pin{};
        pin.address = reinterpret_cast<uintptr_t>(m) & ~4095ull;
        pin.size = kPage;
        if (m != MAP_FAILED && op.result == 0 && err == 0) call(device, VMEM_IOC_PIN, &pin);
        close(device);
        if (m != MAP_FAILED) munmap(m, kHuge);
      }
      if (pwrite(fd, "0", 1, 0) < 0) _exit(3);
      close(fd);
    }
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  for (const char* kind : {"failslab", "fail_page_alloc"})
    put(std::string("/sys/kernel/debug/") + kind + "/probability", "0");
  if (WIFEXITED(status) && WEXITSTATUS(status) == 3) GTEST_SKIP() << "no /proc/thread-self/fail-nth";
  ASSERT_EQ(status, 0);
  EXPECT_TRUE(eventually([&] { return knob("frame_bytes") == 0 && knob("contexts") == 0; }));
}

}  // namespace kmod_test
