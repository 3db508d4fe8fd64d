// The age of blocks that have left memory: how much has left it so far. A block that leaves gets a shadow, of 32 bits;
// when it comes back, what has left since is its age.
//
//   a shadow is never 0, which says that its block never left
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
  uint64_t pages() const { return pages_; }  // of 4 KiB, that have left
  uint32_t shadow() const { return std::max(uint32_t{1}, static_cast<uint32_t>(pages_ / kUnit)); }
  // In pages of 4 KiB.
  uint64_t age(uint32_t before) const { return (shadow() - before) * kUnit; }

 private:
  static constexpr uint64_t kUnit = 16;  // pages: 32 bits last for 256 TiB

  uint64_t pages_ = 0;
};

}  // namespace vmem::pager
