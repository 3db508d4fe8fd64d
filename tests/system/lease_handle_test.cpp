// Lease handles, and leases that are acquired while the caller continues: the same promises at the
// host and at a simulated device.
#include <poll.h>
#include <sys/wait.h>

#include <cerrno>

#include "child.h"
#include "core/thread.h"
#include "faulty_disk.h"
#include "sim_support.h"

namespace systest {
namespace {

using vmem::store::Fault;
using vmem::store::FaultyEngine;
using vmem::store::Io;
using Lease = struct vmem_lease;

// The arguments of `ready`.
struct Told {
  std::atomic<int> calls{0};
  std::atomic<int> result{1};
  std::atomic<Lease*> lease{nullptr};
  static void ready(Lease* lease, int result, void* user) {
    Told& told = *static_cast<Told*>(user);
    told.lease = lease;
    told.result = result;
    ++told.calls;
  }
};

class LeaseHandles : public SimTest, public ::testing::WithParamInterface<int> {
 protected:
  void SetUp() override {
    vmem::api::test_hooks().wrap_engine = nullptr;
    SimTest::start(1);
    if (IsSkipped()) return;
    vmem_shutdown();
    wrap_engine(&disk);
    SimTest::start(1);
  }
  int location() const { return GetParam(); }
  void* at_stream() const { return location() == VMEM_HOST ? nullptr : stream_; }
  static vmem_range range(const vmem::region& r, size_t block, size_t count = 1, unsigned access = VMEM_READ) {
    return {r.view<char>().data() + block * kBlock, count * kBlock, access, 0};
  }
  // Blocks on the SSD with their stamps.
  static vmem::region filled(size_t blocks) {
    vmem::region r(blocks * kBlock);
    for (size_t b = 0; b < blocks; ++b) r.view<uint64_t>()[b * kBlock / 8] = stamp(b, 1);
    r.evict();
    return r;
  }
  static uint64_t word(const vmem::region& r, size_t block) { return r.view<uint64_t>()[block * kBlock / 8]; }
  void hang_reads() {
    Fault hang;
    hang.action = Fault::Action::hang;
    hang.op = Io::Op::read;
    disk->add_rule(hang);
  }
  void let_reads_go() {
    disk->clear_rules();
    disk->release();
  }
  static bool readable(int fd) {
    pollfd p{fd, POLLIN, 0};
    return ::poll(&p, 1, 0) == 1;
  }
  uint64_t leased() const { return device_stats().leased_bytes; }

