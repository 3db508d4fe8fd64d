// Faults: which thread waits, which is woken, and that each wait ends.
#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "kmod/context.h"

namespace kmod_test {

class KmodTrap : public Kmod {};

TEST_F(KmodTrap, ATouchOfAnAbsentBlockWaitsUntilItsBytesAreThere) {
  Context c;
  Pair p(c, 4);
  uint64_t seen[4] = {};
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 4; ++i) threads.emplace_back([&, i] { seen[i] = p.word(i, 8 * (i + 1)); });
  for (int n = 0; n < 4; ++n) {
    vmem_event e{};
    ASSERT_TRUE(c.event(&e));
    ASSERT_EQ(e.type, static_cast<uint32_t>(VMEM_EVENT_FAULT));
    EXPECT_EQ(e.flags, 0u);
    EXPECT_NE(e.thread, 0u);
    const uint32_t i = static_cast<uint32_t>((e.offset - p.region) / kHuge);
    ASSERT_LT(i, 4u);
    EXPECT_EQ(e.address, reinterpret_cast<uintptr_t>(p.blocks + i * kHuge));
    p.frame_word(3 - i, 8 * (i + 1)) = 1000 + i;
    EXPECT_EQ(c.install(p.block(i), p.frame(3 - i)), 0);
  }
  for (std::thread& t : threads) t.join();
  for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(seen[i], 1000 + i);
}

TEST_F(KmodTrap, FramesAreZeroedAndSharedWithoutACopy) {
  Context c;
  Pair p(c, 1);
  for (size_t at = 0; at < kHuge; at += kPage) ASSERT_EQ(p.frame_word(0, at), 0u);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  p.word(0, 4096) = 5;
  EXPECT_EQ(p.frame_word(0, 4096), 5u);
  p.frame_word(0, 8192) = 6;
  EXPECT_EQ(p.word(0, 8192), 6u);
}

TEST_F(KmodTrap, OneEventABlockHoweverManyThreadsWait) {
  Context c;
  Pair p(c, 1);
  std::atomic<int> served{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&, i] {
      const uint64_t v = p.word(0, static_cast<size_t>(i) * 64);
      served += v == 9;
    });
  }
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  EXPECT_FALSE(c.event(&e, 200));
  for (size_t i = 0; i < 16; ++i) p.frame_word(0, i * 64) = 9;
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(served, 16);
  EXPECT_FALSE(c.event(&e, 50));
}

TEST_F(KmodTrap, ARemovedBlockTrapsAgainAndItsFrameKeepsTheBytes) {
  Context c;
  Pair p(c, 2);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  p.word(0) = 77;
  vmem_op out{};
  ASSERT_EQ(c.remove(p.block(0), &out), 0);
  EXPECT_EQ(out.frame, p.frame(0));
  EXPECT_EQ(p.frame_word(0), 77u);
  std::thread reader([&] { EXPECT_EQ(p.word(0), 78u); });
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  p.frame_word(1) = 78;
  ASSERT_EQ(c.install(p.block(0), p.frame(1)), 0);
  reader.join();
}

TEST_F(KmodTrap, EventsNameKindAndThread) {
  Context c;
  Pair p(c, 2);
  std::atomic<uint32_t> id{0};
  std::thread writer([&] {
    id = static_cast<uint32_t>(syscall(SYS_gettid));
    p.word(1) = 1;
  });
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  EXPECT_EQ(e.flags, VMEM_FAULT_WRITE);
  EXPECT_EQ(e.thread, id);
  ASSERT_EQ(c.install(p.block(1), p.frame(1)), 0);
  writer.join();
  EXPECT_EQ(p.frame_word(1), 1u);
}

