// The simulated device is for tests: a library that is built without it says so.
#include <gtest/gtest.h>
#include <vmem/vmem.h>

#include <cerrno>
#include <cstring>

TEST(SimulatedDevice, IsRefusedByNameWhereTheLibraryHasNone) {
  for (const char* device : {"sim", "sim-handles"}) {
    ASSERT_EQ(vmem_set("device", device), 0) << vmem_last_error();
    const int rc = vmem_init();
    if (rc == 0) GTEST_SKIP() << "this library was built with SIM=yes";
    if (rc == -EPERM || rc == -ENOSYS) GTEST_SKIP() << vmem_last_error();
    EXPECT_EQ(rc, -ENODEV);
    EXPECT_NE(strstr(vmem_last_error(), "without the simulated device"), nullptr) << vmem_last_error();
    EXPECT_NE(strstr(vmem_last_error(), device), nullptr) << vmem_last_error();
  }
  EXPECT_EQ(vmem_set("device", "none"), 0) << vmem_last_error();
  EXPECT_EQ(vmem_init(), 0) << "nothing is left behind: " << vmem_last_error();
  vmem_shutdown();
}
