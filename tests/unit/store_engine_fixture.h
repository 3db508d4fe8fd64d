// A test of every implementation of store::Engine, by name.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "store/engine.h"
#include "store_test_util.h"

namespace vmem::store::test {

class EngineFixture : public testing::TestWithParam<const char*> {
 protected:
  void make(unsigned depth, unsigned threads = 1) {
    const core::Status status = make_named_engine(GetParam(), depth, threads, &engine_);
    if (status.code() == -EPERM || status.code() == -ENOSYS) GTEST_SKIP() << "io_uring is not permitted here";
    ASSERT_TRUE(status.ok()) << status.text();
  }
  FileId add(const TempFile& file) {
    FileId id = 0;
    const core::Status status = engine_->add_file(file.fd(), &id);
    EXPECT_TRUE(status.ok()) << status.text();
    return id;
  }
  std::unique_ptr<Engine> engine_;
};

}  // namespace vmem::store::test
