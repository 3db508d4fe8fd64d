// The age of blocks that have left memory. A block that leaves gets a shadow of 32 bits. When it
// comes back, its age is the memory that has left since.
//
// - A shadow is never 0: 0 means that the block never left.
//
// Not thread-safe: the pager's lock protects it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/types.h"

namespace vmem::pager {

class NonresidentAge {
 public:
  void left(uint64_t bytes) { pages_ += bytes / core::kPage; }
  uint64_t pages() const { return pages_; }  // 4 KiB pages that have left
  uint32_t shadow() const { return std::max(uint32_t{1}, static_cast<uint32_t>(pages_ / kUnit)); }
  // In 4 KiB pages.
  uint64_t age(uint32_t before) const { return (shadow() - before) * kUnit; }

 private:
  static constexpr uint64_t kUnit = 16;  // pages; 32 bits suffice for 256 TiB

  uint64_t pages_ = 0;
};

}  // namespace vmem::pager
