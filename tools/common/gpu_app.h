// The application's side of a device, for the example and the benchmark: streams, plain device
// memory, copies, times. There are two backends: CUDA, and libvmem's simulated device
// (lib/device/sim/sim_device.h). On the simulated device a program runs end to end without a GPU,
// but its figures mean nothing. Failures are exceptions with a message.
//
// The simulated device exists only between vmem_init() and vmem_shutdown(), and so must every
// object made here.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/raw_disk.h"
#include "device/sim/sim_device.h"
#ifdef VMEM_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace gpuapp {

// A point on a stream.
class Mark {
 public:
  virtual ~Mark() = default;
  virtual void wait() = 0;                       // sleeps until the stream has reached it
  virtual double seconds_since(Mark& from) = 0;  // both must have been reached
};
using MarkPtr = std::unique_ptr<Mark>;

class App {
 public:
  virtual ~App() = default;
  virtual const char* setting() const = 0;  // value for libvmem's setting "device"
  virtual std::string words() = 0;          // the device, the driver
  // Managed memory that this process may have allocated at once: unified memory beyond the card's
  // size can hang the driver.
  virtual uint64_t managed_limit() = 0;
  virtual uint64_t free_bytes() = 0;  // device memory
  virtual void* stream() = 0;
  virtual void destroy(void* stream) = 0;
  virtual void synchronize(void* stream) = 0;
  virtual void* allocate(size_t bytes) = 0;  // plain device memory, aligned to 256 bytes
  virtual void release(void* memory) = 0;
  virtual void pin(void* host, size_t bytes) = 0;
  virtual void unpin(void* host) = 0;
  virtual void copy(void* to, const void* from, size_t bytes, void* stream) = 0;  // plain or pinned memory
  virtual MarkPtr mark(void* stream) = 0;
  virtual bool simulated() const { return false; }
};

class SimApp final : public App {
 public:
  explicit SimApp(std::string setting) : setting_(std::move(setting)) {}
  using Kernel = vmem::device::SimKernel;
  static vmem::device::SimDevices& sim() {
    auto* sim = vmem::device::current_sim();
    if (sim == nullptr) throw std::runtime_error("the simulated device lives only while libvmem is up");
    return *sim;
  }
  static void must(const vmem::core::Status& s) {
    if (!s.ok()) throw std::runtime_error(std::string(s.text()));
  }
  static void launch(void* stream, vmem::device::SimFunction kernel) { must(sim().launch(stream, std::move(kernel))); }
  const char* setting() const override { return setting_.c_str(); }
  bool simulated() const override { return true; }
  std::string words() override { return "simulated device (its figures mean nothing)"; }
  uint64_t managed_limit() override { return uint64_t{1} << 30; }
  uint64_t free_bytes() override { return uint64_t{1} << 30; }
  void* stream() override { return sim().create_stream(0); }
  void destroy(void* stream) override { sim().destroy_stream(stream); }
  void synchronize(void* stream) override { must(sim().synchronize(stream)); }
  void* allocate(size_t bytes) override { return aligned_alloc(4096, (bytes + 4095) / 4096 * 4096); }
  void release(void* memory) override { free(memory); }
  void pin(void*, size_t) override {}
  void unpin(void*) override {}
  void copy(void* to, const void* from, size_t bytes, void* stream) override {
    launch(stream, [=](Kernel&) { memcpy(to, from, bytes); });
  }
  MarkPtr mark(void* stream) override {
    auto reached = std::make_shared<std::promise<double>>();
    auto m = std::make_unique<SimMark>(reached->get_future().share());
    launch(stream, [reached](Kernel&) { reached->set_value(rawdisk::now()); });
    return m;
  }

 private:
  struct SimMark final : Mark {
    explicit SimMark(std::shared_future<double> f) : at(std::move(f)) {}
    void wait() override { at.wait(); }
    double seconds_since(Mark& from) override { return at.get() - static_cast<SimMark&>(from).at.get(); }
    std::shared_future<double> at;
  };
  const std::string setting_;
};

