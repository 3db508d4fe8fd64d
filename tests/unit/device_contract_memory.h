// Ranges and their memory: made, filled, copied out, released.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>

#include "device_contract_fixture.h"

namespace vmem::device::testing {

TEST_P(DeviceBasics, ReserveGivesAlignedAddressSpaceWithoutMemory) {
  uint64_t* base = reserve(64);
  ASSERT_NE(base, nullptr);
  EXPECT_EQ(at(base) % unit_, 0u);
  EXPECT_EQ(used(), 0u);
  uint64_t bytes = 1;
  VMEM_OK(d_->host_resident_bytes({at(base), 64 * unit_}, &bytes));
  EXPECT_EQ(bytes, 0u);
}

TEST_P(DeviceBasics, APreparedBlockIsZerosForKernelsAndCpu) {
  uint64_t* base = reserve(4);
  make(base, 0, 4);
  EXPECT_EQ(kernel_sum(base, 4 * words_), 0u);
  if (!unified()) return;
  VMEM_OK(d_->open(range(base, 0, 4), Access::read_write));
  for (size_t w = 0; w < 4 * words_; w += 512) ASSERT_EQ(base[w], 0u) << w;
}

TEST_P(DeviceBasics, BytesCopiedInAreSeenByKernelAndCpu) {
  uint64_t* base = reserve(3);
  bring(base, 1, 1000);
  EXPECT_EQ(kernel_sum(base + words_, words_), sum_of(1000));
  if (!unified()) return;
  VMEM_OK(d_->open(range(base, 1, 1), Access::read_write));
  for (size_t w = 0; w < words_; w += 101) ASSERT_EQ(base[words_ + w], 1000 + w);
}

TEST_P(DeviceContract, CpuStoresAfterOpenAreSeenByKernels) {
  VMEM_SHARED_ONLY();
  uint64_t* base = reserve(1);
  bring(base, 0, 5);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  base[7] += 100;
  EXPECT_EQ(kernel_sum(base, words_), sum_of(5) + 100);
  EXPECT_EQ(base[7], 112u);
}

TEST_P(DeviceBasics, CopyOutBringsWhatKernelsStored) {
  uint64_t* base = reserve(2);
  bring(base, 0, 77);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  bench_->add(stream_, base, words_, 3);
  VMEM_OK(bench_->synchronize(stream_));
  VMEM_OK(d_->write_protect(range(base, 0, 1), Access::read));
  copy_out(base, 0, 1);
  for (size_t w = 0; w < words_; ++w) ASSERT_EQ(frame(1)[w], 80 + w);
}

TEST_P(DeviceContract, CopyOutBringsWhatTheCpuStored) {
  VMEM_SHARED_ONLY();
  uint64_t* base = reserve(1);
  bring(base, 0, 10);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  base[words_ - 1] = 4711;
  base[0] = 4712;
  VMEM_OK(d_->write_protect(range(base, 0, 1), Access::read));
  copy_out(base, 0, 1);
  EXPECT_EQ(frame(1)[0], 4712u);
  EXPECT_EQ(frame(1)[1], 11u);
  EXPECT_EQ(frame(1)[words_ - 1], 4711u);
}

TEST_P(DeviceContract, CopyOutBringsWhatTheCpuStoredAlsoWhenItMayNoLongerLoad) {
  VMEM_SHARED_ONLY();
  uint64_t* base = reserve(1);
  bring(base, 0, 10);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  base[words_ / 2] = 4711;
  VMEM_OK(d_->write_protect(range(base, 0, 1), Access::none));
  copy_out(base, 0, 1);
  EXPECT_EQ(frame(1)[words_ / 2], 4711u);
  EXPECT_EQ(frame(1)[words_ / 2 + 1], 10 + words_ / 2 + 1);
}

TEST_P(DeviceContract, ABlockOpenForReadingIsReadByCpuAndKernelsInTurn) {
  VMEM_SHARED_ONLY();
  uint64_t* base = reserve(1);
  bring(base, 0, 10);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read));
  for (size_t w = 0; w < words_; w += 512) {
    EXPECT_EQ(base[w], 10 + w);
    if (w % 65536 == 0) {
      EXPECT_EQ(kernel_sum(base, words_), sum_of(10));
    }
  }
  VMEM_OK(d_->write_protect(range(base, 0, 1), Access::read));
  EXPECT_EQ(kernel_sum(base, words_), sum_of(10));
  copy_out(base, 0, 1);
  for (size_t w = 0; w < words_; ++w) ASSERT_EQ(frame(1)[w], 10 + w);
}

