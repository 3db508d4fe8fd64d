// Host copies of blocks on a device: each belongs to one block, is known to the policy while it
// exists, and frees its frame when it goes.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "device/sim/sim_device.h"
#include "edit_block.h"
#include "memory/host_budget.h"
#include "pager/block/host_copies.h"

namespace vmem::pager::test {
namespace {

using policy::Admission;
using policy::Priority;
using policy::Temperature;
using policy::Victim;

// Records what it was told, and chooses no victims.
class FakePolicy final : public policy::EvictionPolicy {
 public:
  const char* name() const override { return "fake"; }
  void resize(size_t, uint64_t) override {}
  void admit(const Admission& what) override { EXPECT_TRUE(known.emplace(what.id, what).second) << what.id; }
  void touched(FrameId) override {}
  void remove(FrameId id) override { EXPECT_EQ(known.erase(id), 1u) << id; }
  void advise(FrameId id, Temperature temperature, Priority, bool) override { known[id].temperature = temperature; }
  size_t victims(uint64_t, std::span<Victim>) override { return 0; }
  void hold(FrameId id) override { holds[id] += known.count(id) != 0 ? 1 : 1000; }
  void unhold(FrameId id) override { --holds[id]; }
  uint64_t probed() const override { return 0; }

  std::map<FrameId, Admission> known;
  std::map<FrameId, int> holds;
};

class PagerHostCopies : public ::testing::Test {
 protected:
  static constexpr size_t kFrames = 4;

  void SetUp() override {
    ASSERT_TRUE(device::make_sim_devices({}, &devices).ok());
    copies = std::make_unique<HostCopies>(frame_table, pools, policies, age);
    ASSERT_TRUE(staging->reserve(kFrames, 0));
    const size_t size = kFrames * core::kHugePage;
    void* at = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(at, MAP_FAILED);
    staging->add_slab(*devices, {static_cast<std::byte*>(at), size, nullptr});
    region.id = 7;
    region.block_size = core::kHugePage;
    ASSERT_TRUE(region.table.create(16).ok());
    frame_table.grow();
  }
  // Puts the block on a device.
  FrameId on_device(BlockIndex b) {
    const FrameId id = frame_table.take(region, b, nullptr, kDevicePools);
    edit(region.table, b).aux = id;
    change(region.table, b, State::unpopulated, State::promoting);
    change(region.table, b, State::promoting, State::on_device);
    return id;
  }
  // Puts the block on a device, with the same bytes in its staging frame.
  FrameId with_copy(BlockIndex b) {
    const FrameId id = on_device(b);
    copies->keep(region, b, staging->get(0));
    return id;
  }

