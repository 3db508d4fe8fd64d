// exit() beside work that never ends: exit() completes, reports what was not written, and the rest
// is in the files.
#include <cstring>
#include <thread>

#include "core/step.h"
#include "device/paging_host.h"
#include "exit_child.h"
#include "vmem/detail/paging_group.h"
#include "vmem/detail/paging_view.h"

namespace systest {
namespace {

using vmem::device::SimKernel;

constexpr size_t kBlock = kExitBlock;

TEST(ExitWaitsChild, DISABLED_AStreamThatNeverEnds) {
  start_device(false);
  char* held = map_shared("VMEM_TEST_FILE", 4 * kBlock);
  char* other = map_shared("VMEM_TEST_OTHER", 4 * kBlock);
  void* stream = vmem::device::current_sim()->create_stream(0);
  ASSERT_EQ(vmem_acquire(held, kBlock, VMEM_READ | VMEM_WRITE, 0, stream), 0) << vmem_last_error();
  static std::atomic<bool> stored;
  const auto status = vmem::device::current_sim()->launch(stream, [held](SimKernel& k) {
    if (std::byte* at = k.at(held, 1, true); at != nullptr) *at = std::byte{7};
    stored = true;
    for (;;) pause();
  });
  ASSERT_TRUE(status.ok()) << status.text();
  while (!stored) usleep(1000);
  if (path_of("VMEM_TEST_HOW") == "released") {
    ASSERT_EQ(vmem_release(held, kBlock, stream), 0) << vmem_last_error();
  }
  held[3 * kBlock] = 8;
  memset(other, 9, 4 * kBlock);
  log_to_file();
}

class ExitBesideAStream : public testing::TestWithParam<const char*> {};
TEST_P(ExitBesideAStream, ThatNeverEndsEndsAndWritesTheRest) {
  const TempFile held(4 * kBlock), other(4 * kBlock);
  const std::string log =
      run_to_exit("ExitWaitsChild.DISABLED_AStreamThatNeverEnds",
                  {{"VMEM_TEST_HOW", GetParam()}, {"VMEM_TEST_FILE", held.path()}, {"VMEM_TEST_OTHER", other.path()}});
  if (log == "skip") GTEST_SKIP() << "no way to trap absent blocks here";
  const auto bytes = held.read(), rest = other.read();
  EXPECT_EQ(bytes[3 * kBlock], 8) << "a block that no stream holds";
  EXPECT_EQ(bytes[0], 7) << "what the kernel had stored";
  for (size_t at = 0; at < rest.size(); at += kBlock / 2) ASSERT_EQ(rest[at], 9) << at;
  if (std::string(GetParam()) == "released") {
    EXPECT_NE(log.find("a stream has not reached their release"), std::string::npos) << log;
  } else {
    EXPECT_NE(log.find("device 0 has work under a live lease with VMEM_WRITE"), std::string::npos) << log;
  }
  EXPECT_NE(log.find("block 0"), std::string::npos) << log;
}
INSTANTIATE_TEST_SUITE_P(Leases, ExitBesideAStream, testing::Values("released", "live"));

// A kernel runs under a live lease when the program ends. It stores all the time, also after exit has
// written everything else.
TEST(ExitWaitsChild, DISABLED_AKernelUnderALiveLease) {
  start_device(path_of("VMEM_TEST_HOW") == "handles");
  ASSERT_EQ(vmem_set("fault_timeout_ms", "60000"), 0);  // exit waits for it, however busy the machine
  char* p = map_shared("VMEM_TEST_FILE", 2 * kBlock);
  void* stream = vmem::device::current_sim()->create_stream(0);
  ASSERT_EQ(vmem_acquire(p, kBlock, VMEM_READ | VMEM_WRITE, 0, stream), 0) << vmem_last_error();
  static std::atomic<bool> written, going;
  vmem::core::step_hook = [](const char* step) {
    if (strcmp(step, "exit.streams") == 0) written = true;
  };
  const auto status = vmem::device::current_sim()->launch(stream, [p](SimKernel& k) {
    for (going = true; !written; usleep(100))
      if (std::byte* at = k.at(p + 1, 1, true); at != nullptr) *at = std::byte{5};
    if (std::byte* at = k.at(p, 1, true); at != nullptr) *at = std::byte{7};
  });
  ASSERT_TRUE(status.ok()) << status.text();
  while (!going) usleep(1000);
  log_to_file();
}

class ExitUnderALease : public testing::TestWithParam<const char*> {};
TEST_P(ExitUnderALease, WritesWhatTheStreamHasBeenToldToDo) {
  const TempFile file(2 * kBlock);
  const std::string log = run_to_exit("ExitWaitsChild.DISABLED_AKernelUnderALiveLease",
                                      {{"VMEM_TEST_HOW", GetParam()}, {"VMEM_TEST_FILE", file.path()}});
  if (log == "skip") GTEST_SKIP() << "no way to trap absent blocks here";
  EXPECT_EQ(file.read()[0], 7);
  EXPECT_EQ(log, "") << "nothing was lost, so nothing is said";
}
INSTANTIATE_TEST_SUITE_P(Backends, ExitUnderALease, testing::Values("managed", "handles"));

// A program that uses regions before it uses CUDA: the context is created last, and destroyed
// first.
TEST(ExitWaitsChild, DISABLED_AContextThatComesUpLate) {
  start_device(path_of("VMEM_TEST_HOW").starts_with("handles"),
               [] { std::atexit([] { vmem::device::current_sim()->reset("its context was destroyed"); }); });
  char* p = map_shared("VMEM_TEST_FILE", 4 * kBlock);
  void* stream = vmem::device::current_sim()->create_stream(0);
  ASSERT_EQ(vmem_acquire(p, 2 * kBlock, VMEM_READ | VMEM_WRITE, 0, stream), 0) << vmem_last_error();
  const auto status = vmem::device::current_sim()->launch(stream, [p](SimKernel& k) {
    for (size_t b = 0; b < 2; ++b)
      if (std::byte* at = k.at(p + b * kBlock, 1, true); at != nullptr) *at = std::byte{7};
  });
  ASSERT_TRUE(status.ok()) << status.text();
  if (!path_of("VMEM_TEST_HOW").ends_with("live")) {
    ASSERT_EQ(vmem_release(p, 2 * kBlock, stream), 0) << vmem_last_error();
  }
  ASSERT_TRUE(vmem::device::current_sim()->synchronize(stream).ok());
  log_to_file();
}

class ExitAfterTheContext : public testing::TestWithParam<const char*> {};
TEST_P(ExitAfterTheContext, WritesWhatOnlyTheDeviceHadBefore) {
  const TempFile file(4 * kBlock);
  const std::string log = run_to_exit("ExitWaitsChild.DISABLED_AContextThatComesUpLate",
                                      {{"VMEM_TEST_HOW", GetParam()}, {"VMEM_TEST_FILE", file.path()}});
  if (log == "skip") GTEST_SKIP() << "no way to trap absent blocks here";
  const auto bytes = file.read();
  EXPECT_EQ(bytes[0], 7);
  EXPECT_EQ(bytes[kBlock], 7);
  EXPECT_EQ(log, "") << "nothing was lost, so nothing is said";
}
INSTANTIATE_TEST_SUITE_P(Backends, ExitAfterTheContext,
                         testing::Values("managed", "handles", "managed, live", "handles, live"));

// A kernel requests one block after the other, adds to each, and never ends. It reports what it had
// done before the end.
TEST(ExitWaitsChild, DISABLED_AKernelThatAsks) {
  start_device(true);
  constexpr uint32_t kBlocks = 4;
  char* held = map_shared("VMEM_TEST_FILE", kBlocks * kBlock);
  void* stream = vmem::device::current_sim()->create_stream(0);
  struct vmem_kernel* open = nullptr;
  vmem_kernel_view opaque;
  ASSERT_EQ(vmem_kernel_begin(&open, held, kBlocks * kBlock, VMEM_READ | VMEM_WRITE, 0, 2 * kBlock, &opaque), 0)
      << vmem_last_error();
  static vmem::paging::View<vmem::paging::HostAtomics> view;
  memcpy(&view, &opaque, sizeof view);
  static std::atomic<uint64_t> added[kBlocks];
  const auto status = vmem::device::current_sim()->launch(stream, [held](SimKernel& k) {
    vmem::paging::Group<vmem::paging::HostAtomics> group(view.table, UINT64_MAX);
    for (uint32_t b = 0; group.acquire(b, vmem::paging::Intent::write) == vmem::paging::Answer::present;
         b = (b + 1) % kBlocks) {
      if (std::byte* at = k.at(held + b * kBlock, 8, true); at != nullptr) {
        *reinterpret_cast<uint64_t*>(at) += 1;
        ++added[b];
      }
      group.release(b);
    }
    for (;;) pause();
  });
  ASSERT_TRUE(status.ok()) << status.text();
  while (added[kBlocks - 1] < 5) usleep(1000);
  log_to_file();
  for (const auto& count : added) dprintf(STDERR_FILENO, "added %llu\n", static_cast<unsigned long long>(count.load()));
}

TEST(ExitBesideAKernel, ThatAsksForEverEndsAndWritesWhatItStored) {
  const TempFile held(4 * kBlock);
  const std::string log = run_to_exit("ExitWaitsChild.DISABLED_AKernelThatAsks", {{"VMEM_TEST_FILE", held.path()}});
  if (log == "skip") GTEST_SKIP() << "no way to trap absent blocks here";
  const auto bytes = held.read(), before = TempFile::content(4 * kBlock, 1);
  std::istringstream lines(log);
  std::string line;
  for (size_t b = 0; b < 4; ++b) {
    uint64_t was = 0, is = 0, added = 0;
    memcpy(&was, &before[b * kBlock], 8);
    memcpy(&is, &bytes[b * kBlock], 8);
    do {
      ASSERT_TRUE(std::getline(lines, line)) << log;
    } while (line.rfind("added ", 0) != 0);
    added = std::strtoull(line.c_str() + 6, nullptr, 10);
    EXPECT_GE(is - was, added) << "block " << b << ", " << log;
    EXPECT_LT(is - was, uint64_t{1} << 32) << "block " << b;
  }
}

TEST(ExitWaitsChild, DISABLED_AStoreUnderAReadLease) {
  start_device(true);
  char* held = map_shared("VMEM_TEST_FILE", 2 * kBlock);
  held[kBlock] = 6;
  void* stream = vmem::device::current_sim()->create_stream(0);
  ASSERT_EQ(vmem_acquire(held, 2 * kBlock, VMEM_READ, 0, stream), 0) << vmem_last_error();
  static std::atomic<bool> runs;
  const auto status = vmem::device::current_sim()->launch(stream, [](SimKernel&) {
    runs = true;
    for (;;) pause();
  });
  ASSERT_TRUE(status.ok()) << status.text();
  while (!runs) usleep(1000);
  if (path_of("VMEM_TEST_HOW") == "released") {
    ASSERT_EQ(vmem_release(held, 2 * kBlock, stream), 0) << vmem_last_error();
  }
  held[0] = 7;
  log_to_file();
  vmem::device::current_sim()->set_hook([](vmem::device::SimOp op, int, uintptr_t, size_t) {
    if (op == vmem::device::SimOp::hold) (void)!write(STDERR_FILENO, "unmapped", 8);
    return vmem::core::Status();
  });
}

// The kernel keeps running while the program ends, and may use its leased blocks. Unmapping them
// would lose the device, with the data that is only there and not yet written.
TEST_P(ExitBesideAStream, LeavesWhatItReadsAndWritesWhatTheCpuStored) {
  const TempFile held(2 * kBlock);
  const std::string log = run_to_exit("ExitWaitsChild.DISABLED_AStoreUnderAReadLease",
                                      {{"VMEM_TEST_HOW", GetParam()}, {"VMEM_TEST_FILE", held.path()}});
  if (log == "skip") GTEST_SKIP() << "no way to trap absent blocks here";
  const auto bytes = held.read();
  EXPECT_EQ(bytes[0], 7) << log;
  EXPECT_EQ(bytes[kBlock], 6) << log;
  EXPECT_EQ(log.find("unmapped"), std::string::npos) << log;
}

// The thread that exits is in the sink: other threads' lines must not wait for it, or for its
// output.
TEST(ExitWaitsChild, DISABLED_InTheLogSink) {
  for (const auto& [name, value] :
       {std::pair{"host_budget", "16MiB"}, {"block_size", "64KiB"}, {"device", "none"}, {"log", "info"}}) {
    ASSERT_EQ(vmem_set(name, value), 0) << vmem_last_error();
  }
  if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(77);
  // One of the two truncated files comes before the complete one, in whichever order addresses are
  // assigned.
  for (const char* file : {"VMEM_TEST_SHORT", "VMEM_TEST_FILE", "VMEM_TEST_SHORT2"}) {
    memset(map_shared(file, 8 * 4096), 5, 8 * 4096);
  }
  ASSERT_EQ(truncate(path_of("VMEM_TEST_SHORT").c_str(), 4096), 0);
  ASSERT_EQ(truncate(path_of("VMEM_TEST_SHORT2").c_str(), 4096), 0);
  log_to_file();
  vmem_log([](int, const char*, void*) { exit(0); }, nullptr);
  vmem_set("host_budget", "1000TiB");  // logs a line, usually on this thread
  for (;;) pause();
}

TEST(ExitWaits, ALineOfAnotherThreadDoesNotWaitForASinkThatExits) {
  const TempFile one(8 * 4096), two(8 * 4096), whole(8 * 4096);
  const std::string log = run_to_exit(
      "ExitWaitsChild.DISABLED_InTheLogSink",
      {{"VMEM_TEST_SHORT", one.path()}, {"VMEM_TEST_SHORT2", two.path()}, {"VMEM_TEST_FILE", whole.path()}});
  if (log == "skip") GTEST_SKIP() << "no way to trap absent blocks here";
  const auto bytes = whole.read();
  for (size_t at = 0; at < bytes.size(); at += 4096) ASSERT_EQ(bytes[at], 5) << at << "\n" << log;
  EXPECT_NE(log.find("became shorter"), std::string::npos) << log;
  EXPECT_EQ(log.find("are lost"), std::string::npos) << log;
}

}  // namespace
}  // namespace systest