TEST_P(DeviceContract, PartsOfBlocksAndCopiesAcrossBlocksArrive) {
  uint64_t* base = reserve(2);
  VMEM_OK(populate(range(base, 0, 2)));
  fill_frame(0, 1);
  const Copy copies[] = {{at(base) + 4096, frame(0), 4096}, {at(base) + unit_ - 8192, frame(0), 16384}};
  Ticket done;
  VMEM_OK(d_->copy_in(0, copies, &done));
  VMEM_OK(d_->map(range(base, 0, 2)));
  VMEM_OK(d_->wait(done));
  EXPECT_EQ(kernel_sum(base, 2 * words_), sum_of(1, 512) + sum_of(1, 2048));
}

TEST_P(DeviceContract, UnitsThatAreMappedAheadHoldWhatIsCopiedToThemNext) {
  if (unified()) GTEST_SKIP() << "a made block is seen";
  uint64_t* base = reserve(3);
  bring(base, 0, 1);
  drop(base, 0);  // leaves old bytes for one of the units
  VMEM_OK(populate(range(base, 0, 3)));
  VMEM_OK(d_->map_ahead(range(base, 0, 2)));
  for (size_t u = 0; u < 2; ++u) {
    fill_frame(u, 100 * u + 5);
    copy_in(base, u, u);
    EXPECT_EQ(kernel_sum(base + u * words_, words_), sum_of(100 * u + 5)) << u;
  }
  VMEM_OK(d_->map(range(base, 2, 1)));
  EXPECT_EQ(kernel_sum(base + 2 * words_, words_), 0u) << "mapped and not filled";
}

TEST_P(DeviceBasics, PunchGivesTheMemoryBackAtOnce) {
  uint64_t* base = reserve(64);
  Memory before{}, full{}, after{};
  VMEM_OK(populate(range(base, 0, 64)));  // the first use of a device costs more than the units
  VMEM_OK(d_->punch(range(base, 0, 64)));
  VMEM_OK(d_->memory(0, &before));
  VMEM_OK(populate(range(base, 0, 64)));
  VMEM_OK(d_->memory(0, &full));
  EXPECT_EQ(full.used, 64 * unit_);
  VMEM_OK(d_->punch(range(base, 0, 64)));
  VMEM_OK(d_->memory(0, &after));
  EXPECT_EQ(after.used, 0u);
  const uint64_t slack = bench_->free_memory_slack();
  EXPECT_LE(full.free, before.free - 64 * unit_ + slack);
  EXPECT_GE(after.free + slack, before.free);
  VMEM_OK(d_->rearm(range(base, 0, 64)));
}

TEST_P(DeviceBasics, ARemadeBlockNeverShowsOldBytes) {
  uint64_t* base = reserve(2);
  for (int round = 0; round < 5; ++round) {
    bring(base, 0, 1 + static_cast<uint64_t>(round));
    drop(base, 0);
    make(base, 0, 1);
    EXPECT_EQ(kernel_sum(base, words_), 0u);
    drop(base, 0);
  }
}

