// Publications of hostile users: what vmemctl believes, shows, counts, asks and removes. Root looks
// at two made-up users, one of them honest; the honest one looks at the other.
#include <linux/sched.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <sstream>

#include "common/patience.h"
#include "publish/publisher.h"
#include "support.h"

namespace {

using namespace ctltest;
using nlohmann::json;
namespace publish = vmem::publish;

// Unused ids, which differ between runs of these tests at the same time.
const uid_t kMallory = 61000 + 2 * static_cast<uid_t>(getpid() % 2000), kAlice = kMallory + 1;

std::string home_of(uid_t user) {
  return "/dev/shm/vmem-" + std::to_string(user);
}

std::string name_of(pid_t pid, unsigned n) {
  char text[64];
  snprintf(text, sizeof text, "%d-%016x", pid, n);
  return text;
}

// Writes a publication as another process would. It counts as alive as long as this process lives.
void forge_file(int folder, const std::string& name, uint32_t pid, uid_t user, const std::string& command) {
  publish::Snapshot s;
  s.header.pid = pid;
  s.header.uid = user;
  s.header.pid_namespace = publish::pid_namespace();
  s.header.start_ticks = publish::start_ticks(static_cast<pid_t>(pid));
  publish::put_text(s.header.command, command);
  s.header.stats.faults = 666;
  s.regions.resize(2);  // one number
  s.devices.resize(2);
  std::vector<std::byte> bytes;
  publish::pack(s, &bytes);
  const int fd = openat(folder, name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()) || !publish::mark_alive(fd)) _exit(3);
}

int listen_as(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  publish::put_text(address.sun_path, path);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || listen(fd, 64) != 0) _exit(4);
  chmod(path.c_str(), 0600);
  return fd;
}

void forge(int folder, const std::string& name, uint32_t pid, uid_t user, const std::string& command) {
  forge_file(folder, name, pid, user, command);
  listen_as(home_of(geteuid()) + "/" + name + ".sock");
}

// Waits until the test ends or kills it.
[[noreturn]] void stay() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  printf("ready\n");
  fflush(stdout);
  for (;;) pause();
}