TEST_F(KmodTrap, EventsArriveByPollAndEventfdAndInBatches) {
  Context c;
  Pair p(c, 8);
  vmem_eventfd arg{eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), 0};
  ASSERT_GE(arg.fd, 0);
  ASSERT_EQ(call(c.fd, VMEM_IOC_EVENTFD, &arg), 0);
  pollfd idle{c.fd, POLLIN, 0};
  EXPECT_EQ(poll(&idle, 1, 0), 0);
  fcntl(c.fd, F_SETFL, O_NONBLOCK);
  vmem_event events[8];
  EXPECT_EQ(read(c.fd, events, sizeof events), -1);
  EXPECT_EQ(errno, EAGAIN);
  EXPECT_EQ(read(c.fd, events, sizeof events[0] - 1), -1);
  EXPECT_EQ(errno, EINVAL);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 8; ++i) threads.emplace_back([&, i] { touch(p.word(i)); });
  uint64_t signalled = 0;
  EXPECT_TRUE(eventually([&] {
    uint64_t n = 0;
    if (read(arg.fd, &n, sizeof n) == sizeof n) signalled += n;
    return signalled == 8;
  }));
  EXPECT_EQ(syscall(SYS_read, c.fd, 8, sizeof events), -1);
  EXPECT_EQ(errno, EFAULT) << "and the events are still there";
  EXPECT_EQ(read(c.fd, events, 5 * sizeof events[0] + 7), static_cast<ssize_t>(5 * sizeof events[0]));
  EXPECT_EQ(read(c.fd, events, sizeof events), static_cast<ssize_t>(3 * sizeof events[0]));
  for (uint32_t i = 0; i < 8; ++i) ASSERT_EQ(c.install(p.block(i), p.frame(i)), 0);
  for (std::thread& t : threads) t.join();
  close(arg.fd);
}

TEST_F(KmodTrap, AFailedBlockRaisesSigbusInThoseWhoWaitAndThoseWhoCome) {
  Context c;
  Pair p(c, 1);
  std::vector<std::thread> threads;
  std::atomic<int> hit{0};
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { hit += load(&p.word(0)) == SIGBUS; });
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  ASSERT_EQ(c.op(VMEM_OP_FAIL, p.block(0)), 0);
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(hit, 4);
  EXPECT_EQ(load(&p.word(0)), SIGBUS);
  ASSERT_EQ(c.op(VMEM_OP_UNFAIL, p.block(0)), 0);
  std::thread again([&] { EXPECT_EQ(load(&p.word(0)), 0); });
  ASSERT_TRUE(c.event(&e));
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  again.join();
}

TEST_F(KmodTrap, WakeSendsWaitersToLookAgainAndReportAgain) {
  Context c;
  Pair p(c, 1);
  std::thread reader([&] { touch(p.word(0)); });
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  EXPECT_FALSE(c.event(&e, 50));
  EXPECT_EQ(c.state(p.block(0)) & VMEM_STATE_WAITED, VMEM_STATE_WAITED);
  ASSERT_EQ(c.op(VMEM_OP_WAKE, p.block(0)), 0);
  ASSERT_TRUE(c.event(&e));
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  reader.join();
}

TEST_F(KmodTrap, AnUnansweredFaultEndsWithSigbusAndIsReportedAnewLater) {
  KnobGuard timeout("fault_timeout_ms", 300);
  Context c;
  Pair p(c, 1);
  const uint64_t before = knob("timeouts");
  const double start = now();
  std::thread other([&] { EXPECT_EQ(load(&p.word(0, 64)), SIGBUS); });
  EXPECT_EQ(load(&p.word(0)), SIGBUS);
  other.join();
  EXPECT_GE(now() - start, 0.29);
  EXPECT_GE(knob("timeouts"), before + 2);
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  usleep(2500 * 1000);
  KnobGuard patient("fault_timeout_ms", 30000);
  std::thread late([&] { EXPECT_EQ(load(&p.word(0)), 0); });
  do {
    ASSERT_TRUE(c.event(&e));
  } while (e.type != VMEM_EVENT_FAULT);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  late.join();
}

TEST_F(KmodTrap, ASignalReachesAWaitingThreadAndTheTouchGoesOnAfterIt) {
  Context c;
  Pair p(c, 1);
  static std::atomic<int> handled{0};
  handled = 0;
  struct sigaction action {};
  action.sa_handler = [](int) { ++handled; };
  sigaction(SIGUSR1, &action, nullptr);
  std::atomic<bool> done{false};
  std::thread reader([&] {
    EXPECT_EQ(p.word(0), 3u);
    done = true;
  });
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  for (int i = 1; i <= 3; ++i) {
    pthread_kill(reader.native_handle(), SIGUSR1);
    EXPECT_TRUE(eventually([&] { return handled == i; }));
  }
  EXPECT_FALSE(done);
  p.frame_word(0) = 3;
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  reader.join();
}

