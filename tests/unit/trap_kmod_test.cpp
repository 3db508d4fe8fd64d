// The module's trap when calls are refused half way. The module is simulated here: its blocks and
// frames are pages of one file. tests/kmod tests that the real module acts alike.
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <map>
#include <memory>
#include <string_view>

#include "core/step.h"
#include "trap/kmod_trap.h"
#include "trap_backends.h"
#include "vmem/vmem_uapi.h"

namespace vmem::trap::testing {
namespace {

using core::kHugePage;
using core::kPage;

constexpr size_t kLargest = size_t{32} << 20;  // block or frame of the module

class Module {
 public:
  Module() : fd_(memfd_create("module", MFD_CLOEXEC)) {
    if (ftruncate(fd_, kSize) != 0) abort();
  }
  int fd() const { return fd_; }
  int call(unsigned long request, void* arg) {
    switch (request) {
      case VMEM_IOC_CREATE: {
        auto* c = static_cast<vmem_create*>(arg);
        if (c->unit > kLargest) return -EINVAL;
        c->offset = next_;
        next_ += core::round_up(c->size, kHugePage);
        return 0;
      }
      case VMEM_IOC_POPULATE: {
        auto* p = static_cast<vmem_populate*>(arg);
        populated += static_cast<int>(p->count);
        p->done = p->count;
        return 0;
      }
      case VMEM_IOC_RELEASE: {
        auto* r = static_cast<vmem_release*>(arg);
        populated -= static_cast<int>(r->count);
        r->done = r->count;
        return 0;
      }
      case VMEM_IOC_BATCH: {
        auto* b = static_cast<vmem_batch*>(arg);
        auto* ops = reinterpret_cast<vmem_op*>(b->ops);
        largest = std::max(largest, b->count);
        if (b->count > without_memory) return -ENOMEM;
        for (uint32_t i = 0; i < b->count; ++i) ops[i].result = one(ops[i]);
        return 0;
      }
      default:
        return 0;
    }
  }

  // The region's present blocks: the frame of each, and whether it is protected.
  struct Present {
    uint64_t frame;
    bool is_protected;
  };
  std::map<uint64_t, Present> present;
  std::byte* region = nullptr;  // address of block `begin`
  uint64_t begin = 0;
  size_t unit = 0;
  uint64_t refuses = UINT64_MAX;  // installing this block fails
  uint64_t pinned = UINT64_MAX;   // removing this block fails
  int pins = 0;                   // this many times
  int populated = 0;
  uint32_t without_memory = UINT32_MAX, largest = 0;  // larger batches fail; the largest batch so far

 private:
  static constexpr off_t kSize = 5 * kLargest;
  int one(vmem_op& o) {
    const auto at = present.find(o.block);
    o.state = at == present.end() ? 0 : VMEM_STATE_PRESENT | (at->second.is_protected ? VMEM_STATE_PROTECTED : 0);
    if (o.op == VMEM_OP_INSTALL) {
      if (o.block == refuses) return -EHWPOISON;
      if (at != present.end()) return -EEXIST;
      present[o.block] = {o.frame, (o.flags & VMEM_OPF_PROTECT) != 0};
      show(o.block, o.frame);
      return 0;
    }
    if (o.op == VMEM_OP_QUERY && at != present.end()) o.frame = at->second.frame;
    if (o.op != VMEM_OP_REMOVE) return 0;
    if (at == present.end()) return -ENOENT;
    if (o.block == pinned && pins > 0) {
      --pins;
      return -EBUSY;
    }
    o.frame = at->second.frame;
    present.erase(at);
    show(o.block, o.block);
    return 0;
  }
  void show(uint64_t block, uint64_t what) {
    if (mmap(region + (block - begin), unit, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_,
             static_cast<off_t>(what)) == MAP_FAILED)
      abort();
  }

  const int fd_;
  uint64_t next_ = 0;
};

std::atomic<Module*> the_module{nullptr};

}  // namespace
}  // namespace vmem::trap::testing

// Replaces ioctl: passes all calls but those of the module to the kernel.
extern "C" int ioctl(int fd, unsigned long request, ...) noexcept {
  va_list list;
  va_start(list, request);
  void* arg = va_arg(list, void*);
  va_end(list);
  auto* const module = vmem::trap::testing::the_module.load();
  if (module == nullptr || fd != module->fd()) return static_cast<int>(syscall(SYS_ioctl, fd, request, arg));
  const int answer = module->call(request, arg);
  if (answer == 0) return 0;
  errno = -answer;
  return -1;
}

