// The protocol of kernels that ask, rule by rule. tests/unit/paging_protocol.sh checks the orders
// of its accesses, which no run can show.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "common/patience.h"
#include "paging_words.h"

namespace {

using namespace pagingtest;

uint64_t long_enough() {
  return static_cast<uint64_t>(std::chrono::nanoseconds(vmem::test::patiently(std::chrono::seconds(60))).count());
}

// Runs a hook once, just before a group's next addition, fence or pause.
struct Stepped : HostAtomics {
  static inline std::function<void()> before_add, before_fence, before_pause;
  static void once(std::function<void()>& what) {
    const std::function<void()> now = std::exchange(what, nullptr);
    if (now) now();
  }
  static uint32_t add(uint32_t* word, uint32_t value) {
    once(before_add);
    return HostAtomics::add(word, value);
  }
  static uint64_t add(uint64_t* word, uint64_t value) { return HostAtomics::add(word, value); }
  static void fence() {
    once(before_fence);
    HostAtomics::fence();
  }
  static void pause() {
    once(before_pause);
    HostAtomics::pause();
  }
};

TEST(PagingProtocol, ABlockIsRequestedOnceAGenerationAndUrgency) {
  Words words(4, 4, 8);
  States states = words.states();
  Queue queue(words.table());
  Group one(words.table(), 0), other(words.table(), 0);
  one.prefetch(2);
  other.prefetch(2);
  EXPECT_EQ(other.try_acquire(2, Intent::read), Answer::not_yet);
  EXPECT_EQ(one.try_acquire(2, Intent::read), Answer::not_yet);
  one.prefetch(2);
  EXPECT_EQ(taken(words, queue), (Requests{{2, Urgency::prefetch}, {2, Urgency::wait}}));
  states.publish(2, Urgency::wait);
  one.prefetch(2);
  EXPECT_EQ(taken(words, queue), Requests{}) << "of what is present there is nothing to request";
  states.begin_eviction(2);
  EXPECT_EQ(one.try_acquire(2, Intent::read), Answer::not_yet);
  EXPECT_EQ(taken(words, queue), Requests{}) << "nor of what may stay";
  states.settle();
  ASSERT_FALSE(states.in_use(2));
  states.finish(2);
  EXPECT_EQ(one.try_acquire(2, Intent::read), Answer::not_yet);
  EXPECT_EQ(taken(words, queue), (Requests{{2, Urgency::wait}})) << "another generation";
}

TEST(PagingProtocol, WhatIsInPlaceIsForThoseWhoLoadALittle) {
  Words words(4, 4, 8);
  States states = words.states();
  Queue queue(words.table());
  Group rows(words.table(), 0), other(words.table(), 0);
  uint64_t home = 7;
  EXPECT_EQ(rows.try_read(1, &home), Answer::not_yet);
  EXPECT_EQ(home, 0u);
  EXPECT_EQ(rows.try_read(4, &home), Answer::out_of_range);
  EXPECT_EQ(taken(words, queue), (Requests{{1, Urgency::rows}}));
  words.table().home[1] = 4096;
  states.lend(1);
  EXPECT_EQ(rows.try_read(1, &home), Answer::present);
  EXPECT_EQ(home, 4096u);
  other.prefetch(1);
  EXPECT_EQ(taken(words, queue), Requests{}) << "a hint brings nothing that can be loaded from";
  EXPECT_EQ(other.try_acquire(1, Intent::read), Answer::not_yet) << "it is not at its own address";
  EXPECT_EQ(taken(words, queue), (Requests{{1, Urgency::wait}}));
  states.begin_eviction(1);
  states.settle();
  EXPECT_TRUE(states.in_use(1)) << "somebody loads from it";
  Group late(words.table(), 0);
  EXPECT_EQ(late.try_read(1, &home), Answer::not_yet);
  EXPECT_EQ(home, 0u);
  rows.release(1);
  states.settle();
  EXPECT_FALSE(states.in_use(1));
  states.finish(1);
  EXPECT_EQ(rows.try_read(1, &home), Answer::not_yet);
  EXPECT_EQ(taken(words, queue), (Requests{{1, Urgency::rows}})) << "another generation";
  states.publish(1, Urgency::wait);
  EXPECT_EQ(rows.try_read(1, &home), Answer::present);
  EXPECT_EQ(home, 0u) << "at its own address";
  rows.release(1);
}

// Counts the fences between a copy's address and the address of accesses.
struct Aliased : HostAtomics {
  static inline int fences = 0;
  static void fence_aliases() { ++fences; }
};

TEST(PagingProtocol, AnArrivalIsFencedOnceAndStoresEachTime) {
  WordsOf<Aliased> words(2, 2, 4);
  auto states = words.states();
  vmem::paging::Group<Aliased> one(words.table(), 0), other(words.table(), 0), stores(words.table(), 0);
  const auto pins = [&](vmem::paging::Group<Aliased>& group, Intent intent) {
    Aliased::fences = 0;
    EXPECT_EQ(group.try_acquire(0, intent), Answer::present);
    group.release(0);
    return Aliased::fences;
  };
  states.publish(0, Urgency::wait);
  EXPECT_EQ(pins(one, Intent::read), 1);
  EXPECT_EQ(pins(one, Intent::read), 0);
  EXPECT_EQ(pins(other, Intent::read), 0) << "its fence is behind the one there was";
  EXPECT_EQ(pins(stores, Intent::write), 1) << "before what is copied out next";
  EXPECT_EQ(pins(stores, Intent::write), 1);
  states.begin_eviction(0);
  states.settle();
  ASSERT_FALSE(states.in_use(0));
  states.finish(0);
  states.publish(0, Urgency::wait);
  EXPECT_EQ(pins(other, Intent::read), 1) << "another arrival";
}

TEST(PagingProtocol, AFullRingLosesNoRequestOfThoseWhoAskAgain) {
  Words words(4, 4, 2);
  Queue queue(words.table());
  Group one(words.table(), 0), other(words.table(), 0);
  for (uint32_t turn = 0; turn < 5; ++turn) {  // the ring wraps around
    Requests all;
    for (uint32_t b = 0; b < 4; ++b) EXPECT_EQ(one.try_acquire(b, Intent::read), Answer::not_yet);
    for (uint32_t rounds = 0; rounds < 2; ++rounds) {
      const Requests some = taken(words, queue);
      EXPECT_EQ(some.size(), 2u);
      all.insert(all.end(), some.begin(), some.end());
      for (uint32_t b = 0; b < 4; ++b) EXPECT_EQ(other.try_acquire(b, Intent::read), Answer::not_yet);
    }
    std::sort(all.begin(), all.end());
    EXPECT_EQ(all, (Requests{{0, Urgency::wait}, {1, Urgency::wait}, {2, Urgency::wait}, {3, Urgency::wait}}));
    EXPECT_EQ(taken(words, queue), Requests{});
    States states = words.states();
    for (uint32_t b = 0; b < 4; ++b) {
      states.publish(b, Urgency::wait);
      states.begin_eviction(b);
      states.finish(b);
    }
  }
}

// The server frees an eighth of the cells at a time: each report writes a word of a device's
// memory.
TEST(PagingProtocol, WhatTheServerHasTakenIsFreeWhenItHasSaidSo) {
  Words words(80, 4, 16);
  Queue queue(words.table());
  Group one(words.table(), 0);
  for (uint32_t b = 0; b < 40; ++b) one.prefetch(b);
  EXPECT_EQ(words.control().ring_head, 16u) << "the ring is full";
  Request request;
  ASSERT_TRUE(queue.take(&request, words.port()));
  one.prefetch(40);
  EXPECT_EQ(words.control().ring_head, 16u) << "it has not said so";
  ASSERT_TRUE(queue.take(&request, words.port()));
  for (uint32_t b = 41; b < 80; ++b) one.prefetch(b);
  EXPECT_EQ(words.control().ring_head, 18u);
  const Requests all = taken(words, queue);
  ASSERT_EQ(all.size(), 16u) << "what it had said is free can be claimed, and nothing is overwritten";
  EXPECT_EQ(all.front(), (std::pair{2u, Urgency::prefetch}));
  EXPECT_EQ(all[14], (std::pair{41u, Urgency::prefetch}));
  EXPECT_EQ(all[15], (std::pair{42u, Urgency::prefetch}));
}

// The ring is in the host's memory: many groups that load from it would slow all other traffic of
// the link.
struct Apart : HostAtomics {
  static inline const uint64_t *begin = nullptr, *end = nullptr;
  static inline unsigned loads = 0;
  template <typename T>
  static T load(const T* word) {
    const auto* const at = reinterpret_cast<const uint64_t*>(word);
    loads += at >= begin && at < end ? 1 : 0;
    return HostAtomics::load(word);
  }
};

TEST(PagingProtocol, NoGroupLoadsFromTheRing) {
  WordsOf<Apart> words(8, 4, 4);
  Apart::begin = words.table().ring;
  Apart::end = Apart::begin + 4;
  vmem::paging::Group<Apart> group(words.table(), 0);
  for (uint32_t b = 0; b < 8; ++b) EXPECT_EQ(group.try_acquire(b, Intent::read), Answer::not_yet);
  uint64_t home = 0;
  EXPECT_EQ(group.try_read(1, &home), Answer::not_yet);
  EXPECT_EQ(group.acquire(2, Intent::read), Answer::no_progress);
  EXPECT_EQ(words.control().ring_head, 4u);
  EXPECT_EQ(Apart::loads, 0u);
}

TEST(PagingProtocol, AnEvictionFindsPinsAndWhoMayHaveWritten) {
  Words words(1, 1, 2);
  States states = words.states();
  Group reader(words.table(), 0), writer(words.table(), 0);
  const auto evict = [&] {
    states.begin_eviction(0);
    states.settle();
    return !states.in_use(0);
  };
  states.publish(0, Urgency::prefetch);
  ASSERT_EQ(reader.try_acquire(0, Intent::read), Answer::present);
  EXPECT_FALSE(evict());
  EXPECT_EQ(writer.try_acquire(0, Intent::write), Answer::not_yet) << "no new pins meanwhile";
  states.cancel(0);
  reader.release(0);
  EXPECT_TRUE(evict());
  EXPECT_FALSE(states.was_written(0));
  states.cancel(0);
  ASSERT_EQ(reader.try_acquire(0, Intent::read), Answer::present);
  ASSERT_EQ(writer.try_acquire(0, Intent::write), Answer::present);
  writer.release(0);
  EXPECT_FALSE(evict()) << "the other one still has it";
  reader.release(0);
  EXPECT_FALSE(states.in_use(0));
  EXPECT_TRUE(states.was_written(0));
  states.finish(0);
  EXPECT_EQ(reader.held() + writer.held(), 0u);
}

TEST(PagingProtocol, WhatSomebodyWaitsForStaysUntilItWasHad) {
  Words words(2, 2, 4);
  States states = words.states();
  Group group(words.table(), 0);
  states.publish(0, Urgency::wait);
  states.publish(1, Urgency::needed);
  EXPECT_TRUE(states.untaken(0));
  EXPECT_FALSE(states.untaken(1));
  ASSERT_EQ(group.try_acquire(0, Intent::read), Answer::present);
  group.release(0);
  EXPECT_FALSE(states.untaken(0));
}

TEST(PagingProtocol, WhatCannotBeAcquiredIsRefusedAtOnce) {
  Words words(4, 2, 4);
  States states = words.states();
  states.publish(0, Urgency::prefetch);
  Group group(words.table(), long_enough());
  EXPECT_EQ(group.acquire(4, Intent::read), Answer::out_of_range);
  EXPECT_EQ(group.try_acquire(4, Intent::read), Answer::out_of_range);
  const uint32_t blocks[] = {0, 1, 2};
  EXPECT_EQ(group.acquire_all(blocks, 3, Intent::read), Answer::too_many);
  ASSERT_EQ(group.acquire(0, Intent::read), Answer::present);
  EXPECT_EQ(group.acquire(1, Intent::read), Answer::would_deadlock);
  EXPECT_EQ(group.try_acquire(1, Intent::read), Answer::not_yet) << "this one does not wait";
  EXPECT_EQ(group.try_acquire(0, Intent::read), Answer::present);
  EXPECT_EQ(group.held(), 2u);
  group.release(0);
  group.release(0);
  states.begin_eviction(0);
  states.settle();
  EXPECT_FALSE(states.in_use(0));
}

TEST(PagingProtocol, ABlockThatCannotBeHadIsAnErrorUntilItIsTriedAgain) {
  Words words(2, 2, 4);
  States states = words.states();
  states.publish(0, Urgency::prefetch);
  states.fail(1, Answer::io_error);
  Group group(words.table(), long_enough());
  const uint32_t blocks[] = {0, 1};
  EXPECT_EQ(group.acquire(1, Intent::read), Answer::io_error);
  EXPECT_EQ(group.acquire_all(blocks, 2, Intent::read), Answer::io_error);
  EXPECT_EQ(group.try_acquire(1, Intent::read), Answer::io_error);
  EXPECT_EQ(group.held(), 0u);
  states.begin_eviction(0);
  states.settle();
  EXPECT_FALSE(states.in_use(0)) << "none is pinned of those that were asked for together";
  states.retry(1);
  states.publish(1, Urgency::wait);
  EXPECT_EQ(group.acquire(1, Intent::read), Answer::present);
}

TEST(PagingProtocol, AServerThatGetsNothingDoneIsGivenUp) {
  Words words(3, 2, 4);
  Group group(words.table(), 1000000);
  EXPECT_EQ(group.acquire(0, Intent::read), Answer::no_progress);
  const uint32_t blocks[] = {0, 1};
  EXPECT_EQ(group.acquire_all(blocks, 2, Intent::write), Answer::no_progress);
  // The group must not wait for ever for another one that holds the token.
  words.control().token = 1;
  States states = words.states();
  states.publish(0, Urgency::prefetch);
  vmem::paging::Group<HostAtomics, 0> impatient(words.table(), 1000000);
  EXPECT_EQ(impatient.acquire_all(blocks, 2, Intent::write), Answer::no_progress);
  EXPECT_EQ(words.control().token, 1u);
  states.begin_eviction(0);
  states.settle();
  EXPECT_FALSE(states.in_use(0));
}

TEST(PagingProtocol, TheOldestOfThoseThatWaitForTheTokenHasTheNextTurn) {
  Words words(2, 2, 8);
  States states = words.states();
  states.publish(0, Urgency::prefetch);
  vmem::paging::Control<HostAtomics>& control = words.control();
  vmem::paging::Group<HostAtomics, 0> group(words.table(), 1000000);
  const uint32_t both[] = {0, 1};
  control.tickets = 7;
  control.turn = 3;
  EXPECT_EQ(group.acquire_all(both, 2, Intent::read), Answer::no_progress) << "the token is free, and not for it";
  EXPECT_EQ(control.token, 0u);
  EXPECT_EQ(control.turn, 3u) << "of who gives up nothing is left";
  Queue queue(words.table());
  EXPECT_EQ(taken(words, queue), Requests{}) << "nor does it ask before it has the token";
  control.turn = 100;
  EXPECT_EQ(group.acquire_all(both, 2, Intent::read), Answer::no_progress) << "nobody pages in";
  EXPECT_EQ(control.turn, 0u) << "it was older, had its turn, and took its ticket back";
  EXPECT_EQ(control.token, 0u);
  EXPECT_EQ(taken(words, queue), (Requests{{1, Urgency::first}}));
}

// The groups that wait with pins must not need more blocks together than there are frames.
TEST(PagingProtocol, TheTokenIsForHalfOfTheFramesOrForOneGroup) {
  Words words(16, 8, 8), few(16, 3, 8);
  using vmem::paging::token_allows;
  EXPECT_TRUE(token_allows(words.table(), 0, 8));
  EXPECT_TRUE(token_allows(words.table(), 2, 2));
  EXPECT_FALSE(token_allows(words.table(), 3, 2));
  EXPECT_FALSE(token_allows(words.table(), 1, 8));
  EXPECT_FALSE(token_allows(words.table(), 8, 1));
  EXPECT_TRUE(token_allows(few.table(), 0, 3));
  EXPECT_FALSE(token_allows(few.table(), 1, 1));
}

// The group now looks for another block, and the frames must not fill with blocks no group looks
// for.
TEST(PagingProtocol, WhatAGroupDoesNotLookForAnyMoreNeedNotStay) {
  WordsOf<Stepped> words(2, 2, 8);
  WordsOf<Stepped>::States states = words.states();
  states.publish(0, Urgency::prefetch);
  vmem::paging::Group<Stepped> group(words.table(), 1000000);
  Stepped::before_pause = [&] {  // while it waits for 1, the reclaim thread evicts 0
    states.begin_eviction(0);
    states.settle();
    ASSERT_FALSE(states.in_use(0));
    states.finish(0);
    states.publish(1, Urgency::wait);
    EXPECT_TRUE(states.untaken(1));
  };
  const uint32_t both[] = {0, 1};
  EXPECT_EQ(group.acquire_all(both, 2, Intent::read), Answer::no_progress);
  EXPECT_FALSE(states.untaken(1));
}

// Even if the server serves others: a kernel has a time limit of its own.
TEST(PagingProtocol, AnAcquireEndsAfterTheLongestTimeThatItsGroupWasGiven) {
  Words words(2, 2, 4);
  std::atomic<bool> stop{false};
  std::thread server([&] {
    while (!stop) HostAtomics::add(&words.control().progress, uint64_t{1});
  });
  Group group(words.table(), long_enough(), 5000000);
  EXPECT_EQ(group.acquire(1, Intent::read), Answer::timed_out);
  const uint32_t blocks[] = {0, 1};
  EXPECT_EQ(group.acquire_all(blocks, 2, Intent::read), Answer::timed_out);
  stop = true;
  server.join();
  EXPECT_EQ(group.held(), 0u);
}

TEST(PagingProtocol, TheEndOfTheServerEndsAllWhoWait) {
  Words words(6, 4, 16);
  States states = words.states();
  states.publish(5, Urgency::prefetch);
  std::vector<std::thread> groups;
  std::atomic<int> ended{0};
  for (uint32_t i = 0; i < 4; ++i) {
    groups.emplace_back([&, i] {
      Group group(words.table(), long_enough());
      const uint32_t blocks[] = {i, 4};
      ended += group.acquire_all(blocks, i % 2 + 1, Intent::read) == Answer::ended;
    });
  }
  words.end(Answer::ended);
  for (std::thread& group : groups) group.join();
  EXPECT_EQ(ended, 4);
  Group late(words.table(), long_enough());
  EXPECT_EQ(late.try_acquire(0, Intent::read), Answer::ended);
  EXPECT_EQ(late.acquire(5, Intent::read), Answer::present) << "what is there may be used to the end";
}

// ---- between two steps of a pin ----

class PagingSteps : public ::testing::Test {
 protected:
  void evict() {
    states.begin_eviction(0);
    states.settle();
    EXPECT_FALSE(states.in_use(0));
    written = states.was_written(0);
    states.finish(0);
  }
  void come_and_go() {
    evict();
    states.publish(0, Urgency::wait);
  }
  WordsOf<Stepped> words{1, 1, 2};
  WordsOf<Stepped>::States states = words.states();
  vmem::paging::Group<Stepped> group{words.table(), 0}, other{words.table(), 0};
  bool written = false;
};

TEST_F(PagingSteps, APinThatComesBehindAnEvictionIsRefusedAndCountsForNothing) {
  states.publish(0, Urgency::wait);
  Stepped::before_add = [&] { states.begin_eviction(0); };
  EXPECT_EQ(group.try_acquire(0, Intent::write), Answer::not_yet);
  states.settle();
  EXPECT_FALSE(states.in_use(0));
  states.cancel(0);
  EXPECT_TRUE(states.untaken(0)) << "nobody has had it yet";
  EXPECT_EQ(group.try_acquire(0, Intent::write), Answer::present);
}

TEST_F(PagingSteps, APinThatComesBeforeAnEvictionsLookIsFoundByIt) {
  states.publish(0, Urgency::wait);
  bool found = false;
  Stepped::before_fence = [&] {
    states.begin_eviction(0);
    states.settle();
    found = states.in_use(0) && states.was_written(0);
    states.cancel(0);
  };
  EXPECT_EQ(group.try_acquire(0, Intent::write), Answer::present) << "the word is the same as before";
  EXPECT_TRUE(found);
}

TEST_F(PagingSteps, ABlockThatHasLeftAndComeBackMeanwhileIsAnotherOne) {
  states.publish(0, Urgency::wait);
  Stepped::before_add = [&] { come_and_go(); };
  EXPECT_EQ(group.try_acquire(0, Intent::write), Answer::not_yet) << "it has marked the generation before";
  EXPECT_TRUE(states.untaken(0));
  ASSERT_EQ(group.try_acquire(0, Intent::write), Answer::present);
  group.release(0);
  evict();
  EXPECT_TRUE(written);
}

TEST_F(PagingSteps, AGroupThatWasHeldUpErasesNoLaterMark) {
  states.publish(0, Urgency::wait);
  Stepped::before_add = [&] {
    come_and_go();
    ASSERT_EQ(other.try_acquire(0, Intent::write), Answer::present);
    other.release(0);
  };
  EXPECT_EQ(group.try_acquire(0, Intent::write), Answer::not_yet);
  evict();
  EXPECT_TRUE(written);
}

}  // namespace
