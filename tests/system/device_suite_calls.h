// System calls, DMA and forked children on blocks of a device with page tables of its own.
// Instantiated for backends that have them.
#pragma once

#include <fcntl.h>
#include <liburing.h>
#include <sys/wait.h>

#include "device_suite_views.h"
#include "pager/pager.h"

namespace systest {

// Returns whether the kernel may wait for a block in a system call.
inline bool system_calls_wait() {
  vmem::api::Runtime::Use pager;
  return vmem::api::Runtime::get().use(&pager).ok() && pager->trap().caps().system_calls;
}
// pread() or pwrite() by io_uring. Returns -ENOSYS if there is none.
inline ssize_t by_ring(int fd, void* buffer, unsigned size, bool in) {
  io_uring ring;
  if (io_uring_queue_init(1, &ring, 0) != 0) return -ENOSYS;
  io_uring_sqe* const sqe = io_uring_get_sqe(&ring);
  if (in) {
    io_uring_prep_read(sqe, fd, buffer, size, 0);
  } else {
    io_uring_prep_write(sqe, fd, buffer, size, 0);
  }
  io_uring_cqe* cqe = nullptr;
  ssize_t done = io_uring_submit_and_wait(&ring, 1);
  if (done >= 0) done = io_uring_peek_cqe(&ring, &cqe);
  if (done == 0) done = cqe->res;
  io_uring_queue_exit(&ring);
  return done;
}

// The kernel loads and stores like the program, and waits if it may.
TEST_P(DeviceTierViews, SystemCallsOnBlocksOnADeviceWaitAsAccessesDo) {
  start();
  vmem::region r(4 * kMiB, 0);
  const size_t n = r.size() / 8;
  auto* const bytes = static_cast<char*>(r.data());
  void* s = stream();
  int pipes[2];
  ASSERT_EQ(pipe2(pipes, O_CLOEXEC), 0);
  const bool waits = system_calls_wait();
  uint64_t got[512] = {};
  for (const bool leased : {false, true}) {
    SCOPED_TRACE(leased ? "under a READ lease" : "not leased");
    cpu_set(words(r), n, 0, 1);
    lease_and_check(r, 1, VMEM_READ, s);
    EXPECT_EQ(leased ? 0 : release(words(r), n, s), 0);
    right_so_far(s);
    errno = 0;
    ASSERT_EQ(write(pipes[1], bytes, 4096), waits ? 4096 : -1) << strerror(errno);
    if (!waits) {
      EXPECT_EQ(errno, EFAULT);
      EXPECT_EQ(leased ? release(words(r), n, s) : 0, 0);
      continue;
    }
    ASSERT_EQ(read(pipes[0], got, 4096), 4096);
    EXPECT_EQ(cpu_wrong(got, 512, 0, 1), 0u);
    cpu_set(got, 512, 0, 2);
    ASSERT_EQ(write(pipes[1], got, 4096), 4096);
    ASSERT_EQ(read(pipes[0], bytes + 2 * kMiB, 4096), 4096) << strerror(errno);  // a store
    EXPECT_EQ(cpu_wrong(words(r) + 2 * kWordsPerMiB, 512, 0, 2), 0u);
    if (leased) {
      app_->check(s, words(r), n, 0, 1);  // the data that it acquired
      VMEM_DO(release(words(r), n, s));
    }
    right_so_far(s);
    VMEM_DO(acquire(words(r) + 2 * kWordsPerMiB, 512, VMEM_READ, s));
    app_->check(s, words(r) + 2 * kWordsPerMiB, 512, 0, 2);
    VMEM_DO(release(words(r) + 2 * kWordsPerMiB, 512, s));
    right_so_far(s);
  }
  close(pipes[0]);
  close(pipes[1]);
}

// I/O that completes later needs a lease at VMEM_HOST, which keeps devices away until then.
TEST_P(DeviceTierViews, DirectAndAsynchronousIoUnderAHostLeaseMeetsTheDevicesBytes) {
  start();
  const size_t size = 4 * kMiB, n = size / 8;
  vmem::region r(size, 0);
  std::vector<uint64_t> buffer(n);
  void* s = stream();
  for (const bool ring : {false, true}) {
    SCOPED_TRACE(ring ? "io_uring" : "pread, pwrite");
    cpu_set(buffer.data(), n, 0, 5);
    TempFile file(size);
    {
      std::ofstream out(file.path(), std::ios::binary);
      out.write(reinterpret_cast<const char*>(buffer.data()), static_cast<std::streamsize>(size));
    }
    const int fd = open(file.path().c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
    if (fd < 0) GTEST_SKIP() << "no O_DIRECT in " << file.path();
    const auto move = [&](bool in) {
      if (ring) return by_ring(fd, r.data(), static_cast<unsigned>(size), in);
      return in ? pread(fd, r.data(), size, 0) : pwrite(fd, r.data(), size, 0);
    };
    VMEM_DO(acquire(words(r), n, VMEM_WRITE, s));
    app_->set(s, words(r), n, 0, 4);
    VMEM_DO(release(words(r), n, s));
    VMEM_DO(acquire(words(r), n, VMEM_WRITE, nullptr, VMEM_HOST));
    const ssize_t got = move(true);
    EXPECT_EQ(acquire(words(r), n, VMEM_READ, s), -EBUSY);
    VMEM_DO(release(words(r), n, nullptr));
    if (got == -ENOSYS) {
      close(fd);
      continue;
    }
    ASSERT_EQ(got, static_cast<ssize_t>(size)) << strerror(errno);
    VMEM_DO(acquire(words(r), n, VMEM_READ | VMEM_WRITE, s));
    app_->check(s, words(r), n, 0, 5);
    app_->set(s, words(r), n, 0, 6);
    VMEM_DO(release(words(r), n, s));
    VMEM_DO(acquire(words(r), n, VMEM_READ, nullptr, VMEM_HOST));
    EXPECT_EQ(move(false), static_cast<ssize_t>(size)) << strerror(errno);
    VMEM_DO(release(words(r), n, nullptr));
    right_so_far(s);
    const auto written = file.read();
    EXPECT_EQ(cpu_wrong(reinterpret_cast<const uint64_t*>(written.data()), n, 0, 6), 0u);
    close(fd);
  }
}

TEST_P(DeviceTierViews, AForkedChildHasNothingOfItAndTheParentGoesOn) {
  if (!kForksWell) GTEST_SKIP() << "AddressSanitizer does not survive the fork";
  start();
  vmem::region r(4 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  void* s = stream();
  lease_and_check(r, 1, VMEM_READ, s);
  EXPECT_EQ(cpu_wrong(words(r), n / 2, 0, 1), 0u);  // now one block has a copy for the CPU
  int pipes[2];
  ASSERT_EQ(pipe2(pipes, O_CLOEXEC), 0);
  EXPECT_EQ(status_of_fork([&] {
              int wrong = vmem_release(words(r), r.size(), s) == -ECHILD ? 0 : 1;
              for (const size_t at : {size_t{0}, n / 2})  // the child has no mapping there
                wrong |= write(pipes[1], words(r) + at, 8) == -1 && errno == EFAULT ? 0 : 2;
              return wrong;
            }),
            0);
  close(pipes[0]);
  close(pipes[1]);
  app_->check(s, words(r), n, 0, 1);
  VMEM_DO(release(words(r), n, s));
  right_so_far(s);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
}

}  // namespace systest
