// A simulated run of the protocol of kernels that ask, with threads as groups. Checks every word of
// every accessed block.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "common/patience.h"
#include "paging_words.h"

namespace {

using namespace pagingtest;

uint64_t long_enough() {
  return static_cast<uint64_t>(std::chrono::nanoseconds(vmem::test::patiently(std::chrono::seconds(60))).count());
}

// The device of threads: blocks in a store and fewer frames, a server that pages in and sleeps
// while no group asks, and a reclaim thread.

constexpr uint32_t kThreads = 4;
constexpr uint32_t kFixed = 16, kOwn = 4;  // words of a block: constant ones, and those of each thread
constexpr uint32_t kWords = kFixed + kThreads * kOwn;

uint32_t word(uint32_t block, uint32_t at, uint32_t version) {
  return (block * 64 + at + 1) * 2654435761u ^ version * 40503u;
}
class Device {
 public:
  Device(uint32_t blocks, uint32_t frames, uint32_t promise, uint32_t cells)
      : words_(blocks, promise, cells),
        states_(words_.states()),
        store_(blocks),
        frames_(frames),
        where_(blocks),
        passed_(blocks) {
    for (uint32_t b = 0; b < blocks; ++b) {
      store_[b].resize(kWords);
      for (uint32_t k = 0; k < kWords; ++k) store_[b][k] = word(b, k, 0);
    }
    for (uint32_t f = 0; f < frames; ++f) {
      frames_[f].assign(kWords, 0xdeadbeef);
      free_.push_back(f);
    }
    server_ = std::thread([this] { serve(); });
    evictor_ = std::thread([this] { evict(); });
  }
  ~Device() { stop(); }

  vmem::paging::Table<HostAtomics> table() { return words_.table(); }
  // As a kernel accesses it: call only while it is pinned.
  uint32_t* bytes(uint32_t block) { return frames_[where_[block]].data(); }
  uint64_t evictions() const { return evictions_; }
  uint64_t sleeps() const { return sleeps_; }
  bool asleep() { return HostAtomics::load(&words_.control().asleep) != 0; }

  // Call stop() when no group is left; last() then returns the bytes of a block.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      stopping_ = true;
    }
    changed_.notify_all();
    HostAtomics::fence();
    HostAtomics::wake(&words_.control().asleep);
    server_.join();
    evictor_.join();
  }
  const std::vector<uint32_t>& last(uint32_t block) {
    return states_.kind(block) == Kind::present ? frames_[where_[block]] : store_[block];
  }

 private:
  void serve() {
    Queue queue(table());
    for (;;) {
      Request request;
      if (queue.take(&request, words_.port())) {
        page_in(request);
        continue;
      }
      const bool sleep = queue.may_sleep();
      {
        const std::lock_guard lock(mutex_);
        if (stopping_) return;
      }
      if (!sleep) continue;
      ++sleeps_;
      HostAtomics::sleep(&words_.control().asleep);
      queue.awake();
    }
  }
  void page_in(const Request& request) {
    std::unique_lock lock(mutex_);
    if (states_.kind(request.block) != Kind::not_present) return;
    wanted_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !free_.empty() || stopping_; });
    wanted_ = false;
    if (stopping_) return;
    const uint32_t frame = free_.back();
    free_.pop_back();
    lock.unlock();
    frames_[frame] = store_[request.block];
    where_[request.block] = frame;
    lock.lock();
    states_.publish(request.block, request.urgency);
    passed_[request.block] = 0;
  }

  void evict() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return (wanted_ && free_.empty()) || stopping_; });
      if (stopping_) return;
      std::vector<uint32_t> victims;
      for (size_t looked = 0; looked < where_.size() && victims.size() < 4; ++looked) {
        const uint32_t b = hand_++ % static_cast<uint32_t>(where_.size());
        if (states_.kind(b) != Kind::present) continue;
        // The waiting groups see a block within some rounds, in each of which all others ran;
        // reclaim only then.
        if (states_.untaken(b) && ++passed_[b] < 200) continue;
        states_.begin_eviction(b);
        victims.push_back(b);
      }
      states_.settle();
      for (const uint32_t b : victims) {
        if (states_.in_use(b)) {
          states_.cancel(b);
          continue;
        }
        // finish() gives the block back; until then only this thread uses it.
        lock.unlock();
        std::vector<uint32_t>& frame = frames_[where_[b]];
        if (states_.was_written(b)) store_[b] = frame;
        std::fill(frame.begin(), frame.end(), 0xdeadbeef);
        lock.lock();
        free_.push_back(where_[b]);
        states_.finish(b);
        ++evictions_;
      }
      changed_.notify_all();
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
  }

  Words words_;
  States states_;
  std::vector<std::vector<uint32_t>> store_, frames_;
  std::vector<uint32_t> where_, passed_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint32_t> free_;
  bool wanted_ = false, stopping_ = false;
  uint32_t hand_ = 0;
  std::atomic<uint64_t> evictions_{0}, sleeps_{0};
  std::thread server_, evictor_;
};

