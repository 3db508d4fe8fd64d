// Refused calls, and the loss of a device.
#pragma once

#include <cerrno>
#include <thread>

#include "device_contract_fixture.h"

namespace vmem::device::testing {

TEST_P(DeviceContract, AStreamThatCapturesAGraphIsRefused) {
  VMEM_OK(d_->check_stream(stream_, 0));
  bench_->begin_capture(stream_);
  Ticket t;
  const core::Status checked = d_->check_stream(stream_, 0);
  const core::Status recorded = d_->record(stream_, 0, &t);
  bench_->end_capture(stream_);
  EXPECT_EQ(checked.code(), -EBUSY) << checked.text();
  EXPECT_EQ(recorded.code(), -EBUSY) << recorded.text();
  VMEM_OK(d_->check_stream(stream_, 0));
}

TEST_P(DeviceContract, MovesDoNotDisturbACaptureOnAnotherThread) {
  uint64_t* base = reserve(2);
  bench_->begin_capture(stream_);  // global mode: unsafe calls of any thread would break it
  std::thread([&] {
    bring(base, 0, 1);
    VMEM_OK(d_->open(range(base, 0, 1), Access::read));
    drop(base, 0);
  }).join();
  bench_->end_capture(stream_);  // fails the test when the capture was broken
}

TEST_P(DeviceContract, UnknownDevicesAreRefused) {
  uint64_t* base = reserve(1);
  void* p = nullptr;
  Memory m{};
  for (int bad : {-1, d_->count(), 1000}) {
    VMEM_REFUSED(ENODEV, d_->reserve(unit_, bad, &p));
    VMEM_REFUSED(ENODEV, populate(range(base, 0, 1), bad));
    VMEM_REFUSED(ENODEV, d_->memory(bad, &m));
    VMEM_REFUSED(ENODEV, d_->check_stream(stream_, bad));
    if (bad != kHost) VMEM_REFUSED(ENODEV, d_->advise(range(base, 0, 1)[0], Advice::preferred_location, bad, true));
  }
  EXPECT_EQ(used(), 0u);
}

TEST_P(DeviceContract, BadRangesAreRefusedAndChangeNothing) {
  uint64_t* base = reserve(4);
  bring(base, 0, 6);
  void* p = nullptr;
  VMEM_REFUSED(EINVAL, d_->reserve(0, 0, &p));
  VMEM_REFUSED(EINVAL, d_->reserve(unit_ + 4096, 0, &p));
  VMEM_REFUSED(EINVAL, populate({{at(base) + 4096, unit_}}));
  VMEM_REFUSED(EINVAL, populate({{at(base), unit_ / 2}}));
  VMEM_REFUSED(EINVAL, populate({{at(base), 0}}));
  VMEM_REFUSED(EINVAL, populate({{at(base) + 2 * unit_, 3 * unit_}}));  // beyond the end
  VMEM_REFUSED(EINVAL, populate({{at(base) + unit_, unit_}, {at(base) + unit_, unit_}}));
  VMEM_REFUSED(EINVAL, populate({{at(frames_), unit_}}));  // not a managed range
  VMEM_REFUSED(EINVAL, d_->punch(std::vector<Range>{{at(frames_), unit_}}));
  VMEM_REFUSED(EINVAL, d_->release(frames_));
  VMEM_REFUSED(EINVAL, d_->release(base + words_));
  EXPECT_EQ(used(), unit_);
  EXPECT_EQ(kernel_sum(base, words_), sum_of(6));
}

TEST_P(DeviceContract, CallsOutOfOrderAreRefusedAndChangeNothing) {
  uint64_t* base = reserve(2);
  bring(base, 0, 6);
  Ticket t;
  const Copy made{at(base), frame(0), unit_}, hole{at(base) + unit_, frame(0), unit_};
  VMEM_REFUSED(EINVAL, populate(range(base, 0, 1)));  // would destroy its bytes
  VMEM_REFUSED(EINVAL, populate(range(base, 0, 2)));
  VMEM_REFUSED(EINVAL, d_->copy_in(0, std::span(&hole, 1), &t));
  VMEM_REFUSED(EINVAL, d_->copy_out(0, std::span(&hole, 1), &t));
  VMEM_REFUSED(EINVAL, d_->open(range(base, 1, 1), Access::read));
  VMEM_REFUSED(EINVAL, d_->open(range(base, 0, 1), Access::none));
  VMEM_REFUSED(EINVAL, d_->write_protect(range(base, 1, 1), Access::read));
  VMEM_REFUSED(EINVAL, d_->write_protect(range(base, 0, 1), Access::read_write));
  VMEM_REFUSED(EINVAL, d_->punch(range(base, 1, 1)));
  VMEM_REFUSED(EINVAL, d_->rearm(range(base, 0, 1)));
  VMEM_REFUSED(EINVAL, d_->migrate(range(base, 1, 1).front(), 0));
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  if (!unified()) {
    VMEM_REFUSED(EINVAL, d_->map(range(base, 1, 1)));
    VMEM_REFUSED(EINVAL, d_->unmap(range(base, 1, 1)));
    EXPECT_EQ(kernel_sum(base, words_), sum_of(6));
    return;
  }
  VMEM_REFUSED(EINVAL, d_->copy_in(0, std::span(&made, 1), &t));   // the CPU may store to it
  VMEM_REFUSED(EINVAL, d_->copy_out(0, std::span(&made, 1), &t));  // likewise
  VMEM_REFUSED(EINVAL, d_->punch(range(base, 0, 1)));              // likewise
  EXPECT_EQ(base[1], 7u);
  EXPECT_EQ(kernel_sum(base, words_), sum_of(6));
}

TEST_P(DeviceContract, CopiesFromMemoryThatIsNotPinnedAreRefused) {
  uint64_t* base = reserve(1);
  VMEM_OK(populate(range(base, 0, 1)));
  std::vector<uint64_t> loose(words_);
  Ticket t;
  Copy copy{at(base), loose.data(), unit_};
  VMEM_REFUSED(EINVAL, d_->copy_in(0, std::span(&copy, 1), &t));
  copy = {at(base), frame(kFrames - 1) + 8, unit_};  // runs over the end
  VMEM_REFUSED(EINVAL, d_->copy_in(0, std::span(&copy, 1), &t));
  copy = {at(base) + 4096, frame(0), unit_};  // so does this, of the range
  VMEM_REFUSED(EINVAL, d_->copy_in(0, std::span(&copy, 1), &t));
  VMEM_REFUSED(EINVAL, d_->copy_in(0, {}, &t));
}

TEST_P(DeviceContract, PinningTwiceOrHalfPagesIsRefused) {
  VMEM_REFUSED(EEXIST, d_->pin(frames_, unit_));
  VMEM_REFUSED(EEXIST, d_->pin(frames_ + words_, unit_));
  VMEM_REFUSED(EINVAL, d_->pin(reinterpret_cast<std::byte*>(frames_) + 8, 4096));
  VMEM_REFUSED(EINVAL, d_->unpin(frames_ + words_));
  VMEM_OK(d_->unpin(frames_));
  VMEM_REFUSED(EINVAL, d_->unpin(frames_));
  VMEM_OK(d_->pin(frames_, kFrames * unit_));
}

TEST_P(DeviceContract, AdviceIsTakenForMadeAndUnmadeParts) {
  uint64_t* base = reserve(4);
  bring(base, 0, 1);
  for (Advice a : {Advice::preferred_location, Advice::read_mostly, Advice::accessed_by}) {
    VMEM_OK(d_->advise(range(base, 0, 4)[0], a, 0, true));
    VMEM_OK(d_->advise(range(base, 1, 2)[0], a, 0, false));
  }
  VMEM_OK(d_->advise(range(base, 0, 4)[0], Advice::accessed_by, kHost, true));
  bring(base, 3, 2);
  EXPECT_EQ(kernel_sum(base, words_), sum_of(1));
  EXPECT_EQ(kernel_sum(base + 3 * words_, words_), sum_of(2));
}

// --- a device is lost -----------------------------------------------------------------------------------------------

TEST_P(DeviceLoss, AHoleIsLoudAndThenEveryCallSaysSo) {
  uint64_t* base = reserve(4);
  bring(base, 0, 1);
  Ticket before;
  VMEM_OK(d_->record(stream_, 0, &before));
  VMEM_OK(bench_->synchronize(stream_));
  bench_->sum(stream_, base + words_, words_, sum_cell());  // a hole
  EXPECT_FALSE(bench_->synchronize(stream_).ok());
  Ticket t;
  // The first call that meets the error may be any one; it and all later calls report the error.
  const Copy copy{at(base), frame(0), unit_};
  VMEM_REFUSED(EIO, d_->copy_in(0, std::span(&copy, 1), &t));
  VMEM_REFUSED(EIO, d_->health(0));
  bool torn = true;
  VMEM_REFUSED(EIO, d_->populate(range(base, 2, 1), 0, &torn));
  EXPECT_FALSE(torn);
  VMEM_REFUSED(EIO, d_->check_stream(stream_, 0));
  VMEM_REFUSED(EIO, d_->order_after(before, stream_, 0));
  VMEM_REFUSED(EIO, d_->record(stream_, 0, &t));
  VMEM_REFUSED(EIO, d_->wait(before));
  VMEM_REFUSED(EIO, d_->drain(0));
  bool done = false;
  VMEM_REFUSED(EIO, d_->poll(before, &done));
  Memory m{};
  VMEM_REFUSED(EIO, d_->memory(0, &m));
  void* p = nullptr;
  VMEM_REFUSED(EIO, d_->reserve(unit_, 0, &p));
  // Calls that need no device still work, so that the region can be freed in order.
  VMEM_OK(d_->write_protect(range(base, 0, 1), Access::none));
  VMEM_OK(d_->unmap(range(base, 0, 1)));
  VMEM_OK(d_->punch(range(base, 0, 1)));
  VMEM_OK(d_->rearm(range(base, 0, 1)));
}

TEST_P(DeviceLoss, ABlockThatIsNotMappedIsLoud) {
  if (unified()) GTEST_SKIP() << "a made block is seen";
  uint64_t* base = reserve(1);
  bring(base, 0, 1);
  VMEM_OK(d_->unmap(range(base, 0, 1)));
  bench_->sum(stream_, base, words_, sum_cell());
  EXPECT_FALSE(bench_->synchronize(stream_).ok());
  VMEM_REFUSED(EIO, d_->map(range(base, 0, 1)));
  VMEM_OK(d_->unmap(range(base, 0, 1)));
  VMEM_OK(d_->punch(range(base, 0, 1)));
}

TEST_P(DeviceLoss, TheOtherSideOfAHoleIsLoudAlsoWithOrdinaryMemoryThere) {
  if (bench_->reaches_host_memory()) GTEST_SKIP() << "kernels reach ordinary memory here, rightly";
  uint64_t* base = reserve(2);
  ASSERT_EQ(mmap(base, unit_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), base);
  base[0] = 1;
  bench_->add(stream_, base, 8, 1);
  EXPECT_FALSE(bench_->synchronize(stream_).ok());
  VMEM_REFUSED(EIO, populate(range(base, 1, 1)));
}

TEST_P(DeviceLoss, AResetIsNoticedAndNothingHangs) {
  uint64_t* base = reserve(2);
  bring(base, 0, 1);
  Ticket t;
  VMEM_OK(d_->record(stream_, 0, &t));
  VMEM_OK(bench_->synchronize(stream_));
  bench_->destroy(stream_);
  stream_ = nullptr;
  bench_->reset(0);
  VMEM_REFUSED(EIO, d_->health(0));
  bool done = false, torn = false;
  VMEM_REFUSED(EIO, d_->poll(t, &done));
  VMEM_REFUSED(EIO, d_->wait(t));
  VMEM_REFUSED(EIO, d_->populate(range(base, 1, 1), 0, &torn));
}

}  // namespace vmem::device::testing
