// For programs whose tests start the program again. The child must not inherit the runner's
// division of the suite (GTEST_TOTAL_SHARDS), or it would run its one test in the first part only.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

namespace vmem::test {

class PartsAreOurs : public ::testing::Environment {
 public:
  void SetUp() override {  // gtest has chosen this part's tests by now
    unsetenv("GTEST_TOTAL_SHARDS");
    unsetenv("GTEST_SHARD_INDEX");
    unsetenv("GTEST_SHARD_STATUS_FILE");
  }
};

}  // namespace vmem::test