// One thread as a group. Knows, for each block, the last version of its own words that it stored.
struct Worker {
  Device& device;
  uint32_t me;
  std::vector<uint32_t> versions;
  uint64_t wrong = 0, refused = 0, accesses = 0;

  void access(uint32_t block, Intent intent) {
    uint32_t* const bytes = device.bytes(block);
    const uint32_t own = kFixed + me * kOwn;
    for (uint32_t k = 0; k < kFixed; ++k) wrong += bytes[k] != word(block, k, 0);
    for (uint32_t k = own; k < own + kOwn; ++k) wrong += bytes[k] != word(block, k, versions[block]);
    ++accesses;
    if (intent == Intent::read) return;
    ++versions[block];
    for (uint32_t k = own; k < own + kOwn; ++k) bytes[k] = word(block, k, versions[block]);
  }

  void run(uint32_t blocks, uint32_t most, uint32_t turns) {
    std::mt19937 random(me + 1);
    Group group(device.table(), long_enough());
    for (uint32_t turn = 0; turn < turns; ++turn) {
      const Intent intent = random() % 2 == 0 ? Intent::read : Intent::write;
      uint32_t list[4];
      const uint32_t count = random() % most + 1;
      for (uint32_t i = 0; i < count; ++i) list[i] = random() % blocks;
      if (random() % 4 == 0) group.prefetch(random() % blocks);
      if (random() % 4 == 0) {
        if (group.try_acquire(list[0], intent) != Answer::present) continue;
        access(list[0], intent);
        group.release(list[0]);
      } else if (group.acquire_all(list, count, intent) != Answer::present) {
        ++refused;
      } else {
        for (uint32_t i = 0; i < count; ++i) access(list[i], intent);
        group.release_all(list, count);
      }
    }
  }
};

// most: how many of the frames one group may ask for at once.
void exercise(uint32_t blocks, uint32_t frames, uint32_t most, uint32_t cells, uint32_t turns) {
  Device device(blocks, frames, most, cells);
  std::vector<Worker> workers;
  for (uint32_t i = 0; i < kThreads; ++i) workers.push_back({device, i, std::vector<uint32_t>(blocks)});
  std::vector<std::thread> threads;
  for (Worker& worker : workers) threads.emplace_back([&] { worker.run(blocks, most, turns); });
  for (std::thread& thread : threads) thread.join();
  device.stop();
  for (const Worker& worker : workers) {
    EXPECT_EQ(worker.wrong, 0u) << "thread " << worker.me;
    EXPECT_EQ(worker.refused, 0u) << "thread " << worker.me;
    EXPECT_GT(worker.accesses, turns / 2) << "thread " << worker.me;
    for (uint32_t b = 0; b < blocks; ++b) {
      const uint32_t own = kFixed + worker.me * kOwn;
      for (uint32_t k = own; k < own + kOwn; ++k) {
        ASSERT_EQ(device.last(b)[k], word(b, k, worker.versions[b])) << "block " << b << ", word " << k;
      }
    }
  }
  EXPECT_GT(device.evictions(), turns / 4);
}

TEST(PagingProtocol, GroupsFindTheirWordsWhileBlocksComeAndGo) {
  exercise(48, 16, 4, 8, 1500);
}

// One group may ask for all of the frames: the others get theirs in between.
TEST(PagingProtocol, GroupsThatWantAllOfTheMemoryTakeTurns) {
  exercise(8, 4, 4, 16, 400);
}

TEST(PagingProtocol, OneFrameIsEnoughForAll) {
  exercise(4, 1, 1, 2, 400);
}

TEST(PagingProtocol, AServerThatSleepsIsWokenByARequest) {
  Device device(4, 4, 4, 8);
  Group group(device.table(), long_enough());
  for (uint32_t b = 0; b < 4; ++b) {
    ASSERT_TRUE(vmem::test::eventually([&] { return device.asleep() && device.sleeps() > b; }));
    ASSERT_EQ(group.acquire(b, Intent::read), Answer::present);
    group.release(b);
  }
}

}  // namespace
