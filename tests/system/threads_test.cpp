// Needless activity of the library's threads, by the kernel's counters of each.
#include <dirent.h>

#include <sstream>

#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;

// Returns the first line of file `what` for each thread of this process whose name begins with
// `name`.
std::vector<std::string> of_threads(const std::string& name, const char* what) {
  std::vector<std::string> texts;
  DIR* const tasks = opendir("/proc/self/task");
  while (const dirent* task = readdir(tasks)) {
    const std::string folder = std::string("/proc/self/task/") + task->d_name;
    std::ifstream comm(folder + "/comm"), in(folder + "/" + what);
    std::string is;
    if (!std::getline(comm, is) || is.compare(0, name.size(), name) != 0) continue;
    texts.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  closedir(tasks);
  return texts;
}

uint64_t minor_faults(const std::string& name) {
  uint64_t sum = 0;
  for (const std::string& text : of_threads(name, "stat")) {
    std::istringstream rest(text.substr(text.rfind(')') + 1));
    std::string word;
    for (int i = 0; i < 8; ++i) rest >> word;  // the first word is the state
    sum += std::stoull(word);
  }
  return sum;
}

uint64_t sleeps(const std::string& name) {
  const std::string field = "\nvoluntary_ctxt_switches:";
  uint64_t sum = 0;
  for (const std::string& text : of_threads(name, "status"))
    sum += std::stoull(text.substr(text.find(field) + field.size()));
  return sum;
}

class Threads : public SystemTest {
 protected:
  static constexpr size_t kBytes = 64 << 20;

  static void read(const vmem::region& region) {
    const auto words = region.view<const uint64_t>();
    uint64_t sum = 0;
    for (size_t i = 0; i < kBytes / sizeof(uint64_t); i += 512) sum += words[i];
    EXPECT_NE(sum, 0u);
  }
};

// The kernel's workers find memory for frames, several at once. If the I/O thread did, all other
// transfers would wait for it.
TEST_F(Threads, TheIoThreadFindsNoMemoryForFrames) {
  configure({{"block_size", "2MiB"}, {"host_budget", "512MiB"}, {"readahead", "64MiB"}});
  if (IsSkipped()) return;
  if (of_threads("vmem-io-", "comm").size() != 1) GTEST_SKIP() << "no io_uring: each thread reads for itself";
  if (systest::kSanitized) GTEST_SKIP() << "the sanitizer's own memory counts, too";
  TempFile file(kBytes);
  vmem::region region(kBytes, file.path(), 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
  const uint64_t before = minor_faults("vmem-io-");
  read(region);
  EXPECT_LT(minor_faults("vmem-io-") - before, kBytes / (2 << 20) / 2);
}

// A reclaim thread that is woken needlessly finds no work, and competes for the lock.
TEST_F(Threads, TheEvictorSleepsWhileThereIsMemory) {
  configure({{"block_size", "64KiB"}, {"host_budget", "512MiB"}, {"readahead", "64MiB"}});
  if (IsSkipped()) return;
  TempFile file(kBytes);
  vmem::region region(kBytes, file.path(), 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
  const uint64_t before = sleeps("vmem-reclaim-");
  read(region);
  EXPECT_EQ(vmem::stats().evictions, 0u);
  EXPECT_LT(sleeps("vmem-reclaim-") - before, 32u);
}

}  // namespace
