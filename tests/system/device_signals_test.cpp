// Signals while a call waits for copies from a device: their handlers run, and may access absent
// blocks. On simulated devices of either backend.
#include <pthread.h>
#include <signal.h>

#include "sim_support.h"

namespace {

using systest::kBlock;
using systest::TempFile;
using vmem::core::Status;
using vmem::device::SimOp;

std::atomic<bool> copying{false}, may_copy{true};
std::atomic<int> handled{0};
std::atomic<const volatile uint64_t*> absent{nullptr};

class DeviceSignals : public systest::SimTest, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override { start(1, {}, GetParam()); }

  // A copy lasts as long as a stream is blocked that shares a hardware queue with it.
  static Status hold_copies(SimOp op, int, uintptr_t, size_t) {
    if (op != SimOp::copy_out) return {};
    copying = true;
    while (!may_copy) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return {};
  }
  static int lease_at_host(void* at, size_t size) {
    const int error = vmem_acquire(at, size, VMEM_READ, VMEM_HOST, nullptr);
    return error != 0 ? error : vmem_release(at, size, nullptr);
  }
};

TEST_P(DeviceSignals, ComeWhileACallWaitsForCopies) {
  if (IsSkipped()) return;
  const struct {
    const char* name;
    int (*call)(void* at, size_t size);
  } calls[] = {{"evict", [](void* at, size_t size) { return vmem_evict(at, size, VMEM_HOST); }},
               {"evict to the SSD", [](void* at, size_t size) { return vmem_evict(at, size, VMEM_SSD); }},
               {"sync", [](void* at, size_t size) { return vmem_sync(at, size); }},
               {"acquire", lease_at_host}};
  const TempFile file(16 * kBlock);
  vmem::region r(16 * kBlock, file.path(), 0, VMEM_MAP_SHARED), host(kBlock, VMEM_HOST_ONLY);
  auto* const words = static_cast<uint64_t*>(r.data());
  static_cast<uint64_t*>(host.data())[0] = 5;
  absent = static_cast<uint64_t*>(host.data());
  struct sigaction action = {}, before = {};
  action.sa_handler = [](int) { handled += *absent.load() == 5; };
  ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
  uint64_t value = 6;
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    ++value;
    for (size_t at = 0; at < r.size() / 8; at += kBlock / 8) store_on_device(words + at, value);
    ASSERT_EQ(vmem_evict(host.data(), kBlock, VMEM_SSD), 0) << vmem_last_error();
    copying = may_copy = false;
    handled = 0;
    sim().set_hook(hold_copies);
    std::atomic<bool> over{false};
    std::thread calling([&] {
      EXPECT_EQ(call(words, r.size()), 0) << vmem_last_error();
      over = true;
    });
    EXPECT_TRUE(until([] { return copying.load(); }));
    pthread_kill(calling.native_handle(), SIGUSR1);
    EXPECT_TRUE(until([] { return handled == 1; })) << "the call keeps it out";
    EXPECT_FALSE(over);
    may_copy = true;
    calling.join();
    sim().set_hook(nullptr);
    for (size_t at = 0; at < r.size() / 8; at += kBlock / 8) EXPECT_EQ(words[at], value) << at;
  }
  sigaction(SIGUSR1, &before, nullptr);
}

INSTANTIATE_TEST_SUITE_P(Backends, DeviceSignals, testing::Bool(),
                         [](const auto& i) { return i.param ? "handles" : "managed"; });

}  // namespace
