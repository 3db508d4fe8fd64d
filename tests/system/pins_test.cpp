// The program's own direct I/O into regions, without leases: data that a device stores is there,
// whatever leaves memory during that time. On kernels that notice pins; tests/stress/pins does all
// of it at random.
#include <liburing.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <thread>

#include "core/step.h"
#include "support.h"

namespace systest {
namespace {

bool notices_pins() {
  utsname name{};
  unsigned major = 0, minor = 0;
  return uname(&name) == 0 && sscanf(name.release, "%u.%u", &major, &minor) == 2 && major * 1000 + minor >= 6008;
}

// The descriptor of a file for direct I/O; -1: its file system does not support it.
class Direct {
 public:
  explicit Direct(const TempFile& file) : fd_(open(file.path().c_str(), O_RDWR | O_DIRECT | O_CLOEXEC)) {}
  ~Direct() {
    if (fd_ >= 0) close(fd_);
  }
  Direct(const Direct&) = delete;
  Direct& operator=(const Direct&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// A registered, and so pinned, buffer until destroyed.
class Registered {
 public:
  int hold(void* at, size_t size) {
    if (const int rc = io_uring_queue_init(4, &ring_, 0); rc != 0) return rc;
    open_ = true;
    const iovec buffer{at, size};
    return io_uring_register_buffers(&ring_, &buffer, 1);
  }
  void release() {
    if (open_) io_uring_queue_exit(&ring_);
    open_ = false;
  }
  ~Registered() { release(); }
  // Reads from the file into the start of the buffer.
  int read(int fd, void* at, size_t size, uint64_t offset) {
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_read_fixed(sqe, fd, at, static_cast<unsigned>(size), offset, 0);
    io_uring_submit(&ring_);
    io_uring_cqe* cqe = nullptr;
    int rc = io_uring_wait_cqe(&ring_, &cqe);
    if (rc != 0) return rc;
    rc = cqe->res;
    io_uring_cqe_seen(&ring_, cqe);
    return rc;
  }

 private:
  io_uring ring_{};
  bool open_ = false;
};

struct Way {
  const char *name, *block, *transfer;
};

class Pins : public SystemTest, public testing::WithParamInterface<Way> {
 protected:
  void start(const char* budget, Settings more = {}) {
    if (!notices_pins()) GTEST_SKIP() << "this kernel notices no pins";
    Settings settings{{"host_budget", budget},
                      {"block_size", GetParam().block},
                      {"transfer", GetParam().transfer},
                      {"device", "none"}};
    settings.insert(settings.end(), more.begin(), more.end());
    configure(settings);
  }
  static constexpr size_t kSize = 4 << 20;
  const TempFile file_{kSize, 1};
  const Direct direct_{file_};
  const std::vector<unsigned char> content_ = TempFile::content(kSize, 1);
};

INSTANTIATE_TEST_SUITE_P(Blocks, Pins,
                         testing::Values(Way{"4K", "4KiB", "auto"}, Way{"64K", "64KiB", "auto"},
                                         Way{"2M", "2MiB", "auto"}, Way{"auto", "auto", "auto"},
                                         Way{"2M_copied", "2MiB", "copy"}),
                         [](const auto& way) { return way.param.name; });

#define NEEDS_PINS()                                                  \
  if (IsSkipped()) return;                                            \
  if (direct_.fd() < 0) GTEST_SKIP() << "no direct I/O on this disk"; \
  Registered pin

TEST_P(Pins, WhatIsReadDirectlyIsThereThoughBlocksLeaveMeanwhile) {
  start("32MiB");
  NEEDS_PINS();
  constexpr size_t kTimes = 16;
  vmem::region region(kTimes * kSize, VMEM_HOST_ONLY);
  auto* const at = static_cast<unsigned char*>(region.data());
  std::atomic<bool> stop{false};
  std::thread evictor([&] {
    while (!stop) vmem_evict(at, kTimes * kSize, VMEM_SSD);
  });
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < kTimes; ++i) memset(at + i * kSize, round, kSize);
    for (size_t i = 0; i < kTimes; ++i) {
      const ssize_t got = pread(direct_.fd(), at + i * kSize, kSize, 0);
      if (got < 0 && errno == EFAULT) continue;  // an ordinary user's read into an absent block
      EXPECT_EQ(got, static_cast<ssize_t>(kSize));
      EXPECT_EQ(memcmp(at + i * kSize, content_.data(), kSize), 0) << "part " << i << ", round " << round;
    }
  }
  stop = true;
  evictor.join();
  pin.release();
}

// A sync write-protects the blocks that it has written; a device that had pinned them stores
// nevertheless.
TEST_P(Pins, WhatADeviceStoresAfterASyncIsNotLost) {
  start("64MiB");
  NEEDS_PINS();
  vmem::region region(2 * kSize, VMEM_HOST_ONLY);
  auto* const at = static_cast<unsigned char*>(region.data());
  memset(at, 7, 2 * kSize);
  if (const int rc = pin.hold(at, kSize); rc != 0) GTEST_SKIP() << "io_uring registers no buffer here: errno " << -rc;
  ASSERT_EQ(vmem_sync(at, 2 * kSize), 0) << vmem_last_error();
  ASSERT_EQ(pin.read(direct_.fd(), at, kSize, 0), static_cast<int>(kSize));
  pin.release();
  int rc = 0;
  do rc = vmem_evict(at, 2 * kSize, VMEM_SSD);
  while (rc == -EBUSY);  // the kernel drops pins a moment later
  ASSERT_EQ(rc, 0) << vmem_last_error();
  EXPECT_EQ(region.query().host_bytes, 0u);
  EXPECT_EQ(memcmp(at, content_.data(), kSize), 0);
  EXPECT_EQ(at[kSize], 7);
}

TEST_P(Pins, WhatIsPinnedIsNeitherEvictedNorDropped) {
  start("64MiB");
  NEEDS_PINS();
  vmem::region region(kSize, VMEM_HOST_ONLY);
  auto* const at = static_cast<unsigned char*>(region.data());
  memset(at, 7, kSize);
  if (const int rc = pin.hold(at, kSize); rc != 0) GTEST_SKIP() << "io_uring registers no buffer here: errno " << -rc;
  EXPECT_EQ(vmem_evict(at, kSize, VMEM_SSD), -EBUSY);
  EXPECT_EQ(vmem_advise(at, kSize, VMEM_ADVISE_DONT_NEED, 0), -EBUSY);
  ASSERT_EQ(pin.read(direct_.fd(), at, kSize, 0), static_cast<int>(kSize));
  EXPECT_EQ(memcmp(at, content_.data(), kSize), 0);
}

TEST_P(Pins, ASharedRegionWithAPinnedPageIsNotFreed) {
  start("64MiB");
  NEEDS_PINS();
  const TempFile shared(kSize, 2);
  void* p = nullptr;
  ASSERT_EQ(vmem_map(&p, kSize, shared.path().c_str(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY), 0) << vmem_last_error();
  auto* const at = static_cast<unsigned char*>(p);
  memset(at, 7, kSize);
  if (const int rc = pin.hold(at, kSize); rc != 0) GTEST_SKIP() << "io_uring registers no buffer here: errno " << -rc;
  EXPECT_EQ(vmem_free(p), -EBUSY);
  EXPECT_NE(std::string(vmem_last_error()).find("pinned"), std::string::npos) << vmem_last_error();
  ASSERT_EQ(pin.read(direct_.fd(), at, kSize, 0), static_cast<int>(kSize));
  pin.release();
  int rc = 0;
  do rc = vmem_free(p);
  while (rc == -EBUSY);
  ASSERT_EQ(rc, 0) << vmem_last_error();
  EXPECT_EQ(shared.read(), content_);
}

// Neither a sync nor an access waits for the end of the pin, and no data inside the file is lost.
TEST_P(Pins, ABlockInWhichItsFileEndsStaysWhileItIsPinned) {
  start("64MiB", {{"fault_timeout_ms", "1000"}});
  NEEDS_PINS();
  const TempFile shared(kSize, 2);
  vmem::region region(kSize, shared.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  auto* const at = static_cast<unsigned char*>(region.data());
  memset(at, 7, kSize);
  ASSERT_EQ(truncate(shared.path().c_str(), 8192), 0);
  if (const int rc = pin.hold(at, 4096); rc != 0) GTEST_SKIP() << "io_uring registers no buffer here: errno " << -rc;
  auto done = std::async(std::launch::async, [&] { return vmem_sync(at, kSize); });
  if (done.wait_for(std::chrono::seconds(10)) != std::future_status::ready) {
    pin.release();
    FAIL() << "the sync waits for the end of the pin";
  }
  at[5000] = 8;
  EXPECT_EQ(pin.read(direct_.fd(), at, 4096, 0), 4096);
  pin.release();
  EXPECT_EQ(done.get(), 0) << vmem_last_error();
  EXPECT_EQ(memcmp(at, content_.data(), 4096), 0);
  int rc = 0;
  do rc = vmem_evict(at, kSize, VMEM_SSD);
  while (rc == -EBUSY);
  ASSERT_EQ(rc, 0) << vmem_last_error();
  const auto is = shared.read();
  ASSERT_EQ(is.size(), 8192u);
  EXPECT_EQ(memcmp(is.data(), content_.data(), 4096), 0);
  EXPECT_EQ(is[4096], 7);
  EXPECT_EQ(is[5000], 8);
}

TEST_P(Pins, APageWhoseRightsAreChangedHidesNoPinOfAnother) {
  start("64MiB");
  NEEDS_PINS();
  vmem::region region(kSize, VMEM_HOST_ONLY);
  auto* const at = static_cast<unsigned char*>(region.data());
  constexpr size_t kPage = 4096, kShut = 3 * kPage, kPinned = 6 * kPage;
  memset(at, 7, kSize);
  if (const int rc = pin.hold(at + kPinned, kPage); rc != 0) GTEST_SKIP() << "no buffer is registered: errno " << -rc;
  for (const int rights : {PROT_NONE, PROT_READ}) {
    ASSERT_EQ(mprotect(at + kShut, 2 * kPage, rights), 0);
    EXPECT_EQ(vmem_evict(at, kSize, VMEM_SSD), -EBUSY);
    EXPECT_EQ(vmem_advise(at, kSize, VMEM_ADVISE_DONT_NEED, 0), -EBUSY);
    memset(at + kPinned, rights, kPage);
    ASSERT_EQ(pin.read(direct_.fd(), at + kPinned, kPage, 0), static_cast<int>(kPage));
    EXPECT_EQ(memcmp(at + kPinned, content_.data(), kPage), 0);
    ASSERT_EQ(mprotect(at + kShut, 2 * kPage, PROT_READ | PROT_WRITE), 0);
  }
  pin.release();
  memset(at, 8, kSize);
  ASSERT_EQ(mprotect(at + kShut, 2 * kPage, PROT_NONE), 0);
  int rc = 0;
  do rc = vmem_evict(at, kSize, VMEM_SSD);
  while (rc == -EBUSY);
  EXPECT_EQ(rc, 0) << vmem_last_error();
  ASSERT_EQ(mprotect(at + kShut, 2 * kPage, PROT_READ | PROT_WRITE), 0);
  EXPECT_EQ(at[kShut], 8);
  EXPECT_EQ(at[kPinned], 8);
}

// Reclaim threads evict other blocks, and retry the pinned one occasionally.
TEST_P(Pins, WhatIsPinnedForLongIsSeldomTried) {
  start("64MiB");
  NEEDS_PINS();
  constexpr size_t kPinned = 16 << 20, kAll = 128 << 20;
  vmem::region region(kAll, VMEM_HOST_ONLY);
  auto* const at = static_cast<unsigned char*>(region.data());
  memset(at, 7, kPinned);
  if (const int rc = pin.hold(at, kPinned); rc != 0) GTEST_SKIP() << "no buffer is registered: errno " << -rc;
  static std::atomic<uint64_t> failed;
  failed = 0;
  vmem::core::step_hook.store([](const char* step) {
    if (strcmp(step, "trap.take.undo") == 0) ++failed;
  });
  const uint64_t before = vmem::stats().evictions;
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; round < 4; ++round) {
    for (size_t i = kPinned; i < kAll; i += 4096) at[i] = static_cast<unsigned char>(round);
  }
  // A pinned block is left alone for 16 ms, then for four times as long, and so on.
  unsigned looks = 2;
  for (auto rest = std::chrono::steady_clock::now() - start; rest > std::chrono::milliseconds(16); rest /= 4) ++looks;
  vmem::core::step_hook.store(nullptr);
  const uint64_t evictions = vmem::stats().evictions - before, pinned = kPinned / region.query().block_size;
  EXPECT_LT(failed, looks * pinned + 32 + evictions / 64) << evictions << " evictions";
}

// The full time-out would be an hour.
TEST_P(Pins, ACallThatPinsMoreThanTheBudgetFailsSoonAndSaysWhy) {
  start("32MiB", {{"fault_timeout_ms", "3600000"}});
  NEEDS_PINS();
  LogLines log;
  constexpr size_t kAll = 96 << 20;
  const TempFile large(kAll, 3);
  const Direct direct(large);
  vmem::region region(kAll, VMEM_HOST_ONLY);
  // With small pages, the kernel drops pages that it has read while it requests more.
  const ssize_t got = pread(direct.fd(), region.data(), kAll, 0);
  if (got >= 0) return;
  EXPECT_EQ(errno, EFAULT);
  if (!log.contains("pinned") && !log.contains("SIGBUS")) GTEST_SKIP() << "userfaultfd is unprivileged here";
  EXPECT_TRUE(log.contains("pinned"));
  EXPECT_TRUE(log.contains("32 MiB"));
}

}  // namespace
}  // namespace systest
