// Blocks of 8 MiB on simulated devices with page tables of their own: a kernel stores to some of
// their words, and the CPU loads them.
#pragma once

#include <atomic>

#include "sim_support.h"

namespace systest {

constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;
constexpr size_t kLarge = 8 << 20, kWords = kLarge / 8;
constexpr size_t kPlaces[] = {0, kWords / 2 + 77, kWords - 1};  // the words that tests check

class LargeBlocks : public SimTest {
 protected:
  void start_large(int devices, const Settings& more = {}) {
    Settings settings{{"device_block_size", "8MiB"},
                      {"device_budget", "64MiB"},
                      {"host_budget", "256MiB"},
                      {"trap", "uffd"}};  // the module takes blocks
    settings.insert(settings.end(), more.begin(), more.end());
    start(devices, settings, true);
  }
  void TearDown() override {
    fails_ = false;
    SimTest::TearDown();
    vmem_set("trap", "auto");
    vmem_set("device_block_size", "2MiB");  // the default, for later tests in this process
  }
  static uint64_t* words(const vmem::region& r) { return static_cast<uint64_t*>(r.data()); }
  static uint64_t load(const uint64_t* at) { return *static_cast<const volatile uint64_t*>(at); }
  // A kernel stores value, value + 1, .. to the places of block b; afterwards no lease is left.
  void put(const vmem::region& r, uint64_t value, size_t b = 0) {
    uint64_t* const w = words(r) + b * kWords;
    ASSERT_EQ(vmem_acquire(w, kLarge, kBoth, 0, stream_), 0) << said();
    for (const size_t place : kPlaces) launch_store(stream_, w + place, value++);
    ASSERT_EQ(vmem_release(w, kLarge, stream_), 0) << said();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
    at_rest(w);
  }
  static void expect(const vmem::region& r, uint64_t value, size_t b = 0) {
    for (const size_t place : kPlaces) EXPECT_EQ(load(words(r) + b * kWords + place), value++) << place;
  }
  // A thread loads a word in the middle, before the rest of the block is in place.
  void load_the_middle(const vmem::region& r, uint64_t value) {
    stop_at("device.showing_rest");
    seen_ = false;
    aside([&r, value, this] {
      EXPECT_EQ(load(words(r) + kPlaces[1]), value);
      seen_ = true;
    });
    ASSERT_TRUE(stopped());
    EXPECT_TRUE(until([this] { return seen_.load(); })) << "it waits for all of the block";
  }

  std::atomic<bool> seen_{false};
  static inline std::atomic<int> failures_{0};
  static inline std::atomic<bool> fails_{false};
};

}  // namespace systest