  FaultyEngine* disk = nullptr;
};

TEST_P(LeaseHandles, AHandleEndsWhatItLeased) {
  if (IsSkipped()) return;
  vmem::region one = filled(2), two = filled(2);
  const vmem_range ranges[] = {range(one, 0), range(two, 1, 1, VMEM_READ | VMEM_WRITE)};
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease(&lease, ranges, 2, location(), at_stream()), 0) << said();
  EXPECT_EQ(vmem_lease_poll(lease), 0);
  EXPECT_TRUE(readable(vmem_lease_fd(lease)));
  EXPECT_EQ(vmem_free(one.data()), -EBUSY);
  EXPECT_EQ(vmem_free(two.data()), -EBUSY);
  ASSERT_EQ(vmem_lease_end(lease, at_stream()), 0) << said();
  EXPECT_EQ(vmem_lease_end(lease, at_stream()), -EINVAL);
  EXPECT_EQ(vmem_lease_poll(lease), -EINVAL);
  EXPECT_EQ(vmem_lease_fd(lease), -EINVAL);
  EXPECT_EQ(word(one, 0), stamp(0, 1));
  one.free();
  two.free();
}

TEST_P(LeaseHandles, BadArgumentsMakeNone) {
  if (IsSkipped()) return;
  const vmem::region r = filled(1);
  vmem_range one = range(r, 0);
  Lease* lease = nullptr;
  Told told;
  const auto both = [&](int want, int where) {
    EXPECT_EQ(vmem_lease(&lease, &one, 1, where, at_stream()), want) << said();
    EXPECT_EQ(vmem_lease_async(&lease, &one, 1, where, at_stream(), Told::ready, &told), want) << said();
  };
  both(-EINVAL, VMEM_SSD);
  both(-ENODEV, 7);
  one.access = 8;
  both(-EINVAL, location());
  one = {&one, 8, VMEM_READ, 0};
  both(-EINVAL, location());
  EXPECT_EQ(vmem_lease(&lease, &one, 0, location(), at_stream()), -EINVAL);
  EXPECT_EQ(vmem_lease_async(nullptr, &one, 1, location(), at_stream(), nullptr, nullptr), -EINVAL);
  EXPECT_EQ(lease, nullptr);
  EXPECT_EQ(told.calls, 0);
}

TEST_P(LeaseHandles, AnAsynchronousLeaseWaitsAsideAndTellsInThreeWays) {
  if (IsSkipped()) return;
  vmem::region r = filled(2);
  const vmem_range one = range(r, 0);
  hang_reads();
  Told told;
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease_async(&lease, &one, 1, location(), at_stream(), Told::ready, &told), 0) << said();
  const int fd = vmem_lease_fd(lease);
  ASSERT_GE(fd, 0) << said();
  ASSERT_TRUE(disk->wait_hanging(1, 60000));
  EXPECT_EQ(vmem_lease_poll(lease), -EAGAIN);
  EXPECT_FALSE(readable(fd));
  EXPECT_EQ(told.calls, 0);
  EXPECT_EQ(vmem_free(r.data()), -EBUSY) << "a lease on its way holds its region";
  let_reads_go();
  EXPECT_TRUE(until([&] { return told.calls == 1; }));
  EXPECT_EQ(told.result, 0);
  EXPECT_EQ(told.lease, lease);
  EXPECT_EQ(vmem_lease_poll(lease), 0) << said();
  EXPECT_TRUE(readable(fd));
  EXPECT_EQ(vmem_free(r.data()), -EBUSY);
  ASSERT_EQ(vmem_lease_end(lease, at_stream()), 0) << said();
  EXPECT_EQ(told.calls, 1);
  EXPECT_EQ(word(r, 0), stamp(0, 1));
  r.free();
}

// The thread has not begun: nothing is leased yet, but the region is held.
TEST_P(LeaseHandles, FromTheCallOnItHoldsItsRegion) {
  if (IsSkipped()) return;
  vmem::region r = filled(1);
  const vmem_range one = range(r, 0);
  stop_at("lease.starting");
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease_async(&lease, &one, 1, location(), at_stream(), nullptr, nullptr), 0) << said();
  ASSERT_TRUE(stopped());
  EXPECT_EQ(vmem_free(r.data()), -EBUSY);
  EXPECT_NE(said().find("asynchronous"), std::string::npos) << said();
  go_on();
  ASSERT_EQ(vmem_lease_end(lease, at_stream()), 0) << said();
  r.free();
}

TEST_P(LeaseHandles, OneThatWaitsKeepsNoOther) {
  if (IsSkipped()) return;
  const vmem::region r = filled(3);
  hang_reads();
  const vmem_range held = range(r, 0), free_one = range(r, 2);
  Lease *waits = nullptr, *goes = nullptr;
  ASSERT_EQ(vmem_lease_async(&waits, &held, 1, location(), at_stream(), nullptr, nullptr), 0) << said();
  ASSERT_TRUE(disk->wait_hanging(1, 60000));
  disk->clear_rules();
  ASSERT_EQ(vmem_lease_async(&goes, &free_one, 1, location(), at_stream(), nullptr, nullptr), 0) << said();
  EXPECT_TRUE(until([&] { return vmem_lease_poll(goes) == 0; })) << said();
  EXPECT_EQ(vmem_lease_poll(waits), -EAGAIN);
  let_reads_go();
  EXPECT_TRUE(until([&] { return vmem_lease_poll(waits) == 0; })) << said();
  ASSERT_EQ(vmem_lease_end(waits, at_stream()), 0) << said();
  ASSERT_EQ(vmem_lease_end(goes, at_stream()), 0) << said();
}

