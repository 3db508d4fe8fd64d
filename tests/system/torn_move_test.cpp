// Moves of pages that the kernel stops half way without undoing them, and write protection that it
// refuses. This file replaces the system call.
#include <linux/userfaultfd.h>
#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>

#include "sim_support.h"
#include "trap/os.h"

namespace {

using systest::raises_sigbus;
using systest::stamp;
using systest::SystemTest;

using systest::kBlock;

struct MoveArgs {
  uint64_t to, from, size, mode;
  int64_t moved;
};
constexpr unsigned long kMove = _IOWR(UFFDIO, 0x05, MoveArgs);

enum class Kernel : int { fine, half, refuses_moves, refuses_all, refuses_protection };
std::atomic<Kernel> kernel{Kernel::fine};
std::atomic<Kernel> after_half{Kernel::refuses_moves};
std::atomic<uintptr_t> region_begin{0}, region_end{0};
std::atomic<bool> out_of_region{true};  // the direction in which the next move is cut short
std::atomic<unsigned> cut{0};

bool inside(uint64_t address) {
  return address >= region_begin && address < region_end;
}

int no_memory(int64_t* done) {
  *done = -ENOMEM;
  errno = ENOMEM;
  return -1;
}

}  // namespace

// Replaces ioctl in this process. Except for tests of this file, all calls go to the kernel
// unchanged.
extern "C" int ioctl(int fd, unsigned long request, ...) noexcept {
  va_list list;
  va_start(list, request);
  void* arg = va_arg(list, void*);
  va_end(list);
  const Kernel now = kernel.load();
  if (now != Kernel::fine && request == kMove) {
    auto* move = static_cast<MoveArgs*>(arg);
    if (now != Kernel::half) return no_memory(&move->moved);
    if (inside(out_of_region ? move->from : move->to) && move->size == kBlock) {
      move->size = kBlock / 2;
      const long rc = syscall(SYS_ioctl, fd, request, arg);
      move->size = kBlock;
      if (rc != 0) return static_cast<int>(rc);
      ++cut;
      kernel = after_half.load();
      move->moved = kBlock / 2;
      errno = EAGAIN;
      return -1;
    }
  }
  if (now == Kernel::refuses_protection && request == UFFDIO_WRITEPROTECT) {
    const auto* protect = static_cast<uffdio_writeprotect*>(arg);
    if ((protect->mode & UFFDIO_WRITEPROTECT_MODE_WP) != 0 && inside(protect->range.start)) {
      ++cut;
      errno = ENOMEM;
      return -1;
    }
  }
  if (now == Kernel::refuses_all && request == UFFDIO_COPY && inside(static_cast<uffdio_copy*>(arg)->dst)) {
    int64_t done = 0;
    const int rc = no_memory(&done);
    static_cast<uffdio_copy*>(arg)->copy = done;
    return rc;
  }
  return static_cast<int>(syscall(SYS_ioctl, fd, request, arg));
}

namespace {

class TornMove : public SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    configure({{"transfer", "move"}, {"readahead", "0"}});
  }
  void TearDown() override {
    kernel = Kernel::fine;
    SystemTest::TearDown();
  }
  static void write(const vmem::region& r, uint64_t round) {
    auto words = r.view<uint64_t>();
    for (size_t i = 0; i < words.size(); ++i) words[i] = stamp(i, round);
  }
  static size_t wrong(const vmem::region& r, size_t first, size_t bytes, uint64_t round) {
    const uint64_t* words = r.view<uint64_t>().data();
    size_t bad = 0;
    for (size_t i = first / 8; i < (first + bytes) / 8; ++i) bad += words[i] != stamp(i, round);
    return bad;
  }
  static void cut_next(const vmem::region& r, bool out, Kernel then) {
    region_begin = reinterpret_cast<uintptr_t>(r.data());
    region_end = region_begin + kBlock;
    out_of_region = out;
    after_half = then;
    cut = 0;
    kernel = Kernel::half;
  }
};

TEST_F(TornMove, ABlockThatCannotBeMovedBackIsCopiedBack) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock, VMEM_HOST_ONLY);
  write(r, 1);
  cut_next(r, true, Kernel::refuses_moves);
  const int rc = vmem_evict(r.data(), kBlock, VMEM_SSD);
  kernel = Kernel::fine;
  if (cut == 0) GTEST_SKIP() << "pages are not moved here";
  EXPECT_LT(rc, 0) << "it did not leave";
  EXPECT_EQ(wrong(r, 0, r.size(), 1), 0u);
  EXPECT_EQ(vmem_sync(r.data(), r.size()), 0) << vmem_last_error();
  r.evict();
  EXPECT_EQ(wrong(r, 0, r.size(), 1), 0u);
}