// Run by the tests below as kMallory. VICTIM: a process of kAlice; ROOT: a process of root.
TEST(HostileChild, DISABLED_Mallory) {
  const std::string home = home_of(geteuid());
  ASSERT_EQ(mkdir(home.c_str(), 0700), 0);
  const int folder = open(home.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const pid_t victim = atoi(getenv("VICTIM")), root = atoi(getenv("ROOT"));
  const auto me = geteuid(), alice = me + 1;
  const auto u = [](pid_t p) { return static_cast<uint32_t>(p); };
  forge(folder, name_of(victim, 1), u(victim), alice, "as of alice");
  forge(folder, name_of(victim, 2), u(victim), me, "alice's, mine");
  forge(folder, name_of(root, 3), u(root), 0, "as of root");
  forge(folder, name_of(getpid(), 4), u(victim), alice, "name and header");
  forge(folder, name_of(getpid(), 5), u(getpid()), 0, "root, it says");
  forge_file(folder, name_of(root, 6), u(root), 0, "a link");
  const std::string others = getenv("ELSEWHERE");  // a socket of root
  ASSERT_EQ(symlink(others.c_str(), (home + "/" + name_of(root, 6) + ".sock").c_str()), 0);
  forge_file(folder, name_of(root, 7), u(root), 0, "nobody there");
  // Publishes 240 of its own, of which one may be shown. With the others that is the most that
  // vmemctl reads of a folder; beyond that, the process numbers decide which are left out.
  const char* const many = getenv("MANY");
  for (unsigned i = 0, all = many != nullptr ? static_cast<unsigned>(atoi(many)) : 240; i < all; ++i) {
    forge(folder, name_of(getpid(), 0x1000 + i), u(getpid()), me, "\xe2\x80\xaemine");
  }
  stay();
}

// Run as kAlice: does what an honest process does, without the runtime.
TEST(HostileChild, DISABLED_Alice) {
  publish::Source source;
  source.take = [](publish::Snapshot* s) { s->header.stats.faults = 42; };
  source.set = [](const std::atomic<bool>&, const std::string&, const std::string&) { return vmem::core::Status(); };
  source.get = [](const std::atomic<bool>&, const std::string&, std::string* value) {
    *value = "of alice";
    return vmem::core::Status();
  };
  std::unique_ptr<publish::Publisher> publisher;
  const vmem::core::Status s = publish::Publisher::start(source, "", &publisher);
  ASSERT_TRUE(s.ok()) << s.text();
  stay();
}

// Run as root: makes a pid namespace in which process INNER, owned by MALLORY, does what Alice
// does. Prints its pid outside.
TEST(HostileChild, DISABLED_Container) {
  pid_t inner = atoi(getenv("INNER"));
  if (unshare(CLONE_NEWPID) != 0) {
    printf("not permitted\n");
    return;
  }
  if (fork() == 0) {  // the first process of the namespace: when it ends, all others end
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) pause();
  }
  clone_args args{};
  args.exit_signal = SIGCHLD;
  args.set_tid = reinterpret_cast<uintptr_t>(&inner);
  args.set_tid_size = 1;
  const long pid = syscall(SYS_clone3, &args, sizeof args);
  ASSERT_GE(pid, 0) << strerrordesc_np(errno);
  if (pid == 0) {
    const auto user = static_cast<uid_t>(atoi(getenv("MALLORY")));
    if (setgid(user) != 0 || setuid(user) != 0) _exit(5);
    execl(getenv("TESTS"), getenv("TESTS"), "--gtest_filter=HostileChild.DISABLED_Alice",
          "--gtest_also_run_disabled_tests", nullptr);
    _exit(6);
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  printf("%ld\n", pid);
  fflush(stdout);
  for (;;) pause();
}

class Hostile : public ::testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "needs root, to become two other users";
    clean();
    unsetenv("XDG_RUNTIME_DIR");
    ASSERT_EQ(chmod(place_.path().c_str(), 0755), 0);
    std::filesystem::copy_file(tool(), place_ / "vmemctl");
    std::filesystem::copy_file("/proc/self/exe", place_ / "tests");
    alice_ = child("Alice", kAlice);
    ASSERT_TRUE(alice_->says("ready"));
    elsewhere_ = listen_as(place_ / "elsewhere");
    setenv("VICTIM", std::to_string(alice_->pid()).c_str(), 1);
    setenv("ROOT", std::to_string(getpid()).c_str(), 1);
    setenv("ELSEWHERE", (place_ / "elsewhere").c_str(), 1);
    publish_as_mallory();
  }
  virtual void publish_as_mallory() {
    mallory_ = child("Mallory", kMallory);
    ASSERT_TRUE(mallory_->says("ready"));
  }
  void TearDown() override {
    mallory_.reset();
    alice_.reset();
    close(elsewhere_);
    if (geteuid() == 0) clean();
  }
  static void clean() {
    std::error_code ignored;
    for (const uid_t user : {kMallory, kAlice}) std::filesystem::remove_all(home_of(user), ignored);
  }
  std::unique_ptr<Running> child(const std::string& who, uid_t user) const {
    return std::make_unique<Running>(
        std::vector<std::string>{place_ / "tests", "--gtest_filter=HostileChild.DISABLED_" + who,
                                 "--gtest_also_run_disabled_tests"},
        user);
  }
  Ran ctl(std::vector<std::string> words, uid_t user = 0) const {
    words.insert(words.begin(), place_ / "vmemctl");
    return run(words, user);
  }

  TempFolder place_;
  int elsewhere_ = -1;
  std::unique_ptr<Running> alice_, mallory_;
};

