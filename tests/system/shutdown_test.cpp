// vmem_shutdown while other threads never stop calling. In processes of their own, so that a hang
// fails instead of hanging the suite.
#include <atomic>
#include <thread>

#include "child.h"
#include "support.h"

namespace {

using systest::SystemTest;

constexpr size_t kMiB = 1 << 20;
constexpr unsigned kCallers = 8, kShutdowns = 20;

class Shutdown : public SystemTest {
 protected:
  void ends(const char* test) {
    configure({});
    if (IsSkipped()) return;
    vmem_shutdown();
    const int status = systest::wait_for_child(systest::start_child(test, {{"VMEM_HOST_BUDGET", "32MiB"}}), 120);
    EXPECT_EQ(status, 0) << (status == -1 ? "hung" : "ended by itself");
  }
};

// The threads call until every shutdown has ended.
template <typename Caller>
void shut_down_beside(Caller caller) {
  std::atomic<bool> stop{false};
  std::atomic<unsigned> calling{0};
  std::vector<std::thread> callers;
  for (unsigned t = 0; t < kCallers; ++t) {
    callers.emplace_back([&, t] {
      for (bool first = true; !stop; first = false) {
        caller(t);
        if (first) ++calling;
      }
    });
  }
  while (calling != kCallers) usleep(1000);
  for (unsigned i = 0; i < kShutdowns; ++i) vmem_shutdown();
  stop = true;
  for (std::thread& t : callers) t.join();
  vmem_shutdown();
}

TEST(ShutdownChild, DISABLED_BesideQueries) {
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, 8 * kMiB, VMEM_HOST_ONLY), 0) << vmem_last_error();
  shut_down_beside([&](unsigned) {
    struct vmem_residency r = {};
    r.size = sizeof r;
    vmem_query(p, 4096, &r);
  });
}

TEST(ShutdownChild, DISABLED_BesideSettings) {
  ASSERT_EQ(vmem_init(), 0) << vmem_last_error();
  shut_down_beside([](unsigned t) {
    char value[64];
    if (t % 2 == 0) vmem_set("log", "error");
    vmem_get("io_depth", value, sizeof value);
  });
}

TEST(ShutdownChild, DISABLED_BesideRegionsThatComeAndGo) {
  std::atomic<uint64_t> wrong{0};
  shut_down_beside([&](unsigned t) {
    void* p = nullptr;
    if (vmem_alloc(&p, 8 * kMiB, VMEM_HOST_ONLY) != 0) return;
    // The region may be freed at any moment, and another may take its place: any of these answers
    // is right.
    for (int rc : {vmem_acquire(p, 1 * kMiB, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr),
                   vmem_prefetch(p, 4 * kMiB, VMEM_HOST, nullptr), t % 2 == 0 ? vmem_evict(p, 8 * kMiB, VMEM_SSD) : 0,
                   vmem_release(p, 1 * kMiB, nullptr), vmem_sync(p, 8 * kMiB), vmem_free(p)}) {
      if (rc != 0 && rc != -EINVAL && rc != -EBUSY && rc != -ENOMEM) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0u);
}

TEST_F(Shutdown, EndsBesideThreadsThatQuery) {
  ends("ShutdownChild.DISABLED_BesideQueries");
}

TEST_F(Shutdown, EndsBesideThreadsThatChangeSettings) {
  ends("ShutdownChild.DISABLED_BesideSettings");
}

TEST_F(Shutdown, EndsBesideThreadsThatMakeAndFreeRegions) {
  ends("ShutdownChild.DISABLED_BesideRegionsThatComeAndGo");
}

}  // namespace
