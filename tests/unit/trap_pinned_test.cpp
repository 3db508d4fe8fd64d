// Pinned pages must not move: data in flight would go to the wrong place. The tests pin with
// io_uring's registered buffers.
#include <gtest/gtest.h>
#include <liburing.h>
#include <sys/mman.h>

#include "core/types.h"
#include "trap/trap.h"
#include "trap_backends.h"

namespace vmem::trap::testing {
namespace {

using core::kHugePage;
using core::kPage;
using core::Status;

class Pin {
 public:
  // Returns 0 or a negative errno.
  int hold(void* at, size_t size) {
    if (int error = io_uring_queue_init(2, &ring_, 0); error != 0) return error;
    open_ = true;
    const iovec buffer{at, size};
    return io_uring_register_buffers(&ring_, &buffer, 1);
  }
  void release() {
    if (open_) {
      io_uring_unregister_buffers(&ring_);
      io_uring_queue_exit(&ring_);
    }
    open_ = false;
  }
  ~Pin() { release(); }

 private:
  io_uring ring_{};
  bool open_ = false;
};

#define NEEDS_MOVE()                                \
  if (!trap_->caps().move) {                        \
    GTEST_SKIP() << "this body has no UFFDIO_MOVE"; \
  }

class TrapPinned : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    const Status s = GetParam().make(&trap_);
    if (s.code() == -EPERM || s.code() == -ENOSYS || s.code() == -ENOENT || s.code() == -EACCES)
      GTEST_SKIP() << s.text();
    ASSERT_TRUE(s.ok()) << s.text();
    if (trap_->caps().install) GTEST_SKIP() << "tests/kmod tests pins of this body";
  }
  void TearDown() override {
    pin_.release();
    if (region_ != nullptr) {
      EXPECT_TRUE(trap_->detach(region_, size_).ok());
      EXPECT_TRUE(trap_->unmap(region_, size_).ok());
      munmap(frame_, size_);
      munmap(slot_, size_);
    }
  }
  void make(size_t size, Transfer transfer) {
    size_ = size;
    transfer_ = transfer;
    ASSERT_TRUE(trap_->attach(size, kPage, transfer, &region_).ok());
    ASSERT_TRUE(trap_->reserve_frames(size, size >= kHugePage, &frame_).ok());
    ASSERT_TRUE(trap_->reserve_frames(size, size >= kHugePage, &slot_).ok());
    write_pattern(frame_, size, 1);
  }
  // Returns the reason if this machine cannot pin.
  std::string pin(std::byte* at, size_t size) {
    const int error = pin_.hold(at, size);
    return error == 0 ? "" : core::strprintf("io_uring cannot register a buffer here: errno %d", -error);
  }

  std::unique_ptr<Trap> trap_;
  Pin pin_;
  size_t size_ = 0;
  Transfer transfer_ = Transfer::copy;
  void *region_ = nullptr, *frame_ = nullptr, *slot_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(Backends, TrapPinned, ::testing::ValuesIn(backends()),
                         [](const auto& backend) { return backend.param.name; });

TEST_P(TrapPinned, TakeRefusesAPinnedPageAndPutsEverythingBack) {
  NEEDS_MOVE();
  struct Case {
    size_t size, pinned_at;
    Transfer transfer;
  };
  for (const Case c : {Case{16 * kPage, 10 * kPage, Transfer::copy}, Case{kHugePage, 0, Transfer::move},
                       Case{4 * kHugePage, 3 * kHugePage, Transfer::move}}) {
    SCOPED_TRACE(c.size);
    make(c.size, c.transfer);
    ASSERT_TRUE(trap_->fill(region_, size_, frame_, transfer_, Protect::no).ok());
    if (std::string why = pin(static_cast<std::byte*>(region_) + c.pinned_at, kPage); !why.empty()) GTEST_SKIP() << why;
    EXPECT_EQ(trap_->take(region_, size_, slot_, transfer_).code(), -EBUSY);
    EXPECT_EQ(first_wrong(region_, size_, 1), -1);  // in place: an absent page would park this thread
    pin_.release();
    EXPECT_TRUE(trap_->take(region_, size_, slot_, transfer_).ok());
    EXPECT_EQ(first_wrong(slot_, size_, 1), -1);
    TearDown();
    region_ = nullptr;
  }
}

TEST_P(TrapPinned, WithoutMoveAPinnedPageTravelsUnnoticedSoThatLeasesMustGuardDma) {
  if (trap_->caps().move) GTEST_SKIP() << "this body notices pins";
  make(16 * kPage, Transfer::copy);
  ASSERT_TRUE(trap_->fill(region_, size_, frame_, transfer_, Protect::no).ok());
  if (std::string why = pin(static_cast<std::byte*>(region_), kPage); !why.empty()) GTEST_SKIP() << why;
  EXPECT_TRUE(trap_->take(region_, size_, slot_, transfer_).ok());
  EXPECT_EQ(first_wrong(slot_, size_, 1), -1);
}

TEST_P(TrapPinned, AThreadThatParksDuringARefusedTakeIsLetGo) {
  NEEDS_MOVE();
  make(4 * kHugePage, Transfer::move);
  ASSERT_TRUE(trap_->fill(region_, size_, frame_, transfer_, Protect::no).ok());
  if (std::string why = pin(static_cast<std::byte*>(region_) + 3 * kHugePage, kPage); !why.empty()) GTEST_SKIP() << why;
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::thread toucher([&] {
    while (!stop) {
      if (__atomic_load_n(static_cast<uint64_t*>(region_), __ATOMIC_RELAXED) != pattern(1, 0)) ++wrong;
    }
  });
  // No thread serves faults: only take() itself can let the thread go.
  for (int i = 0; i < 20; ++i) EXPECT_EQ(trap_->take(region_, size_, slot_, transfer_).code(), -EBUSY);
  stop = true;
  toucher.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(TrapPinned, FillRefusesAPinnedFrameAndLeavesTheRangeAbsent) {
  NEEDS_MOVE();
  make(2 * kHugePage, Transfer::move);
  if (std::string why = pin(static_cast<std::byte*>(frame_) + kHugePage, kPage); !why.empty()) GTEST_SKIP() << why;
  EXPECT_EQ(trap_->fill(region_, size_, frame_, transfer_, Protect::no).code(), -EBUSY);
  EXPECT_EQ(first_wrong(frame_, size_, 1), -1);
  pin_.release();
  EXPECT_TRUE(trap_->fill(region_, size_, frame_, transfer_, Protect::no).ok());
  EXPECT_EQ(first_wrong(region_, size_, 1), -1);
}

TEST_P(TrapPinned, CopyingFromAPinnedFrameWorks) {
  make(16 * kPage, Transfer::copy);
  if (std::string why = pin(static_cast<std::byte*>(frame_), size_); !why.empty()) GTEST_SKIP() << why;
  EXPECT_TRUE(trap_->fill(region_, size_, frame_, transfer_, Protect::no).ok());
  EXPECT_EQ(first_wrong(region_, size_, 1), -1);
}

}  // namespace
}  // namespace vmem::trap::testing
