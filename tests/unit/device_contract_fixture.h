// The application's side, and the fixture, of the contract that every backend of device::Devices
// keeps. The tests are in device_contract_suite.h.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "common/patience.h"
#include "core/step.h"
#include "device/device.h"
#include "device/managed/fault_gate.h"

namespace vmem::device::testing {

// The application's side of a backend: streams and kernels. All kernels are asynchronous.
class Bench {
 public:
  virtual ~Bench() = default;
  virtual Devices& devices() = 0;
  virtual void* stream(int device) = 0;
  virtual void destroy(void* stream) = 0;
  virtual void set_current_device(int device) = 0;
  // words[i] += value
  virtual void add(void* stream, uint64_t* words, size_t count, uint64_t value) = 0;
  // *sum (pinned host memory) = sum of words
  virtual void sum(void* stream, const uint64_t* words, size_t count, uint64_t* sum) = 0;
  // Blocks the stream until *gate (pinned) is not 0.
  virtual void stand_still(void* stream, std::atomic<uint32_t>* gate) = 0;
  // Returns Ok, or the error of its work.
  virtual core::Status synchronize(void* stream) = 0;
  virtual void begin_capture(void* stream) = 0;
  virtual void end_capture(void* stream) = 0;
  // cudaDeviceReset
  virtual void reset(int device) = 0;
  // Whether kernels reach ordinary host memory (HMM).
  virtual bool reaches_host_memory() const { return false; }
  // Whether the driver keeps address space of a released range, without access, for its own later
  // ranges.
  virtual bool driver_keeps_addresses() const { return false; }
  // Tolerance in bytes: other users of the memory may change the free amount beside us.
  virtual uint64_t free_memory_slack() const = 0;
};

struct Backend {
  const char* name;
  // Returns null, with the reason in *skip, if the backend cannot run here.
  std::unique_ptr<Bench> (*make)(std::string* skip);
};
inline void PrintTo(const Backend& backend, std::ostream* os) {
  *os << backend.name;
}

#define VMEM_OK(call)                                                   \
  do {                                                                  \
    const ::vmem::core::Status vmem_s = (call);                         \
    ASSERT_TRUE(vmem_s.ok()) << vmem_s.code() << ": " << vmem_s.text(); \
  } while (0)
// Skips the test unless CPU and device share the page tables.
#define VMEM_SHARED_ONLY() \
  if (!unified()) GTEST_SKIP() << "the CPU has a page table of its own"
// Expects an error with that errno and a message.
#define VMEM_REFUSED(err, call)                              \
  do {                                                       \
    const ::vmem::core::Status vmem_s = (call);              \
    ASSERT_EQ(vmem_s.code(), -(err)) << vmem_s.text();       \
    ASSERT_GT(vmem_s.text().size(), 15u) << "without words"; \
  } while (0)

class DeviceContract : public ::testing::TestWithParam<Backend> {
 protected:
  static constexpr size_t kFrames = 32;
  // Offsets in the result page.
  static constexpr size_t kGate = 0, kSum = 8;

