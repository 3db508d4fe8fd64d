// In this program a call to the outside under the pager's lock is the end of it.
#include "core/big_lock.h"

namespace {
const bool strict = (vmem::core::be_strict_about_big_locks(true), true);
}  // namespace
