// Devices as the pager sees them; the only interface to CUDA. A backend (backend.h) makes them, and
// each passes one contract suite, tests/unit/device_contract_suite.h. Three small interfaces make
// up this one, for classes that need only one:
//
// - DeviceMemory: ranges, units, copies and mappings.
// - StreamOps: streams, tickets, and whether a device is lost.
// - HostPinning: host memory that devices copy from and to.
//
// Rules for callers:
// - Threads: any thread may make any call, but no two calls may name overlapping ranges at once
//   (the pager owns a block's transition). Calls need no lock of the caller. Calls that wait for a
//   device say "Blocks". A thread's current CUDA device, capture mode and last error do not change.
// - Memory: no call throws; a call that lacks memory returns -ENOMEM. open(), rearm(), release(),
//   poll(), wait(), health(), unpin() and the end of a ticket need none; nor do punch() and
//   write_protect(), unless the program has put a SIGSEGV handler over ours since.
// - Errors: -ENODEV no such device; -EINVAL misaligned or foreign address, unit in the wrong state,
//   stream of another device; -EBUSY the stream captures a graph; -ENOMEM; -EIO the device is lost.
//   A failed call changes nothing unless its comment says otherwise.
// - Lost: by a sticky CUDA error such as 700, or cudaDeviceReset. From then on every call that
//   needs the device fails at once, with the first reason. After error 700 write_protect(),
//   punch(), rearm() and release() still work, so that regions can be taken down in order.
//   cudaDeviceReset unmaps the device's ranges with the traps and frames in their holes: calls that
//   would change them return -EIO; release() and rearm() succeed and leave the addresses alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "device/device_memory.h"
#include "device/host_pinning.h"
#include "device/stream_ops.h"

namespace vmem::device {

using core::error;
using core::Status;

inline constexpr unsigned kMaxDevices = 64;

enum class Link : uint8_t { self, nvlink, pcie, none };  // none: no peer access

struct Info {
  int device;
  std::string name;
  std::string pci;          // "0000:1b:00.0"; "" if simulated
  int numa_node;            // -1: unknown
  uint64_t total_bytes;     // of the device
  std::vector<Link> links;  // by device
};

struct Memory {
  uint64_t free, total;  // bytes, all processes
  uint64_t used;         // bytes of made units; exact
  uint64_t kept = 0;     // split: bytes that no unit uses and trim() gives back; counted as free
};

class PagingWords;
class Devices : public DeviceMemory, public StreamOps, public HostPinning {
 public:
  virtual ~Devices() = default;          // after all ranges are released and all tickets gone
  virtual const char* name() const = 0;  // of the backend, as in setting device
  virtual int count() const = 0;
  // Valid as long as this object. device < count().
  virtual const Info& info(int device) const = 0;
  // Makes the device's CUDA context at its first use (hundreds of ms and MiB).
  virtual core::Status memory(int device, Memory* out) = 0;
  // Split: makes the words that kernels of the device and a server share for `blocks` blocks
  // (paging_words.h). A group may hold `frames` of them at once. Destroy them before these devices.
  virtual core::Status make_paging_words(int device, uint32_t blocks, uint32_t frames,
                                         std::unique_ptr<PagingWords>* out);
};

}  // namespace vmem::device