// The disk does not answer, and the cancelled lease does not wait for it.
TEST_P(LeaseHandles, EndingOneThatIsNotReadyCancelsIt) {
  if (IsSkipped()) return;
  vmem::region r = filled(1);
  const vmem_range one = range(r, 0);
  hang_reads();
  Told told;
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease_async(&lease, &one, 1, location(), at_stream(), Told::ready, &told), 0) << said();
  ASSERT_TRUE(disk->wait_hanging(1, 60000));
  ASSERT_EQ(vmem_lease_end(lease, at_stream()), 0) << said();
  EXPECT_EQ(told.calls, 1) << "before the end returns";
  EXPECT_EQ(told.result, -ECANCELED);
  EXPECT_EQ(vmem_lease_poll(lease), -EINVAL);
  let_reads_go();
  EXPECT_EQ(word(r, 0), stamp(0, 1));
  EXPECT_EQ(vmem_free(r.data()), 0) << "nothing is leased: " << said();
  r = {};
}

TEST_P(LeaseHandles, OneThatFailsSaysWhyAndHoldsNothing) {
  if (IsSkipped()) return;
  vmem::region r(256 << 20);
  const vmem_range all{r.data(), r.size(), VMEM_READ, 0};
  Told told;
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease_async(&lease, &all, 1, location(), at_stream(), Told::ready, &told), 0) << said();
  EXPECT_TRUE(until([&] { return told.calls == 1; }));
  EXPECT_EQ(told.result, -ENOMEM);
  EXPECT_EQ(vmem_lease_poll(lease), -ENOMEM);
  EXPECT_NE(said().find("budget"), std::string::npos) << said();
  EXPECT_TRUE(readable(vmem_lease_fd(lease)));
  ASSERT_EQ(vmem_free(r.data()), 0) << said();
  r = {};
  EXPECT_EQ(vmem_lease_end(lease, at_stream()), 0) << said();
}

// `ready` may make any call: here it ends its own lease, begins another, and frees the region.
TEST_P(LeaseHandles, ReadyMayCallTheLibrary) {
  if (IsSkipped()) return;
  struct Chain {
    vmem::region r;
    vmem_range one;
    int location;
    void* stream;
    std::atomic<int> left, wrong{0};
    std::atomic<bool> over{false};
    static void ready(Lease* lease, int result, void* user) {
      Chain& c = *static_cast<Chain*>(user);
      const int left = c.left--;  // the next `ready` may run before this one returns
      if (c.location == VMEM_HOST && word(c.r, 0) != stamp(0, 1)) ++c.wrong;
      if (result != 0 || vmem_lease_poll(lease) != 0 || vmem_lease_end(lease, c.stream) != 0) ++c.wrong;
      Lease* next = nullptr;
      if (left > 1 && vmem_lease_async(&next, &c.one, 1, c.location, c.stream, ready, user) != 0) ++c.wrong;
      if (left > 1) return;
      if (vmem_free(c.r.data()) != 0) ++c.wrong;
      c.over = true;
    }
  };
  Chain chain{filled(1), {}, location(), at_stream(), 20};
  chain.one = range(chain.r, 0);
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease_async(&lease, &chain.one, 1, location(), at_stream(), Chain::ready, &chain), 0) << said();
  EXPECT_TRUE(until([&] { return chain.over.load(); }));
  EXPECT_EQ(chain.wrong, 0);
  EXPECT_EQ(vmem::stats().regions, 0u);
  vmem_shutdown();  // waits until `ready`, which uses the chain, has returned
  new (&chain.r) vmem::region();
}

