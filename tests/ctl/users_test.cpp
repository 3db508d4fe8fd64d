// Root beside other users, some with live processes. vmemctl status shows each of them every time,
// however many paths lead to one folder, and in any order of the folders' readers.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>

#include "publish/publisher.h"
#include "support.h"

namespace {

using namespace ctltest;
using nlohmann::json;
namespace publish = vmem::publish;

// Unused ids, which differ between runs of these tests at the same time.
const uid_t kFirst = 66000 + 4 * static_cast<uid_t>(getpid() % 2000);

std::string home_of(uid_t user) {
  return "/dev/shm/vmem-" + std::to_string(user);
}

// The number of runs: a few dozen, or VMEMCTL_RUNS.
size_t runs() {
  const char* said = getenv("VMEMCTL_RUNS");
  return said != nullptr ? strtoul(said, nullptr, 10) : 40;
}

// It answers slowly: a second reader of its folder, which finds the first one reading, ends first.
std::unique_ptr<publish::Publisher> publisher(const std::string& where) {
  publish::Source source;
  source.take = [](publish::Snapshot* s) {
    usleep(20000);
    s->header.stats.faults = 42;
  };
  source.set = [](const std::atomic<bool>&, const std::string&, const std::string&) { return vmem::core::Status(); };
  source.get = [](const std::atomic<bool>&, const std::string&, std::string*) { return vmem::core::Status(); };
  std::unique_ptr<publish::Publisher> out;
  const vmem::core::Status s = publish::Publisher::start(source, where, &out);
  EXPECT_TRUE(s.ok()) << s.text();
  return out;
}

// Run by the test below as a user of its own.
TEST(UsersChild, DISABLED_Live) {
  const auto published = publisher("");
  printf("ready\n");
  fflush(stdout);
  for (;;) pause();
}

class CtlUsers : public ::testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "needs root, to become other users";
    clean();
    ASSERT_EQ(chmod(place_.path().c_str(), 0755), 0);
    std::filesystem::copy_file("/proc/self/exe", place_ / "tests");
  }
  void TearDown() override {
    if (geteuid() == 0) clean();
  }
  static void clean() {
    std::error_code ignored;
    for (uid_t i = 0; i < 4; ++i) std::filesystem::remove_all(home_of(kFirst + i), ignored);
  }
  std::unique_ptr<Running> live(uid_t user) const {
    return std::make_unique<Running>(
        std::vector<std::string>{"env", "-u", "XDG_RUNTIME_DIR", place_ / "tests",
                                 "--gtest_filter=UsersChild.DISABLED_Live", "--gtest_also_run_disabled_tests"},
        user);
  }
  static void make_home(uid_t user) {
    ASSERT_EQ(mkdir(home_of(user).c_str(), 0700), 0);
    ASSERT_EQ(chown(home_of(user).c_str(), user, user), 0);
  }
  // Returns the output of `count` runs of vmemctl status, one per line. They see root's folder
  // under `paths` more names.
  std::string statuses(size_t count, size_t paths) const {
    const std::string script =
        "for i in $(seq " + std::to_string(count) + "); do " + tool() + " status --json --seconds 0 || exit; done";
    const std::string again = "mkdir -p $0/vmem && mount --bind " + place_.path() + " $0 && mkdir -p $0/vmem && ";
    const std::string bound = paths == 0 ? "" : again + "mount --bind /dev/shm/vmem-0 $0/vmem && ";
    const Ran ran =
        run({"unshare", "--mount", "sh", "-c", bound + "XDG_RUNTIME_DIR=$0; export XDG_RUNTIME_DIR; " + script,
             paths == 0 ? "/nowhere" : place_ / "again"});
    EXPECT_EQ(ran.status, 0) << ran.err;
    return ran.out;
  }

  TempFolder place_;
};

TEST_F(CtlUsers, AreAllShownEveryTime) {
  if (IsSkipped()) return;
  if (run({"unshare", "--mount", "true"}).status != 0) GTEST_SKIP() << "needs a mount namespace";
  const auto mine = publisher("/dev/shm/vmem-0");
  ASSERT_TRUE(mine != nullptr);
  const auto one = live(kFirst), two = live(kFirst + 1);
  ASSERT_TRUE(one->says("ready"));
  ASSERT_TRUE(two->says("ready"));
  {  // one user's process has died, and one user's folder is empty
    const auto dead = live(kFirst + 2);
    ASSERT_TRUE(dead->says("ready"));
  }
  make_home(kFirst + 3);
  const std::map<pid_t, uid_t> wanted = {{getpid(), 0}, {one->pid(), kFirst}, {two->pid(), kFirst + 1}};
  for (const size_t paths : {0, 1}) {
    size_t lines = 0, wrong = 0;
    std::istringstream said(statuses(runs() / 2, paths));
    std::string example;
    for (std::string line; std::getline(said, line); ++lines) {
      const json all = json::parse(line);
      std::map<pid_t, uid_t> seen;
      bool once = true;
      for (const json& p : all["processes"]) {
        const uid_t user = p["user"];
        if (wanted.contains(p["pid"]) || (user >= kFirst && user < kFirst + 4))
          once = seen.emplace(p["pid"], user).second && once;
      }
      for (const json& f : all["forged"]) once = once && (f["user"] < kFirst || f["user"] >= kFirst + 4);
      if (once && seen == wanted) continue;
      ++wrong;
      example = line;
    }
    EXPECT_EQ(lines, runs() / 2);
    EXPECT_EQ(wrong, 0u) << "of " << lines << " runs, with " << paths << " more paths to root's folder: " << example;
  }
}

}  // namespace