  std::unique_ptr<device::SimDevices> devices;
  memory::HostBudget budget{uint64_t{64} << 20};
  memory::StagingPoolSet pools{budget, 50};
  memory::Staging* staging = &pools.of(core::kHugePage).frames;
  Region region{16, 4};
  FrameTable frame_table;
  std::vector<std::unique_ptr<policy::EvictionPolicy>> policies = [] {
    std::vector<std::unique_ptr<policy::EvictionPolicy>> all(kDevicePools);
    all[kStagingPools] = std::make_unique<FakePolicy>();
    return all;
  }();
  FakePolicy& policy = static_cast<FakePolicy&>(*policies[kStagingPools]);
  NonresidentAge age;
  std::unique_ptr<HostCopies> copies;
};

TEST_F(PagerHostCopies, ACopyIsTheBlocksAndThePolicyKnowsIt) {
  age.left(uint64_t{1} << 30);
  const FrameId id = on_device(3);
  frame_table[id].shadow = age.shadow();
  age.left(uint64_t{8} << 20);
  std::byte* const frame = staging->get(0);
  EXPECT_FALSE(copies->has(id));
  copies->keep(region, 3, frame);
  EXPECT_TRUE(copies->has(id));
  EXPECT_EQ(copies->count(), 1u);
  const FrameId copy = frame_table[id].dev.copy;
  EXPECT_EQ(frame_table[copy].bytes, frame);
  EXPECT_EQ(frame_table[copy].pool, kStagingPools);
  EXPECT_EQ(region.table[3].aux, id) << "the block is on its device still";
  ASSERT_EQ(policy.known.count(copy), 1u);
  EXPECT_EQ(policy.known[copy].weight, core::kHugePage / 4096);
  EXPECT_FALSE(policy.known[copy].probes);
  EXPECT_EQ(policy.known[copy].age, (uint64_t{8} << 20) / 4096) << "since it left its device last";
  EXPECT_EQ(copies->check(), "");
}

TEST_F(PagerHostCopies, ABlockThatNeverLeftADeviceHasNoAge) {
  const FrameId id = with_copy(3);
  EXPECT_FALSE(policy.known[frame_table[id].dev.copy].age.has_value());
}

TEST_F(PagerHostCopies, WhatChangesHasNoCopyAnyMore) {
  const FrameId id = with_copy(3);
  EXPECT_EQ(staging->free(), kFrames - 1);
  copies->drop(id);
  EXPECT_FALSE(copies->has(id));
  EXPECT_EQ(staging->free(), kFrames);
  EXPECT_TRUE(policy.known.empty());
  EXPECT_EQ(frame_table.used(), 1u);
  copies->drop(id);
  EXPECT_EQ(staging->free(), kFrames) << "there was none to be dropped";
  EXPECT_EQ(copies->count(), 0u);
  EXPECT_EQ(copies->check(), "");
}

TEST_F(PagerHostCopies, AnEvictedCopyLeavesItsBlockWhereItIs) {
  const FrameId a = with_copy(1), b = with_copy(2);
  const FrameId victim = frame_table[a].dev.copy;
  policy.known.erase(victim);  // as victims() does
  copies->evict(victim);
  EXPECT_FALSE(copies->has(a));
  EXPECT_TRUE(copies->has(b));
  EXPECT_EQ(region.table[1].aux, a);
  EXPECT_EQ(staging->free(), kFrames - 1);
  EXPECT_EQ(copies->check(), "");
}

TEST_F(PagerHostCopies, ACopyThatIsAllThereIsStays) {
  const FrameId a = with_copy(1);
  const FrameId victim = frame_table[a].dev.copy;
  policy.known.erase(victim);
  copies->refuse(victim);
  EXPECT_TRUE(copies->has(a));
  EXPECT_EQ(policy.known.count(victim), 1u) << "it is chosen again another time";
  EXPECT_EQ(staging->free(), kFrames - 1);
  EXPECT_EQ(copies->check(), "");
}

TEST_F(PagerHostCopies, AMoveThatReadsACopyHoldsIt) {
  const FrameId id = with_copy(3);
  const FrameId copy = frame_table[id].dev.copy;
  EXPECT_EQ(copies->hold(id), frame_table[copy].bytes);
  EXPECT_EQ(policy.holds[copy], 1);
  copies->unhold(id);
  EXPECT_EQ(policy.holds[copy], 0);
  EXPECT_TRUE(copies->has(id));
  EXPECT_EQ(copies->check(), "");
}

TEST_F(PagerHostCopies, ACopyBecomesTheBlockWhenThatLeavesItsDevice) {
  const FrameId id = with_copy(3);
  std::byte* const frame = copies->hold(id);
  const FrameId now = copies->become(id);
  EXPECT_FALSE(copies->has(id));
  EXPECT_FALSE(frame_table[now].is_copy);
  EXPECT_EQ(frame_table[now].bytes, frame);
  EXPECT_EQ(frame_table[now].block, 3u);
  EXPECT_EQ(policy.holds[now], 0);
  EXPECT_EQ(policy.known.count(now), 1u) << "as any block in a staging frame";
  EXPECT_EQ(copies->count(), 0u);
  EXPECT_EQ(staging->free(), kFrames - 1);
  copies->drop(id);
  EXPECT_EQ(staging->free(), kFrames - 1) << "it is no copy of what was on the device";
  frame_table.give(id);
  edit(region.table, 3).aux = now;
  change(region.table, 3, State::on_device, State::demoting);
  change(region.table, 3, State::demoting, State::staged);
  EXPECT_EQ(copies->check(), "");
}

TEST_F(PagerHostCopies, TheCheckSeesACopyThatIsNotTheBlocks) {
  const FrameId id = with_copy(3);
  const FrameId copy = frame_table[id].dev.copy;
  const char* const wrong = "a host copy is not the block's: region 7, block 3";
  frame_table[id].dev.changed = true;
  EXPECT_EQ(copies->check(), wrong);
  frame_table[id].dev.changed = false;
  frame_table[copy].block = 4;
  EXPECT_EQ(copies->check(), wrong);
  frame_table[copy].block = 3;
  std::byte elsewhere{};
  std::byte* const frame = std::exchange(frame_table[copy].bytes, &elsewhere);
  EXPECT_EQ(copies->check(), wrong);
  frame_table[copy].bytes = frame;
  change(region.table, 3, State::on_device, State::demoting);
  change(region.table, 3, State::demoting, State::stored);
  EXPECT_EQ(copies->check(), wrong);
  change(region.table, 3, State::stored, State::promoting);
  change(region.table, 3, State::promoting, State::on_device);
  EXPECT_EQ(copies->check(), "");
  frame_table[id].dev.copy = core::kNoFrame;
  EXPECT_EQ(copies->check(), "1 host copies are known, blocks have 0, and there are 1");
  frame_table[id].dev.copy = copy;
}

TEST_F(PagerHostCopies, TheCopyOfWhatIsReadMostIsAmongTheLastToGo) {
  ASSERT_TRUE(region.advice.places.set_read_mostly(1, 1, true));
  const FrameId a = with_copy(0), b = with_copy(1);
  const auto temperature = [&](FrameId id) { return policy.known[frame_table[id].dev.copy].temperature; };
  EXPECT_EQ(temperature(a), Temperature::normal);
  EXPECT_EQ(temperature(b), Temperature::hot);
  ASSERT_TRUE(region.advice.places.set_read_mostly(0, 0, true));
  ASSERT_TRUE(region.advice.places.set_read_mostly(1, 1, false));
  copies->follow_advice(a);
  copies->follow_advice(b);
  EXPECT_EQ(temperature(a), Temperature::hot);
  EXPECT_EQ(temperature(b), Temperature::normal);
  copies->drop(a);
  copies->follow_advice(a);
  EXPECT_EQ(policy.known.size(), 1u) << "what has none has nothing to hear";
  copies->drop(b);
}

}  // namespace
}  // namespace vmem::pager::test
