// How the library's threads are scheduled, whatever the scheduling of the thread that makes the
// first call.
#include "core/scheduling.h"

#include <dirent.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;

constexpr size_t kSize = 4 << 20;
constexpr int kRefused = 77, kNotTrapped = 78;

struct How {
  int policy = -1, nice = -1, priority = -1, io_priority = -1;
  long slack = -1;
  std::string cpus;
  bool operator==(const How&) const = default;
};
std::ostream& operator<<(std::ostream& out, const How& how) {
  return out << "policy " << how.policy << " priority " << how.priority << " nice " << how.nice << " I/O "
             << how.io_priority << " slack " << how.slack << " CPUs " << how.cpus;
}

std::string word_after(const std::string& path, const std::string& key) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    if (line.compare(0, key.size(), key) == 0) return line.substr(line.find_first_not_of(" \t", key.size()));
  }
  return "";
}

How how_is(const std::string& thread) {
  const std::string folder = "/proc/self/task/" + thread + "/";
  std::ifstream in(folder + "stat");
  std::string text;
  std::getline(in, text);
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  std::array<std::string, 53> field;  // as proc(5) numbers them
  for (size_t i = 3; i < field.size() && fields >> field[i];) ++i;
  How how;
  how.nice = atoi(field[19].c_str());
  how.priority = atoi(field[40].c_str());
  how.policy = atoi(field[41].c_str());
  how.io_priority = static_cast<int>(syscall(SYS_ioprio_get, 1, atoi(thread.c_str())));
  std::ifstream("/proc/" + thread + "/timerslack_ns") >> how.slack;
  how.cpus = word_after(folder + "status", "Cpus_allowed_list:");
  return how;
}

// Returns the threads of this process except the program's own: the library's, and kernel workers
// made for them.
std::map<std::string, How> threads_of_library() {
  std::map<std::string, How> all;
  DIR* const d = opendir("/proc/self/task");
  while (const dirent* const e = readdir(d)) {
    std::string name;
    std::getline(std::ifstream(std::string("/proc/self/task/") + e->d_name + "/comm"), name);
    if (name.compare(0, 5, "vmem-") == 0 || name.compare(0, 4, "iou-") == 0)
      all[name + " " + e->d_name] = how_is(e->d_name);
  }
  closedir(d);
  return all;
}

void pin_to_last_cpu() {
  cpu_set_t set, last;
  sched_getaffinity(0, sizeof set, &set);
  int cpu = CPU_SETSIZE - 1;
  while (!CPU_ISSET(cpu, &set)) --cpu;
  CPU_ZERO(&last);
  CPU_SET(cpu, &last);
  sched_setaffinity(0, sizeof last, &last);
}

struct Deadline {  // struct sched_attr
  uint32_t size = 48, policy = 6;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 10000000, deadline = 100000000, period = 100000000;
};

int set_scheduler(int policy, int priority) {
  const sched_param param{priority};
  return sched_setscheduler(0, policy, &param);
}

// Gives this thread an unusual scheduling. Returns false if the kernel does not allow it.
bool become(const std::string& odd) {
  if (odd == "ordinary") return true;
  if (odd == "fifo") return set_scheduler(SCHED_FIFO, 10) == 0;
  if (odd == "rr") return set_scheduler(SCHED_RR | SCHED_RESET_ON_FORK, 99) == 0;
  if (odd == "deadline") {
    const Deadline attr;
    return syscall(SYS_sched_setattr, 0, &attr, 0) == 0;
  }
  if (odd == "idle") return set_scheduler(SCHED_IDLE, 0) == 0;
  if (odd == "batch") return set_scheduler(SCHED_BATCH, 0) == 0;
  if (odd == "nice 19") return setpriority(PRIO_PROCESS, 0, 19) == 0;
  if (odd == "nice -20") return setpriority(PRIO_PROCESS, 0, -20) == 0;
  if (odd == "pinned") return pin_to_last_cpu(), true;
  if (odd == "slack") return prctl(PR_SET_TIMERSLACK, 500000000) == 0;
  if (odd == "I/O idle") return syscall(SYS_ioprio_set, 1, 0, 3 << 13) == 0;
  return false;
}

// Reads and writes through the page cache make the kernel create workers.
void use_everything() {
  const TempFile file(kSize);
  vmem::region shared(kSize, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY), anonymous(kSize, VMEM_HOST_ONLY);
  memset(shared.data(), 3, kSize);
  memset(anonymous.data(), 4, kSize);
  anonymous.evict();
  shared.evict();
  EXPECT_EQ(anonymous.view<const char>()[kSize / 2], 4);
  EXPECT_EQ(shared.view<const char>()[kSize / 2], 3);
}

TEST(SchedulingChild, DISABLED_CallsFirst) {
  const std::string odd = getenv("VMEM_TEST_ODD");
  How ordinary = how_is(std::to_string(getpid()));
  if (getenv("VMEM_CPUS") != nullptr) ordinary.cpus = getenv("VMEM_CPUS");
  bool refused = false;
  int rc = 0;
  std::thread caller([&] {
    if ((refused = !become(odd))) return;
    rc = vmem_init();
    if (rc == 0) use_everything();
  });
  caller.join();
  if (refused) _exit(kRefused);
  if (odd == "deadline") {
    EXPECT_EQ(rc, -EAGAIN);
    return;
  }
  if (rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(kNotTrapped);
  ASSERT_EQ(rc, 0) << vmem_last_error();
  const auto all = threads_of_library();
  EXPECT_GT(all.size(), 4u);
  for (const auto& [name, how] : all) {
    How expected = ordinary;
    // Beside policy and CPUs, the properties of io_uring workers differ between kernels.
    if (name.compare(0, 4, "iou-") == 0) expected.slack = how.slack, expected.io_priority = how.io_priority;
    EXPECT_EQ(how, expected) << name;
  }
}

class Scheduling : public SystemTest, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Odd, Scheduling,
                         testing::Values("ordinary", "fifo", "rr", "deadline", "idle", "batch", "nice 19", "nice -20",
                                         "pinned", "slack", "I/O idle"));

