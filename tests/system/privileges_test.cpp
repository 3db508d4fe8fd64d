// Programs that run with more rights than the user who starts them. That user must not control what
// they do.
#include <grp.h>
#include <linux/capability.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "child.h"
#include "common/patience.h"
#include "publish/place.h"
#include "support.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
// LeakSanitizer may not attach to a program with more rights than the user who started it; such a
// program ignores ASAN_OPTIONS too.
__attribute__((visibility("default"))) int __lsan_is_turned_off() {
  return getauxval(AT_SECURE) != 0 ? 1 : 0;
}
#endif

namespace {

using systest::SystemTest;

constexpr uid_t kNobody = 65534;

class Privileges : public SystemTest {};

// The owner of the program: root, or another ordinary user.
class PrivilegesOf : public SystemTest, public testing::WithParamInterface<uid_t> {};

TEST_P(PrivilegesOf, AProgramWithSetUserIdTakesNoSettingFromTheEnvironment) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can make a program that runs as another user";
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  const uid_t owner = GetParam();
  std::string program = systest::temp_folder() + "/vmem-setuid.XXXXXX";
  close(mkstemp(program.data()));
  std::filesystem::copy_file("/proc/self/exe", program, std::filesystem::copy_options::overwrite_existing);
  ASSERT_EQ(chown(program.c_str(), owner, owner), 0);
  ASSERT_EQ(chmod(program.c_str(), 04755), 0);
  systest::TempFile victim(1 << 20, 9);  // belongs to the owner
  ASSERT_EQ(chown(victim.path().c_str(), owner, owner), 0);
  // where the user who starts the program would like a file to be made
  const std::string place = program + ".d";
  ASSERT_EQ(mkdir(place.c_str(), 0777), 0);
  ASSERT_EQ(chmod(place.c_str(), 0777), 0);
  const pid_t child = systest::start_child("PrivilegesChild.DISABLED_RunsAsItsOwner",
                                           {{"VMEM_HOST_BUDGET", "48MiB"},
                                            {"VMEM_SSD_PATH", victim.path() + ":" + place + "/store"},
                                            {"VMEM_BLOCK_SIZE", "64KiB"},
                                            {"VMEM_LOG", "nonsense"}},  // would make every call fail
                                           {program, kNobody});
  const int status = systest::wait_for_child(child, 60);
  unlink(program.c_str());
  EXPECT_TRUE(std::filesystem::is_empty(place)) << "a file of the owner's where the starter wanted it";
  std::error_code ignored;
  std::filesystem::remove_all(place, ignored);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
    GTEST_SKIP() << "the folder's file system ignores set-user-ID, or its owner cannot have userfaultfd";
  EXPECT_EQ(status, 0);
  EXPECT_EQ(victim.read(), systest::TempFile::content(1 << 20, 9));
}

INSTANTIATE_TEST_SUITE_P(Owners, PrivilegesOf, testing::Values(uid_t{0}, uid_t{61504}),
                         [](const auto& owner) { return owner.param == 0 ? "root" : "another"; });

TEST_F(Privileges, AProgramWithSetGroupIdIsNeitherSeenNorTunedByWhoStartedIt) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can make a program of another group";
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  std::string program = systest::temp_folder() + "/vmem-setgid.XXXXXX";
  close(mkstemp(program.data()));
  std::filesystem::copy_file("/proc/self/exe", program, std::filesystem::copy_options::overwrite_existing);
  ASSERT_EQ(chown(program.c_str(), 0, 61503), 0);
  ASSERT_EQ(chmod(program.c_str(), 02755), 0);
  const std::string place = program + ".d";
  ASSERT_EQ(mkdir(place.c_str(), 0700), 0);
  ASSERT_EQ(chown(place.c_str(), 0, 61503), 0);
  ASSERT_EQ(chmod(place.c_str(), 0775), 0);
  const pid_t child =
      systest::start_child("PrivilegesChild.DISABLED_RunsAsAnotherGroup",
                           {{"PLACE", place}, {"VMEM_PUBLISH", "on"}, {"VMEM_HOST_BUGDET", "1G"}}, {program, kNobody});
  const int status = systest::wait_for_child(child, 60);
  unlink(program.c_str());
  std::error_code ignored;
  std::filesystem::remove_all(place, ignored);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "set-group-ID, or userfaultfd, is not to be had";
  EXPECT_EQ(status, 0);
}

