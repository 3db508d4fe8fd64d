// For programs whose tests start the program itself once more: the parts that the runner divides a suite into
// (GTEST_TOTAL_SHARDS) are not for the child, which would run its one test in the first part alone.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

namespace vmem::test {

class PartsAreOurs : public ::testing::Environment {
 public:
  void SetUp() override {  // which tests are this part's is decided by now
    unsetenv("GTEST_TOTAL_SHARDS");
    unsetenv("GTEST_SHARD_INDEX");
    unsetenv("GTEST_SHARD_STATUS_FILE");
  }
};

}  // namespace vmem::test
