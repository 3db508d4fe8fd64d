// GPU faults without a GPU. The kernel's test_hmm reads and writes, through hmm_range_fault, blocks
// whose only copy is on the NVMe drive. A runtime pages them in by io_uring and evicts them, and
// other threads map and touch memory.
#include <liburing.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <random>

#include "kmod/context.h"

namespace kmod_test {

// From lib/test_hmm_uapi.h of the kernel.
struct DmirrorCommand {
  uint64_t addr, ptr, npages, cpages, faults;
};
constexpr unsigned long kDmirrorRead = _IOWR('H', 0x00, DmirrorCommand);
constexpr unsigned long kDmirrorWrite = _IOWR('H', 0x01, DmirrorCommand);

// Returns the milliseconds of each mmap + store + munmap of some memory until `end`.
inline std::vector<double> map_until(double end) {
  std::vector<double> times;
  while (now() < end) {
    const double start = now();
    void* m = mmap(nullptr, 16 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *static_cast<volatile char*>(m) = 1;
    munmap(m, 16 * kPage);
    times.push_back((now() - start) * 1e3);
    usleep(1000);
  }
  std::sort(times.begin(), times.end());
  return times;
}
// The longest such time in an unrelated process: delays that the machine causes everywhere.
class Control {
 public:
  explicit Control(double end) {
    EXPECT_EQ(pipe2(pipe_, O_CLOEXEC), 0);
    child_ = fork();
    if (child_ != 0) return;
    const double longest = map_until(end).back();
    _exit(write(pipe_[1], &longest, sizeof longest) == sizeof longest ? 0 : 1);
  }
  double longest() const {
    double ms = -1;
    EXPECT_EQ(read(pipe_[0], &ms, sizeof ms), static_cast<ssize_t>(sizeof ms));
    return ms;
  }
  ~Control() {
    waitpid(child_, nullptr, 0);
    close(pipe_[0]);
    close(pipe_[1]);
  }
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

 private:
  int pipe_[2] = {-1, -1};
  pid_t child_ = -1;
};

class KmodHmm : public Kmod {
 protected:
  void SetUp() override {
    Kmod::SetUp();
    if (IsSkipped()) return;
    device_ = open("/dev/hmm_dmirror0", O_RDWR | O_CLOEXEC);
    if (device_ < 0) GTEST_SKIP() << "test_hmm is not loaded: no /dev/hmm_dmirror0";
  }
  void TearDown() override {
    if (device_ >= 0) close(device_);
  }
  // Reads or writes one page by the emulated GPU. It gives up after a second (-EBUSY): a real
  // driver retries, and so do we.
  int gpu(unsigned long request, const volatile void* at, void* page) {
    for (int i = 0; i < 30; ++i) {
      DmirrorCommand c{reinterpret_cast<uintptr_t>(at), reinterpret_cast<uintptr_t>(page), 1, 0, 0};
      const int err = call(device_, request, &c);
      if (err != -EBUSY) return err;
    }
    return -ETIMEDOUT;
  }
  int device_ = -1;
};

TEST_F(KmodHmm, TheGpuReadsAndWritesAbsentBlocksAndItsStoresAreMarked) {
  // A GPU's fault waits a few milliseconds at a time, so it needs no permission to wait.
  for (const bool system_calls : {true, false}) {
    SCOPED_TRACE(system_calls);
    Context c(true, system_calls);
    Pair p(c, 2);
    std::atomic<int> remote{0};
    Server server(c, [&](const vmem_event& e) {
      const uint32_t i = static_cast<uint32_t>((e.offset - p.region) / kHuge);
      remote += (e.flags & VMEM_FAULT_REMOTE) != 0;
      p.frame_word(i) = 100 + i;
      usleep(100 * 1000);  // longer than a fault may hold mmap_lock
      EXPECT_EQ(c.install(p.block(i), p.frame(i)), 0);
    });
    alignas(4096) static uint64_t page[512];
    ASSERT_EQ(gpu(kDmirrorRead, p.blocks, page), 0);
    EXPECT_EQ(page[0], 100u);
    EXPECT_EQ(remote, 1);
    EXPECT_EQ(c.state(p.block(0)) & VMEM_STATE_DIRTY, 0u);
    page[0] = 7;
    ASSERT_EQ(gpu(kDmirrorWrite, p.blocks, page), 0);
    EXPECT_EQ(p.word(0), 7u);
    EXPECT_NE(c.state(p.block(0)) & VMEM_STATE_DIRTY, 0u) << "a store after a load by the GPU";
    vmem_op out{};
    ASSERT_EQ(c.op(VMEM_OP_WATCH, p.block(0), 0, 0, &out), 0);
    page[0] = 8;
    ASSERT_EQ(gpu(kDmirrorWrite, p.blocks, page), 0);
    EXPECT_NE(c.state(p.block(0)) & VMEM_STATE_DIRTY, 0u) << "a store through an entry the GPU had before";
    page[0] = 9;
    ASSERT_EQ(gpu(kDmirrorWrite, p.blocks + kHuge, page), 0);
    EXPECT_EQ(p.word(1), 9u);
  }
}

TEST_F(KmodHmm, ProtectionHoldsTheGpusStores) {
  Context c;
  Pair p(c, 1);
  alignas(4096) static uint64_t page[512];
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  page[0] = 1;
  ASSERT_EQ(gpu(kDmirrorWrite, p.blocks, page), 0);
  ASSERT_EQ(c.op(VMEM_OP_PROTECT, p.block(0), 0, VMEM_OPF_CLEAN), 0);
  std::atomic<bool> stored{false};
  std::thread writer([&] {
    alignas(4096) static uint64_t mine[512] = {2};
    EXPECT_EQ(gpu(kDmirrorWrite, p.blocks, mine), 0);
    stored = true;
  });
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  EXPECT_EQ(e.flags, VMEM_FAULT_WRITE | VMEM_FAULT_PROTECTED | VMEM_FAULT_REMOTE);
  usleep(100 * 1000);
  EXPECT_FALSE(stored);
  EXPECT_EQ(p.frame_word(0), 1u);
  ASSERT_EQ(c.op(VMEM_OP_UNPROTECT, p.block(0)), 0);
  writer.join();
  EXPECT_EQ(p.frame_word(0), 2u);
}

TEST_F(KmodHmm, AnUnansweredGpuFaultEnds) {
  KnobGuard timeout("fault_timeout_ms", 300);
  Context c;
  Pair p(c, 1);
  alignas(4096) static uint64_t page[512];
  EXPECT_EQ(gpu(kDmirrorRead, p.blocks, page), -EFAULT);
}

TEST_F(KmodHmm, AWaitingGpuFaultDoesNotStallMmapElsewhere) {
  Context c;
  Pair p(c, 1);
  alignas(4096) static uint64_t page[512];
  std::thread gpu_thread([&] { EXPECT_EQ(gpu(kDmirrorRead, p.blocks, page), 0); });
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  // The slower the machine, the longer the fault waits.
  const double times = std::min(vmem::test::patience(), 4u);
  const double end = now() + 2 * times;
  const Control control(end);
  const std::vector<double> ms = map_until(end);
  printf(
      "[   note   ] %zu times mmap + munmap while a GPU fault waited %.0f s: median %.1f ms, longest %.1f ms; in a "
      "process "
      "apart %.1f ms\n",
      ms.size(), 2 * times, ms[ms.size() / 2], ms.back(), control.longest());
  EXPECT_LT(ms[ms.size() / 2], 500 * times) << "two waits for one or two sleeps of a fault, 20 ms each, and emulation";
  EXPECT_LT(ms.back(), 1000 * times) << "a fault that held the lock all along would show twice that";
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  gpu_thread.join();
}

TEST_F(KmodHmm, GpuCpuAndEvictionRaceOverDataOnNvmeAndLoseNothing) {
  constexpr uint32_t kBlocks = 12, kFrames = 4;
  constexpr size_t kUnit = 256 << 10, kPages = kUnit / kPage;
  const char* dir = getenv("VMEM_TEST_DIR");
  const std::string path = std::string(dir != nullptr ? dir : "/var/tmp") + "/kmod-hmm";
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
  ASSERT_GE(file, 0);
  unlink(path.c_str());
  Context c;
  uint64_t pool = 0, region = 0;
  ASSERT_EQ(c.create(VMEM_KIND_POOL, kFrames * kUnit, kUnit, &pool), 0);
  ASSERT_EQ(c.create(VMEM_KIND_REGION, kBlocks * kUnit, kUnit, &region), 0);
  ASSERT_EQ(c.populate(pool, kFrames), 0);
  char* frames = c.map(pool, kFrames * kUnit);
  char* blocks = c.map(region, kBlocks * kUnit);
  ASSERT_TRUE(frames != nullptr && blocks != nullptr);
  // Word 0 of each page: a number that only its owner changes. Word 1: its complement.
  for (uint32_t b = 0; b < kBlocks; ++b) {
    for (size_t i = 0; i < kPages; ++i) {
      auto* w = reinterpret_cast<uint64_t*>(frames + i * kPage);
      w[0] = b * kPages + i;
      w[1] = ~w[0];
    }
    ASSERT_EQ(pwrite(file, frames, kUnit, static_cast<off_t>(b * kUnit)), static_cast<ssize_t>(kUnit));
  }
  std::vector<std::atomic<uint64_t>> shadow(kBlocks * kPages);
  for (size_t i = 0; i < shadow.size(); ++i) shadow[i] = i;

  io_uring ring;
  ASSERT_EQ(io_uring_queue_init(4, &ring, 0), 0);
  const auto transfer = [&](bool write, uint32_t frame, uint64_t block) {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring);
    if (write) {
      io_uring_prep_write(sqe, file, frames + frame * kUnit, kUnit, block * kUnit);
    } else {
      io_uring_prep_read(sqe, file, frames + frame * kUnit, kUnit, block * kUnit);
    }
    io_uring_submit(&ring);
    io_uring_cqe* cqe = nullptr;
    EXPECT_EQ(io_uring_wait_cqe(&ring, &cqe), 0);
    EXPECT_EQ(cqe->res, static_cast<int>(kUnit));
    io_uring_cqe_seen(&ring, cqe);
  };
  std::deque<std::pair<uint64_t, uint32_t>> resident;  // block, frame; oldest first
  uint32_t next_frame = 0;
  std::atomic<uint64_t> evictions{0}, clean{0};
  Server server(c, [&](const vmem_event& e) {
    const uint64_t b = (e.offset - region) / kUnit;
    if ((c.state(e.offset) & VMEM_STATE_PRESENT) != 0) {
      (void)c.op(VMEM_OP_WAKE, e.offset);
      return;
    }
    uint32_t frame;
    if (next_frame < kFrames) {
      frame = next_frame++;
    } else {
      vmem_op out{};
      int err;
      while ((err = c.remove(region + resident.front().first * kUnit, &out)) == -EBUSY) usleep(100);
      ASSERT_EQ(err, 0);
      frame = resident.front().second;
      ++evictions;
      if ((out.state & VMEM_STATE_DIRTY) != 0) {
        transfer(true, frame, resident.front().first);
      } else {
        ++clean;
      }
      resident.pop_front();
    }
    transfer(false, frame, b);
    ASSERT_EQ(c.install(e.offset, pool + frame * kUnit), 0);
    resident.emplace_back(b, frame);
  });

  const char* seconds = getenv("KMOD_STRESS_SECONDS");
  const double end = now() + (seconds != nullptr ? atof(seconds) : 10);
  std::atomic<uint64_t> gpu_ops{0}, cpu_ops{0};
  std::atomic<int> wrong{0};
  const auto worker = [&](uint32_t owner, bool on_gpu) {
    std::mt19937 random(owner);
    std::vector<uint64_t> page_memory(1024);
    auto* page = reinterpret_cast<uint64_t*>((reinterpret_cast<uintptr_t>(page_memory.data()) + 4095) / 4096 * 4096);
    while (now() < end && wrong == 0) {
      const size_t i = random() % (shadow.size() / 4) * 4 + owner;
      volatile auto* at = reinterpret_cast<volatile uint64_t*>(blocks + i * kPage);
      const bool store = random() % 4 == 0;
      if (on_gpu) {
        const int err = gpu(kDmirrorRead, at, page);
        if (err != 0 || page[0] != shadow[i] || page[1] != ~page[0]) {
          ++wrong;
          ADD_FAILURE() << "gpu page " << i << " err " << err << ": " << page[0] << ", not " << shadow[i];
        }
        if (store) {
          page[0] += shadow.size();
          page[1] = ~page[0];
          shadow[i] = page[0];
          const int written = gpu(kDmirrorWrite, at, page);
          if (written != 0) {
            ++wrong;
            ADD_FAILURE() << "gpu store: " << written;
          }
        }
        ++gpu_ops;
      } else {
        if (at[0] != shadow[i] || at[1] != ~shadow[i]) {
          ++wrong;
          ADD_FAILURE() << "cpu page " << i << ": " << at[0] << ", not " << shadow[i];
        }
        if (store) {
          shadow[i] += shadow.size();
          at[0] = shadow[i];
          at[1] = ~shadow[i];
        }
        ++cpu_ops;
      }
    }
  };
  double worst = 0;
  const Control control(end);
  std::thread g0(worker, 0, true), g1(worker, 1, true), c0(worker, 2, false), c1(worker, 3, false);
  std::thread mapper([&] { worst = map_until(end).back(); });
  for (std::thread* t : {&g0, &g1, &c0, &c1, &mapper}) t->join();
  for (size_t i = 0; i < shadow.size() && wrong == 0; ++i) {
    const volatile auto* at = reinterpret_cast<volatile uint64_t*>(blocks + i * kPage);
    EXPECT_EQ(at[0], shadow[i]) << i;
  }
  printf(
      "[   note   ] %lu gpu and %lu cpu accesses, %lu evictions (%lu clean), longest mmap + munmap elsewhere %.1f ms; "
      "in a "
      "process apart %.1f ms\n",
      gpu_ops.load(), cpu_ops.load(), evictions.load(), clean.load(), worst, control.longest());
  EXPECT_GT(gpu_ops, 0u);
  EXPECT_GT(evictions, 0u);
  io_uring_queue_exit(&ring);
  close(file);
}

}  // namespace kmod_test
