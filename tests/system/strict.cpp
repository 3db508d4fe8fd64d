// In this program a call to the outside under the pager's lock is the end of it.
#include "common/children.h"
#include "core/big_lock.h"

namespace {
const bool strict = (vmem::core::be_strict_about_big_locks(true), true);
const auto* const parts = ::testing::AddGlobalTestEnvironment(new vmem::test::PartsAreOurs);
}  // namespace
