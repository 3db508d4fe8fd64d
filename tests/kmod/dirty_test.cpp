// Dirty marks, write protection and pins: no store is ever missed.
#include <liburing.h>
#include <sys/uio.h>

#include "kmod/context.h"

namespace kmod_test {

class KmodDirty : public Kmod {};

TEST_F(KmodDirty, LoadsLeaveABlockCleanAndStoresMarkIt) {
  Context c;
  Pair p(c, 3);
  for (uint32_t i = 0; i < 3; ++i) ASSERT_EQ(c.install(p.block(i), p.frame(i)), 0);
  touch(p.word(0, 17 * kPage));
  p.word(1, 33 * kPage) = 1;
  touch(p.word(2));
  p.word(2, 5 * kPage) = 1;
  EXPECT_EQ(c.state(p.block(0)), VMEM_STATE_PRESENT | VMEM_STATE_TOUCHED);
  vmem_op out{};
  ASSERT_EQ(c.remove(p.block(0), &out), 0);
  EXPECT_EQ(out.state & VMEM_STATE_DIRTY, 0u);
  ASSERT_EQ(c.remove(p.block(1), &out), 0);
  EXPECT_NE(out.state & VMEM_STATE_DIRTY, 0u);
  ASSERT_EQ(c.remove(p.block(2), &out), 0);
  EXPECT_NE(out.state & VMEM_STATE_DIRTY, 0u);
  ASSERT_EQ(c.install(p.block(1), p.frame(1)), 0);
  EXPECT_EQ(c.state(p.block(1)), VMEM_STATE_PRESENT) << "a new install starts clean";
}

TEST_F(KmodDirty, WatchClearsTheMarkAndArmsItAgain) {
  Context c;
  Pair p(c, 1);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  p.word(0) = 1;
  vmem_op out{};
  ASSERT_EQ(c.op(VMEM_OP_WATCH, p.block(0), 0, 0, &out), 0);
  EXPECT_NE(out.state & VMEM_STATE_DIRTY, 0u);
  EXPECT_EQ(c.state(p.block(0)) & VMEM_STATE_DIRTY, 0u);
  EXPECT_EQ(p.word(0), 1u);
  EXPECT_EQ(c.state(p.block(0)) & VMEM_STATE_DIRTY, 0u);
  p.word(0, 100 * kPage) = 2;
  EXPECT_NE(c.state(p.block(0)) & VMEM_STATE_DIRTY, 0u);
}

TEST_F(KmodDirty, AStoreToAProtectedBlockWaitsAndIsReportedLoadsGoOn) {
  Context c;
  Pair p(c, 1);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  p.word(0) = 1;
  vmem_op out{};
  ASSERT_EQ(c.op(VMEM_OP_PROTECT, p.block(0), 0, VMEM_OPF_CLEAN, &out), 0);
  EXPECT_NE(out.state & VMEM_STATE_DIRTY, 0u);
  EXPECT_EQ(p.word(0), 1u);
  std::atomic<bool> stored{false};
  std::thread writer([&] {
    p.word(0) = 2;
    stored = true;
  });
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  EXPECT_EQ(e.flags, VMEM_FAULT_WRITE | VMEM_FAULT_PROTECTED);
  usleep(50000);
  EXPECT_FALSE(stored);
  EXPECT_EQ(p.word(0), 1u);
  EXPECT_EQ(c.state(p.block(0)) & VMEM_STATE_DIRTY, 0u);
  ASSERT_EQ(c.op(VMEM_OP_UNPROTECT, p.block(0)), 0);
  writer.join();
  EXPECT_EQ(p.word(0), 2u);
  EXPECT_NE(c.state(p.block(0)) & VMEM_STATE_DIRTY, 0u);
}

TEST_F(KmodDirty, InstallProtectedLeavesNoWindow) {
  Context c;
  Pair p(c, 1);
  std::atomic<bool> stored{false};
  std::thread writer([&] {
    p.word(0) = 2;
    stored = true;
  });
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  ASSERT_EQ(c.install(p.block(0), p.frame(0), VMEM_OPF_PROTECT), 0);
  ASSERT_TRUE(c.event(&e));
  EXPECT_EQ(e.flags, VMEM_FAULT_WRITE | VMEM_FAULT_PROTECTED);
  EXPECT_FALSE(stored);
  ASSERT_EQ(c.op(VMEM_OP_UNPROTECT, p.block(0)), 0);
  writer.join();
}

TEST_F(KmodDirty, ABlockCanBeRemovedWhileAStoreWaitsForIt) {
  Context c;
  Pair p(c, 1);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  EXPECT_EQ(p.word(0), 0u);  // the page table has an entry, so the store comes through page_mkwrite
  ASSERT_EQ(c.op(VMEM_OP_PROTECT, p.block(0)), 0);
  EXPECT_EQ(p.word(0), 0u);
  std::thread writer([&] { p.word(0) = 5; });
  vmem_event e{};
  ASSERT_TRUE(c.event(&e));
  vmem_op out{};
  ASSERT_EQ(c.remove(p.block(0), &out), 0) << "the waiting store is no pin";
  EXPECT_EQ(out.state & VMEM_STATE_DIRTY, 0u);
  EXPECT_EQ(p.frame_word(0), 0u);
  ASSERT_TRUE(c.event(&e));
  EXPECT_EQ(e.flags, VMEM_FAULT_WRITE) << "absent now, and reported as such";
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  writer.join();
  EXPECT_EQ(p.frame_word(0), 5u);
}

TEST_F(KmodDirty, AProtectedStoreThatNobodyAnswersEndsWithSigbus) {
  KnobGuard timeout("fault_timeout_ms", 200);
  Context c;
  Pair p(c, 1);
  ASSERT_EQ(c.install(p.block(0), p.frame(0), VMEM_OPF_PROTECT), 0);
  EXPECT_EQ(p.word(0), 0u);
  EXPECT_EQ(store(&p.word(0), 1), SIGBUS);
  EXPECT_EQ(p.word(0), 0u);
}

TEST_F(KmodDirty, NoStoreIsMissedWhileMarksAreClearedAndBlocksMove) {
  Context c;
  Pair p(c, 2);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> written{0};
  std::thread writer([&] {
    for (uint64_t i = 1; !stop; ++i) {
      p.word(0, (i % 512) * kPage) = i;
      written = i;
    }
  });
  // If the mark is found clear, memory has an image that no store changes without setting the mark.
  std::vector<uint64_t> image(512);
  int rounds = 0, clean = 0;
  while (rounds < 300) {
    vmem_op out{};
    if (rounds % 3 == 0) {
      ASSERT_EQ(c.remove(p.block(0), &out), 0);
      for (size_t i = 0; i < 512; ++i) image[i] = p.frame_word(0, i * kPage);
      usleep(200);
      for (size_t i = 0; i < 512; ++i) ASSERT_EQ(p.frame_word(0, i * kPage), image[i]) << "stored after removal";
      int err = c.install(p.block(0), p.frame(0));
      ASSERT_EQ(err, 0);
    } else {
      ASSERT_EQ(c.op(rounds % 3 == 1 ? VMEM_OP_WATCH : VMEM_OP_PROTECT, p.block(0), 0,
                     rounds % 3 == 1 ? 0 : VMEM_OPF_CLEAN, &out),
                0);
      for (size_t i = 0; i < 512; ++i) image[i] = p.frame_word(0, i * kPage);
      usleep(rounds % 7 * 30);
      bool same = true;
      for (size_t i = 0; i < 512; ++i) same &= p.frame_word(0, i * kPage) == image[i];
      const bool dirty = (c.state(p.block(0)) & VMEM_STATE_DIRTY) != 0;
      ASSERT_TRUE(same || dirty) << "a store without a mark";
      if (rounds % 3 == 2) {
        ASSERT_TRUE(same) << "a store went through protection";
        ASSERT_EQ(c.op(VMEM_OP_UNPROTECT, p.block(0)), 0);
      }
      clean += !dirty;
    }
    ++rounds;
  }
  stop = true;
  (void)c.op(VMEM_OP_UNPROTECT, p.block(0));
  writer.join();
  EXPECT_GT(written, 0u);
}

TEST_F(KmodDirty, APinnedFrameStaysWhereItIs) {
  Context c, pinner;
  Pair p(c, 2);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  p.word(0) = 3;
  vmem_pin pin{};
  pin.address = reinterpret_cast<uintptr_t>(p.blocks + 7 * kPage);
  pin.size = kPage;
  ASSERT_EQ(call(pinner.fd, VMEM_IOC_PIN, &pin), 0);
  const uint64_t refused = knob("refused_pinned");
  EXPECT_EQ(c.remove(p.block(0)), -EBUSY);
  EXPECT_EQ(c.op(VMEM_OP_PROTECT, p.block(0)), -EBUSY);
  EXPECT_EQ(c.op(VMEM_OP_WATCH, p.block(0)), -EBUSY);
  EXPECT_EQ(knob("refused_pinned"), refused + 3);
  EXPECT_EQ(c.state(p.block(0)), VMEM_STATE_PRESENT | VMEM_STATE_TOUCHED | VMEM_STATE_DIRTY) << "nothing changed";
  p.word(0) = 4;
  // The region ends, but the frame is not reused while the pin lasts.
  ASSERT_EQ(c.destroy(p.region), 0);
  uint64_t next = 0;
  ASSERT_EQ(c.create(VMEM_KIND_REGION, kHuge, kHuge, &next), 0);
  EXPECT_EQ(c.install(next, p.frame(0)), -EBUSY);
  EXPECT_EQ(c.release(p.frame(0), 1), -EBUSY);
  vmem_unpin unpin{pin.id, 0};
  ASSERT_EQ(call(pinner.fd, VMEM_IOC_UNPIN, &unpin), 0);
  EXPECT_EQ(c.install(next, p.frame(0)), 0);
  EXPECT_EQ(c.remove(next), 0);
  EXPECT_EQ(c.release(p.frame(0), 1), 0);
}

TEST_F(KmodDirty, APlainReferenceCountsAsAPinToo) {
  Context c;
  Pair p(c, 1);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  iovec v{p.blocks, kPage};
  ASSERT_EQ(vmsplice(ends[1], &v, 1, 0), static_cast<ssize_t>(kPage));
  EXPECT_EQ(c.remove(p.block(0)), -EBUSY);
  char page[kPage];
  ASSERT_EQ(read(ends[0], page, kPage), static_cast<ssize_t>(kPage));
  EXPECT_EQ(c.remove(p.block(0)), 0);
  close(ends[0]);
  close(ends[1]);
}

TEST_F(KmodDirty, PinsThatWereThereAtInstallDoNotHoldABlock) {
  Context c, pinner;
  Pair p(c, 2);
  vmem_pin pin{};
  pin.address = reinterpret_cast<uintptr_t>(p.frames);
  pin.size = 2 * kHuge;
  pin.flags = VMEM_PIN_WRITE;
  ASSERT_EQ(call(pinner.fd, VMEM_IOC_PIN, &pin), 0) << "frames may be pinned for long";
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  p.word(0) = 1;
  ASSERT_EQ(c.op(VMEM_OP_PROTECT, p.block(0)), 0);
  ASSERT_EQ(c.remove(p.block(0)), 0);
  EXPECT_EQ(c.release(p.frame(0), 1), -EBUSY);
  EXPECT_EQ(p.frame_word(0), 1u) << "and stays usable";
}

// Direct I/O reports completion before it drops its reference to the memory. Such a pin must not
// hide a later one.
TEST_F(KmodDirty, APinThatWasGoingAtInstallDoesNotHideALaterOne) {
  Context c, pinner;
  Pair p(c, 1, kPage, VMEM_CREATE_LONGTERM);
  vmem_pin going{};
  going.address = reinterpret_cast<uintptr_t>(p.frames);
  going.size = kPage;
  going.flags = VMEM_PIN_WRITE;
  ASSERT_EQ(call(pinner.fd, VMEM_IOC_PIN, &going), 0);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  vmem_unpin gone{going.id, 0};
  ASSERT_EQ(call(pinner.fd, VMEM_IOC_UNPIN, &gone), 0);
  p.word(0) = 1;
  vmem_pin pin = going;
  pin.address = reinterpret_cast<uintptr_t>(p.blocks);
  ASSERT_EQ(call(pinner.fd, VMEM_IOC_PIN, &pin), 0);
  EXPECT_EQ(c.remove(p.block(0)), -EBUSY) << "a device may be writing into it";
  vmem_unpin unpin{pin.id, 0};
  ASSERT_EQ(call(pinner.fd, VMEM_IOC_UNPIN, &unpin), 0);
  EXPECT_EQ(c.remove(p.block(0)), 0);
}

TEST_F(KmodDirty, ALongtermRegionMayBePinnedForWritingAndReportsEveryTouchAsDirty) {
  Context c, pinner;
  Pair p(c, 2, kHuge, VMEM_CREATE_LONGTERM);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  ASSERT_EQ(c.install(p.block(1), p.frame(1)), 0);
  EXPECT_EQ(c.op(VMEM_OP_PROTECT, p.block(0)), -EOPNOTSUPP);
  EXPECT_EQ(c.op(VMEM_OP_WATCH, p.block(0)), -EOPNOTSUPP);
  vmem_pin pin{};
  pin.address = reinterpret_cast<uintptr_t>(p.blocks);
  pin.size = kHuge;
  pin.flags = VMEM_PIN_WRITE;
  ASSERT_EQ(call(pinner.fd, VMEM_IOC_PIN, &pin), 0);
  EXPECT_EQ(c.remove(p.block(0)), -EBUSY);
  vmem_unpin unpin{pin.id, 0};
  ASSERT_EQ(call(pinner.fd, VMEM_IOC_UNPIN, &unpin), 0);
  touch(p.word(1));
  for (uint32_t i = 0; i < 2; ++i) {
    vmem_op out{};
    ASSERT_EQ(c.remove(p.block(i), &out), 0);
    EXPECT_NE(out.state & VMEM_STATE_DIRTY, 0u) << i;
  }
}

TEST_F(KmodDirty, FramesTakeIoUringReadsFixedWhereTheKernelAllowsIt) {
  Context c;
  Pair p(c, 2);
  const char* dir = getenv("VMEM_TEST_DIR");
  const std::string path = std::string(dir != nullptr ? dir : "/tmp") + "/kmod-uring";
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | (dir != nullptr ? O_DIRECT : 0), 0600);
  ASSERT_GE(file, 0);
  unlink(path.c_str());
  for (size_t i = 0; i < kHuge / 8; ++i) p.frame_word(0, 8 * i) = i ^ 0x5a5a;
  ASSERT_EQ(pwrite(file, p.frames, kHuge, 0), static_cast<ssize_t>(kHuge));
  io_uring ring;
  if (io_uring_queue_init(8, &ring, 0) != 0) GTEST_SKIP() << "no io_uring";
  iovec v{p.frames + kHuge, kHuge};
  const int fixed = io_uring_register_buffers(&ring, &v, 1);
  if (fixed != 0) printf("[   note   ] fixed buffers on frames: %s\n", strerror(-fixed));
  io_uring_sqe* sqe = io_uring_get_sqe(&ring);
  if (fixed == 0) {
    io_uring_prep_read_fixed(sqe, file, v.iov_base, kHuge, 0, 0);
  } else {
    io_uring_prep_read(sqe, file, v.iov_base, kHuge, 0);
  }
  io_uring_submit(&ring);
  io_uring_cqe* cqe = nullptr;
  ASSERT_EQ(io_uring_wait_cqe(&ring, &cqe), 0);
  EXPECT_EQ(cqe->res, static_cast<int>(kHuge));
  io_uring_cqe_seen(&ring, cqe);
  ASSERT_EQ(c.install(p.block(1), p.frame(1)), 0);
  for (size_t i = 0; i < kHuge / 8; ++i) ASSERT_EQ(p.word(1, 8 * i), i ^ 0x5a5a);
  EXPECT_EQ(c.remove(p.block(1)), 0) << "a registered buffer does not hold the block";
  io_uring_queue_exit(&ring);
  close(file);
}

}  // namespace kmod_test