namespace vmem::trap::testing {
namespace {

constexpr size_t kUnits = 4, kBlock = kUnits * kPage, kWords = kPage / sizeof(uint64_t);

class KmodTrapUndo : public ::testing::Test {
 protected:
  void SetUp() override {
    the_module = &module_;
    trap_ = std::make_unique<KmodTrap>(module_.fd(), eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), 64, kLargest, false);
    module_.unit = kPage;
    void* at = nullptr;
    ASSERT_TRUE(trap_->attach_blocks(kBlock, kPage, kPage, Transfer::copy, 0, &at).ok());
    module_.region = static_cast<std::byte*>(at);
    words_ = static_cast<uint64_t*>(at);
    write_pattern(image_.data(), kBlock, 1);
  }
  void TearDown() override {
    core::step_hook = nullptr;
    EXPECT_TRUE(trap_->detach(words_, kBlock).ok());
    EXPECT_TRUE(trap_->unmap(words_, kBlock).ok());
    trap_.reset();
    the_module = nullptr;
  }
  core::Status fill(Protect protect = Protect::no) {
    return trap_->fill(words_, kBlock, image_.data(), Transfer::copy, protect);
  }
  core::Status drop() {
    const Range range{reinterpret_cast<uintptr_t>(words_), kBlock};
    return trap_->drop({&range, 1});
  }
  // Stores, as a thread that was not parked, before the fill is undone.
  static void store_before_the_undo(uint64_t* at) {
    static uint64_t* where;
    where = at;
    core::step_hook = [](const char* step) {
      if (std::string_view(step) == "trap.fill.undo") *where = 77;
    };
  }

