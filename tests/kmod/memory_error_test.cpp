// Memory errors that the machine finds in frames: a touch gets SIGBUS, and the frame is never used
// again.
#include <sys/uio.h>

#include "kmod/context.h"

#ifndef MADV_HWPOISON
#define MADV_HWPOISON 100
#endif

namespace kmod_test {

class KmodMemoryErrors : public Kmod {
 protected:
  void SetUp() override {
    Kmod::SetUp();
    if (!IsSkipped() && getuid() != 0) GTEST_SKIP() << "needs root, to say that memory has failed";
  }
};

// Large frames and small ones, in a mapped block or not.
TEST_F(KmodMemoryErrors, AMemoryErrorIsSigbusForWhoTouchesItAndItsFrameIsRetired) {
  for (const size_t unit : {kPage, kHuge}) {
    SCOPED_TRACE(unit);
    Context c;
    Pair p(c, 3, unit);
    const size_t at = unit / kPage / 2 * kPage;
    for (uint32_t i = 0; i < 3; ++i) p.frame_word(i, at) = i;
    ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
    ASSERT_EQ(c.install(p.block(1), p.frame(1)), 0);
    p.word(1, at) = 1;  // mapped; block 0 is not
    const uint64_t broken = knob("broken_bytes");
    for (uint32_t i = 0; i < 3; ++i) {
      if (madvise(p.frames + i * unit + at, kPage, MADV_HWPOISON) != 0 && errno == EINVAL)
        GTEST_SKIP() << "a kernel without memory failure handling";
    }
    EXPECT_EQ(load(&p.word(0, at)), SIGBUS) << "not mapped before";
    EXPECT_EQ(c.install(p.block(2), p.frame(2)), -EHWPOISON) << "free";
    for (uint32_t i = 0; i < 2; ++i) {
      EXPECT_EQ(c.remove(p.block(i)), 0) << i;
      EXPECT_EQ(c.install(p.block(i), p.frame(i)), -EHWPOISON) << i;
    }
    munmap(p.frames, 3 * unit);
    p.frames = c.map(p.pool, 3 * unit);
    EXPECT_EQ(load(&p.frame_word(1, at)), SIGBUS);
    EXPECT_EQ(c.release(p.pool, 3), 0);
    EXPECT_EQ(knob("broken_bytes"), broken + 3 * unit);
    ASSERT_EQ(c.populate(p.pool, 3), 0) << "the slots are as good as new";
    ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
    EXPECT_EQ(p.word(0, at), 0u);
  }
}

// A device may still use the bytes that it has pinned; nothing else gets them.
TEST_F(KmodMemoryErrors, AMemoryErrorInAPinnedFrameRetiresItWhenThePinIsGone) {
  Context c;
  Pair p(c, 1, kPage, VMEM_CREATE_LONGTERM);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  p.word(0) = 1;
  vmem_pin pin{};
  pin.address = reinterpret_cast<uintptr_t>(p.blocks);
  pin.size = kPage;
  pin.flags = VMEM_PIN_WRITE;
  ASSERT_EQ(call(c.fd, VMEM_IOC_PIN, &pin), 0);
  const uint64_t broken = knob("broken_bytes");
  if (madvise(p.frames, kPage, MADV_HWPOISON) != 0 && errno == EINVAL)
    GTEST_SKIP() << "a kernel without memory failure handling";
  EXPECT_EQ(c.remove(p.block(0)), -EBUSY);
  EXPECT_EQ(c.release(p.pool, 1), -EBUSY);
  vmem_unpin unpin{pin.id, 0};
  ASSERT_EQ(call(c.fd, VMEM_IOC_UNPIN, &unpin), 0);
  EXPECT_EQ(c.remove(p.block(0)), 0);
  EXPECT_EQ(c.install(p.block(0), p.frame(0)), -EHWPOISON);
  EXPECT_EQ(c.release(p.pool, 1), 0);
  EXPECT_EQ(knob("broken_bytes"), broken + kPage);
  ASSERT_EQ(c.populate(p.pool, 1), 0);
  EXPECT_EQ(p.frame_word(0), 0u);
}

// RELEASE waits a little for a reference to go, and meanwhile the frame has no owner. An error
// found in its memory at that time must keep it from reaching another owner.
TEST_F(KmodMemoryErrors, AMemoryErrorInAFrameThatIsBeingReleasedRetiresIt) {
  const int offline = open("/sys/devices/system/memory/hard_offline_page", O_WRONLY | O_CLOEXEC);
  const int pages = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (offline < 0 || pages < 0) GTEST_SKIP() << "a kernel without memory failure handling by address";
  Context c;
  Pair p(c, 1, kPage);
  p.frame_word(0) = 1;
  uint64_t entry = 0;
  ASSERT_EQ(pread(pages, &entry, 8, static_cast<off_t>(reinterpret_cast<uintptr_t>(p.frames) / kPage * 8)), 8);
  const std::string physical = std::to_string((entry & ((uint64_t{1} << 55) - 1)) * kPage);
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  iovec v{p.frames, 8};
  ASSERT_EQ(vmsplice(ends[1], &v, 1, SPLICE_F_NONBLOCK), 8);
  const uint64_t broken = knob("broken_bytes");
  // Retry, so that the error comes while it works; until then the pipe makes RELEASE fail.
  std::thread releaser([&] {
    while (c.release(p.pool, 1) == -EBUSY) {
    }
  });
  usleep(20 * 1000);
  const ssize_t told = write(offline, physical.data(), physical.size());
  const int err = errno;
  close(ends[0]);
  close(ends[1]);
  releaser.join();
  if (told < 0) printf("[   note   ] hard_offline_page: %s\n", strerror(err));
  EXPECT_EQ(knob("broken_bytes"), broken + kPage);
  ASSERT_EQ(c.populate(p.pool, 1), 0) << "the slot is as good as new";
  EXPECT_EQ(p.frame_word(0), 0u);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  EXPECT_EQ(p.word(0), 0u);
  close(offline);
  close(pages);
}

}  // namespace kmod_test
