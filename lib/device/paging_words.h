// The words of the paging protocol for one range that is open to kernels, in memory that kernels of
// its device and the server reach. The backend decides how the server accesses them.
// lib/kernel_paging/README.md has the requirements.
#pragma once

#include <cstdint>

#include "core/status.h"
#include "device/paging_host.h"
#include "device/stream_ops.h"

namespace vmem::device {

// -EOPNOTSUPP, the result of Devices::make_paging_words() for unified memory.
core::Status no_paging_words();

// One thread makes all calls but end(), table(), last_kernel() and idle(). Must be gone before its
// Devices.
//
// Errors: -EIO the device is lost; -ENOMEM. After a store that failed the two sides disagree, and
// the server has to give up.
class PagingWords {
 public:
  using Table = paging::Table<paging::HostAtomics>;

  PagingWords(StreamOps& devices, int device) : devices_(devices), device_(device) {}
  virtual ~PagingWords() = default;
  PagingWords(const PagingWords&) = delete;
  PagingWords& operator=(const PagingWords&) = delete;

  const Table& table() const { return table_; }
  // Streams: leases are taken for arrivals() and end with departures(), on which nothing waits.
  virtual void* arrivals() const = 0;
  virtual void* departures() const = 0;

  // arrives: stores after all that the arrivals stream waits for by now. Otherwise stores at once,
  // but only settle() makes sure.
  virtual core::Status set_state(uint32_t block, uint64_t word, bool arrives) = 0;
  // True if groups can load from pinned host memory at its own address.
  virtual bool reads_host() const = 0;
  // Called before the block's state says that it is in place.
  virtual core::Status set_home(uint32_t block, uint64_t address) = 0;
  // Once reached() returns `number`, all arriving states set before mark() are stored. Numbers
  // grow.
  virtual core::Status mark(uint64_t number) = 0;
  virtual uint64_t reached() const = 0;
  // After settle(), use() and written() return what was read after all states but arriving ones
  // were stored.
  virtual core::Status settle() = 0;
  virtual uint32_t use(uint32_t block) const = 0;
  virtual uint64_t written(uint32_t block) const = 0;
  virtual core::Status progress(uint64_t number) = 0;
  virtual core::Status taken(uint64_t cells) = 0;
  virtual core::Status end(paging::Answer why) = 0;
  // Kernels may use the words until the process ends: their memory is never reused.
  virtual void abandon() = 0;

  // Records that the last kernel that uses the words is on this stream, or ordered before its work.
  core::Status last_kernel(void* stream) {
    if (core::Status s = devices_.check_stream(stream, device_); !s.ok()) return s;
    return devices_.record(stream, device_, &last_);
  }
  // True if that kernel has ended, or the device is lost and runs nothing.
  bool idle() const {
    bool done = false;
    return devices_.poll(last_, &done).ok() ? done : lost();
  }
  bool lost() const { return !devices_.health(device_).ok(); }

 protected:
  Table table_ = {};

 private:
  StreamOps& devices_;
  const int device_;
  Ticket last_;
};

}  // namespace vmem::device
