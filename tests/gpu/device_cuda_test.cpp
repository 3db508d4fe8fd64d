// The contract of device::Devices on real GPUs, and tests that only a GPU can run.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <thread>
#include <type_traits>

#include "../unit/device_contract_suite.h"
#include "common/patience.h"
#include "device/backend.h"
#include "device/cuda/cuda_device.h"
#include "kernels.h"

namespace vmem::device::testing {
namespace {

class CudaBench : public Bench {
 public:
  explicit CudaBench(std::unique_ptr<Devices> devices) : devices_(std::move(devices)) {
    cudaSetDevice(0);
    gpu::load_all();
  }
  Devices& devices() override { return *devices_; }
  void* stream(int device) override {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device);
    cudaStream_t s = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
    gpu::load_all();
    cudaSetDevice(before);
    return s;
  }
  void destroy(void* stream) override { cudaStreamDestroy(static_cast<cudaStream_t>(stream)); }
  void set_current_device(int device) override { cudaSetDevice(device); }
  void add(void* stream, uint64_t* words, size_t count, uint64_t value) override {
    on_device_of(stream, [&] { gpu::add(stream, words, count, value); });
  }
  void sum(void* stream, const uint64_t* words, size_t count, uint64_t* sum) override {
    on_device_of(stream, [&] { gpu::sum(stream, words, count, sum); });
  }
  void stand_still(void* stream, std::atomic<uint32_t>* gate) override {
    gpu::stand_still(stream, reinterpret_cast<const uint32_t*>(gate));
  }
  core::Status synchronize(void* stream) override {
    const cudaError_t e = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
    if (e == cudaSuccess) return {};
    return core::error(EIO, "%s", cudaGetErrorString(e));
  }
  void begin_capture(void* stream) override {
    ASSERT_EQ(cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeGlobal), cudaSuccess);
  }
  void end_capture(void* stream) override {
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph), cudaSuccess);
    cudaGraphDestroy(graph);
  }
  void reset(int device) override {
    cudaSetDevice(device);
    cudaDeviceReset();
  }
  bool reaches_host_memory() const override {
    int yes = 0;
    cudaDeviceGetAttribute(&yes, cudaDevAttrPageableMemoryAccess, 0);
    return yes != 0;
  }
  // cuMemAddressFree leaves mappings behind: see AReleasedRangeLeavesWhatTheDriverLeaves.
  bool driver_keeps_addresses() const override { return devices_->cpu_view() == CpuView::split; }
  uint64_t free_memory_slack() const override { return uint64_t{16} << 20; }

 private:
  template <class F>
  void on_device_of([[maybe_unused]] void* stream, F launch) {
    int before = 0, device = 0;
    cudaGetDevice(&before);
    device = before;
#if CUDART_VERSION >= 12080
    if (stream != nullptr) cudaStreamGetDevice(static_cast<cudaStream_t>(stream), &device);
#endif
    if (device != before) cudaSetDevice(device);
    launch();
    if (device != before) cudaSetDevice(before);
  }
  std::unique_ptr<Devices> devices_;
};

std::unique_ptr<Bench> cuda(std::string* skip) {
  std::unique_ptr<Devices> devices;
  if (core::Status s = make_devices("managed", kUnit, &devices, skip); !s.ok()) {
    // A device exists, or gpu_guard.cpp would have ended this program. A skip would hide that
    // nothing was tested.
    ADD_FAILURE() << "no device tier where there is a GPU: " << *skip;
    return nullptr;
  }
  return std::make_unique<CudaBench>(std::move(devices));
}

template <size_t unit>
std::unique_ptr<Bench> handles(std::string* skip) {
  std::unique_ptr<Devices> devices;
  if (core::Status s = make_cuda_handles(unit, &devices); !s.ok()) {
    *skip = s.text();
    ADD_FAILURE() << "no handles where there is a GPU: " << *skip;
    return nullptr;
  }
  return std::make_unique<CudaBench>(std::move(devices));
}