  void SetUp() override {
    std::string skip;
    bench_ = GetParam().make(&skip);
    if (bench_ == nullptr) GTEST_SKIP() << skip;
    d_ = &bench_->devices();
    unit_ = d_->unit();
    words_ = unit_ / sizeof(uint64_t);
    frame_map_size_ = kFrames * unit_ + unit_;
    void* p = mmap(nullptr, frame_map_size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(p, MAP_FAILED);
    frame_map_ = p;
    frames_ = reinterpret_cast<uint64_t*>(core::round_up(reinterpret_cast<uintptr_t>(p), unit_));
    VMEM_OK(d_->pin(frames_, kFrames * unit_));
    p = mmap(nullptr, core::kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(p, MAP_FAILED);
    result_ = static_cast<std::byte*>(p);
    VMEM_OK(d_->pin(result_, core::kPage));
    stream_ = bench_->stream(0);
  }
  void TearDown() override {
    if (bench_ == nullptr) return;
    core::step_hook.store(nullptr);
    fault_gate::set_hook(nullptr).ignore();
    if (stream_ != nullptr) bench_->destroy(stream_);
    for (void* base : ranges_) {
      const core::Status s = d_->release(base);
      EXPECT_TRUE(s.ok()) << s.text();
    }
    d_->unpin(frames_).ignore();  // a lost device answers -EIO
    d_->unpin(result_).ignore();
    bench_.reset();
    munmap(frame_map_, frame_map_size_);
    munmap(result_, core::kPage);
  }

  // Limits the unit from now on, so that units `times` as large exist, too.
  void leave_units_of(size_t times) {
    unit_ = std::min(unit_, d_->largest_unit() / times);
    words_ = unit_ / sizeof(uint64_t);
  }
  // Returns a range of n units; the fixture releases it.
  uint64_t* reserve(size_t units, int device = 0) {
    void* base = nullptr;
    const core::Status s = unit_ == d_->unit() ? d_->reserve(units * unit_, device, &base)
                                               : d_->reserve(units * unit_, unit_, device, &base);
    EXPECT_TRUE(s.ok()) << s.text();
    if (s.ok()) ranges_.push_back(base);
    return static_cast<uint64_t*>(base);
  }
  void release(void* base) {
    std::erase(ranges_, base);
    VMEM_OK(d_->release(base));
  }
  static uintptr_t at(const void* p) { return reinterpret_cast<uintptr_t>(p); }
  std::vector<Range> range(const uint64_t* base, size_t first, size_t count) const {
    return {Range{at(base) + first * unit_, count * unit_}};
  }
  core::Status populate(std::vector<Range> ranges, int device = 0) {
    bool torn = false;
    core::Status s = d_->populate(ranges, device, &torn);
    EXPECT_TRUE(s.ok() || s.code() == -EINVAL || s.code() == -ENODEV || s.code() == -EIO || torn);
    return s;
  }
  uint64_t* frame(size_t i) { return frames_ + i * words_; }
  void fill_frame(size_t i, uint64_t first) {
    for (size_t w = 0; w < words_; ++w) frame(i)[w] = first + w;
  }
  uint64_t sum_of(uint64_t first) const { return sum_of(first, words_); }
  static uint64_t sum_of(uint64_t first, size_t n) { return n * first + n * (n - 1) / 2; }
  // Brings unit `u`, with the words first, first + 1, .., to the device; leaves it shut.
  void bring(uint64_t* base, size_t u, uint64_t first, int device = 0) {
    VMEM_OK(populate(range(base, u, 1), device));
    fill_frame(0, first);
    copy_in(base, u, 0, device);
    VMEM_OK(d_->map(range(base, u, 1)));
  }
  // As bring(), with zeros.
  void make(uint64_t* base, size_t first, size_t count, int device = 0) {
    VMEM_OK(populate(range(base, first, count), device));
    VMEM_OK(d_->map(range(base, first, count)));
  }
  bool unified() const { return d_->cpu_view() == CpuView::unified; }
  void copy_in(uint64_t* base, size_t u, size_t f, int device = 0) {
    Ticket done;
    const Copy copy{at(base) + u * unit_, frame(f), unit_};
    VMEM_OK(d_->copy_in(device, std::span(&copy, 1), &done));
    VMEM_OK(d_->wait(done));
  }
  void copy_out(uint64_t* base, size_t u, size_t f, int device = 0) {
    Ticket done;
    const Copy copy{at(base) + u * unit_, frame(f), unit_};
    VMEM_OK(d_->copy_out(device, std::span(&copy, 1), &done));
    VMEM_OK(d_->wait(done));
  }
  // Removes unit `u` from the device and settles its hole.
  void drop(uint64_t* base, size_t u) {
    VMEM_OK(d_->write_protect(range(base, u, 1), Access::none));
    VMEM_OK(d_->unmap(range(base, u, 1)));
    VMEM_OK(d_->punch(range(base, u, 1)));
    VMEM_OK(d_->rearm(range(base, u, 1)));
  }
  uint64_t* sum_cell(size_t i = 0) { return reinterpret_cast<uint64_t*>(result_ + kSum) + i; }
  uint64_t kernel_sum(const uint64_t* words, size_t n) {
    *sum_cell() = ~uint64_t{0};
    bench_->sum(stream_, words, n, sum_cell());
    const core::Status s = bench_->synchronize(stream_);
    EXPECT_TRUE(s.ok()) << s.text();
    return *sum_cell();
  }
  std::atomic<uint32_t>* gate() { return reinterpret_cast<std::atomic<uint32_t>*>(result_ + kGate); }
  uint64_t used(int device = 0) {
    Memory m{};
    const core::Status s = d_->memory(device, &m);
    EXPECT_TRUE(s.ok()) << s.text();
    return m.used;
  }
  // Returns when `n` threads are parked in the SIGSEGV handler.
  static void until_parked(uint32_t n) {
    while (fault_gate::stats().waiting < n) std::this_thread::yield();
  }
  // Returns the process's mappings there, as in /proc/self/maps; "" if there are none.
  static std::string mapped_at(uintptr_t address, size_t size) {
    std::ifstream maps("/proc/self/maps");
    std::string found;
    for (std::string line; std::getline(maps, line);) {
      char* end = nullptr;
      const uintptr_t from = std::strtoull(line.c_str(), &end, 16), to = std::strtoull(end + 1, nullptr, 16);
      if (from < address + size && address < to) found += line + "\n";
    }
    return found;
  }

  // As mapped_at(), without mappings that a driver keeps: no access, no file, no memory.
  std::string left_at(uintptr_t address, size_t size) const {
    std::istringstream lines(mapped_at(address, size));
    std::string left;
    for (std::string line; std::getline(lines, line);)
      if (!bench_->driver_keeps_addresses() || line.find(" ---p 00000000 00:00 0") == std::string::npos)
        left += line + "\n";
    return left;
  }
  static size_t mappings() {
    std::ifstream maps("/proc/self/maps");
    return static_cast<size_t>(std::count(std::istreambuf_iterator<char>(maps), {}, '\n'));
  }

  std::unique_ptr<Bench> bench_;
  Devices* d_ = nullptr;
  size_t unit_ = 0, words_ = 0;  // of the backend: bytes, and 8-byte words
  void* stream_ = nullptr;
  void* frame_map_ = nullptr;
  size_t frame_map_size_ = 0;
  uint64_t* frames_ = nullptr;
  std::byte* result_ = nullptr;
  std::vector<void*> ranges_;
};

// Memory and copies of one device, which a new backend has first.
class DeviceBasics : public DeviceContract {};
class DeviceLoss : public DeviceContract {};

}  // namespace vmem::device::testing
