// How many mappings this process has and may have (vm.max_map_count), for error messages of calls
// that got none.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"

namespace vmem::core {

struct Mappings {
  size_t now = 0, most = 0;  // 0: unknown
  bool used_up() const { return most != 0 && now + kMargin >= most; }
  static constexpr size_t kMargin = 16;  // making a mapping briefly takes a few more
};
// Reads /proc; takes milliseconds if there are many mappings.
Mappings count_mappings();
// If `why` is -ENOMEM, returns an error that names the process limits that may have been reached,
// with the numbers and what to do. Otherwise, or without such a limit, returns `why`. what: "a
// region of 4 MiB".
Status name_limit(const Status& why, const char* what);

// Returns ok if all of [start, start + size) is reserved by private anonymous mappings with
// PROT_NONE. Otherwise returns -EEXIST, naming what else is there or that nothing is. Reads /proc;
// takes milliseconds if there are many mappings.
Status check_reserved(uintptr_t start, size_t size);

}  // namespace vmem::core