TEST_F(KmodTrap, SystemCallsIntoAbsentBlocksAreServed) {
  Context c;
  Pair p(c, 2);
  Server server(c, [&](const vmem_event& e) {
    const uint32_t i = static_cast<uint32_t>((e.offset - p.region) / kHuge);
    p.frame_word(i) = 500 + i;
    EXPECT_EQ(c.install(p.block(i), p.frame(i)), 0);
  });
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(write(ends[1], p.blocks, 8), 8);  // the kernel reads block 0
  uint64_t value = 0;
  ASSERT_EQ(read(ends[0], &value, 8), 8);
  EXPECT_EQ(value, 500u);
  ASSERT_EQ(write(ends[1], "ABCDEFGH", 8), 8);
  ASSERT_EQ(read(ends[0], p.blocks + kHuge, 8), 8);  // the kernel writes block 1
  EXPECT_EQ(memcmp(p.frames + kHuge, "ABCDEFGH", 8), 0);
  EXPECT_NE(c.state(p.block(1)) & VMEM_STATE_DIRTY, 0u);
  close(ends[0]);
  close(ends[1]);
}

TEST_F(KmodTrap, SystemCallsIntoFailedBlocksAnswerEfault) {
  Context c;
  Pair p(c, 1);
  ASSERT_EQ(c.op(VMEM_OP_FAIL, p.block(0)), 0);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_EQ(write(ends[1], p.blocks, 8), -1);
  EXPECT_EQ(errno, EFAULT);
  close(ends[0]);
  close(ends[1]);
}

TEST_F(KmodTrap, ArgumentsOfTheModulesOwnCallsMayLieInAbsentBlocks) {
  Context c;
  Pair p(c, 2);
  Server server(c, [&](const vmem_event& e) {
    const uint32_t i = static_cast<uint32_t>((e.offset - p.region) / kHuge);
    EXPECT_EQ(c.install(p.block(i), p.frame(i)), 0);
  });
  vmem_info* info = reinterpret_cast<vmem_info*>(p.blocks);
  EXPECT_EQ(call(c.fd, VMEM_IOC_INFO, info), 0);
  EXPECT_EQ(info->frame_bytes, 2 * kHuge);
}

TEST_F(KmodTrap, DestroyEndsTheWaitersOfARegionAndGivesItsFramesBack) {
  Context c;
  Pair p(c, 2);
  ASSERT_EQ(c.install(p.block(1), p.frame(1)), 0);
  p.word(1) = 4;
  std::atomic<int> hit{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { hit += load(&p.word(0)) == SIGBUS; });
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  ASSERT_EQ(c.destroy(p.region), 0);
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(hit, 4);
  EXPECT_EQ(load(&p.word(1)), SIGBUS);
  EXPECT_EQ(p.frame_word(1), 4u);
  EXPECT_EQ(c.install(p.block(0), p.frame(0)), -ENXIO);
  EXPECT_EQ(c.info().installed_bytes, 0u);
  EXPECT_EQ(c.release(p.pool, 2), 0);
}

TEST_F(KmodTrap, TheEndOfTheRuntimeEndsEveryWait) {
  auto c = std::make_unique<Context>();
  Pair p(*c, 1);
  std::atomic<int> hit{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { hit += load(&p.word(0)) == SIGBUS; });
  vmem_event e{};
  ASSERT_TRUE(c->event(&e));
  c->shut();  // mappings hold the file open, but no thread can answer any more
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(hit, 4);
}

constexpr int kNoInheritance = 78;  // exit status of a child

TEST_F(KmodTrap, AKilledRuntimeEndsTheWaitsOfOtherProcesses) {
  // The child opens and maps, its own child inherits the mapping on request and waits; then the
  // child is killed.
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const uint64_t contexts = knob("contexts");
  const pid_t opener = fork();
  if (opener == 0) {
    Context c;
    Pair p(c, 1);
    if (madvise(p.blocks, kHuge, MADV_DOFORK) != 0 && errno == EINVAL) _exit(kNoInheritance);
    if (fork() == 0) {
      const char result = load(&p.word(0)) == SIGBUS ? 'y' : 'n';
      _exit(write(ends[1], &result, 1) == 1 ? 0 : 1);
    }
    vmem_event e{};
    if (!c.event(&e)) _exit(1);
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(opener, &status, 0), opener);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNoInheritance) {
    close(ends[0]);
    close(ends[1]);
    GTEST_SKIP() << "this kernel lets no child inherit a device's mapping";
  }
  EXPECT_TRUE(WIFSIGNALED(status));
  char result = 0;
  ASSERT_EQ(read(ends[0], &result, 1), 1);
  EXPECT_EQ(result, 'y');
  EXPECT_TRUE(eventually([&] { return knob("contexts") == contexts; }));
  close(ends[0]);
  close(ends[1]);
}

