// Streams that the application blocks, and full launch queues. A thread that queues more on such a
// stream waits in the driver, and no other thread waits for it. On simulated devices, which end the
// process if they are called under the pager's lock; tests/gpu/held_queue_test.cpp does the same on
// a GPU.
#include <cstring>
#include <functional>
#include <thread>

#include "common/patience.h"
#include "core/step.h"
#include "device/sim/sim_device.h"
#include "support.h"

namespace {

using systest::SystemTest;
using vmem::device::SimDevices;
using vmem::device::SimKernel;

constexpr size_t kMiB = 1 << 20;

#define VMEM_DO(call) ASSERT_EQ((call), 0) << vmem_last_error()

class HeldStream : public SystemTest {
 protected:
  static constexpr size_t kQueue = 1000;

  void SetUp() override {
    SystemTest::SetUp();
    vmem::api::test_hooks().make_devices = [](size_t, std::unique_ptr<vmem::device::Devices>* out) {
      vmem::device::SimOptions options;
      options.memory_bytes = 128 * kMiB;
      options.queue_limit = kQueue;
      std::unique_ptr<SimDevices> made;
      vmem::core::Status s = vmem::device::make_sim_devices(options, &made);
      *out = std::move(made);
      return s;
    };
    configure({{"device_budget", "32MiB"}, {"host_budget", "96MiB"}});
    held_ = false;
  }
  void TearDown() override {
    vmem::core::step_hook.store(nullptr);
    held_ = false;
    for (std::thread& t : threads_) t.join();
    if (SimDevices* s = vmem::device::current_sim(); s != nullptr) {
      for (void* one : streams_) s->destroy_stream(one);
      for (const std::string& v : s->violations()) ADD_FAILURE() << v;
    }
    SystemTest::TearDown();
  }
  static SimDevices& sim() { return *vmem::device::current_sim(); }
  void* stream() {
    streams_.push_back(sim().create_stream(0));
    return streams_.back();
  }
  void hold(void* s) {
    held_ = true;
    ASSERT_TRUE(sim()
                    .launch(s,
                            [this](SimKernel&) {
                              while (held_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                            })
                    .ok());
  }
  // Fills the queue of the blocked stream.
  static void fill(void* s) {
    for (size_t i = 0; i < kQueue; ++i) ASSERT_TRUE(sim().launch(s, [](SimKernel&) {}).ok());
  }
  static bool until(const std::function<bool()>& condition) { return vmem::test::eventually(condition); }
  // Runs on its own thread, which may wait as long as the stream is blocked.
  void aside(std::function<void()> what) { threads_.emplace_back(std::move(what)); }
  // Returns whether it has ended in time, which it need not.
  bool ends(std::function<void()> what) {
    auto ended = std::make_shared<std::atomic<bool>>(false);
    aside([ended, what = std::move(what)] {
      what();
      *ended = true;
    });
    return until([&] { return ended->load(); });
  }
  static uint64_t device_used() { return device_stats().used_bytes; }
  static uint64_t device_leased() { return device_stats().leased_bytes; }

  // A step hook: stops the first thread that reaches `stop_at_` until `at_step_` is cleared.
  static void stop(const char* step) {
    if (std::strcmp(step, stop_at_) != 0 || at_step_.exchange(true)) return;
    while (at_step_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  static void stop_at(const char* step) {
    stop_at_ = step;
    at_step_ = false;
    vmem::core::step_hook.store(&stop);
  }
  static void go_on() {
    vmem::core::step_hook.store(nullptr);
    at_step_ = false;
  }

  std::atomic<bool> held_{false};
  std::vector<void*> streams_;
  std::vector<std::thread> threads_;
  static inline std::atomic<const char*> stop_at_{""};
  static inline std::atomic<bool> at_step_{false};
};

TEST_F(HeldStream, ABystandersFaultDoesNotWaitForAQueueFullOfReleases) {
  if (IsSkipped()) return;
  vmem::region r(8 * kMiB), host(64 * kMiB, VMEM_HOST_ONLY);
  memset(host.data(), 1, host.size());
  void* s = stream();
  VMEM_DO(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, s));
  hold(s);
  std::atomic<size_t> pairs{0};
  aside([&] {
    for (int i = 0; i < 1500; ++i, ++pairs) {
      EXPECT_EQ(vmem_acquire(r.data(), 2 * kMiB, VMEM_READ, 0, s), 0) << vmem_last_error();
      EXPECT_EQ(vmem_release(r.data(), 2 * kMiB, s), 0) << vmem_last_error();
    }
  });
  ASSERT_TRUE(until([&] { return sim().waiting() == 1; }));
  EXPECT_LE(pairs, kQueue);
  host.evict();
  EXPECT_TRUE(ends([&] { EXPECT_EQ(static_cast<const volatile char*>(host.data())[5 * kMiB], 1); }));
  held_ = false;
  ASSERT_TRUE(until([&] { return pairs == 1500; }));
  EXPECT_EQ(device_leased(), r.size());
  VMEM_DO(vmem_release(r.data(), r.size(), s));
  ASSERT_TRUE(sim().synchronize(s).ok());
  EXPECT_EQ(device_leased(), 0u);
}

TEST_F(HeldStream, FromAFewToTooManyLaunchesNobodyElseWaits) {
  if (IsSkipped()) return;
  vmem::region r(8 * kMiB), other(40 * kMiB), host(64 * kMiB, VMEM_HOST_ONLY);
  memset(host.data(), 1, host.size());
  memset(other.data(), 2, other.size());
  void* free_stream = stream();
  for (const size_t launches : {100, 500, 999, 1000, 1001, 1100}) {
    void* s = stream();
    VMEM_DO(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, s));
    hold(s);
    std::atomic<bool> done{false};
    aside([&, s, launches] {
      for (size_t i = 0; i < launches; ++i) EXPECT_TRUE(sim().launch(s, [](SimKernel&) {}).ok());
      EXPECT_EQ(vmem_release(r.data(), r.size(), s), 0) << vmem_last_error();
      done = true;
    });
    ASSERT_TRUE(until([&] { return done || sim().waiting() == 1; }));
    host.evict();
    EXPECT_TRUE(ends([&] { EXPECT_EQ(static_cast<const volatile char*>(host.data())[5 * kMiB], 1); })) << launches;
    // Blocks of other streams come and go: device threads do not wait for this stream.
    EXPECT_TRUE(ends([&] {
      for (size_t at = 0; at < other.size(); at += 8 * kMiB) {
        EXPECT_EQ(vmem_acquire(static_cast<char*>(other.data()) + at, 8 * kMiB, VMEM_READ, 0, free_stream), 0)
            << vmem_last_error();
        EXPECT_EQ(vmem_release(static_cast<char*>(other.data()) + at, 8 * kMiB, free_stream), 0) << vmem_last_error();
      }
      EXPECT_EQ(vmem_evict(other.data(), other.size(), VMEM_HOST), 0) << vmem_last_error();
      EXPECT_EQ(device_leased(), r.size());
    })) << launches;
    held_ = false;
    ASSERT_TRUE(until([&] { return done.load(); }));
    ASSERT_TRUE(sim().synchronize(s).ok());
    EXPECT_EQ(device_leased(), 0u);
  }
}

TEST_F(HeldStream, AnAcquireThatWaitsForTheQueueKeepsNobody) {
  if (IsSkipped()) return;
  vmem::region r(8 * kMiB), host(16 * kMiB, VMEM_HOST_ONLY);
  memset(r.data(), 3, r.size());
  memset(host.data(), 1, host.size());
  r.evict();
  host.evict();
  void* s = stream();
  hold(s);
  fill(s);
  stop_at("device.issued");  // the acquire must order its stream after something
  std::atomic<bool> done{false};
  aside([&] {
    EXPECT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, s), 0) << vmem_last_error();
    EXPECT_EQ(vmem_release(r.data(), r.size(), s), 0) << vmem_last_error();
    done = true;
  });
  ASSERT_TRUE(until([&] { return sim().waiting() == 1; }));
  go_on();
  EXPECT_TRUE(ends([&] { EXPECT_EQ(static_cast<const volatile char*>(host.data())[kMiB], 1); }));
  EXPECT_TRUE(ends([&] { EXPECT_EQ(static_cast<const volatile char*>(r.data())[kMiB], 3); }));
  EXPECT_FALSE(done);
  held_ = false;
  ASSERT_TRUE(until([&] { return done.load(); }));
}