TEST_P(LeaseHandles, ReadyMayShutTheLibraryDown) {
  if (IsSkipped()) return;
  vmem::region r = filled(1);
  const vmem_range one = range(r, 0);
  std::atomic<bool> done{false};
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease_async(
                &lease, &one, 1, location(), at_stream(),
                [](Lease* l, int, void* user) {
                  vmem_shutdown();
                  EXPECT_EQ(vmem_lease_poll(l), -ECANCELED);
                  EXPECT_EQ(vmem_lease_end(l, nullptr), 0);
                  *static_cast<std::atomic<bool>*>(user) = true;
                },
                &done),
            0)
      << said();
  EXPECT_TRUE(until([&] { return done.load(); }));
  new (&r) vmem::region();
}

// Whether the disk's answer or the shutdown comes first, `ready` is called once, before the
// shutdown returns.
TEST_P(LeaseHandles, ShutdownEndsThemAll) {
  if (IsSkipped()) return;
  vmem::region r = filled(2);
  const vmem_range here = range(r, 1), one = range(r, 0);
  Lease *live = nullptr, *lease = nullptr;
  ASSERT_EQ(vmem_lease(&live, &here, 1, location(), at_stream()), 0) << said();
  hang_reads();
  Told told;
  ASSERT_EQ(vmem_lease_async(&lease, &one, 1, location(), at_stream(), Told::ready, &told), 0) << said();
  ASSERT_TRUE(disk->wait_hanging(1, 60000));
  std::atomic<bool> begun{false};
  int calls = -1;
  aside([&] {
    begun = true;
    vmem_shutdown();
    calls = told.calls;
  });
  EXPECT_TRUE(until([&] { return begun.load(); }));
  let_reads_go();
  vmem_shutdown();  // one of the two waits for the other
  EXPECT_EQ(told.calls, 1);
  EXPECT_TRUE(told.result == 0 || told.result == -ECANCELED) << told.result;
  EXPECT_NE(vmem_lease_poll(lease), 0) << "its region is gone";
  EXPECT_EQ(vmem_lease_poll(live), -ECANCELED);
  // A later runtime's blocks at the same addresses are unrelated to the old handle.
  vmem::region later(2 * kBlock, vmem::attributes{.address = r.data()});
  ASSERT_EQ(vmem_acquire(later.data(), later.size(), VMEM_READ, VMEM_HOST, nullptr), 0) << said();
  EXPECT_EQ(vmem_lease_end(live, nullptr), 0) << said();
  EXPECT_EQ(vmem_lease_end(lease, nullptr), 0) << said();
  EXPECT_EQ(vmem_free(later.data()), -EBUSY) << "the other's lease is as it was";
  ASSERT_EQ(vmem_release(later.data(), later.size(), nullptr), 0);
  new (&r) vmem::region();
}

TEST_P(LeaseHandles, SoManyAtOnceAndNoMore) {
  if (IsSkipped()) return;
  constexpr size_t kMost = vmem::api::Leases::kMost;
  const vmem::region r = filled(1);
  const vmem_range one = range(r, 0);
  hang_reads();
  std::vector<Lease*> leases(kMost);
  Told told;
  for (Lease*& lease : leases)
    ASSERT_EQ(vmem_lease_async(&lease, &one, 1, location(), at_stream(), Told::ready, &told), 0) << said();
  Lease* more = nullptr;
  EXPECT_EQ(vmem_lease_async(&more, &one, 1, location(), at_stream(), nullptr, nullptr), -EAGAIN);
  EXPECT_NE(said().find("64"), std::string::npos) << said();
  EXPECT_EQ(more, nullptr);
  let_reads_go();
  EXPECT_TRUE(until([&] { return told.calls == static_cast<int>(kMost); }));
  for (Lease* lease : leases) EXPECT_EQ(vmem_lease_end(lease, at_stream()), 0) << said();
  ASSERT_EQ(vmem_lease_async(&more, &one, 1, location(), at_stream(), nullptr, nullptr), 0) << said();
  ASSERT_EQ(vmem_lease_end(more, at_stream()), 0) << said();
}

