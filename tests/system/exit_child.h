// A program with a simulated device that ends: this binary again, with its task in its environment.
#pragma once

#include <fcntl.h>

#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "child.h"
#include "device/sim/sim_device.h"
#include "support.h"

namespace systest {

inline constexpr size_t kExitBlock = 2 << 20;

inline std::string path_of(const char* variable) {
  return getenv(variable);
}

inline void log_to_file() {
  const int fd = open(path_of("VMEM_TEST_LOG").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(dup2(fd, STDERR_FILENO), STDERR_FILENO);
}

inline char* map_shared(const char* variable, size_t size, unsigned flags = 0) {
  void* p = nullptr;
  EXPECT_EQ(vmem_map(&p, size, path_of(variable).c_str(), 0, VMEM_MAP_SHARED | flags), 0) << vmem_last_error();
  return static_cast<char*>(p);
}

inline std::string text_of(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// Runs the child to its end; returns its log.
inline std::string run_to_exit(const std::string& child, Environment environment) {
  const TempFile log(0);
  setenv("VMEM_TEST_LOG", log.path().c_str(), 1);
  const pid_t pid = start_child(child, environment);
  const int status = wait_for_child(pid, 120);
  EXPECT_NE(status, -1) << "it hangs";
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) return "skip";
  EXPECT_EQ(status, 0);
  return text_of(log.path());
}

// Handlers registered by `as_it_comes_up` run between two turns of the exit work.
inline void start_device(bool handles, void (*as_it_comes_up)() = nullptr) {
  vmem::api::test_hooks().make_devices = [=](size_t unit, std::unique_ptr<vmem::device::Devices>* out) {
    if (as_it_comes_up != nullptr) as_it_comes_up();
    vmem::device::SimOptions options;
    options.memory_bytes = 64 << 20;
    options.handles = handles;
    options.unit = unit;
    std::unique_ptr<vmem::device::SimDevices> made;
    vmem::core::Status s = vmem::device::make_sim_devices(options, &made);
    *out = std::move(made);
    return s;
  };
  for (const auto& [name, value] :
       {std::pair{"host_budget", "96MiB"}, {"device_budget", "32MiB"}, {"fault_timeout_ms", "300"}}) {
    ASSERT_EQ(vmem_set(name, value), 0) << vmem_last_error();
  }
  if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(77);
}

}  // namespace systest
