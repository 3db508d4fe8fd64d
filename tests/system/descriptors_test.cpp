// A program that has closed its standard input, output or error, as daemons do: what is printed there goes to the next
// file that is opened.
#include <fcntl.h>

#include <cstring>

#include "child.h"
#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;

constexpr size_t kSize = 4 << 20;

bool closed(int fd) {
  return fcntl(fd, F_GETFD) < 0;
}

// 77: accesses cannot be trapped here; else its number says what went wrong, for nothing can be printed any more.
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
  if (vmem_set("host_budget", "1PiB") != 0) _exit(5);  // a line in the log says that there is not so much
  if (!closed(STDIN_FILENO) || !closed(STDOUT_FILENO) || !closed(STDERR_FILENO)) _exit(6);
  vmem_shutdown();
  _exit(0);
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