TEST_P(LeaseHandles, AForkedChildIsRefused) {
  if (IsSkipped()) return;
  const vmem::region r = filled(1);
  const vmem_range one = range(r, 0);
  Lease *lease = nullptr, *other = nullptr;
  ASSERT_EQ(vmem_lease(&lease, &one, 1, location(), at_stream()), 0) << said();
  EXPECT_EQ(status_of_fork([&] {
              const bool refused = vmem_lease_poll(lease) == -ECHILD && vmem_lease_fd(lease) == -ECHILD &&
                                   vmem_lease_end(lease, nullptr) == -ECHILD &&
                                   vmem_lease(&other, &one, 1, VMEM_HOST, nullptr) == -ECHILD &&
                                   vmem_lease_async(&other, &one, 1, VMEM_HOST, nullptr, nullptr, nullptr) == -ECHILD;
              return refused ? 0 : 1;
            }),
            0);
  ASSERT_EQ(vmem_lease_end(lease, at_stream()), 0) << said();
}

INSTANTIATE_TEST_SUITE_P(Locations, LeaseHandles, ::testing::Values(VMEM_HOST, 0),
                         [](const auto& p) { return p.param == VMEM_HOST ? "host" : "device"; });

class DeviceLeaseHandles : public SimTest {};

TEST_F(DeviceLeaseHandles, TheLeaseEndsWhenTheStreamThatEndsItGetsThere) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  auto* const words = r.view<uint64_t>().data();
  words[0] = 1;
  void* const other = stream(0);
  const vmem_range one{words, 8, VMEM_READ | VMEM_WRITE, 0};
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease(&lease, &one, 1, 0, stream_), 0) << said();
  std::atomic<bool> go{false};
  launch_store(other, words, 2, &go);
  ASSERT_EQ(vmem_lease_end(lease, other), 0) << said();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  const auto leased = [] { return device_stats().leased_bytes; };
  EXPECT_EQ(leased(), kBlock) << "the other stream has not got there";
  go = true;
  EXPECT_TRUE(until([&] { return leased() == 0; }));
  EXPECT_EQ(words[0], 2u);
}

TEST_F(DeviceLeaseHandles, AStreamOfAnotherDeviceDoesNotEndIt) {
  if (IsSkipped()) return;
  start(2);
  const vmem::region r(kBlock);
  const vmem_range one{r.data(), 8, VMEM_READ, 0};
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease(&lease, &one, 1, 0, stream_), 0) << said();
  EXPECT_EQ(vmem_lease_end(lease, stream(1)), -EINVAL);
  EXPECT_EQ(vmem_lease_poll(lease), 0) << "it stays";
  sim().capture(stream_, true);
  EXPECT_EQ(vmem_lease_end(lease, stream_), -EBUSY);
  sim().capture(stream_, false);
  EXPECT_EQ(vmem_lease_end(lease, stream_), 0) << said();
}

