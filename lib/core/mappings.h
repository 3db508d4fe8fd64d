// How many mappings of memory this process has and may have (vm.max_map_count): for the words of a call that got none.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"

namespace vmem::core {

struct Mappings {
  size_t now = 0, most = 0;  // 0: it cannot be told
  bool used_up() const { return most != 0 && now + kMargin >= most; }
  static constexpr size_t kMargin = 16;  // making one takes some more for a moment
};
// Reads /proc, in milliseconds where there are many.
Mappings count_mappings();
// In place of `why`, which is returned where it is not -ENOMEM: the limit of the process that has been reached, with
// the numbers and what to do, if there is one. what: "a region of 4 MiB".
Status name_limit(const Status& why, const char* what);

// Ok when all of [start, start + size) is reserved: private anonymous mappings without rights (PROT_NONE). -EEXIST
// names what else is there, or that nothing is. Reads /proc, in milliseconds where there are many.
Status check_reserved(uintptr_t start, size_t size);

}  // namespace vmem::core
