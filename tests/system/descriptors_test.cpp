// A program that has closed its standard input, output or error, as daemons do: output to them
// would go to the next file that is opened.
#include <fcntl.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "child.h"
#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;

constexpr size_t kSize = 4 << 20;

bool closed(int fd) {
  return fcntl(fd, F_GETFD) < 0;
}

// Exits with 77 if accesses cannot be trapped here; other numbers name the failed step, as printing
// is impossible.
TEST(DescriptorsChild, DISABLED_HasClosedItsStandardOnes) {
  const bool at_start = getenv("VMEM_TEST_AT_START") != nullptr;
  const auto close_them = [] {
    for (int fd = 0; fd <= STDERR_FILENO; ++fd) close(fd);
  };
  if (at_start) close_them();
  if (const int rc = vmem_init(); rc != 0) _exit(rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP ? 77 : 1);
  if (!at_start) close_them();
  void *mapped = nullptr, *anonymous = nullptr;
  if (vmem_map(&mapped, kSize, getenv("VMEM_TEST_FILE"), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY) != 0) _exit(2);
  if (vmem_alloc(&anonymous, kSize, VMEM_HOST_ONLY) != 0) _exit(3);
  memset(anonymous, 3, kSize);
  if (vmem_evict(anonymous, kSize, VMEM_SSD) != 0) _exit(4);
  if (vmem_set("host_budget", "1PiB") != 0) _exit(5);  // the log warns that the machine has less
  if (!closed(STDIN_FILENO) || !closed(STDOUT_FILENO) || !closed(STDERR_FILENO)) _exit(6);
  vmem_shutdown();
  _exit(0);
}

std::map<int, std::string> descriptors() {
  std::map<int, std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string what = std::filesystem::read_symlink(entry.path(), gone);
    if (!gone && what.find("/fd") == std::string::npos) out[std::stoi(entry.path().filename())] = what;
  }
  return out;
}

TEST(DescriptorsChild, DISABLED_HasOneOfEachKind) {
  const auto before = descriptors();
  ASSERT_EQ(vmem_set("publish", "on"), 0) << vmem_last_error();
  ASSERT_EQ(vmem_set("ssd_path", getenv("VMEM_TEST_STORES")), 0) << vmem_last_error();
  if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(77);
  const vmem::region anonymous(64 << 20, VMEM_HOST_ONLY);
  memset(anonymous.data(), 7, anonymous.size());
  std::vector<vmem::region> mapped;
  for (const unsigned how : {VMEM_MAP_READ, VMEM_MAP_PRIVATE, VMEM_MAP_SHARED})
    mapped.emplace_back(kSize, getenv("VMEM_TEST_FILE"), 0, how | VMEM_HOST_ONLY);
  for (const vmem::region& r : mapped)
    EXPECT_EQ(r.view<volatile char>()[kSize / 2], r.view<volatile char>()[kSize / 2]);
  const vmem_range range{anonymous.data(), kSize, VMEM_READ, 0};
  struct vmem_lease* lease = nullptr;
  ASSERT_EQ(vmem_lease_async(&lease, &range, 1, VMEM_HOST, nullptr, nullptr, nullptr), 0) << vmem_last_error();
  EXPECT_GE(vmem_lease_fd(lease), 0) << vmem_last_error();
  size_t ours = 0;
  for (const auto& [fd, what] : descriptors()) {
    if (before.count(fd) != 0) continue;
    ++ours;
    EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC) << fd << ": " << what;
  }
  EXPECT_GE(ours, 10u) << "trap, two stores, three files, a lease, a publication";
  EXPECT_EQ(vmem_lease_end(lease, nullptr), 0) << vmem_last_error();
}

class Descriptors : public SystemTest {
 protected:
  void nothing_is_printed_into_a_file(systest::Environment more, const TempFile& file) {
    if (IsSkipped()) return;
    const pid_t child = systest::start_child("DescriptorsChild.DISABLED_HasClosedItsStandardOnes", more);
    const int status = systest::wait_for_child(child, 120);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "accesses cannot be trapped here";
    EXPECT_EQ(status, 0) << (status == -1 ? "hung" : "see the child's numbers");
    EXPECT_TRUE(file.read() == TempFile::content(kSize, 1)) << "something else was written to the file";
  }
};

// Nor has a child of vfork, clone or posix_spawn, which runs none of our handlers.
TEST_F(Descriptors, AProgramThatIsExecutedHasNoneOfThem) {
  if (IsSkipped()) return;
  const TempFile file(kSize);
  const std::string store = file.path() + ".store";
  for (const char* engine : {"auto", "threads"}) {
    const pid_t child = systest::start_child("DescriptorsChild.DISABLED_HasOneOfEachKind",
                                             {{"VMEM_TEST_FILE", file.path()},
                                              {"VMEM_TEST_STORES", store + ":" + systest::temp_folder()},
                                              {"VMEM_DEVICE", "none"},
                                              {"VMEM_HOST_BUDGET", "32MiB"},
                                              {"VMEM_IO_ENGINE", engine}});
    const int status = systest::wait_for_child(child, 120);
    unlink(store.c_str());
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "accesses cannot be trapped here";
    EXPECT_EQ(status, 0) << engine;
  }
}

TEST_F(Descriptors, NothingIsPrintedIntoAFileWhereTheyAreClosedLater) {
  const TempFile file(kSize);
  nothing_is_printed_into_a_file({{"VMEM_TEST_FILE", file.path()}, {"VMEM_DEVICE", "none"}, {"VMEM_DIRECT_IO", "off"}},
                                 file);
}

TEST_F(Descriptors, NothingIsPrintedIntoAFileWhereTheyAreClosedAtTheStart) {
  const TempFile file(kSize);
  for (const char* engine : {"auto", "threads"}) {
    nothing_is_printed_into_a_file({{"VMEM_TEST_FILE", file.path()},
                                    {"VMEM_TEST_AT_START", "1"},
                                    {"VMEM_DEVICE", "none"},
                                    {"VMEM_DIRECT_IO", "off"},
                                    {"VMEM_IO_ENGINE", engine}},
                                   file);
  }
}

}  // namespace
