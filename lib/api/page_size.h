// Which kernels libvmem can work on, by the size of their pages.
#pragma once

#include <cerrno>
#include <cstddef>

#include "core/status.h"
#include "core/types.h"

namespace vmem::api {

// page: bytes, as sysconf(_SC_PAGESIZE) says. -ENOTSUP with what to do: blocks, protections and what is read of the
// kernel's page tables are in pages of 4 KiB, so with others a block would share a page with its neighbours.
inline core::Status check_page_size(size_t page) {
  if (page == core::kPage) return {};
  return core::error(
      ENOTSUP,
      "this kernel's pages have %zu bytes, and libvmem works with pages of %zu only; start a kernel with "
      "pages of 4 KiB (arm64: CONFIG_ARM64_4K_PAGES)",
      page, static_cast<size_t>(core::kPage));
}

}  // namespace vmem::api
