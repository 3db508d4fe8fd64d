// Which contexts are asked for memory when it is short: those that a memory cgroup at its limit
// pays for, and those with frames on the node that is short. No context is asked while memory is
// available without.
#include <linux/mempolicy.h>
#include <sys/syscall.h>

#include <optional>

#include "kmod/context.h"

namespace kmod_test {
namespace {

const std::string kGroups = "/sys/fs/cgroup/";
constexpr size_t kMiB = size_t{1} << 20;

uint64_t number(const std::string& path, const std::string& key) {
  std::ifstream in(path);
  std::string word;
  while (in >> word)
    if (word == key && in >> word) return strtoull(word.c_str(), nullptr, 10);
  return 0;
}

// A memory cgroup with a limit and without swap.
class Group {
 public:
  Group(const std::string& name, uint64_t limit) : path(kGroups + name) {
    put(kGroups + "cgroup.subtree_control", "+memory");
    ready = mkdir(path.c_str(), 0755) == 0 && put(path + "/memory.max", std::to_string(limit));
    if (access((path + "/memory.swap.max").c_str(), F_OK) == 0) put(path + "/memory.swap.max", "0");
  }
  ~Group() {
    EXPECT_TRUE(eventually([&] { return rmdir(path.c_str()) == 0; }));
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  // Runs `attempt` in the group. Returns 0, the step that failed, or the negative signal that ended
  // it.
  int run(const std::function<int()>& attempt) const {
    const pid_t child = fork();
    if (child == 0) _exit(put(path + "/cgroup.procs", "0") ? attempt() : 100);
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  uint64_t kills() const { return number(path + "/memory.events", "oom_kill"); }

  std::string path;
  bool ready = false;
};

// Answers PRESSURE as the runtime does: it gives back free frames, slot by slot.
class Giver {
 public:
  Giver(Context& c, uint64_t pool, uint32_t count)
      : thread_([this, &c, pool, count] {
          uint32_t next = 0;
          while (!stop_) {
            vmem_event e{};
            if (!c.event(&e, 50) || e.type != VMEM_EVENT_PRESSURE) continue;
            asked += e.bytes;
            for (uint64_t given = 0; given < e.bytes && next < count; given += kHuge)
              if (c.release(pool + next++ * kHuge, 1) != 0) return;
          }
        }) {}
  ~Giver() {
    stop_ = true;
    thread_.join();
  }
  Giver(const Giver&) = delete;
  Giver& operator=(const Giver&) = delete;
  std::atomic<uint64_t> asked{0};

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// Touches ordinary memory page by page until `enough`.
bool touch_pages(size_t size, const std::function<bool()>& enough = nullptr) {
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return false;
  madvise(p, size, MADV_NOHUGEPAGE);
  size_t at = 0;
  for (; at < size && (enough == nullptr || at % (64 * kPage) != 0 || !enough()); at += kPage)
    static_cast<volatile char*>(p)[at] = 1;
  munmap(p, size);
  return at < size;
}

}  // namespace

class KmodPressure : public Kmod {
 protected:
  void SetUp() override {
    Kmod::SetUp();
    if (!IsSkipped() && getuid() != 0) GTEST_SKIP() << "needs root for cgroups and knobs";
  }
};

// A cgroup of 160 MiB cannot hold 100 MiB of free frames and 100 MiB of ordinary memory, unless
// frames are given back.
TEST_F(KmodPressure, ACgroupAtItsLimitAsksItsOwnContextsAndIsNotKilledWhileTheyHoldFreeFrames) {
  const Group group("vmem-limit", 160 * kMiB);
  if (!group.ready) GTEST_SKIP() << "no memory cgroups here";
  Context outside;
  uint64_t pool = 0;
  ASSERT_EQ(outside.create(VMEM_KIND_POOL, 20 * kHuge, kHuge, &pool), 0);
  ASSERT_EQ(outside.populate(pool, 20), 0);
  const int end = group.run([] {
    Context c;
    uint64_t own = 0;
    if (c.create(VMEM_KIND_POOL, 50 * kHuge, kHuge, &own) != 0) return 1;
    if (c.populate(own, 50) != 0) return 2;
    const Giver giver(c, own, 50);
    touch_pages(100 * kMiB);
    return giver.asked > 0 ? 0 : 3;
  });
  EXPECT_EQ(end, 0) << "9 as a negative number: killed for want of memory; 3: nobody was asked";
  EXPECT_EQ(group.kills(), 0u);
  vmem_event e{};
  EXPECT_FALSE(outside.event(&e, 0)) << "asked for another cgroup's sake";
  EXPECT_EQ(outside.info().asked_bytes, 0u);
}

// The kernel waits once, for seconds, for a context that never answers. Then the cgroup's own OOM
// killer decides, as without the module.
TEST_F(KmodPressure, AContextThatNeverAnswersDoesNotKeepItsCgroupWaiting) {
  const Group group("vmem-silent", 160 * kMiB);
  if (!group.ready) GTEST_SKIP() << "no memory cgroups here";
  const double start = now();
  const int end = group.run([] {
    Context c;
    uint64_t own = 0;
    if (c.create(VMEM_KIND_POOL, 50 * kHuge, kHuge, &own) != 0 || c.populate(own, 50) != 0) return 1;
    touch_pages(100 * kMiB);
    return 0;
  });
  EXPECT_EQ(end, -SIGKILL);
  EXPECT_LT(now() - start, 60.0 * vmem::test::patience()) << "the killer came late";
}

// A caller that requests more frames than its cgroup can hold gets an error, at whichever
// allocation memory runs out, and loses nothing. With frames of one page, the memory for their
// records may run out too.
TEST_F(KmodPressure, AContextThatAsksForMoreThanItsCgroupHasIsRefusedAndNotKilled) {
  const Group group("vmem-more", 24 * kMiB);
  if (!group.ready) GTEST_SKIP() << "no memory cgroups here";
  const int end = group.run([] {
    constexpr uint32_t kSlots = 24 * kMiB / kPage;
    Context c;
    uint64_t own = 0;
    if (c.create(VMEM_KIND_POOL, kSlots * kPage, kPage, &own) != 0) return 1;
    uint32_t full = 0;
    for (int round = 0; round < 60; ++round) {
      vmem_populate p{};
      if (c.populate(own + full * kPage, kSlots - full, -1, 0, &p) != -ENOMEM) return 2;
      full += p.done;
      const uint32_t back = 1 + static_cast<uint32_t>(round) * 37 % 400;
      if (full < back) return 3;
      full -= back;
      if (c.release(own + full * kPage, back) != 0) return 4;
    }
    return 0;
  });
  EXPECT_EQ(end, 0) << "9 as a negative number: killed for want of memory; 2: not refused";
  EXPECT_EQ(group.kills(), 0u);
}

// The cgroup's memory is full, mostly with free frames of the context, and the thread that could
// give them back makes the call. It repeats the call until it is refused for want of memory, and
// once more after some frames have gone back. Returns as Group::run() does.
int call_until_refused(Context& c, const std::function<int(uint32_t)>& attempt) {
  constexpr uint32_t kSlots = 24 * kMiB / kPage;
  uint64_t own = 0;
  vmem_populate p{};
  uint32_t calls = 0;
  if (c.create(VMEM_KIND_POOL, kSlots * kPage, kPage, &own) != 0 || attempt(calls++) != 0) return 1;
  // This process's own pages are locked, so that it is not killed for one of them.
  if (mlockall(MCL_CURRENT) != 0) return 1;
  if (c.populate(own, kSlots, -1, 0, &p) != -ENOMEM) return 2;
  int err = 0;
  while (err == 0 && calls < 120000) err = attempt(calls++);
  if (err != -ENOMEM) return 3;
  if (c.info().asked_bytes == 0) return 4;
  if (c.release(own, p.done / 2) != 0) return 5;
  return attempt(calls) == 0 ? 0 : 6;
}

// The only thread that could give frames back is in the call itself: it gets -ENOMEM.
TEST_F(KmodPressure, ACallThatFindsItsCgroupFullAnswersAndIsNotKilledForItsRecords) {
  const Group group("vmem-calls", 24 * kMiB);
  if (!group.ready) GTEST_SKIP() << "no memory cgroups here";
  const char* const kKilled = "9 as a negative number: killed for want of memory; 3: not refused; 4: nobody asked";
  uint64_t offset = 0;
  const auto fails = [&](Context& c, uint64_t region, uint32_t i) {
    return c.op(VMEM_OP_FAIL, region + uint64_t{i} * 64 * kPage);  // each in its own nodes of the index
  };
  EXPECT_EQ(group.run([&] {
    Context c;
    uint64_t region = 0;
    if (c.create(VMEM_KIND_REGION, uint64_t{1} << 40, kPage, &region) != 0) return 10;
    return call_until_refused(c, [&](uint32_t i) { return fails(c, region, i); });
  }),
            0)
      << kKilled;
  EXPECT_EQ(group.run([&] {
    Context c;
    return call_until_refused(c, [&](uint32_t) { return c.create(VMEM_KIND_POOL, kPage, kPage, &offset); });
  }),
            0)
      << kKilled;
  void* const buffer = mmap(nullptr, kMiB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  ASSERT_NE(buffer, MAP_FAILED);
  EXPECT_EQ(group.run([&] {
    Context c;
    return call_until_refused(c, [&](uint32_t) {
      vmem_pin pin{};
      pin.address = reinterpret_cast<uintptr_t>(buffer);
      pin.size = kMiB;
      return call(c.fd, VMEM_IOC_PIN, &pin);
    });
  }),
            0)
      << kKilled;
  munmap(buffer, kMiB);
  EXPECT_EQ(group.kills(), 0u);
}

// Page cache at a cgroup's limit is replaced as long as the file is written: that is no reason to
// take frames.
TEST_F(KmodPressure, PageCacheAtACgroupsLimitAsksNobody) {
  const int limit = checked_kernel() ? 64 : 160, written = 2 * limit - 20;  // MiB; the pool has 20
  const Group group("vmem-cache", static_cast<uint64_t>(limit) * kMiB);
  if (!group.ready) GTEST_SKIP() << "no memory cgroups here";
  const std::string file = std::string(getenv("TMPDIR") != nullptr ? getenv("TMPDIR") : "/var/tmp") + "/vmem-cache";
  const int end = group.run([&] {
    Context c;
    uint64_t own = 0;
    if (c.create(VMEM_KIND_POOL, 10 * kHuge, kHuge, &own) != 0 || c.populate(own, 10) != 0) return 1;
    const int fd = open(file.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    const std::vector<char> piece(kMiB, 'x');
    for (int i = 0; i < written; ++i) {
      if (write(fd, piece.data(), piece.size()) != static_cast<ssize_t>(kMiB)) return 2;
      if (i % (limit / 5) == 0) fdatasync(fd);  // clean pages can be dropped
    }
    close(fd);
    return c.info().asked_bytes == 0 ? 0 : 3;
  });
  unlink(file.c_str());
  EXPECT_EQ(end, 0) << "3: a write asked for frames";
}

TEST_F(KmodPressure, WhoHasFramesOnTheNodeThatIsShortIsAsked) {
  if (access("/sys/devices/system/node/node1", F_OK) != 0) GTEST_SKIP() << "one memory node";
  KnobGuard always("pressure_percent", 101);
  Context near, far;
  uint64_t near_pool = 0, far_pool = 0;
  ASSERT_EQ(near.create(VMEM_KIND_POOL, 8 * kHuge, kHuge, &near_pool), 0);
  ASSERT_EQ(near.populate(near_pool, 8, 0, VMEM_POPULATE_STRICT), 0);
  ASSERT_EQ(far.create(VMEM_KIND_POOL, 8 * kHuge, kHuge, &far_pool), 0);
  ASSERT_EQ(far.populate(far_pool, 8, 1, VMEM_POPULATE_STRICT), 0);
  const auto asked = [&] { return far.info().asked_bytes > 0; };
  const pid_t child = fork();
  if (child == 0) {
    unsigned long nodes = 1ul << 1;
    if (syscall(SYS_set_mempolicy, MPOL_BIND, &nodes, 8 * sizeof nodes) != 0) _exit(2);
    // The node has 512 MiB; the far context must be asked before the node's memory is used up.
    _exit(touch_pages(1024 * kMiB, asked) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  // On a busy machine the memory may be used up before the child has noticed.
  EXPECT_TRUE(status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)) << status;
  EXPECT_GT(far.info().asked_bytes, 0u);
  EXPECT_EQ(near.info().asked_bytes, 0u) << "its node has memory";
}

TEST_F(KmodPressure, WhatWasAskedForLosesItsWeight) {
  KnobGuard always("pressure_percent", 101);
  Context c;
  uint64_t pool = 0;
  ASSERT_EQ(c.create(VMEM_KIND_POOL, 8 * kHuge, kHuge, &pool), 0);
  ASSERT_EQ(c.populate(pool, 8), 0);
  ASSERT_TRUE(put("/proc/sys/vm/drop_caches", "2"));  // runs every shrinker
  const uint64_t asked = c.info().asked_bytes;
  ASSERT_GT(asked, 0u);
  EXPECT_LE(asked, 8 * kHuge);
  EXPECT_TRUE(vmem::test::eventually([&] { return c.info().asked_bytes <= asked / 2; }, std::chrono::seconds(30),
                                     std::chrono::milliseconds(100)))
      << "asked for ever";
}

// The list that the shrinker walks in the middle of other allocations contains frames, and a walk
// visits only some of them: contexts without frames cost nothing. When one walk visited all of
// them, a scan took 20,000 locks.
TEST_F(KmodPressure, ContextsWithoutFramesAreNeitherAskedNorLookedAt) {
  KnobGuard always("pressure_percent", 101);
  Context c;
  uint64_t pool = 0;
  ASSERT_EQ(c.create(VMEM_KIND_POOL, 2 * kHuge, kHuge, &pool), 0);
  ASSERT_EQ(c.populate(pool, 2), 0);
  std::vector<int> many;
  for (int i = 0; i < 500; ++i) {
    many.push_back(open(kDevice, O_RDWR | O_CLOEXEC));
    ASSERT_GE(many.back(), 0);
  }
  const uint64_t before = knob("pressure_requests");
  ASSERT_TRUE(put("/proc/sys/vm/drop_caches", "2"));
  EXPECT_EQ(knob("pressure_requests"), before + 1) << "the one that has frames, found in one go";
  for (const int fd : many) close(fd);
}

}  // namespace kmod_test
