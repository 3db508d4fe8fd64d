// Simulated devices with page tables of their own, asked directly: what is refused half way.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "device/sim_device.h"

namespace {

using vmem::core::Status;
using vmem::device::kUnit;
using vmem::device::Memory;
using vmem::device::Range;
using vmem::device::SimDevices;
using vmem::device::SimOp;

class SimHandles : public ::testing::Test {
 protected:
  void SetUp() override {
    vmem::device::SimOptions options;
    options.handles = true;
    options.memory_bytes = 16 * kUnit;
    const Status s = vmem::device::make_sim_devices(options, &sim);
    ASSERT_TRUE(s.ok()) << s.text();
  }
  void refuse(SimOp refused) {
    sim->set_hook([=](SimOp op, int, uintptr_t, size_t) {
      return op == refused ? vmem::core::error(ENOMEM, "as the test wants it") : Status();
    });
  }
  Range reserve(size_t units = 1) {
    void* base = nullptr;
    const Status s = sim->reserve(units * kUnit, 0, &base);
    EXPECT_TRUE(s.ok()) << s.text();
    return {reinterpret_cast<uintptr_t>(base), units * kUnit};
  }
  void make(const Range& range) {
    bool torn = false;
    const Status s = sim->prepare({&range, 1}, 0, &torn);
    ASSERT_TRUE(s.ok()) << s.text();
  }
  Status release(const Range& range) { return sim->release(reinterpret_cast<void*>(range.address)); }
  std::unique_ptr<SimDevices> sim;
};

TEST_F(SimHandles, APieceThatStaysMappedIsNobodysAgain) {
  const Range first = reserve();
  make(first);
  ASSERT_TRUE(sim->map({&first, 1}).ok());
  refuse(SimOp::hold);
  EXPECT_TRUE(release(first).ok());
  sim->set_hook(nullptr);
  Memory memory = {};
  ASSERT_TRUE(sim->memory(0, &memory).ok());
  EXPECT_EQ(memory.used, 0u);
  EXPECT_EQ(memory.kept, 0u) << "the next unit would have it at two addresses";
  const Range second = reserve();
  make(second);
  EXPECT_EQ(sim->taken(0), 2 * kUnit);
  ASSERT_TRUE(release(second).ok());
  EXPECT_TRUE(sim->trim(0, 0).ok());
  EXPECT_EQ(sim->taken(0), kUnit) << "nor does it go back";
}

// Moved blocks lie in memory that lives as long as anything of it is mapped.
TEST_F(SimHandles, NothingStaysMappedWhenTheDevicesEnd) {
  const auto mapped = [] {
    std::ifstream maps("/proc/self/maps");
    const std::string all{std::istreambuf_iterator<char>(maps), {}};
    return all.find("vmem-sim-device") != std::string::npos;
  };
  ASSERT_TRUE(mapped());
  sim.reset();
  EXPECT_FALSE(mapped());
}

TEST_F(SimHandles, ManyUnitsThatStayMappedAreTriedNoLongerThanOne) {
  std::atomic<int> tried = 0;
  for (const size_t units : {size_t{1}, size_t{8}}) {
    const Range range = reserve(units);
    make(range);
    ASSERT_TRUE(sim->map({&range, 1}).ok());
    sim->set_hook([&tried](SimOp op, int, uintptr_t, size_t) {
      if (op != SimOp::hold) return Status();
      ++tried;
      return vmem::core::error(ENOMEM, "as the test wants it");
    });
    tried = 0;
    EXPECT_TRUE(release(range).ok());
    sim->set_hook(nullptr);
    EXPECT_LE(tried, 100 + static_cast<int>(units)) << units;
    EXPECT_GE(tried, 100) << "it may be refused for a moment only";
  }
  EXPECT_EQ(sim->taken(0), 9 * kUnit);
}

}  // namespace
