// The device tier on four simulated devices, which check every call at least as strictly as a GPU.
#include "device/sim/sim_device.h"
#include "device_suite.h"
#include "device_suite_calls.h"
#include "device_suite_views.h"

namespace systest {

namespace {

using vmem::device::SimDevices;
using vmem::device::SimKernel;

class SimApp final : public GpuApp {
 public:
  explicit SimApp(int devices, bool handles = false) : count_(devices), handles_(handles) {}
  int prepare() override {
    vmem::api::test_hooks().make_devices = [this](size_t unit, std::unique_ptr<vmem::device::Devices>* out) {
      vmem::device::SimOptions options;
      options.devices = count_;
      options.handles = handles_;
      options.unit = unit;
      options.memory_bytes = 128 * kMiB;
      std::unique_ptr<SimDevices> made;
      vmem::core::Status s = vmem::device::make_sim_devices(options, &made);
      *out = std::move(made);
      return s;
    };
    return count_;
  }
  void* stream(int device) override { return sim().create_stream(device); }
  void destroy(void* stream) override { sim().destroy_stream(stream); }
  void set(void* stream, uint64_t* words, size_t count, uint64_t first, uint64_t round) override {
    launch(stream, words, count, true, [=](uint64_t* w, size_t n, size_t at) {
      for (size_t i = first_stamped(first + at); i < n; i += kStampStride) w[i] = stamp(first + at + i, round);
    });
  }
  void check(void* stream, const uint64_t* words, size_t count, uint64_t first, uint64_t round) override {
    launch(stream, words, count, false, [=, this](const uint64_t* w, size_t n, size_t at) {
      size_t bad = 0;
      for (size_t i = first_stamped(first + at); i < n; i += kStampStride) bad += w[i] != stamp(first + at + i, round);
      wrong_ += bad;
    });
  }
  void check_zero(void* stream, const uint64_t* words, size_t count) override {
    launch(stream, words, count, false, [this](const uint64_t* w, size_t n, size_t) {
      size_t bad = 0;
      for (size_t i = 0; i < n; i += kStampStride) bad += w[i] != 0;
      wrong_ += bad;
    });
  }
  void stand_still(void* stream, std::atomic<uint32_t>* gate) override {
    sim()
        .launch(stream,
                [gate](SimKernel&) {
                  while (*gate == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                })
        .ignore();
  }
  std::atomic<uint32_t>* gate() override { return &gate_; }
  vmem::core::Status synchronize(void* stream) override { return sim().synchronize(stream); }
  uint64_t wrong() override { return wrong_; }
  void capture(void* stream, bool on) override { sim().capture(stream, on); }
  void lose(int device) override { sim().lose(device, "the test took it away"); }
  bool linked(int, int) override { return true; }
  std::vector<std::string> violations() override {
    return vmem::device::current_sim() == nullptr ? std::vector<std::string>() : sim().violations();
  }

 private:
  static SimDevices& sim() { return *vmem::device::current_sim(); }
  // In pieces, so that a kernel meets several blocks at different times.
  template <typename Word, typename Body>
  void launch(void* stream, Word* words, size_t count, bool store, Body body) {
    const auto s = sim().launch(stream, [=](SimKernel& kernel) {
      constexpr size_t kPiece = 256 << 10 >> 3;
      for (size_t at = 0; at < count; at += kPiece) {
        const size_t n = std::min(kPiece, count - at);
        auto* w = reinterpret_cast<uint64_t*>(kernel.at(words + at, n * 8, store));
        if (w == nullptr) return;
        body(w, n, at);
      }
    });
    EXPECT_TRUE(s.ok()) << s.text();
  }

  const int count_;
  const bool handles_;
  std::atomic<uint64_t> wrong_{0};
  std::atomic<uint32_t> gate_{0};
};

const GpuBackend kBackends[] = {
    {"sim", [](std::string*) -> std::unique_ptr<GpuApp> { return std::make_unique<SimApp>(4); }},
    {"handles", [](std::string*) -> std::unique_ptr<GpuApp> { return std::make_unique<SimApp>(4, true); }, "sim", true},
};
class SimDeviceTier : public DeviceTier {};

INSTANTIATE_TEST_SUITE_P(Sim, DeviceTierViews, ::testing::Values(kBackends[1]),
                         [](const auto& p) { return std::string(p.param.name); });
INSTANTIATE_TEST_SUITE_P(Sim, DeviceTierLoss, ::testing::ValuesIn(kBackends),
                         [](const auto& p) { return std::string(p.param.name); });
INSTANTIATE_TEST_SUITE_P(Sim, DeviceTier, ::testing::ValuesIn(kBackends),
                         [](const auto& p) { return std::string(p.param.name); });

// The thread sleeps because its block is in transition, and the block does not arrive: it is then
// served in host memory.
TEST_P(SimDeviceTier, ATouchOfABlockThatCannotBeMadeIsServedInHostMemory) {
  start();
  vmem::region r(16 * kMiB, 0);
  vmem::device::current_sim()->set_hook([](vmem::device::SimOp op, int, uintptr_t, size_t) {
    return op == vmem::device::SimOp::populate ? vmem::core::error(EIO, "as the test wants it") : vmem::core::Status();
  });
  vmem::core::step_hook.store(&wait_for_touch);
  touch_what_comes(r);
  EXPECT_EQ(r.query().device_bytes, 0u);
  vmem::device::current_sim()->set_hook(nullptr);
}
INSTANTIATE_TEST_SUITE_P(Sim, SimDeviceTier, ::testing::ValuesIn(kBackends),
                         [](const auto& p) { return std::string(p.param.name); });

}  // namespace

}  // namespace systest
