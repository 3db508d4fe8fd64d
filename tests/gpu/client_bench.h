// Shared code of the benchmarks whose kernels page data in: waits with a time limit, freeing
// memory, threads.
#pragma once

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "vmem/vmem.hpp"

namespace gpuclients {

inline constexpr size_t kMiB = size_t{1} << 20;
inline constexpr unsigned kThreads = 16;

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
[[noreturn]] inline void fail(const std::string& what) {
  std::printf("FAILED: %s\n", what.c_str());
  std::fflush(stdout);
  _exit(1);
}
inline void must(cudaError_t e, const char* what) {
  if (e != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(e));
}
#define MUST(call) ::gpuclients::must(call, #call)

// The end of main(): returns 0 if run() succeeded, 77 if there is no GPU.
template <typename Run>
int run_bench(Run run) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU\n");
    return 77;
  }
  alarm(180);  // in any case
  try {
    return run() ? 0 : 1;
  } catch (const std::exception& e) {
    fail(e.what());
  }
}

template <typename Body>
void on_threads(size_t count, Body body) {
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < kThreads; ++t)
    threads.emplace_back([=] { body(count * t / kThreads, count * (t + 1) / kThreads, t); });
  for (auto& t : threads) t.join();
}

struct DeviceFree {
  void operator()(void* p) const { cudaFree(p); }
};
struct HostFree {
  void operator()(void* p) const { cudaFreeHost(p); }
};
template <typename T>
using OnDevice = std::unique_ptr<T, DeviceFree>;
template <typename T>
OnDevice<T> on_device(size_t count) {
  void* p = nullptr;
  MUST(cudaMalloc(&p, count * sizeof(T)));
  return OnDevice<T>(static_cast<T*>(p));
}
template <typename T>
std::unique_ptr<T, HostFree> pinned(size_t count) {
  void* p = nullptr;
  MUST(cudaHostAlloc(&p, count * sizeof(T), cudaHostAllocMapped));
  return std::unique_ptr<T, HostFree>(static_cast<T*>(p));
}

// Waits until the stream is idle.
inline void finish(cudaStream_t stream, const char* what, double limit = 40) {
  for (const double begin = now(); cudaStreamQuery(stream) == cudaErrorNotReady;)
    if (now() - begin > limit) fail(std::string(what) + " takes longer than it may");
  MUST(cudaStreamSynchronize(stream));
}
inline struct vmem_device_stats stats() {
  struct vmem_device_stats out = {};
  out.size = sizeof out;
  vmem::check(vmem_device_stats(0, &out));
  return out;
}
// Restarts the library.
inline void start(size_t device, size_t host) {
  vmem::set("device_budget", std::to_string(device));
  vmem::set("device_block_size", "2MiB");  // the unit of the benchmarks' rows
  vmem::set("host_budget", std::to_string(host));
  vmem::set("staging_share", "90");
}

}  // namespace gpuclients
