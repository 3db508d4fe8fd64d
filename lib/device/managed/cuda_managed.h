// CUDA's unified memory: managed ranges and the parts of them that are made.
//
// Rules of order, each found by measurement:
// - A part of a managed range that munmap has destroyed can be made again by mmap on the process's
//   own /dev/nvidia-uvm file.
// - Such parts are prefetched one at a time, on an otherwise empty stream, and synchronised. No
//   copy is queued behind a prefetch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "core/status.h"
#include "device/cuda/cuda_devices.h"

namespace vmem::device {

class ManagedDevices final : public CudaDevices {
 public:
  ManagedDevices();
  ~ManagedDevices() override;
  const char* name() const override { return "managed"; }
  core::Status trim(int device, uint64_t keep) override;
  core::Status make_paging_words(int device, uint32_t blocks, uint32_t frames,
                                 std::unique_ptr<PagingWords>* out) override;

 private:
  bool fit(const Gpu& g) const override { return g.managed; }
  const char* needed() const override {
    return "concurrent managed access (needed: Linux, Pascal or later, not in WSL)";
  }
  core::Status load_calls() override { return {}; }
  core::Status try_device(int device) override;
  core::Status prepare(Gpu&) override { return {}; }
  // The driver's own work on a block that is made or destroyed takes turns with copies at their ends,
  // and takes much longer beside long copies. Queued copies lose little of their rate by this size.
  size_t copy_piece() const override { return kUnit; }
  uintptr_t window_of(uintptr_t block, size_t* run) override;
  core::Status backend_reserve(Reservation& r) override;
  void backend_release(Reservation& r) override;
  core::Status backend_present(const Reservation& r) override;
  core::Status backend_map(const Span& span) override;
  core::Status backend_populate(const Span& span, int device) override;
  core::Status backend_migrate(const Span& span, int to) override;
  core::Status backend_advise(Range range, Advice advice, int location, bool set) override;
  // Prefetches on an empty stream, and synchronises.
  core::Status prefetch_now(Gpu& g, uintptr_t address, size_t size, const char* what);
  int find_uvm_file(uintptr_t address, size_t size);
  core::Status try_unit(int device);

  std::mutex uvm_mutex_;  // a leaf
  int uvm_file_ = -1;     // protected by uvm_mutex_; our own duplicate, whose number cannot come to mean another file
  bool installed_ = false;
};

}  // namespace vmem::device
