// When a block in host memory counts as clean, and who is told that a free has come to nothing.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <future>

#include "pager_steps.h"

namespace {

using vmem::core::kHugePage;
using vmem::core::Status;
using vmem::pager::test::kSmall;
using vmem::pager::test::PagerSteps;
using vmem::store::Io;

class PagerClean : public PagerSteps {};

// A network card that has the block's pages pinned stores into them past any protection.
TEST_F(PagerClean, WhatADeviceStoresUnderAWriteLeaseIsWrittenEachTime) {
  for (size_t block : {kSmall, kHugePage}) {
    start(config());
    std::byte* r = shared(2 * block, block);
    const vmem_range first = range(r, block, VMEM_READ | VMEM_WRITE);
    ASSERT_TRUE(pager->acquire({&first, 1}, VMEM_HOST, nullptr).ok());
    put(r, 7);
    EXPECT_TRUE(pager->flush_shared().ok());
    EXPECT_EQ(in_file(0), 7u);
    const uint64_t stored = 8;
    memcpy(r, &stored, sizeof stored);
    EXPECT_TRUE(pager->flush_shared().ok());
    EXPECT_EQ(in_file(0), 8u);
    const uint64_t last = 9;
    memcpy(r, &last, sizeof last);
    EXPECT_TRUE(pager->release({&first, 1}, nullptr).ok());
    EXPECT_TRUE(pager->sync(r, 2 * block).ok());
    EXPECT_EQ(in_file(0), 9u);
    TearDown();
    pager.reset();
  }
}

// The one whose write fails keeps the region for nobody: who frees it whatever happens is not left waiting.
TEST_F(PagerClean, AFreeThatFailsBesideOneThatDoesNotLeavesNobodyWaiting) {
  for (int round = 0; round < 25; ++round) {
    start(config());
    std::byte* r = shared(2 * kSmall);
    put(r, 7);
    put(r + kSmall, 8);
    engine->hold(Io::Op::write, true);
    auto polite = calling([&] { return pager->destroy(r, false); });
    engine->until_held(1);
    auto forced = calling([&] { return pager->destroy(r, true); });
    engine->fail(Io::Op::write, EIO);
    engine->hold(Io::Op::write, false);
    engine->let_go();
    const int code = polite.get().code();
    EXPECT_TRUE(code == -EIO || code == -EINVAL) << code << ": the write failed, or the other was faster";
    EXPECT_TRUE(forced.get().ok());
    EXPECT_FALSE(pager->has_regions());
    engine->fail(Io::Op::write, 0);
    TearDown();
    pager.reset();
  }
}

}  // namespace
