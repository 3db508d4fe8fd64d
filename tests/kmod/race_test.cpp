// Concurrent calls: every pair of things that a process can do to the module runs at the same
// moment, while a third runs beside them; then, more often, the triples whose order decides who
// owns a frame. After each round the context's counters must agree with its blocks and slots, and
// another context's frames must have kept their contents. With a module built for it (delay_us) the
// calls sleep at racy points. KMOD_RACE_SWEEPS: how often all pairs run; KMOD_RACE_SECONDS: the
// minimum time.
#include <pthread.h>
#include <sys/eventfd.h>

#include <iterator>
#include <optional>
#include <random>

#include "kmod/context.h"
#include "kmod/neighbours.h"

namespace kmod_test {
namespace {

constexpr uint32_t kUnits = 2;
constexpr size_t kUnit = 16 * kPage;
constexpr const char* kDelay = "/sys/module/vmem/parameters/delay_us";

// The objects of one round: a pool and a region of two units, mapped; both may be destroyed.
struct World {
  World() = default;
  ~World() {
    if (frames != nullptr) munmap(frames, kUnits * kUnit);
    if (blocks != nullptr) munmap(blocks, kUnits * kUnit);
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  uint64_t block(uint32_t i) const { return region + i * kUnit; }
  uint64_t frame(uint32_t i) const { return pool + i * kUnit; }
  const volatile uint64_t* word(uint32_t i) const { return reinterpret_cast<uint64_t*>(blocks + i * kUnit); }
  const volatile uint64_t* frame_word(uint32_t i) const { return reinterpret_cast<uint64_t*>(frames + i * kUnit); }
  Places places(uint32_t i) const { return {blocks + i * kUnit, frames + i * kUnit, kUnit}; }

  Context c;
  uint64_t pool = 0, region = 0;
  char* frames = nullptr;
  char* blocks = nullptr;
};

struct Act {
  const char* name;
  void (*run)(World& w, uint32_t random);
  bool waits = false;  // for a block, if it is absent
};

void drop(void* mapping, size_t size) {
  if (mapping != MAP_FAILED) munmap(mapping, size);
}

void other_ranges(World& w, uint32_t random) {
  uint64_t offset = 0;
  if (w.c.create(random % 2 ? VMEM_KIND_POOL : VMEM_KIND_REGION, kUnit, kUnit, &offset) == 0) w.c.destroy(offset);
}
void new_eventfd(World& w, uint32_t random) {
  vmem_eventfd e{random % 3 ? eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC) : -1, 0};
  call(w.c.fd, VMEM_IOC_EVENTFD, &e);
  if (e.fd >= 0) close(e.fd);
}
void pin_of_a_block(World& w, uint32_t random) {
  vmem_pin p{};
  p.address = reinterpret_cast<uintptr_t>(random % 2 ? w.blocks : w.frames);
  p.size = kUnit;
  if (call(w.c.fd, VMEM_IOC_PIN, &p) == 0 && random % 4 != 0) {
    vmem_unpin u{p.id, 0};
    call(w.c.fd, VMEM_IOC_UNPIN, &u);
  }
}
void a_mapping_of_its_own(World& w, uint32_t random) {
  const uint64_t offset = random % 2 ? w.region : w.pool;
  void* m = mmap(nullptr, kUnits * kUnit, PROT_READ | PROT_WRITE, MAP_SHARED, w.c.fd, static_cast<off_t>(offset));
  if (m == MAP_FAILED) return;
  if (random % 4 < 2) load(static_cast<uint64_t*>(m));
  // Unmap in two parts. The next mapping there belongs to another thread, a ring perhaps, and must
  // not be unmapped with it.
  munmap(static_cast<char*>(m) + kPage, kPage);
  void* moved = mremap(m, kPage, kPage, MREMAP_MAYMOVE);
  if (moved == MAP_FAILED) moved = m;
  load(static_cast<uint64_t*>(moved));
  drop(moved, kPage);
  drop(static_cast<char*>(m) + 2 * kPage, kUnits * kUnit - 2 * kPage);
}
void a_child(World& w, uint32_t random) {
  const pid_t child = fork();
  if (child == 0) {
    if (random % 2) w.c.release(w.frame(0), 1);
    void* m = mmap(nullptr, kUnit, PROT_READ, MAP_SHARED, w.c.fd, static_cast<off_t>(w.region));
    if (m != MAP_FAILED) load(static_cast<uint64_t*>(m));
    _exit(0);
  }
  if (child > 0) waitpid(child, nullptr, 0);
}
void events(World& w, uint32_t) {
  vmem_event e[4];
  const ssize_t n = read(w.c.fd, e, sizeof e);
  (void)n;
}

constexpr Act kActs[] = {
    {"CREATE", other_ranges},
    {"DESTROY of the pool", [](World& w, uint32_t) { w.c.destroy(w.pool); }},
    {"DESTROY of the region", [](World& w, uint32_t) { w.c.destroy(w.region); }},
    {"POPULATE", [](World& w, uint32_t random) { w.c.populate(w.frame(0), 1 + random % 2); }},
    {"RELEASE", [](World& w, uint32_t random) { w.c.release(w.frame(0), 1 + random % 2); }},
    {"INSTALL", [](World& w, uint32_t random) { w.c.install(w.block(random % 2), w.frame(0), random / 2 % 2); }},
    {"REMOVE", [](World& w, uint32_t random) { w.c.remove(w.block(random % 2)); }},
    {"PROTECT", [](World& w, uint32_t random) { w.c.op(VMEM_OP_PROTECT, w.block(0), 0, random % 2 * VMEM_OPF_CLEAN); }},
    {"UNPROTECT", [](World& w, uint32_t) { w.c.op(VMEM_OP_UNPROTECT, w.block(0)); }},
    {"WATCH", [](World& w, uint32_t) { w.c.op(VMEM_OP_WATCH, w.block(0)); }},
    {"FAIL", [](World& w, uint32_t random) { w.c.op(VMEM_OP_FAIL, w.block(random % 2)); }},
    {"UNFAIL", [](World& w, uint32_t random) { w.c.op(VMEM_OP_UNFAIL, w.block(random % 2)); }},
    {"WAKE", [](World& w, uint32_t random) { w.c.op(VMEM_OP_WAKE, w.block(random % 2)); }},
    {"QUERY", [](World& w, uint32_t random) { w.c.op(VMEM_OP_QUERY, w.block(random % 2)); }},
    {"EVENTFD", new_eventfd},
    {"PIN", pin_of_a_block, true},
    {"UNPIN",
     [](World& w, uint32_t random) {
       vmem_unpin u{1 + random % 2, 0};
       call(w.c.fd, VMEM_IOC_UNPIN, &u);
     }},
    {"INFO",
     [](World& w, uint32_t) {
       vmem_info i{};
       call(w.c.fd, VMEM_IOC_INFO, &i);
     }},
    {"SHUTDOWN", [](World& w, uint32_t) { call(w.c.fd, VMEM_IOC_SHUTDOWN); }},
    {"read", events},
    {"load", [](World& w, uint32_t random) { load(w.word(random % 2)); }, true},
    {"store", [](World& w, uint32_t random) { store(const_cast<volatile uint64_t*>(w.word(random % 2)), random); },
     true},
    {"load of a frame", [](World& w, uint32_t random) { load(w.frame_word(random % 2)); }},
    {"madvise", [](World& w, uint32_t) { madvise(w.blocks, kUnits * kUnit, MADV_DONTNEED); }},
    {"mmap, munmap and mremap", a_mapping_of_its_own, true},
    {"vmsplice", [](World& w, uint32_t random) { references_in_a_pipe(w.places(0), random); }, true},
    {"fork and exit", a_child, true},
    {"close", [](World& w, uint32_t) { close(dup(w.c.fd)); }},
    {"io_uring", [](World& w, uint32_t random) { io_uring_reads(w.places(random / 2 % 2), random); }, true},
    {"userfaultfd", [](World& w, uint32_t random) { a_userfaultfd(w.places(0), random); }, true},
    {"memory cgroups", [](World&, uint32_t random) { MemoryCgroups::use(random); }},
    {"process_vm_readv and /proc/PID/mem",
     [](World& w, uint32_t random) { remote_reads(w.places(random / 2 % 2), random); }, true},
};
constexpr uint32_t kCount = std::size(kActs);

uint32_t act(const std::string& name) {
  for (uint32_t i = 0; i < kCount; ++i)
    if (name == kActs[i].name) return i;
  ADD_FAILURE() << "no act " << name;
  return 0;
}

// Each of these three decides something that the other two depend on.
struct Three {
  const char *a, *b, *beside;
};
constexpr Three kThrees[] = {
    {"POPULATE", "DESTROY of the pool", "INSTALL"},
    {"POPULATE", "RELEASE", "INSTALL"},
    {"DESTROY of the region", "REMOVE", "RELEASE"},
    {"INSTALL", "DESTROY of the region", "RELEASE"},
    {"load of a frame", "RELEASE", "POPULATE"},
    {"store", "RELEASE", "REMOVE"},
    {"load", "DESTROY of the region", "read"},
    {"PIN", "UNPIN", "REMOVE"},
    {"io_uring", "REMOVE", "RELEASE"},
    {"POPULATE", "RELEASE", "memory cgroups"},
};

}  // namespace

class KmodRace : public Kmod {
 protected:
  void SetUp() override {
    Kmod::SetUp();
    if (IsSkipped()) return;
    if (std::ofstream delay(kDelay); delay) delay << 1500;
    groups_.emplace();
  }
  void TearDown() override {
    if (std::ofstream delay(kDelay); delay) delay << 0;
    groups_.reset();
  }

