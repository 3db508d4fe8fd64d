// A load of a block on a device, under a READ lease there. It continues as soon as its piece is in
// place, and later failures leave no stale data behind. On simulated devices with page tables of
// their own.
#include <cerrno>
#include <cstring>
#include <vector>

#include "device_large_blocks.h"

namespace systest {
namespace {

using vmem::core::Status;
using vmem::device::SimOp;

class DevicePieces : public LargeBlocks {
 protected:
  void SetUp() override { start_large(1); }
  void lease(const vmem::region& r) { ASSERT_EQ(vmem_acquire(words(r), kLarge, VMEM_READ, 0, stream_), 0) << said(); }
  void end_lease(const vmem::region& r) {
    ASSERT_EQ(vmem_release(words(r), kLarge, stream_), 0) << said();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
  }
  // Makes `op` fail for all pieces except the one in the middle.
  static void fail_the_rest(const vmem::region& r, SimOp op) {
    static std::atomic<uintptr_t> middle;
    middle = reinterpret_cast<uintptr_t>(words(r) + kPlaces[1]);
    failures_ = 0;
    fails_ = true;
    sim().set_hook([op](SimOp is, int, uintptr_t at, size_t size) {
      if (is != op || !fails_ || (at <= middle && middle < at + size)) return Status();
      ++failures_;
      return vmem::core::error(ENOMEM, "as the test wants it");
    });
  }
};

TEST_F(DevicePieces, ALoadWaitsForItsPieceAndNotForTheBlock) {
  if (IsSkipped()) return;
  const vmem::region r(kLarge);
  put(r, 10);
  lease(r);
  load_the_middle(r, 11);
  aside([&] { expect(r, 10); });
  go_on();
  join();
  EXPECT_EQ(device_stats().used_bytes, kLarge) << "the device keeps the block";
  end_lease(r);
  put(r, 20);
  expect(r, 20);
}

TEST_F(DevicePieces, AStoreToThePieceIsKept) {
  if (IsSkipped()) return;
  const vmem::region r(kLarge);
  put(r, 10);
  lease(r);
  load_the_middle(r, 11);
  aside([&] { words(r)[kPlaces[1]] = 31; });
  go_on();
  join();
  EXPECT_EQ(load(words(r) + kPlaces[0]), 10u);
  EXPECT_EQ(load(words(r) + kPlaces[1]), 31u);
  end_lease(r);
  ASSERT_EQ(vmem_evict(words(r), kLarge, VMEM_SSD), 0) << said();
  EXPECT_EQ(load(words(r) + kPlaces[1]), 31u);
  EXPECT_EQ(load(words(r) + kPlaces[2]), 12u);
}

TEST_F(DevicePieces, WhereTheRestCannotBeCopiedThePieceIsTakenBack) {
  if (IsSkipped()) return;
  LogLines log;
  const vmem::region r(kLarge);
  put(r, 10);
  lease(r);
  fail_the_rest(r, SimOp::issue_out);
  load_the_middle(r, 11);
  go_on();
  ASSERT_TRUE(until([] { return failures_ > 0; }));
  end_lease(r);
  put(r, 20);
  EXPECT_EQ(load(words(r) + kPlaces[1]), 21u) << "it is there still, and old";
  fails_ = false;
  expect(r, 20);
  EXPECT_FALSE(log.contains("is there already"));
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

TEST_F(DevicePieces, ADeviceThatIsLostMeanwhileTakesNothingAlongThatIsWritten) {
  if (IsSkipped()) return;
  TempFile file(kLarge);
  const vmem::region r(kLarge, file.path(), 0, VMEM_MAP_SHARED);
  put(r, 10);
  ASSERT_EQ(vmem_sync(r.data(), r.size()), 0) << said();
  LogLines log;
  lease(r);
  fail_the_rest(r, SimOp::copy_out);  // which loses the device
  load_the_middle(r, 11);
  go_on();
  ASSERT_TRUE(until([] { return failures_ > 0; }));
  expect(r, 10);
  vmem_release(words(r), kLarge, stream_);
}

TEST_F(DevicePieces, ARegionMayBeFreedMeanwhile) {
  if (IsSkipped()) return;
  vmem::region r(kLarge);
  put(r, 10);
  lease(r);
  load_the_middle(r, 11);
  end_lease(r);
  aside([&] { r.free(); });
  go_on();
  join();
  const vmem::region other(kLarge);
  EXPECT_EQ(load(words(other) + kPlaces[1]), 0u);
}

}  // namespace
}  // namespace systest
