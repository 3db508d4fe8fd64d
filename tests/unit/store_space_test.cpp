// The contract of store::Space: disjoint extents, a hard budget, all or nothing, freed room returns.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <thread>

#include "common/patience.h"
#include "common/user_namespace.h"
#include "core/log.h"
#include "core/step.h"
#include "store/space.h"
#include "store/space_path.h"
#include "store_test_util.h"

namespace vmem::store::test {
namespace {

using core::Extent;
using core::kPage;

constexpr off_t kHead = 8 << 20;  // of a named file: signature, then a hole, then blocks

class SpaceTest : public testing::Test {
 protected:
  SpaceTest() {
    EngineOptions options;
    const core::Status status = make_engine(options, &engine_);
    EXPECT_TRUE(status.ok()) << status.text();
  }
  std::unique_ptr<Space> make(const std::string& paths, uint64_t budget = UINT64_MAX, bool direct = true) {
    SpaceOptions options;
    options.trim_delay = trim_delay_;
    options.full_delay = full_delay_;
    options.paths = paths;
    options.budget = budget;
    options.direct = direct;
    std::unique_ptr<Space> space;
    status_ = make_space(options, *engine_, &space);
    return space;
  }
  std::string file_path(const char* name) const { return dir_.path() + "/" + name; }
  static struct stat stat_of(const std::string& path) {
    struct stat st {};
    EXPECT_EQ(stat(path.c_str(), &st), 0) << path;
    return st;
  }
  // Waits for the trimmer, which works asynchronously.
  template <typename Condition>
  static bool eventually(Condition condition) {
    return vmem::test::eventually(condition);
  }

