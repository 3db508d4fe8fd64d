// Tests <vmem/cuda.h> with a fake CUDA that records its calls: which ranges go to libvmem, and
// which to CUDA. The includer defines CUDART_VERSION, which selects the signatures, and
// CUDA_CALLS_SUITE, the name of the suite.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "sim_support.h"

namespace {

enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorMemoryAllocation,
  cudaErrorInvalidDevice = 101,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorUnknown = 999
};
enum cudaMemoryAdvise {
  cudaMemAdviseSetReadMostly = 1,
  cudaMemAdviseUnsetReadMostly,
  cudaMemAdviseSetPreferredLocation,
  cudaMemAdviseUnsetPreferredLocation,
  cudaMemAdviseSetAccessedBy,
  cudaMemAdviseUnsetAccessedBy
};
using cudaStream_t = struct Stream*;
std::vector<std::string> asked;  // calls of CUDA

#if CUDART_VERSION >= 13000
enum cudaMemLocationType {
  cudaMemLocationTypeInvalid,
  cudaMemLocationTypeDevice,
  cudaMemLocationTypeHost,
  cudaMemLocationTypeHostNuma,
  cudaMemLocationTypeHostNumaCurrent
};
struct cudaMemLocation {
  cudaMemLocationType type;
  int id;
};
cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation place, unsigned, cudaStream_t) {
  asked.push_back("prefetch " + std::to_string(place.id));
  return cudaErrorInvalidValue;
}
cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise advice, cudaMemLocation place) {
  asked.push_back("advise " + std::to_string(advice) + " " + std::to_string(place.id));
  return cudaSuccess;
}
const cudaMemLocation kDevice0{cudaMemLocationTypeDevice, 0}, kDevice9{cudaMemLocationTypeDevice, 9},
    kNowhere{cudaMemLocationTypeInvalid, 0}, kHost{cudaMemLocationTypeHost, 0};
#define NO_FLAGS 0,
#define LAST_FLAGS , 0
#else
constexpr int cudaCpuDeviceId = -1;
cudaError_t cudaMemPrefetchAsync(const void*, size_t, int device, cudaStream_t) {
  asked.push_back("prefetch " + std::to_string(device));
  return cudaErrorInvalidValue;
}
cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise advice, int device) {
  asked.push_back("advise " + std::to_string(advice) + " " + std::to_string(device));
  return cudaSuccess;
}
constexpr int kDevice0 = 0, kDevice9 = 9, kNowhere = -2, kHost = cudaCpuDeviceId;
#define NO_FLAGS
#define LAST_FLAGS
#endif

}  // namespace

#define VMEM_CUDA_CALLS
#include "vmem/cuda.h"

namespace {

class CUDA_CALLS_SUITE : public systest::SimTest {
 protected:
  void SetUp() override {
    start(1, {}, true);
    asked.clear();
  }
};

TEST_F(CUDA_CALLS_SUITE, RangesOfRegionsGoToLibvmemAndAllOthersToCuda) {
  if (IsSkipped()) return;
  using systest::kBlock;
  const vmem::region r(4 * kBlock);
  auto* const words = static_cast<uint64_t*>(r.data());
  for (size_t b = 0; b < 4; ++b) words[b * kBlock / 8] = b + 1;
  EXPECT_EQ(cudaMemPrefetchAsync(words, r.size(), kDevice0, NO_FLAGS nullptr), cudaSuccess);
  EXPECT_TRUE(until([&] { return r.query().device_bytes == r.size(); }));
  EXPECT_EQ(cudaMemPrefetchAsync(words, kBlock, kHost, NO_FLAGS nullptr), cudaSuccess);
  EXPECT_TRUE(until([&] { return r.query().device_bytes == r.size() - kBlock; }));
  EXPECT_EQ(cudaMemPrefetchAsync(words, kBlock, kHost LAST_FLAGS), cudaSuccess) << "the default stream";
  for (size_t b = 0; b < 4; ++b) EXPECT_EQ(words[b * kBlock / 8], b + 1);
  for (int advice = cudaMemAdviseSetReadMostly; advice <= cudaMemAdviseUnsetAccessedBy; ++advice)
    EXPECT_EQ(cudaMemAdvise(words, r.size(), static_cast<cudaMemoryAdvise>(advice), kDevice0), cudaSuccess) << advice;
  EXPECT_EQ(asked.size(), 0u) << asked.front();
  int other[4] = {};
  EXPECT_EQ(cudaMemPrefetchAsync(other, sizeof other, kDevice0, NO_FLAGS nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemAdvise(other, sizeof other, cudaMemAdviseSetAccessedBy, kDevice9), cudaSuccess);
  EXPECT_EQ(asked, (std::vector<std::string>{"prefetch 0", "advise 5 9"}));
}

TEST_F(CUDA_CALLS_SUITE, WhoHasNoRegionStartsNothing) {
  if (IsSkipped()) return;
  vmem_shutdown();
  int other[4] = {};
  EXPECT_EQ(cudaMemAdvise(other, sizeof other, cudaMemAdviseSetAccessedBy, kDevice9), cudaSuccess);
  EXPECT_EQ(asked, std::vector<std::string>{"advise 5 9"});
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    EXPECT_TRUE(name == "vmem-log" || !name.starts_with("vmem-")) << name;
  }
}

TEST_F(CUDA_CALLS_SUITE, EachAdviceMeansWhatItMeansToCuda) {
  EXPECT_EQ(vmem_cuda_advice(cudaMemAdviseSetReadMostly), VMEM_ADVISE_SET_READ_MOSTLY);
  EXPECT_EQ(vmem_cuda_advice(cudaMemAdviseUnsetReadMostly), VMEM_ADVISE_UNSET_READ_MOSTLY);
  EXPECT_EQ(vmem_cuda_advice(cudaMemAdviseSetPreferredLocation), VMEM_ADVISE_SET_PREFERRED_LOCATION);
  EXPECT_EQ(vmem_cuda_advice(cudaMemAdviseUnsetPreferredLocation), VMEM_ADVISE_UNSET_PREFERRED_LOCATION);
  EXPECT_EQ(vmem_cuda_advice(cudaMemAdviseSetAccessedBy), VMEM_ADVISE_SET_ACCESSED_BY);
  EXPECT_EQ(vmem_cuda_advice(cudaMemAdviseUnsetAccessedBy), VMEM_ADVISE_UNSET_ACCESSED_BY);
}

TEST_F(CUDA_CALLS_SUITE, WhatLibvmemRefusesIsAnErrorOfCudas) {
  if (IsSkipped()) return;
  const vmem::region r(2 * systest::kBlock);
  EXPECT_EQ(cudaMemPrefetchAsync(r.data(), r.size(), kDevice9, NO_FLAGS nullptr), cudaErrorInvalidDevice);
  EXPECT_NE(said().find("no device 9"), std::string::npos) << said();
  EXPECT_EQ(cudaMemPrefetchAsync(r.data(), r.size(), kNowhere, NO_FLAGS nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemPrefetchAsync(r.data(), r.size() + 1, kDevice0, NO_FLAGS nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemAdvise(r.data(), r.size(), static_cast<cudaMemoryAdvise>(77), kDevice0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemAdvise(r.data(), r.size(), cudaMemAdviseSetPreferredLocation, kDevice9), cudaErrorInvalidDevice);
  EXPECT_EQ(asked.size(), 0u);
}

}  // namespace