TEST_P(DeviceContract, OneBlockOfAGroupLeavesAndItsNeighboursStay) {
  uint64_t* base = reserve(8);
  VMEM_OK(populate({{at(base) + 4 * unit_, 4 * unit_}, {at(base), 4 * unit_}}));  // the call joins them in any order
  for (size_t u = 0; u < 8; ++u) {
    fill_frame(u, 100 * u);
    copy_in(base, u, u);
  }
  VMEM_OK(d_->map(range(base, 0, 8)));
  drop(base, 3);
  EXPECT_EQ(used(), 7 * unit_);
  VMEM_OK(d_->open(range(base, 0, 3), Access::read));
  VMEM_OK(d_->open(range(base, 4, 4), Access::read_write));
  for (size_t u = 0; u < 8; ++u)
    if (u != 3) {
      EXPECT_EQ(kernel_sum(base + u * words_, words_), sum_of(100 * u)) << u;
      if (unified()) {
        EXPECT_EQ(base[u * words_ + 9], 100 * u + 9) << u;
      }
    }
  bring(base, 3, 42);
  EXPECT_EQ(kernel_sum(base + 3 * words_, words_), sum_of(42));
}

TEST_P(DeviceContract, ManyThreadsMakeFillCheckAndDestroyAtOnce) {
  uint64_t* base = reserve(16);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      void* stream = bench_->stream(0);
      for (uint64_t round = 0; round < 8; ++round) {
        const size_t u = t * 4 + round % 4;
        const uint64_t first = 1000 * t + round;
        fill_frame(t, first);
        Ticket in, used_up, out;
        const Copy copy{at(base) + u * unit_, frame(t), unit_};
        bool ok = populate(range(base, u, 1)).ok() && d_->copy_in(0, std::span(&copy, 1), &in).ok() &&
                  d_->map(range(base, u, 1)).ok() && d_->order_after(in, stream, 0).ok();
        if (ok) bench_->add(stream, base + u * words_, words_, 7);
        ok = ok && d_->record(stream, 0, &used_up).ok() && d_->wait(in).ok() &&
             d_->open(range(base, u, 1), Access::read).ok() && d_->wait(used_up).ok() &&
             d_->write_protect(range(base, u, 1), Access::read).ok() && d_->unmap(range(base, u, 1)).ok() &&
             d_->copy_out(0, std::span(&copy, 1), &out).ok() && d_->wait(out).ok() &&
             d_->punch(range(base, u, 1)).ok() && d_->rearm(range(base, u, 1)).ok();
        for (size_t w = 0; w < words_ && ok; ++w) ok = frame(t)[w] == first + 7 + w;
        if (!ok) ++wrong;
      }
      bench_->destroy(stream);
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(used(), 0u);
}

TEST_P(DeviceContract, ReleaseWorksWithHolesMadePartsAndForeignMappingsInside) {
  uint64_t* base = reserve(6);
  bring(base, 0, 1);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  bring(base, 2, 2);
  drop(base, 2);
  bring(base, 3, 3);
  VMEM_OK(d_->unmap(range(base, 3, 1)));
  VMEM_OK(d_->punch(range(base, 3, 1)));
  void* foreign =
      mmap(base + 2 * words_, unit_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  ASSERT_EQ(foreign, base + 2 * words_);
  base[2 * words_] = 5;
  release(base);
  EXPECT_EQ(left_at(at(base), 6 * unit_), "");
  EXPECT_EQ(used(), 0u);
}

TEST_P(DeviceContract, ManySmallRangesComeAndGoWithoutATrace) {
  for (int i = 0; i < 50; ++i) {
    uint64_t* base = reserve(1);
    ASSERT_NE(base, nullptr);
    make(base, 0, 1);
    EXPECT_EQ(kernel_sum(base, words_), 0u);
    release(base);
    EXPECT_EQ(left_at(at(base), unit_), "");
  }
  EXPECT_EQ(used(), 0u);
}

TEST_P(DeviceContract, RangesThatComeAndGoDoNotGatherMappings) {
  for (int i = 0; i < 20; ++i) release(reserve(1));
  const size_t before = mappings();
  for (int i = 0; i < 1000; ++i) {
    uint64_t* base = reserve(1 + static_cast<size_t>(i) % 3);
    ASSERT_NE(base, nullptr);
    release(base);
  }
  EXPECT_LT(mappings(), before + 100);
}

TEST_P(DeviceContract, NoOtherMappingLandsInAHole) {
  uint64_t* base = reserve(8);
  std::atomic<bool> stop{false};
  std::atomic<int> inside{0};
  std::thread mapper([&] {
    while (!stop) {
      void* p = mmap(nullptr, unit_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at(p) + unit_ > at(base) && at(p) < at(base) + 8 * unit_) ++inside;
      munmap(p, unit_);
    }
  });
  for (int i = 0; i < 200; ++i) {
    VMEM_OK(populate(range(base, 0, 8)));
    VMEM_OK(d_->punch(range(base, 0, 8)));
    VMEM_OK(d_->rearm(range(base, 0, 8)));
  }
  stop = true;
  mapper.join();
  EXPECT_EQ(inside, 0);
}

TEST_P(DeviceContract, ForkedChildrenDoNotInheritARange) {
  uint64_t* base = reserve(2);
  bring(base, 0, 3);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read_write));
  for (size_t u = 0; u < 2; ++u) {
    const pid_t child = fork();
    if (child == 0) {
      // No thread opens a range in the child: the access must kill it, not park it.
      signal(SIGALRM, SIG_DFL);
      alarm(20 * vmem::test::patience());
      volatile uint64_t* words = base + u * words_;
      const uint64_t seen = *words;
      _exit(seen == 3 ? 41 : 42);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    // A sanitizer's own handler turns the signal into an exit code.
    EXPECT_TRUE(WIFSIGNALED(status)
                    ? WTERMSIG(status) == SIGSEGV || WTERMSIG(status) == SIGBUS
                    : WEXITSTATUS(status) != 0 && WEXITSTATUS(status) != 41 && WEXITSTATUS(status) != 42)
        << status;
  }
  if (unified()) {
    EXPECT_EQ(base[0], 3u);
  }
}

