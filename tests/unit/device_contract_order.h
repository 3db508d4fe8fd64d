// Streams and tickets, and several devices.
#pragma once

#include <cerrno>
#include <thread>

#include "device_contract_fixture.h"

namespace vmem::device::testing {

TEST_P(DeviceContract, WorkPutOnAStreamAfterTheTicketSeesTheData) {
  constexpr size_t kUnits = 16;
  uint64_t* base = reserve(kUnits);
  VMEM_OK(populate(range(base, 0, kUnits)));
  std::vector<Copy> copies;
  uint64_t expected = 0;
  for (size_t u = 0; u < kUnits; ++u) {
    fill_frame(u, 3 * u);
    expected += sum_of(3 * u);
    copies.push_back({at(base) + u * unit_, frame(u), unit_});
  }
  Ticket done;
  VMEM_OK(d_->copy_in(0, copies, &done));
  VMEM_OK(d_->map(range(base, 0, kUnits)));
  VMEM_OK(d_->order_after(done, stream_, 0));
  // Thousands of launches behind one ticket: the order must not depend on the length of a queue.
  bench_->sum(stream_, base, kUnits * words_, sum_cell(0));
  for (int i = 0; i < 3000; ++i) bench_->add(stream_, base + 5 * words_, 64, 1);
  bench_->sum(stream_, base, kUnits * words_, sum_cell(1));
  VMEM_OK(bench_->synchronize(stream_));
  EXPECT_EQ(*sum_cell(0), expected);
  EXPECT_EQ(*sum_cell(1), expected + 3000 * 64);
}

TEST_P(DeviceContract, ARecordedTicketIsReachedWhenTheStreamGetsThere) {
  *gate() = 0;
  bench_->stand_still(stream_, gate());
  Ticket ticket;
  VMEM_OK(d_->record(stream_, 0, &ticket));
  bool done = true;
  VMEM_OK(d_->poll(ticket, &done));
  EXPECT_FALSE(done);
  *gate() = 1;
  VMEM_OK(bench_->synchronize(stream_));
  VMEM_OK(d_->poll(ticket, &done));
  EXPECT_TRUE(done);
  VMEM_OK(d_->wait(ticket));
}

TEST_P(DeviceContract, DrainingADeviceWaitsForItsWork) {
  uint64_t* base = reserve(1);
  bring(base, 0, 5);
  VMEM_OK(d_->drain(0));  // there is none
  *gate() = 0;
  *sum_cell() = 0;
  bench_->stand_still(stream_, gate());
  bench_->sum(stream_, base, words_, sum_cell());
  std::thread opener([&] { *gate() = 1; });
  VMEM_OK(d_->drain(0));
  EXPECT_EQ(*sum_cell(), sum_of(5));
  opener.join();
  VMEM_REFUSED(ENODEV, d_->drain(99));
}

TEST_P(DeviceContract, MovesGoOnWhileAUsersStreamStandsStill) {
  uint64_t* base = reserve(4);
  *gate() = 0;
  bench_->stand_still(stream_, gate());
  bring(base, 0, 12);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  if (unified()) {
    EXPECT_EQ(base[2], 14u);
  }
  VMEM_OK(d_->write_protect(range(base, 0, 1), Access::read));
  copy_out(base, 0, 3);
  EXPECT_EQ(frame(3)[4], 16u);
  drop(base, 0);
  *gate() = 1;
  VMEM_OK(bench_->synchronize(stream_));
}

TEST_P(DeviceContract, TheDefaultStreamMayHoldALease) {
  uint64_t* base = reserve(1);
  bench_->set_current_device(0);
  VMEM_OK(d_->check_stream(nullptr, 0));
  VMEM_OK(populate(range(base, 0, 1)));
  fill_frame(0, 9);
  Ticket in, out;
  const Copy copy{at(base), frame(0), unit_};
  VMEM_OK(d_->copy_in(0, std::span(&copy, 1), &in));
  VMEM_OK(d_->map(range(base, 0, 1)));
  VMEM_OK(d_->order_after(in, nullptr, 0));
  bench_->sum(nullptr, base, words_, sum_cell());
  VMEM_OK(d_->record(nullptr, 0, &out));
  VMEM_OK(d_->wait(out));
  EXPECT_EQ(*sum_cell(), sum_of(9));
}

TEST_P(DeviceContract, AnEmptyTicketIsDone) {
  bool done = false;
  VMEM_OK(d_->poll(Ticket(), &done));
  EXPECT_TRUE(done);
  VMEM_OK(d_->wait(Ticket()));
  VMEM_OK(d_->order_after(Ticket(), stream_, 0));
}

TEST_P(DeviceContract, ManyTicketsLiveAtOnce) {
  std::vector<Ticket> tickets(5000);
  for (Ticket& t : tickets) VMEM_OK(d_->record(stream_, 0, &t));
  VMEM_OK(bench_->synchronize(stream_));
  for (const Ticket& t : tickets) {
    bool done = false;
    VMEM_OK(d_->poll(t, &done));
    ASSERT_TRUE(done);
  }
}

// --- several devices ------------------------------------------------------------------------------------------------

TEST_P(DeviceContract, EveryDeviceIsDescribed) {
  ASSERT_GE(d_->count(), 1);
  for (int d = 0; d < d_->count(); ++d) {
    const Info& info = d_->info(d);
    EXPECT_EQ(info.device, d);
    EXPECT_FALSE(info.name.empty());
    EXPECT_GT(info.total_bytes, 0u);
    ASSERT_EQ(info.links.size(), static_cast<size_t>(d_->count()));
    EXPECT_EQ(info.links[static_cast<size_t>(d)], Link::self);
  }
}

TEST_P(DeviceContract, BlocksMoveBetweenDevicesWithTheirBytes) {
  if (d_->count() < 2) GTEST_SKIP() << "needs two devices";
  uint64_t* base = reserve(4);
  for (size_t u = 0; u < 4; ++u) bring(base, u, 50 * u);
  VMEM_OK(d_->open(range(base, 0, 2), Access::read_write));
  VMEM_OK(d_->migrate(range(base, 0, 4).front(), 1));
  EXPECT_EQ(used(0), 0u);
  EXPECT_EQ(used(1), 4 * unit_);
  void* other = bench_->stream(1);
  bench_->sum(other, base, 4 * words_, sum_cell());
  VMEM_OK(bench_->synchronize(other));
  EXPECT_EQ(*sum_cell(), sum_of(0) + sum_of(50) + sum_of(100) + sum_of(150));
  if (unified()) {
    EXPECT_EQ(base[words_], 50u);  // still open, still right
  }
  copy_out(base, 3, 1, 1);
  EXPECT_EQ(frame(1)[1], 151u);
  bench_->destroy(other);
}

TEST_P(DeviceContract, RangesThatMoveTogetherSayEachHowThatWent) {
  if (d_->count() < 2) GTEST_SKIP() << "needs two devices";
  uint64_t* base = reserve(8);
  for (const size_t u : {0, 1, 2, 4, 5, 7}) bring(base, u, 50 * u);
  std::vector<Range> ranges{range(base, 4, 2).front(), range(base, 0, 2).front(), range(base, 2, 1).front()};
  std::vector<core::Status> each(ranges.size());
  for (const int by : {0, 1}) {  // by the device they leave, and by the one they go to
    VMEM_OK(d_->migrate(ranges, 1 - by, 0, each));
    for (const core::Status& s : each) VMEM_OK(s);
    EXPECT_EQ(used(by), by == 0 ? unit_ : 0u);
    EXPECT_EQ(used(1 - by), by == 0 ? 5 * unit_ : 6 * unit_);
  }
  EXPECT_EQ(kernel_sum(base, 3 * words_), sum_of(0) + sum_of(50) + sum_of(100));
  EXPECT_EQ(kernel_sum(base + 4 * words_, 2 * words_), sum_of(200) + sum_of(250));
  ranges.push_back(range(base, 6, 1).front());
  each.resize(ranges.size());
  VMEM_REFUSED(EINVAL, d_->migrate(ranges, 1, 1, each));
  for (const core::Status& s : each) EXPECT_EQ(s.code(), -EINVAL) << "nothing has changed";
  ranges.pop_back();
  VMEM_REFUSED(EINVAL, d_->migrate(ranges, 1, 1, each));  // one answer too many
  EXPECT_EQ(used(1), 0u);
  if (d_->count() < 3) return;
  each.resize(ranges.size());
  VMEM_REFUSED(EINVAL, d_->migrate(ranges, 1, 2, each));
}

// More blocks than may be under way at once, in mixed order. One cannot move, and some are named
// only after earlier ones ended.
TEST_P(DeviceContract, BlocksThatAreNamedAsTheyGoMoveAndSayHowThatWentInTheirOrder) {
  if (d_->count() < 2) GTEST_SKIP() << "needs two devices";
  constexpr size_t kBlocks = 24, kUnmade = 7, kThere = 11, kLate = 2;
  uint64_t* base = reserve(kBlocks);
  for (size_t u = 0; u < kBlocks; ++u)
    if (u != kUnmade) make(base, u, 1, u == kThere ? 1 : 0);
  struct Named final : vmem::device::Migration {
    Named(uint64_t* begin, size_t words) : first(begin), unit_words(words) {}
    std::optional<Range> next() override {
      const size_t named = order.size();
      if (named == kBlocks) return std::nullopt;
      if (named == kBlocks - kLate && answers.size() < named) return std::nullopt;  // none for now
      order.push_back(5 * named % kBlocks);
      return at(order.back());
    }
    void ended(Range range, core::Status status) override {
      ASSERT_LT(answers.size(), order.size());
      EXPECT_EQ(range.address, at(order[answers.size()]).address);
      EXPECT_EQ(range.size, at(0).size);
      answers.push_back(status.code());
    }
    Range at(size_t u) const {
      return {reinterpret_cast<uintptr_t>(first + u * unit_words), unit_words * sizeof(uint64_t)};
    }
    uint64_t* const first;
    const size_t unit_words;
    std::vector<size_t> order;
    std::vector<int> answers;
  };
  Named named(base, words_);
  d_->migrate_all(named, 1, 0);
  ASSERT_EQ(named.answers.size(), kBlocks);
  for (size_t i = 0; i < kBlocks; ++i)
    EXPECT_EQ(named.answers[i], named.order[i] == kUnmade ? -EINVAL : 0) << named.order[i];
  EXPECT_EQ(used(0), 0u);
  EXPECT_EQ(used(1), (kBlocks - 1) * unit_);
}

TEST_P(DeviceContract, NeighboursAreMappedByOneCallWhicheverDevicesSeeThem) {
  if (d_->count() < 2) GTEST_SKIP() << "needs two devices";
  if (d_->info(0).links[1] == Link::none) GTEST_SKIP() << "devices 0 and 1 cannot reach each other";
  constexpr size_t kUnits = 7;
  constexpr size_t kOnOther = 4;                       // from there on they are on device 1
  const std::vector<size_t> seen_by_both = {1, 2, 5};  // on device 0: 1 and 2
  uint64_t* base = reserve(kUnits);
  for (const size_t u : seen_by_both)
    VMEM_OK(d_->advise(range(base, u, 1).front(), Advice::accessed_by, u < kOnOther ? 1 : 0, true));
  for (size_t u = 0; u < kUnits; ++u) {
    const int device = u < kOnOther ? 0 : 1;
    VMEM_OK(populate(range(base, u, 1), device));
    fill_frame(0, 100 * u);
    copy_in(base, u, 0, device);
  }
  VMEM_OK(d_->map(range(base, 0, kUnits)));
  void* const other = bench_->stream(1);
  const auto expect_sum = [&](void* stream, size_t u) {
    bench_->sum(stream, base + u * words_, words_, sum_cell());
    VMEM_OK(bench_->synchronize(stream));
    EXPECT_EQ(*sum_cell(), sum_of(100 * u)) << u;
  };
  for (size_t u = 0; u < kUnits; ++u) expect_sum(u < kOnOther ? stream_ : other, u);
  for (const size_t u : seen_by_both) expect_sum(u < kOnOther ? other : stream_, u);
  VMEM_OK(d_->unmap(range(base, 0, kUnits)));
  VMEM_OK(d_->map(range(base, 0, kUnits)));
  for (size_t u = 0; u < kUnits; ++u) expect_sum(u < kOnOther ? stream_ : other, u);
  bench_->destroy(other);
}

// A block that is named for an unknown device, or for a third device's call, stays.
TEST_P(DeviceContract, ABlockThatIsNamedForADeviceThatCannotTakeItStays) {
  if (d_->count() < 2 || d_->cpu_view() == vmem::device::CpuView::unified) GTEST_SKIP() << "needs two devices, handles";
  uint64_t* base = reserve(1);
  bool torn = false;
  VMEM_OK(d_->populate(range(base, 0, 1), 0, &torn));
  struct One final : vmem::device::Migration {
    explicit One(Range r) : block(r) {}
    std::optional<Range> next() override { return std::exchange(named, true) ? std::nullopt : std::optional(block); }
    void ended(Range, core::Status status) override { answer = status.code(); }
    const Range block;
    bool named = false;
    int answer = 1;
  };
  const Range block{reinterpret_cast<uintptr_t>(base), unit_};
  One nowhere(block), by_another(block);
  d_->migrate_all(nowhere, d_->count(), 0);
  EXPECT_EQ(nowhere.answer, -ENODEV);
  d_->migrate_all(by_another, 1, 2);
  EXPECT_EQ(by_another.answer, -EINVAL);
  EXPECT_EQ(used(0), unit_);
}

// Advice given before the block is made, while it is mapped, and where it has moved to.
TEST_P(DeviceContract, WhatIsAdvisedToBeAccessedByADeviceIsMappedForItToo) {
  if (d_->count() < 2) GTEST_SKIP() << "needs two devices";
  if (d_->info(0).links[1] == Link::none) GTEST_SKIP() << "devices 0 and 1 cannot reach each other";
  uint64_t* base = reserve(3);
  VMEM_OK(d_->advise(range(base, 0, 1).front(), Advice::accessed_by, 1, true));
  for (size_t u = 0; u < 3; ++u) bring(base, u, 50 * u);
  VMEM_OK(d_->advise(range(base, 1, 2).front(), Advice::accessed_by, 1, true));
  void* other = bench_->stream(1);
  const auto expect_seen = [&](void* stream) {
    bench_->sum(stream, base, 3 * words_, sum_cell());
    VMEM_OK(bench_->synchronize(stream));
    EXPECT_EQ(*sum_cell(), sum_of(0) + sum_of(50) + sum_of(100));
  };
  expect_seen(other);
  expect_seen(stream_);
  VMEM_OK(d_->advise(range(base, 0, 3).front(), Advice::accessed_by, 0, true));
  VMEM_OK(d_->migrate(range(base, 0, 3).front(), 1));
  expect_seen(other);
  expect_seen(stream_);
  VMEM_OK(d_->advise(range(base, 0, 3).front(), Advice::accessed_by, 1, false));  // the block is on that device
  expect_seen(other);
  bench_->destroy(other);
}

TEST_P(DeviceContract, ABlockMadeOnTheSecondDeviceIsCountedThere) {
  if (d_->count() < 2) GTEST_SKIP() << "needs two devices";
  uint64_t* base = reserve(2);
  bring(base, 0, 1, 1);
  EXPECT_EQ(used(0), 0u);
  EXPECT_EQ(used(1), unit_);
  void* other = bench_->stream(1);
  Ticket done;
  VMEM_OK(d_->record(other, 1, &done));
  VMEM_OK(d_->order_after(done, stream_, 0));  // across devices
  VMEM_OK(bench_->synchronize(stream_));
  bench_->destroy(other);
  const Copy copy{at(base), frame(0), unit_};
  VMEM_REFUSED(EINVAL, d_->copy_in(0, std::span(&copy, 1), &done));
}

TEST_P(DeviceContract, AStreamOfAnotherDeviceIsRefused) {
  if (d_->count() < 2) GTEST_SKIP() << "needs two devices";
  void* other = bench_->stream(1);
  Ticket t;
  VMEM_REFUSED(EINVAL, d_->check_stream(other, 0));
  VMEM_REFUSED(EINVAL, d_->record(other, 0, &t));
  VMEM_OK(d_->check_stream(other, 1));
  bench_->set_current_device(1);
  VMEM_REFUSED(EINVAL, d_->check_stream(nullptr, 0));
  VMEM_OK(d_->check_stream(nullptr, 1));
  bench_->set_current_device(0);
  VMEM_OK(d_->check_stream(nullptr, 0));
  bench_->destroy(other);
}

TEST_P(DeviceLoss, AStreamOfALostDeviceLosesNoOther) {
  if (d_->count() < 2) GTEST_SKIP() << "needs two devices";
  uint64_t* base = reserve(2);
  bring(base, 0, 1, 1);
  void* other = bench_->stream(1);
  bench_->sum(other, base + words_, words_, sum_cell());  // a hole
  EXPECT_FALSE(bench_->synchronize(other).ok());
  if (!bench_->synchronize(stream_).ok()) GTEST_SKIP() << "the driver ends the work of all devices of the process";
  Ticket t;
  VMEM_REFUSED(EINVAL, d_->check_stream(other, 0));
  EXPECT_FALSE(d_->record(other, 0, &t).ok());
  EXPECT_FALSE(d_->order_after(Ticket(), other, 0).ok());
  VMEM_OK(d_->probe(0));
  VMEM_OK(d_->check_stream(stream_, 0));
  VMEM_REFUSED(EIO, d_->probe(1));
  VMEM_REFUSED(EIO, d_->check_stream(other, 1));
  bench_->destroy(other);
}

}  // namespace vmem::device::testing
