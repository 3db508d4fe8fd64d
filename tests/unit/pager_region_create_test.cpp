// Making regions: their block sizes, addresses and charges; a region that cannot be made leaves
// nothing.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>

#include "pager/calls/region_create.h"
#include "pager_device_parts.h"

namespace {

using vmem::core::BigLock;
using vmem::core::Status;
using vmem::pager::Backing;
using vmem::pager::Region;
using vmem::pager::RegionSpec;
using vmem::pager::test::FakeDevices;
using vmem::trap::Transfer;
namespace core = vmem::core;
namespace device = vmem::device;

// Devices that have address space and count what they gave.
class Places : public FakeDevices {
 public:
  size_t largest_unit() const override { return size_t{32} << 20; }
  Status reserve(size_t size, size_t block, int, void** out) override {
    if (reserve_error != 0) return core::error(reserve_error, "as the test wants it");
    block_size = block;
    size_ = size;
    *out = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ++reserved;
    return {};
  }
  Status release(void* at) override {
    munmap(at, size_);
    --reserved;
    return {};
  }
  size_t reserved = 0, block_size = 0;
  int reserve_error = 0;

 private:
  size_t size_ = 0;
};

class PagerRegionCreate : public vmem::pager::test::DeviceParts {
 protected:
  explicit PagerRegionCreate(vmem::pager::Config config = {})
      : DeviceParts(std::make_unique<Places>(), std::make_unique<vmem::pager::test::FakeTrap>(), std::move(config)) {}
  static RegionSpec host(size_t size, size_t block_size = kBlock) {
    RegionSpec what;
    what.size = size;
    what.block_size = block_size;
    what.host_only = true;
    return what;
  }
  Region* made(const RegionSpec& what) {
    void* at = nullptr;
    const Status s = maker.create(what, &at);
    EXPECT_TRUE(s.ok()) << s.text();
    BigLock lock(map.mutex());
    return s.ok() ? map.find(reinterpret_cast<uintptr_t>(at)) : nullptr;
  }
  Status refused(const RegionSpec& what) {
    void* at = this;
    Status s = maker.create(what, &at);
    EXPECT_FALSE(s.ok());
    EXPECT_EQ(at, this);
    BigLock lock(map.mutex());
    EXPECT_TRUE(map.regions().empty());
    EXPECT_EQ(ctx.totals.reserved_blocks, 0u);
    EXPECT_EQ(reserve.bytes(), 0u);
    return s;
  }
  void have_memory() {
    BigLock lock(map.mutex());
    budget.set(uint64_t{80} << 20);
    reserve.follow_budget();
  }
  // Describes it as create() does; it is not published.
  static void describe(Region& r, size_t block_size, bool bounces) {
    r.block_size = block_size;
    r.size = r.span = r.blocks * block_size;
    r.bounces = bounces;
    ASSERT_TRUE(r.table.create(r.blocks).ok());
  }
  Status charge(Region& r) {
    BigLock lock(map.mutex());
    return maker.charge(lock, r, clock.look(vmem::core::now_ns()));
  }
  void credit(Region& r) {
    BigLock lock(map.mutex());
    maker.credit(r);
  }
  uint64_t reserved_blocks() {
    BigLock lock(map.mutex());
    return ctx.totals.reserved_blocks;
  }
  uint64_t kept() {
    BigLock lock(map.mutex());
    return reserve.bytes();
  }
  Places& places = static_cast<Places&>(devices);
  vmem::pager::RegionCreate& maker = calls.region_create;
};

TEST_F(PagerRegionCreate, ARegionIsFoundWhenAllOfItIsThere) {
  const Region* const a = made(host(3 * kBlock + 1));
  const Region* const b = made(host(kBlock));
  ASSERT_NE(a, nullptr);
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(a->blocks, 4u);
  EXPECT_EQ(a->size, 3 * kBlock + 1);
  EXPECT_EQ(a->span, 4 * kBlock);
  EXPECT_EQ(a->charge.stored_span, a->span) << "its blocks have room in the store";
  EXPECT_LT(a->id, b->id);
  EXPECT_FALSE(a->gpu);
}

TEST_F(PagerRegionCreate, ASmallRegionHasSmallerBlocks) {
  EXPECT_EQ(made(host(5000, 64 << 10))->block_size, 8192u);
  RegionSpec adapts = host(8 << 20);
  adapts.adapts = true;
  const Region* const r = made(adapts);
  EXPECT_EQ(r->block_size, size_t{64} << 10);
  EXPECT_TRUE(r->use.adapts);
}

TEST_F(PagerRegionCreate, HowBlocksComeToTheirPlaceFollowsFromTheTrapAndTheirSize) {
  have_memory();
  EXPECT_EQ(made(host(1 << 20))->transfer, Transfer::copy);
  EXPECT_TRUE(made(host(1 << 20))->bounces);
  const Region* const large = made(host(4 << 20, core::kHugePage));
  EXPECT_EQ(large->transfer, Transfer::move);
  EXPECT_TRUE(large->probes);
  EXPECT_FALSE(large->bounces);
}

class PagerRegionCreateByCopies : public PagerRegionCreate {
 protected:
  static vmem::pager::Config copies() {
    vmem::pager::Config config;
    config.allow_move = false;
    return config;
  }
  PagerRegionCreateByCopies() : PagerRegionCreate(copies()) {}
};

TEST_F(PagerRegionCreateByCopies, LargeBlocksAreCopiedWhereNoneMayBeMoved) {
  have_memory();
  EXPECT_EQ(made(host(4 << 20, core::kHugePage))->transfer, Transfer::copy);
}

TEST_F(PagerRegionCreate, WhatCannotBeIsRefusedAndLeavesNothing) {
  EXPECT_EQ(refused(host(0)).code(), -EINVAL);
  EXPECT_EQ(refused(host(size_t{1} << 47)).code(), -EINVAL);
  RegionSpec odd = host(kBlock);
  odd.address = 4096;
  EXPECT_EQ(refused(odd).code(), -EINVAL);
  EXPECT_EQ(refused(host(64 << 20, 4 << 20)).code(), -ENOMEM) << "fewer than four blocks fit";
  RegionSpec file = host(kBlock);
  file.backing = Backing::file_read;
  file.path = "/nonexistent/file";
  EXPECT_EQ(refused(file).code(), -ENOENT);
  file.offset = 1;
  EXPECT_EQ(refused(file).code(), -EINVAL);
}

TEST_F(PagerRegionCreate, AFileMayBeShorterThanItsRegionButNoneIsLongerThanTheLargest) {
  const char* tmp = getenv("TMPDIR");
  std::string path = std::string(tmp != nullptr ? tmp : "/var/tmp") + "/vmem-maker.XXXXXX";
  const int fd = mkstemp(path.data());
  ASSERT_GE(fd, 0);
  ASSERT_EQ(ftruncate(fd, 2 * kBlock), 0);
  close(fd);
  RegionSpec file = host(3 * kBlock);
  file.backing = Backing::file_shared;
  file.path = path;
  file.offset = uint64_t{INT64_MAX} / kBlock * kBlock;
  EXPECT_EQ(refused(file).code(), -EINVAL);
  file.size = 2 * kBlock;
  file.offset = kBlock;
  Region* const r = made(file);
  ASSERT_NE(r, nullptr);
  EXPECT_TRUE(r->source.present);
  EXPECT_EQ(r->source.offset, kBlock);
  EXPECT_EQ(r->charge.stored_span, 0u) << "the store has nothing of it";
  vmem::pager::close_file(r, engine);
  unlink(path.c_str());
}

TEST_F(PagerRegionCreate, BlocksOfADeviceTierAreNeitherSmallerNorLargerThanItsUnits) {
  RegionSpec what = host(64 << 20);
  what.host_only = false;
  what.fixed_block_size = true;
  size_t block = 1;
  EXPECT_EQ(maker.device_block(what, &block).code(), -EINVAL);
  what.block_size = size_t{4} << 20;
  ASSERT_TRUE(maker.device_block(what, &block).ok());
  EXPECT_EQ(block, size_t{4} << 20);
  what.fixed_block_size = false;
  ASSERT_TRUE(maker.device_block(what, &block).ok());
  EXPECT_EQ(block, kUnit);
  what.host_only = true;
  ASSERT_TRUE(maker.device_block(what, &block).ok());
  EXPECT_EQ(block, 0u);
  ASSERT_TRUE(maker.device_block(what, &block).ok()) << "there is no device tier";
  EXPECT_EQ(block, 0u);
}

TEST_F(PagerRegionCreate, ARegionWithADeviceTierLiesWhereTheDevicesSayOrNowhere) {
  have_memory();
  RegionSpec what = host(4 << 20);
  what.host_only = false;
  void* at = nullptr;
  places.reserve_error = ENOMEM;
  EXPECT_EQ(maker.create(what, &at).code(), -ENOMEM);
  {
    BigLock lock(map.mutex());
    EXPECT_TRUE(map.regions().empty());
    EXPECT_EQ(staging.of(kUnit).regions, 0u);
  }
  places.reserve_error = 0;
  ASSERT_TRUE(maker.create(what, &at).ok());
  EXPECT_EQ(places.reserved, 1u);
  EXPECT_EQ(places.block_size, kUnit);
  BigLock lock(map.mutex());
  const Region* const r = map.find(reinterpret_cast<uintptr_t>(at));
  ASSERT_NE(r, nullptr);
  EXPECT_TRUE(r->gpu);
  EXPECT_EQ(staging.of(r->block_size).regions, 1u);
}

TEST_F(PagerRegionCreate, ARegionHasWhatItNeedsAndGivesItBack) {
  Region r(16, 0);
  r.blocks = 16;
  describe(r, kBlock, true);
  ASSERT_TRUE(charge(r).ok());
  EXPECT_EQ(reserved_blocks(), 16u);
  EXPECT_EQ(r.charge.reserved_blocks, 16u);
  EXPECT_GE(kept(), uint64_t{kBlock});
  EXPECT_GT(r.charge.table_granted, 0u);
  {
    BigLock lock(map.mutex());
    EXPECT_GE(map.frame_table().size(), 16u) << "its blocks need no memory to move";
    EXPECT_NE(frames.get_bounce(kBlock), nullptr);
  }
  credit(r);
  EXPECT_EQ(reserved_blocks(), 0u);
  EXPECT_EQ(r.charge.reserved_blocks, 0u);
  EXPECT_EQ(kept(), 0u);
}

TEST_F(PagerRegionCreate, WhatFewerThanFourBlocksFitIntoIsRefusedWithTheNumbers) {
  Region r(4, 0);
  r.blocks = 4;
  describe(r, kBudget / 2, false);
  const Status s = charge(r);
  EXPECT_EQ(s.code(), -ENOMEM);
  EXPECT_NE(s.text().find("fewer than 4 blocks of 4 MiB"), std::string_view::npos) << s.text();
  EXPECT_EQ(reserved_blocks(), 0u);
}

TEST_F(PagerRegionCreate, OneThatDoesNotFitBesideLeasesTakesNothing) {
  Region& other = region(7 * (1 << 20) / kBlock);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(lease_manager.grant({&other, 0, 83}, VMEM_READ, VMEM_HOST, nullptr).ok());
  }
  const uint64_t before = kept();  // 84 blocks are leased
  Region r(8, 0);
  r.blocks = 8;
  describe(r, size_t{1} << 20, false);
  EXPECT_EQ(charge(r).code(), -ENOMEM);
  EXPECT_EQ(reserved_blocks(), 0u);
  EXPECT_EQ(kept(), before);
  {
    BigLock lock(map.mutex());
    lease_manager.take_back({&other, 0, 83}, VMEM_READ, VMEM_HOST, nullptr);
  }
  EXPECT_TRUE(charge(r).ok()) << "there is room now";
  credit(r);
}

TEST_F(PagerRegionCreate, TheLastRegionOfASizeLetsOthersHaveItsStagingFrames) {
  Region r(1, 0);
  r.blocks = 1;
  describe(r, kUnit, false);
  r.gpu = true;
  uint64_t told = 0;
  {
    BigLock lock(map.mutex());
    budget.set(uint64_t{80} << 20);
    reserve.follow_budget();
  }
  ASSERT_TRUE(charge(r).ok());
  {
    BigLock lock(map.mutex());
    EXPECT_EQ(staging.of(r.block_size).regions, 1u);
    told = gpus.work().count();
  }
  credit(r);
  BigLock lock(map.mutex());
  EXPECT_EQ(staging.of(r.block_size).regions, 0u);
  EXPECT_GT(gpus.work().count(), told) << "workers look for frames that nobody needs";
}

}  // namespace