// --- page tables of its own

TEST_P(DeviceContract, MappingBlocksLeavesWhatTheCpuHasThereAlone) {
  if (unified()) GTEST_SKIP() << "the CPU sees what devices see";
  uint64_t* base = reserve(4);
  ASSERT_EQ(mmap(base, 4 * unit_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), base);
  for (size_t u = 0; u < 4; ++u) base[u * words_] = 4711 + u;
  for (int round = 0; round < 3; ++round) {
    bring(base, 1, 100);
    bring(base, 2, 200);
    bench_->add(stream_, base + words_, 2 * words_, 1);
    EXPECT_EQ(kernel_sum(base + words_, 2 * words_), sum_of(101) + sum_of(201));
    for (size_t u = 0; u < 4; ++u) ASSERT_EQ(base[u * words_], 4711 + u);
    base[words_ + 1] = 3;
    copy_out(base, 1, 1);
    EXPECT_EQ(frame(1)[1], 102u);
    drop(base, 1);
    drop(base, 2);
  }
  uint64_t bytes = 1;
  VMEM_OK(d_->host_resident_bytes({at(base), 4 * unit_}, &bytes));
  EXPECT_EQ(bytes, 0u);
}

TEST_P(DeviceContract, BytesAreCopiedWhileTheBlockIsNotMapped) {
  if (unified()) GTEST_SKIP() << "a made block is seen";
  uint64_t* base = reserve(2);
  VMEM_OK(populate(range(base, 0, 2)));
  fill_frame(0, 9);
  copy_in(base, 1, 0);
  copy_out(base, 1, 1);
  EXPECT_EQ(frame(1)[3], 12u);
  VMEM_OK(d_->map(range(base, 0, 2)));
  VMEM_REFUSED(EINVAL, d_->map(range(base, 1, 1)));    // it is mapped already
  VMEM_REFUSED(EINVAL, d_->punch(range(base, 1, 1)));  // it is mapped
  EXPECT_EQ(kernel_sum(base, 2 * words_), sum_of(9));
  VMEM_OK(d_->unmap(range(base, 0, 2)));
  VMEM_OK(d_->unmap(range(base, 0, 2)));  // not mapped: accepted
  copy_out(base, 1, 2);
  EXPECT_EQ(frame(2)[3], 12u);
  VMEM_OK(d_->map(range(base, 1, 1)));
  EXPECT_EQ(kernel_sum(base + words_, words_), sum_of(9));
}