  std::chrono::milliseconds trim_delay_{20}, full_delay_{1000};
  TempDir dir_;
  std::unique_ptr<Engine> engine_;
  core::Status status_;
};

TEST_F(SpaceTest, BytesWrittenToExtentsComeBack) {
  auto space = make(dir_.path() + ":" + dir_.path());
  ASSERT_TRUE(status_.ok()) << status_.text();
  std::vector<Extent> extents(40);
  ASSERT_TRUE(space->allocate(3 * kPage, 1, extents).ok());
  Buffer written(40 * 3 * kPage), read(40 * 3 * kPage);
  std::mt19937_64 random(1);
  written.fill(random);
  for (const Io::Op op : {Io::Op::write, Io::Op::read}) {
    char* base = op == Io::Op::write ? written.data() : read.data();
    Batch batch;
    for (size_t n = 0; n < 40; ++n) {
      EXPECT_EQ(extents[n].length(), 3 * kPage);
      EXPECT_EQ(extents[n].codec(), 1u);
      batch.add(op, space->file(extents[n]), extents[n].offset(), base + n * 3 * kPage, 3 * kPage);
    }
    batch.submit(*engine_);
    batch.wait();
    for (const Io& io : batch.ios()) EXPECT_EQ(io.result, 0);
  }
  EXPECT_EQ(memcmp(written.data(), read.data(), written.size()), 0);
  EXPECT_EQ(space->used(), 40 * 3 * kPage);
}

TEST_F(SpaceTest, ARunOfExtentsLiesInOrderOnOnePath) {
  auto space = make(dir_.path() + ":" + dir_.path());
  ASSERT_TRUE(status_.ok()) << status_.text();
  std::vector<Extent> run(64);
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(space->allocate(kPage, 0, run).ok());
    for (size_t n = 1; n < run.size(); ++n) {
      EXPECT_EQ(run[n].path(), run[0].path());
      EXPECT_EQ(run[n].offset(), run[n - 1].offset() + kPage);
    }
  }
}

TEST_F(SpaceTest, PathsTakeTurns) {
  auto space = make(dir_.path() + ":" + dir_.path() + ":" + dir_.path());
  ASSERT_TRUE(status_.ok()) << status_.text();
  std::map<unsigned, int> count;
  Extent one;
  for (int n = 0; n < 30; ++n) {
    ASSERT_TRUE(space->allocate(kPage, 0, {&one, 1}).ok());
    ++count[one.path()];
  }
  EXPECT_EQ(count, (std::map<unsigned, int>{{0, 10}, {1, 10}, {2, 10}}));
}

TEST_F(SpaceTest, TheBudgetIsExactAndAllOrNothing) {
  auto space = make(dir_.path(), 10 * kPage);
  ASSERT_TRUE(status_.ok()) << status_.text();
  std::vector<Extent> extents(3);
  ASSERT_TRUE(space->allocate(3 * kPage, 0, extents).ok());
  EXPECT_EQ(space->used(), 9 * kPage);
  std::vector<Extent> two(2);
  const core::Status refused = space->allocate(kPage, 0, two);
  EXPECT_EQ(refused.code(), -ENOSPC);
  EXPECT_NE(refused.text().find("40 KiB"), std::string_view::npos) << refused.text();
  EXPECT_NE(refused.text().find("36 KiB"), std::string_view::npos) << refused.text();
  EXPECT_EQ(space->used(), 9 * kPage);
  EXPECT_TRUE(space->allocate(kPage, 0, std::span(two).first(1)).ok());
  EXPECT_EQ(space->used(), 10 * kPage);
  space->release(extents[1]);
  EXPECT_EQ(space->used(), 7 * kPage);
  space->set_budget(7 * kPage);
  EXPECT_EQ(space->allocate(kPage, 0, std::span(two).last(1)).code(), -ENOSPC);
  space->set_budget(8 * kPage);
  EXPECT_TRUE(space->allocate(kPage, 0, std::span(two).last(1)).ok());
}

TEST_F(SpaceTest, ExtentsOfEverySizeNeverOverlapAndFreedOnesAreReused) {
  auto space = make(file_path("store"));
  ASSERT_TRUE(status_.ok()) << status_.text();
  std::mt19937_64 random(5);
  std::map<uint64_t, Extent> live;  // by offset
  uint64_t used = 0;
  for (int n = 0; n < 6000; ++n) {
    if (live.empty() || random() % 100 < 52) {
      const size_t size = (1 + random() % (random() % 8 == 0 ? 600 : 20)) * kPage;
      std::vector<Extent> out(1 + random() % 6);
      ASSERT_TRUE(space->allocate(size, 0, out).ok());
      for (const Extent extent : out) {
        const auto [at, fresh] = live.emplace(extent.offset(), extent);
        ASSERT_TRUE(fresh);
        if (at != live.begin()) {
          ASSERT_LE(std::prev(at)->first + std::prev(at)->second.length(), extent.offset());
        }
        if (std::next(at) != live.end()) {
          ASSERT_GE(std::next(at)->first, extent.offset() + extent.length());
        }
        used += size;
      }
    } else {
      auto at = live.lower_bound(random() % (live.rbegin()->first + 1));
      used -= at->second.length();
      space->release(at->second);
      live.erase(at);
    }
    ASSERT_EQ(space->used(), used);
  }
  // Freed room was used again: the file is not much longer than the most that lived at once.
  const uint64_t before = static_cast<uint64_t>(stat_of(file_path("store")).st_size);
  std::vector<Extent> freed;
  for (int round = 0; round < 50; ++round) {
    Extent one;
    ASSERT_TRUE(space->allocate(64 * kPage, 0, {&one, 1}).ok());
    space->release(one);
  }
  EXPECT_EQ(static_cast<uint64_t>(stat_of(file_path("store")).st_size), before);
}

TEST_F(SpaceTest, ImpossibleSizesAreRefused) {
  auto space = make(dir_.path());
  ASSERT_TRUE(status_.ok()) << status_.text();
  Extent one;
  for (const size_t size : {size_t{0}, size_t{1}, kPage - 1, kPage + 512, core::kMaxBlock + 2 * kPage, SIZE_MAX}) {
    EXPECT_EQ(space->allocate(size, 0, {&one, 1}).code(), -EINVAL) << size;
  }
  EXPECT_EQ(space->allocate(kPage, 4, {&one, 1}).code(), -EINVAL);
  EXPECT_TRUE(space->allocate(core::kMaxBlock + kPage, 0, {&one, 1}).ok());
  EXPECT_TRUE(space->allocate(kPage, 0, {}).ok());
}

TEST_F(SpaceTest, AFileOfItsOwnIsLockedAndLeftAsLongAsItWas) {
  const std::string path = file_path("store");
  {
    auto space = make(path);
    ASSERT_TRUE(status_.ok()) << status_.text();
    Extent one;
    ASSERT_TRUE(space->allocate(core::kHugePage, 0, {&one, 1}).ok());
    EXPECT_GE(stat_of(path).st_size, static_cast<off_t>(core::kHugePage));
    EXPECT_EQ(stat_of(path).st_mode & 0777, 0600u);
    EXPECT_NE(space->describe(one).find(path), std::string::npos);
    EXPECT_NE(space->describe(one).find("offset 8388608"), std::string::npos);
    EXPECT_EQ(make(path), nullptr);
    EXPECT_EQ(status_.code(), -EBUSY);
    EXPECT_NE(status_.text().find(path), std::string_view::npos);
  }
  EXPECT_EQ(stat_of(path).st_size, 0);
  EXPECT_NE(make(path), nullptr) << status_.text();
}

std::string contents(const std::string& path) {
  std::string all(std::filesystem::file_size(path), '\0');  // in one read, for the sanitizers
  return std::ifstream(path, std::ios::binary).read(all.data(), static_cast<std::streamsize>(all.size())), all;
}

TEST_F(SpaceTest, AFileThatHoldsAnythingIsRefusedAndUntouched) {
  const std::string path = file_path("thesis.txt");
  for (const size_t size : {size_t{1}, size_t{5000}, size_t{100000}}) {
    const std::string text(size, 't');
    std::ofstream(path) << text;
    ASSERT_EQ(chmod(path.c_str(), 0600), 0);
    EXPECT_EQ(make(path), nullptr);
    EXPECT_EQ(status_.code(), -EEXIST);
    EXPECT_NE(status_.text().find(path), std::string_view::npos) << status_.text();
    EXPECT_TRUE(contents(path) == text);
  }
}

TEST_F(SpaceTest, AFileThatIsNotOursAloneIsRefused) {
  const std::string path = file_path("store");
  for (const mode_t mode : {0604, 0602, 0640, 0620, 0601, 0666, 0644}) {
    std::ofstream{path};
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
    EXPECT_EQ(make(path), nullptr) << mode;
    EXPECT_EQ(status_.code(), -EPERM);
    EXPECT_NE(status_.text().find("chmod 600"), std::string_view::npos) << status_.text();
    EXPECT_EQ(stat_of(path).st_size, 0);
  }
  // A caller that named another file by mistake is not told to change its mode.
  const std::string other = file_path("other");
  std::ofstream(other) << "root:x:0:0:";
  ASSERT_EQ(chmod(other.c_str(), 0644), 0);
  EXPECT_EQ(make(other), nullptr);
  EXPECT_NE(status_.text().find("others may open it. "), std::string_view::npos) << status_.text();
  EXPECT_EQ(contents(other), "root:x:0:0:");
  ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  EXPECT_NE(make(path), nullptr) << status_.text();
  ASSERT_EQ(link(path.c_str(), file_path("second").c_str()), 0);
  EXPECT_EQ(make(path), nullptr);
  EXPECT_EQ(status_.code(), -EPERM);
  ASSERT_EQ(unlink(file_path("second").c_str()), 0);
  ASSERT_EQ(symlink(path.c_str(), file_path("link").c_str()), 0);
  EXPECT_EQ(make(file_path("link")), nullptr);
  EXPECT_EQ(status_.code(), -ELOOP);
  ASSERT_EQ(symlink(file_path("nothing").c_str(), file_path("dangling").c_str()), 0);
  EXPECT_EQ(make(file_path("dangling")), nullptr);
  EXPECT_FALSE(std::filesystem::exists(file_path("nothing"))) << "a link to nothing makes nothing";
  ASSERT_EQ(symlink(dir_.path().c_str(), file_path("folder").c_str()), 0);
  EXPECT_NE(make(file_path("folder")), nullptr) << status_.text();
}

TEST_F(SpaceTest, AFileOfAnotherUserIsRefusedByRootAndByAnybody) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become two users";
  const std::string path = file_path("store");
  std::ofstream{path};
  ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  ASSERT_EQ(chown(path.c_str(), 65534, 65534), 0);
  EXPECT_EQ(make(path), nullptr) << "its owner could read root's memory there";
  EXPECT_EQ(status_.code(), -EPERM);
  EXPECT_NE(status_.text().find("another user"), std::string_view::npos) << status_.text();
  // A victim without privileges, and a file that a stranger left open for it.
  ASSERT_EQ(chown(path.c_str(), 1000, 1000), 0);
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  ASSERT_EQ(chmod(dir_.path().c_str(), 0777), 0);
  ASSERT_EQ(seteuid(65534), 0);
  const auto stranger = make(path);
  const core::Status status = status_;
  const auto own = make(file_path("own"));
  ASSERT_EQ(seteuid(0), 0);
  EXPECT_EQ(stranger, nullptr);
  EXPECT_EQ(status.code(), -EPERM);
  EXPECT_NE(own, nullptr) << status_.text();
}

