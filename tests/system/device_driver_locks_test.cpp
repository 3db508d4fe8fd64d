// A load of a block that the driver must bring back, by a thread that holds the driver's locks, as
// cudaMemcpy does when its source begins in host memory. Only this thread waits while the locks are
// held (cudaMemcpy holds them until it has loaded). On simulated devices with page tables of their
// own.
#include "sim_support.h"

namespace {

using systest::kBlock;
using vmem::core::Status;
using vmem::device::SimOp;

class DriverLocks : public systest::SimTest {
 protected:
  void SetUp() override { start(1, {{"device_block_size", "2MiB"}, {"fault_timeout_ms", "1000"}}, true); }
};

TEST_F(DriverLocks, ALoadUnderThemWaitsUntilTheyAreFree) {
  if (IsSkipped()) return;
  const vmem::region r(kBlock), other(kBlock);
  auto* const at = static_cast<uint64_t*>(r.data());
  store_on_device(at, 7);
  static std::atomic<bool> kept{true}, asked{false}, loaded{false};
  kept = true, asked = loaded = false;
  // Each driver call that a block needs in order to leave.
  sim().set_hook([](SimOp op, int, uintptr_t, size_t) {
    if (op != SimOp::issue_out && op != SimOp::hold) return Status();
    asked = true;
    while (kept) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return Status();
  });
  uint64_t value = 0;
  bool refused = false;
  aside([&] {
    refused = systest::raises_sigbus([&] { value = *static_cast<const volatile uint64_t*>(at); });
    loaded = true;
  });
  EXPECT_TRUE(until([] { return asked.load(); })) << "the block needs the driver";
  *static_cast<volatile uint64_t*>(other.data()) = 8;
  other.evict();
  EXPECT_EQ(*static_cast<const volatile uint64_t*>(other.data()), 8u) << "others go on";
  EXPECT_FALSE(loaded);
  kept = false;
  join();
  EXPECT_FALSE(refused);
  EXPECT_EQ(value, 7u);
}

}  // namespace
