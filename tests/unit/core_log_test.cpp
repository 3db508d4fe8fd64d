// The queue between callers of log() and the sink. Lines are delivered in order, never under the
// pager's lock, and counted if they are dropped. No log thread runs here: lines wait until the test
// delivers them.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/big_lock.h"
#include "core/fatal.h"
#include "core/log.h"
#include "core/step.h"

namespace vmem::core {
namespace {

class CoreLogQueue : public ::testing::Test {
 protected:
  void SetUp() override {
    set_log_sink(
        [](int, const char* line, void* user) {
          auto* self = static_cast<CoreLogQueue*>(user);
          EXPECT_FALSE(self->inside_.exchange(true)) << "one line at a time";
          self->lines.emplace_back(line);
          if (self->in_sink) self->in_sink();
          self->inside_ = false;
        },
        this);
  }
  void TearDown() override { set_log_sink(nullptr, nullptr); }
  std::vector<std::string> lines;
  std::function<void()> in_sink;

 private:
  std::atomic<bool> inside_{false};
};

TEST_F(CoreLogQueue, NothingIsDeliveredUnderTheLockNorByWhoLogs) {
  BigMutex mutex;
  {
    BigLock lock(mutex);
    log(Level::error, "under the lock");
    EXPECT_TRUE(lines.empty());
  }
  log(Level::error, "without");
  EXPECT_TRUE(lines.empty());
  flush_log();
  EXPECT_EQ(lines, (std::vector<std::string>{"under the lock", "without"}));
}

TEST_F(CoreLogQueue, TheEndOfTheOutermostCallDeliversWhatItLogged) {
  begin_call_that_logs();
  begin_call_that_logs();
  log(Level::error, "line");
  EXPECT_FALSE(end_call_that_logs());
  ASSERT_TRUE(end_call_that_logs());
  deliver_log_of_call();
  EXPECT_EQ(lines, std::vector<std::string>{"line"});
  begin_call_that_logs();
  EXPECT_FALSE(end_call_that_logs()) << "it logged nothing";
}

// Returns how many messages the lines stand for: each is printed, or counted.
uint64_t told(const std::vector<std::string>& lines) {
  uint64_t all = 0;
  for (const std::string& line : lines) {
    unsigned long long more = 0;
    all += sscanf(line.c_str(), ".. and %llu more since, like: disk", &more) == 1 ? more : 1;
  }
  return all;
}

TEST_F(CoreLogQueue, WhatComesAgainAndAgainIsSaidOnceASecondAndCounted) {
  const auto fail = [](int times) {
    for (int i = 0; i < times; ++i) VMEM_LOG_OFTEN(Level::error, "disk %d failed", i);
  };
  const auto begun = std::chrono::steady_clock::now();
  BigMutex mutex;
  {
    BigLock lock(mutex);
    fail(5000);
  }
  const auto took = std::chrono::steady_clock::now() - begun;
  set_log_sink(nullptr, nullptr);
  ASSERT_GE(lines.size(), 2u);
  EXPECT_EQ(lines[0], "disk 0 failed");
  EXPECT_EQ(told(lines), 5000u);
  EXPECT_LE(lines.size(), 2 + 2 * static_cast<size_t>(took / std::chrono::seconds(1)));
  lines.clear();
  SetUp();
  fail(1);
  flush_log();
  EXPECT_EQ(lines, std::vector<std::string>{"disk 0 failed"}) << "who has just come hears of it";
}

TEST_F(CoreLogQueue, WhatIsSaidInTwoPlacesIsCountedByItself) {
  VMEM_LOG_OFTEN(Level::error, "disk A failed");
  VMEM_LOG_OFTEN(Level::error, "disk B failed");
  flush_log();
  EXPECT_EQ(lines, (std::vector<std::string>{"disk A failed", "disk B failed"}));
}

// Once a line is counted as one more of its kind, the kind counts as printed, perhaps to the end of
// the process.
TEST_F(CoreLogQueue, NoneIsCountedBeforeOneIsAmongTheLines) {
  static std::atomic<int> printed{0};
  static std::atomic<bool> go_on{false};
  printed = 0, go_on = false;
  step_hook.store([](const char* step) {
    if (std::string_view(step) != "log.printed" || printed.fetch_add(1) != 0) return;
    while (!go_on) std::this_thread::yield();
  });
  const auto fail = [](int disk) { VMEM_LOG_OFTEN(Level::error, "disk %d failed", disk); };
  std::thread first([&] { fail(1); });
  while (printed == 0) std::this_thread::yield();
  fail(2);
  flush_log();
  EXPECT_EQ(lines, std::vector<std::string>{"disk 2 failed"});
  go_on = true;
  first.join();
  step_hook.store(nullptr);
  set_log_sink(nullptr, nullptr);
  EXPECT_EQ(told(lines), 2u);
}

TEST_F(CoreLogQueue, WhatIsNotDeliveredIsNotCounted) {
  const auto info = [] { VMEM_LOG_OFTEN(Level::info, "disk failed"); };
  for (int i = 0; i < 10; ++i) info();
  set_log_sink(nullptr, nullptr);
  EXPECT_TRUE(lines.empty());
}

TEST_F(CoreLogQueue, WhatIsLikeTheOthersIsCutBetweenCharacters) {
  const std::string name(300, 'x');
  const auto fail = [](const std::string& text) { VMEM_LOG_OFTEN(Level::error, "%s", text.c_str()); };
  do {
    lines.clear();
    SetUp();
    fail(name.substr(0, 254) + "\u00e9" + name);
    fail(name);
    set_log_sink(nullptr, nullptr);
    ASSERT_EQ(lines.size(), 2u);
  } while (lines[1] == name);  // a second later
  EXPECT_EQ(lines[1], ".. and 1 more since, like: " + name.substr(0, 254));
}

TEST_F(CoreLogQueue, LinesWithoutRoomAreCountedWhereTheyWereDropped) {
  const std::string text(1000, 'x');
  const size_t fit = kLogRoom / (text.size() + 8) - 1;
  size_t logged = 0;
  for (; logged < fit + 50; ++logged) log(Level::error, "%s", text.c_str());
  in_sink = [&] {  // room for some lines again
    if (lines.size() == 2) log(Level::error, "later");
  };
  flush_log();
  flush_log();
  ASSERT_GE(lines.size(), fit + 2);
  const size_t kept = lines.size() - 2;
  for (size_t i = 0; i < kept; ++i) ASSERT_EQ(lines[i], text) << i;
  EXPECT_EQ(lines[kept], std::to_string(logged - kept) + " lines of the log were dropped here");
  EXPECT_EQ(lines[kept + 1], "later");
}

TEST_F(CoreLogQueue, DroppedLinesAreSaidThoughNobodyLogsAfterwards) {
  for (size_t i = 0; i < kLogRoom / 500; ++i) log(Level::error, "%s", std::string(1000, 'x').c_str());
  flush_log();
  ASSERT_FALSE(lines.empty());
  EXPECT_NE(lines.back().find(" lines of the log were dropped here"), std::string::npos) << lines.back();
  const size_t before = lines.size();
  log(Level::error, "after");
  flush_log();
  ASSERT_EQ(lines.size(), before + 1);
  EXPECT_EQ(lines.back(), "after");
}

// Lines of every length, so that lines and their headers wrap around the end of the buffer in every
// way.
TEST_F(CoreLogQueue, LinesOfEveryLengthStayWhole) {
  std::vector<std::string> want;
  std::string text;
  for (int round = 0; round < 4; ++round) {
    log(Level::error, "%s", std::string(1000, 'r').c_str());  // never empty: writing does not restart
    want.emplace_back(1000, 'r');
    for (size_t length = 0; length < 1023; ++length) {
      text.assign(length, static_cast<char>('a' + length % 26));
      log(Level::error, "%s", text.c_str());
      want.push_back(text);
      if (length % 101 != 0) continue;
      const size_t most = want.size();
      in_sink = [&, most] {
        if (lines.size() == most) log(Level::error, "-");
      };
      want.emplace_back("-");
      flush_log();
      in_sink = nullptr;
    }
  }
  flush_log();
  EXPECT_EQ(lines, want);
}

TEST_F(CoreLogQueue, ASinkThatLogsIsNotEnteredAgainAndItsLineComesNext) {
  in_sink = [&] {
    if (lines.size() == 1) log(Level::error, "from the sink");
    flush_log();
    EXPECT_TRUE(in_log_sink());
  };
  log(Level::error, "first");
  log(Level::error, "second");
  flush_log();
  EXPECT_FALSE(in_log_sink());
  EXPECT_EQ(lines, (std::vector<std::string>{"first", "second"}));
  flush_log();
  EXPECT_EQ(lines, (std::vector<std::string>{"first", "second", "from the sink"}));
}

TEST_F(CoreLogQueue, ThreadsThatLogAndDeliverAtOnceKeepTheOrderOfEach) {
  constexpr int kThreads = 4, kEach = 200;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < kEach; ++i) {
        begin_call_that_logs();
        log(Level::error, "%d %d", t, i);
        if (end_call_that_logs()) deliver_log_of_call();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  flush_log();
  ASSERT_EQ(lines.size(), size_t{kThreads * kEach});
  std::map<int, int> next;
  for (const std::string& line : lines) {
    const int t = std::stoi(line), i = std::stoi(line.substr(line.find(' ')));
    EXPECT_EQ(i, next[t]++) << line;
  }
}

TEST_F(CoreLogQueue, WhatWasLoggedBeforeGoesToTheSinkOfThatTime) {
  static std::vector<std::string> later;
  later.clear();
  log(Level::error, "before");
  set_log_sink([](int, const char* line, void*) { later.emplace_back(line); }, nullptr);
  EXPECT_EQ(lines, std::vector<std::string>{"before"});
  log(Level::error, "after");
  set_log_sink(nullptr, nullptr);
  EXPECT_EQ(later, std::vector<std::string>{"after"});
}

TEST_F(CoreLogQueue, ASinkMayBeReplacedFromInsideIt) {
  static std::vector<std::string> later;
  later.clear();
  in_sink = [] { set_log_sink([](int, const char* line, void*) { later.emplace_back(line); }, nullptr); };
  log(Level::error, "one");
  log(Level::error, "two");
  flush_log();
  EXPECT_EQ(lines, std::vector<std::string>{"one"});
  EXPECT_EQ(later, std::vector<std::string>{"two"});
}

TEST_F(CoreLogQueue, ReplacingASinkWaitsForTheThreadThatIsInside) {
  std::atomic<bool> entered{false}, go_on{false}, left{false};
  in_sink = [&] {
    entered = true;
    while (!go_on) std::this_thread::yield();
    left = true;
  };
  log(Level::error, "line");
  std::thread deliverer(flush_log);
  while (!entered) std::this_thread::yield();
  std::thread releaser([&] { go_on = true; });
  set_log_sink(nullptr, nullptr);
  EXPECT_TRUE(left);
  deliverer.join();
  releaser.join();
}

TEST(CoreLogDeathTest, DeliveryUnderThePagersLockEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  BigMutex mutex;
  const auto held = [&](auto call) {
    log(Level::error, "line");
    BigLock lock(mutex);
    call();
  };
  EXPECT_DEATH(held(flush_log), "the sink of the log is called under the pager");
  EXPECT_DEATH(held(settle_log), "the sink of the log is called under the pager");
  flush_log();
}

TEST(CoreLogDeathTest, WhatLedToAFatalErrorIsOnStderrWhateverTheSink) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto die = [] {
    set_log_sink([](int, const char*, void*) {}, nullptr);
    log(Level::error, "this led to it");
    fatal("the end");
  };
  EXPECT_DEATH(die(), "libvmem: error: this led to it\nlibvmem: fatal: the end");
}

// The library calls this before a signal answers an access.
TEST(CoreLogSettle, WritesToStderrAtOnceAndWaitsForNoSinkThatNobodyRuns) {
  ::testing::internal::CaptureStderr();
  log(Level::error, "the reason");
  settle_log();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "libvmem: error: the reason\n");
}

}  // namespace
}  // namespace vmem::core
