// Blocks that are partly on their device while the rest is still being read.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <thread>
#include <utility>
#include <vector>

#include "core/step.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

using Op = store::Io::Op;

class PagerPipelinedCopy : public PromotionParts {
 protected:
  using Copies = std::vector<FakeDevices::Came>;
  static constexpr size_t kBlock = 4 * kUnit;

  void SetUp() override {
    PromotionParts::SetUp();
    devices.streams = true;
  }
  // A block in the store whose read is under way for a waiter.
  Region& being_read(Urgency urgency = Urgency::acquire, size_t block_size = kBlock) {
    Region& r = supplied(1, block_size);
    put_away(r, 0, 7);
    engine.hold(Op::read, true);
    request(r, 0, 0, urgency, false);
    engine.until_held(1);
    return r;
  }
  void all_comes() {
    engine.hold(Op::read, false);
    engine.let_go();
    engine.until_idle();
  }
  // Runs as a worker does.
  bool serve() {
    BigLock lock(map.mutex());
    return pipelined_copy.serve(lock);
  }
  // As serve(), with other work while no lock is held.
  void serve_while(const std::function<void()>& meanwhile) {
    static std::function<void()> now;
    now = meanwhile;
    core::step_hook.store([](const char* step) {
      if (strcmp(step, "device.part") == 0) std::exchange(now, [] {})();
    });
    EXPECT_TRUE(serve());
    core::step_hook.store(nullptr);
  }
  static Copies copies(const Region& r, std::vector<std::pair<size_t, size_t>> from_and_size) {
    Copies all;
    for (const auto& [from, size] : from_and_size)
      all.push_back({reinterpret_cast<uintptr_t>(r.address(0)) + from, size, true, from != 0});
    return all;
  }
  void expect_it_comes(Region& r) {
    EXPECT_EQ(ready(), 1u);
    arrive();
    EXPECT_EQ(state(r, 0), State::on_device);
    EXPECT_EQ(devices.prepared, 1u);
    EXPECT_EQ(devices.punched, 0u);
    take_away(r, 0);
  }
  void expect_it_does_not_come(Region& r) {
    EXPECT_EQ(state(r, 0), State::stored);
    EXPECT_EQ(ready(), 0u);
    EXPECT_EQ(charged(), 0u);
    EXPECT_EQ(devices.prepared, devices.punched);
    const BigLock lock(map.mutex());
    EXPECT_EQ(r.reason(0).code(), -EIO);
    EXPECT_EQ(r.counts.in_flight, 0u);
  }
};

TEST_F(PagerPipelinedCopy, EachTimeThatHalfOfWhatWasLeftHasCome) {
  Region& r = being_read();
  engine.come(kUnit);
  EXPECT_FALSE(serve());
  engine.come(2 * kUnit);
  EXPECT_TRUE(serve());
  EXPECT_EQ(devices.came_in, copies(r, {{0, 2 * kUnit}}));
  EXPECT_FALSE(serve());
  engine.come(3 * kUnit);
  EXPECT_TRUE(serve());
  EXPECT_EQ(state(r, 0), State::promoting);
  all_comes();
  EXPECT_FALSE(serve());
  expect_it_comes(r);
  EXPECT_EQ(devices.came_in, copies(r, {{0, 2 * kUnit}, {2 * kUnit, kUnit}, {3 * kUnit, kUnit}}));
}

// Where the parts of the file do not match those of the block.
TEST_F(PagerPipelinedCopy, PartsEndWhereDevicesWantIt) {
  Region& r = being_read();
  engine.come(2 * kUnit + 12345);
  EXPECT_TRUE(serve());
  EXPECT_EQ(devices.came_in, copies(r, {{0, 2 * kUnit}}));
  all_comes();
  expect_it_comes(r);
}

TEST_F(PagerPipelinedCopy, WhatComesWhileAWorkerIsAtItIsCopiedNext) {
  Region& r = being_read();
  engine.come(2 * kUnit);
  serve_while([&] { engine.come(3 * kUnit); });
  EXPECT_TRUE(serve());
  EXPECT_EQ(devices.came_in, copies(r, {{0, 2 * kUnit}, {2 * kUnit, kUnit}}));
  all_comes();
  expect_it_comes(r);
}

