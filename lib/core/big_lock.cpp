#include "core/big_lock.h"

#include <atomic>

#include "core/block_table.h"
#include "core/log.h"

namespace vmem::core {

namespace {
std::atomic<bool> strict{false};
}  // namespace

void be_strict_about_big_locks(bool on) {
  strict.store(on, std::memory_order_relaxed);
}

void called_under_big_lock(const char* call) {
  if (strict.load(std::memory_order_relaxed)) fatal("%s is called under the pager's lock", call);
  VMEM_LOG_ONCE(Level::error, "%s is called under the pager's lock: an error of libvmem, please report it", call);
}

}  // namespace vmem::core
