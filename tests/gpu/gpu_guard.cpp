// Linked into every GPU test. No test starts where it could drive unified memory into
// oversubscription. Exits with 77 if there is no device, with 2 if too little memory is free. Also
// ends the process if an external call is made under the pager's lock.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>

#include "core/outside_lock.h"
#include "gpu_limits.h"

namespace {

class Guard : public testing::Environment {
 public:
  void SetUp() override {
    int devices = 0;
    const cudaError_t e = cudaGetDeviceCount(&devices);
    if (e != cudaSuccess || devices == 0) {
      std::printf("SKIPPED: no CUDA device: %s\n", cudaGetErrorString(e));
      std::fflush(stdout);
      _exit(77);
    }
    constexpr uint64_t kMostOfAnyTest = uint64_t{1} << 30;
    vmem::gpu::require_managed(kMostOfAnyTest, vmem::gpu::managed_limit());
  }
};

[[maybe_unused]] const bool strict = (vmem::core::be_strict_about_big_locks(true), true);
[[maybe_unused]] testing::Environment* const guard = testing::AddGlobalTestEnvironment(new Guard);

}  // namespace
