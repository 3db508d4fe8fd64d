// Zeroes a device's memory by a kernel, at the rate of that memory, which a link does not reach.
// Included by the CUDA backend only.
//
// - It never waits for kernels of the application: a thread block that has not begun when the
//   caller's patience ends never clears anything.
// - Each thread block has a word in pinned host memory. It stores that it has begun, then loads
//   whether it may. The host takes the permission back, then looks which have begun. At least one
//   of the two sees the other (Dekker's algorithm, with a fence of the whole system between store
//   and load on both sides).
// - A thread block that has begun ends soon, since it runs. One that begins later has no
//   permission.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>

#include "core/status.h"
#include "device/cuda/cuda_api.h"

namespace vmem::device::cuda {

// PTX, which the driver compiles for the device.
extern const char kClearKernel[];

class Clearing {
 public:
  struct Part {
    uintptr_t at;  // the device's address; a multiple of 16
    size_t size;   // bytes
  };
  // How long a launch may take to begin, and how long no launch is tried after one did not.
  static constexpr std::chrono::microseconds kPatience{100}, kRest{20'000};

  explicit Clearing(const Driver& driver, std::chrono::microseconds patience = kPatience)
      : driver_(driver), patience_(patience) {}
  Clearing(const Clearing&) = delete;
  Clearing& operator=(const Clearing&) = delete;

  // All calls need the device's context. start() loads the code, which may wait for kernels; no
  // later call loads any. False: the kernel does not work here; any call may follow.
  bool start();
  // False: a launch is still under way, and stays until the context ends.
  bool end();

  // True: all parts have begun to become zeros, `event` is recorded behind that, and work put on
  // the stream `then` (null: none) from now on comes after it.
  // False: nothing of the launch is under way, and the parts hold anything.
  // Returns within microseconds, or after its patience. It takes longer only while thread blocks
  // that have begun do not end, until alive() says that the device is lost. Any number of threads
  // may call it.
  bool clear(std::span<const Part> parts, const std::function<bool()>& alive, CUevent event, const CUstream* then);

 private:
  struct Row {
    uint64_t at, share;
  };
  // One launch at a time, and its words. A slot whose kernel still waits for a multiprocessor is
  // not used.
  struct Slot {
    std::mutex mutex;
    CUstream stream = nullptr;
    uint32_t* words = nullptr;  // kWords: the generation that is called off or 0, then one per thread block
    uint32_t generation = 0;
    bool called_off = false;  // and, as far as known, not ended
  };
  static constexpr size_t kSlots = 4, kMostParts = 64, kSlotSize = 4096;
  static constexpr unsigned kBlocks = 32, kThreads = 512;
  static constexpr size_t kGrain = size_t{kBlocks} * kThreads * 16;  // bytes; sizes of parts are multiples
  static constexpr size_t kWords = 1 + kBlocks, kSize = kSlots * kSlotSize;
  static_assert(kWords * sizeof(uint32_t) <= kSlotSize && sizeof(Row) * kMostParts == 1024);

  bool launch(Slot& slot, std::span<const Part> parts);
  static void call_off(Slot& slot, const std::function<bool()>& alive);

  const Driver& driver_;
  const std::chrono::microseconds patience_;
  CUmodule module_ = nullptr;
  CUfunction kernel_ = nullptr;
  std::byte* memory_ = nullptr;  // pinned
  std::array<Slot, kSlots> slots_;
  std::atomic<std::chrono::steady_clock::duration> rests_until_{};
};

}  // namespace vmem::device::cuda