TEST_F(Hostile, WhatIsForgedIsShownAsSuchAndHidesNobody) {
  if (IsSkipped()) return;
  const auto start = std::chrono::steady_clock::now();
  const Ran ran = ctl({"status", "--json"});
  // It once took ten minutes: a second for each silent process, twice.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json all = ran.json();
  std::map<uid_t, std::vector<json>> of;
  for (const json& p : all["processes"]) of[p["user"].get<uid_t>()].push_back(p);
  ASSERT_EQ(of[kAlice].size(), 1u);
  EXPECT_EQ(of[kAlice][0]["pid"], alice_->pid());
  EXPECT_EQ(of[kAlice][0]["stats"]["faults"], 42);
  // The one existing process has one row, and no row appears under another user's name.
  ASSERT_EQ(of[kMallory].size(), 1u);
  EXPECT_EQ(of[kMallory][0]["pid"], mallory_->pid());
  EXPECT_EQ(of[kMallory][0]["regions"].size(), 1u);
  for (const json& p : of[0]) EXPECT_NE(p["pid"], getpid());
  std::map<std::string, std::string> why;
  size_t again = 0;
  for (const json& f : all["forged"]) {
    EXPECT_EQ(f["user"], kMallory);
    const std::string file = f["file"], reason = f["why"];
    why[file.substr(file.rfind('/') + 1)] = reason;
    again += reason.find("another publication") != std::string::npos;
  }
  const auto says = [&](pid_t pid, unsigned n, const char* words) {
    EXPECT_NE(why[name_of(pid, n)].find(words), std::string::npos) << n << ": " << why[name_of(pid, n)];
  };
  const pid_t victim = alice_->pid();
  says(victim, 1, "answers for it");
  says(victim, 2, "answers for it");
  says(getpid(), 3, "answers for it");
  says(mallory_->pid(), 4, "its header after process");
  says(mallory_->pid(), 5, "which is not user");
  says(getpid(), 6, "its socket is none of user");
  says(getpid(), 7, "no process answers");
  EXPECT_GT(again, 200u);
  // Text output names them too, in a few lines for all, without control characters.
  const Ran text = ctl({"status", "--seconds", "0"});
  EXPECT_NE(text.out.find("FORGED by user " + std::to_string(kMallory)), std::string::npos) << text.out;
  EXPECT_EQ(text.out.find("as of root"), std::string::npos) << text.out;
  EXPECT_EQ(text.out.find("\xe2\x80\xae"), std::string::npos) << "turned the rest of the line around";
  EXPECT_NE(text.out.find("?mine"), std::string::npos) << text.out;
  size_t lines = 0;
  std::istringstream in(text.out);
  for (std::string line; std::getline(in, line);) lines += line.rfind("FORGED", 0) == 0;
  EXPECT_LE(lines, 4u) << text.out;
  // top has one line for them.
  const Ran top = ctl({"top", "--once", "--interval", "0.1", "--columns", "100"});
  lines = 0;
  in = std::istringstream(top.out);
  for (std::string line; std::getline(in, line);) lines += line.find("FORGED") != std::string::npos;
  EXPECT_EQ(lines, 1u) << top.out;
  EXPECT_NE(top.out.find(std::to_string(kMallory), top.out.find(" FORGED, by user")), std::string::npos) << top.out;
  // vmemctl sent no request through a link.
  pollfd someone{elsewhere_, POLLIN, 0};
  EXPECT_EQ(poll(&someone, 1, 0), 0) << "root's socket was reached through a link of another user";
}

TEST_F(Hostile, AFolderWithTooManyPublicationsIsReadInPartAndSaysSo) {
  if (IsSkipped()) return;
  std::vector<int> open_files;  // files that no process keeps open are removed
  for (unsigned i = 0; i < 60; ++i) {
    const std::string name = home_of(kMallory) + "/" + name_of(1, i);
    const int fd = open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    ASSERT_GE(fd, 0);
    open_files.push_back(fd);
    ASSERT_EQ(fchown(fd, kMallory, kMallory), 0);
    ASSERT_TRUE(publish::mark_alive(fd));
  }
  const Ran ran = ctl({"status", "--seconds", "0"});
  EXPECT_EQ(ran.status, 0) << ran.err;
  const std::string all = ran.out + ran.err;
  EXPECT_NE(all.find(home_of(kMallory) + ": 51 publications there are more than 256 in a folder"), std::string::npos)
      << all;
  EXPECT_NE(all.find(std::to_string(alice_->pid())), std::string::npos) << "others are read all the same";
  for (const int fd : open_files) close(fd);
}