const auto name_of = [](const auto& i) { return std::string(i.param.name); };
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceContract,
                         ::testing::Values(Backend{"gpu", cuda}, Backend{"handles", handles<kUnit>},
                                           Backend{"large_handles", handles<4 * kUnit>}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceBasics,
                         ::testing::Values(Backend{"gpu", cuda}, Backend{"handles", handles<kUnit>},
                                           Backend{"large_handles", handles<4 * kUnit>}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceLoss, ::testing::Values(Backend{"gpu", cuda}, Backend{"handles", handles<kUnit>}),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Cuda, UnitInParts,
                         ::testing::Values(Backend{"handles", handles<kUnit>},
                                           Backend{"large_handles", handles<4 * kUnit>}),
                         name_of);

class DeviceCuda : public DeviceContract {};
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceCuda, ::testing::Values(Backend{"gpu", cuda}), name_of);

TEST_P(DeviceCuda, ARemadeBlockIsStillManagedMemory) {
  uint64_t* base = reserve(2);
  bring(base, 1, 1);
  cudaPointerAttributes attributes;
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, base + words_), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeManaged);
}

TEST_P(DeviceCuda, AdviceIsAppliedAgainWhenABlockIsRemade) {
  uint64_t* base = reserve(2);
  VMEM_OK(d_->advise(range(base, 0, 2)[0], Advice::preferred_location, 0, true));
  VMEM_OK(d_->advise(range(base, 0, 2)[0], Advice::read_mostly, 0, true));
  for (int round = 0; round < 2; ++round) {
    VMEM_OK(populate(range(base, 0, 2)));
    int preferred = -9, mostly = -9;
    ASSERT_EQ(cudaMemRangeGetAttribute(&mostly, sizeof mostly, cudaMemRangeAttributeReadMostly, base, 2 * unit_),
              cudaSuccess);
    ASSERT_EQ(
        cudaMemRangeGetAttribute(&preferred, sizeof preferred, cudaMemRangeAttributePreferredLocation, base, 2 * unit_),
        cudaSuccess);
    EXPECT_EQ(mostly, 1);
    EXPECT_EQ(preferred, 0);
    EXPECT_EQ(kernel_sum(base, 2 * words_), 0u);
    drop(base, 0);
    drop(base, 1);
  }
}

TEST_P(DeviceCuda, TheApplicationsManagedMemoryIsRightBesideOurs) {
  for (size_t units : {1, 2, 16}) {
    uint64_t* ours = reserve(units);
    bring(ours, 0, 3);
    release(ours);
    std::vector<uint64_t*> theirs(4);
    for (uint64_t*& p : theirs) {
      ASSERT_EQ(cudaMallocManaged(reinterpret_cast<void**>(&p), units * unit_), cudaSuccess);
      for (size_t w = 0; w < units * words_; w += 512) p[w] = w;
      EXPECT_EQ(kernel_sum(p, words_), words_ / 512 * (words_ / 512 - 1) / 2 * 512);
    }
    for (uint64_t* p : theirs) ASSERT_EQ(cudaFree(p), cudaSuccess);
  }
}

TEST_P(DeviceCuda, CallsLeaveTheApplicationsDeviceAndErrorAlone) {
  const int last = d_->count() - 1;
  cudaSetDevice(last);
  uint64_t* base = reserve(1);
  bring(base, 0, 3);
  int now = -1;
  cudaGetDevice(&now);
  EXPECT_EQ(now, last);
  Ticket t;
  d_->record(stream_, 0, &t).ignore();
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  cudaGetDevice(&now);
  EXPECT_EQ(now, last);
  cudaSetDevice(0);
}