TEST_P(DeviceContract, ACopyOfNothingIsZeros) {
  uint64_t* base = reserve(2);
  bring(base, 0, 7);
  drop(base, 0);
  VMEM_OK(populate(range(base, 0, 2)));
  const Copy copies[] = {{at(base), nullptr, unit_}, {at(base) + unit_, frame(1), unit_}};
  Ticket done;
  if (unified()) {
    VMEM_REFUSED(EINVAL, d_->copy_in(0, copies, &done));
    return;
  }
  fill_frame(1, 3);
  VMEM_OK(d_->copy_in(0, copies, &done));
  VMEM_OK(d_->map(range(base, 0, 2)));
  VMEM_OK(d_->order_after(done, stream_, 0));
  EXPECT_EQ(kernel_sum(base, 2 * words_), sum_of(3));
  VMEM_REFUSED(EINVAL, d_->copy_out(0, std::span(copies, 1), &done));
}

TEST_P(DeviceContract, MemoryThatNoBlockHasIsFreeAndGoesBackWhenAsked) {
  if (unified()) GTEST_SKIP() << "nothing is kept";
  uint64_t* base = reserve(16);
  Memory before{}, kept{}, after{};
  make(base, 0, 1);  // the first use of a device costs more
  VMEM_OK(d_->memory(0, &before));
  make(base, 1, 15);
  for (size_t u = 1; u < 16; ++u) drop(base, u);
  VMEM_OK(d_->memory(0, &kept));
  EXPECT_EQ(kept.used, unit_);
  EXPECT_GE(kept.free + bench_->free_memory_slack(), before.free);
  VMEM_OK(d_->trim(0, 4 * unit_));
  VMEM_OK(d_->trim(0, 0));
  VMEM_OK(d_->memory(0, &after));
  EXPECT_GE(after.free + bench_->free_memory_slack(), before.free);
  EXPECT_EQ(kernel_sum(base, words_), 0u);
  make(base, 1, 15);
  EXPECT_EQ(kernel_sum(base, 16 * words_), 0u);
}

TEST_P(DeviceContract, ARangeHasUnitsOfItsOwnSize) {
  void* p = nullptr;
  VMEM_REFUSED(EINVAL, d_->reserve(2 * d_->largest_unit(), 2 * d_->largest_unit(), 0, &p));
  VMEM_REFUSED(EINVAL, d_->reserve(3 * kUnit, 3 * kUnit, 0, &p));
  if (unified()) GTEST_SKIP() << "there is one size";
  leave_units_of(4);
  const size_t big = 4 * unit_;
  uint64_t* small = reserve(16);
  VMEM_OK(d_->reserve(4 * big, big, 0, &p));
  ranges_.push_back(p);
  auto* base = static_cast<uint64_t*>(p);
  EXPECT_EQ(at(base) % big, 0u);
  VMEM_REFUSED(EINVAL, populate({{at(base), unit_}}));
  VMEM_REFUSED(EINVAL, populate({{at(base) + unit_, big}}));
  bring(small, 0, 1);
  VMEM_OK(populate({{at(base), big}, {at(base) + 2 * big, big}}));
  EXPECT_EQ(used(), unit_ + 2 * big);
  // Across a border of units of the other size, and up to the end of one.
  for (size_t f = 0; f < 4; ++f) fill_frame(f, 1 + f * words_);
  const Copy copies[] = {{at(base), frame(0), big}, {at(base) + 2 * big + unit_, frame(1), 3 * unit_}};
  Ticket done;
  VMEM_OK(d_->copy_in(0, copies, &done));
  VMEM_OK(d_->wait(done));
  VMEM_OK(d_->map(std::vector<Range>{{at(base), big}, {at(base) + 2 * big, big}}));
  EXPECT_EQ(kernel_sum(base, 4 * words_), sum_of(1, 4 * words_));
  EXPECT_EQ(kernel_sum(base + 8 * words_, 4 * words_), sum_of(1 + words_, 3 * words_)) << "its beginning is zeros";
  EXPECT_EQ(kernel_sum(small, words_), sum_of(1));
  Copy back{at(base) + 2 * big, frame(8), big};
  VMEM_OK(d_->copy_out(0, std::span(&back, 1), &done));
  VMEM_OK(d_->wait(done));
  EXPECT_EQ(frame(8)[words_ - 1], 0u);
  EXPECT_EQ(frame(9)[0], 1 + words_);
  EXPECT_EQ(frame(11)[words_ - 1], 4 * words_);
}