  // One world in a random state: runs the two acts at once, and repeats the third until both are
  // done.
  void round(uint32_t a, uint32_t b, uint32_t beside) {
    ++rounds_;
    SCOPED_TRACE(std::string(kActs[a].name) + ", " + kActs[b].name + ", beside them " + kActs[beside].name);
    World w;
    ASSERT_EQ(w.c.create(VMEM_KIND_POOL, kUnits * kUnit, kUnit, &w.pool), 0);
    ASSERT_EQ(w.c.create(VMEM_KIND_REGION, kUnits * kUnit, kUnit, &w.region), 0);
    w.frames = w.c.map(w.pool, kUnits * kUnit);
    w.blocks = w.c.map(w.region, kUnits * kUnit);
    ASSERT_NE(w.frames, nullptr);
    ASSERT_NE(w.blocks, nullptr);
    fcntl(w.c.fd, F_SETFL, O_RDWR | O_NONBLOCK);
    const uint32_t start = dice() % 4;
    if (start > 0) {
      ASSERT_EQ(w.c.populate(w.pool, start > 2 ? 2 : 1), 0);
    }
    if (start > 1) {
      ASSERT_EQ(w.c.install(w.block(0), w.frame(0)), 0);
      EXPECT_EQ(*w.word(0), 0u) << "a new frame is not zero";
    }
    const uint32_t numbers[] = {dice(), dice(), dice()};
    std::atomic<int> left{2}, ready{0};
    const auto go = [&](uint32_t which, uint32_t number) {
      ready.fetch_add(1);
      while (ready.load() < 2) sched_yield();
      usleep(number / 8 % 4 == 0 ? number / 64 % 1000 : 0);
      kActs[which].run(w, number);
      left.fetch_sub(1);
    };
    std::thread first(go, a, numbers[0]), second(go, b, numbers[1]);
    for (uint32_t number = numbers[2]; left.load() > 0; ++number) {
      kActs[beside].run(w, number);
      // No thread may wait long: each reported fault gets a frame, or fails.
      vmem_event e{};
      if (read(w.c.fd, &e, sizeof e) != sizeof e || e.type != VMEM_EVENT_FAULT) continue;
      if (number % 2 == 0 || w.c.install(e.offset, w.frame(number / 2 % 2)) != 0) w.c.op(VMEM_OP_FAIL, e.offset);
    }
    first.join();
    second.join();
    account(w);
  }