TEST_P(DeviceCuda, CallsThatSucceedLeaveAnErrorOfTheApplicationWhereItIs) {
  uint64_t* base = reserve(1);
  *gate() = 0;
  bench_->stand_still(stream_, gate());
  ASSERT_NE(cudaSetDevice(999), cudaSuccess);
  const cudaError_t theirs = cudaPeekAtLastError();
  ASSERT_NE(theirs, cudaSuccess);
  bring(base, 0, 3);
  Ticket t;
  bool done = true;
  VMEM_OK(d_->record(stream_, 0, &t));
  VMEM_OK(d_->poll(t, &done));
  EXPECT_FALSE(done);
  VMEM_OK(d_->check_stream(stream_, 0));
  drop(base, 0);
  EXPECT_EQ(cudaGetLastError(), theirs);
  *gate() = 1;
  VMEM_OK(bench_->synchronize(stream_));
}

// Looks up a driver call by its entry point, whose signature never changes; the toolkit's names
// change theirs.
template <typename Call>
void entry(const char* name, Call* out) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_LAZY);
  ASSERT_NE(driver, nullptr) << dlerror();
  void* const p = dlsym(driver, name);
  ASSERT_NE(p, nullptr) << name;
  *out = reinterpret_cast<Call>(p);
}

TEST_P(DeviceCuda, AStreamOfAContextOfItsOwnIsRefused) {
  CUresult (*create)(CUcontext*, unsigned, CUdevice) = nullptr;
  CUresult (*destroy)(CUcontext) = nullptr;
  entry("cuCtxCreate_v2", &create);
  entry("cuCtxDestroy_v2", &destroy);
  if (HasFatalFailure()) return;
  CUcontext own = nullptr;
  ASSERT_EQ(create(&own, 0, 0), CUDA_SUCCESS);  // now current, so the default stream belongs to it too
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  const core::Status made = d_->check_stream(stream, 0);
  const core::Status standard = d_->check_stream(nullptr, 0);
  cudaStreamDestroy(stream);
  destroy(own);
  EXPECT_EQ(made.code(), -EINVAL) << made.text();
  EXPECT_EQ(standard.code(), -EINVAL) << standard.text();
  cudaSetDevice(0);
  VMEM_OK(d_->check_stream(stream_, 0));
}

class ZerosCuda : public DeviceContract {};
INSTANTIATE_TEST_SUITE_P(Cuda, ZerosCuda,
                         ::testing::Values(Backend{"handles", handles<kUnit>},
                                           Backend{"large_handles", handles<4 * kUnit>},
                                           Backend{"largest_handles", handles<kLargestUnit>}),
                         name_of);

TEST_P(ZerosCuda, ZerosNeedNoMultiprocessor) {
  uint64_t* base = reserve(4);
  for (size_t u = 0; u < 4; ++u) {  // their memory has been in use before
    bring(base, u, 7);
    VMEM_OK(d_->unmap(range(base, u, 1)));
    VMEM_OK(d_->punch(range(base, u, 1)));
  }
  *gate() = 0;
  gpu::stand_everywhere(stream_, reinterpret_cast<const uint32_t*>(gate()));
  VMEM_OK(populate(range(base, 0, 4)));
  const Copy zeros{at(base), nullptr, 2 * unit_};
  Ticket done;
  VMEM_OK(d_->copy_in(0, std::span(&zeros, 1), &done));
  EXPECT_TRUE(vmem::test::eventually([&] {
    bool there = false;
    return d_->poll(done, &there).ok() && there;
  }));
  std::atomic<bool> mapped{false};  // two of them were never filled
  std::thread mapping([&] {
    VMEM_OK(d_->map(range(base, 0, 4)));
    mapped = true;
  });
  EXPECT_TRUE(vmem::test::eventually([&] { return mapped.load(); }));
  *gate() = 1;
  mapping.join();
  VMEM_OK(bench_->synchronize(stream_));
  EXPECT_EQ(kernel_sum(base, 4 * words_), 0u);
}

