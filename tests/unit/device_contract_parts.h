// Units of backends with their own page tables that several copies fill one after the other.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "device_contract_fixture.h"

namespace vmem::device::testing {

// A unit of several kUnit, so that it has parts.
class UnitInParts : public DeviceContract {
 protected:
  void SetUp() override {
    DeviceContract::SetUp();
    if (d_ == nullptr) return;
    unit_ = std::max(unit_, 4 * kUnit);
    words_ = unit_ / sizeof(uint64_t);
    base_ = reserve(2);
    bring(base_, 0, 1);
    drop(base_, 0);  // leaves old bytes
    VMEM_OK(populate(range(base_, 0, 1)));
    fill_frame(0, 500);
  }
  // Copies the bytes of unit 0 from frame 0.
  core::Status part(size_t from, size_t to, Ticket after = {}, Ticket* done = nullptr) {
    const Copy copy{at(base_) + from, reinterpret_cast<std::byte*>(frame(0)) + from, to - from, true, std::move(after)};
    Ticket mine;
    core::Status s = d_->copy_in(0, std::span(&copy, 1), &mine);
    if (s.ok() && done == nullptr) s = d_->wait(mine);
    if (done != nullptr) *done = std::move(mine);
    return s;
  }
  uint64_t* base_ = nullptr;
};

TEST_P(UnitInParts, HoldsThemAllWhenItIsMapped) {
  VMEM_OK(part(0, kUnit));
  VMEM_OK(part(kUnit, 3 * kUnit));
  VMEM_OK(part(3 * kUnit, unit_));
  VMEM_OK(d_->map(range(base_, 0, 1)));
  EXPECT_EQ(kernel_sum(base_, words_), sum_of(500));
}

TEST_P(UnitInParts, TheLastStandsForThoseBefore) {
  std::vector<Ticket> done(4);
  for (size_t i = 0; i < 4; ++i)
    VMEM_OK(part(i * kUnit, i < 3 ? (i + 1) * kUnit : unit_, i == 0 ? Ticket() : done[i - 1], &done[i]));
  VMEM_OK(d_->map(range(base_, 0, 1)));
  VMEM_OK(d_->wait(done[3]));
  bool reached = false;
  for (const Ticket& t : done) {
    VMEM_OK(d_->poll(t, &reached));
    EXPECT_TRUE(reached);
  }
  EXPECT_EQ(kernel_sum(base_, words_), sum_of(500));
}

TEST_P(UnitInParts, OneThatIsMappedAheadHoldsThemAll) {
  VMEM_OK(part(0, 2 * kUnit));
  VMEM_OK(d_->map_ahead(range(base_, 0, 1)));
  VMEM_OK(part(2 * kUnit, unit_));
  EXPECT_EQ(kernel_sum(base_, words_), sum_of(500));
}

TEST_P(UnitInParts, NobodySeesItBeforeTheLast) {
  VMEM_OK(part(0, 2 * kUnit));
  VMEM_REFUSED(EINVAL, d_->map(range(base_, 0, 1)));
  const Copy whole{at(base_), frame(0), unit_}, some{at(base_) + 3 * kUnit, frame(0), kUnit};
  Ticket done;
  for (const Copy& copy : {whole, some}) {
    VMEM_REFUSED(EINVAL, d_->copy_in(0, std::span(&copy, 1), &done));
    VMEM_REFUSED(EINVAL, d_->copy_out(0, std::span(&copy, 1), &done));
  }
  VMEM_OK(part(2 * kUnit, unit_));
  VMEM_OK(d_->map(range(base_, 0, 1)));
  EXPECT_EQ(kernel_sum(base_, words_), sum_of(500));
}

TEST_P(UnitInParts, TheyComeOneAfterTheOther) {
  VMEM_REFUSED(EINVAL, part(kUnit, 2 * kUnit));
  VMEM_REFUSED(EINVAL, part(0, kUnit + core::kPage));
  VMEM_OK(part(0, kUnit));
  VMEM_REFUSED(EINVAL, part(0, kUnit));
  VMEM_REFUSED(EINVAL, part(2 * kUnit, unit_));
  VMEM_REFUSED(EINVAL, part(kUnit, unit_ + kUnit));
  VMEM_OK(part(kUnit, unit_));
  VMEM_OK(d_->map(range(base_, 0, 1)));
  EXPECT_EQ(kernel_sum(base_, words_), sum_of(500));
}

TEST_P(UnitInParts, OneThatIsGivenUpHalfWayIsZerosWhenItIsMadeAgain) {
  VMEM_OK(part(0, 2 * kUnit));
  VMEM_OK(d_->punch(range(base_, 0, 1)));
  EXPECT_EQ(used(), 0u);
  make(base_, 0, 1);
  EXPECT_EQ(kernel_sum(base_, words_), 0u);
}

}  // namespace vmem::device::testing
