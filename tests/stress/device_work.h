// The devices of a stress test, and the kernels that run on them under leases. The devices are
// simulated, or real if tests/gpu/stress_work.cu is linked in (make gpu-tests).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "api/runtime.h"
#include "common.h"
#include "common/hooks.h"
#include "device/sim/sim_device.h"

namespace stress {

// Blocks leave from where they stand, as on kernels before 6.8, which cannot move pages.
inline void move_no_pages() {
  vmem::api::test_hooks().adjust_trap = [](vmem::trap::UserfaultOptions& options) { options.allow_move = false; };
}

// One operation on a register: a read, a write, or a swap. `begin` and `end` are 0 if a device
// cannot read the CPU's clock: the operation then lies between launch and synchronize.
struct RegisterOp {
  enum Kind : uint32_t { read, write, swap } kind = read;
  uint64_t value = 0;  // written
  uint64_t seen = 0;   // read
  uint64_t begin = 0, end = 0;
};

// A kernel that checks every 64th word of a part and, if `store`, changes those words.
struct Sweep {
  uint64_t* base = nullptr;
  size_t count = 0, first = 0;  // words; first: the number of base[0] in its region
  std::vector<uint64_t> want;   // expected words 0, 64, ..
  bool store = false;
  uint32_t version = 0;  // word i becomes version << 32 | (first + i)
  unsigned pause_us = 0;
  // The result: the first wrong word.
  size_t wrong_word = SIZE_MAX;
  uint64_t wrong_value = 0;
  bool ended = false;
};

// Thread-safe, with one thread for each stream. A begin_.. kernel reads and writes its argument
// until synchronize() returns; a stream has one such kernel at a time. Errors end the program.
class DeviceWork {
 public:
  virtual ~DeviceWork() = default;
  virtual int devices() const = 0;
  virtual void* create_stream(int device) = 0;
  virtual void destroy_stream(void* stream) = 0;
  virtual void begin_registers(void* stream, uint64_t* word, std::vector<RegisterOp>& ops, uint64_t (*now)()) = 0;
  virtual void begin_sweep(void* stream, Sweep& sweep) = 0;
  virtual void synchronize(void* stream) = 0;
  virtual std::vector<std::string> violations() { return {}; }
};

class SimWork final : public DeviceWork {
 public:
  // Construct before vmem_init. handles: devices with their own page tables.
  explicit SimWork(int devices, bool handles) : devices_(devices) {
    vmem::api::test_hooks().make_devices = [devices, handles](size_t unit,
                                                              std::unique_ptr<vmem::device::Devices>* out) {
      vmem::device::SimOptions options;
      options.devices = devices;
      options.handles = handles;
      options.unit = unit;
      std::unique_ptr<vmem::device::SimDevices> made;
      vmem::core::Status s = vmem::device::make_sim_devices(options, &made);
      *out = std::move(made);
      return s;
    };
  }
  int devices() const override { return devices_; }
  void* create_stream(int device) override { return sim().create_stream(device); }
  void destroy_stream(void* stream) override { sim().destroy_stream(stream); }
  void begin_registers(void* stream, uint64_t* word, std::vector<RegisterOp>& ops, uint64_t (*now)()) override {
    launch(stream, [word, &ops, now](vmem::device::SimKernel& kernel) {
      for (RegisterOp& o : ops) {
        auto* at = reinterpret_cast<uint64_t*>(kernel.at(word, 8, true));
        if (at == nullptr) return;
        std::atomic_ref<uint64_t> r(*at);
        o.begin = now();
        if (o.kind == RegisterOp::read) o.seen = r.load();
        if (o.kind == RegisterOp::write) r.store(o.value);
        if (o.kind == RegisterOp::swap) o.seen = r.exchange(o.value);
        o.end = now();
        if (o.value % 16 == 1) usleep(200);
      }
    });
  }
  void begin_sweep(void* stream, Sweep& s) override {
    launch(stream, [&s](vmem::device::SimKernel& kernel) {
      if (s.pause_us != 0) usleep(s.pause_us);
      for (size_t i = 0; i < s.count; i += 64) {
        auto* word = reinterpret_cast<uint64_t*>(kernel.at(s.base + i, 8, s.store));
        if (word == nullptr) return;
        if (*word != s.want[i / 64] && s.wrong_word == SIZE_MAX) s.wrong_word = i, s.wrong_value = *word;
        if (s.store) *word = uint64_t{s.version} << 32 | static_cast<uint32_t>(s.first + i);
      }
      s.ended = true;
    });
  }
  void synchronize(void* stream) override { must("synchronize", sim().synchronize(stream)); }
  std::vector<std::string> violations() override { return sim().violations(); }

 private:
  static vmem::device::SimDevices& sim() { return *vmem::device::current_sim(); }
  static void must(const char* what, const vmem::core::Status& s) {
    if (!s.ok()) differs("%s: %.*s", what, static_cast<int>(s.text().size()), s.text().data());
  }
  void launch(void* stream, vmem::device::SimFunction kernel) {
    must("launch", sim().launch(stream, std::move(kernel)));
  }

  const int devices_;
};

// Linked in by `make gpu-tests` only. Call before vmem_init; ends the program if there is no GPU.
__attribute__((weak)) std::unique_ptr<DeviceWork> make_cuda_work();

inline constexpr const char* kDevices = "none, sim, sim-handles, managed or handles: as setting device";
inline bool simulated(const std::string& device) {
  return device == "sim" || device == "sim-handles";
}
// Returns true if the device has its own page tables: the CPU may then use a block on it without a
// lease, beside the device.
inline bool separate(const std::string& device) {
  return device == "handles" || device == "sim-handles";
}
// devices: how many simulated ones.
inline std::unique_ptr<DeviceWork> make_device_work(const std::string& device, int devices) {
  if (device == "none") return nullptr;
  if (simulated(device)) return std::make_unique<SimWork>(devices, device == "sim-handles");
  if (device != "managed" && device != "handles") differs("--device %s: %s", device.c_str(), kDevices);
  if (make_cuda_work == nullptr)
    differs("--device %s: this program was built without CUDA; make gpu-tests", device.c_str());
  return make_cuda_work();
}

}  // namespace stress
