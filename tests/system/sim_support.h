// For tests of the device tier that control what a simulated device does, and when.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/patience.h"
#include "core/step.h"
#include "device/sim/sim_device.h"
#include "support.h"

namespace systest {

inline constexpr size_t kBlock = 2 << 20;

class SimTest : public SystemTest {
 protected:
  void SetUp() override { start(1); }
  void start(int devices, const Settings& more = {}, bool handles = false) {
    SystemTest::SetUp();
    vmem::api::test_hooks().make_devices = [devices, handles, memory = memory_bytes_](
                                               size_t unit, std::unique_ptr<vmem::device::Devices>* out) {
      vmem::device::SimOptions options;
      options.devices = devices;
      options.handles = handles;
      options.unit = unit;
      options.memory_bytes = memory;
      std::unique_ptr<vmem::device::SimDevices> made;
      vmem::core::Status s = vmem::device::make_sim_devices(options, &made);
      *out = std::move(made);
      return s;
    };
    Settings settings{{"device_budget", "32MiB"}, {"host_budget", "96MiB"}, {"readahead", "0"}};
    settings.insert(settings.end(), more.begin(), more.end());
    configure(settings);
    if (!IsSkipped()) stream_ = stream(0);
  }
  void TearDown() override {
    go_on();
    join();
    if (vmem::device::current_sim() != nullptr) {
      sim().set_hook(nullptr);
      for (void* s : streams_) sim().destroy_stream(s);
      // A lost device may answer before its copies have ended.
      if (sim().health(0).ok())
        for (const std::string& v : sim().violations()) ADD_FAILURE() << v;
    } else if (!streams_.empty()) {  // the test shut the library down, but its streams still exist
      std::unique_ptr<vmem::device::SimDevices> others;
      if (vmem::device::make_sim_devices({}, &others).ok())
        for (void* s : streams_) others->destroy_stream(s);
    }
    streams_.clear();
    SystemTest::TearDown();
  }
  static vmem::device::SimDevices& sim() { return *vmem::device::current_sim(); }
  void* stream(int device) {
    streams_.push_back(sim().create_stream(device));
    return streams_.back();
  }
  // Launches a kernel that stores a word; it first waits for `before`.
  static void launch_store(void* stream, uint64_t* at, uint64_t value, std::atomic<bool>* before = nullptr) {
    const vmem::core::Status s = sim().launch(stream, [=](vmem::device::SimKernel& k) {
      while (before != nullptr && !*before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (auto* w = reinterpret_cast<uint64_t*>(k.at(at, 8, true)); w != nullptr) *w = value;
    });
    ASSERT_TRUE(s.ok()) << s.text();
  }
  // The same, under a lease of its own that has ended on return.
  void store_on_device(uint64_t* at, uint64_t value) {
    ASSERT_EQ(vmem_acquire(at, 8, VMEM_READ | VMEM_WRITE, 0, stream_), 0) << vmem_last_error();
    launch_store(stream_, at, value);
    ASSERT_EQ(vmem_release(at, 8, stream_), 0) << vmem_last_error();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
    at_rest(at);
  }
  // Waits until the block has arrived where a lease brought it. A kernel may use it earlier, but
  // until then nothing can evict it, and other blocks leave in its place. This advice waits for
  // blocks in transition, and changes nothing.
  static void at_rest(uint64_t* at) {
    ASSERT_EQ(vmem_advise(at, 8, VMEM_ADVISE_UNSET_ACCESSED_BY, VMEM_HOST), 0) << vmem_last_error();
  }
  static bool bus(const uint64_t* at) {
    return raises_sigbus([&] { (void)*static_cast<const volatile uint64_t*>(at); });
  }
  static bool until(const std::function<bool()>& condition) {
    return vmem::test::eventually(condition, std::chrono::seconds(30));
  }
  static std::string said() { return vmem_last_error(); }
  // Runs on its own thread, which has ended when the test has.
  void aside(std::function<void()> what) { threads_.emplace_back(std::move(what)); }
  void join() {
    for (std::thread& t : threads_) t.join();
    threads_.clear();
  }

  // Stops the first thread that reaches the step, until go_on().
  static void stop_at(const char* step) {
    step_ = step;
    stopped_ = false;
    vmem::core::step_hook.store([](const char* s) {
      if (std::strcmp(s, step_) != 0 || stopped_.exchange(true)) return;
      while (stopped_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  static bool stopped() {
    return until([] { return stopped_.load(); });
  }
  static void go_on() {
    vmem::core::step_hook.store(nullptr);
    stopped_ = false;
  }

  void* stream_ = nullptr;           // of device 0
  size_t memory_bytes_ = 128 << 20;  // of each device that start() makes

 private:
  std::vector<void*> streams_;
  std::vector<std::thread> threads_;
  static inline std::atomic<const char*> step_{""};
  static inline std::atomic<bool> stopped_{false};
};

}  // namespace systest
