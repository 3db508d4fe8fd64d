// The words of the paging protocol for one range that is open to kernels that ask, where kernels of its device and the
// server reach them. How the server gets at them is the backend's business: docs/gpu-paging.md says what is owed.
#pragma once

#include <cstdint>

#include "core/status.h"
#include "device/device.h"
#include "device/paging_host.h"

namespace vmem::device {

// One thread calls, but for end(), table() and the two about the last kernel. Gone before its Devices.
//
// Errors: -EIO the device is lost; -ENOMEM. A word that could not be stored leaves the two sides at odds: the server
// has to give up then.
class PagingWords {
 public:
  using Table = paging::Table<paging::HostAtomics>;

  PagingWords(Devices& devices, int device) : devices_(devices), device_(device) {}
  virtual ~PagingWords() = default;
  PagingWords(const PagingWords&) = delete;
  PagingWords& operator=(const PagingWords&) = delete;

  const Table& table() const { return table_; }
  // Leases are taken for the first and end with the second, on which nothing waits.
  virtual void* arrivals() const = 0;
  virtual void* departures() const = 0;

  // arrives: behind all that the stream of arrivals waits for by now. Else at once, but not before settle() for sure.
  virtual core::Status set_state(uint32_t block, uint64_t word, bool arrives) = 0;
  // Groups can load from pinned host memory, at its own address.
  virtual bool reads_host() const = 0;
  // Before the block's state says that it is in place.
  virtual core::Status set_home(uint32_t block, uint64_t address) = 0;
  // Everything that arrives and was set before is there when reached() says so. Numbers grow.
  virtual core::Status mark(uint64_t number) = 0;
  virtual uint64_t reached() const = 0;
  // What use() and written() say from here on was read after all states but those that arrive were there.
  virtual core::Status settle() = 0;
  virtual uint32_t use(uint32_t block) const = 0;
  virtual uint64_t written(uint32_t block) const = 0;
  virtual core::Status progress(uint64_t number) = 0;
  virtual core::Status taken(uint64_t cells) = 0;
  virtual core::Status end(paging::Answer why) = 0;
  // Kernels may use the words for as long as the process lives: they are given back to nobody.
  virtual void abandon() = 0;

  // The last kernel that uses them is on this stream, or before what is on it.
  core::Status last_kernel(void* stream) {
    if (core::Status s = devices_.check_stream(stream, device_); !s.ok()) return s;
    return devices_.record(stream, device_, &last_);
  }
  // .. and whether it has ended; a device that is lost runs nothing.
  bool idle() const {
    bool done = false;
    return devices_.poll(last_, &done).ok() ? done : lost();
  }
  bool lost() const { return !devices_.health(device_).ok(); }

 protected:
  Table table_ = {};

 private:
  Devices& devices_;
  const int device_;
  Ticket last_;
};

}  // namespace vmem::device