// If the namespace has no number for the caller, a file's owner there looks like the caller. A user
// who can open the file now may not be able to a moment later.
TEST_F(SpaceTest, AFileThatMayBeAStrangersIsRefusedInAUserNamespace) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer lets no forked child start threads";
#endif
  if (geteuid() != 0) GTEST_SKIP() << "only root can become two users";
  static std::string path;
  static int opened[2], closed[2];
  path = file_path("store");
  std::ofstream{path};
  ASSERT_EQ(chown(path.c_str(), 61522, 61522), 0);
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  ASSERT_EQ(chmod(dir_.path().c_str(), 0755), 0);
  ASSERT_EQ(pipe2(opened, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(closed, O_CLOEXEC), 0);
  std::thread stranger([] {
    char c = 0;
    EXPECT_EQ(read(opened[0], &c, 1), 1);
    EXPECT_EQ(chmod(path.c_str(), 0600), 0);
    EXPECT_EQ(write(closed[1], "x", 1), 1);
  });
  const auto attempt = [&](const std::string& name, int code) {
    return [&, name, code] {
      (void)engine_.release();  // its threads are in the parent
      if (!make_engine(EngineOptions{}, &engine_).ok()) return 1;
      const auto space = make(name);
      fprintf(stderr, "%s\n", std::string(status_.text()).c_str());
      return status_.code() == code ? 0 : 2;
    };
  };
  core::step_hook = [](const char* step) {
    char c = 0;
    if (strcmp(step, "store.opened") != 0) return;
    if (write(opened[1], "x", 1) != 1 || read(closed[0], &c, 1) != 1) _exit(3);
  };
  const int unmapped = vmem::test::in_user_namespace(61521, "", attempt(path, -EPERM));
  core::step_hook = nullptr;
  if (unmapped != 0) {
    EXPECT_EQ(write(opened[1], "x", 1), 1);
  }
  stranger.join();
  if (unmapped == vmem::test::kNoUserNamespace) GTEST_SKIP() << "user namespaces are not permitted here";
  EXPECT_EQ(unmapped, 0);
  // A caller with a number there has files of its own.
  const std::string own = file_path("own");
  std::ofstream{own};
  ASSERT_EQ(chown(own.c_str(), 61521, 61521), 0);
  ASSERT_EQ(chmod(own.c_str(), 0600), 0);
  EXPECT_EQ(vmem::test::in_user_namespace(61521, "0 61521 1\n", attempt(own, 0)), 0);
}

