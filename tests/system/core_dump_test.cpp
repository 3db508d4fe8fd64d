// Setting core_dump: whether the kernel leaves regions out of core dumps, also where blocks came, went and came back,
// and where a region shows its file. Asked of the kernel: the flag "dd" of the mapping.
#include <sys/mman.h>

#include <fstream>

#include "support.h"
#include "trap/mapping.h"

namespace {

using systest::SystemTest;

constexpr size_t kBlock = 2 << 20, kBlocks = 32;

// Of the bytes of [address, address + size): how many are in mappings that a core dump leaves out.
size_t left_out(const void* address, size_t size) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address), end = begin + size;
  std::ifstream smaps("/proc/self/smaps");
  uintptr_t from = 0, to = 0;
  size_t bytes = 0;
  for (std::string line; std::getline(smaps, line);) {
    uintptr_t first = 0, last = 0;  // a line that begins with a letter like "A" reads as half of it
    if (sscanf(line.c_str(), "%lx-%lx ", &first, &last) == 2) from = first, to = last;
    if (line.rfind("VmFlags:", 0) != 0 || (line + " ").find(" dd ") == std::string::npos) continue;
    if (std::max(from, begin) < std::min(to, end)) bytes += std::min(to, end) - std::max(from, begin);
  }
  return bytes;
}

class CoreDumps : public SystemTest, public ::testing::WithParamInterface<const char*> {
 protected:
  void TearDown() override {
    SystemTest::TearDown();
    EXPECT_EQ(vmem_set("trap", "auto"), 0);
  }
  // Twice what the budget holds, stored to and read: each block came and went.
  static size_t left_out_after_use(const char* setting) {
    configure({{"trap", "uffd"}, {"transfer", GetParam()}, {"host_budget", "32MiB"}, {"core_dump", setting}});
    if (IsSkipped()) return 0;
    const vmem::region r(kBlock * kBlocks);
    auto* bytes = static_cast<char*>(r.data());
    for (size_t b = 0; b < kBlocks; ++b) bytes[b * kBlock] = 1;
    for (size_t b = 0; b < kBlocks; ++b) EXPECT_EQ(bytes[b * kBlock], 1);
    return left_out(bytes, kBlock * kBlocks);
  }
};

TEST_P(CoreDumps, HoldNoRegion) {
  const size_t bytes = left_out_after_use("off");
  if (IsSkipped()) return;
  EXPECT_EQ(bytes, kBlock * kBlocks);
}

TEST_P(CoreDumps, HoldRegionsOnRequest) {
  const size_t bytes = left_out_after_use("on");
  if (IsSkipped()) return;
  EXPECT_EQ(bytes, 0u);
}

// A block that shows its file, of a PRIVATE region: what is stored there is the process's own, and would be dumped.
TEST(CoreDumpsOfFiles, HoldNothingOfABlockThatShowsItsFile) {
  const int fd = memfd_create("vmem-core-dump", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(fd, kBlock), 0);
  for (const auto dump : {vmem::trap::CoreDump::no, vmem::trap::CoreDump::yes}) {
    uintptr_t start = 0;
    ASSERT_TRUE(vmem::trap::reserve_space(kBlock, kBlock, &start).ok());
    ASSERT_TRUE(vmem::trap::replace_with_file(fd, 0, false, start, kBlock, dump).ok());
    auto* const bytes = reinterpret_cast<char*>(start);
    bytes[0] = 1;
    EXPECT_EQ(left_out(bytes, kBlock), dump == vmem::trap::CoreDump::no ? kBlock : 0);
    munmap(bytes, kBlock);
  }
  close(fd);
}

INSTANTIATE_TEST_SUITE_P(Transfers, CoreDumps, ::testing::Values("auto", "copy"),
                         [](const auto& tested) { return std::string(tested.param); });

}  // namespace