  Module module_;
  std::unique_ptr<KmodTrap> trap_;
  uint64_t* words_ = nullptr;
  alignas(kPage) std::array<uint64_t, kUnits * kWords> image_{};
};

TEST_F(KmodTrapUndo, AFillThatStopsHalfWayKeepsStoresMadeMeanwhile) {
  module_.refuses = 2 * kPage;
  store_before_the_undo(words_ + kWords + 7);
  EXPECT_EQ(fill().code(), -EHWPOISON);
  core::step_hook = nullptr;
  EXPECT_TRUE(module_.present.empty());
  EXPECT_EQ(module_.populated, 0) << "frames are kept for nothing";
  EXPECT_EQ(image_[kWords + 7], 77u);
  image_[kWords + 7] = pattern(1, kWords + 7);
  EXPECT_EQ(first_wrong(image_.data(), kBlock, 1), -1);
  module_.refuses = UINT64_MAX;
  ASSERT_TRUE(fill().ok());
  EXPECT_EQ(first_wrong(words_, kBlock, 1), -1);
}

// The undo waits until the pin ends: else the range would not be absent.
TEST_F(KmodTrapUndo, AFillThatStopsHalfWayWaitsForWhoPinsWhatWasInPlace) {
  module_.refuses = 2 * kPage;
  module_.pinned = kPage;
  module_.pins = 3;
  EXPECT_EQ(fill().code(), -EHWPOISON);
  EXPECT_TRUE(module_.present.empty());
  EXPECT_EQ(module_.populated, 0);
  module_.refuses = UINT64_MAX;
  EXPECT_TRUE(fill().ok());
}

TEST_F(KmodTrapUndo, ADropThatMeetsAPinnedPageLeavesAllInPlace) {
  for (const Protect protect : {Protect::no, Protect::yes}) {
    ASSERT_TRUE(fill(protect).ok());
    words_[5] = 78;
    module_.pinned = 2 * kPage;
    module_.pins = 1;
    EXPECT_EQ(drop().code(), -EBUSY);
    ASSERT_EQ(module_.present.size(), kUnits);
    for (const auto& [block, p] : module_.present) EXPECT_EQ(p.is_protected, protect == Protect::yes) << block;
    EXPECT_EQ(words_[5], 78u);
    words_[5] = pattern(1, 5);
    EXPECT_EQ(first_wrong(words_, kBlock, 1), -1);
    EXPECT_TRUE(drop().ok());
    EXPECT_TRUE(module_.present.empty());
    EXPECT_EQ(module_.populated, 0);
  }
}

// A drop that cannot be undone completes when the pin ends.
TEST_F(KmodTrapUndo, ADropThatCannotBeUndoneWaitsForThePin) {
  ASSERT_TRUE(fill().ok());
  module_.refuses = kPage;
  module_.pinned = 2 * kPage;
  module_.pins = 3;
  EXPECT_TRUE(drop().ok());
  EXPECT_TRUE(module_.present.empty());
  EXPECT_EQ(module_.pins, 0);
  EXPECT_EQ(module_.populated, 0);
}

// A block of two of the module's largest blocks.
class KmodTrapLargeBlock : public KmodTrapUndo {
 protected:
  static constexpr size_t kLargeBlock = 2 * kLargest;
  void SetUp() override {
    KmodTrapUndo::SetUp();
    module_.unit = kLargest;
    module_.begin = kHugePage;
    ASSERT_TRUE(trap_->attach_blocks(kLargeBlock, kLargeBlock, kLargeBlock, Transfer::install, 0, &at_).ok());
    ASSERT_TRUE(trap_->reserve_arena(kLargeBlock, kLargeBlock, &frame_).ok());
    ASSERT_TRUE(trap_->populate_frames(frame_, kLargeBlock, -1).ok());
    module_.region = static_cast<std::byte*>(at_);
    EXPECT_EQ(module_.populated, 2);
  }
  void TearDown() override {
    if (frame_ != nullptr) {
      EXPECT_TRUE(trap_->release_arena(frame_, kLargeBlock).ok());
    }
    EXPECT_EQ(module_.populated, 0);
    if (at_ != nullptr) {
      EXPECT_TRUE(trap_->detach(at_, kLargeBlock).ok());
      EXPECT_TRUE(trap_->unmap(at_, kLargeBlock).ok());
    }
    module_.unit = kPage;
    KmodTrapUndo::TearDown();
  }
  core::Status fill_large() { return trap_->fill(at_, kLargeBlock, frame_, Transfer::install, Protect::no); }
  static constexpr uint64_t kSecond = kHugePage + kLargest;  // the module's id of its second half
  void* at_ = nullptr;
  void* frame_ = nullptr;
};

TEST_F(KmodTrapLargeBlock, ComesAndGoesWhole) {
  ASSERT_TRUE(fill_large().ok());
  EXPECT_EQ(module_.present.size(), 2u);
  ASSERT_TRUE(trap_->take(at_, kLargeBlock, frame_, Transfer::install, PinWait::brief).ok());
  EXPECT_TRUE(module_.present.empty());
}

TEST_F(KmodTrapLargeBlock, IsAbsentWhereHalfOfItIsRefused) {
  module_.refuses = kSecond;
  EXPECT_EQ(fill_large().code(), -EHWPOISON);
  EXPECT_TRUE(module_.present.empty());
}

TEST_F(KmodTrapLargeBlock, StaysWhereHalfOfItIsPinned) {
  ASSERT_TRUE(fill_large().ok());
  const Range range{reinterpret_cast<uintptr_t>(at_), kLargeBlock};
  module_.pinned = kSecond;
  for (const bool drops : {false, true}) {
    module_.pins = 1;
    EXPECT_EQ(
        (drops ? trap_->drop({&range, 1}) : trap_->take(at_, kLargeBlock, frame_, Transfer::install, PinWait::brief))
            .code(),
        -EBUSY);
    EXPECT_EQ(module_.present.size(), 2u);
  }
  EXPECT_TRUE(trap_->drop({&range, 1}).ok());
}

// The module takes eight operations on its stack; for more it allocates a copy.
TEST_F(KmodTrapUndo, AModuleWithoutMemoryIsGivenSmallBatches) {
  constexpr size_t kMany = 33;
  void* at = nullptr;
  ASSERT_TRUE(trap_->attach_blocks(kMany * kPage, kPage, kPage, Transfer::copy, 0, &at).ok());
  alignas(kPage) static std::array<uint64_t, kMany * kWords> image;
  write_pattern(image.data(), kMany * kPage, 3);
  module_.region = static_cast<std::byte*>(at);
  module_.begin = kHugePage;
  for (const uint32_t takes : {UINT32_MAX, 8u}) {
    module_.without_memory = takes;
    module_.largest = 0;
    const core::Status s = trap_->fill(at, kMany * kPage, image.data(), Transfer::copy, Protect::no);
    ASSERT_TRUE(s.ok()) << s.text();
    EXPECT_GT(module_.largest, 8u) << "a large one is tried first";
    EXPECT_EQ(module_.present.size(), kMany);
    EXPECT_EQ(first_wrong(at, kMany * kPage, 3), -1);
    const Range range{reinterpret_cast<uintptr_t>(at), kMany * kPage};
    ASSERT_TRUE(trap_->drop({&range, 1}).ok());
    EXPECT_TRUE(module_.present.empty());
    EXPECT_EQ(module_.populated, 0);
  }
  // Without memory for any batch it reports an error, and nothing has changed.
  module_.without_memory = 0;
  EXPECT_EQ(trap_->fill(at, kMany * kPage, image.data(), Transfer::copy, Protect::no).code(), -ENOMEM);
  EXPECT_TRUE(module_.present.empty());
  EXPECT_EQ(module_.populated, 0);
  module_.without_memory = UINT32_MAX;
  EXPECT_TRUE(trap_->detach(at, kMany * kPage).ok());
  EXPECT_TRUE(trap_->unmap(at, kMany * kPage).ok());
}

}  // namespace
}  // namespace vmem::trap::testing