  // Checks that the counters of the context agree with its blocks and slots.
  static void account(World& w) {
    vmem_info info{};
    if (call(w.c.fd, VMEM_IOC_INFO, &info) == -ESHUTDOWN) return;
    uint64_t installed[kUnits] = {};
    uint32_t present = 0;
    for (uint32_t i = 0; i < kUnits; ++i) {
      vmem_op q{};
      if (w.c.op(VMEM_OP_QUERY, w.block(i), 0, 0, &q) != 0 || (q.state & VMEM_STATE_PRESENT) == 0) continue;
      EXPECT_TRUE(q.frame == w.frame(0) || q.frame == w.frame(1)) << std::hex << q.frame;
      for (uint32_t k = 0; k < present; ++k) EXPECT_NE(q.frame, installed[k]) << "one frame in two blocks";
      installed[present++] = q.frame;
      EXPECT_EQ(w.c.populate(q.frame, 1), -EEXIST) << "a block's frame whose slot is empty";
      EXPECT_EQ(load(w.word(i)), 0);
    }
    EXPECT_EQ(info.installed_bytes, present * kUnit);
    uint32_t populated = 0;
    for (uint32_t i = 0; i < kUnits; ++i) {
      const int err = w.c.release(w.frame(i), 1);
      populated += err == 0 || err == -EBUSY;
    }
    EXPECT_EQ(info.frame_bytes, populated * kUnit);
  }