TEST_F(Hostile, TuneAsksTheProcessAndNotWhoClaimsToBeIt) {
  if (IsSkipped()) return;
  const Ran real = ctl({"tune", "--pid", std::to_string(alice_->pid()), "readahead"});
  EXPECT_EQ(real.status, 0) << real.err;
  EXPECT_EQ(real.out, "readahead=of alice\n");
  const Ran root = ctl({"tune", "--pid", std::to_string(getpid()), "readahead=1MiB"});
  EXPECT_EQ(root.status, 3) << root.out;
  EXPECT_NE(root.err.find("FORGED by user " + std::to_string(kMallory)), std::string::npos) << root.err;
}

// Returns the kernel's letter for the state of a process; 0: there is none.
char state_of(pid_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(in, text);
  const size_t end = text.rfind(')');
  return end != std::string::npos && end + 2 < text.size() ? text[end + 2] : '\0';
}

// Alice's process as above; each test starts its own processes of kMallory.
class HostileOther : public Hostile {
 protected:
  void publish_as_mallory() override {}
};

// Seen by root, and by the other user, who is shown only her own processes.
TEST_F(HostileOther, ThreeHundredPublicationsThatNobodyAnswersForDelayStatusByLessThanASecond) {
  if (IsSkipped()) return;
  const auto seconds = [this](uid_t user) {
    double best = 1e9;  // excludes other load on the machine
    for (int i = 0; i < 3; ++i) {
      const auto start = std::chrono::steady_clock::now();
      const Ran ran = ctl({"status", "--json", "--seconds", "0"}, user);
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      EXPECT_EQ(ran.status, 0) << ran.err;
      const json all = ran.json()["processes"];
      const bool there = std::any_of(all.begin(), all.end(), [&](const json& p) {
        return p["pid"] == alice_->pid() && p["user"] == kAlice && p["stats"]["faults"] == 42;
      });
      EXPECT_TRUE(there) << "an honest user's row: " << ran.out.substr(0, 2000);
    }
    return best;
  };
  const double root = seconds(0), alice = seconds(kAlice);
  setenv("MANY", "300", 1);
  mallory_ = child("Mallory", kMallory);
  unsetenv("MANY");
  ASSERT_TRUE(mallory_->says("ready"));
  const double root_beside = seconds(0), alice_beside = seconds(kAlice);
  EXPECT_LT(root_beside, root + 1.0 * vmem::test::patience());
  EXPECT_LT(alice_beside, alice + 1.0 * vmem::test::patience());
  printf("[   note   ] status takes root %.2f s, and %.2f beside them; the other user %.2f and %.2f\n", root,
         root_beside, alice, alice_beside);
}

TEST_F(HostileOther, TuneTakesTheKernelsNumberOfAProcessAndNotTheOneInItsOwnNamespace) {
  if (IsSkipped()) return;
  // A process of kMallory that has, in its namespace, the pid of a process of root.
  setenv("INNER", std::to_string(getpid()).c_str(), 1);
  setenv("MALLORY", std::to_string(kMallory).c_str(), 1);
  setenv("TESTS", (place_ / "tests").c_str(), 1);
  mallory_ = child("Container", 0);
  pid_t outer = 0;
  for (;;) {
    const std::string line = mallory_->line();
    if (line == "not permitted") GTEST_SKIP() << "needs a pid namespace";
    if ((outer = atoi(line.c_str())) != 0) break;
    ASSERT_NE(line, "") << "it ended";
  }
  ASSERT_TRUE(mallory_->says("ready"));
  for (const char* what : {"readahead", "readahead=1MiB"}) {
    const Ran root = ctl({"tune", "--pid", std::to_string(getpid()), what});
    EXPECT_EQ(root.status, 3) << root.out << root.err;
    EXPECT_EQ(root.out, "") << "what a process of another user says";
  }
  EXPECT_EQ(ctl({"status", "--seconds", "0", "--pid", std::to_string(getpid())}).status, 3);
  const Ran real = ctl({"tune", "--pid", std::to_string(outer), "readahead"});
  EXPECT_EQ(real.status, 0) << real.err;
  EXPECT_EQ(real.out, "readahead=of alice\n");
  const json all = ctl({"status", "--json", "--seconds", "0", "--pid", std::to_string(outer)}).json();
  ASSERT_EQ(all["processes"].size(), 1u) << all.dump();
  EXPECT_EQ(all["processes"][0]["pid"], outer);
  EXPECT_EQ(all["processes"][0]["user"], kMallory);
}

