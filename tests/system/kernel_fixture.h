// Kernels of a simulated device that page data in: ranges that are open to them, and the data they
// access.
#pragma once

#include <atomic>
#include <cstring>
#include <functional>
#include <string>

#include "device/paging_host.h"
#include "faulty_disk.h"
#include "sim_support.h"
#include "vmem/detail/paging_gather.h"
#include "vmem/detail/paging_group.h"
#include "vmem/detail/paging_view.h"

namespace systest {

using vmem::device::SimKernel;
using vmem::paging::Answer;
using vmem::paging::HostAtomics;
using vmem::paging::Intent;
using Group = vmem::paging::Group<HostAtomics>;
using View = vmem::paging::View<HostAtomics>;

inline constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;
inline constexpr size_t kWords = kBlock / 8;

inline uint64_t long_enough() {
  return static_cast<uint64_t>(std::chrono::nanoseconds(vmem::test::patiently(std::chrono::seconds(60))).count());
}

// A range that is open to kernels for the life of the object.
class Open {
 public:
  Open(const void* at, size_t size, unsigned access, void* stream, size_t budget = 0) : stream_(stream) {
    vmem_kernel_view view;
    EXPECT_EQ(vmem_kernel_begin(&kernel_, at, size, access, 0, budget, &view), 0) << vmem_last_error();
    if (kernel_ != nullptr) memcpy(&view_, &view, sizeof view_);
  }
  ~Open() { end(); }
  void end() {
    if (kernel_ == nullptr) return;
    EXPECT_EQ(vmem_kernel_end(kernel_, stream_), 0) << vmem_last_error();
    kernel_ = nullptr;
  }
  const View& view() const { return view_; }
  struct vmem_kernel* handle() const {
    return kernel_;
  }

 private:
  void* stream_;
  struct vmem_kernel* kernel_ = nullptr;
  View view_ = {};
};

class KernelPaging : public SimTest {
 protected:
  void SetUp() override { start(1, {}, true); }
  void TearDown() override {
    SimTest::TearDown();
    vmem::api::test_hooks().wrap_engine = nullptr;
  }
  // Like SetUp(), but reads of disk_ can be made to fail.
  void start_on_a_faulty_disk() {
    vmem_shutdown();
    wrap_engine(&disk_);
    SetUp();
  }
  static uint64_t* words(vmem::region& r) { return static_cast<uint64_t*>(r.data()); }
  static void launch(void* stream, std::function<void(SimKernel&)> kernel) {
    const vmem::core::Status s = sim().launch(stream, std::move(kernel));
    ASSERT_TRUE(s.ok()) << s.text();
  }
  static std::atomic<uint64_t>* word(SimKernel& k, const View& view, uint32_t block, size_t at, bool store) {
    auto* const address = reinterpret_cast<const void*>(view.first + block * kBlock + 8 * at);
    return reinterpret_cast<std::atomic<uint64_t>*>(k.at(address, 8, store));
  }
  // Returns the bytes of a gather's piece: in a device block, or where the block is in host memory.
  static const std::byte* bytes_of(SimKernel& k, const View& view, const vmem::paging::Piece& piece) {
    const uint64_t end = view.first + (uint64_t{view.table.blocks} << view.shift);
    const auto* const at = reinterpret_cast<const std::byte*>(piece.address);
    return piece.address < view.first || piece.address >= end ? at : k.at(at, piece.bytes, false);
  }
  // Launches a kernel that acquires a block, adds to its first word and releases it. told: the
  // answer, or -1 while it runs.
  static void launch_add(void* stream, const View& view, uint32_t block, std::atomic<int>* told) {
    *told = -1;
    launch(stream, [=](SimKernel& k) {
      Group group(view.table, long_enough());
      const Answer answer = group.acquire(block, Intent::write);
      if (answer == Answer::present) {
        if (auto* w = word(k, view, block, 0, true); w != nullptr) w->fetch_add(1);
        group.release(block);
      }
      *told = static_cast<int>(answer);
    });
  }

  vmem::store::FaultyEngine* disk_ = nullptr;
};

inline constexpr int kPresent = static_cast<int>(Answer::present);

}  // namespace systest
