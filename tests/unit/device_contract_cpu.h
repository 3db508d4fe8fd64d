// The CPU's side of transitions on unified memory: which threads wait, and which accesses are
// reported.
#pragma once

#include <atomic>
#include <cerrno>
#include <thread>

#include "core/step.h"
#include "device_contract_fixture.h"

namespace vmem::device::testing {

TEST_P(DeviceContract, CpuTouchesOfAMovingBlockParkAndSeeTheNewBytes) {
  VMEM_SHARED_ONLY();
  uint64_t* base = reserve(1);
  VMEM_OK(populate(range(base, 0, 1)));
  std::atomic<uint64_t> seen{0};
  const uint32_t parked = fault_gate::stats().waiting;
  std::thread reader([&] { seen = *static_cast<volatile uint64_t*>(base + 5); });
  std::thread writer([&] { *static_cast<volatile uint64_t*>(base + 6) = 9; });
  until_parked(parked + 2);
  fill_frame(0, 500);
  copy_in(base, 0, 0);
  EXPECT_EQ(seen, 0u);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  reader.join();
  writer.join();
  EXPECT_EQ(seen, 505u);
  EXPECT_EQ(base[6], 9u);
}

TEST_P(DeviceContract, HeldWritersParkWhileLoadsGoOn) {
  VMEM_SHARED_ONLY();
  uint64_t* base = reserve(1);
  bring(base, 0, 1);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  VMEM_OK(d_->write_protect(range(base, 0, 1), Access::read));
  const uint32_t parked = fault_gate::stats().waiting;
  std::thread writer([&] { *static_cast<volatile uint64_t*>(base + 6) = 900; });
  until_parked(parked + 1);
  EXPECT_EQ(base[5], 6u);
  copy_out(base, 0, 1);
  EXPECT_EQ(frame(1)[6], 7u);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  writer.join();
  EXPECT_EQ(base[6], 900u);
}

TEST_P(DeviceContract, TouchesOfAPunchedHoleParkUntilSomethingElseStandsThere) {
  VMEM_SHARED_ONLY();
  uint64_t* base = reserve(2);
  bring(base, 1, 1);
  VMEM_OK(d_->punch(range(base, 1, 1)));
  std::atomic<uint64_t> seen{0};
  const uint32_t parked = fault_gate::stats().waiting;
  std::thread reader([&] { seen = *static_cast<volatile uint64_t*>(base + words_); });
  until_parked(parked + 1);
  ASSERT_EQ(mmap(base + words_, unit_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
            base + words_);
  base[words_] = 31;
  VMEM_OK(d_->rearm(range(base, 1, 1)));
  reader.join();
  EXPECT_EQ(seen, 31u);
  // The device takes the block back.
  bring(base, 1, 8);
  VMEM_OK(d_->open(range(base, 1, 1), Access::read));
  EXPECT_EQ(base[words_], 8u);
}

TEST_P(DeviceContract, AStoreToABlockOpenForReadingAsksFirst) {
  VMEM_SHARED_ONLY();
  uint64_t* base = reserve(2);
  bring(base, 1, 1);
  VMEM_OK(d_->open(range(base, 1, 1), Access::read));
  std::atomic<int> asked{0};
  std::atomic<uintptr_t> where{0};
  VMEM_OK(fault_gate::set_hook([&](uintptr_t address, bool store) {
    EXPECT_TRUE(store);
    ++asked;
    where = address;
    return d_->open(range(base, 1, 1), Access::read_write).ok();
  }));
  EXPECT_EQ(base[words_ + 3], 4u);
  EXPECT_EQ(asked, 0);
  *static_cast<volatile uint64_t*>(base + words_ + 3) = 99;
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(where, at(base + words_ + 3));
  EXPECT_EQ(base[words_ + 3], 99u);
  EXPECT_EQ(kernel_sum(base + words_, words_), sum_of(1) - 4 + 99);
}

TEST_P(DeviceContract, TakingStoresAwayMakesTheNextOneAskAgain) {
  VMEM_SHARED_ONLY();
  uint64_t* base = reserve(1);
  bring(base, 0, 1);
  std::atomic<int> asked{0};
  VMEM_OK(fault_gate::set_hook([&](uintptr_t, bool) {
    ++asked;
    return d_->open(range(base, 0, 1), Access::read_write).ok();
  }));
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  *static_cast<volatile uint64_t*>(base) = 2;
  EXPECT_EQ(asked, 0);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read));
  *static_cast<volatile uint64_t*>(base) = 3;
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(base[0], 3u);
}

TEST_P(DeviceContract, SystemCallsIntoAMovingBlockAnswerEfault) {
  VMEM_SHARED_ONLY();
  uint64_t* base = reserve(1);
  bring(base, 0, 1);
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  EXPECT_EQ(write(pipes[1], base, 64), -1);
  EXPECT_EQ(errno, EFAULT);
  ASSERT_EQ(write(pipes[1], "12345678", 8), 8);
  EXPECT_EQ(read(pipes[0], base, 8), -1);
  EXPECT_EQ(errno, EFAULT);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  EXPECT_EQ(write(pipes[1], base + 1, 8), 8);
  uint64_t word = 0;
  EXPECT_EQ(read(pipes[0], &word, 8), 8);  // the bytes that the refused read left in the pipe
  EXPECT_EQ(std::memcmp(&word, "12345678", 8), 0);
  EXPECT_EQ(read(pipes[0], base, 8), 8);
  EXPECT_EQ(base[0], 2u);
  close(pipes[0]);
  close(pipes[1]);
}

inline std::atomic<uint64_t*> intruded_word{nullptr};

TEST_P(DeviceContract, AnIntruderBetweenMapAndShutIsNoticed) {
  VMEM_SHARED_ONLY();
  uint64_t* base = reserve(3);
  intruded_word = base + words_ + 77;
  core::step_hook.store([](const char* step) {
    if (std::strcmp(step, "device.mapped") == 0) *static_cast<volatile uint64_t*>(intruded_word.load()) = 1;
  });
  bool torn = false;
  VMEM_REFUSED(kIntruder, d_->populate(range(base, 0, 3), 0, &torn));
  core::step_hook.store(nullptr);
  EXPECT_TRUE(torn);
  EXPECT_EQ(used(), 0u);
  VMEM_OK(d_->rearm(range(base, 0, 3)));
  VMEM_OK(populate(range(base, 0, 3)));
}

TEST_P(DeviceContract, PagesTheCpuTouchesAreCounted) {
  VMEM_SHARED_ONLY();
  uint64_t* base = reserve(4);
  VMEM_OK(populate(range(base, 0, 4)));
  VMEM_OK(d_->open(range(base, 0, 4), Access::read_write));
  uint64_t bytes = 1;
  VMEM_OK(d_->host_resident_bytes({at(base), 4 * unit_}, &bytes));
  EXPECT_EQ(bytes, 0u);
  base[words_] = 1;
  VMEM_OK(d_->host_resident_bytes({at(base), 4 * unit_}, &bytes));
  EXPECT_GE(bytes, core::kPage);
  EXPECT_LE(bytes, unit_);
  drop(base, 1);
  VMEM_OK(d_->host_resident_bytes({at(base), 4 * unit_}, &bytes));
  EXPECT_EQ(bytes, 0u);
}

}  // namespace vmem::device::testing
