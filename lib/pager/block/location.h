// The locations that calls are given.
#pragma once

#include <cstddef>

#include "pager/block/names.h"

namespace vmem::pager {

// devices: so many there are.
core::Status check_location(int location, size_t devices, bool allow_ssd);

}  // namespace vmem::pager
