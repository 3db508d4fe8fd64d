// vmemctl doctor on fake machines made of files, and on this one; vmemctl bench on a small file;
// the manual pages.
#include <sys/inotify.h>

#include "support.h"

namespace {

using namespace ctltest;
using nlohmann::json;

class CtlDoctor : public ::testing::Test {
 protected:
  // Returns the line with that name, "state|found|advice".
  std::string line(const std::string& name, std::vector<std::string> more = {}) {
    std::vector<std::string> words{tool(), "doctor", "--json", "--root", root_.path()};
    words.insert(words.end(), more.begin(), more.end());
    const json all = run(words).json();
    for (const json& c : all["checks"]) {
      if (c["name"] == name)
        return c["state"].get<std::string>() + "|" + c["found"].get<std::string>() + "|" +
               c["advice"].get<std::string>();
    }
    return "no such line";
  }
  TempFolder root_;
};

#define EXPECT_BEGINS(text, begin) EXPECT_EQ((text).substr(0, strlen(begin)), begin)
#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST_F(CtlDoctor, JudgesTheKernelByWhatItCanDo) {
  const std::pair<const char*, const char*> cases[] = {
      {"6.12.1-amd64", "ok|6.12.1-amd64: pinned pages stay"},
      {"6.8.0", "ok|6.8.0: pinned pages stay"},
      {"6.1.0-13-amd64", "degraded|6.1.0-13-amd64: blocks are copied"},
      {"5.4.0", "missing|5.4.0: userfaultfd is too old|use Linux 5.7"},
      {"", "degraded|its version cannot be read"},
  };
  for (const auto& [release, begin] : cases) {
    root_.write("proc/sys/kernel/osrelease", std::string(release) + "\n");
    EXPECT_BEGINS(line("kernel"), begin);
  }
}

TEST_F(CtlDoctor, SaysWhatToDoAboutHugePagesMappingsAndMemory) {
  root_.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
  EXPECT_BEGINS(line("huge pages"), "degraded|always madvise [never]|echo madvise >");
  root_.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  EXPECT_BEGINS(line("huge pages"), "ok|");
  root_.write("proc/sys/vm/max_map_count", "1000\n");
  EXPECT_BEGINS(line("max_map_count"), "degraded|1000|sysctl vm.max_map_count=");
  root_.write("proc/sys/vm/max_map_count", "65530\n");
  EXPECT_BEGINS(line("max_map_count"), "ok|65530");
  root_.write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 65536 kB\n");
  EXPECT_BEGINS(line("memory"), "degraded|64 MiB usable; host_budget would be 32 MiB|raise");
}