int status_of_caller(const std::string& odd, const char* cpus) {
  return systest::wait_for_child(
      systest::start_child("SchedulingChild.DISABLED_CallsFirst",
                           {{"VMEM_TEST_ODD", odd},
                            {"VMEM_DEVICE", "none"},
                            {"VMEM_DIRECT_IO", "off"},
                            {"VMEM_LOG", "error"},
                            {cpus != nullptr ? "VMEM_CPUS" : "UNUSED", cpus != nullptr ? cpus : ""}}),
      120);
}

bool is_ordinary() {
  return getpriority(PRIO_PROCESS, 0) == 0 && sched_getscheduler(0) == SCHED_OTHER;
}

TEST_P(Scheduling, ThreadsOfTheLibraryAreOrdinaryWhoeverCallsFirst) {
  if (!is_ordinary()) GTEST_SKIP() << "the test itself does not run as an ordinary process";
  rlimit nice{};
  getrlimit(RLIMIT_NICE, &nice);
  const std::string odd = GetParam();
  if (geteuid() != 0 && nice.rlim_cur < 20 && (odd == "nice 19" || odd == "idle"))
    GTEST_SKIP() << "an ordinary user's threads cannot leave " << odd;
  const int status = status_of_caller(odd, nullptr);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kRefused) GTEST_SKIP() << "this user may not be " << odd;
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNotTrapped) GTEST_SKIP() << "accesses cannot be trapped here";
  EXPECT_EQ(status, 0) << (status == -1 ? "hung" : "failed");
}

TEST_F(SystemTest, SettingCpusSaysWhereThreadsOfTheLibraryRun) {
  if (!is_ordinary()) GTEST_SKIP() << "the test itself does not run as an ordinary process";
  const int status = status_of_caller("ordinary", "0");
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNotTrapped) GTEST_SKIP() << "accesses cannot be trapped here";
  EXPECT_EQ(status, 0);
}

TEST_F(SystemTest, CpusThatAreNoneOfTheProcessAreRefusedWithWords) {
  for (const char* cpus : {"x", "3-1", "0,", "-1", "0-", "8191", "8192", "0 1", "1e3"}) {
    ASSERT_EQ(vmem_set("cpus", cpus), 0);
    EXPECT_EQ(vmem_init(), -EINVAL) << cpus;
    EXPECT_NE(strstr(vmem_last_error(), cpus), nullptr) << vmem_last_error();
  }
  ASSERT_EQ(vmem_set("cpus", ""), 0);
}

TEST(CpuList, IsReadAsItIsWritten) {
  vmem::core::CpuMask mask;
  ASSERT_TRUE(vmem::core::parse_cpus("0-2,64,70-71", &mask).ok());
  EXPECT_EQ(mask.words[0], 7u);
  EXPECT_EQ(mask.words[1], 0xc1u);
}

// The thread that made the first call may spin as a real-time thread, permanently on its CPU: a
// thread on another CPU still gets its block.
TEST(SchedulingChild, DISABLED_SpinsAsARealTimeThread) {
  cpu_set_t all, mine, other;
  sched_getaffinity(0, sizeof all, &all);
  CPU_ZERO(&mine);
  CPU_ZERO(&other);
  for (int cpu = 0, n = 0; cpu < CPU_SETSIZE && n < 2; ++cpu) {
    if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, n++ == 0 ? &other : &mine);
  }
  std::atomic<const volatile char*> from{nullptr};
  std::atomic<bool> fetched{false};
  std::thread reader([&] {
    sched_setaffinity(0, sizeof other, &other);
    while (from == nullptr) usleep(1000);
    fetched = from.load()[kSize / 2] == 7;
  });
  sched_setaffinity(0, sizeof mine, &mine);
  if (set_scheduler(SCHED_FIFO, 10) != 0) _exit(kRefused);
  const int rc = vmem_init();
  if (rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(kNotTrapped);
  vmem::region region(kSize, VMEM_HOST_ONLY);
  memset(region.data(), 7, kSize);
  region.evict();
  from = static_cast<const volatile char*>(region.data());
  while (!fetched) continue;
  set_scheduler(SCHED_OTHER, 0);
  reader.join();
}

TEST_F(SystemTest, ASpinningRealTimeCallerStopsNoPaging) {
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "one CPU";
  const int status = systest::wait_for_child(
      systest::start_child("SchedulingChild.DISABLED_SpinsAsARealTimeThread", {{"VMEM_DEVICE", "none"}}), 20);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kRefused) GTEST_SKIP() << "this user may not be real-time";
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNotTrapped) GTEST_SKIP() << "accesses cannot be trapped here";
  EXPECT_EQ(status, 0) << (status == -1 ? "no block came" : "failed");
}

}  // namespace