TEST_P(DeviceContract, WhatIsKeptOfOneSizeGoesWhereAnotherNeedsIt) {
  if (unified()) GTEST_SKIP() << "nothing is kept";
  leave_units_of(4);
  const size_t big = 4 * unit_;
  uint64_t* small = reserve(16);
  void* base = nullptr;
  VMEM_OK(d_->reserve(4 * big, big, 0, &base));
  ranges_.push_back(base);
  make(small, 0, 16);
  for (size_t u = 0; u < 16; ++u) drop(small, u);
  Memory memory{};
  VMEM_OK(d_->memory(0, &memory));
  EXPECT_EQ(memory.kept, 16 * unit_);
  VMEM_OK(populate({{at(base), 3 * big}}));
  VMEM_OK(d_->memory(0, &memory));
  EXPECT_EQ(memory.used, 3 * big);
  EXPECT_EQ(memory.kept, 4 * unit_) << "as much as the others needed has gone";
  VMEM_OK(d_->punch(std::vector<Range>{{at(base), 3 * big}}));
  make(small, 0, 8);
  VMEM_OK(d_->memory(0, &memory));
  EXPECT_EQ(memory.used, 8 * unit_);
  EXPECT_LE(memory.used + memory.kept, 16 * unit_) << "there is no more of both than there was of one";
  VMEM_OK(d_->trim(0, 10 * unit_));
  VMEM_OK(d_->memory(0, &memory));
  EXPECT_LE(memory.used + memory.kept, 10 * unit_);
  EXPECT_EQ(kernel_sum(small, 8 * words_), 0u);
}

TEST_P(DeviceContract, MappedUnitsBecomeDescriptorsAndTheirMemoryNobodysNext) {
  uint64_t* base = reserve(8);
  int fd = -7;
  const auto share = [&](size_t first, size_t count, Export how) {
    return d_->share(range(base, first, count)[0], how, &fd);
  };
  make(base, 0, 2);
  if (unified()) {
    VMEM_REFUSED(EOPNOTSUPP, share(0, 1, Export::handle));
    return;
  }
  VMEM_OK(populate(range(base, 2, 1)));
  VMEM_REFUSED(EINVAL, share(2, 1, Export::handle));
  VMEM_REFUSED(EINVAL, share(3, 1, Export::handle));
  VMEM_REFUSED(EINVAL, share(0, 2, Export::handle));
  VMEM_REFUSED(EINVAL, d_->share({at(base) + 4096, unit_}, Export::handle, &fd));
  EXPECT_EQ(fd, -7) << "nothing is written on error";
  Memory before{}, after{};
  VMEM_OK(share(0, 1, Export::handle));
  ASSERT_GE(fd, 0);
  EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
  bring(base, 3, 1);
  VMEM_OK(d_->memory(0, &before));
  drop(base, 0);
  drop(base, 1);
  VMEM_OK(d_->memory(0, &after));
  EXPECT_EQ(before.used - after.used, 2 * unit_);
  EXPECT_EQ(after.kept - before.kept, unit_) << "of the other alone";
  EXPECT_EQ(kernel_sum(base + 3 * words_, words_), sum_of(1));
  make(base, 4, 4);
  EXPECT_EQ(kernel_sum(base + 4 * words_, 4 * words_), 0u);
  close(fd);
  if (const core::Status s = share(4, 3, Export::dma_buf); s.code() != -EOPNOTSUPP) {
    VMEM_OK(s);
    EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
    close(fd);
  }
}

}  // namespace vmem::device::testing
