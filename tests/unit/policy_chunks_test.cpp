#include <gtest/gtest.h>

#include "policy/chunks.h"

namespace {

using vmem::policy::Chunks;

TEST(Chunks, GrowWithoutMovingWhatIsInThem) {
  Chunks<size_t> chunks;
  EXPECT_EQ(chunks.size(), 0u);
  chunks.grow(1);
  EXPECT_EQ(chunks.size(), Chunks<size_t>::kStep);
  for (size_t i = 0; i < chunks.size(); ++i) chunks[i] = i;
  size_t* const first = &chunks[0];
  size_t* const last = &chunks[chunks.size() - 1];
  chunks.grow(100 * Chunks<size_t>::kStep + 1);
  EXPECT_EQ(chunks.size(), 101 * Chunks<size_t>::kStep);
  chunks.grow(5);
  EXPECT_EQ(chunks.size(), 101 * Chunks<size_t>::kStep);
  EXPECT_EQ(&chunks[0], first);
  EXPECT_EQ(&chunks[Chunks<size_t>::kStep - 1], last);
  EXPECT_EQ(*last, Chunks<size_t>::kStep - 1);
  EXPECT_EQ(chunks[chunks.size() - 1], 0u) << "new ones are empty";
}

}  // namespace