TEST_F(HeldStream, ALeaseIsReleasedOnceThoughTheReleaseWaitsForTheQueue) {
  if (IsSkipped()) return;
  vmem::region r(8 * kMiB);
  void* s = stream();
  VMEM_DO(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, s));
  hold(s);
  fill(s);
  std::atomic<bool> done{false};
  aside([&] {
    EXPECT_EQ(vmem_release(r.data(), r.size(), s), 0) << vmem_last_error();
    done = true;
  });
  ASSERT_TRUE(until([&] { return sim().waiting() == 1; }));
  EXPECT_EQ(vmem_release(r.data(), 2 * kMiB, s), -EINVAL) << "somebody releases it already";
  EXPECT_EQ(device_leased(), r.size()) << "and the stream may use it still";
  held_ = false;
  ASSERT_TRUE(until([&] { return done.load(); }));
  ASSERT_TRUE(sim().synchronize(s).ok());
  EXPECT_EQ(device_leased(), 0u);
}

// A release that could not mark the stream has released nothing.
TEST_F(HeldStream, AReleaseThatIsRefusedLeavesTheLease) {
  if (IsSkipped()) return;
  vmem::region r(8 * kMiB);
  void* s = stream();
  VMEM_DO(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, s));
  sim().capture(s, true);
  EXPECT_EQ(vmem_release(r.data(), r.size(), s), -EBUSY);
  EXPECT_NE(std::string(vmem_last_error()).find("captur"), std::string::npos) << vmem_last_error();
  sim().capture(s, false);
  EXPECT_EQ(device_leased(), r.size());
  EXPECT_EQ(vmem_free(r.data()), -EBUSY);
  VMEM_DO(vmem_release(r.data(), r.size(), s));
  ASSERT_TRUE(sim().synchronize(s).ok());
  EXPECT_EQ(device_leased(), 0u);
}