// A stopped process that has been sent many requests has a full queue, so that vmemctl cannot ask
// which process listens. In a pid namespace the pid in its file belongs to another process. Such a
// process was once not shown at all.
TEST_F(HostileOther, AProcessInAPidNamespaceThatTakesNoRequestsIsShownAsItLastWrote) {
  if (IsSkipped()) return;
  setenv("INNER", "77", 1);
  setenv("MALLORY", std::to_string(kMallory).c_str(), 1);
  setenv("TESTS", (place_ / "tests").c_str(), 1);
  mallory_ = child("Container", 0);
  pid_t outer = 0;
  for (;;) {
    const std::string line = mallory_->line();
    if (line == "not permitted") GTEST_SKIP() << "needs a pid namespace";
    if ((outer = atoi(line.c_str())) != 0) break;
    ASSERT_NE(line, "") << "it ended";
  }
  ASSERT_TRUE(mallory_->says("ready"));
  const auto shown = [&](std::vector<std::string> words) {
    const Ran ran = ctl(std::move(words));
    EXPECT_EQ(ran.status, 0) << ran.err;
    const json all = ran.json();
    std::vector<json> out;
    for (const json& p : all.at("processes")) {  // throws if there are none
      if (p["user"] == kMallory) out.push_back(p);
    }
    return out;
  };
  // The process that answers writes its file first.
  ASSERT_TRUE(vmem::test::eventually([&] { return shown({"status", "--json", "--seconds", "0"}).size() == 1; }));
  ASSERT_EQ(kill(outer, SIGSTOP), 0);
  ASSERT_TRUE(vmem::test::eventually([&] { return state_of(outer) == 'T'; }));
  std::string name;
  for (const auto& entry : std::filesystem::directory_iterator(home_of(kMallory))) {
    if (entry.path().extension() == ".sock") name = entry.path().string();
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  publish::put_text(address.sun_path, name);
  std::vector<publish::Fd> asking;
  do {
    asking.emplace_back(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    ASSERT_LT(asking.size(), 1000u);
  } while (connect(asking.back().get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  ASSERT_EQ(errno, EAGAIN);
  for (const auto& found : {shown({"status", "--json", "--seconds", "0"}),
                            shown({"status", "--json", "--seconds", "0", "--pid", std::to_string(outer)})}) {
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0]["pid"], outer);
    EXPECT_EQ(found[0]["answers"], false);
    EXPECT_EQ(found[0]["stats"]["faults"], 42);
  }
  // From a namespace where its process cannot be seen, vmemctl says so.
  const std::vector<std::string> elsewhere = {"unshare",          "--pid",  "--fork",    "--mount-proc",
                                              place_ / "vmemctl", "status", "--seconds", "0"};
  if (run({"unshare", "--pid", "--fork", "--mount-proc", "true"}).status == 0) {
    const Ran ran = run(elsewhere);
    EXPECT_NE(ran.err.find("takes no requests now"), std::string::npos) << ran.out << ran.err;
  }
}

// A command that a user runs as uid 0 of his own user namespace.
std::vector<std::string> as_root_of_a_namespace(std::vector<std::string> words) {
  words.insert(words.begin(), {"unshare", "--user", "--map-root-user"});
  return words;
}

// Its header says user 0, and it looks for the folder of that user. It was once shown as forged, or
// not at all.
TEST_F(HostileOther, AProcessInAUserNamespaceIsItsUsersAndNotForged) {
  if (IsSkipped()) return;
  if (run(as_root_of_a_namespace({"true"}), kMallory).status != 0) GTEST_SKIP() << "needs a user namespace";
  Running inside(as_root_of_a_namespace({place_ / "tests", "--gtest_filter=HostileChild.DISABLED_Alice",
                                         "--gtest_also_run_disabled_tests"}),
                 kMallory);
  ASSERT_TRUE(inside.says("ready"));
  for (const uid_t reader : {uid_t{0}, kMallory}) {
    SCOPED_TRACE(reader);
    const Ran ran = ctl({"status", "--json", "--seconds", "0"}, reader);
    ASSERT_EQ(ran.status, 0) << ran.err;
    size_t found = 0;
    const json all = ran.json();
    for (const json& p : all["processes"]) {
      if (p["user"] != kMallory) continue;
      EXPECT_EQ(p["pid"], inside.pid());
      EXPECT_EQ(p["stats"]["faults"], 42);
      ++found;
    }
    EXPECT_EQ(found, 1u) << ran.out;
    EXPECT_EQ(ran.out.find("which is not user"), std::string::npos) << ran.out;
  }
  // She also sees it from inside, under her uid there.
  const Ran own = run(as_root_of_a_namespace({place_ / "vmemctl", "status", "--json", "--seconds", "0"}), kMallory);
  ASSERT_EQ(own.status, 0) << own.err;
  const json there = own.json();
  ASSERT_EQ(there["processes"].size(), 1u) << own.out;
  EXPECT_EQ(there["processes"][0]["user"], 0);
  // Inside, folders of other users of the machine belong to no known user.
  for (const json& problem : there["problems"])
    EXPECT_NE(problem.get<std::string>().find("are not theirs"), std::string::npos) << problem;
}

TEST_F(HostileOther, RootOfAUserNamespaceSeesAndTunesNobodyElse) {
  if (IsSkipped()) return;
  if (run(as_root_of_a_namespace({"true"}), kMallory).status != 0) GTEST_SKIP() << "needs a user namespace";
  const auto as_root = [&](std::vector<std::string> words) {
    words.insert(words.begin(), place_ / "vmemctl");
    return run(as_root_of_a_namespace(words), kMallory);
  };
  const Ran all = as_root({"status", "--json", "--seconds", "0"});
  ASSERT_EQ(all.status, 0) << all.err;
  EXPECT_EQ(all.json()["processes"].size(), 0u) << all.out;
  for (const std::string& word : {std::string("readahead"), std::string("readahead=1MiB")}) {
    const Ran tuned = as_root({"tune", "--pid", std::to_string(alice_->pid()), word});
    EXPECT_EQ(tuned.status, 3) << tuned.out << tuned.err;
    EXPECT_EQ(tuned.out, "");
  }
  EXPECT_NE(as_root({"--folder", home_of(kAlice), "status", "--seconds", "0"}).out.find("no process"),
            std::string::npos);
  // A folder whose owner has no uid there is not believed, even if it is open to all.
  ASSERT_EQ(chmod(home_of(kAlice).c_str(), 0755), 0);
  const Ran open = as_root({"--folder", home_of(kAlice), "status", "--json", "--seconds", "0"});
  EXPECT_EQ(open.json()["processes"].size(), 0u) << open.out;
  EXPECT_NE(open.out.find("no number in this user namespace"), std::string::npos) << open.out;
}

TEST_F(HostileOther, NamesOfOthersThatAUserTakesAreCountedAndHideNobody) {
  if (IsSkipped()) return;
  // 50,000 such names, also as folders and links, which must not count for more.
  constexpr unsigned kNames = 50000;
  const auto name = [](unsigned i) {
    return "/dev/shm/vmem-" + std::to_string(100000000 + static_cast<unsigned>(getpid() % 10000) * kNames + i);
  };
  struct Remove {
    std::function<std::string(unsigned)> name;
    ~Remove() {
      for (unsigned i = 0; i < kNames; ++i) {
        if (unlink(name(i).c_str()) != 0) rmdir(name(i).c_str());
      }
    }
  } remove{name};
  for (unsigned i = 0; i < kNames; ++i) {
    int rc = 0;
    if (i % 100 == 1) {
      rc = mkdir(name(i).c_str(), 0700);
    } else if (i % 100 == 2) {
      rc = symlink(home_of(kAlice).c_str(), name(i).c_str());
    } else {
      close(rc = open(name(i).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    }
    if (rc < 0 && i > 0 && errno == ENOSPC) GTEST_SKIP() << "no room for so many names";
    ASSERT_GE(rc, 0) << name(i) << ": " << strerrordesc_np(errno);
    ASSERT_EQ(lchown(name(i).c_str(), kMallory, kMallory), 0);
  }
  const Ran ran = ctl({"status", "--seconds", "0"});
  EXPECT_EQ(ran.status, 0);
  EXPECT_NE(ran.out.find(std::to_string(alice_->pid()) + "  "), std::string::npos) << ran.out;
  EXPECT_LT(std::count(ran.err.begin(), ran.err.end(), '\n'), 20) << ran.err.substr(0, 2000);
  const std::string line =
      std::to_string(kNames) + " names of user " + std::to_string(kMallory) + " in /dev/shm are not theirs";
  EXPECT_NE(ran.err.find(line), std::string::npos) << ran.err.substr(0, 2000);
}

// Run as kMallory: publications that are never complete, and sockets that take no requests.
TEST(HostileChild, DISABLED_Torn) {
  const std::string home = home_of(geteuid());
  ASSERT_EQ(mkdir(home.c_str(), 0700), 0);
  for (unsigned i = 0; i < 256; ++i) {
    publish::Snapshot s;
    s.header.pid = static_cast<uint32_t>(getpid());
    std::vector<std::byte> bytes;
    publish::pack(s, &bytes);
    // Half of them differ in their defect.
    if (i % 2 == 0) bytes[100] ^= std::byte{1};
    if (i % 2 == 1) bytes.resize(bytes.size() - i);
    const std::string path = home + "/" + name_of(getpid(), i);
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    ASSERT_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    ASSERT_TRUE(publish::mark_alive(fd));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    publish::put_text(address.sun_path, path + ".sock");
    const int wrong = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ASSERT_EQ(bind(wrong, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(listen(wrong, 4), 0);
  }
  stay();
}

TEST_F(HostileOther, WhatCannotBeReadIsToldInAFewLinesAndHidesNobody) {
  if (IsSkipped()) return;
  mallory_ = child("Torn", kMallory);
  ASSERT_TRUE(mallory_->says("ready"));
  const Ran ran = ctl({"status", "--seconds", "0"});
  EXPECT_EQ(ran.status, 0);
  EXPECT_NE(ran.out.find(std::to_string(alice_->pid()) + "  "), std::string::npos) << ran.out;
  EXPECT_LT(std::count(ran.err.begin(), ran.err.end(), '\n'), 20) << ran.err;
  EXPECT_NE(ran.err.find("published by user " + std::to_string(kMallory)), std::string::npos) << ran.err;
  EXPECT_NE(ran.err.find(" and 127 more: it is being rewritten"), std::string::npos) << ran.err;
  EXPECT_NE(ran.err.find(" more publications\n"), std::string::npos) << ran.err;
  const Ran top = ctl({"top", "--once", "--interval", "0.1"});
  EXPECT_NE(top.out.find("problems: cannot read what is published by user "), std::string::npos) << top.out;
}

TEST_F(HostileOther, WhoseNumberNobodyKnowsIsShownSoAndNotAsked) {
  if (IsSkipped()) return;
  const auto elsewhere = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"unshare", "--pid", "--fork", place_ / "vmemctl"});
    return run(words);
  };
  if (run({"unshare", "--pid", "--fork", "true"}).status != 0) GTEST_SKIP() << "needs a pid namespace";
  const Ran all = elsewhere({"status", "--json", "--seconds", "0"});
  ASSERT_EQ(all.status, 0) << all.err;
  size_t found = 0;
  const json status = all.json();
  for (const json& p : status["processes"]) {
    EXPECT_EQ(p["pid"], 0) << "what it says itself";
    found += p["user"] == kAlice;
  }
  EXPECT_EQ(found, 1u) << all.out;
  EXPECT_NE(elsewhere({"status", "--seconds", "0"}).out.find("pid unknown  "), std::string::npos);
  const Ran tuned = elsewhere({"tune", "--pid", std::to_string(alice_->pid()), "readahead"});
  EXPECT_EQ(tuned.status, 3) << tuned.out;
  EXPECT_NE(tuned.err.find("in their own pid namespace"), std::string::npos) << tuned.err;
  // Two such processes of one user count as two, in the metrics too.
  const auto another = child("Alice", kAlice);
  ASSERT_TRUE(another->says("ready"));
  const Ran metrics = elsewhere({"export", "--once"});
  std::map<std::string, int> samples;
  std::istringstream in(metrics.out);
  size_t up = 0;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    EXPECT_EQ(++samples[line.substr(0, line.rfind(' '))], 1) << line;
    up += line.rfind("vmem_process_up{", 0) == 0 &&
          line.find("user=\"" + std::to_string(kAlice) + "\"") != std::string::npos;
  }
  EXPECT_EQ(up, 2u) << metrics.out;
}

TEST_F(Hostile, NoSampleOfTheMetricsIsThereTwiceOrUnderAnothersName) {
  if (IsSkipped()) return;
  const Ran ran = ctl({"export", "--once"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  std::istringstream in(ran.out);
  std::map<std::string, int> samples;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    EXPECT_EQ(++samples[line.substr(0, line.rfind(' '))], 1) << line;
    if (line.find("pid=\"" + std::to_string(alice_->pid()) + "\"") != std::string::npos) {
      EXPECT_NE(line.find("user=\"" + std::to_string(kAlice) + "\""), std::string::npos) << line;
    }
  }
  EXPECT_EQ(ran.out.find("as of "), std::string::npos);
  EXPECT_NE(ran.out.find("vmem_forged_publications{user=\"" + std::to_string(kMallory) + "\"}"), std::string::npos);
}

TEST_F(Hostile, AnotherUserIsToldNoMoreThanRootIsAndSeesHerOwn) {
  if (IsSkipped()) return;
  ASSERT_EQ(chmod(home_of(kMallory).c_str(), 0755), 0);
  const Ran own = ctl({"status", "--json", "--seconds", "0"}, kAlice);
  ASSERT_EQ(own.status, 0) << own.err;
  ASSERT_EQ(own.json()["processes"].size(), 1u);
  EXPECT_EQ(own.json()["processes"][0]["pid"], alice_->pid());
  const Ran other = ctl({"--folder", home_of(kMallory), "status", "--json", "--seconds", "0"}, kAlice);
  ASSERT_EQ(other.status, 0) << other.err;
  EXPECT_TRUE(other.json()["processes"].empty()) << other.out;
}

TEST(HostileFolder, NothingIsRemovedThatIsNotOurs) {
  TempFolder place;
  const std::string path = place / "run";
  const auto at = [&](const std::string& name) { return path + "/" + name; };
  ASSERT_EQ(mkdir(path.c_str(), 0755), 0);
  const std::vector<std::string> sockets = {"docker.sock", "12-0123456789abcdef.sock"};
  for (const std::string& name : sockets) close(listen_as(at(name)));
  const std::string text = "12-0123456789abcde0";
  place.write("run/" + text, "a thesis");
  const timespec old[2] = {{1, 0}, {1, 0}};
  for (const std::string& name : {sockets[0], sockets[1], text})
    ASSERT_EQ(utimensat(AT_FDCWD, at(name).c_str(), old, 0), 0);
  // In a folder open to others, as /run is, nothing is removed. In a private one vmemctl removes
  // sockets with our names, and files with our names that begin as ours do.
  for (const mode_t mode : {0755, 0700}) {
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
    EXPECT_EQ(run({tool(), "--folder", path, "status", "--seconds", "0"}).status, 0);
    EXPECT_EQ(access(at(sockets[0]).c_str(), F_OK), 0) << "a socket of somebody else";
    EXPECT_EQ(access(at(text).c_str(), F_OK), 0) << "a file of somebody else";
    EXPECT_EQ(access(at(sockets[1]).c_str(), F_OK) == 0, mode == 0755) << "left by a process of ours";
  }
}

}  // namespace