TEST_F(SpaceTest, WhatAKilledOwnerLeftIsEmptied) {
  const std::string path = file_path("store");
  std::string left;
  {
    auto space = make(path);
    ASSERT_TRUE(status_.ok()) << status_.text();
    Extent one;
    ASSERT_TRUE(space->allocate(core::kHugePage, 0, {&one, 1}).ok());
    std::ofstream(path, std::ios::in | std::ios::out).seekp(kHead) << "secret";
    left = contents(path);
  }
  ASSERT_EQ(stat_of(path).st_size, 0);
  std::ofstream(path, std::ios::binary) << left;  // as if the owner had never ended
  auto space = make(path);
  ASSERT_TRUE(status_.ok()) << status_.text();
  EXPECT_EQ(stat_of(path).st_size, static_cast<off_t>(kPage));
  EXPECT_EQ(contents(path).find("secret"), std::string::npos);
}

// The first milliseconds: the page that tests direct I/O, or part of a signature.
TEST_F(SpaceTest, WhatAnOwnerLeftThatWasKilledAtItsBeginningIsEmptied) {
  const std::string path = file_path("store");
  ASSERT_NE(make(path), nullptr);
  std::string signature;
  {
    auto space = make(path);
    signature = contents(path).substr(0, 64);
  }
  const auto leave = [&](const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  };
  for (const std::string& left : {std::string(kPage, '\0'), std::string(512, '\0'),
                                  signature.substr(0, 40) + std::string(kPage - 40, '\0'), signature.substr(0, 40)}) {
    leave(left);
    auto space = make(path);
    EXPECT_TRUE(status_.ok()) << left.size() << ": " << status_.text();
    EXPECT_EQ(contents(path).substr(0, 64), signature);
  }
  // These may be in other use.
  for (const std::string& somebodys :
       {std::string(kPage + 1, '\0'), signature.substr(0, 4), signature.substr(0, 40) + "and more",
        std::string(kPage - 1, '\0') + "x", signature.substr(0, 40) + std::string(kPage, '\0')}) {
    leave(somebodys);
    EXPECT_EQ(make(path), nullptr) << somebodys.size();
    EXPECT_EQ(status_.code(), -EEXIST);
    EXPECT_TRUE(contents(path) == somebodys);
  }
  leave(std::string(kPage, '\0'));
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  EXPECT_EQ(make(path), nullptr) << "not ours alone";
  EXPECT_EQ(status_.code(), -EPERM);
}

