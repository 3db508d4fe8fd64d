// Checks the locations that callers give.
#pragma once

#include <cstddef>

#include "pager/block/names.h"

namespace vmem::pager {

// Returns -ENODEV if there is no such device, -EINVAL if the location is not accepted here.
// devices: how many there are.
core::Status check_location(int location, size_t devices, bool allow_ssd);

}  // namespace vmem::pager
