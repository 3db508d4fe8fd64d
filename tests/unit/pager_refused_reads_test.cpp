// Reads that the kernel has no memory for: disk and bytes are fine. Accesses of the block wait as
// for any memory, and fail only when nothing makes progress.
#include <array>

#include "common/patience.h"
#include "pager_steps.h"

namespace vmem::pager::test {
namespace {

using core::kPage;
using core::Status;
using store::Io;

class PagerRefusedReads : public PagerSteps {
 protected:
  // Returns blocks of values 7, 8, .. that only the SSD has.
  std::byte* on_ssd(const Settings& c, size_t blocks = 2) {
    start(c);
    std::byte* r = region(blocks);
    for (size_t i = 0; i < blocks; ++i) put(r + i * kSmall, 7 + i);
    evict(r, blocks * kSmall);
    return r;
  }
  static Settings impatient() {
    Settings c = config();
    c.fault_timeout_ms = 30;
    return c;
  }
};

TEST_F(PagerRefusedReads, AnAccessIsAnsweredWhenThereIsMemory) {
  for (const int error : {ENOMEM, ENOBUFS, EAGAIN}) {
    std::byte* r = on_ssd(config());
    engine->fail(Io::Op::read, error);
    const uint64_t before = engine->count(Io::Op::read);
    auto first = getting(r);
    engine->until_count(Io::Op::read, before + 1);
    auto second = getting(r + kPage);
    engine->until_count(Io::Op::read, before + 4);
    EXPECT_EQ(pager->counters().io_errors, 0u);
    engine->fail(Io::Op::read, 0);
    EXPECT_EQ(first.get(), 7u) << error;
    EXPECT_EQ(second.get(), 0u) << error;
    EXPECT_EQ(get(r + kSmall), 8u);
    TearDown();
  }
}

TEST_F(PagerRefusedReads, AnAccessEndsWhenNothingGoesOnAndTheNextBeginsAnew) {
  std::byte* r = on_ssd(impatient());
  engine->fail(Io::Op::read, ENOMEM);
  const uint64_t before = engine->count(Io::Op::read);
  EXPECT_TRUE(bus(r));
  EXPECT_GT(engine->count(Io::Op::read) - before, FailedBlocks::kRefusals);
  engine->fail(Io::Op::read, 0);
  EXPECT_TRUE(vmem::test::eventually([&] { return !bus(r); }));
  EXPECT_EQ(get(r), 7u);
  EXPECT_TRUE(pager->sync(r, 2 * kSmall).ok());
}

TEST_F(PagerRefusedReads, AnAcquireWaitsAndHasItsBlocksWhenThereIsMemory) {
  std::byte* r = on_ssd(config());
  engine->fail(Io::Op::read, ENOMEM);
  const uint64_t before = engine->count(Io::Op::read);
  const vmem_range all = range(r, 2 * kSmall);
  auto acquire = calling([&] { return pager->acquire({&all, 1}, VMEM_HOST, nullptr); });
  engine->until_count(Io::Op::read, before + 4);
  engine->fail(Io::Op::read, 0);
  EXPECT_TRUE(acquire.get().ok());
  EXPECT_EQ(get(r), 7u);
  EXPECT_EQ(get(r + kSmall), 8u);
  EXPECT_TRUE(pager->release({&all, 1}, nullptr).ok());
}

// No thread gets SIGBUS: none has accessed the block.
TEST_F(PagerRefusedReads, AnAcquireEndsWhenNothingGoesOn) {
  std::byte* r = on_ssd(impatient());
  engine->fail(Io::Op::read, ENOMEM);
  const vmem_range all = range(r, 2 * kSmall);
  const Status s = pager->acquire({&all, 1}, VMEM_HOST, nullptr);
  EXPECT_EQ(s.code(), -ENOMEM);
  EXPECT_NE(s.text().find("region 1, block 0 (offset 0)"), std::string_view::npos) << s.text();
  EXPECT_EQ(pager->release({&all, 1}, nullptr).code(), -EINVAL) << "nothing is leased";
  EXPECT_EQ(trap->calls("fail"), 0u);
  engine->fail(Io::Op::read, 0);
  EXPECT_TRUE(pager->acquire({&all, 1}, VMEM_HOST, nullptr).ok());
  EXPECT_EQ(get(r), 7u);
  EXPECT_TRUE(pager->release({&all, 1}, nullptr).ok());
}

// A waiting block keeps what was stored to it, and its region may be freed.
TEST_F(PagerRefusedReads, BlocksThatWaitMayBeDroppedAndFreed) {
  std::byte* r = on_ssd(config(), 3);
  engine->fail(Io::Op::read, ENOMEM);
  const uint64_t before = engine->count(Io::Op::read);
  auto first = getting(r);
  engine->until_count(Io::Op::read, before + 2);
  EXPECT_TRUE(pager->advise(r, kSmall, VMEM_ADVISE_DONT_NEED, VMEM_HOST).ok());
  EXPECT_EQ(first.get(), 0u) << "zeros, which nobody has to read";
  auto second = std::async(std::launch::async, [&] { return bus(r + kSmall); });
  engine->until_count(Io::Op::read, before + 4);
  EXPECT_TRUE(pager->destroy(r, false).ok());
  EXPECT_TRUE(second.get());
}

}  // namespace
}  // namespace vmem::pager::test