TEST_F(CtlDoctor, TellsAMachineWithoutAGpuFromOneWithoutItsDriver) {
  EXPECT_BEGINS(line("GPU"), "ok|no NVIDIA GPU: host memory");
  root_.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module\n");
  EXPECT_BEGINS(line("GPU"), "ok|no NVIDIA GPU, though its driver is loaded");
  std::filesystem::remove(root_ / "proc/driver/nvidia/version");
  root_.write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
  root_.write("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n");
  EXPECT_BEGINS(line("driver"), "missing|an NVIDIA GPU, but no driver|install");
  root_.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module\n");
  EXPECT_BEGINS(line("driver"), "ok|NVRM version");
  EXPECT_BEGINS(line("nvidia-uvm"), "missing|");
  EXPECT_BEGINS(line("HMM"), "degraded|this driver has none|nothing, while every GPU access is under a lease");
  root_.write("sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "Y\n");
  EXPECT_BEGINS(line("HMM"), "degraded|switched off");
  root_.write("sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "N\n");
  EXPECT_BEGINS(line("HMM"), "ok|");
}

TEST_F(CtlDoctor, SeesContainersAndTheModule) {
  EXPECT_BEGINS(line("container"), "ok|none");
  root_.write(".dockerenv", "");
  EXPECT_HAS(line("container"), "|docker");
  EXPECT_BEGINS(line("module"), "degraded|vmem.ko is not loaded");
  std::filesystem::create_directories(root_ / "sys/class/misc/vmem");
  EXPECT_BEGINS(line("module"), "degraded|loaded, but /dev/vmem");
  root_.write("dev/vmem", "");
  EXPECT_BEGINS(line("module"), "ok|loaded");
}

TEST_F(CtlDoctor, APlaceForTheSsdTierThatCannotBeUsedIsMissingAndTheExitCodeSaysSo) {
  EXPECT_BEGINS(line("SSD", {"--path", root_ / "absent"}), "missing|");
  const Ran ran = run({tool(), "doctor", "--path", root_ / "absent"});
  EXPECT_EQ(ran.status, 1);
  EXPECT_HAS(ran.out, "libvmem does not work here");
  EXPECT_HAS(ran.out, "set ssd_path (VMEM_SSD_PATH)");
  struct stat s {};
  if (stat("/dev/shm", &s) == 0) {
    EXPECT_BEGINS(line("SSD", {"--path", "/dev/shm"}), "degraded|/dev/shm is memory");
  }
}

TEST_F(CtlDoctor, EveryLineOfThisMachineHasAStateAndTheBadOnesAdvice) {
  const Ran ran = run({tool(), "doctor", "--json"});
  const json all = ran.json();
  EXPECT_EQ(all["works"].get<bool>(), ran.status == 0);
  EXPECT_GE(all["checks"].size(), 12u);
  for (const json& c : all["checks"]) {
    EXPECT_TRUE(c["state"] == "ok" || c["state"] == "degraded" || c["state"] == "missing") << c;
    EXPECT_FALSE(c["found"].get<std::string>().empty()) << c;
    EXPECT_EQ(c["state"] == "ok", c["advice"].get<std::string>().empty()) << c;
  }
}

TEST_F(CtlDoctor, SaysWhatARightOpensBeforeItRecommendsIt) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  TempFolder place;
  ASSERT_EQ(chmod(place.path().c_str(), 0755), 0);
  std::filesystem::copy_file(tool(), place / "vmemctl");
  const Ran ran = run({place / "vmemctl", "doctor", "--json"}, 61999);
  const json all = ran.json();  // must outlive the loop
  for (const json& line : all["checks"]) {
    if (line["name"] != "userfaultfd") continue;
    if (line["state"] == "ok") GTEST_SKIP() << "everybody has every right to userfaultfd here";
    const std::string advice = line["advice"];
    const size_t lease = advice.find("vmem_acquire"), sysctl = advice.find("vm.unprivileged_userfaultfd=1");
    ASSERT_NE(sysctl, std::string::npos) << advice;
    EXPECT_TRUE(lease < sysctl || line["state"] == "missing") << "the way that needs no right comes first: " << advice;
    EXPECT_NE(advice.find("every user", sysctl), std::string::npos) << advice;
    EXPECT_NE(advice.find("read and change every process", advice.find("CAP_SYS_PTRACE")), std::string::npos) << advice;
    return;
  }
  FAIL() << ran.out << ran.err;
}

class CtlBench : public ::testing::Test {
 protected:
  void SetUp() override {
    const int rc = vmem_init();
    vmem_shutdown();
    if (rc == -EPERM || rc == -ENOSYS) GTEST_SKIP() << vmem_last_error();
  }
  Ran bench(const std::vector<std::string>& more, const std::string& size = "64MiB", const std::string& path = "") {
    std::vector<std::string> words{tool(), "bench", "--seconds", "0.01", "--size", size};
    words.insert(words.end(), {"--path", path.empty() ? folder_.path() : path});
    words.insert(words.end(), more.begin(), more.end());
    return run(words);
  }
  std::string text(const std::string& name) const {
    std::ifstream in(folder_ / name);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  TempFolder folder_;
};

TEST_F(CtlBench, WritesSettingsThatAShellTakesAndTheLibraryAccepts) {
  if (IsSkipped()) return;
  const std::string file = folder_ / "vmem.env";
  const Ran ran = bench({"--json", "--device", "sim", "--spread", "1e6", "-o", file});  // this machine may be noisy
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json all = ran.json();
  EXPECT_EQ(all["rows"].size(), 5u + 6 + 3);
  for (const json& row : all["rows"]) {
    EXPECT_GT(row["ssd_to_host_gbs"].get<double>() + row["ssd_to_device_gbs"].get<double>(), 0) << row;
    EXPECT_GE(row["rounds"].get<int>(), 5) << row;
    for (const char* name : {"ssd_to_host_gbs", "random_touches", "ssd_to_device_gbs"}) {
      const json& spread = row[std::string(name) + "_spread"];
      EXPECT_LE(spread[0].get<double>(), row[name].get<double>()) << row;
      EXPECT_GE(spread[1].get<double>(), row[name].get<double>()) << row;
    }
  }
  EXPECT_GT(all["disk_gbs"].get<double>(), 0);
  EXPECT_EQ(all["device"], "measured");
  const Ran sourced = run({"sh", "-c", ". " + file + " && echo $VMEM_IO_DEPTH $VMEM_BLOCK_SIZE $VMEM_SSD_PATH"});
  EXPECT_EQ(sourced.out, std::to_string(all["chosen"]["io_depth"].get<int>()) + " " +
                             std::to_string(all["chosen"]["block_size"].get<int>()) + " " + folder_.path() + "\n");
  vmem::core::Options options;
  EXPECT_TRUE(options.set("io_depth", std::to_string(all["chosen"]["io_depth"].get<int>())).ok());
  EXPECT_TRUE(options.set("block_size", std::to_string(all["chosen"]["block_size"].get<int>())).ok());
  size_t left = 0;
  for (const auto& e : std::filesystem::directory_iterator(folder_.path())) left += e.path() != file;
  EXPECT_EQ(left, 0u) << "the test file is gone";
}

TEST_F(CtlBench, ChoosesNothingWhereFiguresAreNotAsSteadyAsTheyHaveToBe) {
  if (IsSkipped()) return;
  const std::string file = folder_ / "vmem.env";
  const Ran ran = bench({"--json", "--device", "none", "--spread", "0", "-o", file});  // no two rounds are equal
  EXPECT_EQ(ran.status, 1) << ran.out;
  const json all = ran.json();
  EXPECT_FALSE(all.contains("chosen")) << all;
  EXPECT_EQ(all["rows"].size(), 5u) << "what was measured is shown";
  EXPECT_EQ(all["rows"][0]["rounds"].get<int>(), 15);
  EXPECT_HAS(all["error"]["words"].get<std::string>(), "nothing is chosen: after 15 rounds, figures of depth");
  EXPECT_FALSE(std::filesystem::exists(file)) << "nothing is written";
}

TEST_F(CtlBench, RefusesToWriteOverAFileOrToFillADiskOrAFolderThatIsNotThere) {
  if (IsSkipped()) return;
  folder_.write("mine", "precious");
  const Ran taken = bench({"-o", folder_ / "mine"});
  EXPECT_EQ(taken.status, 5);
  EXPECT_HAS(taken.err, "--force");
  std::ifstream in(folder_ / "mine");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), "precious");
  EXPECT_EQ(bench({}, "64MiB", folder_ / "absent").status, 3);
  const Ran nowhere = bench({"-o", folder_ / "none/out"}, "512T");
  EXPECT_EQ(nowhere.status, 1);
  EXPECT_HAS(nowhere.err, "none/out");
  const Ran huge = bench({}, "512T");
  EXPECT_EQ(huge.status, 1);
  EXPECT_HAS(huge.err, "twice its size");
}

