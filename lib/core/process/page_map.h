// Page states as the kernel reports them: words of /proc/self/pagemap, one for each page, and
// PAGEMAP_SCAN. Constants newer than the oldest headers we build with are defined here
// (include/uapi/linux/fs.h of Linux 6.16).
#pragma once

#include <sys/ioctl.h>

#include <cstdint>

namespace vmem::core {

inline constexpr uint64_t kPageExists = uint64_t{3} << 62;     // present, swapped, migrating or poisoned
inline constexpr uint64_t kPageProtected = uint64_t{1} << 57;  // by userfaultfd; Linux 5.13
inline constexpr uint64_t kPageGuard = uint64_t{1} << 58;      // MADV_GUARD_INSTALL; Linux 6.15

// struct pm_scan_arg of linux/fs.h, Linux 6.7.
struct ScanArgs {
  uint64_t size, flags, start, end, walk_end, out, out_len, max_pages;
  uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
struct ScannedRange {  // struct page_region
  uint64_t start, end, categories;
};
inline constexpr unsigned long kIoctlScan = _IOWR('f', 16, ScanArgs);  // PAGEMAP_SCAN
inline constexpr uint64_t kScanWritten = 1 << 1;                       // not write-protected
inline constexpr uint64_t kScanPresent = 1 << 3;
inline constexpr uint64_t kScanSwapped = 1 << 4;  // also poisoned, migrating
inline constexpr uint64_t kScanHuge = 1 << 6;
inline constexpr uint64_t kScanGuard = 1 << 8;  // 6.16

}  // namespace vmem::core
