#include <gtest/gtest.h>

#include <cerrno>
#include <string>

#include "api/page_size.h"

namespace vmem::api {
namespace {

TEST(PageSize, OfFourKiBIsTakenAndOthersAreRefusedWithTheNumbers) {
  EXPECT_TRUE(check_page_size(4096).ok());
  for (const size_t page : {size_t{8192}, size_t{16384}, size_t{65536}}) {
    const core::Status s = check_page_size(page);
    EXPECT_EQ(s.code(), -ENOTSUP);
    EXPECT_NE(std::string(s.text()).find(std::to_string(page)), std::string::npos) << s.text();
    EXPECT_NE(std::string(s.text()).find("4096"), std::string::npos) << s.text();
  }
}

}  // namespace
}  // namespace vmem::api