TEST_F(SpaceTest, ALimitOnFileSizeBelowAPageIsAnErrorAndNotADeath) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{100, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  make(dir_.path());
  const int in_folder = status_.code();
  make(file_path("store"), UINT64_MAX, false);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(in_folder, -EFBIG);
  EXPECT_EQ(status_.code(), -EFBIG) << status_.text();
}

TEST_F(SpaceTest, ATmpdirThatIsMissingBecomesNoFile) {
  const char* const before = getenv("TMPDIR");
  const std::string kept = before != nullptr ? before : "";
  for (const char* end : {"", "/"}) {
    setenv("TMPDIR", (file_path("gone") + end).c_str(), 1);
    EXPECT_EQ(make(""), nullptr);
    EXPECT_EQ(status_.code(), -ENOENT);
    EXPECT_NE(status_.text().find("gone"), std::string_view::npos) << status_.text();
    EXPECT_FALSE(std::filesystem::exists(file_path("gone")));
  }
  setenv("TMPDIR", dir_.path().c_str(), 1);
  EXPECT_NE(make(""), nullptr) << status_.text();
  before != nullptr ? setenv("TMPDIR", kept.c_str(), 1) : unsetenv("TMPDIR");
}

TEST_F(SpaceTest, RoomLaidOutBeforehandStaysAsItWas) {
  const std::string path = file_path("store");
  constexpr off_t kLaidOut = kHead + (8 << 20);
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  const bool laid_out = fallocate(fd, 0, 0, kLaidOut) == 0;
  close(fd);
  if (!laid_out) GTEST_SKIP() << "this file system reserves no room";
  std::string left;
  for (int round = 0; round < 3; ++round) {
    auto space = make(path);
    ASSERT_TRUE(status_.ok()) << status_.text();
    std::vector<Extent> some(8);
    ASSERT_TRUE(space->allocate(core::kHugePage, 0, some).ok());
    if (round == 1) left = contents(path);
    space.reset();
    EXPECT_EQ(stat_of(path).st_size, kLaidOut);
    if (round == 1) std::ofstream(path, std::ios::binary) << left;  // killed
  }
}

TEST_F(SpaceTest, ADirectoryShowsNoFile) {
  auto space = make(dir_.path());
  ASSERT_TRUE(status_.ok()) << status_.text();
  Extent one;
  ASSERT_TRUE(space->allocate(core::kHugePage, 0, {&one, 1}).ok());
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path()));
}

