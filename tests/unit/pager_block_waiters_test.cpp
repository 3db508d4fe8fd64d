// A waiter of one block is woken for that block, and by wakes for all.
#include <gtest/gtest.h>

#include <array>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "pager/block/block_waiters.h"
#include "pager/block/region.h"

namespace vmem::pager::test {
namespace {

class PagerBlockWaiters : public ::testing::Test {
 protected:
  // Starts a thread that waits for the block until the test ends the wait and wakes it.
  void sleep(size_t i, const Region& region, uint64_t block) {
    threads[i] = std::thread([this, i, &region, block] {
      std::unique_lock lock(mutex);
      BlockWaiter waiter(all, region, block);
      ++asleep;
      counted.notify_all();
      waiter.changed.wait(lock, [&] { return let_go[i]; });
    });
    std::unique_lock lock(mutex);
    counted.wait(lock, [&] { return asleep == i + 1; });
  }

  std::mutex mutex;
  std::condition_variable counted;
  size_t asleep = 0;
  BlockWaiters all;
  Region one{16, 4}, other{16, 4};
  std::array<std::thread, 4> threads;
  std::array<bool, 4> let_go{};
};

TEST_F(PagerBlockWaiters, AThreadIsWokenForItsBlockAlone) {
  sleep(0, one, 3);
  sleep(1, one, 5);
  sleep(2, one, 3);
  sleep(3, other, 3);
  {
    const std::lock_guard lock(mutex);
    EXPECT_EQ(all.wake(one, 4), 0u);
    EXPECT_EQ(all.wake(other, 5), 0u);
    EXPECT_EQ(all.wake(one, 5), 1u);
    let_go[0] = let_go[2] = true;
    EXPECT_EQ(all.wake(one, 3), 2u) << "one that is in front of others in the list, and one behind";
  }
  threads[0].join();
  threads[2].join();
  {
    const std::lock_guard lock(mutex);
    EXPECT_EQ(all.wake(one, 3), 0u) << "they are gone";
    EXPECT_FALSE(all.empty());
    let_go = {true, true, true, true};
    all.wake_all();
  }
  threads[1].join();
  threads[3].join();
  EXPECT_TRUE(all.empty());
}

}  // namespace
}  // namespace vmem::pager::test
