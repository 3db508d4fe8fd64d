// A file that cannot grow: a full file system, a quota, or RLIMIT_FSIZE.
#include <gtest/gtest.h>

#include <cerrno>

#include "pager_steps.h"

namespace {

using vmem::pager::test::kSmall;
using vmem::pager::test::PagerSteps;

class PagerFullDisk : public PagerSteps, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Errors, PagerFullDisk, ::testing::Values(ENOSPC, EDQUOT, EFBIG));

TEST_P(PagerFullDisk, ASmallBlockIsWrittenOverItsOldCopy) {
  start(config());
  std::byte* r = region(3);
  for (uint64_t i = 0; i < 3; ++i) put(r + i * kSmall, i + 1);
  evict(r, 2 * kSmall);
  engine->fill_disk(GetParam());  // the store has room that its disk lacks
  EXPECT_EQ(pager->sync(r + 2 * kSmall, kSmall).code(), -GetParam());
  for (uint64_t i = 0; i < 2; ++i) put(r + i * kSmall, i + 8);
  EXPECT_TRUE(pager->sync(r, 2 * kSmall).ok());
  evict(r, 2 * kSmall);
  for (uint64_t i = 0; i < 2; ++i) EXPECT_EQ(get(r + i * kSmall), i + 8);
  EXPECT_EQ(get(r + 2 * kSmall), 3u);
  EXPECT_EQ(space->extents(), 2u);
}

}  // namespace