// Kernels that were queued to clear blocks start late, when the device is free again. They must not
// clear data that arrived since.
TEST_P(ZerosCuda, WhatWasPutThereMeanwhileStays) {
  constexpr size_t kTimes = 8;  // more than the kernels that may wait at once
  uint64_t* base = reserve(kTimes);
  VMEM_OK(populate(range(base, 0, kTimes)));
  *gate() = 0;
  gpu::stand_everywhere(stream_, reinterpret_cast<const uint32_t*>(gate()));
  for (size_t u = 0; u < kTimes; ++u) {
    const Copy zeros{at(base) + u * unit_, nullptr, unit_};
    Ticket done;
    VMEM_OK(d_->copy_in(0, std::span(&zeros, 1), &done));
    VMEM_OK(d_->wait(done));
    fill_frame(0, 1000 * u);
    copy_in(base, u, 0);
    // after a kernel was used, none is tried for a while
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
  }
  VMEM_OK(d_->map(range(base, 0, kTimes)));
  *gate() = 1;
  VMEM_OK(bench_->synchronize(stream_));
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (size_t u = 0; u < kTimes; ++u) EXPECT_EQ(kernel_sum(base + u * words_, words_), sum_of(1000 * u)) << u;
}

// Zeros alternate with data on the same block, by every way of making zeros.
TEST_P(ZerosCuda, ZerosOverWhatWasThere) {
  uint64_t* base = reserve(4);
  for (uint64_t round = 0; round < 100; ++round) {
    const size_t u = round % 4;
    bring(base, u, round + 1);
    EXPECT_EQ(kernel_sum(base + u * words_, words_), sum_of(round + 1));
    drop(base, u);
    make(base, u, 1);
    EXPECT_EQ(kernel_sum(base + u * words_, words_), 0u) << round;
    drop(base, u);
    VMEM_OK(populate(range(base, u, 1)));
    const Copy zeros{at(base) + u * unit_, nullptr, unit_};
    Ticket done;
    VMEM_OK(d_->copy_in(0, std::span(&zeros, 1), &done));
    VMEM_OK(d_->map(range(base, u, 1)));
    VMEM_OK(d_->order_after(done, stream_, 0));
    EXPECT_EQ(kernel_sum(base + u * words_, words_), 0u) << round;
    drop(base, u);
  }
}

TEST_P(DeviceCuda, ASecondSetOfDevicesIsRefused) {
  std::unique_ptr<Devices> second;
  std::string why;
  VMEM_REFUSED(EBUSY, make_devices("managed", kUnit, &second, &why));
}

TEST_P(DeviceCuda, MallocAndFreeOfOtherThreadsGoOnBesideMoves) {
  uint64_t* base = reserve(8);
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) {
      void* p = nullptr;
      if (cudaMalloc(&p, 1 << 20) == cudaSuccess) cudaFree(p);
    }
  });
  for (uint64_t round = 0; round < 50; ++round) {
    bring(base, round % 8, round);
    EXPECT_EQ(kernel_sum(base + round % 8 * words_, words_), sum_of(round));
    drop(base, round % 8);
  }
  stop = true;
  other.join();
}

class HandlesCuda : public DeviceContract {
 protected:
  // Returns the mappings of a range and their flags, from /proc/self/smaps.
  static std::string mapped_with_flags(uintptr_t address, size_t size) {
    std::ifstream smaps("/proc/self/smaps");
    std::string found, line;
    for (bool inside = false; std::getline(smaps, line);) {
      char* end = nullptr;
      const uintptr_t from = std::strtoull(line.c_str(), &end, 16);
      if (*end == '-') {
        inside = from < address + size && address < std::strtoull(end + 1, nullptr, 16);
        if (inside) found += "  " + line;
      } else if (inside && line.rfind("VmFlags:", 0) == 0) {
        found += "  " + line + "\n";
      }
    }
    return found.empty() ? "  nothing\n" : found;
  }
};
INSTANTIATE_TEST_SUITE_P(Cuda, HandlesCuda,
                         ::testing::Values(Backend{"handles", handles<kUnit>},
                                           Backend{"large_handles", handles<4 * kUnit>}),
                         name_of);

