// The program forbids itself calls of userfaultfd after the library has started, by a filter of
// system calls. Operations that can continue do, others give an error with its reason; no thread
// hangs, and no data is lost.
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "child.h"
#include "common/forbid.h"
#include "faulty_disk.h"
#include "support.h"

namespace {

using systest::stamp;
using systest::SystemTest;

constexpr size_t kSize = 32 << 20, kWords = kSize / sizeof(uint64_t), kStep = 512;

class ForbiddenCalls : public SystemTest, public testing::WithParamInterface<const char*> {
 protected:
  // log: the file that receives the child's output.
  void run(const std::string& test, int wanted = 0, const std::string& log = "", const char* device = "none") {
    configure({{"trap", "uffd"}});
    if (IsSkipped()) return;
    vmem_shutdown();
    ASSERT_EQ(vmem_set("trap", "auto"), 0);
    const pid_t child = systest::start_child("ForbiddenCallsChild.DISABLED_" + test, {{"VMEM_BLOCK_SIZE", GetParam()},
                                                                                      {"VMEM_HOST_BUDGET", "24MiB"},
                                                                                      {"VMEM_READAHEAD", "0"},
                                                                                      {"VMEM_FAULT_TIMEOUT_MS", "1000"},
                                                                                      {"VMEM_TRAP", "uffd"},
                                                                                      {"VMEM_DEVICE", device},
                                                                                      {"TEST_LOG", log}});
    const int status = systest::wait_for_child(child, 60);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "filters of system calls are refused here";
    EXPECT_EQ(status, wanted) << (status == -1 ? "hung" : "");
  }
};

TEST_P(ForbiddenCalls, WithoutWakeEverybodyIsWokenAllTheSame) {
  run("Wake");
}

TEST_P(ForbiddenCalls, WithoutWriteProtectionStoresGoOnAndChangedBlocksStay) {
  run("WriteProtect");
}

TEST_P(ForbiddenCalls, WithoutWakeAndWriteProtectionAllGoesOn) {
  run("WakeAndWriteProtect");
}

TEST_P(ForbiddenCalls, WithoutAnyTheProcessEndsInPlaceOfAThreadThatSleepsForGood) {
  run("All", SIGABRT);
}

// Also with a disk that does not answer, for which the end waits a while; and the log says why the
// process ends.
class ForbiddenCallsBesideADisk : public ForbiddenCalls {};
INSTANTIATE_TEST_SUITE_P(Blocks, ForbiddenCallsBesideADisk, testing::Values("2MiB"));

TEST_P(ForbiddenCallsBesideADisk, TheReasonOfTheEndIsSaid) {
  const systest::TempFile log(0);
  run("AllBesideADiskThatHangs", SIGABRT, log.path(), "sim-handles");
  if (IsSkipped() || HasFailure()) return;
  std::ifstream in(log.path());
  const std::string said(std::istreambuf_iterator<char>(in), {});
  const auto times = [&](const char* text) {
    size_t n = 0;
    for (size_t at = said.find(text); at != said.npos; at = said.find(text, at + 1)) ++n;
    return n;
  };
  EXPECT_EQ(times("a thread waits for a block and cannot be woken"), 1u) << said;
  EXPECT_EQ(times("the process ends for the reason above"), 1u) << said;
  EXPECT_EQ(times("exit was called"), 0u) << said;
}

TEST_P(ForbiddenCalls, WithoutAnythingThatWakesButTransfersBlocksComeAndAreStoredTo) {
  run("AllThatWakes");
}

TEST_P(ForbiddenCalls, WithoutWriteProtectionAndWhatDoesWithoutItStoresGoOnAndChangedBlocksStay) {
  run("WriteProtectAndUnregister");
}
INSTANTIATE_TEST_SUITE_P(Blocks, ForbiddenCalls, testing::Values("4KiB", "64KiB", "2MiB"));

void write(std::span<uint64_t> words, uint64_t round) {
  for (size_t i = 0; i < words.size(); i += kStep) words[i] = stamp(i, round);
}

size_t wrong(std::span<uint64_t> words, uint64_t round) {
  size_t found = 0;
  for (size_t i = 0; i < words.size(); i += kStep) found += words[i] != stamp(i, round) ? 1 : 0;
  return found;
}

// There are many such blocks, and each takes several calls.
bool small_blocks() {
  return getenv("VMEM_BLOCK_SIZE") == std::string("4KiB");
}

// Blocks come, are stored to and leave although those calls are forbidden.
void go_on_without(std::initializer_list<unsigned long> forbidden, bool writes) {
  systest::LogLines log;
  vmem::region region(writes && small_blocks() ? kSize / 8 : kSize, VMEM_HOST_ONLY);
  const auto words = region.view<uint64_t>();
  write(words, 1);
  ASSERT_EQ(vmem_sync(region.data(), region.size()), 0) << vmem_last_error();
  for (const unsigned long request : forbidden)
    if (!vmem::test::forbid_ioctl(request, EPERM)) _exit(77);
  for (uint64_t round = 1; round < 4; ++round) {
    std::vector<std::thread> readers;
    for (int i = 0; i < 3; ++i) readers.emplace_back([&] { EXPECT_EQ(wrong(words, round), 0u); });
    for (std::thread& reader : readers) reader.join();
    if (!writes) break;
    write(words, round + 1);
    EXPECT_EQ(wrong(words, round + 1), 0u);
    EXPECT_EQ(vmem_evict(region.data(), region.size(), VMEM_SSD), 0) << vmem_last_error();
  }
  if (!writes) {
    // Use only as much as fits: changed blocks that are copied stay in memory.
    const auto part = words.subspan(0, words.size() / 4);
    {
      const vmem::lease lease(region.data(), region.size() / 8, VMEM_READ);  // these cannot leave and come back
      write(words.subspan(0, words.size() / 8), 1);
    }
    write(part, 2);
    EXPECT_EQ(wrong(part, 2), 0u);
    std::vector<std::thread> storing;
    for (size_t t = 0; t < 4; ++t) storing.emplace_back([&, t] { write(part.subspan(t * part.size() / 4, kStep), 3); });
    for (std::thread& thread : storing) thread.join();
  }
  EXPECT_TRUE(log.contains("UFFDIO_WAKE is refused"));
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

TEST(ForbiddenCallsChild, DISABLED_Wake) {
  go_on_without({UFFDIO_WAKE}, true);
}

TEST(ForbiddenCallsChild, DISABLED_WakeAndWriteProtect) {
  go_on_without({UFFDIO_WAKE, UFFDIO_WRITEPROTECT}, false);
}

TEST(ForbiddenCallsChild, DISABLED_AllBesideADiskThatHangs) {
  const int log = open(getenv("TEST_LOG"), O_WRONLY | O_CLOEXEC);
  ASSERT_EQ(dup2(log, STDERR_FILENO), STDERR_FILENO);
  ASSERT_EQ(vmem_set("host_budget", "256MiB"), 0);  // large enough that no block is evicted
  vmem::store::FaultyEngine* disk = nullptr;
  systest::wrap_engine(&disk);
  const systest::TempFile file(kSize / 4);
  const vmem::region shared(kSize / 4, file.path(), 0, VMEM_MAP_SHARED);
  const vmem::region region(kSize / 4, VMEM_HOST_ONLY);
  write(shared.view<uint64_t>(), 1);
  // Blocks that have come back from a device are written in place, which needs no write protection.
  { const vmem::lease lease(shared.data(), shared.size(), VMEM_READ | VMEM_WRITE, 0); }
  ASSERT_EQ(vmem_evict(shared.data(), shared.size(), VMEM_HOST), 0) << vmem_last_error();
  vmem::store::Fault hangs;
  hangs.action = vmem::store::Fault::Action::hang;
  hangs.op = vmem::store::Io::Op::write;
  disk->add_rule(hangs);
  if (!vmem::test::forbid_ioctl(UFFDIO_WAKE, EPERM, 0xff00)) _exit(77);
  region.view<uint64_t>()[0] = 1;
  FAIL() << "there is no way to answer that";
}

TEST(ForbiddenCallsChild, DISABLED_AllThatWakes) {
  vmem::region region(kSize / 8, VMEM_HOST_ONLY);
  const auto words = region.view<uint64_t>();
  write(words, 1);
  ASSERT_EQ(vmem_evict(region.data(), region.size(), VMEM_SSD), 0) << vmem_last_error();
  for (const unsigned long request : {UFFDIO_WAKE, UFFDIO_WRITEPROTECT, UFFDIO_UNREGISTER})
    if (!vmem::test::forbid_ioctl(request, EPERM)) _exit(77);
  write(words, 2);
  EXPECT_EQ(wrong(words, 2), 0u);
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

TEST(ForbiddenCallsChild, DISABLED_All) {
  const vmem::region region(kSize, VMEM_HOST_ONLY);
  const auto words = region.view<uint64_t>();
  write(words.subspan(0, kWords / 8), 1);
  if (!vmem::test::forbid_ioctl(UFFDIO_WAKE, EPERM, 0xff00)) _exit(77);
  words[kWords / 2] = 1;
  FAIL() << "there is no way to answer that";
}

void store_without(std::initializer_list<unsigned long> forbidden) {
  const size_t part = small_blocks() ? kWords / 32 : kWords / 4;
  systest::LogLines log;
  vmem::region region(kSize, VMEM_HOST_ONLY);
  const auto words = region.view<uint64_t>();
  write(words, 1);
  ASSERT_EQ(vmem_sync(region.data(), region.size()), 0) << vmem_last_error();
  // these are in memory, and write-protected if blocks are copied
  EXPECT_EQ(wrong(words.subspan(0, part), 1), 0u);
  for (const unsigned long request : forbidden)
    if (!vmem::test::forbid_ioctl(request, EPERM)) _exit(77);
  write(words.subspan(0, part), 2);
  EXPECT_EQ(wrong(words.subspan(0, part), 2), 0u);
  for (size_t i = kWords / 2; i < kWords; i += kStep) ASSERT_EQ(words[i], stamp(i, 1)) << "clean blocks come and go";
  const int synced = vmem_sync(region.data(), region.size());
  EXPECT_TRUE(synced == 0 || synced == -EPERM) << vmem_last_error();
  EXPECT_TRUE(log.contains("Was ioctl forbidden") || getenv("VMEM_BLOCK_SIZE") == std::string("2MiB"));
  EXPECT_EQ(wrong(words.subspan(0, part), 2), 0u);
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

TEST(ForbiddenCallsChild, DISABLED_WriteProtect) {
  store_without({UFFDIO_WRITEPROTECT});
}

TEST(ForbiddenCallsChild, DISABLED_WriteProtectAndUnregister) {
  store_without({UFFDIO_WRITEPROTECT, UFFDIO_UNREGISTER});
}

}  // namespace
