// Errors with messages, and the log.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/log.h"
#include "core/status.h"

namespace vmem::core {
namespace {

TEST(CoreStatus, SuccessHasNoCodeAndNoWords) {
  const Status s;
  EXPECT_TRUE(s.ok());
  EXPECT_EQ(s.code(), 0);
  EXPECT_EQ(s.text(), "");
}

TEST(CoreStatus, TheCodeIsNegativeWhateverSignItWasGiven) {
  EXPECT_EQ(error(EIO, "x").code(), -EIO);
  EXPECT_EQ(error(-EIO, "x").code(), -EIO);
  EXPECT_EQ(Status(ENOSPC, "x").code(), -ENOSPC);
}

TEST(CoreStatus, AnErrorMadeFromZeroIsStillAnError) {
  EXPECT_FALSE(error(0, "x").ok());
  EXPECT_EQ(error(0, "x").code(), -EINVAL);
}

TEST(CoreStatus, WordsOfAnyLengthArriveWhole) {
  const std::string longer(5000, 'y');
  EXPECT_EQ(error(EIO, "%s-%d", longer.c_str(), 7).text(), longer + "-7");
  const std::string edge(255, 'z');
  EXPECT_EQ(strprintf("%s", edge.c_str()), edge);
  EXPECT_EQ(strprintf("%sz", edge.c_str()), edge + "z");
  EXPECT_EQ(strprintf("%s", ""), "");
}

TEST(CoreStatus, SystemErrorsNameErrno) {
  const Status s = system_error(-ENOSPC, "writing %d bytes", 5);
  EXPECT_EQ(s.code(), -ENOSPC);
  EXPECT_EQ(s.text(), "writing 5 bytes: No space left on device (errno 28)");
}

TEST(CoreStatus, CopiesShareTheWords) {
  Status copy;
  {
    const Status original = error(EIO, "gone with the scope?");
    copy = original;
  }
  EXPECT_EQ(copy.text(), "gone with the scope?");
}

TEST(CoreStatus, BytesForPeople) {
  EXPECT_EQ(human_bytes(0), "0 bytes");
  EXPECT_EQ(human_bytes(1023), "1023 bytes");
  EXPECT_EQ(human_bytes(1024), "1 KiB");
  EXPECT_EQ(human_bytes(3 << 19), "1.50 MiB");
  EXPECT_EQ(human_bytes(8ull << 30), "8 GiB");
  EXPECT_EQ(human_bytes(1ull << 60), "1 EiB");
}

class CoreLog : public ::testing::Test {
 protected:
  void SetUp() override { set_log_sink(take, this); }
  void TearDown() override {
    set_log_sink(nullptr, nullptr);
    set_log_level(Level::warning);
  }
  static void take(int level, const char* line, void* user) {
    auto* self = static_cast<CoreLog*>(user);
    self->lines.emplace_back(level, line);
  }
  std::vector<std::pair<int, std::string>> lines;  // one line at a time
};

TEST_F(CoreLog, OnlyWhatTheLevelAllowsIsDelivered) {
  log(Level::error, "e%d", 1);
  log(Level::warning, "w");
  log(Level::info, "i");
  flush_log();
  EXPECT_EQ(lines, (std::vector<std::pair<int, std::string>>{{0, "e1"}, {1, "w"}}));
  lines.clear();
  set_log_level(Level::debug);
  log(Level::debug, "d");
  set_log_level(Level::error);
  log(Level::warning, "w");
  flush_log();
  EXPECT_EQ(lines, (std::vector<std::pair<int, std::string>>{{3, "d"}}));
}

TEST_F(CoreLog, ALineTooLongIsCutNotLost) {
  log(Level::error, "%s", std::string(5000, 'x').c_str());
  flush_log();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].second, std::string(1023, 'x'));
}

TEST_F(CoreLog, OnceMeansOnce) {
  for (int i = 0; i < 3; ++i) VMEM_LOG_ONCE(Level::warning, "said %d", i);
  flush_log();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].second, "said 0");
}

TEST_F(CoreLog, NoThreadIsInsideASinkThatWasReplaced) {
  std::atomic<bool> stop{false};
  std::thread talker([&] {
    while (!stop) log(Level::error, "line");
  });
  for (int i = 0; i < 200; ++i) {
    auto sink = std::make_unique<std::string>("alive");
    set_log_sink([](int, const char*, void* user) { ASSERT_EQ(*static_cast<std::string*>(user), "alive"); },
                 sink.get());
    set_log_sink([](int, const char*, void*) {}, nullptr);
    *sink = "dead";
  }
  stop = true;
  talker.join();
}

}  // namespace
}  // namespace vmem::core
