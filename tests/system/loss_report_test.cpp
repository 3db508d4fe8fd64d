// VMEM_DEBUG: after an illegal access libvmem prints which ranges were leased and which were
// absent, so that the missing lease can be found. On simulated devices, whose kernels get error 700
// as a GPU's do.
#include <mutex>

#include "device/sim/sim_device.h"
#include "support.h"

namespace {

using systest::SystemTest;
using vmem::device::SimDevices;
using vmem::device::SimKernel;

constexpr size_t kMiB = 1 << 20;

class LossReport : public SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    vmem::api::test_hooks().make_devices = [](size_t, std::unique_ptr<vmem::device::Devices>* out) {
      vmem::device::SimOptions options;
      options.memory_bytes = 128 * kMiB;
      std::unique_ptr<SimDevices> made;
      vmem::core::Status s = vmem::device::make_sim_devices(options, &made);
      *out = std::move(made);
      return s;
    };
    lines_.clear();
    vmem_log([](int, const char* line, void* user) { static_cast<LossReport*>(user)->add(line); }, this);
    configure({{"device_budget", "32MiB"}, {"host_budget", "96MiB"}});
  }
  void TearDown() override {
    vmem_set("debug", "off");
    SystemTest::TearDown();
  }
  static SimDevices& sim() { return *vmem::device::current_sim(); }
  // Leases the range and waits until its blocks have arrived. An acquire returns when their copies
  // are issued, and the loss of the device could otherwise find them in transition. Advice waits
  // for every block in transition.
  static void lease(std::byte* at, size_t size, unsigned access, void* stream) {
    ASSERT_EQ(vmem_acquire(at, size, access, 0, stream), 0) << vmem_last_error();
    ASSERT_EQ(vmem_advise(at, size, VMEM_ADVISE_UNSET_READ_MOSTLY, 0), 0) << vmem_last_error();
  }
  // A kernel that loads an unleased word.
  static void touch(void* stream, const std::byte* at) {
    ASSERT_TRUE(sim().launch(stream, [at](SimKernel& k) { k.at(at, 8, false); }).ok());
    sim().synchronize(stream).ignore();
  }
  std::vector<std::string> debug_lines() {
    vmem::core::flush_log();
    std::lock_guard lock(mutex_);
    std::vector<std::string> out;
    for (const std::string& line : lines_) {
      if (line.rfind("debug:", 0) == 0) out.push_back(line);
    }
    return out;
  }
  // Returns whether one line contains all of the words.
  bool says(const std::vector<std::string>& words) {
    for (const std::string& line : debug_lines()) {
      bool all = true;
      for (const std::string& word : words) all &= line.find(word) != std::string::npos;
      if (all) return true;
    }
    return false;
  }
  std::string everything() {
    std::string out;
    for (const std::string& line : debug_lines()) out += line + "\n";
    return out;
  }

 private:
  void add(const char* line) {
    std::lock_guard lock(mutex_);
    lines_.emplace_back(line);
  }
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

TEST_F(LossReport, NamesLiveLeasesRegionsAndTheRangesThatWereAbsent) {
  if (IsSkipped()) return;
  ASSERT_EQ(vmem_set("debug", "1"), 0) << vmem_last_error();
  vmem::region weights(16 * kMiB), cache(4 * kMiB);
  weights.name("weights");
  cache.name("cache");
  auto* w = static_cast<std::byte*>(weights.data());
  memset(w, 1, 12 * kMiB);
  weights.evict();
  void* stream = sim().create_stream(0);
  lease(w, 4 * kMiB, VMEM_READ, stream);
  lease(w, 2 * kMiB, VMEM_READ, stream);
  touch(stream, w + 8 * kMiB);
  EXPECT_EQ(vmem_acquire(w, 2 * kMiB, VMEM_READ, 0, stream), -EIO);
  EXPECT_TRUE(says({"device 0 is lost", "error 700", "2 regions", "4 MiB leased"})) << everything();
  EXPECT_TRUE(says({"region weights #", "16 MiB"})) << everything();
  EXPECT_TRUE(says({"region cache #"})) << everything();
  EXPECT_TRUE(says({"leased:", "offset 0 bytes, 2 MiB", "device 0", "READ", "acquired 2 times"})) << everything();
  EXPECT_TRUE(says({"leased:", "offset 2 MiB, 2 MiB", "acquired 1 times"})) << everything();
  EXPECT_TRUE(says({"not present:", "offset 4 MiB, 8 MiB", "on the SSD"})) << everything();
  EXPECT_TRUE(says({"not present:", "offset 12 MiB, 4 MiB", "never written"})) << everything();
  EXPECT_TRUE(says({"no lease"})) << everything();
  EXPECT_TRUE(says({"vmem_acquire() it before the launch"})) << everything();
  const size_t said = debug_lines().size();
  EXPECT_NE(vmem_acquire(w, 2 * kMiB, VMEM_READ, 0, stream), 0);
  EXPECT_EQ(debug_lines().size(), said) << "once a device";
  for (int i = 0; i < 2; ++i) vmem_release(w, 2 * kMiB, stream);
  vmem_release(w + 2 * kMiB, 2 * kMiB, stream);
  sim().destroy_stream(stream);
}

TEST_F(LossReport, AReleaseSeesTheLossToo) {
  if (IsSkipped()) return;
  ASSERT_EQ(vmem_set("debug", "on"), 0);
  vmem::region r(8 * kMiB);
  auto* at = static_cast<std::byte*>(r.data());
  void* stream = sim().create_stream(0);
  lease(at, 2 * kMiB, VMEM_WRITE, stream);
  touch(stream, at + 4 * kMiB);
  ASSERT_EQ(vmem_release(at, 2 * kMiB, stream), 0) << vmem_last_error();
  EXPECT_TRUE(says({"leased:", "offset 0 bytes, 2 MiB", "WRITE"})) << everything();
  EXPECT_TRUE(says({"not present:", "offset 2 MiB, 6 MiB", "never written"})) << everything();
  sim().destroy_stream(stream);
}

TEST_F(LossReport, IsSilentWithoutTheSetting) {
  if (IsSkipped()) return;
  vmem::region r(8 * kMiB);
  auto* at = static_cast<std::byte*>(r.data());
  void* stream = sim().create_stream(0);
  lease(at, 2 * kMiB, VMEM_READ, stream);
  touch(stream, at + 4 * kMiB);
  EXPECT_EQ(vmem_acquire(at, 2 * kMiB, VMEM_READ, 0, stream), -EIO);
  EXPECT_EQ(debug_lines().size(), 0u) << everything();
  vmem_release(at, 2 * kMiB, stream);
  sim().destroy_stream(stream);
}

TEST_F(LossReport, ManyScatteredRangesAreCutShortAndCounted) {
  if (IsSkipped()) return;
  ASSERT_EQ(vmem_set("debug", "on"), 0);
  vmem::region r(512 * kMiB);
  auto* at = static_cast<std::byte*>(r.data());
  for (size_t i = 0; i < r.size(); i += 4 * kMiB) at[i] = std::byte{1};  // every other block
  void* stream = sim().create_stream(0);
  lease(at, 2 * kMiB, VMEM_READ, stream);
  touch(stream, at + 4 * kMiB);
  EXPECT_EQ(vmem_acquire(at, 2 * kMiB, VMEM_READ, 0, stream), -EIO);
  EXPECT_TRUE(says({"more ranges not present"})) << everything();
  EXPECT_LE(debug_lines().size(), 72u);
  vmem_release(at, 2 * kMiB, stream);
  sim().destroy_stream(stream);
}

}  // namespace