  // Another context's memory, which would get any frame that is freed while in use.
  class Bystander {
   public:
    Bystander() : pair_(context_, kFrames, kUnit) {
      for (uint32_t i = 0; i < kFrames; ++i)
        for (size_t at = 0; at < kUnit; at += kPage) pair_.frame_word(i, at) = stamp(i, at);
    }
    void check() {
      for (uint32_t i = 0; i < kFrames; ++i)
        for (size_t at = 0; at < kUnit; at += kPage)
          ASSERT_EQ(pair_.frame_word(i, at), stamp(i, at)) << "somebody wrote to another context's frame " << i;
    }
    static constexpr uint32_t kFrames = 32;

   private:
    static uint64_t stamp(uint32_t i, size_t at) { return 0x5eed000000000000 + i * kUnit + at; }
    Context context_;
    Pair pair_;
  };

  void sweep(const std::function<void()>& rounds) {
    KnobGuard timeout("fault_timeout_ms", 100), always("pressure_percent", 101);
    const double start = now();
    const uint64_t contexts = knob("contexts"), bytes = knob("frame_bytes");
    {
      Bystander bystander;
      for (uint32_t i = 0; (i < set("SWEEPS", 1) || now() - start < set("SECONDS", 0)) && !HasFailure(); ++i) {
        rounds();
        bystander.check();
      }
    }
    printf("[   note   ] %u rounds in %.0f s\n", rounds_, now() - start);
    EXPECT_TRUE(eventually([&] { return knob("contexts") == contexts && knob("frame_bytes") == bytes; }));
    EXPECT_EQ(knob("installed_bytes"), 0u);
    EXPECT_EQ(knob("pinned_bytes"), 0u);
    EXPECT_EQ(knob("regions"), 0u);
  }
  static uint32_t set(const char* what, uint32_t otherwise) {
    const char* value = getenv((std::string("KMOD_RACE_") + what).c_str());
    return value != nullptr ? static_cast<uint32_t>(strtoul(value, nullptr, 10)) : otherwise;
  }

  uint32_t dice() { return static_cast<uint32_t>(random_()); }
  std::mt19937 random_{static_cast<uint32_t>(getpid())};
  uint32_t rounds_ = 0;
  std::optional<MemoryCgroups> groups_;
};

TEST_F(KmodRace, EveryTwoActsAtOnceLeaveTheAccountTrue) {
  sweep([&] {
    for (uint32_t a = 0; a < kCount; ++a)
      for (uint32_t b = a; b < kCount && !HasFailure(); ++b) {
        uint32_t beside = dice() % kCount;
        while (kActs[beside].waits) beside = dice() % kCount;
        round(a, b, beside);
      }
  });
}

TEST_F(KmodRace, ThreesThatDecideWhoOwnsAFrame) {
  sweep([&] {
    for (const Three& three : kThrees)
      for (int i = 0; i < 40 && !HasFailure(); ++i) round(act(three.a), act(three.b), act(three.beside));
  });
}

}  // namespace kmod_test
