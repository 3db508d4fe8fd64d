// The device tier through the C API on real GPUs, with the suite of the simulated devices.
#include <cuda_runtime_api.h>

#include <map>

#include "../system/device_suite.h"
#include "../system/device_suite_calls.h"
#include "../system/device_suite_views.h"
#include "device/device.h"
#include "kernels.h"

namespace systest {

namespace {

class CudaApp final : public GpuApp {
 public:
  CudaApp() {
    cudaGetDeviceCount(&count_);
    EXPECT_EQ(cudaHostAlloc(&page_, 4096, cudaHostAllocPortable), cudaSuccess);
    memset(page_, 0, 4096);
  }
  ~CudaApp() override { cudaFreeHost(page_); }
  int prepare() override {
    for (int d = 0; d < count_; ++d) {
      cudaSetDevice(d);
      vmem::gpu::load_all();
    }
    cudaSetDevice(0);
    return count_;
  }
  void* stream(int device) override {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device);
    cudaStream_t s = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
    cudaSetDevice(before);
    std::lock_guard lock(mutex_);
    device_of_[s] = device;
    return s;
  }
  bool linked(int a, int b) override {
    int atomics = 0;
    return cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, a, b) == cudaSuccess &&
           atomics != 0;
  }
  void destroy(void* stream) override { cudaStreamDestroy(static_cast<cudaStream_t>(stream)); }
  void set(void* stream, uint64_t* words, size_t count, uint64_t first, uint64_t round) override {
    on(stream, [&] { vmem::gpu::set_stamps(stream, words, count, first, round, kStampStride); });
  }
  void check(void* stream, const uint64_t* words, size_t count, uint64_t first, uint64_t round) override {
    on(stream, [&] { vmem::gpu::check_stamps(stream, words, count, first, round, kStampStride, counter()); });
  }
  void check_zero(void* stream, const uint64_t* words, size_t count) override {
    on(stream, [&] { vmem::gpu::check_zero(stream, words, count, counter()); });
  }
  void stand_still(void* stream, std::atomic<uint32_t>* gate) override {
    on(stream, [&] { vmem::gpu::stand_still(stream, reinterpret_cast<const uint32_t*>(gate)); });
  }
  std::atomic<uint32_t>* gate() override { return static_cast<std::atomic<uint32_t>*>(page_); }
  vmem::core::Status synchronize(void* stream) override {
    const cudaError_t e = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
    return e == cudaSuccess ? vmem::core::Status() : vmem::core::error(EIO, "%s", cudaGetErrorString(e));
  }
  uint64_t wrong() override { return *counter(); }
  void capture(void* stream, bool on) override {
    const auto s = static_cast<cudaStream_t>(stream);
    if (on) {
      ASSERT_EQ(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), cudaSuccess);
      return;
    }
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(s, &graph), cudaSuccess);
    cudaGraphDestroy(graph);
  }
  void lose(int device) override {  // like a kernel with a wild pointer: error 700, sticky
    cudaSetDevice(device);
    vmem::gpu::add(nullptr, reinterpret_cast<uint64_t*>(0x10000), 1, 1);
    cudaDeviceSynchronize();
  }

 private:
  unsigned long long* counter() const { return reinterpret_cast<unsigned long long*>(static_cast<char*>(page_) + 64); }
  template <typename Launch>
  void on(void* stream, Launch launch) {
    int device = 0;
    {
      std::lock_guard lock(mutex_);
      device = device_of_[stream];
    }
    cudaSetDevice(device);
    launch();
    const cudaError_t e = cudaGetLastError();
    EXPECT_EQ(e, cudaSuccess) << cudaGetErrorString(e);
  }

  int count_ = 0;
  void* page_ = nullptr;
  std::mutex mutex_;
  std::map<void*, int> device_of_;
};

std::unique_ptr<GpuApp> make_app(std::string* skip) {
  int n = 0;
  if (cudaGetDeviceCount(&n) == cudaSuccess && n > 0) return std::make_unique<CudaApp>();
  *skip = "no GPU";
  return nullptr;
}
const GpuBackend kBackends[] = {{"managed", make_app}, {"handles", make_app, nullptr, true}};
std::string name_of(const ::testing::TestParamInfo<GpuBackend>& p) {
  return p.param.name;
}
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceTier, ::testing::ValuesIn(kBackends), name_of);
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceTierViews, ::testing::Values(kBackends[1]), name_of);
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceTierLoss, ::testing::ValuesIn(kBackends), name_of);

}  // namespace

}  // namespace systest
