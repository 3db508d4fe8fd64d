// Direct calls of simulated devices with their own page tables: refusals half way.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/patience.h"
#include "device/sim/sim_device.h"

namespace vmem::device {
namespace {

using core::Status;

class SimHandles : public ::testing::Test {
 protected:
  void SetUp() override {
    SimOptions options;
    options.handles = true;
    options.devices = 2;
    options.memory_bytes = 16 * kUnit;
    const Status s = make_sim_devices(options, &sim);
    ASSERT_TRUE(s.ok()) << s.text();
  }
  void refuse(SimOp refused) {
    sim->set_hook([=](SimOp op, int, uintptr_t, size_t) {
      return op == refused ? core::error(ENOMEM, "as the test wants it") : Status();
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
    const Status s = sim->populate({&range, 1}, 0, &torn);
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

// Moved blocks lie in memory that lives as long as any part of it is mapped.
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
      return core::error(ENOMEM, "as the test wants it");
    });
    tried = 0;
    EXPECT_TRUE(release(range).ok());
    sim->set_hook(nullptr);
    EXPECT_LE(tried, 100 + static_cast<int>(units)) << units;
    EXPECT_GE(tried, 100) << "it may be refused for a moment only";
  }
  EXPECT_EQ(sim->taken(0), 9 * kUnit);
}

// Each unit stays alone, whichever step is refused: the others move, and all can move later.
TEST_F(SimHandles, WhatIsNotUnmappedSentOrMappedWhereItGoesStaysAlone) {
  const Range all = reserve(4);
  make(all);
  ASSERT_TRUE(sim->map({&all, 1}).ok());
  std::array<Range, 4> ranges;
  for (size_t i = 0; i < ranges.size(); ++i) ranges[i] = {all.address + i * kUnit, kUnit};
  std::array<Status, 4> each;
  const auto units = [&](int device) {
    Memory memory = {};
    EXPECT_TRUE(sim->memory(device, &memory).ok());
    return memory.used / kUnit;
  };
  const auto mapped = [&] {
    size_t bytes = 0;
    sim->set_hook([&](SimOp op, int, uintptr_t, size_t size) {
      bytes += op == SimOp::hold ? size : 0;
      return Status();
    });
    EXPECT_TRUE(sim->unmap({&all, 1}).ok());
    EXPECT_TRUE(sim->map({&all, 1}).ok());
    sim->set_hook(nullptr);
    return bytes;
  };
  int from = 0;
  for (const SimOp step : {SimOp::hold, SimOp::migrate, SimOp::map}) {
    for (size_t stays = 0; stays < ranges.size(); ++stays, from = 1 - from) {
      bool refused = false;
      sim->set_hook([&](SimOp op, int, uintptr_t at, size_t) {
        if (op != step || at != ranges[stays].address || std::exchange(refused, true)) return Status();
        return core::error(ENOMEM, "as the test wants it");
      });
      each = {};
      EXPECT_FALSE(sim->migrate(ranges, 1 - from, from, each).ok());
      EXPECT_TRUE(refused);
      for (size_t i = 0; i < each.size(); ++i) EXPECT_EQ(each[i].code(), i == stays ? -ENOMEM : 0) << i;
      EXPECT_EQ(units(from), 1u);
      EXPECT_EQ(units(1 - from), 3u);
      EXPECT_EQ(mapped(), 4 * kUnit);
      sim->set_hook(nullptr);
      each = {};
      EXPECT_TRUE(sim->migrate(ranges, 1 - from, from, each).ok());
      EXPECT_EQ(units(from), 0u);
      EXPECT_EQ(units(1 - from), 4u);
      EXPECT_EQ(mapped(), 4 * kUnit);
    }
  }
  EXPECT_TRUE(release(all).ok());
  EXPECT_EQ(units(from), 0u);
  for (const int device : {0, 1}) EXPECT_LE(sim->taken(device), 4 * kUnit) << "what did not come has its piece still";
}

// More units than may be under way at once.
TEST_F(SimHandles, UnitsOfOneCallAllMoveHoweverManyTheyAre) {
  constexpr size_t kUnits = 20;
  SimOptions options;
  options.handles = true;
  options.devices = 2;
  options.memory_bytes = kUnits * kUnit;
  sim.reset();
  const Status made = make_sim_devices(options, &sim);
  ASSERT_TRUE(made.ok()) << made.text();
  const Range all = reserve(kUnits);
  make(all);
  ASSERT_TRUE(sim->map({&all, 1}).ok());
  void* const stream = sim->create_stream(0);
  void* const other = sim->create_stream(1);
  const auto word = [&](size_t i) { return reinterpret_cast<uint64_t*>(all.address + i * kUnit); };
  const auto each = [&](void* on, const std::function<void(size_t, uint64_t*)>& does) {
    const Status launched = sim->launch(on, [&](SimKernel& k) {
      for (size_t i = 0; i < kUnits; ++i) does(i, reinterpret_cast<uint64_t*>(k.at(word(i), kUnit, true)));
    });
    EXPECT_TRUE(launched.ok());
    EXPECT_TRUE(sim->synchronize(on).ok());
  };
  each(stream, [](size_t i, uint64_t* at) { *at = 100 + i; });
  Status status;
  EXPECT_TRUE(sim->migrate({&all, 1}, 1, 1, {&status, 1}).ok());
  each(other, [](size_t i, const uint64_t* at) { EXPECT_TRUE(at != nullptr && *at == 100 + i) << i; });
  Memory memory = {};
  ASSERT_TRUE(sim->memory(0, &memory).ok());
  EXPECT_EQ(memory.used, 0u);
  EXPECT_EQ(memory.kept, kUnits * kUnit);
  ASSERT_TRUE(sim->memory(1, &memory).ok());
  EXPECT_EQ(memory.used, kUnits * kUnit);
  EXPECT_EQ(sim->taken(1), kUnits * kUnit);
  EXPECT_TRUE(sim->migrate({&all, 1}, 0, 0, {&status, 1}).ok()) << "each has a piece of its own again";
  each(stream, [](size_t i, const uint64_t* at) { EXPECT_TRUE(at != nullptr && *at == 100 + i) << i; });
  EXPECT_EQ(sim->violations(), std::vector<std::string>());
  for (void* s : {stream, other}) sim->destroy_stream(s);
  EXPECT_TRUE(release(all).ok());
}

// map() maps all ranges or none.
TEST_F(SimHandles, WhatIsMappedWithWhatIsRefusedIsNotMapped) {
  const Range all = reserve(3);
  const std::array<Range, 2> ranges{Range{all.address, kUnit}, Range{all.address + 2 * kUnit, kUnit}};
  for (const Range& range : ranges) make(range);
  for (const bool ahead : {false, true}) {
    size_t hidden = 0;
    sim->set_hook([&](SimOp op, int, uintptr_t at, size_t) {
      hidden += op == SimOp::hold ? 1 : 0;
      return op == SimOp::map && at == ranges[1].address ? core::error(ENOMEM, "as the test wants it") : Status();
    });
    EXPECT_EQ((ahead ? sim->map_ahead(ranges) : sim->map(ranges)).code(), -ENOMEM);
    EXPECT_EQ(hidden, 1u);
    EXPECT_TRUE(sim->unmap(ranges).ok());
    EXPECT_EQ(hidden, 1u) << "it was not mapped";
    sim->set_hook(nullptr);
  }
  EXPECT_TRUE(sim->map(ranges).ok());
  EXPECT_TRUE(release(all).ok());
}

// Each unit is in its reported state, also if one of several stays and others cannot be restored.
TEST_F(SimHandles, UnitsThatWereHiddenWithOneThatStaysAreShownAgainOrMarked) {
  const Range all = reserve(4), lost{all.address, 2 * kUnit}, well{all.address + 2 * kUnit, 2 * kUnit};
  bool torn = false;
  ASSERT_TRUE(sim->populate({&lost, 1}, 0, &torn).ok());
  ASSERT_TRUE(sim->populate({&well, 1}, 1, &torn).ok());
  ASSERT_TRUE(sim->map({&all, 1}).ok());
  uintptr_t stays = well.address;
  size_t hidden = 0;  // bytes, by calls for all that is mapped
  const auto hook = [&](SimOp op, int, uintptr_t at, size_t size) {
    if (op == SimOp::hold) hidden += size;
    return op == SimOp::hold_units && at == stays ? core::error(ENOMEM, "as the test wants it") : Status();
  };
  sim->set_hook(hook);
  EXPECT_EQ(sim->unmap({&all, 1}).code(), -ENOMEM);
  EXPECT_EQ(sim->unmap({&all, 1}).code(), -ENOMEM);
  EXPECT_EQ(hidden, 8 * kUnit) << "all of them were there again";
  sim->lose(0, "as the test wants it");
  stays += kUnit;
  EXPECT_EQ(sim->unmap({&all, 1}).code(), -ENOMEM);
  hidden = 0;
  stays = 0;
  EXPECT_TRUE(sim->unmap({&all, 1}).ok());
  EXPECT_EQ(hidden, 2 * kUnit) << "those of the device that is lost are not";
  sim->set_hook(nullptr);
  EXPECT_TRUE(release(all).ok());
}

// Names units of device 0, one by one, to go to device 1.
class SimNamed final : public Migration {
 public:
  SimNamed(const Range& all, std::function<void(size_t)> before) : all_(all), before_(std::move(before)) {}
  std::optional<Range> next() override {
    before_(named_);
    if (named_ * kUnit == all_.size) return std::nullopt;
    return Range{all_.address + named_++ * kUnit, kUnit};
  }
  void ended(Range range, Status status) override {
    EXPECT_EQ(range.address, all_.address + ended_ * kUnit);
    EXPECT_TRUE(status.ok()) << status.text();
    ++ended_;
  }
  size_t have_ended() const { return ended_; }