TEST_F(SpaceTest, WrongPathsAreRefusedByName) {
  EXPECT_EQ(make(":::"), nullptr);
  EXPECT_EQ(status_.code(), -EINVAL);
  EXPECT_EQ(make(file_path("no/such/place")), nullptr);
  EXPECT_EQ(status_.code(), -ENOENT);
  EXPECT_NE(status_.text().find("no/such/place"), std::string_view::npos);
  EXPECT_EQ(make(file_path("missing/")), nullptr);
  EXPECT_EQ(status_.code(), -ENOENT);
  ASSERT_EQ(mkfifo(file_path("fifo").c_str(), 0600), 0);
  EXPECT_EQ(make(file_path("fifo")), nullptr);
  EXPECT_EQ(status_.code(), -EINVAL);
  EXPECT_EQ(make("/dev/null"), nullptr);
  EXPECT_EQ(status_.code(), -EINVAL);
  std::string many;
  for (unsigned n = 0; n <= core::kMaxStorePaths; ++n) many += dir_.path() + ":";
  EXPECT_EQ(make(many), nullptr);
  EXPECT_EQ(status_.code(), -EINVAL);
}

TEST_F(SpaceTest, AFullFileSystemIsSaidToBeFullAndNothingLeaks) {
  SmallTmpfs disk(64);
  if (!disk.ok()) GTEST_SKIP() << "a small tmpfs cannot be mounted: " << disk.why();
  auto space = make(disk.path());
  ASSERT_TRUE(status_.ok()) << status_.text();
  std::vector<Extent> extents(128);
  ASSERT_TRUE(space->allocate(kPage, 0, extents).ok()) << "tmpfs gives no room ahead of use";
  Buffer buffer(128 * kPage);
  Batch batch;
  for (size_t n = 0; n < extents.size(); ++n) {
    batch.add(Io::Op::write, space->file(extents[n]), extents[n].offset(), buffer.data() + n * kPage, kPage);
  }
  batch.submit(*engine_);
  batch.wait();
  int full = 0;
  for (const Io& io : batch.ios()) full += io.result == -ENOSPC;
  EXPECT_EQ(full, 64);
}

TEST_F(SpaceTest, APathThatIsFullIsLeftAloneWhileAnotherHasRoom) {
  full_delay_ = std::chrono::hours(1);
  auto space = make(dir_.path() + ":" + dir_.path());
  ASSERT_TRUE(status_.ok()) << status_.text();
  std::vector<Extent> two(2);
  for (Extent& one : two) ASSERT_TRUE(space->allocate(core::kHugePage, 0, {&one, 1}).ok());
  ASSERT_NE(two[0].path(), two[1].path());
  const unsigned full = two[0].path();
  space->refuse(two[0]);
  EXPECT_EQ(space->used(), core::kHugePage);
  EXPECT_TRUE(space->expected_to_fail(two[0]));
  EXPECT_FALSE(space->expected_to_fail(two[1]));
  std::vector<Extent> more(100), run(16);
  for (Extent& one : more) ASSERT_TRUE(space->allocate(kPage, 0, {&one, 1}).ok());
  ASSERT_TRUE(space->allocate(kPage, 0, run).ok());
  more.insert(more.end(), run.begin(), run.end());
  for (const Extent one : more) EXPECT_NE(one.path(), full);
  // When all are full, they are tried nevertheless: another process may have made room.
  space->refuse(two[1]);
  EXPECT_TRUE(space->allocate(kPage, 0, {&two[0], 1}).ok());
}

TEST_F(SpaceTest, APathThatWasFullIsTriedAgain) {
  full_delay_ = std::chrono::milliseconds(0);
  auto space = make(dir_.path() + ":" + dir_.path());
  ASSERT_TRUE(status_.ok()) << status_.text();
  Extent one;
  ASSERT_TRUE(space->allocate(kPage, 0, {&one, 1}).ok());
  const unsigned full = one.path();
  space->refuse(one);
  for (unsigned n = 0; n < 2; ++n) {
    ASSERT_TRUE(space->allocate(kPage, 0, {&one, 1}).ok());
    if (one.path() == full) return;
  }
  ADD_FAILURE() << "two paths take turns";
}