TEST_F(CtlBench, WithForceANewFileTakesTheNameAndTheOneThatWasThereIsNotWrittenTo) {
  if (IsSkipped()) return;
  constexpr uid_t kMallory = 61501;
  const std::string file = folder_ / "vmem.env", kept = folder_ / "kept";
  folder_.write("vmem.env", "rm -rf");
  ASSERT_EQ(chmod(file.c_str(), 0666), 0);
  if (geteuid() == 0) {
    ASSERT_EQ(chown(file.c_str(), kMallory, kMallory), 0);
  }
  ASSERT_EQ(link(file.c_str(), kept.c_str()), 0);
  const Ran ran = bench({"--device", "none", "--spread", "1e6", "--force", "-o", file});
  ASSERT_EQ(ran.status, 0) << ran.err;
  struct stat s {};
  ASSERT_EQ(stat(file.c_str(), &s), 0);
  EXPECT_EQ(s.st_uid, geteuid()) << "whoever owns it can change what will be sourced";
  EXPECT_EQ(s.st_mode & 07777, 0644u);
  EXPECT_EQ(s.st_nlink, 1u);
  EXPECT_EQ(text("kept"), "rm -rf");
  EXPECT_HAS(text("vmem.env"), "export VMEM_IO_DEPTH=");
}

