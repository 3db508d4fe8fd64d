// Leases on host memory, as the header describes them.
#include <sys/wait.h>

#include <thread>

#include "support.h"

namespace {

using systest::stamp;
using systest::SystemTest;

constexpr size_t kMiB = 1 << 20;

class Leases : public SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    configure({{"host_budget", "32MiB"}});
  }
  static void write(const vmem::region& region, uint64_t round) {
    auto words = region.view<uint64_t>();
    for (size_t i = 0; i < words.size(); i += 512) words[i] = stamp(i, round);
  }
  static void expect(const vmem::region& region, uint64_t round) {
    auto words = region.view<uint64_t>();
    for (size_t i = 0; i < words.size(); i += 512) ASSERT_EQ(words[i], stamp(i, round)) << i;
  }
};

TEST_F(Leases, ALeasedBlockStaysWhileEverythingElseIsChasedOut) {
  vmem::region held(8 * kMiB, VMEM_HOST_ONLY);
  vmem::region other(128 * kMiB, VMEM_HOST_ONLY);
  write(held, 1);
  vmem::lease lease(held.data(), held.size(), VMEM_READ);
  for (uint64_t round = 0; round < 3; ++round) {
    write(other, round);
    EXPECT_EQ(held.query().host_bytes, held.size());
  }
  held.evict();
  EXPECT_EQ(held.query().host_bytes, held.size()) << "evict skips leased blocks";
  const uint64_t faults = vmem::stats().faults;
  expect(held, 1);
  EXPECT_EQ(vmem::stats().faults, faults) << "touches of leased blocks cost nothing";
  expect(other, 2);
}

TEST_F(Leases, LeasesCount) {
  vmem::region region(4 * kMiB, VMEM_HOST_ONLY);
  ASSERT_EQ(vmem_acquire(region.data(), 4096, VMEM_READ, VMEM_HOST, nullptr), 0);
  ASSERT_EQ(vmem_acquire(region.data(), 4096, VMEM_WRITE, VMEM_HOST, nullptr), 0);
  ASSERT_EQ(vmem_release(region.data(), 4096, nullptr), 0);
  EXPECT_EQ(vmem_free(region.data()), -EBUSY) << "one is left";
  ASSERT_EQ(vmem_release(region.data(), 4096, nullptr), 0);
  EXPECT_EQ(vmem_release(region.data(), 4096, nullptr), -EINVAL);
}

TEST_F(Leases, ReleaseOfARangeThatIsNotWhollyLeasedReleasesNothing) {
  vmem::region region(8 * kMiB, VMEM_HOST_ONLY);
  ASSERT_EQ(vmem_acquire(region.data(), 2 * kMiB, VMEM_READ, VMEM_HOST, nullptr), 0);
  EXPECT_EQ(vmem_release(region.data(), 4 * kMiB, nullptr), -EINVAL);
  EXPECT_EQ(vmem_release(region.data(), 2 * kMiB, nullptr), 0);
}

TEST_F(Leases, AHostLeaseIsOfNoStream) {
  vmem::region region(4 * kMiB, VMEM_HOST_ONLY);
  int one = 0, other = 0;
  ASSERT_EQ(vmem_acquire(region.data(), 4096, VMEM_READ, VMEM_HOST, &one), 0);
  ASSERT_EQ(vmem_acquire(region.data(), 4096, VMEM_WRITE, VMEM_HOST, nullptr), 0);
  EXPECT_EQ(vmem_release(region.data(), 4096, &other), 0) << vmem_last_error();
  EXPECT_EQ(vmem_free(region.data()), -EBUSY) << "one is left";
  EXPECT_EQ(vmem_release(region.data(), 4096, &one), 0) << vmem_last_error();
  EXPECT_EQ(vmem_release(region.data(), 4096, &one), -EINVAL);
}

TEST_F(Leases, ARefusedAcquireLeavesTheLeaseThatWasThereAsItWas) {
  vmem::region region(64 * kMiB, VMEM_HOST_ONLY);
  write(region, 1);
  ASSERT_EQ(vmem_acquire(region.data(), 4096, VMEM_READ, VMEM_HOST, nullptr), 0) << vmem_last_error();
  const vmem_range ranges[] = {{region.data(), 4096, VMEM_WRITE, 0}, {region.data(), region.size(), VMEM_READ, 0}};
  ASSERT_EQ(vmem_acquire_ranges(ranges, 2, VMEM_HOST, nullptr), -ENOMEM);
  EXPECT_EQ(vmem_sync(region.data(), 4096), 0)
      << "READ alone does not keep it from being written: " << vmem_last_error();
  ASSERT_EQ(vmem_acquire(region.data(), 4096, VMEM_WRITE, VMEM_HOST, nullptr), 0) << vmem_last_error();
  ASSERT_EQ(vmem_acquire_ranges(ranges, 2, VMEM_HOST, nullptr), -ENOMEM);
  EXPECT_EQ(vmem_sync(region.data(), 4096), -EBUSY) << "the WRITE that was granted stays";
  EXPECT_EQ(vmem_release(region.data(), 4096, nullptr), 0);
  EXPECT_EQ(vmem_release(region.data(), 4096, nullptr), 0);
  EXPECT_EQ(vmem_release(region.data(), 4096, nullptr), -EINVAL);
}

