// Progress messages of the examples if stderr is no terminal: a file takes its place.
#include "common/progress.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <regex>
#include <string>

#include "common/patience.h"

namespace {

class ErrorFile {
 public:
  ErrorFile() : file_(memfd_create("stderr", MFD_CLOEXEC)), before_(dup(2)) { dup2(file_, 2); }
  ErrorFile(const ErrorFile&) = delete;
  ErrorFile& operator=(const ErrorFile&) = delete;
  ~ErrorFile() {
    dup2(before_, 2);
    close(before_);
    close(file_);
  }
  std::string text() const {
    char bytes[4096];
    const ssize_t n = pread(file_, bytes, sizeof bytes, 0);
    return {bytes, static_cast<size_t>(std::max<ssize_t>(n, 0))};
  }
  bool says(const char* line) const { return std::regex_search(text(), std::regex(line)); }

 private:
  int file_, before_;
};

TEST(Progress, IsSaidAtOnceAndASecondLater) {
  const ErrorFile error;
  Progress progress("sorting", 200);
  EXPECT_EQ(error.text(), "sorting: 0 %, 0 s\n");
  progress.add(100);
  EXPECT_TRUE(vmem::test::eventually([&] { return error.says("\nsorting: 50 %, [0-9]+ s\n"); }));
  // Each object prints its second line before its tenth second, unless the machine stops for that
  // long.
  EXPECT_TRUE(vmem::test::eventually([] {
    const ErrorFile another;
    const Progress early("merging", 1);
    return vmem::test::eventually([&] { return another.says("\nmerging: 0 %, [0-9]+ s\n"); }) &&
           another.says("\nmerging: 0 %, [1-9] s\n");
  }));
}

TEST(Progress, WithoutATotalHowLongItTookSoFar) {
  const ErrorFile error;
  const Progress progress("reading keys");
  EXPECT_EQ(error.text(), "reading keys: 0 s\n");
}

}  // namespace
