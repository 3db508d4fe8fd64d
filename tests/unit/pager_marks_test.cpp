// A failure leaves a mark: what failed half way is never taken for what it was before, and who asks is told.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>

#include "pager_steps.h"

namespace {

using vmem::core::kHugePage;
using vmem::core::kPage;
using vmem::core::Status;
using vmem::pager::test::kSmall;
using vmem::pager::test::PagerSteps;
using vmem::store::Io;

constexpr vmem::store::FileId kFile = 1;

class PagerMarks : public PagerSteps {
 protected:
  uint64_t in_file(size_t offset) {
    uint64_t value = 0;
    const std::vector<uint8_t> bytes = engine->bytes(kFile);
    if (offset + sizeof value <= bytes.size()) memcpy(&value, bytes.data() + offset, sizeof value);
    return value;
  }
};

TEST_F(PagerMarks, AFileTornByAFailedWriteIsWrittenAgainThoughTheOldBytesAreBack) {
  for (size_t block : {kSmall, kHugePage}) {
    for (bool leaves : {false, true}) {
      start(config());
      std::byte* r = shared(2 * block, block);
      EXPECT_EQ(get(r), 0u);
      put(r, 7);
      engine->tear(ENOSPC);
      EXPECT_EQ(pager->sync(r, 2 * block).code(), -ENOSPC);
      EXPECT_EQ(in_file(0), 7u) << "half of the new bytes got there";
      put(r, 0);  // the program takes its change back
      const Status s = leaves ? pager->evict(r, 2 * block, VMEM_SSD) : pager->sync(r, 2 * block);
      EXPECT_TRUE(s.ok()) << s.text();
      EXPECT_EQ(in_file(0), 0u);
      EXPECT_EQ(get(r), 0u);
      TearDown();
      pager.reset();
    }
  }
}

TEST_F(PagerMarks, AFileTornByAFailedWriteInTheBackgroundIsWrittenByFree) {
  start(config());
  std::byte* r = shared(2 * kHugePage, kHugePage);
  EXPECT_EQ(get(r), 0u);
  EXPECT_TRUE(pager->sync(r, kHugePage).ok()) << "waits until it is in place: a hint passes over what moves";
  put(r, 7);
  engine->tear(EIO);
  EXPECT_TRUE(pager->prefetch(r, kHugePage, VMEM_SSD).ok());
  engine->until_count(Io::Op::write, 1);
  EXPECT_EQ(in_file(0), 7u);
  put(r, 0);
  EXPECT_TRUE(pager->destroy(r, false).ok());
  EXPECT_EQ(in_file(0), 0u);
}

TEST_F(PagerMarks, AFailureBeforeTheTailOfAFileMarksTheWholeBlock) {
  start(config());
  const size_t size = kSmall - kPage + 100;
  std::byte* r = shared(size);
  EXPECT_EQ(get(r), 0u);
  put(r, 7);
  put(r + kSmall - kPage, 8);
  engine->tear(EIO);  // body and tail are one request, which ends half way
  EXPECT_EQ(pager->sync(r, size).code(), -EIO);
  EXPECT_EQ(in_file(0), 7u);
  put(r, 0);
  put(r + kSmall - kPage, 0);
  EXPECT_TRUE(pager->sync(r, size).ok());
  EXPECT_EQ(engine->count(Io::Op::write), 2u) << "body and tail again";
  EXPECT_EQ(in_file(0), 0u);
  EXPECT_EQ(in_file(kSmall - kPage), 0u);
}

TEST_F(PagerMarks, AStoredBlockTornByAFailedOverwriteIsNeverDroppedAsClean) {
  start(config());
  std::byte* r = region(1, kHugePage);
  put(r, 7);
  evict(r, kHugePage);
  EXPECT_EQ(get(r), 7u);
  put(r, 8);
  engine->tear(EIO);
  EXPECT_EQ(pager->sync(r, kHugePage).code(), -EIO);
  put(r, 7);
  evict(r, kHugePage);
  EXPECT_EQ(get(r), 7u);
  EXPECT_EQ(pager->counters().checksum_errors, 0u);
}

}  // namespace
