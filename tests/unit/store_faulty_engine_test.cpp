// The contract of the fault-injecting engine.
#include <gtest/gtest.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "common/faulty_engine.h"
#include "store_test_util.h"

namespace vmem::store::test {
namespace {

using core::kPage;

class FaultyEngineTest : public testing::Test {
 protected:
  FaultyEngineTest() : file_(64 * kPage, true), buffer_(64 * kPage) {
    EngineOptions options;
    options.depth = 8;
    std::unique_ptr<Engine> inner;
    EXPECT_TRUE(make_engine(options, &inner).ok());
    EXPECT_TRUE(FaultyEngine::wrap(std::move(inner), 99, &engine_).ok());
    EXPECT_TRUE(engine_->add_file(file_.fd(), &id_).ok());
  }
  Io& add(Batch& batch, Io::Op op, size_t page, size_t pages = 1) {
    return batch.add(op, id_, page * kPage, buffer_.data() + page * kPage, pages * kPage);
  }
  TempFile file_;
  Buffer buffer_;
  std::unique_ptr<FaultyEngine> engine_;
  FileId id_ = 0;
};

TEST_F(FaultyEngineTest, AnErrorHitsOnlyWhatMatches) {
  Fault fault;
  fault.error = ENOSPC;
  fault.op = Io::Op::read;
  fault.urgency = core::Urgency::prefetch;
  fault.file = id_;
  fault.begin = 10 * kPage;
  fault.end = 12 * kPage;
  const auto rule = engine_->add_rule(fault);
  Batch batch;
  for (size_t n = 8; n < 14; ++n) add(batch, Io::Op::read, n).urgency = core::Urgency::prefetch;
  add(batch, Io::Op::read, 10).urgency = core::Urgency::fault;
  add(batch, Io::Op::write, 40).urgency = core::Urgency::prefetch;
  batch.submit(*engine_);
  batch.wait();
  const int expected[] = {0, 0, -ENOSPC, -ENOSPC, 0, 0, 0, 0};
  for (size_t n = 0; n < std::size(expected); ++n) EXPECT_EQ(batch.ios()[n].result, expected[n]) << n;
  EXPECT_EQ(engine_->fired(rule), 2u);
  EXPECT_EQ(engine_->stats().errors, 2u);
}

TEST_F(FaultyEngineTest, NthLimitAndRemovalAreCounted) {
  Fault third;
  third.nth = 3;
  engine_->add_rule(third);
  Fault first_two;
  first_two.error = ENXIO;
  first_two.limit = 2;
  const auto rule = engine_->add_rule(first_two);
  Batch batch;
  for (size_t n = 0; n < 6; ++n) add(batch, Io::Op::read, 2 * n);
  batch.submit(*engine_);
  batch.wait();
  const int expected[] = {-ENXIO, -ENXIO, -EIO, 0, 0, 0};
  for (size_t n = 0; n < std::size(expected); ++n) EXPECT_EQ(batch.ios()[n].result, expected[n]) << n;
  EXPECT_EQ(engine_->fired(rule), 2u);

  const auto all = engine_->add_rule(Fault{});
  engine_->remove_rule(all);
  Batch after;
  add(after, Io::Op::read, 0);
  after.submit(*engine_);
  after.wait();
  EXPECT_EQ(after.ios()[0].result, 0);
}

TEST_F(FaultyEngineTest, ProbabilityFollowsTheSeed) {
  Fault fault;
  fault.probability = 0.5;
  const auto rule = engine_->add_rule(fault);
  Batch batch;
  for (size_t n = 0; n < 400; ++n) add(batch, Io::Op::read, n % 64);
  batch.submit(*engine_);
  batch.wait();
  EXPECT_GT(engine_->fired(rule), 140u);
  EXPECT_LT(engine_->fired(rule), 260u);
}

TEST_F(FaultyEngineTest, AShortTransferIsContinuedUnseen) {
  Fault fault;
  fault.action = Fault::Action::short_transfer;
  fault.probability = 0.5;
  const auto rule = engine_->add_rule(fault);
  std::mt19937_64 random(1);
  Buffer written(64 * kPage);
  written.fill(random);
  Batch writes;
  writes.add(Io::Op::write, id_, 0, written.data(), written.size());
  writes.submit(*engine_);
  writes.wait();
  Batch reads;
  for (size_t n = 0; n < 64; n += 4) add(reads, Io::Op::read, n, 4);
  reads.submit(*engine_);
  reads.wait();
  for (const Io& io : reads.ios()) EXPECT_EQ(io.result, 0);
  EXPECT_EQ(memcmp(written.data(), buffer_.data(), written.size()), 0);
  EXPECT_GT(engine_->fired(rule), 0u);
  EXPECT_GT(engine_->stats().retries, 0u);
}

TEST_F(FaultyEngineTest, ATransferThatStaysShortIsAnError) {
  if (!file_.direct()) GTEST_SKIP() << "this file system has no direct I/O";
  Fault fault;
  fault.action = Fault::Action::short_transfer;
  engine_->add_rule(fault);
  Batch batch;
  add(batch, Io::Op::write, 0, 2);
  batch.submit(*engine_);
  batch.wait();
  EXPECT_EQ(batch.ios()[0].result, -EIO);
  EXPECT_LT(batch.ios()[0].transferred, 2 * kPage);
}

TEST_F(FaultyEngineTest, AFlippedBitIsOneBit) {
  Fault fault;
  fault.action = Fault::Action::flip_bit;
  fault.nth = 1;
  engine_->add_rule(fault);
  Batch batch;
  add(batch, Io::Op::write, 60);  // not a read: does not count
  add(batch, Io::Op::read, 0, 4);
  batch.submit(*engine_);
  batch.wait();
  EXPECT_EQ(batch.ios()[1].result, 0);
  EXPECT_EQ(batch.ios()[1].transferred, 4 * kPage);
  Buffer right(4 * kPage);
  Batch again;
  again.add(Io::Op::read, id_, 0, right.data(), 4 * kPage);
  again.submit(*engine_);
  again.wait();
  int bits = 0;
  for (size_t n = 0; n < 4 * kPage; ++n) {
    bits += std::popcount(static_cast<unsigned char>(right.data()[n] ^ buffer_.data()[n]));
  }
  EXPECT_EQ(bits, 1);
}

TEST_F(FaultyEngineTest, ATornWriteReachesTheFileByHalf) {
  Fault fault;
  fault.action = Fault::Action::torn_write;
  fault.limit = 1;
  engine_->add_rule(fault);
  memset(buffer_.data(), 0x11, buffer_.size());
  Batch batch;
  add(batch, Io::Op::write, 0, 4);
  batch.submit(*engine_);
  batch.wait();
  EXPECT_EQ(batch.ios()[0].result, 0);
  EXPECT_EQ(batch.ios()[0].transferred, 4 * kPage);
  EXPECT_TRUE(file_.matches(0, buffer_.data(), 2 * kPage));
  EXPECT_FALSE(file_.matches(2 * kPage, buffer_.data(), kPage));
  EXPECT_FALSE(file_.matches(3 * kPage, buffer_.data(), kPage));
}

TEST_F(FaultyEngineTest, WhatHangsGoesOnWhenReleased) {
  Fault fault;
  fault.action = Fault::Action::hang;
  fault.begin = 4 * kPage;
  const auto rule = engine_->add_rule(fault);
  Batch hung, passes;
  add(hung, Io::Op::read, 4);
  add(hung, Io::Op::read, 5);
  hung.submit(*engine_);
  ASSERT_TRUE(engine_->wait_hanging(2, 5000));
  add(passes, Io::Op::read, 0);
  passes.submit(*engine_);
  passes.wait();
  EXPECT_TRUE(hung.order().empty());
  EXPECT_FALSE(engine_->wait_hanging(3, 1));
  engine_->remove_rule(rule);
  engine_->release();
  hung.wait();
  EXPECT_EQ(hung.ios()[0].result, 0);
}

TEST_F(FaultyEngineTest, DestructionEndsWhatHangsAndWhatIsDelayed) {
  Fault hang;
  hang.action = Fault::Action::hang;
  hang.nth = 1;
  engine_->add_rule(hang);
  Fault delay;
  delay.action = Fault::Action::delay;
  delay.delay_ms = 3600 * 1000;
  engine_->add_rule(delay);
  Batch batch;
  for (size_t n = 0; n < 8; ++n) add(batch, Io::Op::read, 2 * n);
  batch.submit(*engine_);
  engine_.reset();
  EXPECT_EQ(batch.order().size(), 8u);
}

TEST_F(FaultyEngineTest, ADelayedRequestTakesAtLeastThatLong) {
  Fault delay;
  delay.action = Fault::Action::delay;
  delay.delay_ms = 20;
  delay.nth = 1;
  engine_->add_rule(delay);
  Batch batch;
  add(batch, Io::Op::read, 0);
  const auto start = std::chrono::steady_clock::now();
  batch.submit(*engine_);
  batch.wait();
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(20));
  EXPECT_EQ(batch.ios()[0].result, 0);
  EXPECT_TRUE(file_.matches(0, buffer_.data(), kPage));
}

TEST_F(FaultyEngineTest, OnlyARealEngineIsWrapped) {
  std::unique_ptr<FaultyEngine> out;
  EXPECT_EQ(FaultyEngine::wrap(nullptr, 1, &out).code(), -EINVAL);
  EXPECT_EQ(FaultyEngine::wrap(std::move(engine_), 1, &out).code(), -EINVAL);
}

}  // namespace
}  // namespace vmem::store::test