TEST_F(KmodTrap, AWaitingThreadCanBeKilled) {
  const uint64_t contexts = knob("contexts");
  const pid_t child = fork();
  if (child == 0) {
    Context c;
    Pair p(c, 1);
    std::thread([&] { touch(p.word(0)); }).detach();
    vmem_event e{};
    if (!c.event(&e)) _exit(1);
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(eventually([&] { return knob("contexts") == contexts; }));
}

TEST_F(KmodTrap, ContextsDoNotZapEachOther) {
  Context a, b;
  Pair p(a, 2), q(b, 2);
  ASSERT_EQ(p.region, q.region) << "the same offsets, the hardest case";
  ASSERT_EQ(a.install(p.block(0), p.frame(0)), 0);
  ASSERT_EQ(b.install(q.block(0), q.frame(0)), 0);
  p.word(0) = 1;
  q.word(0) = 2;
  ASSERT_EQ(a.remove(p.block(0)), 0);
  ASSERT_EQ(a.destroy(p.region), 0);
  ASSERT_EQ(a.release(p.pool, 2), 0);
  const uint64_t faults = knob("faults_read");
  EXPECT_EQ(q.word(0), 2u);
  EXPECT_EQ(knob("faults_read"), faults) << "the other context's entries were left alone";
}

TEST_F(KmodTrap, AMovedMappingStillReachesItsBlocks) {
  Context c;
  Pair p(c, 2);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  p.word(0) = 42;
  char* room = static_cast<char*>(mmap(nullptr, 2 * kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  char* moved = static_cast<char*>(mremap(p.blocks, 2 * kHuge, 2 * kHuge, MREMAP_MAYMOVE | MREMAP_FIXED, room));
  ASSERT_EQ(moved, room);
  p.blocks = moved;
  EXPECT_EQ(p.word(0), 42u);
  ASSERT_EQ(c.remove(p.block(0)), 0);
  std::thread reader([&] { EXPECT_EQ(p.word(0), 43u); });
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  EXPECT_EQ(e.address, reinterpret_cast<uintptr_t>(moved));
  p.frame_word(0) = 43;
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  reader.join();
}

TEST_F(KmodTrap, AMappingCannotGrowButMayShrinkAndSplit) {
  Context c;
  Pair p(c, 4);
  for (uint32_t i = 0; i < 4; ++i) {
    ASSERT_EQ(c.install(p.block(i), p.frame(i)), 0);
    p.word(i, kPage) = i + 1;
  }
  EXPECT_EQ(mremap(p.blocks, 4 * kHuge, 8 * kHuge, MREMAP_MAYMOVE), MAP_FAILED);
  ASSERT_EQ(munmap(p.blocks + kHuge, kPage), 0);  // splits inside a huge entry
  ASSERT_EQ(mprotect(p.blocks + 2 * kHuge, kPage, PROT_READ), 0);
  ASSERT_EQ(munmap(p.blocks + 3 * kHuge, kHuge), 0);  // shrinks
  EXPECT_EQ(p.word(0, kPage), 1u);
  EXPECT_EQ(p.word(1, kPage), 2u);
  EXPECT_EQ(p.word(2, kPage), 3u);
  EXPECT_EQ(load(&p.word(1)), SIGSEGV);
  EXPECT_EQ(store(&p.word(2), 1), SIGSEGV);
  for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(c.remove(p.block(i)), 0) << i;
}

TEST_F(KmodTrap, ForkDoesNotInheritUnlessAsked) {
  Context c;
  Pair p(c, 1);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  p.word(0) = 9;
  for (const bool ask : {false, true}) {
    if (ask && madvise(p.blocks, kHuge, MADV_DOFORK) != 0) {
      ASSERT_EQ(errno, EINVAL);
      GTEST_SKIP() << "this kernel lets no child inherit a device's mapping";
    }
    const pid_t child = fork();
    if (child == 0) {
      const int signal = load(&p.word(0));
      if (!ask) _exit(signal == SIGSEGV ? 0 : 1);
      p.word(0) = 10;
      _exit(signal == 0 ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << ask;
  }
  EXPECT_EQ(p.word(0), 10u) << "one memory, never a copy";
}

TEST_F(KmodTrap, AdviceDoesNotChangeWhatABlockHolds) {
  Context c;
  Pair p(c, 2);
  for (uint32_t i = 0; i < 2; ++i) {
    ASSERT_EQ(c.install(p.block(i), p.frame(i)), 0);
    p.word(i, 3 * kPage) = i + 6;
  }
  for (const int advice : {MADV_DONTNEED, MADV_COLD, MADV_PAGEOUT, MADV_FREE, MADV_REMOVE, MADV_WILLNEED, MADV_HUGEPAGE,
                           MADV_NOHUGEPAGE, MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_RANDOM, MADV_MERGEABLE}) {
    (void)madvise(p.blocks, 2 * kHuge, advice);
    (void)madvise(p.blocks + kPage, 5 * kPage, advice);
    for (uint32_t i = 0; i < 2; ++i) ASSERT_EQ(p.word(i, 3 * kPage), i + 6) << advice;
  }
  (void)mlock(p.blocks, kHuge);
  (void)msync(p.blocks, kHuge, MS_SYNC);
  EXPECT_EQ(p.word(0, 3 * kPage), 6u);
  for (uint32_t i = 0; i < 2; ++i) EXPECT_EQ(c.remove(p.block(i)), 0);
}

TEST_F(KmodTrap, EveryBlockSizeWorks) {
  Context c;
  for (size_t unit = kPage; unit <= (8u << 20); unit *= 4) {
    Pair p(c, 3, unit);
    for (uint32_t i = 0; i < 3; ++i) {
      ASSERT_EQ(c.install(p.block(i), p.frame(2 - i)), 0);
      for (size_t at = 0; at < unit; at += std::max<size_t>(kPage, unit / 16)) p.word(i, at) = at + i;
    }
    for (uint32_t i = 0; i < 3; ++i) {
      ASSERT_EQ(c.remove(p.block(i)), 0) << unit;
      for (size_t at = 0; at < unit; at += std::max<size_t>(kPage, unit / 16)) {
        ASSERT_EQ(p.frame_word(2 - i, at), at + i) << unit;
      }
    }
    ASSERT_EQ(c.release(p.pool, 3), 0) << unit;
    ASSERT_EQ(c.destroy(p.pool), 0);
    ASSERT_EQ(c.destroy(p.region), 0);
  }
}

TEST_F(KmodTrap, AlignedBlocksAreMappedAsOneEntry) {
  Context c;
  if ((c.features & VMEM_FEATURE_HUGE) == 0) GTEST_SKIP() << "a kernel without transparent huge pages";
  Pair p(c, 2);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  touch(p.word(0));
  touch(p.frame_word(0));
  EXPECT_EQ(smaps(p.blocks, "FilePmdMapped"), kHuge) << "by a load";
  EXPECT_EQ(smaps(p.frames, "FilePmdMapped"), kHuge);
  p.word(0, 123 * kPage) = 1;
  EXPECT_EQ(smaps(p.blocks, "FilePmdMapped"), kHuge) << "by a store after the load";
  EXPECT_NE(c.state(p.block(0)) & VMEM_STATE_DIRTY, 0u);
  ASSERT_EQ(c.remove(p.block(0)), 0);
  EXPECT_EQ(smaps(p.blocks, "FilePmdMapped"), 0u);
}

TEST_F(KmodTrap, UnalignedMappingsOfLargeFramesWork) {
  Context c;
  Pair p(c, 2);
  char* odd = c.map(p.region, 2 * kHuge, PROT_READ | PROT_WRITE, kPage);
  ASSERT_NE(odd, nullptr);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  for (size_t at = 0; at < kHuge; at += kPage) *reinterpret_cast<volatile uint64_t*>(odd + at) = at;
  for (size_t at = 0; at < kHuge; at += kPage) ASSERT_EQ(p.word(0, at), at);
  ASSERT_EQ(c.remove(p.block(0)), 0) << "entries of both mappings are told from pins";
  munmap(odd, 2 * kHuge);
}

// A private futex in a block is known by its address. A shared one would be known by its page's
// file, and there is none.
TEST_F(KmodTrap, AFutexInABlockIsForTheThreadsOfAProcess) {
  Context c;
  Pair p(c, 1, kPage);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  p.word(0) = 1;
  const auto futex = [&](int operation, uint32_t value, const timespec* until) {
    return syscall(SYS_futex, p.blocks, operation, value, until, nullptr, 0) == -1 ? -errno : 0;
  };
  const timespec none{};
  EXPECT_EQ(futex(FUTEX_WAIT_PRIVATE, 2, nullptr), -EAGAIN);
  EXPECT_EQ(futex(FUTEX_WAIT_PRIVATE, 1, &none), -ETIMEDOUT);
  EXPECT_EQ(futex(FUTEX_WAKE_PRIVATE, 1, nullptr), 0);
  EXPECT_EQ(futex(FUTEX_WAKE, 1, nullptr), -EFAULT);
}

}  // namespace kmod_test