// cuMemAddressFree may leave some mappings of a range behind; our release may leave as many, and no
// more. The messages help with drivers that behave differently.
TEST_P(HandlesCuda, AReleasedRangeLeavesWhatTheDriverLeaves) {
  CUresult (*reserve_addresses)(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long) = nullptr;
  CUresult (*free_addresses)(CUdeviceptr, size_t) = nullptr;
  entry("cuMemAddressReserve", &reserve_addresses);
  entry("cuMemAddressFree", &free_addresses);
  if (HasFatalFailure()) return;
  CUdeviceptr theirs = 0;
  ASSERT_EQ(reserve_addresses(&theirs, unit_, unit_, 0, 0), CUDA_SUCCESS);
  printf("the driver's range %#llx, reserved:\n%s", static_cast<unsigned long long>(theirs),
         mapped_with_flags(theirs, unit_).c_str());
  ASSERT_EQ(free_addresses(theirs, unit_), CUDA_SUCCESS);
  const std::string they_leave = mapped_at(theirs, unit_);
  printf("freed:\n%s", mapped_with_flags(theirs, unit_).c_str());
  uint64_t* const base = reserve(1);
  ASSERT_NE(base, nullptr);
  printf("a range of ours %p%s, reserved:\n%s", static_cast<void*>(base), at(base) == theirs ? " (the same)" : "",
         mapped_with_flags(at(base), unit_).c_str());
  bring(base, 0, 1);
  release(base);
  printf("released:\n%s", mapped_with_flags(at(base), unit_).c_str());
  EXPECT_EQ(left_at(at(base), unit_), "");
  if (at(base) == theirs) {
    EXPECT_EQ(mapped_at(at(base), unit_).empty(), they_leave.empty()) << "the driver alone: " << they_leave;
  }
  uint64_t* const again = reserve(1);
  ASSERT_NE(again, nullptr);
  printf("the next is at %p%s\n", static_cast<void*>(again), again == base ? " (the same)" : "");
  bring(again, 0, 5);
  EXPECT_EQ(kernel_sum(again, words_), sum_of(5));
}

class DeviceLossCuda : public DeviceContract {};
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceLossCuda, ::testing::Values(Backend{"gpu", cuda}), name_of);

TEST_P(DeviceLossCuda, AResetThatMadeANewContextIsNoticed) {
  uint64_t* base = reserve(1);
  bring(base, 0, 1);
  bench_->destroy(stream_);
  stream_ = nullptr;
  bench_->reset(0);
  void* p = nullptr;
  ASSERT_EQ(cudaMalloc(&p, 4096), cudaSuccess);  // the application continues with a new context
  VMEM_REFUSED(EIO, d_->health(0));
}

TEST_P(DeviceLossCuda, AfterAResetTheAddressesAreLeftAlone) {
  uint64_t* base = reserve(4);
  bring(base, 0, 1);
  bring(base, 1, 1);
  VMEM_OK(d_->open(range(base, 0, 1), Access::read));
  bench_->destroy(stream_);
  stream_ = nullptr;
  bench_->reset(0);
  EXPECT_EQ(mapped_at(at(base), 4 * unit_), "") << "the driver kept the range: this test shows nothing";
  ASSERT_EQ(mmap(base, 4 * unit_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), base);
  for (size_t w = 0; w < 4 * words_; w += 512) base[w] = w;  // now belongs to other code
  bool torn = true;
  VMEM_REFUSED(EIO, d_->write_protect(range(base, 0, 2), Access::none));
  VMEM_REFUSED(EIO, d_->open(range(base, 0, 2), Access::read));
  VMEM_REFUSED(EIO, d_->punch(range(base, 0, 1)));
  VMEM_REFUSED(EIO, d_->populate(range(base, 2, 1), 0, &torn));
  EXPECT_FALSE(torn);
  VMEM_OK(d_->rearm(range(base, 2, 2)));
  release(base);
  for (size_t w = 0; w < 4 * words_; w += 512) {
    ASSERT_EQ(base[w], w);
    base[w] = 1;  // still writable for its owner
  }
  munmap(base, 4 * unit_);
}

}  // namespace
}  // namespace vmem::device::testing
