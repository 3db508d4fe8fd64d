#include <gtest/gtest.h>

#include "store/wait_spin.h"

namespace vmem::store::test {
namespace {

constexpr uint64_t kStart = uint64_t{1} << 40;

TEST(WaitSpin, ALookIsWorthItAfterAShortWait) {
  WaitSpin spin;
  EXPECT_FALSE(spin.worth_it(kStart)) << "the first wait is of unknown length";
  spin.waited(WaitSpin::kLongest - 1);
  EXPECT_TRUE(spin.worth_it(kStart));
  spin.waited(WaitSpin::kLongest);
  EXPECT_FALSE(spin.worth_it(kStart));
}

TEST(WaitSpin, ALookPausesWhereOthersWantTheCore) {
  WaitSpin spin;
  spin.waited(0);
  EXPECT_TRUE(spin.keeps_core(kStart, kStart + WaitSpin::kGap - 1));
  EXPECT_TRUE(spin.worth_it(kStart));
  EXPECT_FALSE(spin.keeps_core(kStart, kStart + WaitSpin::kGap));
  EXPECT_FALSE(spin.worth_it(kStart + WaitSpin::kGap + WaitSpin::kPause - 1));
  EXPECT_TRUE(spin.worth_it(kStart + WaitSpin::kGap + WaitSpin::kPause));
}

TEST(WaitSpin, ALookEndsInTime) {
  WaitSpin spin;
  EXPECT_TRUE(spin.look(core::now_ns(), [] { return true; }));
  EXPECT_FALSE(spin.look(core::now_ns(), [] { return false; }));
}

}  // namespace
}  // namespace vmem::store::test
