// Tests that clang's annotated lock works as a lock: held, released and taken again, waited in.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <thread>

#include "core/mutex.h"

namespace {

using vmem::core::Mutex;
using vmem::core::MutexLock;

// Returns whether another thread could take it now.
bool is_free(Mutex& mutex) {
  bool got = false;
  std::thread([&] {
    got = mutex.try_lock();
    if (got) mutex.unlock();
  }).join();
  return got;
}

TEST(CoreMutex, ALockIsHeldWhileItLivesButBetweenUnlockAndLock) {
  Mutex mutex;
  {
    MutexLock lock(mutex);
    EXPECT_FALSE(is_free(mutex));
    lock.unlock();
    EXPECT_TRUE(is_free(mutex));
    lock.lock();
    EXPECT_FALSE(is_free(mutex));
  }
  EXPECT_TRUE(is_free(mutex));
  {
    MutexLock lock(mutex);
    lock.unlock();
  }
  EXPECT_TRUE(is_free(mutex)) << "given back once";
}

TEST(CoreMutex, WhoWaitsSleepsWithoutTheLockAndWakesWithIt) {
  Mutex mutex;
  std::condition_variable changed;
  bool asleep = false, over = false;
  std::thread sleeper([&] {
    const MutexLock lock(mutex);
    asleep = true;
    changed.notify_all();
    while (!over) mutex.wait(changed);
    EXPECT_FALSE(is_free(mutex));
  });
  {
    const MutexLock lock(mutex);
    while (!asleep) mutex.wait(changed);
    over = true;
    changed.notify_all();
  }
  sleeper.join();
  EXPECT_TRUE(is_free(mutex));
}

TEST(CoreMutex, AWaitEndsWithItsTimeAndKeepsTheLock) {
  Mutex mutex;
  std::condition_variable changed;
  const MutexLock lock(mutex);
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
  while (mutex.wait_until(changed, end)) {
  }
  EXPECT_GE(std::chrono::steady_clock::now(), end);
  EXPECT_FALSE(is_free(mutex));
}

}  // namespace
