// Which backend a value of setting device selects, on a machine that has all of them, some, or
// none.
#include <gtest/gtest.h>

#include <cerrno>
#include <set>
#include <string_view>
#include <vector>

#include "core/options.h"
#include "device/backend.h"
#include "device/sim/sim_device.h"

namespace vmem::device {

namespace {

using core::error;
using core::Status;

std::string log_of_asked;  // the makers that were called, a letter each
bool have_handles, have_managed, have_gpu;

Status refuse(const char* lacks) {
  return have_gpu ? error(ENODEV, "no device has %s", lacks) : error(ENODEV, "no NVIDIA GPU was found in this machine");
}
Status some_body(bool there, const char* lacks, std::unique_ptr<Devices>* out) {
  log_of_asked += *lacks;
  return there ? make_sim_devices(false, kUnit, out) : refuse(lacks);
}
Status handles(size_t unit, std::unique_ptr<Devices>* out) {
  if (have_handles && unit != kUnit) {
    log_of_asked += 'v';
    return make_sim_devices(true, unit, out);
  }
  return some_body(have_handles, "virtual memory management", out);
}
Status managed(size_t, std::unique_ptr<Devices>* out) {
  return some_body(have_managed, "concurrent managed access", out);
}
const Backend fake_handles = {"handles", true, nullptr, handles}, fake_managed = {"managed", true, nullptr, managed};

class DeviceChoice : public ::testing::Test {
 protected:
  void SetUp() override { on_a_machine_with(true, true); }
  static void on_a_machine_with(bool physical, bool unified, bool gpu = true) {
    have_handles = physical, have_managed = unified, have_gpu = gpu;
  }
  static std::vector<const Backend*> all() { return {&fake_handles, &fake_managed}; }
  Status make(const char* setting, std::vector<const Backend*> registry = all(), size_t unit = kUnit) {
    log_of_asked.clear();
    for (const Backend* backend : backends())
      if (!backend->automatic) registry.push_back(backend);
    return make_devices(setting, unit, registry, &made_, &why_);
  }
  std::unique_ptr<Devices> made_;
  std::string why_;
};

TEST_F(DeviceChoice, TheSettingTakesTheNamesOfTheRegistry) {
  core::Options options;
  std::set<std::string_view> names{kAutomatic, kNone};
  for (const Backend* backend : backends()) EXPECT_TRUE(names.insert(backend->name).second) << backend->name;
  for (const std::string_view name : names) EXPECT_TRUE(options.set("device", name).ok()) << name;
  EXPECT_FALSE(options.set("device", "cuda-handles").ok());
  EXPECT_EQ(make("cuda-handles").code(), -EINVAL);
}

TEST_F(DeviceChoice, ABackendThatTheLibraryLacksIsRefusedInItsWords) {
  const Backend absent = {"absent", true, [] { return error(ENODEV, "built without it"); }, nullptr};
  ASSERT_TRUE(make("auto", {&absent, &fake_managed}).ok());
  EXPECT_EQ(why_, "absent: built without it");
  const Status s = make("absent", {&absent});
  EXPECT_EQ(s.code(), -ENODEV);
  EXPECT_NE(s.text().find("built without it"), std::string_view::npos) << s.text();
}

TEST_F(DeviceChoice, AutoTakesTheFirstThatCanBeHadAndSaysWhyNotTheOther) {
  ASSERT_TRUE(make("auto").ok());
  EXPECT_EQ(log_of_asked, "v");
  EXPECT_NE(made_, nullptr);
  EXPECT_EQ(why_, "");
  on_a_machine_with(false, true);
  ASSERT_TRUE(make("auto").ok());
  EXPECT_EQ(log_of_asked, "vc");
  EXPECT_NE(made_, nullptr);
  EXPECT_EQ(why_, "handles: no device has virtual memory management");
  ASSERT_TRUE(make("auto", {&fake_managed}).ok());
  EXPECT_EQ(log_of_asked, "c");
}

TEST_F(DeviceChoice, WhereNoneCanBeHadAutoGoesWithout) {
  on_a_machine_with(false, false);
  ASSERT_TRUE(make("auto").ok());
  EXPECT_EQ(made_, nullptr);
  EXPECT_EQ(why_, "handles: no device has virtual memory management; managed: no device has concurrent managed access");
  on_a_machine_with(false, false, false);
  ASSERT_TRUE(make("auto").ok());
  EXPECT_EQ(why_, "no NVIDIA GPU was found in this machine");
  EXPECT_EQ(made_, nullptr);
}

// A named backend is made, or the error says why not and what else to set.
TEST_F(DeviceChoice, ABodyThatIsNamedIsHadOrAnError) {
  ASSERT_TRUE(make("handles").ok());
  EXPECT_EQ(log_of_asked, "v");
  ASSERT_TRUE(make("managed").ok());
  EXPECT_EQ(log_of_asked, "c");
  on_a_machine_with(false, true);
  const Status s = make("handles");
  EXPECT_EQ(s.code(), -ENODEV);
  EXPECT_EQ(log_of_asked, "v");
  EXPECT_EQ(made_, nullptr);
  for (const char* part : {"handles", "virtual memory management", "auto"})
    EXPECT_NE(s.text().find(part), std::string_view::npos) << s.text();
  on_a_machine_with(true, false);
  EXPECT_EQ(make("managed").code(), -ENODEV);
  EXPECT_EQ(made_, nullptr);
}

// The library must not silently take smaller blocks.
TEST_F(DeviceChoice, BlocksThatNoBodyHasAreAnError) {
  for (const char* setting : {"auto", "handles", "sim-handles"}) {
    ASSERT_TRUE(make(setting, all(), 4 * kUnit).ok()) << setting;
    EXPECT_EQ(made_->unit(), 4 * kUnit) << setting;
  }
  on_a_machine_with(false, true);
  for (const char* setting : {"auto", "managed", "sim"}) {
    const Status s = make(setting, all(), 4 * kUnit);
    EXPECT_EQ(s.code(), -EINVAL) << setting;
    EXPECT_EQ(made_, nullptr) << setting;
    for (const char* part : {"device_block_size", "8 MiB", "2 MiB"})
      EXPECT_NE(s.text().find(part), std::string_view::npos) << s.text();
  }
  on_a_machine_with(false, false, false);
  EXPECT_TRUE(make("auto", all(), 4 * kUnit).ok()) << "there are no blocks";
}

TEST_F(DeviceChoice, SimulatedDevicesHaveTheViewOfTheBodyTheyAreLike) {
  ASSERT_TRUE(make("sim").ok());
  EXPECT_STREQ(made_->name(), "sim");
  EXPECT_EQ(made_->cpu_view(), CpuView::unified);
  ASSERT_TRUE(make("sim-handles").ok());
  EXPECT_STREQ(made_->name(), "sim-handles");
  EXPECT_EQ(made_->cpu_view(), CpuView::split);
  ASSERT_TRUE(make("none").ok());
  EXPECT_EQ(made_, nullptr);
}

}  // namespace

}  // namespace vmem::device
