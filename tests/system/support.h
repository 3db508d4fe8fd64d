// Shared by system tests: a runtime with its own settings, temporary files, touches that may raise
// SIGBUS.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "api/runtime.h"
#include "child.h"
#include "common/hooks.h"
#include "core/log.h"
#include "vmem/vmem.hpp"

namespace systest {

inline std::string temp_folder() {
  const char* tmp = getenv("TMPDIR");
  return tmp != nullptr ? tmp : "/var/tmp";
}

// A file that is removed at the end of the test.
class TempFile {
 public:
  explicit TempFile(size_t bytes = 0, uint64_t seed = 1) {
    path_ = temp_folder() + "/vmem-test.XXXXXX";
    const int fd = mkstemp(path_.data());
    EXPECT_GE(fd, 0) << path_;
    std::vector<unsigned char> data = content(bytes, seed);
    for (size_t at = 0; at < bytes;) {
      const ssize_t n = pwrite(fd, data.data() + at, bytes - at, static_cast<off_t>(at));
      if (n <= 0) {
        ADD_FAILURE() << "cannot fill " << path_;
        break;
      }
      at += static_cast<size_t>(n);
    }
    fsync(fd);
    close(fd);
  }
  ~TempFile() { unlink(path_.c_str()); }
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;
  const std::string& path() const { return path_; }
  std::vector<unsigned char> read() const {
    std::ifstream in(path_, std::ios::binary | std::ios::ate);
    std::vector<unsigned char> data(static_cast<size_t>(in.tellg()));
    in.seekg(0).read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(data.size()));
    return data;
  }
  static std::vector<unsigned char> content(size_t bytes, uint64_t seed) {
    std::vector<unsigned char> data(bytes);
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (size_t at = 0; at < bytes; at += sizeof(state)) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      memcpy(&data[at], &state, std::min(sizeof(state), bytes - at));
    }
    return data;
  }

 private:
  std::string path_;
};

// From the next start on, and only in this test, copied blocks leave from their place, as on
// kernels before 6.8.
inline void move_no_pages() {
  vmem::api::test_hooks().adjust_trap = [](vmem::trap::UserfaultOptions& options) { options.allow_move = false; };
}

using Settings = std::vector<std::pair<const char*, std::string>>;

// Every test starts without a runtime and leaves none behind. A runtime with inconsistent counters
// fails the test.
class SystemTest : public ::testing::Test {
 protected:
  void SetUp() override {
    vmem_shutdown();
    reset();
  }
  void TearDown() override {
    EXPECT_EQ(vmem::api::Runtime::get().check(), "");
    vmem_shutdown();
    vmem_log(nullptr, nullptr);
    vmem::api::test_hooks() = {};
    reset();
  }
  static void configure(const Settings& settings) {
    for (const auto& [name, value] : settings) {
      ASSERT_EQ(vmem_set(name, value.c_str()), 0) << vmem_last_error();
    }
    const int rc = vmem_init();
    if (rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) GTEST_SKIP() << vmem_last_error();
    ASSERT_EQ(rc, 0) << vmem_last_error();
  }
  static struct vmem_device_stats device_stats(int device = 0) {
    struct vmem_device_stats s = {};
    s.size = sizeof s;
    EXPECT_EQ(vmem_device_stats(device, &s), 0) << vmem_last_error();
    return s;
  }
  static struct vmem_residency residency(const void* at, size_t size) {
    struct vmem_residency r = {};
    r.size = sizeof r;
    EXPECT_EQ(vmem_query(at, size, &r), 0) << vmem_last_error();
    return r;
  }

 private:
  static void reset() {
    for (const auto& [name, value] : Settings{{"host_budget", "64MiB"},
                                              {"block_size", "2MiB"},
                                              {"transfer", "auto"},
                                              {"compression", "none"},
                                              {"checksum", "on"},
                                              {"encryption", "off"},
                                              {"core_dump", "off"},
                                              {"io_engine", "auto"},
                                              {"readahead", "8MiB"},
                                              {"direct_io", "on"},
                                              {"io_depth", "16"},
                                              {"fault_timeout_ms", "10000"},
                                              {"writeback_interval", "5"},
                                              {"dirty_limit", "0"},
                                              {"ssd_budget", "1T"},
                                              {"ssd_path", ""},
                                              {"evict_threads", "1"},
                                              {"io_threads", "1"},
                                              {"log", "warning"}}) {
      ASSERT_EQ(vmem_set(name, value.c_str()), 0) << vmem_last_error();
    }
  }
};

// Returns whether the touch of *p raised SIGBUS. One thread at a time per process.
inline thread_local sigjmp_buf bus_jump;
inline thread_local volatile bool bus_armed = false;

inline void on_bus(int) {
  if (!bus_armed) _exit(99);
  bus_armed = false;
  siglongjmp(bus_jump, 1);
}

template <typename Touch>
bool raises_sigbus(Touch touch) {
  struct sigaction action = {}, old;
  action.sa_handler = on_bus;
  action.sa_flags = SA_NODEFER;
  sigaction(SIGBUS, &action, &old);
  bool raised = false;
  if (sigsetjmp(bus_jump, 1) == 0) {
    bus_armed = true;
    touch();
    bus_armed = false;
  } else {
    raised = true;
  }
  sigaction(SIGBUS, &old, nullptr);
  return raised;
}

// Collects log lines of the library.
class LogLines {
 public:
  LogLines() {
    vmem_log([](int, const char* line, void* user) { static_cast<LogLines*>(user)->add(line); }, this);
  }
  ~LogLines() { vmem_log(nullptr, nullptr); }
  bool contains(const std::string& text) {
    vmem::core::flush_log();
    std::lock_guard lock(mutex_);
    for (const std::string& line : lines_) {
      if (line.find(text) != std::string::npos) return true;
    }
    return false;
  }

 private:
  void add(const char* line) {
    std::lock_guard lock(mutex_);
    lines_.emplace_back(line);
  }
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

// A value that identifies its place, so that lost, stale and misplaced blocks all show.
inline uint64_t stamp(uint64_t index, uint64_t round) {
  uint64_t z = index * 0x9e3779b97f4a7c15u + round * 0xbf58476d1ce4e5b9u + 1;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  return z ^ (z >> 31);
}

}  // namespace systest