 private:
  const Range all_;
  const std::function<void(size_t)> before_;
  std::atomic<size_t> named_ = 0, ended_ = 0;
};

// Later units begin while the first are under way, so that the devices always have copies to make.
TEST_F(SimHandles, UnitsThatAreNamedAsTheyGoBeginWhileThoseBeforeThemAreUnderWay) {
  constexpr size_t kUnits = 12;
  const Range all = reserve(kUnits);
  make(all);
  ASSERT_TRUE(sim->map({&all, 1}).ok());
  std::atomic<size_t> begun{0};
  std::atomic<bool> first{true}, all_begun{false};
  sim->set_hook([&](SimOp op, int, uintptr_t, size_t) {
    if (op == SimOp::hold) ++begun;
    if (op == SimOp::send && first.exchange(false)) all_begun = vmem::test::eventually([&] { return begun == kUnits; });
    return Status();
  });
  SimNamed named(all, [](size_t) {});
  sim->migrate_all(named, 1, 1);
  EXPECT_TRUE(all_begun) << begun;
  EXPECT_EQ(named.have_ended(), kUnits);
  sim->set_hook(nullptr);
  EXPECT_TRUE(release(all).ok());
}

// The end of a unit is reported while others are still to be named.
TEST_F(SimHandles, UnitsThatAreNamedAsTheyGoEndAsTheyArrive) {
  constexpr size_t kUnits = 12;
  const Range all = reserve(kUnits);
  make(all);
  ASSERT_TRUE(sim->map({&all, 1}).ok());
  SimNamed* self = nullptr;
  SimNamed named(all, [&](size_t n) {
    EXPECT_GE(self->have_ended() + 1, n) << "what had arrived before one was named has ended when the next one is";
    for (int d = 0; d < 2; ++d) EXPECT_TRUE(sim->drain(d).ok());
  });
  self = &named;
  sim->migrate_all(named, 1, 1);
  EXPECT_EQ(named.have_ended(), kUnits);
  EXPECT_TRUE(release(all).ok());
}

// A unit on its way from device 0 to device 1, whose copy ends when the test says so.
class SimPassage : public SimHandles {
 protected:
  static constexpr uint64_t kThere = 0x7e57;
  void SetUp() override {
    SimHandles::SetUp();
    unit_ = reserve();
    make(unit_);
    ASSERT_TRUE(sim->map({&unit_, 1}).ok());
    for (int d = 0; d < 2; ++d) streams_.push_back(sim->create_stream(d));
    store(0, kThere);
  }
  void TearDown() override {
    sim->set_hook(nullptr);
    for (void* s : streams_) sim->destroy_stream(s);
    EXPECT_TRUE(release(unit_).ok());
    EXPECT_EQ(sim->violations(), std::vector<std::string>());
  }
  uint64_t* word() const { return reinterpret_cast<uint64_t*>(unit_.address); }
  void store(int device, uint64_t value) {
    const Status s = sim->launch(streams_[static_cast<size_t>(device)], [this, value](SimKernel& k) {
      if (auto* w = reinterpret_cast<uint64_t*>(k.at(word(), kUnit, true)); w != nullptr) *w = value;
    });
    EXPECT_TRUE(s.ok()) << s.text();
    EXPECT_TRUE(sim->synchronize(streams_[static_cast<size_t>(device)]).ok()) << "a kernel has lost the device";
  }
  // Returns what a kernel on the device loads from the unit.
  uint64_t found(int device) {
    std::atomic<uint64_t> value{0};
    const Status s = sim->launch(streams_[static_cast<size_t>(device)], [this, &value](SimKernel& k) {
      if (const auto* w = reinterpret_cast<const uint64_t*>(k.at(word(), kUnit, false)); w != nullptr) value = *w;
    });
    EXPECT_TRUE(s.ok()) << s.text();
    sim->synchronize(streams_[static_cast<size_t>(device)]).ignore();
    return value;
  }
  Status go(int by) {
    Status each;
    return sim->migrate({&unit_, 1}, 1, by, {&each, 1});
  }
  size_t units(int device) {
    Memory memory = {};
    EXPECT_TRUE(sim->memory(device, &memory).ok());
    return memory.used / kUnit;
  }
  static Status refusal() { return core::error(EIO, "as the test wants it"); }

