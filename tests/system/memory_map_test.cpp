// Memory runs out at each step of making a region: the call fails and leaves nothing behind: no
// descriptor, no lock, no address space, no part of the budgets.
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <fstream>

#include "refusals.h"
#include "support.h"

namespace {

using namespace systest;

constexpr size_t kBytes = size_t{1} << 30;  // size of a file without data

size_t descriptors() {
  size_t n = 0;
  DIR* const dir = opendir("/proc/self/fd");
  while (readdir(dir) != nullptr) ++n;
  closedir(dir);
  return n;
}

size_t address_space() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

class MemoryMaps : public SystemTest, public testing::WithParamInterface<unsigned> {
 protected:
  int map(void** p) const {
    const unsigned kind = GetParam();
    return kind == 0 ? vmem_alloc(p, kBytes, VMEM_HOST_ONLY)
                     : vmem_map(p, kBytes, path.c_str(), 0, kind | VMEM_HOST_ONLY);
  }
  std::string path;
};

TEST_P(MemoryMaps, LeaveNothingWhereThereIsNoMemory) {
  configure({{"host_budget", "64MiB"}, {"block_size", "64KiB"}});
  if (IsSkipped()) return;
  TempFile file;
  path = file.path();
  ASSERT_EQ(truncate(path.c_str(), kBytes), 0);
  // Memory that the first region allocates for all later ones stays.
  void* p = nullptr;
  ASSERT_EQ(map(&p), 0) << vmem_last_error();
  ASSERT_EQ(vmem_free(p), 0) << vmem_last_error();
  const auto before = vmem::stats();
  const size_t open_before = descriptors(), mapped_before = address_space();
  size_t refused = 0;
  refuse_each([&](int) { return map(&p); },
              [&](int n, int rc) {
                if (rc == 0) {
                  ASSERT_EQ(vmem_free(p), 0) << vmem_last_error();
                } else {
                  ++refused;
                  EXPECT_EQ(rc, -ENOMEM) << vmem_last_error();
                }
                EXPECT_EQ(descriptors(), open_before) << "after allocation " << n;
                EXPECT_LT(address_space(), mapped_before + kBytes / 2) << "after allocation " << n;
                EXPECT_EQ(vmem::api::Runtime::get().check(), "");
              });
  EXPECT_GT(refused, 4u);
  const int other = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(other, 0);
  EXPECT_EQ(flock(other, LOCK_EX | LOCK_NB), 0) << "somebody has its lock still";
  close(other);
  const auto after = vmem::stats();
  EXPECT_EQ(after.regions, before.regions);
  EXPECT_EQ(after.host_bytes, before.host_bytes);
  EXPECT_EQ(after.ssd_bytes, before.ssd_bytes);
}
INSTANTIATE_TEST_SUITE_P(Kinds, MemoryMaps, testing::Values(0u, VMEM_MAP_READ, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE));

}  // namespace
