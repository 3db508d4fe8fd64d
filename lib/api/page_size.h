// Checks that libvmem can work with the size of the kernel's pages.
#pragma once

#include <cerrno>
#include <cstddef>

#include "core/status.h"
#include "core/types.h"

namespace vmem::api {

// page: bytes, from sysconf(_SC_PAGESIZE). Returns -ENOTSUP, with advice, for other sizes than 4
// KiB: blocks, protections and the page tables read from the kernel are in units of 4 KiB, and with
// larger pages a block would share a page with its neighbours.
inline core::Status check_page_size(size_t page) {
  if (page == core::kPage) return {};
  return core::error(
      ENOTSUP,
      "this kernel's pages have %zu bytes, and libvmem works with pages of %zu only; start a kernel with "
      "pages of 4 KiB (arm64: CONFIG_ARM64_4K_PAGES)",
      page, static_cast<size_t>(core::kPage));
}

}  // namespace vmem::api