#ifdef VMEM_HAVE_CUDA
inline void must(cudaError_t e, const char* what) {
  if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
}

class CudaApp final : public App {
 public:
  explicit CudaApp(std::string setting) : setting_(std::move(setting)) { must(cudaSetDevice(0), "cudaSetDevice"); }
  const char* setting() const override { return setting_.c_str(); }
  std::string words() override {
    cudaDeviceProp p;
    must(cudaGetDeviceProperties(&p, 0), "cudaGetDeviceProperties");
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    char text[512], version[64] = "?";
    if (FILE* f = fopen("/proc/driver/nvidia/version", "re"); f != nullptr) {
      char line[256] = "";
      if (fgets(line, sizeof line, f) != nullptr) {
        if (const char* at = strstr(line, "  "); at != nullptr) sscanf(at, "%63s", version);
      }
      fclose(f);
    }
    snprintf(text, sizeof text, "%s, driver %s (CUDA %d.%d), runtime %d.%d", p.name, version, driver / 1000,
             driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return text;
  }
  uint64_t managed_limit() override { return std::min(uint64_t{8} << 30, free_bytes() / 8); }
  uint64_t free_bytes() override {
    size_t free_now = 0, total = 0;
    must(cudaMemGetInfo(&free_now, &total), "cudaMemGetInfo");
    return free_now;
  }
  void* stream() override {
    cudaStream_t s = nullptr;
    must(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "cudaStreamCreate");
    return s;
  }
  void destroy(void* stream) override { cudaStreamDestroy(static_cast<cudaStream_t>(stream)); }
  void synchronize(void* stream) override {
    must(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
  }
  void* allocate(size_t bytes) override {
    void* p = nullptr;
    must(cudaMalloc(&p, bytes), "cudaMalloc");
    return p;
  }
  void release(void* memory) override { cudaFree(memory); }
  void pin(void* host, size_t bytes) override {
    must(cudaHostRegister(host, bytes, cudaHostRegisterPortable), "cudaHostRegister");
  }
  void unpin(void* host) override { cudaHostUnregister(host); }
  void copy(void* to, const void* from, size_t bytes, void* stream) override {
    must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)), "cudaMemcpyAsync");
  }
  MarkPtr mark(void* stream) override {
    auto m = std::make_unique<CudaMark>();
    must(cudaEventRecord(m->event, static_cast<cudaStream_t>(stream)), "cudaEventRecord");
    return m;
  }

 private:
  struct CudaMark final : Mark {
    CudaMark() { must(cudaEventCreateWithFlags(&event, cudaEventBlockingSync), "cudaEventCreate"); }
    ~CudaMark() override { cudaEventDestroy(event); }
    void wait() override { must(cudaEventSynchronize(event), "cudaEventSynchronize"); }
    double seconds_since(Mark& from) override {
      float ms = 0;
      must(cudaEventElapsedTime(&ms, static_cast<CudaMark&>(from).event, event), "cudaEventElapsedTime");
      return ms / 1e3;
    }
    cudaEvent_t event = nullptr;
  };
  const std::string setting_;
};
#endif

// wanted: a value of the setting device other than none. Returns null if there is no such device,
// with the reason in *why.
inline std::unique_ptr<App> make_app(const std::string& wanted, std::string* why) {
  if (wanted.starts_with("sim")) return std::make_unique<SimApp>(wanted);
#ifdef VMEM_HAVE_CUDA
  int devices = 0;
  const cudaError_t e = cudaGetDeviceCount(&devices);
  if (e == cudaSuccess && devices > 0) return std::make_unique<CudaApp>(wanted);
  *why = e == cudaSuccess ? "CUDA sees no device" : cudaGetErrorString(e);
#else
  *why = "it was built without the CUDA toolkit";
#endif
  return nullptr;
}

}  // namespace gpuapp
