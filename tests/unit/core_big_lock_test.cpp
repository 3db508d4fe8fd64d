#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <thread>
#include <vector>

#include "core/big_lock.h"
#include "device/sim/sim_device.h"

namespace vmem::core {
namespace {

TEST(BigLock, MarksTheThreadThatHoldsIt) {
  BigMutex mutex;
  must_be_outside("this test");
  {
    BigLock lock(mutex);
    EXPECT_EQ(big_locks_held, 1);
    std::thread([] { must_be_outside("another thread"); }).join();
    lock.unlock();
    must_be_outside("this test");
    lock.lock();
    EXPECT_EQ(big_locks_held, 1);
    std::condition_variable changed;
    changed.wait_for(lock, std::chrono::milliseconds(1));
    EXPECT_EQ(big_locks_held, 1);
  }
  EXPECT_EQ(big_locks_held, 0);
  {
    BigLock lock(mutex);
    lock.unlock();
  }
  EXPECT_EQ(big_locks_held, 0);
}

TEST(BigLock, WhoWaitsHasItsTurnInTheMidstOfLongWork) {
  BigMutex mutex;
  std::atomic<int> turns = 0;
  BigLock lock(mutex);
  std::vector<std::thread> others;
  for (int i = 0; i < 4; ++i) {
    others.emplace_back([&] {
      for (int turn = 0; turn < 50; ++turn) {
        BigLock mine(mutex);
        ++turns;
      }
    });
  }
  // Only this call opens the lock.
  while (turns != 200) lock.give_way();
  EXPECT_EQ(big_locks_held, 1);
  lock.unlock();
  for (std::thread& t : others) t.join();
}

TEST(BigLock, WhoComesOutOfAConditionVariableHasItsTurnToo) {
  BigMutex mutex;
  std::condition_variable changed;
  bool go = false, asleep = false;
  std::atomic<bool> back = false;
  std::thread sleeper([&] {
    BigLock lock(mutex);
    asleep = true;
    changed.wait(lock, [&] { return go; });
    back = true;
  });
  BigLock lock(mutex);
  while (!asleep) lock.give_way();
  go = true;
  changed.notify_all();
  while (!back) lock.give_way();
  lock.unlock();
  sleeper.join();
}

TEST(BigLockDeathTest, ADeviceThatIsCalledUnderItEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  std::unique_ptr<device::SimDevices> sim;
  ASSERT_TRUE(device::make_sim_devices({}, &sim).ok());
  BigMutex mutex;
  device::Ticket ticket;
  bool done = false;
  const auto held = [&](auto call) {
    BigLock lock(mutex);
    call();
  };
  EXPECT_DEATH(held([&] { sim->record(nullptr, 0, &ticket).ignore(); }), "Devices::record is called under the pager");
  EXPECT_DEATH(held([&] { sim->poll(ticket, &done).ignore(); }), "Devices::poll is called under the pager");
  EXPECT_DEATH(held([&] { sim->health(0).ignore(); }), "Devices::health is called under the pager");
  EXPECT_DEATH(held([&] { sim->open({}, device::Access::read).ignore(); }), "Devices::open is called under");
  ASSERT_TRUE(sim->record(nullptr, 0, &ticket).ok());
  while (ticket.use_count() != 1) std::this_thread::yield();  // the stream has released it
  EXPECT_DEATH(held([&] { ticket.reset(); }), "the end of a ticket is called under the pager");
}

}  // namespace
}  // namespace vmem::core
