// In this program a call to the outside under the pager's lock ends it. No thread delivers a test's
// log lines: the test's end does.
#include "common/children.h"
#include "core/log.h"
#include "core/outside_lock.h"

namespace {
class LogAtEnd : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo&) override { vmem::core::flush_log(); }
};
const bool listens = (::testing::UnitTest::GetInstance()->listeners().Append(new LogAtEnd), true);
const bool strict = (vmem::core::be_strict_about_big_locks(true), true);
const auto* const parts = ::testing::AddGlobalTestEnvironment(new vmem::test::PartsAreOurs);
}  // namespace
