// Real devices for the stress programs (tests/stress/device_work.h).
#include <cuda_runtime.h>

#include <map>
#include <mutex>

#include "gpu_limits.h"
#include "stress/device_work.h"

namespace {

using stress::differs;
using stress::RegisterOp;
using stress::Sweep;

__global__ void registers_kernel(unsigned long long* word, RegisterOp* ops, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    RegisterOp& o = ops[i];
    if (o.kind == RegisterOp::read) o.seen = *static_cast<volatile unsigned long long*>(word);
    if (o.kind == RegisterOp::write) *static_cast<volatile unsigned long long*>(word) = o.value;
    if (o.kind == RegisterOp::swap) o.seen = atomicExch(word, static_cast<unsigned long long>(o.value));
  }
}

// Pinned host memory.
struct SweepArguments {
  uint64_t* base;
  size_t count, first;
  uint32_t version, pause_us;
  bool store;
  unsigned long long wrong_word;  // the lowest
  unsigned ended;                 // thread blocks that have finished
};

__global__ void sweep_kernel(SweepArguments* a, const uint64_t* want, uint64_t* seen) {
  for (unsigned i = 0; i < a->pause_us; ++i) __nanosleep(1000);
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t n = size_t{blockIdx.x} * blockDim.x + threadIdx.x; n * 64 < a->count; n += step) {
    volatile uint64_t* const word = a->base + n * 64;
    seen[n] = *word;
    if (seen[n] != want[n]) atomicMin_system(&a->wrong_word, static_cast<unsigned long long>(n * 64));
    if (a->store) *word = uint64_t{a->version} << 32 | static_cast<uint32_t>(a->first + n * 64);
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd_system(&a->ended, 1u);
}

void must(const char* what, cudaError_t e) {
  if (e != cudaSuccess) differs("%s: %s", what, cudaGetErrorString(e));
}

class CudaWork final : public stress::DeviceWork {
 public:
  CudaWork() {
    if (cudaGetDeviceCount(&devices_) != cudaSuccess || devices_ == 0) {
      printf("skipped: no CUDA device\n");
      exit(77);
    }
    // The regions, and those of a second such program.
    vmem::gpu::require_managed(uint64_t{256} << 20, vmem::gpu::managed_limit());
    // Load it now: a later first launch would wait for other streams.
    cudaFuncAttributes ignored;
    must("load", cudaFuncGetAttributes(&ignored, registers_kernel));
    must("load", cudaFuncGetAttributes(&ignored, sweep_kernel));
  }
  int devices() const override { return devices_; }
  void* create_stream(int device) override {
    Side side;
    must("cudaSetDevice", cudaSetDevice(device));
    must("cudaStreamCreate", cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking));
    side.device = device;
    must("cudaHostAlloc", cudaHostAlloc(&side.pinned, kPinned, cudaHostAllocPortable | cudaHostAllocMapped));
    std::lock_guard lock(mutex_);
    sides_[side.stream] = side;
    return side.stream;
  }
  void destroy_stream(void* stream) override {
    const Side& side = of(stream);
    must("cudaStreamDestroy", cudaStreamDestroy(side.stream));
    must("cudaFreeHost", cudaFreeHost(side.pinned));
    std::lock_guard lock(mutex_);
    sides_.erase(stream);
  }
  void begin_registers(void* stream, uint64_t* word, std::vector<RegisterOp>& ops, uint64_t (*)()) override {
    Side& side = of(stream);
    auto* there = static_cast<RegisterOp*>(side.pinned);
    if (ops.size() * sizeof(RegisterOp) > kPinned) differs("%zu operations are too many", ops.size());
    memcpy(there, ops.data(), ops.size() * sizeof(RegisterOp));
    side.ops = &ops;
    must("cudaSetDevice", cudaSetDevice(side.device));
    registers_kernel<<<1, 1, 0, side.stream>>>(reinterpret_cast<unsigned long long*>(word), there, ops.size());
    must("launch", cudaGetLastError());
  }
  void begin_sweep(void* stream, Sweep& sweep) override {
    Side& side = of(stream);
    auto* a = static_cast<SweepArguments*>(side.pinned);
    auto* want = reinterpret_cast<uint64_t*>(a + 1);
    if (sizeof *a + sweep.want.size() * 16 > kPinned) differs("%zu words are too many", sweep.count);
    *a = {sweep.base, sweep.count, sweep.first, sweep.version, sweep.pause_us, sweep.store, ~0ull, 0};
    memcpy(want, sweep.want.data(), sweep.want.size() * 8);
    side.sweep = &sweep;
    must("cudaSetDevice", cudaSetDevice(side.device));
    sweep_kernel<<<kSweepBlocks, 256, 0, side.stream>>>(a, want, want + sweep.want.size());
    must("launch", cudaGetLastError());
  }
  void synchronize(void* stream) override {
    Side& side = of(stream);
    must("cudaStreamSynchronize", cudaStreamSynchronize(side.stream));
    if (side.ops != nullptr) memcpy(side.ops->data(), side.pinned, side.ops->size() * sizeof(RegisterOp));
    if (Sweep* const sweep = side.sweep; sweep != nullptr) {
      const auto* a = static_cast<const SweepArguments*>(side.pinned);
      const auto* seen = reinterpret_cast<const uint64_t*>(a + 1) + sweep->want.size();
      sweep->ended = a->ended == kSweepBlocks;
      if (a->wrong_word != ~0ull) sweep->wrong_word = a->wrong_word, sweep->wrong_value = seen[a->wrong_word / 64];
    }
    side.ops = nullptr, side.sweep = nullptr;
  }

 private:
  static constexpr size_t kPinned = 1 << 20;
  static constexpr unsigned kSweepBlocks = 4;
  struct Side {
    cudaStream_t stream = nullptr;
    int device = 0;
    void* pinned = nullptr;
    std::vector<RegisterOp>* ops = nullptr;
    Sweep* sweep = nullptr;
  };
  Side& of(void* stream) {
    std::lock_guard lock(mutex_);
    return sides_.at(stream);
  }

  int devices_ = 0;
  std::mutex mutex_;
  std::map<void*, Side> sides_;  // references stay good
};

}  // namespace

std::unique_ptr<stress::DeviceWork> stress::make_cuda_work() {
  return std::make_unique<CudaWork>();
}