// File capabilities make a program as privileged as set-user-ID does, although it runs as the user
// who started it.
TEST_F(Privileges, AProgramWithCapabilitiesTakesNothingFromTheEnvironment) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file capabilities";
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  std::string program = systest::temp_folder() + "/vmem-capable.XXXXXX";
  close(mkstemp(program.data()));
  const std::string place = program + ".d";
  ASSERT_EQ(mkdir(place.c_str(), 0700), 0);
  ASSERT_EQ(chown(place.c_str(), 65534, 65534), 0);
  std::filesystem::copy_file("/proc/self/exe", program, std::filesystem::copy_options::overwrite_existing);
  ASSERT_EQ(chmod(program.c_str(), 0755), 0);
  vfs_cap_data given{};
  given.magic_etc = VFS_CAP_REVISION_2 | VFS_CAP_FLAGS_EFFECTIVE;
  given.data[0].permitted = 1u << CAP_NET_BIND_SERVICE;
  const int rc = setxattr(program.c_str(), "security.capability", &given, sizeof given, 0);
  const int why = errno;
  const pid_t child = rc != 0 ? -1
                              : systest::start_child("PrivilegesChild.DISABLED_RunsWithCapabilities",
                                                     {{"TMPDIR", place},
                                                      {"XDG_RUNTIME_DIR", place},
                                                      {"PLACE", place},
                                                      {"VMEM_HOST_BUDGET", "48MiB"},
                                                      {"VMEM_BLOCK_SIZE", "64KiB"},
                                                      {"VMEM_SSD_PATH", place + "/store"},
                                                      {"VMEM_PUBLISH", "on"}},
                                                     {program, kNobody});
  const int status = child < 0 ? 77 << 8 : systest::wait_for_child(child, 60);
  unlink(program.c_str());
  EXPECT_TRUE(std::filesystem::is_empty(place)) << "a file, or a publication, where the starter wanted it";
  std::error_code ignored;
  std::filesystem::remove_all(place, ignored);
  if (rc != 0) GTEST_SKIP() << "no capabilities of files here: " << strerrordesc_np(why);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "capabilities, or userfaultfd, are not to be had";
  EXPECT_EQ(status, 0);
}

// A daemon that gives up its rights may keep secrets in memory from its new user: the kernel lets
// only root debug it.
TEST_F(Privileges, AProgramThatGivesUpItsRightsIsNotShownToWhomItBecomes) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give up rights";
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  const pid_t child = systest::start_child("PrivilegesChild.DISABLED_GivesUpItsRights");
  const int status = systest::wait_for_child(child, 60);
  std::error_code ignored;
  std::filesystem::remove("/dev/shm/vmem-61505", ignored);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "root's publications cannot be made here";
  EXPECT_EQ(status, 0);
}

TEST_F(Privileges, WhereSystemCallsNeedLeasesOneWarningSaysSo) {
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  const pid_t child = systest::start_child("PrivilegesChild.DISABLED_StartsTwiceAsAnOrdinaryUser");
  const int status = systest::wait_for_child(child, 60);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "userfaultfd without privileges waits here, too";
  EXPECT_EQ(status, 0);
}

TEST(PrivilegesChild, DISABLED_StartsTwiceAsAnOrdinaryUser) {
  static std::atomic<int> warnings{0};
  vmem_log(
      [](int, const char* line, void*) { warnings += strstr(line, "system calls need leases: read(2)") != nullptr; },
      nullptr);
  vmem::api::test_hooks().adjust_trap = [](vmem::trap::UserfaultOptions& options) { options.allow_privileged = false; };
  ASSERT_EQ(vmem_set("trap", "uffd"), 0) << vmem_last_error();
  for (int start = 0; start < 2; ++start) {
    vmem::region region(4 << 20, VMEM_HOST_ONLY);
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    ASSERT_EQ(write(ends[1], "x", 1), 1);
    const bool waits = read(ends[0], region.data(), 1) == 1;
    close(ends[0]);
    close(ends[1]);
    if (waits) _exit(77);
    region.free();
    vmem_shutdown();
  }
  vmem_log(nullptr, nullptr);
  EXPECT_EQ(warnings, 1);
}