TEST_F(PagerPipelinedCopy, OneThatHasComeWholeGoesOnWhenTheWorkerHasDone) {
  Region& r = being_read();
  engine.come(2 * kUnit);
  serve_while([&] {
    all_comes();
    EXPECT_EQ(ready(), 0u) << "two are at it";
  });
  expect_it_comes(r);
  EXPECT_EQ(devices.came_in, copies(r, {{0, 2 * kUnit}, {2 * kUnit, 2 * kUnit}}));
}

// The worker alone accesses what it writes without a lock; ThreadSanitizer checks that.
TEST_F(PagerPipelinedCopy, WhoIsToldMeanwhileLooksAtNothingThatTheWorkerHas) {
  for (const bool ends : {false, true}) {
    Region& r = being_read();
    engine.come(2 * kUnit);
    std::atomic<bool> told{false};  // relaxed: orders nothing
    std::thread io;
    devices.while_preparing = [&] {
      io = std::thread([&] {
        ends ? all_comes() : engine.come(3 * kUnit);
        told.store(true, std::memory_order_relaxed);
      });
      while (!told.load(std::memory_order_relaxed)) std::this_thread::yield();
    };
    EXPECT_TRUE(serve());
    io.join();
    devices.while_preparing = nullptr;
    EXPECT_EQ(serve(), !ends);
    if (!ends) all_comes();
    EXPECT_EQ(ready(), 1u);
    arrive();
    EXPECT_EQ(state(r, 0), State::on_device);
    EXPECT_EQ(std::exchange(devices.came_in, {}).size(), ends ? 2u : 3u);
    take_away(r, 0);
  }
}

TEST_F(PagerPipelinedCopy, OneThatHasComeWholeBeforeAWorkerHadTimeIsCopiedAtOnce) {
  Region& r = being_read();
  engine.come(2 * kUnit);
  all_comes();
  EXPECT_FALSE(serve());
  expect_it_comes(r);
  EXPECT_EQ(devices.came_in.size(), 1u);
  EXPECT_FALSE(devices.came_in[0].part);
}

TEST_F(PagerPipelinedCopy, OfAReadThatFailsNothingStaysOnTheDevice) {
  Region& r = being_read();
  engine.come(2 * kUnit);
  EXPECT_TRUE(serve());
  engine.fail(Op::read, EIO);
  all_comes();
  EXPECT_EQ(state(r, 0), State::promoting) << "its memory is given back by a worker";
  EXPECT_EQ(devices.punched, 0u);
  EXPECT_TRUE(serve());
  EXPECT_EQ(devices.waits, 1u) << "the frame is somebody else's next";
  EXPECT_EQ(devices.punched, 1u);
  expect_it_does_not_come(r);
  const BigLock lock(map.mutex());
  EXPECT_TRUE(gpus[0].budget.keeps()) << "the driver gets back what the device keeps of it";
}

TEST_F(PagerPipelinedCopy, OfAReadThatFailsWhileAWorkerIsAtItNothingStaysEither) {
  Region& r = being_read();
  engine.come(2 * kUnit);
  engine.fail(Op::read, EIO);
  serve_while([&] { all_comes(); });
  EXPECT_EQ(devices.punched, 1u);
  expect_it_does_not_come(r);
}

TEST_F(PagerPipelinedCopy, AReadThatFailsBeforeAWorkerHadTimeIsOverAtOnce) {
  Region& r = being_read();
  engine.come(2 * kUnit);
  engine.fail(Op::read, EIO);
  all_comes();
  EXPECT_FALSE(serve());
  EXPECT_EQ(devices.prepared, 0u);
  expect_it_does_not_come(r);
}