// The leases at the host could have ended at once.
TEST_F(HeldStream, AReleaseOfSeveralLocationsThatIsRefusedLeavesAllLeases) {
  if (IsSkipped()) return;
  vmem::region r(8 * kMiB);
  void* s = stream();
  char* const at = static_cast<char*>(r.data());
  VMEM_DO(vmem_acquire(at, 2 * kMiB, VMEM_READ, VMEM_HOST, s));
  VMEM_DO(vmem_acquire(at + 4 * kMiB, 2 * kMiB, VMEM_READ, 0, s));
  const vmem_range both[] = {{at, 2 * kMiB, 0, 0}, {at + 4 * kMiB, 2 * kMiB, 0, 0}};
  sim().capture(s, true);
  EXPECT_EQ(vmem_release_ranges(both, 2, s), -EBUSY);
  sim().capture(s, false);
  EXPECT_EQ(device_leased(), 2 * kMiB);
  VMEM_DO(vmem_release_ranges(both, 2, s));
  ASSERT_TRUE(sim().synchronize(s).ok());
  EXPECT_EQ(device_leased(), 0u);
  EXPECT_EQ(vmem_release(at, 2 * kMiB, s), -EINVAL) << "nothing is leased any more";
}

// The first store to a block on a device is allowed without the lock. Until then the block stays,
// and it counts as changed.
TEST_F(HeldStream, AStoreThatIsBeingLetInIsNotLostToAnEviction) {
  if (IsSkipped()) return;
  vmem::region r(2 * kMiB);
  auto* at = static_cast<volatile char*>(r.data());
  at[0] = 1;
  r.evict();
  VMEM_DO(vmem_prefetch(r.data(), r.size(), 0, nullptr));
  ASSERT_TRUE(until([&] { return r.query().device_bytes == r.size(); }));
  stop_at("touch.opening");
  std::atomic<bool> stored{false}, evicted{false};
  aside([&] {
    at[0] = 2;
    stored = true;
  });
  ASSERT_TRUE(until([&] { return at_step_.load(); }));
  aside([&] {
    EXPECT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << vmem_last_error();
    evicted = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(evicted);
  go_on();
  ASSERT_TRUE(until([&] { return stored && evicted; }));
  r.evict();
  EXPECT_EQ(at[0], 2);
}

// A synced block is opened for reading before its new state is recorded. A store in between waits
// for that.
TEST_F(HeldStream, AStoreBetweenASyncAndItsBooksIsKept) {
  if (IsSkipped()) return;
  vmem::region r(2 * kMiB);
  auto* at = static_cast<volatile char*>(r.data());
  VMEM_DO(vmem_prefetch(r.data(), r.size(), 0, nullptr));
  ASSERT_TRUE(until([&] { return r.query().device_bytes == r.size(); }));
  at[0] = 1;
  stop_at("device.opened");
  std::atomic<bool> stored{false}, synced{false};
  aside([&] {
    EXPECT_EQ(vmem_sync(r.data(), r.size()), 0) << vmem_last_error();
    synced = true;
  });
  ASSERT_TRUE(until([&] { return at_step_.load(); }));
  aside([&] {
    at[0] = 2;
    stored = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(stored);
  go_on();
  ASSERT_TRUE(until([&] { return stored && synced; }));
  r.evict();
  EXPECT_EQ(at[0], 2);
}

// A thread that polls vmem_query before it touches a prefetched block must not access it half way.
TEST_F(HeldStream, ABlockOnItsWayCountsAsHostMemoryUntilItsCopyIsIssued) {
  if (IsSkipped()) return;
  vmem::region zeros(2 * kMiB), in_host(2 * kMiB), in_ssd(2 * kMiB);
  for (vmem::region* r : {&in_host, &in_ssd}) memset(r->data(), 1, r->size());
  in_ssd.evict();
  for (vmem::region* r : {&zeros, &in_host, &in_ssd}) {
    stop_at("device.preparing");
    VMEM_DO(vmem_prefetch(r->data(), r->size(), 0, nullptr));
    ASSERT_TRUE(until([&] { return at_step_.load(); }));
    EXPECT_EQ(r->query().device_bytes, 0u);
    EXPECT_EQ(r->query().host_bytes, r->size());
    go_on();
    EXPECT_TRUE(until([&] { return r->query().device_bytes == r->size(); }));
  }
}

TEST_F(HeldStream, ALoweredBudgetIsReachedAsSoonAsLeasesAllow) {
  if (IsSkipped()) return;
  vmem::region r(28 * kMiB);
  void *s = stream(), *t = stream();
  VMEM_DO(vmem_acquire(r.data(), r.size(), VMEM_READ | VMEM_WRITE, 0, s));
  EXPECT_EQ(vmem_set("device_budget", "8MiB"), -EBUSY) << "a live lease";
  VMEM_DO(vmem_acquire(r.data(), 4 * kMiB, VMEM_READ, 0, t));
  hold(s);
  VMEM_DO(vmem_release(r.data(), r.size(), s));
  VMEM_DO(vmem_set("device_budget", "8MiB"));
  EXPECT_EQ(device_used(), r.size()) << "the stream has not got there";
  held_ = false;
  EXPECT_TRUE(until([&] { return device_used() <= 8 * kMiB; })) << "nobody asks for room";
  EXPECT_GE(device_used(), 4 * kMiB) << "leased";
  VMEM_DO(vmem_set("device_budget", "4MiB"));
  EXPECT_TRUE(until([&] { return device_used() <= 4 * kMiB; }));
  VMEM_DO(vmem_release(r.data(), 4 * kMiB, t));
  VMEM_DO(vmem_set("device_budget", "2MiB"));
  EXPECT_TRUE(until([&] { return device_used() <= 2 * kMiB; }));
  VMEM_DO(vmem_set("device_budget", "32MiB"));
}

TEST_F(HeldStream, ABlockThatIsNamedTwiceNeedsRoomOnce) {
  if (IsSkipped()) return;
  vmem::region r(64 * kMiB), q(8 * kMiB);
  void* s = stream();
  const vmem_range twice[] = {{r.data(), 20 * kMiB, VMEM_READ, 0},
                              {static_cast<char*>(r.data()) + 4 * kMiB, 20 * kMiB, VMEM_READ, 0},
                              {q.data(), 8 * kMiB, VMEM_READ, 0},
                              {r.data(), 2 * kMiB, VMEM_READ, 0}};
  VMEM_DO(vmem_acquire_ranges(twice, 4, 0, s));
  EXPECT_EQ(device_leased(), 32 * kMiB);
  EXPECT_EQ(vmem_release(r.data(), 28 * kMiB, s), -EINVAL) << "not all of it is leased";
  VMEM_DO(vmem_release_ranges(twice, 4, s));
  EXPECT_EQ(vmem_release(r.data(), 2 * kMiB, s), -EINVAL);
  // The same at the host, where the stream has no effect.
  VMEM_DO(vmem_acquire_ranges(twice, 4, VMEM_HOST, s));
  EXPECT_EQ(vmem_release_ranges(twice, 4, s), 0) << vmem_last_error();
  EXPECT_EQ(vmem_release(r.data(), 2 * kMiB, nullptr), -EINVAL);
  VMEM_DO(vmem_acquire(r.data(), 2 * kMiB, VMEM_READ, VMEM_HOST, s));
  EXPECT_EQ(vmem_release_ranges(twice, 1, nullptr), -EINVAL) << "nothing of it is released";
  VMEM_DO(vmem_release(r.data(), 2 * kMiB, nullptr));
}

}  // namespace