TEST_F(SpaceTest, WhatIsFreedGoesBackToTheFileSystem) {
  const std::string path = file_path("store");
  auto space = make(path);
  ASSERT_TRUE(status_.ok()) << status_.text();
  std::vector<Extent> extents(80);  // 160 MiB, reserved but not written
  ASSERT_TRUE(space->allocate(core::kHugePage, 0, extents).ok());
  Extent last;
  ASSERT_TRUE(space->allocate(core::kHugePage, 0, {&last, 1}).ok());
  const auto on_disk = [&] { return static_cast<uint64_t>(stat_of(path).st_blocks) * 512; };
  const uint64_t before = on_disk();
  for (const Extent extent : extents) space->release(extent);
  if (before >= 160 * (uint64_t{1} << 20)) {
    EXPECT_TRUE(eventually([&] { return on_disk() <= before - 150 * (uint64_t{1} << 20); })) << on_disk();
  }
  space->release(last);
  EXPECT_TRUE(eventually([&] { return stat_of(path).st_size == kHead; }));
  ASSERT_TRUE(space->allocate(core::kHugePage, 0, {&last, 1}).ok());
  EXPECT_EQ(last.offset(), uint64_t{kHead});
}

TEST_F(SpaceTest, WhatIsFreedIsKeptForAWhile) {
  const std::string path = file_path("store");
  trim_delay_ = std::chrono::hours(1);
  auto space = make(path);
  ASSERT_TRUE(status_.ok()) << status_.text();
  std::vector<Extent> extents(80);
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(space->allocate(core::kHugePage, 0, extents).ok());
    const auto there = stat_of(path);
    for (const Extent extent : extents) space->release(extent);
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    EXPECT_EQ(stat_of(path).st_size, there.st_size);
    EXPECT_EQ(stat_of(path).st_blocks, there.st_blocks);
  }
}

TEST_F(SpaceTest, AFileThatCannotGrowGivesBackWhatIsFreeInItAtOnce) {
  const std::string path = file_path("store");
  trim_delay_ = std::chrono::hours(1);
  auto space = make(path);
  ASSERT_TRUE(status_.ok()) << status_.text();
  std::vector<Extent> extents(128);  // half of them are freed, in runs of 16 MiB
  ASSERT_TRUE(space->allocate(core::kHugePage, 0, extents).ok());
  const auto before = stat_of(path);
  if (before.st_blocks * 512 < before.st_size - kHead) GTEST_SKIP() << "this file system reserves no room";
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small{static_cast<rlim_t>(before.st_size), limit.rlim_max};
  for (size_t n = 0; n < extents.size(); ++n)
    if (n / 8 % 2 == 0) space->release(extents[n]);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  Extent one;
  const core::Status refused = space->allocate(core::kMaxBlock, 0, {&one, 1});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_EQ(refused.code(), -ENOSPC);
  EXPECT_TRUE(eventually([&] { return stat_of(path).st_blocks <= before.st_blocks - 100 * ((1 << 20) / 512); }));
}

