// In this program an external call under the pager's lock ends the process.
#include "common/children.h"
#include "core/outside_lock.h"

namespace {
const bool strict = (vmem::core::be_strict_about_big_locks(true), true);
const auto* const parts = ::testing::AddGlobalTestEnvironment(new vmem::test::PartsAreOurs);
}  // namespace
