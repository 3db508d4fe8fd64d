// Shared by the module's tests: a context as a C++ object, a thread that serves its faults, and
// ways to survive signals. Calls return 0 or a negative errno, as the module returned it. Without
// /dev/vmem every test skips.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "common/patience.h"
#include "vmem/vmem_uapi.h"

namespace kmod_test {

inline constexpr size_t kPage = 4096;
inline constexpr size_t kHuge = size_t{2} << 20;
inline constexpr const char* kDevice = "/dev/vmem";
inline constexpr const char* kSysfs = "/sys/class/misc/vmem/";

inline int call(int fd, unsigned long request, void* argument = nullptr) {
  return ioctl(fd, request, argument) == 0 ? 0 : -errno;
}

inline uint64_t knob(const std::string& name) {
  std::ifstream in(kSysfs + name);
  uint64_t value = UINT64_MAX;
  in >> value;
  return value;
}
// True on a kernel that checks its locks and accesses, which makes it at least ten times slower.
// Tests then repeat things less often. KMOD_FULL=1: as often as elsewhere.
inline bool checked_kernel() {
  return access("/proc/lockdep", F_OK) == 0 && getenv("KMOD_FULL") == nullptr;
}
// Returns 0 or a negative errno.
inline int set_knob(const std::string& name, const std::string& value) {
  const int fd = open((kSysfs + name).c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return -errno;
  const ssize_t n = write(fd, value.data(), value.size());
  const int err = n == static_cast<ssize_t>(value.size()) ? 0 : -errno;
  close(fd);
  return err;
}
// Restores a knob at the end of a scope.
class KnobGuard {
 public:
  KnobGuard(std::string name, uint64_t value) : name_(std::move(name)), old_(knob(name_)) {
    EXPECT_EQ(set_knob(name_, std::to_string(value)), 0) << name_;
  }
  ~KnobGuard() { EXPECT_EQ(set_knob(name_, std::to_string(old_)), 0) << name_; }
  KnobGuard(const KnobGuard&) = delete;
  KnobGuard& operator=(const KnobGuard&) = delete;

 private:
  std::string name_;
  uint64_t old_;
};

class Context {
 public:
  explicit Context(bool hello = true, bool system_calls = true) : fd(open(kDevice, O_RDWR | O_CLOEXEC)) {
    if (fd >= 0 && hello) {
      vmem_hello h{};
      h.version = VMEM_UAPI_VERSION;
      EXPECT_EQ(call(fd, VMEM_IOC_HELLO, &h), 0);
      features = h.features;
      // As the runtime does: let system calls wait for blocks if the module allows it.
      if (system_calls && (features & VMEM_FEATURE_KERNEL_FAULTS) != 0) {
        h.need = VMEM_FEATURE_KERNEL_FAULTS;
        EXPECT_EQ(call(fd, VMEM_IOC_HELLO, &h), 0);
      }
    }
  }
  ~Context() { shut(); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  void shut() {
    if (fd >= 0) close(fd);
    fd = -1;
  }

  int create(uint32_t kind, uint64_t size, uint32_t unit, uint64_t* offset, uint32_t flags = 0) {
    vmem_create c{};
    c.kind = kind;
    c.size = size;
    c.unit = unit;
    c.flags = flags;
    const int err = call(fd, VMEM_IOC_CREATE, &c);
    *offset = c.offset;
    return err;
  }
  int destroy(uint64_t offset) {
    vmem_destroy d{offset};
    return call(fd, VMEM_IOC_DESTROY, &d);
  }
  int populate(uint64_t offset, uint32_t count, int node = -1, uint32_t flags = 0, vmem_populate* out = nullptr) {
    vmem_populate p{};
    p.offset = offset;
    p.count = count;
    p.node = node;
    p.flags = flags;
    const int err = call(fd, VMEM_IOC_POPULATE, &p);
    if (out != nullptr) *out = p;
    return err;
  }
  int release(uint64_t offset, uint32_t count) {
    vmem_release r{offset, count, 0};
    return call(fd, VMEM_IOC_RELEASE, &r);
  }
  int batch(std::vector<vmem_op>* ops) {
    vmem_batch b{};
    b.ops = reinterpret_cast<uintptr_t>(ops->data());
    b.count = static_cast<uint32_t>(ops->size());
    return call(fd, VMEM_IOC_BATCH, &b);
  }
  // Runs one operation. Returns the batch's error or the operation's.
  int op(uint32_t code, uint64_t block, uint64_t frame = 0, uint32_t flags = 0, vmem_op* out = nullptr) {
    std::vector<vmem_op> one(1);
    one[0].op = code;
    one[0].flags = flags;
    one[0].block = block;
    one[0].frame = frame;
    const int err = batch(&one);
    if (out != nullptr) *out = one[0];
    return err != 0 ? err : one[0].result;
  }
  int install(uint64_t block, uint64_t frame, uint32_t flags = 0) { return op(VMEM_OP_INSTALL, block, frame, flags); }
  int remove(uint64_t block, vmem_op* out = nullptr) { return op(VMEM_OP_REMOVE, block, 0, 0, out); }
  uint32_t state(uint64_t block) {
    vmem_op out{};
    EXPECT_EQ(op(VMEM_OP_QUERY, block, 0, 0, &out), 0);
    return out.state;
  }
  vmem_info info() {
    vmem_info i{};
    EXPECT_EQ(call(fd, VMEM_IOC_INFO, &i), 0);
    return i;
  }
  // Maps [offset, offset + size) at an address aligned to 2 MiB. Returns nullptr on failure, with
  // errno set.
  char* map(uint64_t offset, size_t size, int prot = PROT_READ | PROT_WRITE, size_t misalign = 0) {
    char* room = static_cast<char*>(mmap(nullptr, size + 2 * kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (room == MAP_FAILED) return nullptr;
    char* at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(room) + kHuge - 1) / kHuge * kHuge) + misalign;
    void* p = mmap(at, size, prot, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset));
    return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
  }
  // Waits for one event. Returns false after timeout_ms.
  bool event(vmem_event* out, int timeout_ms = 20000) {
    pollfd p{fd, POLLIN, 0};
    if (poll(&p, 1, timeout_ms) != 1 || (p.revents & POLLIN) == 0) return false;
    return read(fd, out, sizeof *out) == sizeof *out;
  }

  int fd;
  uint64_t features = 0;
};

// A pool and a region of `count` units each, both mapped, the pool populated.
struct Pair {
  Pair(Context& c, uint32_t n, size_t unit_bytes = kHuge, uint32_t flags = 0, int prot = PROT_READ | PROT_WRITE)
      : context(c), count(n), unit(unit_bytes) {
    EXPECT_EQ(c.create(VMEM_KIND_POOL, n * unit, static_cast<uint32_t>(unit), &pool), 0);
    EXPECT_EQ(c.create(VMEM_KIND_REGION, n * unit, static_cast<uint32_t>(unit), &region, flags), 0);
    EXPECT_EQ(c.populate(pool, n), 0);
    frames = c.map(pool, n * unit);
    blocks = c.map(region, n * unit, prot);
    EXPECT_NE(frames, nullptr);
    EXPECT_NE(blocks, nullptr);
  }
  ~Pair() {
    if (frames != nullptr) munmap(frames, count * unit);
    if (blocks != nullptr) munmap(blocks, count * unit);
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;
  uint64_t block(uint32_t i) const { return region + i * unit; }
  uint64_t frame(uint32_t i) const { return pool + i * unit; }
  volatile uint64_t& word(uint32_t i, size_t byte = 0) {
    return *reinterpret_cast<volatile uint64_t*>(blocks + i * unit + byte);
  }
  volatile uint64_t& frame_word(uint32_t i, size_t byte = 0) {
    return *reinterpret_cast<volatile uint64_t*>(frames + i * unit + byte);
  }

  Context& context;
  uint32_t count;
  size_t unit;
  uint64_t pool = 0, region = 0;
  char* frames = nullptr;
  char* blocks = nullptr;
};

// Reads events on its own thread until destroyed, and passes faults to `serve`.
class Server {
 public:
  Server(Context& context, std::function<void(const vmem_event&)> serve) : context_(context), serve_(std::move(serve)) {
    EXPECT_EQ(pipe2(stop_, O_CLOEXEC), 0);
    thread_ = std::thread([this] {
      for (;;) {
        pollfd p[2] = {{context_.fd, POLLIN, 0}, {stop_[0], POLLIN, 0}};
        poll(p, 2, -1);
        if (p[1].revents != 0) return;
        vmem_event events[16];
        const int flags = fcntl(context_.fd, F_GETFL);
        fcntl(context_.fd, F_SETFL, flags | O_NONBLOCK);
        const ssize_t n = read(context_.fd, events, sizeof events);
        if (n < 0 && errno == ESHUTDOWN) return;
        for (ssize_t i = 0; i < n / static_cast<ssize_t>(sizeof events[0]); ++i) {
          if (events[i].type == VMEM_EVENT_FAULT) serve_(events[i]);
        }
      }
    });
  }
  ~Server() {
    EXPECT_EQ(write(stop_[1], "", 1), 1);
    thread_.join();
    close(stop_[0]);
    close(stop_[1]);
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

 private:
  Context& context_;
  std::function<void(const vmem_event&)> serve_;
  int stop_[2] = {-1, -1};
  std::thread thread_;
};

inline bool put(const std::string& path, const std::string& value) {
  std::ofstream out(path);
  out << value;
  return out.flush().good();
}
inline std::string text(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline thread_local sigjmp_buf jump;
inline thread_local volatile sig_atomic_t armed = 0;
inline void on_signal(int number) {
  if (!armed) {
    signal(number, SIG_DFL);
    return;
  }
  armed = 0;
  siglongjmp(jump, number);
}
inline void catch_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigaction(SIGBUS, &action, nullptr);
  sigaction(SIGSEGV, &action, nullptr);
}
inline void touch(const volatile uint64_t& word) {
  [[maybe_unused]] const uint64_t value = word;
}
// Returns the signal that the touch raised, or 0. Works in any thread.
inline int load(const volatile uint64_t* word, uint64_t* value = nullptr) {
  catch_signals();
  if (const int number = sigsetjmp(jump, 1); number != 0) return number;
  armed = 1;
  const uint64_t seen = *word;
  armed = 0;
  if (value != nullptr) *value = seen;
  return 0;
}
inline int store(volatile uint64_t* word, uint64_t value) {
  catch_signals();
  if (const int number = sigsetjmp(jump, 1); number != 0) return number;
  armed = 1;
  *word = value;
  armed = 0;
  return 0;
}

inline double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) / 1e9;
}
// Polls `done` for at most ten seconds, times patience.
inline bool eventually(const std::function<bool()>& done) {
  return vmem::test::eventually(done, std::chrono::seconds(10), std::chrono::milliseconds(1));
}
// Returns the bytes of the field in the smaps entry that contains `address`, e.g. "FilePmdMapped".
inline uint64_t smaps(const void* address, const std::string& field) {
  std::ifstream in("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    uintptr_t from = 0, to = 0;
    if (sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) {
      inside = from <= reinterpret_cast<uintptr_t>(address) && reinterpret_cast<uintptr_t>(address) < to;
    } else if (inside && line.rfind(field + ":", 0) == 0) {
      return strtoull(line.c_str() + field.size() + 1, nullptr, 10) * 1024;
    }
  }
  return UINT64_MAX;
}

// Base of all suites: skips without the module.
class Kmod : public ::testing::Test {
 protected:
  void SetUp() override {
    if (access(kDevice, F_OK) != 0) GTEST_SKIP() << "the module vmem is not loaded: no " << kDevice;
    if (access(kDevice, R_OK | W_OK) != 0) GTEST_SKIP() << "no permission for " << kDevice;
  }
};

}  // namespace kmod_test
