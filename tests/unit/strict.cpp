// In this program a call to the outside under the pager's lock is the end of it, and the log of a test is delivered at
// its end: no thread does it.
#include "common/children.h"
#include "core/big_lock.h"
#include "core/log.h"

namespace {
class LogAtEnd : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo&) override { vmem::core::flush_log(); }
};
const bool listens = (::testing::UnitTest::GetInstance()->listeners().Append(new LogAtEnd), true);
const bool strict = (vmem::core::be_strict_about_big_locks(true), true);
const auto* const parts = ::testing::AddGlobalTestEnvironment(new vmem::test::PartsAreOurs);
}  // namespace