TEST(PrivilegesChild, DISABLED_RunsAsItsOwner) {
  if (getauxval(AT_SECURE) == 0) _exit(77);
  struct stat program {};
  ASSERT_EQ(stat("/proc/self/exe", &program), 0);
  ASSERT_EQ(geteuid(), program.st_uid);
  ASSERT_NE(getuid(), geteuid());
  char value[256];
  ASSERT_EQ(vmem_get("ssd_path", value, sizeof value), 0) << vmem_last_error();
  EXPECT_STREQ(value, "");
  ASSERT_EQ(vmem_get("block_size", value, sizeof value), 0) << vmem_last_error();
  EXPECT_STREQ(value, "2097152");
  ASSERT_EQ(vmem_get("log", value, sizeof value), 0) << vmem_last_error();
  EXPECT_STREQ(value, "warning");
  // Settings of the program itself apply.
  ASSERT_EQ(vmem_set("host_budget", "32MiB"), 0) << vmem_last_error();
  ASSERT_EQ(vmem_get("host_budget", value, sizeof value), 0) << vmem_last_error();
  EXPECT_STREQ(value, "33554432");
  static std::atomic<int> without{0};
  vmem_log(
      [](int, const char* line, void*) { without += strstr(line, "no device tier: this program runs") != nullptr; },
      nullptr);
  ASSERT_EQ(vmem_set("log", "info"), 0) << vmem_last_error();
  if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS) _exit(77);
  {
    vmem::region region(64 << 20, VMEM_HOST_ONLY);
    memset(region.data(), 7, region.size());
    EXPECT_GT(vmem::stats().write_bytes, 0u);
  }
  vmem_log(nullptr, nullptr);
  EXPECT_EQ(without, 1) << "CUDA's driver would load what CUDA_INJECTION64_PATH names";
}

// Returns the sockets of this process's publication, in every folder where those of its user are
// looked for.
std::vector<std::string> own_sockets() {
  std::vector<std::string> out;
  for (const std::string& folder : vmem::publish::folders(geteuid(), nullptr)) {
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
      const std::string name = entry.path().filename();
      if (name.rfind(std::to_string(getpid()) + "-", 0) == 0) out.push_back(entry.path());
    }
  }
  return out;
}