  Range unit_ = {};
  std::vector<void*> streams_;
};

// A unit becomes visible on its new device together with its bytes, and disappears from its old
// one.
TEST_F(SimPassage, TheDeviceThatItWasOnSeesItNoMore) {
  ASSERT_TRUE(go(1).ok());
  EXPECT_EQ(found(1), kThere);
  refuse(SimOp::migrate);
  EXPECT_TRUE(go(1).ok()) << "it is there already";
  sim->set_hook(nullptr);
  EXPECT_EQ(found(0), 0u);
  EXPECT_FALSE(sim->health(0).ok()) << "a kernel that reaches for it there meets an illegal address";
}

TEST_F(SimPassage, WhereItsCopyFailsAtItsEndItIsWhereItWas) {
  sim->set_hook([](SimOp op, int, uintptr_t, size_t) { return op == SimOp::send ? refusal() : Status(); });
  EXPECT_EQ(go(1).code(), -EIO);
  sim->set_hook(nullptr);
  EXPECT_FALSE(sim->health(1).ok());
  EXPECT_EQ(units(0), 1u);
  EXPECT_EQ(found(0), kThere);
  store(0, 7);
  EXPECT_EQ(found(0), 7u);
}

// The next unit reuses the place: a kernel that found the unit there would read the wrong bytes.
// The parameter: the device is lost before the unmap succeeds.
class SimStaysMapped : public SimPassage, public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Until, SimStaysMapped, ::testing::Bool(),
                         [](const auto& i) { return std::string(i.param ? "that_device_is_lost" : "it_is_unmapped"); });
TEST_P(SimStaysMapped, WhatDoesNotComeIsUnmappedThereHoweverOftenThatIsRefused) {
  constexpr int kRefused = 3;
  std::atomic<bool> sent{false};
  std::atomic<int> tries{0};
  sim->set_hook([&](SimOp op, int, uintptr_t, size_t) {
    if (op == SimOp::send) sent = true;
    if (op == SimOp::send) return refusal();
    if (op != SimOp::hold || !sent || ++tries > kRefused) return Status();
    if (GetParam() && tries == kRefused) sim->lose(1, "as the test wants it");
    return refusal();
  });
  EXPECT_EQ(go(0).code(), -EIO);
  EXPECT_EQ(tries, kRefused + 1) << "a device that is lost does not refuse it";
}

// The device that the unit leaves makes the copy.
class SimTargetIsLost : public SimPassage, public ::testing::WithParamInterface<SimOp> {};
INSTANTIATE_TEST_SUITE_P(At, SimTargetIsLost, ::testing::Values(SimOp::migrate, SimOp::send, SimOp::map, SimOp::wait),
                         [](const auto& i) { return "step_" + std::to_string(static_cast<int>(i.param)); });
TEST_P(SimTargetIsLost, ItIsWhereItWas) {
  sim->set_hook([this](SimOp op, int, uintptr_t, size_t) {
    if (op == GetParam()) sim->lose(1, "as the test wants it");
    return Status();
  });
  EXPECT_EQ(go(0).code(), -EIO);
  sim->set_hook(nullptr);
  EXPECT_EQ(units(0), 1u);
  EXPECT_EQ(found(0), kThere);
}

// A refused wait says nothing about the copy, nor does the loss of the source device.
TEST_F(SimPassage, ItsPieceIsNobodysBeforeItsCopyHasEnded) {
  constexpr int kRefused = 3;
  std::atomic<int> waits{0};
  std::atomic<bool> over{false}, ended{false};
  sim->set_hook([&](SimOp op, int, uintptr_t, size_t) {
    if (op == SimOp::send) {
      EXPECT_TRUE(vmem::test::eventually([&] { return waits >= kRefused || over.load(); }));
      ended = true;
    }
    if (op != SimOp::wait || ++waits >= kRefused) return Status();
    sim->lose(0, "as the test wants it");
    return refusal();
  });
  EXPECT_TRUE(go(1).ok());
  EXPECT_TRUE(ended) << "the next unit could have its piece";
  over = true;
  EXPECT_TRUE(vmem::test::eventually([&] { return ended.load(); }));
  sim->set_hook(nullptr);
  EXPECT_EQ(found(1), kThere) << "it has left the device that is lost";
}

}  // namespace
}  // namespace vmem::device