TEST_F(PagerPipelinedCopy, WhatIsNotWhatWasWrittenDoesNotStayOnTheDevice) {
  Region& r = being_read();
  engine.come(2 * kUnit);
  EXPECT_TRUE(serve());
  engine.flip_stored_bits();
  all_comes();
  EXPECT_TRUE(serve());
  EXPECT_EQ(devices.punched, 1u);
  expect_it_does_not_come(r);
}

TEST_F(PagerPipelinedCopy, WithoutMemoryOnTheDeviceAllWaitsUntilItHasCome) {
  Region& r = being_read();
  devices.prepare_error = ENOMEM;
  engine.come(2 * kUnit);
  EXPECT_TRUE(serve());
  devices.prepare_error = 0;
  engine.come(3 * kUnit);
  EXPECT_FALSE(serve());
  all_comes();
  expect_it_comes(r);
  EXPECT_EQ(devices.came_in.size(), 1u);
  EXPECT_FALSE(devices.came_in[0].part);
}

TEST_F(PagerPipelinedCopy, AfterACopyThatIsRefusedTheRestWaitsUntilAllHasCome) {
  Region& r = being_read();
  engine.come(2 * kUnit);
  EXPECT_TRUE(serve());
  devices.copy_error = ENOMEM;
  engine.come(3 * kUnit);
  EXPECT_TRUE(serve());
  devices.copy_error = 0;
  EXPECT_FALSE(serve());
  all_comes();
  expect_it_comes(r);
  EXPECT_EQ(devices.came_in, copies(r, {{0, 2 * kUnit}, {2 * kUnit, 2 * kUnit}}));
}

// It stays in its frame.
TEST_F(PagerPipelinedCopy, OneThatCannotComeInTheEndHasNothingOnTheDevice) {
  Region& r = being_read();
  engine.come(2 * kUnit);
  EXPECT_TRUE(serve());
  all_comes();
  devices.copy_error = EIO;
  arrive();
  EXPECT_EQ(state(r, 0), State::staged);
  EXPECT_EQ(charged(), 0u);
  EXPECT_GE(devices.waits, 1u) << "for the copy of its part";
  EXPECT_EQ(devices.punched, 1u);
}

TEST_F(PagerPipelinedCopy, OneThatIsReadyBesideAnotherThatCannotBeMadeHasNothingOnTheDevice) {
  Region& r = being_read();
  engine.come(2 * kUnit);
  EXPECT_TRUE(serve());
  all_comes();
  {
    BigLock lock(map.mutex());
    gpus[0].budget.set(kBlock + kUnit);
  }
  Region& zeros = device_region(1);
  request(zeros, 0, 0);
  ASSERT_EQ(ready(), 2u);
  devices.prepare_error = ENOMEM;
  arrive();
  EXPECT_EQ(state(r, 0), State::staged);
  EXPECT_EQ(state(zeros, 0), State::unpopulated);
  EXPECT_EQ(charged(), 0u);
  EXPECT_EQ(devices.waits, 1u);
  EXPECT_EQ(devices.punched, 1u);
}

TEST_F(PagerPipelinedCopy, OfWhatNobodyWaitsForNothingIsCopiedBeforeAllHasCome) {
  Region& r = being_read(Urgency::prefetch);
  engine.come(2 * kUnit);
  EXPECT_FALSE(serve());
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(lease_manager.grant({&r, 0, 0}, VMEM_READ, 0, nullptr).ok());
  }
  engine.come(3 * kUnit);
  EXPECT_TRUE(serve()) << "somebody came for it";
  EXPECT_EQ(devices.came_in, copies(r, {{0, 3 * kUnit}}));
  all_comes();
  {
    BigLock lock(map.mutex());
    lease_manager.take_back({&r, 0, 0}, VMEM_READ, 0, nullptr);
  }
  expect_it_comes(r);
}

TEST_F(PagerPipelinedCopy, ABlockOfOnePartHasNone) {
  Region& r = being_read(Urgency::acquire, kUnit);
  engine.come(kUnit / 2);
  EXPECT_FALSE(serve());
  all_comes();
  expect_it_comes(r);
}

}  // namespace
}  // namespace vmem::pager::test
