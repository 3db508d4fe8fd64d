// vmem_export on a GPU: a second process imports the memory of a block, and both processes see each
// other's stores. After the lease ends the importer keeps that memory, and no other block ever uses
// it.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "../system/child.h"
#include "../system/support.h"
#include "kernels.h"

namespace {

using systest::stamp;

constexpr size_t kBlock = 2 << 20;
constexpr size_t kWords = kBlock / 8;

#define VMEM_DO(call) ASSERT_EQ((call), 0) << vmem_last_error()
#define CUDA_DO(call) ASSERT_EQ((call), cudaSuccess)
#define DRIVER_DO(call) ASSERT_EQ((call), CUDA_SUCCESS)

template <typename F>
F entry(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  return reinterpret_cast<F>(found);
}

bool say(int fd) {
  return write(fd, "x", 1) == 1;
}
bool hear(int fd) {
  char c = 0;
  return read(fd, &c, 1) == 1;
}
int number(const char* name) {
  const char* text = getenv(name);
  return text != nullptr ? atoi(text) : -1;
}

size_t wrong(const uint64_t* w, size_t count, size_t first, uint64_t round, uint64_t more = 0) {
  size_t bad = 0;
  for (size_t i = 0; i < count; ++i) bad += w[i] != stamp(first + i, round) + more;
  return bad;
}

// The second process: it has a descriptor and does not use libvmem.
TEST(ExportChild, DISABLED_Importer) {
  const int fd = number("VMEM_TEST_FD"), in = number("VMEM_TEST_IN"), out = number("VMEM_TEST_OUT");
  const size_t size = static_cast<size_t>(number("VMEM_TEST_SIZE"));
  ASSERT_GE(fd, 0);
  CUDA_DO(cudaSetDevice(0));
  CUDA_DO(cudaFree(nullptr));
  vmem::gpu::load_all();
  CUmemGenericAllocationHandle handle = 0;
  DRIVER_DO(entry<decltype(&cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle")(
      &handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  close(fd);
  CUmemAllocationProp what = {};
  DRIVER_DO(entry<decltype(&cuMemGetAllocationPropertiesFromHandle)>("cuMemGetAllocationPropertiesFromHandle")(&what,
                                                                                                               handle));
  const auto has = [](CUdevice_attribute attribute) {
    int value = -1;
    entry<decltype(&cuDeviceGetAttribute)>("cuDeviceGetAttribute")(&value, attribute, 0);
    return value;
  };
  std::printf(
      "imported %zu MiB, gpuDirectRDMACapable %d; the device: descriptors %d, RDMA %d, dma-buf %d\n", size >> 20,
      int{what.allocFlags.gpuDirectRDMACapable}, has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
      has(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED), has(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED));
  CUdeviceptr at = 0;
  DRIVER_DO(entry<decltype(&cuMemAddressReserve)>("cuMemAddressReserve")(&at, size, 0, 0, 0));
  DRIVER_DO(entry<decltype(&cuMemMap)>("cuMemMap")(at, size, 0, handle, 0));
  CUmemAccessDesc access = {};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  DRIVER_DO(entry<decltype(&cuMemSetAccess)>("cuMemSetAccess")(at, size, &access, 1));
  auto* const w = reinterpret_cast<uint64_t*>(at);
  const size_t n = size / 8;
  std::vector<uint64_t> seen(n);
  CUDA_DO(cudaMemcpy(seen.data(), w, size, cudaMemcpyDeviceToHost));
  EXPECT_EQ(wrong(seen.data(), n, 0, 1), 0u) << "what the exporter's kernel stored";
  vmem::gpu::add(nullptr, w, n, 1);
  CUDA_DO(cudaDeviceSynchronize());
  ASSERT_TRUE(say(out));
  ASSERT_TRUE(hear(in));  // the lease has ended, and the device is full of other blocks
  CUDA_DO(cudaMemcpy(seen.data(), w, size, cudaMemcpyDeviceToHost));
  EXPECT_EQ(wrong(seen.data(), n, 0, 1, 1), 0u) << "the bytes that were there";
  CUDA_DO(cudaMemset(w, 0xee, size));
  CUDA_DO(cudaDeviceSynchronize());
  ASSERT_TRUE(say(out));
  ASSERT_TRUE(hear(in));
  DRIVER_DO(entry<decltype(&cuMemUnmap)>("cuMemUnmap")(at, size));
  DRIVER_DO(entry<decltype(&cuMemRelease)>("cuMemRelease")(handle));
  ASSERT_TRUE(say(out));  // and waits with everything still open
  ASSERT_TRUE(hear(in));
}

uint64_t free_bytes() {
  size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}

class ExportCuda : public systest::SystemTest, public ::testing::WithParamInterface<size_t> {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    configure({{"device", "handles"}, {"host_budget", "512MiB"}, {"device_budget", "128MiB"}});
    if (IsSkipped()) return;
    vmem::gpu::load_all();
    CUDA_DO(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    vmem_shutdown();
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    SystemTest::TearDown();
    vmem_set("device", "auto");
  }
  static vmem_region_attr blocks_of(size_t bytes) {
    vmem_region_attr attr = {};
    attr.size = sizeof attr;
    attr.block_size = bytes;
    return attr;
  }
  cudaStream_t stream_ = nullptr;
};

TEST_P(ExportCuda, ASecondProcessSharesTheBlockUnderTheLeaseAndKeepsItAfterwards) {
  const size_t block = GetParam(), n = block / 8, many = (128u << 20) / block;
  const auto attr = blocks_of(block);
  void *p = nullptr, *q = nullptr;
  VMEM_DO(vmem_create(&p, 2 * block, &attr));
  VMEM_DO(vmem_create(&q, 2 * many * block, &attr));
  uint64_t* const w = static_cast<uint64_t*>(p) + n;  // the second block
  VMEM_DO(vmem_acquire(w, block, VMEM_READ | VMEM_WRITE, 0, stream_));
  vmem::gpu::set_stamps(stream_, w, n, 0, 1, 1);
  CUDA_DO(cudaStreamSynchronize(stream_));
  int fd = -1, to[2], from[2];
  VMEM_DO(vmem_export(w + 5, 8, 0, &fd));
  int capable = -1, device_is = -1;
  DRIVER_DO(entry<decltype(&cuPointerGetAttribute)>("cuPointerGetAttribute")(
      &capable, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, reinterpret_cast<CUdeviceptr>(w)));
  DRIVER_DO(entry<decltype(&cuDeviceGetAttribute)>("cuDeviceGetAttribute")(
      &device_is, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 0));
  std::printf("gpuDirectRDMACapable: the block %d, the device %d\n", capable, device_is);
  EXPECT_EQ(capable, device_is);
  EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
  ASSERT_EQ(fcntl(fd, F_SETFD, 0), 0);
  ASSERT_EQ(pipe(to) + pipe(from), 0);
  const pid_t child =
      systest::start_child("ExportChild.DISABLED_Importer", {{"VMEM_TEST_FD", std::to_string(fd)},
                                                             {"VMEM_TEST_IN", std::to_string(to[0])},
                                                             {"VMEM_TEST_OUT", std::to_string(from[1])},
                                                             {"VMEM_TEST_SIZE", std::to_string(block)}});
  close(fd);
  close(to[0]);
  close(from[1]);
  const bool imported = hear(from[0]);
  EXPECT_TRUE(imported) << "the second process could not";
  VMEM_DO(vmem_release(w, block, stream_));
  VMEM_DO(vmem_evict(p, 2 * block, VMEM_SSD));
  EXPECT_EQ(wrong(w, n, 0, 1, imported ? 1 : 0), 0u) << "what the second process stored under the lease";
  // Other blocks use all of the device's block memory, again and again.
  auto* const others = static_cast<uint64_t*>(q);
  for (uint64_t round = 2; round < 4; ++round) {
    for (size_t b = 0; b < 2 * many; ++b) {
      VMEM_DO(vmem_acquire(others + b * n, block, VMEM_READ | VMEM_WRITE, 0, stream_));
      vmem::gpu::set_stamps(stream_, others + b * n, n, b * n, round, 1);
      VMEM_DO(vmem_release(others + b * n, block, stream_));
    }
    CUDA_DO(cudaStreamSynchronize(stream_));
    if (round == 2 && imported) {
      EXPECT_TRUE(say(to[1]));
      EXPECT_TRUE(hear(from[0]));  // it has overwritten its memory
    }
    EXPECT_EQ(wrong(others, 2 * many * n, 0, round), 0u) << round;
  }
  EXPECT_EQ(wrong(w, n, 0, 1, imported ? 1 : 0), 0u);
  VMEM_DO(vmem_free(p));
  VMEM_DO(vmem_free(q));
  vmem_shutdown();
  const uint64_t before = free_bytes();  // this process has no blocks left and keeps no memory
  EXPECT_TRUE(say(to[1]));
  EXPECT_TRUE(hear(from[0]));
  const uint64_t after = free_bytes();
  EXPECT_EQ(after - before, block) << "its memory goes back when it has given it up";
  say(to[1]);
  EXPECT_EQ(systest::wait_for_child(child, 20), 0);
  close(to[1]);
  close(from[0]);
}
INSTANTIATE_TEST_SUITE_P(Blocks, ExportCuda, ::testing::Values(kBlock, 4 * kBlock),
                         [](const auto& p) { return std::to_string(p.param >> 20) + "MiB"; });

TEST_P(ExportCuda, ADmaBufIsOfAllBlocksThatHaveAByteOfTheRange) {
  const size_t block = GetParam(), n = block / 8;
  const auto attr = blocks_of(block);
  void* p = nullptr;
  VMEM_DO(vmem_create(&p, 4 * block, &attr));
  auto* const w = static_cast<uint64_t*>(p);
  VMEM_DO(vmem_acquire(w, 4 * block, VMEM_READ | VMEM_WRITE, 0, stream_));
  int fd = -1;
  const int rc = vmem_export(w + 2 * n - 1, 16, VMEM_EXPORT_DMA_BUF, &fd);
  if (rc == -EOPNOTSUPP) {
    const std::string why = vmem_last_error();
    VMEM_DO(vmem_release(w, 4 * block, stream_));
    VMEM_DO(vmem_free(p));
    GTEST_SKIP() << why;
  }
  ASSERT_EQ(rc, 0) << vmem_last_error();
  char link[64] = "";
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  ASSERT_GT(readlink(path.c_str(), link, sizeof link - 1), 0);
  const off_t size = lseek(fd, 0, SEEK_END);
  std::printf("%s of %lld MiB\n", link, static_cast<long long>(size) >> 20);
  EXPECT_NE(std::string(link).find("dmabuf"), std::string::npos);
  EXPECT_EQ(size, static_cast<off_t>(2 * block));
  EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
  vmem::gpu::set_stamps(stream_, w, 4 * n, 0, 4, 1);
  VMEM_DO(vmem_release(w, 4 * block, stream_));
  VMEM_DO(vmem_evict(p, 4 * block, VMEM_SSD));  // with the dma-buf open
  EXPECT_EQ(wrong(w, 4 * n, 0, 4), 0u);
  close(fd);
  VMEM_DO(vmem_free(p));
}

}  // namespace
