// The table of blocks: exactly the legal transitions, and counts that always agree with the entries.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

#include "edit_block.h"
#include "pager/block/block_table.h"

namespace vmem::core {
namespace {

constexpr size_t kStates = static_cast<size_t>(State::count_);

State state(size_t i) {
  return static_cast<State>(i);
}

// Written a second time, independently of the library's table, so that a slip there shows.
const std::map<State, std::set<State>>& expected() {
  using enum State;
  static const std::map<State, std::set<State>> kAll = {
      // a fault or acquire reads it, a device takes it, or the wait for memory ended
      {unpopulated, {reading, promoting, poisoned}},
      // the same, or the program drops its contents
      {stored, {reading, promoting, poisoned, unpopulated}},
      // read: demanded, not demanded yet, unreadable; cancelled
      {reading, {mapping, staged, poisoned, stored, unpopulated}},
      {staged, {mapping, isolating, promoting}},
      // in place; refused and staged; refused half way, so lost
      {mapping, {resident, staged, poisoned}},
      {resident, {isolating}},
      // a probe, demanded again, could not be taken, dirty, clean, clean zeros, to a device; torn,
      // so lost
      {isolating, {staged, mapping, resident, writing_back, stored, unpopulated, promoting, poisoned}},
      {writing_back, {staged, mapping, resident, stored, unpopulated}},
      {poisoned, {unpopulated, stored, reading}},
      {promoting, {on_device, stored, unpopulated, staged, poisoned}},
      {on_device, {demoting}},
      // turns back; to host memory; evicted, clean or zeros; the CPU keeps its copy; lost
      {demoting, {on_device, staged, stored, unpopulated, resident, poisoned}},
  };
  return kAll;
}

// Returns a sequence of legal steps from unpopulated to each state.
std::vector<State> way_to(State target) {
  std::map<State, std::vector<State>> ways{{State::unpopulated, {}}};
  for (size_t round = 0; round < kStates; ++round) {
    const auto known = ways;
    for (const auto& [from, way] : known) {
      for (size_t to = 0; to < kStates; ++to) {
        if (!legal(from, state(to)) || ways.count(state(to)) != 0) continue;
        ways[state(to)] = way;
        ways[state(to)].push_back(state(to));
      }
    }
  }
  return ways.at(target);
}

TEST(Extent, KeepsEachOfItsPartsAtItsLargest) {
  constexpr uint64_t kLast = (Extent::kMostOffsetPages - 1) * kPage;
  static_assert(kLast >= (uint64_t{1} << 50) - kPage, "1 PiB, the largest ssd_budget");
  for (const uint64_t offset : {uint64_t{0}, kPage, kLast}) {
    for (const size_t length : {kPage, kMaxBlock, kMaxBlock + kPage}) {
      for (const unsigned path : {0u, kMaxStorePaths - 1}) {
        for (unsigned codec = 0; codec < 4; ++codec) {
          const Extent e = Extent::make(path, offset, length, codec);
          ASSERT_TRUE(e);
          ASSERT_EQ(e.offset(), offset);
          ASSERT_EQ(e.length(), length);
          ASSERT_EQ(e.path(), path);
          ASSERT_EQ(e.codec(), codec);
        }
      }
    }
  }
}

TEST(CoreBlockTable, ExactlyTheseTransitionsAreLegal) {
  for (size_t from = 0; from < kStates; ++from) {
    for (size_t to = 0; to < kStates; ++to) {
      EXPECT_EQ(legal(state(from), state(to)), expected().at(state(from)).count(state(to)) != 0)
          << state_name(state(from)) << " -> " << state_name(state(to));
    }
  }
}

TEST(CoreBlockTable, EveryLegalTransitionIsTakenAndCounted) {
  BlockTable table;
  ASSERT_TRUE(table.create(kStates * kStates).ok());
  size_t block = 0;
  std::map<State, uint64_t> counts;
  for (size_t from = 0; from < kStates; ++from) {
    for (size_t to = 0; to < kStates; ++to) {
      if (!legal(state(from), state(to))) continue;
      State now = State::unpopulated;
      for (State next : way_to(state(from))) change(table, block, now, next), now = next;
      change(table, block, state(from), state(to));
      EXPECT_EQ(table[block].state, state(to));
      ++counts[state(to)];
      ++block;
    }
  }
  for (size_t s = 1; s < kStates; ++s) EXPECT_EQ(table.count(state(s)), counts[state(s)]) << state_name(state(s));
  EXPECT_EQ(table.check(), "");
}

// Each named change, the states that it starts from, and the state that it leads to.
TEST(CoreBlockTable, NamedChangesLeadWhereTheirNamesSay) {
  using enum State;
  using Change = void (BlockTable::*)(BlockIndex);
  struct Named {
    Change change;
    std::set<State> from;
    State to;  // unpopulated: stored, if the block has an extent
  };
  const std::set<State> absent = {unpopulated, stored}, taken = {isolating, writing_back};
  const std::vector<Named> all = {
      {&BlockTable::begin_read, {unpopulated, stored, poisoned}, reading},
      {&BlockTable::end_read, {reading}, staged},
      {&BlockTable::abandon_read, {reading}, unpopulated},
      {&BlockTable::begin_install, {reading, staged, isolating, writing_back}, mapping},
      {&BlockTable::end_install, {mapping}, resident},
      {&BlockTable::abandon_install, {mapping}, staged},
      {&BlockTable::begin_isolate, {staged, resident}, isolating},
      {&BlockTable::begin_write, {isolating}, writing_back},
      {&BlockTable::keep_staged, taken, staged},
      {&BlockTable::keep_in_place, taken, resident},
      {&BlockTable::let_go, taken, unpopulated},
      {&BlockTable::end_promote, {promoting}, on_device},
      {&BlockTable::abandon_promote, {promoting}, unpopulated},
      {&BlockTable::abandon_promote_staged, {promoting}, staged},
      {&BlockTable::begin_demote, {on_device}, demoting},
      {&BlockTable::abandon_demote, {demoting}, on_device},
      {&BlockTable::end_demote, {demoting}, unpopulated},
      {&BlockTable::end_demote_staged, {demoting}, staged},
      {&BlockTable::end_demote_in_place, {demoting}, resident},
      {&BlockTable::poison, {unpopulated, stored, reading, mapping, isolating, promoting, demoting}, poisoned},
      {&BlockTable::revive, {poisoned}, unpopulated},
  };
  BlockTable table;
  ASSERT_TRUE(table.create(1000).ok());
  BlockIndex block = 0;
  for (const Named& named : all) {
    for (const State from : named.from) {
      for (const bool has_extent : {false, true}) {
        State now = unpopulated;
        for (State next : way_to(from)) change(table, block, now, next), now = next;
        if (has_extent) table.set_extent(block, Extent::make(0, 0, kPage, 0));
        (table.*named.change)(block);
        EXPECT_EQ(table[block].state, named.to == unpopulated && has_extent ? stored : named.to) << state_name(from);
        ++block;
      }
    }
  }
  EXPECT_EQ(table.check(), "");
}

TEST(CoreBlockTable, CheckNoticesAStateThatWasWrittenBesideChange) {
  BlockTable table;
  ASSERT_TRUE(table.create(8).ok());
  change(table, 3, State::unpopulated, State::reading);
  EXPECT_EQ(table.check(), "");
  edit(table, 3).state = State::resident;
  EXPECT_NE(table.check(), "");
}

TEST(CoreBlockTableDeathTest, AnIllegalTransitionEndsTheProcessWithWords) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  BlockTable table;
  ASSERT_TRUE(table.create(8).ok());
  EXPECT_DEATH(change(table, 5, State::unpopulated, State::resident),
               "block 5: it is unpopulated, and cannot become resident");
}

TEST(CoreBlockTableDeathTest, ALegalTransitionFromTheWrongStateEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  BlockTable table;
  ASSERT_TRUE(table.create(8).ok());
  EXPECT_DEATH(change(table, 2, State::stored, State::reading),
               "block 2: it is unpopulated, and cannot become reading here");
}

TEST(CoreBlockTable, NextTouchedSkipsChunksAndMissesNothing) {
  BlockTable table;
  constexpr uint64_t kBlocks = 100000;
  ASSERT_TRUE(table.create(kBlocks).ok());
  EXPECT_EQ(table.next_populated(0), kBlocks);
  EXPECT_EQ(table.next_populated(kBlocks), kBlocks);
  const std::set<uint64_t> changed = {0, 2047, 2048, 50000, kBlocks - 1};
  for (uint64_t b : changed) change(table, b, State::unpopulated, State::reading);
  std::set<uint64_t> found;
  uint64_t visited = 0;
  for (uint64_t b = table.next_populated(0); b < kBlocks; b = table.next_populated(b + 1)) {
    ++visited;
    if (table[b].state != State::unpopulated) found.insert(b);
  }
  EXPECT_EQ(found, changed);
  EXPECT_LE(visited, 5u * 128) << "pages of the table that nobody changed are skipped";
}

TEST(CoreBlockTable, AHugeTableCostsAddressSpaceOnly) {
  BlockTable table;
  const uint64_t blocks = uint64_t{1} << 32;  // 16 TiB of 4 KiB blocks
  ASSERT_TRUE(table.create(blocks).ok());
  const size_t none = table.footprint();
  EXPECT_LE(none, blocks * 32 / 32768);
  change(table, blocks - 1, State::unpopulated, State::reading);
  EXPECT_LE(table.footprint() - none, 4097u);
  // Found in steps, each of them short.
  uint64_t b = 0, steps = 0;
  for (; b < blocks - 128; ++steps) b = table.next_populated(b);
  EXPECT_EQ(b, blocks - 128);
  EXPECT_GT(steps, 100u);
  EXPECT_LT(steps, 10000u);
  EXPECT_EQ(table.check(), "");
}

TEST(CoreBlockTable, PagesWhoseBlocksAreUntouchedAgainAreGivenBack) {
  BlockTable table;
  const uint64_t blocks = uint64_t{8} << 20;  // 16 TiB of 2 MiB blocks
  ASSERT_TRUE(table.create(blocks).ok());
  const size_t none = table.footprint();
  for (uint64_t b = 0; b < blocks; b += 1000) {
    change(table, b, State::unpopulated, State::reading);
    edit(table, b).digest = {1, 2};
    edit(table, b).flags |= kDigest;
    change(table, b, State::reading, State::unpopulated);
    ASSERT_LE(table.footprint() - none, 18u * 4097) << b;
  }
  EXPECT_EQ(table.check(), "");
  EXPECT_EQ(table.next_populated(0), blocks);
}

TEST(CoreBlockTable, APageIsKeptWhileABlockInItHasMoreToSay) {
  BlockTable table;
  ASSERT_TRUE(table.create(uint64_t{1} << 20).ok());
  const auto touch = [&](uint64_t b) {
    change(table, b, State::unpopulated, State::reading);
    change(table, b, State::reading, State::unpopulated);
  };
  touch(7);
  edit(table, 9).flags |= kWaitsForMemory;  // a thread waits for it
  change(table, 300, State::unpopulated, State::reading);
  change(table, 300, State::reading, State::stored);
  touch(301);
  for (uint64_t b = 1000; b < 500000; b += 1000) touch(b);
  EXPECT_EQ(table[9].flags, kWaitsForMemory);
  EXPECT_EQ(table[300].state, State::stored);
  EXPECT_EQ(table.check(), "");
}

TEST(CoreBlockTable, StatesThatAreOwnedAndStatesThatOccupyMemory) {
  const std::set<State> moving = {State::reading,      State::mapping,   State::isolating,
                                  State::writing_back, State::promoting, State::demoting};
  const std::set<State> memory = {State::reading,  State::staged,    State::mapping,
                                  State::resident, State::isolating, State::writing_back};
  std::set<std::string> names;
  for (size_t s = 0; s < kStates; ++s) {
    EXPECT_EQ(in_transition(state(s)), moving.count(state(s)) != 0) << state_name(state(s));
    EXPECT_EQ(in_memory(state(s)), memory.count(state(s)) != 0) << state_name(state(s));
    EXPECT_TRUE(names.insert(state_name(state(s))).second);
  }
  EXPECT_STREQ(state_name(State::count_), "?");
}

}  // namespace
}  // namespace vmem::core