TEST_F(SpaceTest, AFileThatCannotGrowRefusesAllOrNothing) {
  auto space = make(file_path("store"));
  ASSERT_TRUE(status_.ok()) << status_.text();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{kHead + 64 * kPage, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::vector<Extent> fits(60), too_many(5);
  const core::Status first = space->allocate(kPage, 0, fits);
  const core::Status second = space->allocate(kPage, 0, too_many);
  const uint64_t used = space->used();
  const core::Status rest = space->allocate(kPage, 0, std::span(too_many).first(4));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(first.ok()) << first.text();
  EXPECT_EQ(second.code(), -ENOSPC);
  EXPECT_NE(second.text().find(file_path("store")), std::string_view::npos) << second.text();
  EXPECT_NE(second.text().find("File too large"), std::string_view::npos) << second.text();
  EXPECT_EQ(used, 60 * kPage);
  EXPECT_TRUE(rest.ok()) << rest.text();
  Extent one;
  EXPECT_TRUE(space->allocate(core::kMaxBlock, 0, {&one, 1}).ok()) << "it grows again once it may";
}

TEST_F(SpaceTest, FragmentsServeARunThatFitsNowhereInOnePiece) {
  auto space = make(file_path("store"));
  ASSERT_TRUE(status_.ok()) << status_.text();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{kHead + 64 * kPage, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::vector<Extent> all(64), run(32);
  const core::Status first = space->allocate(kPage, 0, all);
  for (size_t n = 0; n < all.size(); n += 2) space->release(all[n]);
  const core::Status second = space->allocate(kPage, 0, run);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(first.ok()) << first.text();
  EXPECT_TRUE(second.ok()) << second.text();
  for (const Extent extent : run) EXPECT_EQ((extent.offset() - kHead) / kPage % 2, 0u);
  EXPECT_EQ(space->used(), 64 * kPage);
}

TEST_F(SpaceTest, WhatIsNotInUseIsNotReleased) {
  auto space = make(dir_.path());
  ASSERT_TRUE(status_.ok()) << status_.text();
  Extent one;
  ASSERT_TRUE(space->allocate(4 * kPage, 0, {&one, 1}).ok());
  core::set_log_sink([](int, const char*, void*) {}, nullptr);
  space->release(Extent{});
  space->release(Extent::make(77, 0, kPage, 0));
  space->release(Extent::make(0, 3 * kPage, 4 * kPage, 0));
  EXPECT_EQ(space->used(), 4 * kPage);
  space->release(one);
  space->release(one);
  core::set_log_sink(nullptr, nullptr);
  EXPECT_EQ(space->used(), 0u);
}

void linger(const char* step) {
  if (strncmp(step, "space.", 6) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
}

TEST_F(SpaceTest, ThreadsNeverShareAPageWhileFilesGrowShrinkAndGetHoles) {
  constexpr uint64_t kBudget = uint64_t{400} << 20;
  auto space = make(file_path("a") + ":" + file_path("b"), kBudget);
  ASSERT_TRUE(status_.ok()) << status_.text();
  core::step_hook = linger;
  std::vector<std::vector<std::atomic<bool>>> taken(2);
  for (auto& path : taken) path = std::vector<std::atomic<bool>>(size_t{1} << 19);
  std::atomic<int> shared{0}, refused{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      const auto claim = [&](Extent extent, bool value) {
        for (uint64_t page = 0; page < extent.length() / kPage; ++page) {
          shared += taken[extent.path()][extent.offset() / kPage + page].exchange(value) == value;
        }
      };
      for (int round = 0; round < 6; ++round) {
        std::vector<Extent> mine;
        for (int n = 0; n < 60; ++n) {
          std::vector<Extent> some(1 + random() % 3);
          if (!space->allocate((1 + random() % 512) * kPage, 0, some).ok()) {
            ++refused;
            continue;
          }
          for (const Extent extent : some) claim(extent, true);
          mine.insert(mine.end(), some.begin(), some.end());
        }
        std::shuffle(mine.begin(), mine.end(), random);
        for (const Extent extent : mine) {
          claim(extent, false);
          space->release(extent);
        }
        if (round % 3 == 2) std::this_thread::sleep_for(std::chrono::milliseconds(150));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(shared.load(), 0);
  EXPECT_EQ(space->used(), 0u);
  EXPECT_TRUE(
      eventually([&] { return stat_of(file_path("a")).st_size == kHead && stat_of(file_path("b")).st_size == kHead; }));
  space.reset();
  core::step_hook = nullptr;
}

// On a file system without O_TMPFILE the file has a name for a moment.
TEST_F(SpaceTest, AFileThatGotASecondNameWhileItHadOneIsRefused) {
  int fd = -1;
  core::Status status = open_and_unlink(dir_.path(), &fd);
  ASSERT_TRUE(status.ok()) << status.text();
  struct stat st {};
  ASSERT_EQ(fstat(fd, &st), 0);
  EXPECT_EQ(st.st_nlink, 0u);
  EXPECT_EQ(st.st_mode & 0777, 0600u);
  close(fd);
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path()));
  static std::string folder;
  folder = dir_.path();
  core::step_hook = [](const char* step) {
    if (strcmp(step, "store.named") != 0) return;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      EXPECT_EQ(link(entry.path().c_str(), (folder + "/kept").c_str()), 0);
  };
  status = open_and_unlink(dir_.path(), &fd);
  core::step_hook = nullptr;
  EXPECT_EQ(status.code(), -EPERM) << status.text();
  EXPECT_EQ(fd, -1);
  EXPECT_EQ(std::filesystem::file_size(folder + "/kept"), 0u);
}

}  // namespace
}  // namespace vmem::store::test
