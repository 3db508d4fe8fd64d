// Zeros for a device's memory by a kernel, at the rate of that memory (a link has a twentieth of it), which never waits
// for kernels of the application: a part of it that has not begun when the caller's patience ends never clears
// anything. Included by the CUDA backend only.
//
// Each thread block has a word in pinned host memory. It stores that it has begun, then loads whether it may; the host
// takes the permission back, then looks who has begun: of both at least one sees the other (Dekker's algorithm, with a
// fence of the whole system between store and load on both sides). Who has begun ends soon, since it runs; who begins
// later finds no permission.
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

// PTX, of which the driver makes code for whichever device it has.
extern const char kClearKernel[];

class Clearing {
 public:
  struct Part {
    uintptr_t at;  // the device's address; a multiple of 16
    size_t size;   // bytes
  };
  // How long parts may take to begin, and how long nobody tries after they did not.
  static constexpr std::chrono::microseconds kPatience{100}, kRest{20'000};

  explicit Clearing(const Driver& driver, std::chrono::microseconds patience = kPatience)
      : driver_(driver), patience_(patience) {}
  Clearing(const Clearing&) = delete;
  Clearing& operator=(const Clearing&) = delete;

  // In the device's context, as all of the following. Its code is loaded here, which may wait for kernels, and never
  // later. False: it can't be had; any call may follow.
  bool start();
  // False: a part of it is under way still, and stays until the context ends.
  bool end();

  // True: all parts have begun to become zeros, `event` is recorded behind that, and what is put on the stream `then`,
  // where there is one, comes after it.
  // False: nothing of it is under way, and they hold anything. Takes about 10 us, or its patience; longer only while
  // what has begun does not end, until alive() says that the device is lost. Many threads may call it.
  bool clear(std::span<const Part> parts, const std::function<bool()>& alive, CUevent event, const CUstream* then);

 private:
  // A launch at a time, to each its words. One whose kernel waits for a multiprocessor still is used by nobody.
  struct Row {
    uint64_t at, share;
  };
  struct Slot {
    std::mutex mutex;
    CUstream stream = nullptr;
    uint32_t* words = nullptr;  // kWords: the generation that is called off or 0, then one a thread block
    uint32_t generation = 0;
    bool called_off = false;  // and, for what is known, not ended
  };
  static constexpr size_t kSlots = 4, kMostParts = 64, kSlotSize = 4096;
  static constexpr unsigned kBlocks = 32, kThreads = 512;
  static constexpr size_t kGrain = size_t{kBlocks} * kThreads * 16;  // bytes of a part, at least
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
