// The messages that name the process limit that a call met.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "core/process/mappings.h"

namespace vmem::core {
namespace {

// A soft limit that is far away: it refuses nothing here.
class SoftLimit {
 public:
  explicit SoftLimit(int resource) : resource_(resource) {
    getrlimit(resource_, &before_);
    rlimit far = before_;
    far.rlim_cur = std::min<rlim_t>(rlim_t{1} << 50, before_.rlim_max);
    setrlimit(resource_, &far);
  }
  ~SoftLimit() { setrlimit(resource_, &before_); }
  SoftLimit(const SoftLimit&) = delete;
  SoftLimit& operator=(const SoftLimit&) = delete;

 private:
  int resource_;
  rlimit before_{};
};

std::string words_of(int code) {
  return std::string(name_limit(error(code, "nothing to be had"), "a region").text());
}

TEST(Mappings, LimitsOfTheProcessAreNamedWithTheNumbers) {
  if (count_mappings().used_up()) GTEST_SKIP() << "this process has as many mappings as it may";
  EXPECT_EQ(words_of(EINVAL), "nothing to be had");
  {
    const SoftLimit data(RLIMIT_DATA);
    EXPECT_NE(words_of(ENOMEM).find("iB of data, of at most"), std::string::npos) << words_of(ENOMEM);
    EXPECT_NE(words_of(ENOMEM).find("`ulimit -d`"), std::string::npos) << words_of(ENOMEM);
    EXPECT_EQ(words_of(EINVAL), "nothing to be had");
  }
  const SoftLimit space(RLIMIT_AS);
  EXPECT_NE(words_of(ENOMEM).find("iB of address space, of at most"), std::string::npos) << words_of(ENOMEM);
}

}  // namespace
}  // namespace vmem::core
