#include <gtest/gtest.h>

#include <mutex>
#include <thread>
#include <vector>

#include "api/fair_mutex.h"

namespace vmem::api {
namespace {

TEST(FairMutex, ExcludesAndServesEverybody) {
  FairMutex mutex;
  unsigned plain = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        std::unique_lock lock(mutex, std::defer_lock);
        if (i % 3 != 0 || !lock.try_lock()) lock.lock();
        ++plain;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(plain, 8000u);
  EXPECT_TRUE(mutex.try_lock());
  EXPECT_FALSE(mutex.try_lock());
  mutex.unlock();
}

}  // namespace
}  // namespace vmem::api