// A signal handler on the storing thread allows its store to a block on a device. So the
// application's code on a thread of the library needs a thread that takes that signal.
TEST_F(DeviceLeaseHandles, TheCallbackAndTheSinkMayStoreToABlockOnADevice) {
  if (IsSkipped()) return;
  static std::atomic<unsigned> stored;
  stored = 0;
  vmem::region r(2 * kBlock);
  auto* const words = r.view<uint64_t>().data();
  const auto lie_on_the_device = [&](size_t block) {
    const vmem_range one{words + block * kBlock / 8, kBlock, VMEM_READ, 0};
    ASSERT_EQ(vmem_acquire(one.ptr, one.size, VMEM_READ, 0, stream_), 0) << said();
    ASSERT_EQ(vmem_release(one.ptr, one.size, stream_), 0) << said();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
  };
  const auto store = [](void* word) {
    *static_cast<volatile uint64_t*>(word) = 7;
    ++stored;
  };
  struct Use {
    void (*store)(void*);
    void* word;
  };
  Use first{store, words}, second{store, words + kBlock / 8};

  lie_on_the_device(0);
  vmem::region other(kBlock);
  const vmem_range one{other.data(), 8, VMEM_READ, 0};
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease_async(
                &lease, &one, 1, VMEM_HOST, nullptr,
                [](Lease*, int, void* user) { static_cast<Use*>(user)->store(static_cast<Use*>(user)->word); }, &first),
            0)
      << said();
  EXPECT_TRUE(until([&] { return stored == 1; }));
  ASSERT_EQ(vmem_lease_end(lease, nullptr), 0) << said();

  lie_on_the_device(1);
  vmem_log(
      [](int, const char*, void* user) {
        Use& use = *static_cast<Use*>(user);
        if (stored == 1) use.store(use.word);
      },
      &second);
  std::thread thread;  // the log's own thread delivers its lines
  ASSERT_TRUE(vmem::core::start_thread(
                  "vmem-test", [] { vmem::core::log(vmem::core::Level::error, "a line"); }, &thread)
                  .ok());
  thread.join();
  EXPECT_TRUE(until([&] { return stored == 2; }));
  vmem_log(nullptr, nullptr);
  EXPECT_EQ(words[0], 7u);
  EXPECT_EQ(words[kBlock / 8], 7u);
}

// The next work on the stream sees the bytes: it is ordered after the lease's copies.
TEST_F(DeviceLeaseHandles, WorkAfterReadyFindsTheBytes) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  const auto words = r.view<uint64_t>();
  for (size_t b = 0; b < 4; ++b) words[b * kBlock / 8] = stamp(b, 1);
  r.evict();
  const vmem_range all{r.data(), r.size(), VMEM_READ | VMEM_WRITE, 0};
  const auto lease = vmem::lease::async({&all, 1}, 0, stream_);
  EXPECT_TRUE(until([&] { return lease.ready(); }));
  std::atomic<unsigned> wrong{0};
  ASSERT_TRUE(sim()
                  .launch(stream_,
                          [&](vmem::device::SimKernel& k) {
                            for (size_t b = 0; b < 4; ++b) {
                              auto* w = reinterpret_cast<uint64_t*>(k.at(&words[b * kBlock / 8], 8, true));
                              if (w == nullptr || *w != stamp(b, 1)) ++wrong;
                              if (w != nullptr) *w = stamp(b, 2);
                            }
                          })
                  .ok());
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_EQ(wrong, 0u);
  const_cast<vmem::lease&>(lease).release();
  for (size_t b = 0; b < 4; ++b) EXPECT_EQ(words[b * kBlock / 8], stamp(b, 2));
}

// A process may exit with leases in progress, and from inside `ready`.
TEST(LeaseHandleChild, DISABLED_ExitsInReady) {
  ASSERT_EQ(vmem_set("device", "none"), 0);
  static vmem::region region(kBlock, VMEM_HOST_ONLY);
  static const vmem_range one{region.data(), 8, VMEM_READ, 0};
  Lease* lease = nullptr;
  ASSERT_EQ(
      vmem_lease_async(
          &lease, &one, 1, VMEM_HOST, nullptr, [](Lease*, int result, void*) { exit(result == 0 ? 7 : 8); }, nullptr),
      0)
      << vmem_last_error();
  for (;;) pause();
}

TEST_F(DeviceLeaseHandles, ReadyMayCallExit) {
  if (IsSkipped()) return;
  const int status = wait_for_child(start_child("LeaseHandleChild.DISABLED_ExitsInReady"), 120);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
}

}  // namespace
}  // namespace systest