TEST(PrivilegesChild, DISABLED_RunsAsAnotherGroup) {
  if (getauxval(AT_SECURE) == 0) _exit(77);
  ASSERT_EQ(getuid(), geteuid());
  ASSERT_NE(getgid(), getegid());
  static std::atomic<int> named{0};
  vmem_log([](int, const char* line, void*) { named += strstr(line, "VMEM_HOST_BUGDET") != nullptr; }, nullptr);
  ASSERT_EQ(vmem_set("host_budget", "32MiB"), 0) << vmem_last_error();
  int rc = vmem_init();
  if (rc == -EPERM || rc == -ENOSYS) _exit(77);
  ASSERT_EQ(rc, 0) << vmem_last_error();
  vmem_shutdown();
  // A file with a name would belong to the user who started the program, who could open it by that
  // name.
  const std::string store = std::string(getenv("PLACE")) + "/store";
  for (int there = 0; there < 2; ++there) {
    ASSERT_EQ(vmem_set("ssd_path", store.c_str()), 0) << vmem_last_error();
    EXPECT_EQ(vmem_init(), -EPERM);
    EXPECT_NE(strstr(vmem_last_error(), "who started this program"), nullptr) << vmem_last_error();
    EXPECT_EQ(access(store.c_str(), F_OK) == 0, there == 1) << "made although it is refused";
    vmem_shutdown();
    close(open(store.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  }
  ASSERT_EQ(vmem_set("ssd_path", ""), 0) << vmem_last_error();
  rc = vmem_init();
  ASSERT_EQ(rc, 0) << vmem_last_error();
  vmem::region region(64 << 20, VMEM_HOST_ONLY);
  memset(region.data(), 7, region.size());
  char value[16];
  ASSERT_EQ(vmem_get("publish", value, sizeof value), 0) << vmem_last_error();
  EXPECT_STREQ(value, "off");
  EXPECT_EQ(vmem::api::Runtime::get().published_at(), "");
  EXPECT_EQ(own_sockets(), std::vector<std::string>{}) << "who started it can read and tune it";
  // The program's own setting does not publish to that user either.
  EXPECT_EQ(vmem_set("publish", "on"), -EPERM);
  EXPECT_NE(strstr(vmem_last_error(), "AT_SECURE"), nullptr) << vmem_last_error();
  ASSERT_EQ(vmem_get("publish", value, sizeof value), 0) << vmem_last_error();
  EXPECT_STREQ(value, "off");
  EXPECT_EQ(vmem::api::Runtime::get().published_at(), "");
  EXPECT_EQ(own_sockets(), std::vector<std::string>{});
  EXPECT_EQ(vmem_set("publish", "off"), 0) << vmem_last_error();
  vmem_shutdown();
  vmem_log(nullptr, nullptr);
  EXPECT_EQ(named, 0) << "the environment is its starter's: none of it is looked at";
  fflush(stdout);
  _exit(HasFailure() ? 1 : 0);  // LeakSanitizer may not look into such a process, and would report a failure
}

TEST(PrivilegesChild, DISABLED_GivesUpItsRights) {
  constexpr uid_t kLater = 61505;
  ASSERT_EQ(vmem_set("publish", "on"), 0) << vmem_last_error();
  ASSERT_EQ(vmem_set("host_budget", "16MiB"), 0) << vmem_last_error();
  vmem::region region(64 << 20, VMEM_HOST_ONLY);
  memset(region.data(), 7, region.size());
  const auto path = [] { return vmem::api::Runtime::get().published_at(); };
  const std::string before = path();
  if (before.empty()) _exit(77);
  // Switches temporarily, as to open a user's file: it is still root's process.
  ASSERT_EQ(seteuid(kLater), 0);
  usleep(1500000);  // the file is written once a second
  ASSERT_EQ(seteuid(0), 0);
  EXPECT_EQ(path(), before);
  EXPECT_EQ(access((before + ".sock").c_str(), F_OK), 0);
  ASSERT_EQ(setgroups(0, nullptr), 0);
  ASSERT_EQ(setgid(kLater), 0);
  ASSERT_EQ(setuid(kLater), 0);
  EXPECT_TRUE(vmem::test::eventually([&] { return path() != before; }));
  EXPECT_EQ(path(), "");
  EXPECT_EQ(own_sockets(), std::vector<std::string>{});
  // The region still works.
  for (size_t at = 0; at < region.size(); at += 4096) ASSERT_EQ(region.view<char>()[at], 7);
  // The program's own setting publishes it.
  ASSERT_EQ(vmem_set("publish", "off"), 0) << vmem_last_error();
  ASSERT_EQ(vmem_set("publish", "on"), 0) << vmem_last_error();
  EXPECT_NE(path().find(std::to_string(kLater)), std::string::npos) << path();
  EXPECT_NE(own_sockets(), std::vector<std::string>{});
  region.free();
  vmem_shutdown();
  EXPECT_EQ(own_sockets(), std::vector<std::string>{});
}

TEST(PrivilegesChild, DISABLED_RunsWithCapabilities) {
  if (getauxval(AT_SECURE) == 0) _exit(77);
  ASSERT_EQ(vmem_set("host_budget", "32MiB"), 0) << vmem_last_error();
  const int rc = vmem_init();
  if (rc == -EPERM || rc == -ENOSYS) _exit(77);
  ASSERT_EQ(rc, 0) << vmem_last_error();
  const auto is = [](const char* name, const char* wanted) {
    char value[256];
    EXPECT_EQ(vmem_get(name, value, sizeof value), 0) << vmem_last_error();
    EXPECT_STREQ(value, wanted) << name;
  };
  is("host_budget", "33554432");
  is("block_size", "2097152");
  is("ssd_path", "");
  is("publish", "off");
  vmem::region region(64 << 20, VMEM_HOST_ONLY);
  memset(region.data(), 7, region.size());
  EXPECT_GT(vmem::stats().write_bytes, 0u);
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string file = std::filesystem::read_symlink(entry.path(), gone);
    EXPECT_NE(file.rfind(getenv("PLACE"), 0), 0u) << file;
    files += file.find("/var/tmp/") == 0;
  }
  EXPECT_GT(files, 0u) << "its store is where the library's own default is";
  EXPECT_EQ(own_sockets(), std::vector<std::string>{});
  region.free();
  vmem_shutdown();
  fflush(stdout);
  _exit(HasFailure() ? 1 : 0);
}

}  // namespace
