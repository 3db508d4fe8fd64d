// Checks if a block device is in use: mounts, swap and known signatures.
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "core/types.h"
#include "store/open.h"

namespace vmem::store {

namespace {

struct Signature {
  const char* what;
  uint64_t offset;  // bytes
  size_t size;
  const char* bytes;
};

// Offsets and magics are from the kernel's include/uapi/linux/magic.h and the formats' own headers.
constexpr Signature kSignatures[] = {
    {"an XFS file system", 0, 4, "XFSB"},
    {"a Btrfs file system", 65600, 8, "_BHRfS_M"},
    {"an F2FS file system", 1024, 4, "\x10\x20\xf5\xf2"},
    {"an EROFS file system", 1024, 4, "\xe2\xe1\xf5\xe0"},
    {"a SquashFS file system", 0, 4, "hsqs"},
    {"an NTFS file system", 3, 8, "NTFS    "},
    {"an exFAT file system", 3, 8, "EXFAT   "},
    {"a FAT file system", 82, 5, "FAT32"},
    {"a FAT file system", 54, 5, "FAT16"},
    {"a FAT file system", 54, 5, "FAT12"},
    {"an ISO 9660 file system", 32769, 5, "CD001"},
    {"a JFS file system", 32768, 4, "JFS1"},
    {"a GFS2 file system", 65536, 8, "\x01\x16\x19\x70\x00\x00\x00\x01"},
    {"a bcachefs or bcache device", 4120, 16, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"},
    {"a bcachefs file system", 4120, 16, "\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"},
    {"swap space", 4086, 10, "SWAPSPACE2"},
    {"a LUKS volume", 0, 6, "LUKS\xba\xbe"},
    {"an LVM volume", 0, 8, "LABELONE"},
    {"an LVM volume", 512, 8, "LABELONE"},
    {"an LVM volume", 1024, 8, "LABELONE"},
    {"an LVM volume", 1536, 8, "LABELONE"},
    {"a software RAID member", 0, 4, "\xfc\x4e\x2b\xa9"},
    {"a software RAID member", 4096, 4, "\xfc\x4e\x2b\xa9"},
    {"a GPT partition table", 512, 8, "EFI PART"},
    {"a GPT partition table", 4096, 8, "EFI PART"},
    {"a Ceph BlueStore volume", 0, 22, "bluestore block device"},
};
constexpr size_t kProbeBytes = size_t{1} << 20;

// Signatures at the end of a device, whose start may be blank. The device's size is rounded down
// before the offset is subtracted.
struct SignatureAtEnd {
  const char* what;
  uint64_t rounded_to, before_end;
  size_t size;
  const char* bytes;
};
constexpr SignatureAtEnd kSignaturesAtEnd[] = {
    {"a software RAID member", 4096, 8192, 4, "\xfc\x4e\x2b\xa9"},    // metadata 1.0
    {"a software RAID member", 65536, 65536, 4, "\xfc\x4e\x2b\xa9"},  // metadata 0.90
    {"a member of a firmware's RAID", 512, 1024, 24, "Intel Raid ISM Cfg Sig. "},
    {"a member of a firmware's RAID", 512, 512, 4, "\xde\x11\xde\x11"},  // SNIA DDF
    {"a GPT partition table", 512, 512, 8, "EFI PART"},
    {"a GPT partition table", 4096, 4096, 8, "EFI PART"},
};

uint32_t le32(const char* at) {
  uint32_t value;
  memcpy(&value, at, sizeof value);
  return value;
}

bool is_ext(const std::vector<char>& head) {
  const char* super = head.data() + 1024;
  const bool magic = super[56] == '\x53' && super[57] == '\xef';
  return magic && le32(super + 24) <= 6 /* block size up to 64 KiB */ && le32(super + 76) <= 1 /* revision */;
}

bool is_mbr(const std::vector<char>& head) {
  if (head[510] != '\x55' || head[511] != '\xaa') return false;
  bool any = false;
  for (size_t at = 446; at < 510; at += 16) {
    if (head[at] != '\0' && head[at] != '\x80') return false;
    any |= head[at + 4] != '\0';
  }
  return any;
}

// ZFS writes its uberblocks, magic first, in the second half of each 256 KiB label, at least 1 KiB
// apart.
bool is_zfs(const std::vector<char>& head) {
  for (size_t at = size_t{128} << 10; at + 8 <= head.size(); at += 1024) {
    if (memcmp(head.data() + at, "\x0c\xb1\xba\x00\x00\x00\x00\x00", 8) == 0) return true;
  }
  return false;
}

const char* find_signature(const std::vector<char>& head) {
  for (const Signature& signature : kSignatures) {
    if (signature.offset + signature.size > head.size()) continue;
    if (memcmp(head.data() + signature.offset, signature.bytes, signature.size) == 0) return signature.what;
  }
  if (head.size() >= 4096 && is_ext(head)) return "an ext2, ext3 or ext4 file system";
  if (head.size() >= 512 && is_mbr(head)) return "a partition table";
  if (is_zfs(head)) return "a ZFS pool member";
  return nullptr;
}

// Returns nullptr if there is no known signature.
const char* find_signature_at_end(int fd) {
  const off_t size = lseek(fd, 0, SEEK_END);
  for (const auto& known : kSignaturesAtEnd) {
    const uint64_t end = size < 0 ? 0 : core::round_down(static_cast<uint64_t>(size), known.rounded_to);
    if (end < known.before_end) continue;
    char bytes[32];
    const ssize_t n = pread(fd, bytes, known.size, static_cast<off_t>(end - known.before_end));
    if (n == static_cast<ssize_t>(known.size) && memcmp(bytes, known.bytes, known.size) == 0) return known.what;
  }
  return nullptr;
}

struct CloseFile {
  void operator()(FILE* file) const { fclose(file); }
};

// Returns where the device is mounted in this mount namespace, or "".
std::string mount_point(dev_t device) {
  std::unique_ptr<FILE, CloseFile> file(fopen("/proc/thread-self/mountinfo", "re"));
  if (!file) return "";
  char line[4096];
  while (fgets(line, sizeof line, file.get()) != nullptr) {
    unsigned major_number, minor_number;
    char where[2048];
    if (sscanf(line, "%*u %*u %u:%u %*s %2047s", &major_number, &minor_number, where) != 3) continue;
    if (makedev(major_number, minor_number) == device) return where;
  }
  return "";
}

}  // namespace

core::Status check_block_device_unmounted(const std::string& path, int fd) {
  struct stat st;
  if (fstat(fd, &st) != 0) return core::system_error(errno, "cannot examine %s", path.c_str());
  if (const std::string where = mount_point(st.st_rdev); !where.empty()) {
    return core::error(EBUSY, "block device %s is mounted at %s: it cannot serve as SSD store", path.c_str(),
                       where.c_str());
  }
  return {};
}

core::Status check_block_device_unused(const std::string& path, int fd, size_t own) {
  if (core::Status status = check_block_device_unmounted(path, fd); !status.ok()) return status;
  std::vector<char> head(kProbeBytes);
  size_t have = 0;
  while (have < head.size()) {
    const ssize_t n = pread(fd, head.data() + have, head.size() - have, static_cast<off_t>(have));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return core::system_error(errno, "cannot read the start of block device %s", path.c_str());
    if (n == 0) break;
    have += static_cast<size_t>(n);
  }
  head.resize(have);
  std::fill_n(head.begin(), std::min(own, head.size()), '\0');
  const char* what = find_signature(head);
  if (what == nullptr) what = find_signature_at_end(fd);
  if (what != nullptr) {
    return core::error(EEXIST,
                       "block device %s carries %s: using it as SSD store would destroy it. If it is not needed, run "
                       "wipefs --all %s and clear its start: dd if=/dev/zero of=%s bs=1M count=1",
                       path.c_str(), what, path.c_str(), path.c_str());
  }
  if (std::any_of(head.begin(), head.end(), [](char byte) { return byte != 0; })) {
    return core::error(EEXIST,
                       "block device %s is not empty and is no store of libvmem: using it would destroy its contents. "
                       "If they are not needed, clear its start: dd if=/dev/zero of=%s bs=1M count=1",
                       path.c_str(), path.c_str());
  }
  return {};
}

}  // namespace vmem::store
