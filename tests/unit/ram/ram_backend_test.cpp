// A backend that the library does not have, by its name and through the same registry as others.
#include <gtest/gtest.h>

#include "core/options.h"
#include "ram_bench.h"
#include "ram_devices.h"

namespace vmem::device::testing {

namespace {

// Kernels run at once, on the calling thread.
class RamBench : public Bench {
 public:
  RamBench() {
    std::string why;
    const core::Status s = make_devices("ram", kUnit, &devices_, &why);
    EXPECT_TRUE(s.ok()) << s.text();
  }
  Devices& devices() override { return *devices_; }
  void* stream(int) override { return nullptr; }
  void destroy(void*) override {}
  void set_current_device(int) override {}
  void add(void*, uint64_t* words, size_t count, uint64_t value) override {
    for (size_t i = 0; i < count; ++i) at(words)[i] += value;
  }
  void sum(void*, const uint64_t* words, size_t count, uint64_t* sum) override {
    *sum = 0;
    for (size_t i = 0; i < count; ++i) *sum += at(words)[i];
  }
  void stand_still(void*, std::atomic<uint32_t>*) override {}
  core::Status synchronize(void*) override { return {}; }
  void begin_capture(void*) override {}
  void end_capture(void*) override {}
  void reset(int) override {}
  uint64_t free_memory_slack() const override { return 0; }

 private:
  uint64_t* at(const uint64_t* word) {
    return reinterpret_cast<uint64_t*>(static_cast<RamDevices&>(*devices_).at(word));
  }
  BackendRegistration registration_{ram_backend};
  std::unique_ptr<Devices> devices_;
};

TEST(RamBackend, ItsNameIsAValueOfTheSettingWhileItIsRegistered) {
  core::Options options;
  EXPECT_EQ(options.set("device", "ram").code(), -EINVAL);
  {
    const BackendRegistration here(ram_backend);
    EXPECT_EQ(backends().back(), &ram_backend);
    VMEM_OK(options.set("device", "ram"));
    std::unique_ptr<Devices> made;
    std::string why;
    VMEM_OK(make_devices("ram", 4 * kUnit, &made, &why));
    EXPECT_EQ(made->unit(), 4 * kUnit);
    VMEM_REFUSED(EINVAL, make_devices("rom", kUnit, &made, &why));
  }
  EXPECT_EQ(options.set("device", "ram").code(), -EINVAL);
}

}  // namespace

std::unique_ptr<Bench> make_ram_bench(std::string*) {
  return std::make_unique<RamBench>();
}

}  // namespace vmem::device::testing