TEST_F(CtlBench, WritesThroughNoLinkAndOverNothingButAFile) {
  if (IsSkipped()) return;
  folder_.write("thesis", "precious");
  ASSERT_EQ(symlink((folder_ / "thesis").c_str(), (folder_ / "link").c_str()), 0);
  ASSERT_EQ(symlink((folder_ / "none").c_str(), (folder_ / "dangling").c_str()), 0);
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  for (const char* name : {"link", "dangling", "fifo"}) {
    EXPECT_EQ(bench({"-o", folder_ / name}).status, 5) << name;
    const Ran forced = bench({"--force", "-o", folder_ / name});
    EXPECT_EQ(forced.status, 5) << name;
    EXPECT_HAS(forced.err, "give the name of a file");
  }
  EXPECT_EQ(text("thesis"), "precious");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "none"));
}

TEST_F(CtlBench, ItsTestFileLiesInAFolderThatNobodyElseCanEnterAndGoesWithASignal) {
  if (IsSkipped()) return;
  const int watch = inotify_init1(IN_CLOEXEC);
  ASSERT_GE(inotify_add_watch(watch, folder_.path().c_str(), IN_CREATE | IN_MOVED_TO), 0);
  Running running({tool(), "bench", "--seconds", "60", "--size", "64MiB", "--path", folder_.path()});
  alignas(inotify_event) char buffer[4096];
  pollfd ready{watch, POLLIN, 0};
  ASSERT_EQ(poll(&ready, 1, 60000), 1) << "no test file";
  ASSERT_GT(read(watch, buffer, sizeof buffer), 0);
  const auto* event = reinterpret_cast<const inotify_event*>(buffer);
  EXPECT_NE(event->mask & IN_ISDIR, 0u) << event->name << " can be opened, moved or replaced between two looks at it";
  struct stat s {};
  ASSERT_EQ(stat((folder_ / event->name).c_str(), &s), 0);
  EXPECT_EQ(s.st_mode & 07777, 0700u);
  running.stop(SIGTERM);
  EXPECT_EQ(running.finish().status, 128 + SIGTERM);
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
  close(watch);
}

TEST(CtlManual, EveryCommandAndOptionIsInTheManual) {
  std::ifstream in("docs/man/vmemctl.1");
  std::string page((std::istreambuf_iterator<char>(in)), {});
  for (size_t at = 0; (at = page.find("\\-", at)) != std::string::npos; ++at) page.replace(at, 2, "-");
  for (const char* command : {"status", "top", "tune", "bench", "doctor", "export"}) {
    EXPECT_HAS(page, std::string(".SS ") + command);
    const std::string help = run({tool(), command, "--help"}).out;
    size_t options = 0;
    for (size_t at = 0; (at = help.find("--", at)) != std::string::npos; ++options) {
      const size_t end = help.find_first_not_of("abcdefghijklmnopqrstuvwxyz-", at);
      EXPECT_HAS(page, help.substr(at, end - at));
      at = end;
    }
    EXPECT_GE(options, 2u) << help;
  }
}

TEST(CtlManual, PagesAreWellFormed) {
  if (run({"groff", "-v"}).status != 0) GTEST_SKIP() << "groff is not installed";
  for (const char* page : {"vmemctl.1", "vmem-settings.7", "libvmem-tier.3"}) {
    const Ran ran = run({"groff", "-man", "-Tutf8", "-ww", "-z", std::string("docs/man/") + page});
    EXPECT_EQ(ran.status, 0) << page;
    EXPECT_EQ(ran.err, "") << page;
  }
}

}  // namespace
