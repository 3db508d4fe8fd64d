// Users in user namespaces: which numbers are users there.
#include <gtest/gtest.h>
#include <unistd.h>

#include "common/user_namespace.h"
#include "core/process/user.h"

namespace {

using namespace vmem::core;
using vmem::test::in_user_namespace;
using vmem::test::kNoUserNamespace;

constexpr uid_t kMaker = 61521, kOverflow = 65534;

TEST(CoreUser, WhereEveryUserHasANumberEachIsOne) {
  if (access("/proc/self/uid_map", R_OK) == 0 && uid_outside(kOverflow) != kOverflow)
    GTEST_SKIP() << "this is a user namespace itself";
  EXPECT_TRUE(is_one_user(kOverflow));
  EXPECT_TRUE(is_one_user(0));
  for (const uid_t user : {uid_t{0}, uid_t{1000}, kOverflow}) EXPECT_EQ(uid_outside(user), user);
}

TEST(CoreUser, WhoHasNoNumberInAUserNamespaceMayBeAnybody) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to give numbers to users";
  const int unmapped = in_user_namespace(kMaker, "", [] {
    if (geteuid() != kOverflow) return 1;
    if (is_one_user(kOverflow)) return 2;
    if (!is_one_user(1000)) return 3;
    return uid_outside(kOverflow) == kOverflow ? 0 : 4;
  });
  if (unmapped == kNoUserNamespace) GTEST_SKIP() << "user namespaces are not permitted here";
  EXPECT_EQ(unmapped, 0);
  // As in a container: 65534 is a user there, and so are all others.
  EXPECT_EQ(in_user_namespace(kMaker, "0 61521 1\n1 700000 65535\n",
                              [] {
                                if (is_one_user(kOverflow)) return 1;
                                if (!is_one_user(0) || !is_one_user(3)) return 2;
                                if (uid_outside(0) != kMaker || uid_outside(3) != 700002) return 3;
                                return uid_outside(70000) == 70000 ? 0 : 4;
                              }),
            0);
}

TEST(CoreUser, TheNumbersOfAnotherProcessesNamespaceAreFound) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to give numbers to users";
  const int ended = in_user_namespace(
      kMaker, "0 61521 1\n1 700000 9\n", [] { return 0; },
      [](pid_t process) {
        EXPECT_EQ(uid_of_namespace(process, 0), kMaker);
        EXPECT_EQ(uid_of_namespace(process, 9), 700008u);
        EXPECT_EQ(uid_of_namespace(process, 10), UINT32_MAX);
      });
  if (ended == kNoUserNamespace) GTEST_SKIP() << "user namespaces are not permitted here";
  EXPECT_EQ(ended, 0);
}

}  // namespace
