// A program that links the library makes threads with the smallest stack that POSIX allows. The
// thread-local storage of all linked libraries lies on each stack, so the library keeps little of
// it, and loads nothing of CUDA unless a device is requested.
#include <gtest/gtest.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <vmem/vmem.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

namespace {

struct Loaded {
  std::string path;
  size_t thread_local_bytes;
};

std::vector<Loaded> loaded() {
  std::vector<Loaded> all;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        Loaded one{info->dlpi_name, 0};
        for (int i = 0; i < info->dlpi_phnum; ++i)
          if (info->dlpi_phdr[i].p_type == PT_TLS) one.thread_local_bytes += info->dlpi_phdr[i].p_memsz;
        static_cast<std::vector<Loaded>*>(out)->push_back(std::move(one));
        return 0;
      },
      &all);
  return all;
}

bool is_cuda(const std::string& path) {
  return path.find("libcuda.so") != std::string::npos || path.find("libcudart") != std::string::npos;
}

TEST(SmallThreads, AThreadOfTheSmallestStackStarts) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  // PTHREAD_STACK_MIN, which is no longer a constant
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 16384), 0);
  pthread_t thread;
  int given = 0;
  const int rc = pthread_create(
      &thread, &attributes, [](void* what) { return what; }, &given);
  ASSERT_EQ(rc, 0) << strerror(rc);
  void* got = nullptr;
  EXPECT_EQ(pthread_join(thread, &got), 0);
  EXPECT_EQ(got, &given);
  pthread_attr_destroy(&attributes);
}

TEST(SmallThreads, TheLibraryTakesAtMost2KiBOfEveryStack) {
  size_t found = 0;
  for (const Loaded& one : loaded()) {
    if (one.path.find("libvmem-tier.so") == std::string::npos) continue;
    ++found;
    EXPECT_LE(one.thread_local_bytes, 2048u) << one.path;
  }
  EXPECT_EQ(found, 1u);
}

TEST(SmallThreads, NothingOfCudaIsLoadedWhereNoDeviceIsAskedFor) {
  ASSERT_EQ(vmem_set("device", "none"), 0) << vmem_last_error();
  const int rc = vmem_init();
  if (rc == -EPERM || rc == -ENOSYS) GTEST_SKIP() << vmem_last_error();
  ASSERT_EQ(rc, 0) << vmem_last_error();
  for (const Loaded& one : loaded()) EXPECT_FALSE(is_cuda(one.path)) << one.path;
  vmem_shutdown();
}

}  // namespace
