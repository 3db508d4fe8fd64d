// Devices with page tables of their own: kernels that still run when their blocks are to go, devices that are lost
// while a copy of a block stands in place for the CPU, and memory that is short for such copies. On simulated devices.
#include <cstring>

#include "sim_support.h"

namespace {

using systest::kBlock;
using systest::TempFile;
using vmem::core::Status;
using vmem::device::SimKernel;
using vmem::device::SimOp;

constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;
constexpr size_t kWords = kBlock / 8;

class Handles : public systest::SimTest {
 protected:
  void SetUp() override { start(2, {}, true); }
  void TearDown() override {
    open_ = true;  // whatever failed, no stream stands still
    SimTest::TearDown();
  }
  static uint64_t load(const uint64_t* at) { return *static_cast<const volatile uint64_t*>(at); }
  static uint64_t* words(vmem::region& r) { return static_cast<uint64_t*>(r.data()); }
  // A kernel that stands still until open_, and then loads a word; returns when it runs.
  static void launch_held(void* stream, const uint64_t* at) {
    open_ = runs_ = ended_ = reached_ = false;
    const Status s = sim().launch(stream, [at](SimKernel& k) {
      runs_ = true;
      while (!open_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      reached_ = k.at(at, 8, false) != nullptr;
      ended_ = true;
    });
    ASSERT_TRUE(s.ok()) << s.text();
    ASSERT_TRUE(until([] { return runs_.load(); }));
  }
  // A step hook: it goes on where it is waited for, and where nobody waits for it and its block is gone.
  static void let_go(const char* step) {
    if (std::strstr(step, ".draining") != nullptr || std::strcmp(step, "device.punch") == 0) open_ = true;
  }
  static inline std::atomic<bool> open_{false}, runs_{false}, ended_{false}, reached_{false};
};

TEST_F(Handles, ShutdownLetsKernelsEndThatUseWhatTheyLeased) {
  if (IsSkipped()) return;
  TempFile file(kBlock);
  void *f = nullptr, *r = nullptr;
  ASSERT_EQ(vmem_map(&f, kBlock, file.path().c_str(), 0, VMEM_MAP_SHARED), 0) << vmem_last_error();
  ASSERT_EQ(vmem_alloc(&r, 2 * kBlock, 0), 0) << vmem_last_error();
  store_on_device(static_cast<uint64_t*>(f), 101);
  ASSERT_EQ(vmem_acquire(r, 2 * kBlock, kBoth, 0, stream_), 0) << vmem_last_error();
  launch_held(stream_, static_cast<uint64_t*>(r));
  vmem::core::step_hook.store(&let_go);
  vmem_shutdown();
  vmem::core::step_hook.store(nullptr);
  EXPECT_TRUE(until([] { return ended_.load(); }));
  EXPECT_TRUE(reached_) << "its block was unmapped under it";
  uint64_t written = 0;
  memcpy(&written, file.read().data(), 8);
  EXPECT_EQ(written, 101u);
}

TEST_F(Handles, ALeaseOfAStreamThatIsNoMoreLastsAsLongAsItsWork) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  void* const gone = stream(0);
  ASSERT_EQ(vmem_acquire(words(r), kBlock, VMEM_READ, 0, gone), 0) << vmem_last_error();
  launch_held(gone, words(r));
  sim().forget_stream(gone);
  vmem::core::step_hook.store(&let_go);
  EXPECT_EQ(vmem_release(words(r), kBlock, gone), 0) << vmem_last_error();
  EXPECT_EQ(vmem_evict(words(r), kBlock, VMEM_HOST), 0) << vmem_last_error();
  vmem::core::step_hook.store(nullptr);
  EXPECT_TRUE(until([] { return ended_.load(); }));
  EXPECT_TRUE(reached_) << "its block was unmapped under it";
  EXPECT_TRUE(sim().health(0).ok());
}

}  // namespace
