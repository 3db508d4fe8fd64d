// The fixture of the contract suites: one backend, with blocks of each of its sizes and transfers.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <memory>
#include <vector>

#include "core/types.h"
#include "trap/trap.h"
#include "trap_backends.h"

namespace vmem::trap::testing {

using core::kHugePage;
using core::kPage;
using core::Status;

#define OK(expression)                           \
  do {                                           \
    const Status status_ = (expression);         \
    ASSERT_TRUE(status_.ok()) << status_.text(); \
  } while (0)

// A kind of block: its size and how its bytes travel.
struct Kind {
  size_t size;
  Transfer transfer;
};

class TrapContract : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    const Status s = GetParam().make(&trap_);
    if (s.code() == -EPERM || s.code() == -ENOSYS || s.code() == -ENOENT || s.code() == -EACCES)
      GTEST_SKIP() << s.text();
    ASSERT_TRUE(s.ok()) << s.text();
  }

  // Every size of the design, by every transfer of the backend.
  std::vector<Kind> kinds() const {
    std::vector<Kind> out;
    for (size_t size : {kPage, size_t{64} << 10, kHugePage, size_t{32} << 20}) {
      if (trap_->caps().copy) out.push_back({size, Transfer::copy});
      if (trap_->caps().install) out.push_back({size, Transfer::install});
      if (trap_->caps().move && size % kHugePage == 0) out.push_back({size, Transfer::move});
    }
    return out;
  }

  // A block of `size` bytes, by the transfer that every backend of this kind has.
  Kind plain(size_t size) const { return {size, trap_->caps().install ? Transfer::install : Transfer::copy}; }

  struct Block {
    Trap* trap = nullptr;
    Kind kind{};
    uint64_t* words = nullptr;  // trapped
    std::byte* frame = nullptr;
    std::byte* slot = nullptr;  // empty: for take()
    size_t count() const { return kind.size / sizeof(uint64_t); }
    Status fill(Protect protect = Protect::no) { return trap->fill(words, kind.size, frame, kind.transfer, protect); }
    Status take() { return trap->take(words, kind.size, slot, kind.transfer); }
    void empty_slot() { madvise(slot, kind.size, MADV_DONTNEED); }
    void release() {
      EXPECT_TRUE(trap->detach(words, kind.size).ok());
      EXPECT_TRUE(trap->unmap(words, kind.size).ok());
      munmap(frame, kind.size);
      if (slot != frame) munmap(slot, kind.size);
    }
  };

  void make_block(Kind kind, Block* out) {
    void *words, *frame, *slot;
    OK(trap_->attach(kind.size, kPage, kind.transfer, &words));
    OK(trap_->reserve_frames(kind.size, kind.size >= kHugePage, &frame));
    // An installed frame stays the block's: take() returns the block in it.
    slot = frame;
    if (kind.transfer != Transfer::install) {
      OK(trap_->reserve_frames(kind.size, kind.size >= kHugePage, &slot));
    }
    *out = {trap_.get(), kind, static_cast<uint64_t*>(words), static_cast<std::byte*>(frame),
            static_cast<std::byte*>(slot)};
  }

  std::unique_ptr<Trap> trap_;
};

}  // namespace vmem::trap::testing