TEST_F(TornMove, ABlockThatCannotGoBackAtAllIsLostAndEveryCallSaysSo) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock, VMEM_HOST_ONLY);
  write(r, 1);
  cut_next(r, true, Kernel::refuses_all);
  const int rc = vmem_evict(r.data(), kBlock, VMEM_SSD);
  kernel = Kernel::fine;
  if (cut == 0) GTEST_SKIP() << "pages are not moved here";
  EXPECT_EQ(rc, -EIO);
  for (size_t at : {size_t{0}, kBlock / 2, kBlock - 4096})
    EXPECT_TRUE(raises_sigbus([&] { (void)*(static_cast<volatile char*>(r.data()) + at); })) << at;
  EXPECT_EQ(wrong(r, kBlock, 3 * kBlock, 1), 0u);
  EXPECT_EQ(vmem_sync(r.data(), r.size()), -EIO);
  EXPECT_NE(std::string(vmem_last_error()).find("block 0"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(vmem_advise(r.data(), kBlock, VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error();
  EXPECT_EQ(r.view<uint64_t>()[0], 0u);
  for (uint64_t round = 2; round < 4; ++round) {  // the frames that took part are still usable
    write(r, round);
    r.evict();
    EXPECT_EQ(wrong(r, 0, r.size(), round), 0u);
  }
}

TEST_F(TornMove, ABlockThatStopsOnItsWayInArrivesByCopy) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock, VMEM_HOST_ONLY);
  write(r, 1);
  r.evict();
  cut_next(r, false, Kernel::refuses_moves);
  const uint64_t first = r.view<uint64_t>()[0];
  kernel = Kernel::fine;
  if (cut == 0) GTEST_SKIP() << "pages are not moved here";
  EXPECT_EQ(first, stamp(0, 1));
  EXPECT_EQ(wrong(r, 0, r.size(), 1), 0u);
  write(r, 2);
  r.evict();
  EXPECT_EQ(wrong(r, 0, r.size(), 2), 0u);
}

TEST_F(TornMove, ABlockThatStopsOnItsWayInForGoodIsLostAndSaysSo) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock, VMEM_HOST_ONLY);
  write(r, 1);
  r.evict();
  cut_next(r, false, Kernel::refuses_all);
  const bool bus = raises_sigbus([&] {
    for (size_t at = kBlock; at != 0; at -= 4096) (void)*(static_cast<volatile char*>(r.data()) + at - 4096);
  });
  kernel = Kernel::fine;
  if (cut == 0) GTEST_SKIP() << "pages are not moved here";
  EXPECT_TRUE(bus);
  EXPECT_EQ(vmem_sync(r.data(), r.size()), -EIO);
  EXPECT_EQ(vmem_acquire(r.data(), kBlock, VMEM_READ, VMEM_HOST, nullptr), -EIO);
  EXPECT_EQ(wrong(r, kBlock, 3 * kBlock, 1), 0u);
  EXPECT_EQ(vmem_advise(r.data(), kBlock, VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error();
  EXPECT_EQ(r.view<uint64_t>()[0], 0u);
}

class ProtectionRefused : public systest::SimTest {
 protected:
  void SetUp() override {
    systest::move_no_pages();
    start(1, {{"trap", "uffd"}, {"transfer", "copy"}, {"fault_timeout_ms", "300"}});
  }
  void TearDown() override {
    kernel = Kernel::fine;
    SimTest::TearDown();
    vmem_set("trap", "auto");
  }
  static void refuse(const vmem::region& r) {
    region_begin = reinterpret_cast<uintptr_t>(r.data());
    region_end = region_begin + r.size();
    cut = 0;
    kernel = Kernel::refuses_protection;
  }
};

TEST_F(ProtectionRefused, ABlockOnItsWayToADeviceStaysInHostMemory) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  auto* words = static_cast<volatile uint64_t*>(r.data());
  words[0] = 7;
  refuse(r);
  EXPECT_LT(vmem_acquire(r.data(), kBlock, VMEM_READ | VMEM_WRITE, 0, stream_), 0);
  EXPECT_GT(cut, 0u);
  EXPECT_EQ(r.query().device_bytes, 0u);
  kernel = Kernel::fine;  // a last try of the move may succeed now
  EXPECT_EQ(vmem_release(r.data(), kBlock, stream_), -EINVAL) << "nothing is leased";
  EXPECT_EQ(words[0], 7u);
  words[1] = 8;
  store_on_device(static_cast<uint64_t*>(r.data()) + 2, 9);
  r.evict();
  for (uint64_t i = 0; i < 3; ++i) EXPECT_EQ(words[i], 7 + i);
}

TEST_F(ProtectionRefused, ABlockThatIsToBeWrittenStaysChanged) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock, VMEM_HOST_ONLY);
  auto* words = static_cast<volatile uint64_t*>(r.data());
  words[0] = 7;
  refuse(r);
  EXPECT_EQ(vmem_sync(r.data(), r.size()), -ENOMEM);
  EXPECT_LT(vmem_evict(r.data(), r.size(), VMEM_SSD), 0);
  EXPECT_GT(cut, 0u);
  kernel = Kernel::fine;
  EXPECT_EQ(words[0], 7u);
  words[1] = 8;
  r.evict();
  EXPECT_EQ(words[0], 7u);
  EXPECT_EQ(words[1], 8u);
}

}  // namespace
