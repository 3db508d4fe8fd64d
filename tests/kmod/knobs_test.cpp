// sysfs: bounds, effect, notification; limits; memory pressure.
#include <dirent.h>

#include <algorithm>

#include "kmod/context.h"

namespace kmod_test {

class KmodKnobs : public Kmod {
 protected:
  void SetUp() override {
    Kmod::SetUp();
    if (!IsSkipped() && getuid() != 0) GTEST_SKIP() << "needs root to turn knobs";
  }
};

TEST_F(KmodKnobs, BoundsAreChecked) {
  const struct {
    const char* name;
    const char* low;
    const char* high;
  } bad[] = {{"fault_timeout_ms", "99", "3600001"},
             {"watermark_low_percent", "-1", "51"},
             {"watermark_high_percent", "-1", "91"},
             {"frame_order", "-1", "10"},
             {"trap_enabled", "-1", "2"},
             {"readahead_bytes", "-1", "4294967297"},
             {"frame_limit_bytes", "-1", "1125899906842625"}};
  for (const auto& b : bad) {
    const uint64_t before = knob(b.name);
    EXPECT_NE(set_knob(b.name, b.low), 0) << b.name;
    EXPECT_EQ(set_knob(b.name, b.high), -ERANGE) << b.name;
    EXPECT_EQ(set_knob(b.name, "seven"), -EINVAL) << b.name;
    EXPECT_EQ(set_knob(b.name, ""), 0) << "an empty write is none";
    EXPECT_EQ(knob(b.name), before) << b.name;
  }
  EXPECT_EQ(set_knob("watermark_low_percent", "40"), -EINVAL) << "low above high";
  EXPECT_EQ(set_knob("contexts", "1"), -EACCES);
}

TEST_F(KmodKnobs, AChangeIsToldByPollOnTheFileAndByAnEvent) {
  Context c;
  const int fd = open((std::string(kSysfs) + "readahead_bytes").c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  char text[32];
  ASSERT_GT(read(fd, text, sizeof text), 0);
  pollfd p{fd, POLLPRI | POLLERR, 0};
  EXPECT_EQ(poll(&p, 1, 0), 0);
  vmem_event e{};
  EXPECT_FALSE(c.event(&e, 0));
  KnobGuard guard("readahead_bytes", 12345);
  EXPECT_EQ(poll(&p, 1, 1000), 1);
  ASSERT_TRUE(c.event(&e, 1000));
  EXPECT_EQ(e.type, static_cast<uint32_t>(VMEM_EVENT_KNOBS));
  EXPECT_EQ(c.info().readahead_bytes, 12345u);
  EXPECT_FALSE(c.event(&e, 0)) << "told once";
  ASSERT_EQ(set_knob("readahead_bytes", "12345"), 0);
  EXPECT_FALSE(c.event(&e, 0)) << "the same value is no change";
  close(fd);
}

TEST_F(KmodKnobs, LimitsHoldMachineWideAndPerContext) {
  Context a, b;
  uint64_t pool_a = 0, pool_b = 0;
  ASSERT_EQ(a.create(VMEM_KIND_POOL, 16 * kHuge, kHuge, &pool_a), 0);
  ASSERT_EQ(b.create(VMEM_KIND_POOL, 16 * kHuge, kHuge, &pool_b), 0);
  const uint64_t refused = knob("refused_limit");
  {
    KnobGuard limit("context_limit_bytes", 3 * kHuge);
    vmem_populate out{};
    EXPECT_EQ(a.populate(pool_a, 4, -1, 0, &out), -EDQUOT);
    EXPECT_EQ(out.done, 3u);
    EXPECT_EQ(b.populate(pool_b, 3), 0) << "each context has its own";
    EXPECT_EQ(knob("refused_limit"), refused + 1);
  }
  {
    KnobGuard limit("frame_limit_bytes", knob("frame_bytes") + kHuge);
    EXPECT_EQ(a.populate(pool_a + 3 * kHuge, 1), 0);
    EXPECT_EQ(b.populate(pool_b + 3 * kHuge, 1), -EDQUOT);
    EXPECT_EQ(a.release(pool_a, 1), 0);
    EXPECT_EQ(b.populate(pool_b + 3 * kHuge, 1), 0);
  }
}

TEST_F(KmodKnobs, CountersComeBackToWhereTheyWere) {
  const uint64_t bytes = knob("frame_bytes"), contexts = knob("contexts"), regions = knob("regions");
  uint64_t nodes = 0;
  const auto node_bytes = [] {
    uint64_t sum = 0;
    for (int node = 0; node < 8; ++node) {
      const uint64_t n = knob("node" + std::to_string(node) + "_frame_bytes");
      if (n != UINT64_MAX) sum += n;
    }
    return sum;
  };
  nodes = node_bytes();
  {
    Context c;
    Pair p(c, 3);
    ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
    EXPECT_EQ(knob("frame_bytes"), bytes + 3 * kHuge);
    EXPECT_EQ(knob("installed_bytes"), kHuge);
    EXPECT_EQ(node_bytes(), nodes + 3 * kHuge);
    EXPECT_EQ(knob("contexts"), contexts + 1);
    EXPECT_EQ(knob("regions"), regions + 1);
  }
  EXPECT_TRUE(eventually([&] {
    return knob("frame_bytes") == bytes && knob("contexts") == contexts && knob("regions") == regions &&
           knob("installed_bytes") == 0 && node_bytes() == nodes;
  }));
}

TEST_F(KmodKnobs, FrameOrderMakesPiecesSmallerAndTheyStillWork) {
  for (const int order : {4, 0}) {
    KnobGuard guard("frame_order", static_cast<uint64_t>(order));
    Context c;
    Pair p(c, 2);
    ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
    for (size_t at = 0; at < kHuge; at += kPage) p.word(0, at) = at + 1;
    EXPECT_EQ(smaps(p.blocks, "FilePmdMapped"), 0u);
    vmem_op out{};
    ASSERT_EQ(c.remove(p.block(0), &out), 0);
    EXPECT_NE(out.state & VMEM_STATE_DIRTY, 0u);
    for (size_t at = 0; at < kHuge; at += kPage) ASSERT_EQ(p.frame_word(0, at), at + 1);
    vmem_pin pin{};
    ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
    pin.address = reinterpret_cast<uintptr_t>(p.blocks + 9 * kPage);
    pin.size = kPage;
    ASSERT_EQ(call(c.fd, VMEM_IOC_PIN, &pin), 0);
    EXPECT_EQ(c.remove(p.block(0)), -EBUSY);
    vmem_unpin unpin{pin.id, 0};
    ASSERT_EQ(call(c.fd, VMEM_IOC_UNPIN, &unpin), 0);
    EXPECT_EQ(c.remove(p.block(0)), 0);
    EXPECT_EQ(c.release(p.pool, 2), 0);
  }
}

TEST_F(KmodKnobs, TrapsCanBeTurnedOffForNewRegions) {
  KnobGuard guard("trap_enabled", 0);
  Context c;
  EXPECT_EQ(c.features & VMEM_FEATURE_TRAP, 0u);
  uint64_t offset = 0;
  EXPECT_EQ(c.create(VMEM_KIND_REGION, kHuge, kHuge, &offset), -EPERM);
  EXPECT_EQ(c.create(VMEM_KIND_POOL, kHuge, kHuge, &offset), 0);
}

TEST_F(KmodKnobs, FramesComeFromTheNodeAskedFor) {
  Context c;
  uint64_t pool = 0;
  ASSERT_EQ(c.create(VMEM_KIND_POOL, 16 * kHuge, kHuge, &pool), 0);
  uint32_t at = 0;
  int nodes = 0;
  for (int node = 0; node < 8; ++node) {
    const std::string name = "node" + std::to_string(node) + "_frame_bytes";
    if (access(("/sys/devices/system/node/node" + std::to_string(node)).c_str(), F_OK) != 0) continue;
    const uint64_t before = knob(name);
    ASSERT_EQ(c.populate(pool + at * kHuge, 2, node, VMEM_POPULATE_STRICT), 0) << node;
    EXPECT_EQ(knob(name), before + 2 * kHuge) << node;
    at += 2;
    ++nodes;
  }
  printf("[   note   ] %d memory nodes\n", nodes);
}

// A process that may use the memory of some nodes only gets no frames on another node, whether it
// names the node or not.
TEST_F(KmodKnobs, FramesStayInTheCallersCpuset) {
  if (access("/sys/devices/system/node/node1", F_OK) != 0) GTEST_SKIP() << "one memory node";
  const std::string groups = "/sys/fs/cgroup/", group = groups + "vmem-cpuset";
  std::ofstream(groups + "cgroup.subtree_control") << "+cpuset" << std::flush;
  if (mkdir(group.c_str(), 0755) != 0 || access((group + "/cpuset.mems").c_str(), F_OK) != 0) {
    rmdir(group.c_str());
    GTEST_SKIP() << "no cpuset of control groups here";
  }
  const pid_t child = fork();
  if (child == 0) {
    const auto put = [&group](const char* name, const char* value) {
      return (std::ofstream(group + name) << value << std::flush).good();
    };
    if (!put("/cpuset.mems", "0") || !put("/cgroup.procs", "0")) _exit(1);
    Context c;
    uint64_t pool = 0;
    if (c.create(VMEM_KIND_POOL, 2 * kHuge, kHuge, &pool) != 0) _exit(2);
    if (c.populate(pool, 1, 1, VMEM_POPULATE_STRICT) != -ENOMEM) _exit(3);
    const uint64_t before = knob("node1_frame_bytes");
    if (c.populate(pool, 2, 1) != 0) _exit(4);
    _exit(knob("node1_frame_bytes") == before ? 0 : 5);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "step " << WEXITSTATUS(status);
  EXPECT_TRUE(eventually([&] { return rmdir(group.c_str()) == 0; }));
}

TEST_F(KmodKnobs, ShrinkersThatRunWhileMemoryIsAvailableAskNobody) {
  Context c;
  uint64_t pool = 0;
  ASSERT_EQ(c.create(VMEM_KIND_POOL, 8 * kHuge, kHuge, &pool), 0);
  ASSERT_EQ(c.populate(pool, 8), 0);
  const uint64_t before = knob("pressure_requests");
  std::ofstream("/proc/sys/vm/drop_caches") << 2 << std::flush;
  EXPECT_EQ(knob("pressure_requests"), before);
}

TEST_F(KmodKnobs, MemoryPressureAsksForFramesAndAnAnswerIsCounted) {
  KnobGuard always("pressure_percent", 101);
  Context c;
  uint64_t pool = 0;
  ASSERT_EQ(c.create(VMEM_KIND_POOL, 64 * kHuge, kHuge, &pool), 0);
  ASSERT_EQ(c.populate(pool, 64), 0);
  const uint64_t before = knob("pressure_requests");
  const int drop = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(drop, 0);
  ASSERT_EQ(write(drop, "2", 1), 1);  // runs every shrinker
  close(drop);
  vmem_event e{};
  ASSERT_TRUE(c.event(&e, 5000));
  EXPECT_EQ(e.type, static_cast<uint32_t>(VMEM_EVENT_PRESSURE));
  EXPECT_GT(e.bytes, 0u);
  EXPECT_LE(e.bytes, 64 * kHuge);
  EXPECT_GT(knob("pressure_requests"), before);
  EXPECT_GE(c.info().asked_bytes, e.bytes);
  ASSERT_EQ(c.release(pool, 64), 0);
  EXPECT_EQ(c.info().asked_bytes, 0u);
}

}  // namespace kmod_test
