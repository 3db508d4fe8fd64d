// Data of a shared file that only the device has is in the file after exit. This also holds when
// regions are made before CUDA is used: the context is then created last, and would be destroyed
// first.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "vmem/vmem.h"

namespace {

constexpr size_t kSize = 32 << 20;

int stores_and_returns(const char* path) {
  void* p = nullptr;
  cudaStream_t stream = nullptr;
  if (vmem_map(&p, kSize, path, 0, VMEM_MAP_SHARED) != 0 ||
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess ||
      vmem_acquire(p, kSize, VMEM_READ | VMEM_WRITE, 0, stream) != 0 ||
      cudaMemsetAsync(p, 7, kSize, stream) != cudaSuccess || vmem_release(p, kSize, stream) != 0) {
    std::fprintf(stderr, "FAILED: %s, %s\n", vmem_last_error(), cudaGetErrorString(cudaGetLastError()));
    return 1;
  }
  return 0;
}

class ExitCuda : public testing::TestWithParam<const char*> {};
std::string name_of(const testing::TestParamInfo<const char*>& p) {
  return p.param;
}
INSTANTIATE_TEST_SUITE_P(Backends, ExitCuda, testing::Values("managed", "handles"), name_of);

TEST_P(ExitCuda, WritesWhatOnlyTheDeviceHas) {
  const char* tmp = getenv("TMPDIR");
  std::string path = std::string(tmp != nullptr ? tmp : "/var/tmp") + "/vmem-exit.XXXXXX";
  const int fd = mkostemp(path.data(), O_CLOEXEC);
  ASSERT_GE(fd, 0) << path;
  ASSERT_EQ(ftruncate(fd, kSize), 0);
  int said[2];
  ASSERT_EQ(pipe(said), 0);
  const pid_t child = fork();
  if (child == 0) {
    setenv("VMEM_TEST_EXIT", path.c_str(), 1);
    setenv("VMEM_DEVICE", GetParam(), 1);
    setenv("VMEM_DEVICE_BUDGET", "64MiB", 1);
    dup2(said[1], STDERR_FILENO);
    alarm(30);
    execl("/proc/self/exe", "exit_test", nullptr);
    _exit(98);
  }
  close(said[1]);
  std::string text;
  char some[512];
  for (ssize_t n; (n = read(said[0], some, sizeof some)) > 0;) text.append(some, static_cast<size_t>(n));
  close(said[0]);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(text, "") << "nothing was lost, so nothing is said";
  std::vector<char> bytes(kSize);
  ASSERT_EQ(pread(fd, bytes.data(), kSize, 0), static_cast<ssize_t>(kSize));
  size_t wrong = 0;
  for (const char c : bytes) wrong += c != 7 ? 1 : 0;
  EXPECT_EQ(wrong, 0u);
  close(fd);
  unlink(path.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (const char* path = getenv("VMEM_TEST_EXIT"); path != nullptr) return stores_and_returns(path);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
