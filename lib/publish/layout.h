// The layout of the file that shows a process to other programs, and how it is packed and checked.
//
// - The file is Header, then header.devices times Device, then header.regions times Region, without
//   gaps, in the machine's byte order.
// - A change that old readers would misread gets a new kVersion. Fields that they may ignore are
//   taken from the reserved ones.
// - The writer rewrites the file in place while others read it. A reader that finds a wrong
//   checksum reads again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/histogram.h"
#include "core/status.h"

namespace vmem::publish {

inline constexpr char kMagic[8] = {'v', 'm', 'e', 'm', 'p', 'u', 'b', '\0'};
inline constexpr uint32_t kVersion = 1;
inline constexpr size_t kMaxRegions = 256;  // in the file; header.regions_total says how many there are
inline constexpr size_t kMaxDevices = 64;

struct Histogram {
  uint64_t count[core::Histogram::kBuckets];  // bucket i: times below 2^i ns that are in no lower bucket
  uint64_t sum_ns;
};

// Counters since the process began to use libvmem, except those marked "now".
struct Stats {
  uint64_t faults, soft_faults, fault_ns_total, fault_ns_max;
  uint64_t read_bytes, write_bytes;
  uint64_t host_bytes, device_bytes, ssd_bytes, host_budget;  // now
  uint64_t evictions, clean_drops;
  uint64_t prefetched_blocks, prefetch_hits, prefetch_wasted;
  uint64_t host_to_device_bytes, device_to_host_bytes, copied_bytes;
  uint64_t io_errors, checksum_errors;
  uint64_t lease_blocks, lease_hits;
  uint64_t lost_blocks, unknown_blocks;  // unknown_blocks: now
  uint64_t fault_around_blocks;
  uint64_t dirty_bytes, background_write_bytes;  // dirty_bytes: now
  uint64_t reserved[5];                          // 0
};

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes, device_bytes, region_bytes;  // sizes of the structs
  uint64_t bytes;                                     // all valid bytes
  uint64_t checksum;                                  // of the bytes after this field, up to `bytes`
  uint64_t sequence;                                  // number of times it was written
  uint64_t started_ns, taken_ns;                      // CLOCK_REALTIME
  uint64_t taken_monotonic_ns;                        // CLOCK_MONOTONIC: for rates
  uint64_t start_ticks;                               // of the process: field 22 of /proc/PID/stat
  uint64_t pid_namespace;                             // inode of /proc/self/ns/pid, the namespace of `pid`
  uint32_t pid, uid;
  char command[64];  // of the process; every text ends with a zero
  char library[16];  // version of libvmem
  char trap[16];     // the trap's name; "" while the runtime is down
  uint32_t devices, regions;
  uint64_t regions_total;
  char device_tier[16];  // its backend, as setting device has it; "" without one
  uint64_t reserved[6];  // 0
  Stats stats;
  Histogram fault;
  Histogram move[core::kWays];
};

struct Device {
  uint32_t ordinal, lost;
  uint64_t budget, used_bytes, leased_bytes, in_bytes, out_bytes, evictions, clean_drops;  // budget 0: not used yet
  uint64_t guest_bytes;                                                                    // of used_bytes
  uint64_t reserved[3];                                                                    // 0
  char name[64];
};

enum class Backing : uint32_t { anonymous, file_read, file_shared, file_private };
inline constexpr const char* kBackingNames[] = {"anonymous", "file, read", "file, shared", "file, private"};

struct Region {
  uint64_t id, base, size, block_size;
  uint64_t zero_bytes, ssd_bytes, host_bytes, device_bytes, failed_bytes, leased_bytes;
  uint32_t backing, has_device_tier;
  uint8_t heat[32];  // bit width of the fault counters of 32 equal parts (policy::Heat); 0: not counted
  char name[64];
};

static_assert(sizeof(Histogram) == 328 && sizeof(Stats) == 256 && sizeof(Device) == 160 && sizeof(Region) == 184);
static_assert(offsetof(Header, checksum) == 32 && offsetof(Header, stats) == 272);
static_assert(sizeof(Header) == 272 + 256 + 6 * 328);

struct Snapshot {
  Header header{};
  std::vector<Device> devices;
  std::vector<Region> regions;
};

inline constexpr size_t kMaxBytes = sizeof(Header) + kMaxDevices * sizeof(Device) + kMaxRegions * sizeof(Region);

// Fills magic, version, sizes and checksum, and writes all into *out.
void pack(Snapshot& snapshot, std::vector<std::byte>* out);
// Trusts none of the bytes: ends texts, checks counts. Returns -EAGAIN if the file is torn or not
// written yet, -EPROTO for another version, and -EINVAL for another kind of file or a header that
// contradicts itself.
core::Status unpack(std::span<const std::byte> bytes, Snapshot* out);

// ---- requests: one message each way on a Unix socket beside the file ----

inline constexpr char kRequestMagic[8] = {'v', 'm', 'e', 'm', 'a', 's', 'k', '\0'};

enum class Ask : uint32_t {
  refresh = 1,  // write the file now
  set = 2,      // a live setting
  get = 3,      // any setting: the value is in the reply's text
};

struct Request {
  char magic[8];
  uint32_t version;
  uint32_t ask;
  char name[64], value[1024];
};

struct Reply {
  uint32_t version;
  int32_t code;  // 0 or a negative errno
  char text[2040];
};

// Copies as much as fits, and ends it with a zero.
void put_text(std::span<char> to, std::string_view from);

}  // namespace vmem::publish