TEST_F(Leases, MoreThanTheBudgetIsRefusedAtOnceNamingBudgetAndHolders) {
  vmem::region region(64 * kMiB, VMEM_HOST_ONLY);
  region.name("big");
  EXPECT_EQ(vmem_acquire(region.data(), region.size(), VMEM_READ, VMEM_HOST, nullptr), -ENOMEM);
  EXPECT_NE(std::string(vmem_last_error()).find("host_budget 32 MiB"), std::string::npos) << vmem_last_error();
  ASSERT_EQ(vmem_acquire(region.data(), 16 * kMiB, VMEM_READ, VMEM_HOST, nullptr), 0) << vmem_last_error();
  auto* rest = static_cast<char*>(region.data()) + 16 * kMiB;
  EXPECT_EQ(vmem_acquire(rest, 16 * kMiB, VMEM_READ, VMEM_HOST, nullptr), -ENOMEM);
  EXPECT_NE(std::string(vmem_last_error()).find("big"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(vmem_release(rest, 4096, nullptr), -EINVAL) << "nothing of a refused lease is left";
  EXPECT_EQ(vmem_release(region.data(), 16 * kMiB, nullptr), 0);
}

TEST_F(Leases, ManyRangesAreAllOrNothing) {
  vmem::region a(8 * kMiB, VMEM_HOST_ONLY), b(64 * kMiB, VMEM_HOST_ONLY);
  vmem_range ranges[] = {{a.data(), a.size(), VMEM_READ, 0}, {b.data(), b.size(), VMEM_READ, 0}};
  EXPECT_EQ(vmem_acquire_ranges(ranges, 2, VMEM_HOST, nullptr), -ENOMEM);
  EXPECT_EQ(vmem_release(a.data(), a.size(), nullptr), -EINVAL);
  ranges[1].size = 4 * kMiB;
  EXPECT_EQ(vmem_acquire_ranges(ranges, 2, VMEM_HOST, nullptr), 0) << vmem_last_error();
  EXPECT_EQ(vmem_free(a.data()), -EBUSY);
  EXPECT_EQ(vmem_release_ranges(ranges, 2, nullptr), 0);
  EXPECT_EQ(vmem_acquire_ranges(ranges, 0, VMEM_HOST, nullptr), -EINVAL);
  EXPECT_EQ(vmem_acquire_ranges(nullptr, 2, VMEM_HOST, nullptr), -EINVAL);
  ranges[0].reserved = 1;
  EXPECT_EQ(vmem_acquire_ranges(ranges, 2, VMEM_HOST, nullptr), -EINVAL);
}

TEST_F(Leases, AcquireReadsWhatIsOnTheSsd) {
  vmem::region region(24 * kMiB, VMEM_HOST_ONLY);
  write(region, 9);
  region.evict();
  EXPECT_EQ(region.query().host_bytes, 0u);
  vmem::lease lease(region.data(), 16 * kMiB, VMEM_READ);
  EXPECT_GE(region.query().host_bytes, 16 * kMiB);
  lease.release();
  expect(region, 9);
}

TEST_F(Leases, DirectReadsOfAFileIntoALeasedRangeArrive) {
  const size_t size = 4 * kMiB;
  systest::TempFile file(size, 11);
  vmem::region region(size, VMEM_HOST_ONLY);
  vmem::region other(128 * kMiB, VMEM_HOST_ONLY);
  const int fd = open(file.path().c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  if (fd < 0) GTEST_SKIP() << "no O_DIRECT in " << file.path();
  for (int round = 0; round < 3; ++round) {
    vmem::lease lease(region.data(), size, VMEM_WRITE);
    ASSERT_EQ(pread(fd, region.data(), size, 0), static_cast<ssize_t>(size)) << strerror(errno);
    lease.release();
    write(other, 3);  // evicts the block
    const auto want = systest::TempFile::content(size, 11);
    ASSERT_EQ(memcmp(region.data(), want.data(), size), 0);
    region.advise(VMEM_ADVISE_DONT_NEED);
  }
  close(fd);
}

TEST_F(Leases, FreeRefusesLiveLeasesAndKeepsTheRegion) {
  vmem::region region(4 * kMiB, VMEM_HOST_ONLY);
  write(region, 2);
  vmem::lease lease(region.data(), 1, VMEM_READ);
  EXPECT_EQ(vmem_free(region.data()), -EBUSY);
  expect(region, 2);
}

TEST_F(Leases, SystemCallsOnAbsentBlocksWorkWithPrivilegeAndAnswerEfaultWithout) {
  vmem::region region(4 * kMiB, VMEM_HOST_ONLY);
  write(region, 6);
  region.evict();
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  const ssize_t n = ::write(pipes[1], region.data(), 8);
  if (n < 0) {
    EXPECT_EQ(errno, EFAULT);
  } else {
    uint64_t word = 0;
    ASSERT_EQ(read(pipes[0], &word, 8), 8);
    EXPECT_EQ(word, stamp(0, 6));
    ASSERT_EQ(::write(pipes[1], &word, 8), 8);
    region.evict();
    ASSERT_EQ(read(pipes[0], static_cast<char*>(region.data()) + 8, 8), 8) << strerror(errno);
    EXPECT_EQ(region.view<uint64_t>()[1], stamp(0, 6));
  }
  vmem::lease lease(region.data(), 4096, VMEM_READ | VMEM_WRITE);
  EXPECT_EQ(::write(pipes[1], region.data(), 8), 8) << "with a lease always";
  close(pipes[0]);
  close(pipes[1]);
}

TEST_F(Leases, SmallBlocksUnderAWriteLeaseTakeSystemCallsToo) {
  ASSERT_EQ(vmem_set("block_size", "4096"), 0);
  vmem::region region(4 * kMiB, VMEM_HOST_ONLY);
  write(region, 6);
  region.sync();
  region.evict();
  const uint64_t first = region.view<uint64_t>()[0];  // a read first: the block is in place and write-protected
  ASSERT_EQ(first, stamp(0, 6));
  vmem::lease lease(region.data(), 64 * 1024, VMEM_WRITE);
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  ASSERT_EQ(::write(pipes[1], "01234567", 8), 8);
  ASSERT_EQ(read(pipes[0], region.data(), 8), 8) << strerror(errno);
  EXPECT_EQ(memcmp(region.data(), "01234567", 8), 0);
  close(pipes[0]);
  close(pipes[1]);
}

TEST_F(Leases, SyncSkipsBlocksUnderALiveWriteLeaseAndSaysSo) {
  vmem::region region(8 * kMiB, VMEM_HOST_ONLY);
  write(region, 1);
  vmem::lease lease(region.data(), 2 * kMiB, VMEM_WRITE);
  EXPECT_EQ(vmem_sync(region.data(), region.size()), -EBUSY);
  const uint64_t written = vmem::stats().write_bytes;
  EXPECT_EQ(written, 6 * kMiB) << "the rest is synced";
  lease.release();
  EXPECT_EQ(vmem_sync(region.data(), region.size()), 0);
  EXPECT_EQ(vmem::stats().write_bytes, 8 * kMiB);
  EXPECT_EQ(vmem_sync(region.data(), region.size()), 0);
  EXPECT_EQ(vmem::stats().write_bytes, 8 * kMiB) << "nothing changed, nothing is written";
}

TEST_F(Leases, DontNeedSkipsLeasedBlocksAndSaysSo) {
  vmem::region region(8 * kMiB, VMEM_HOST_ONLY);
  write(region, 1);
  vmem::lease lease(region.data(), 2 * kMiB, VMEM_READ);
  EXPECT_EQ(vmem_advise(region.data(), region.size(), VMEM_ADVISE_DONT_NEED, 0), -EBUSY);
  auto words = region.view<uint64_t>();
  EXPECT_EQ(words[0], stamp(0, 1));
  EXPECT_EQ(words[2 * kMiB / 8], 0u);
}

TEST_F(Leases, ThreadsThatLeaseAtRandomNeverHang) {
  vmem::region region(96 * kMiB, VMEM_HOST_ONLY);
  write(region, 5);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0}, granted{0};
  for (unsigned t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      uint64_t state = t * 77 + 5;
      for (int n = 0; n < 150; ++n) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        const size_t size = (1 + state % 3) * 2 * kMiB;
        const size_t at = (state >> 20) % (region.size() - size) / kMiB * kMiB;
        char* p = static_cast<char*>(region.data()) + at;
        const int rc = vmem_acquire(p, size, VMEM_READ, VMEM_HOST, &threads);
        if (rc == -ENOMEM) continue;
        if (rc != 0) {
          ++wrong;
          continue;
        }
        ++granted;
        const auto* words = reinterpret_cast<uint64_t*>(p);
        for (size_t i = 0; i < size / 8; i += 512) wrong += words[i] != stamp(at / 8 + i, 5);
        wrong += vmem_release(p, size, &threads) != 0;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(granted, 0);
}

}  // namespace
