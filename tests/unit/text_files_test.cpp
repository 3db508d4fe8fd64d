// Input files of the examples, from any source: matrices (.npy) and texts by lines.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/edges.h"
#include "common/input.h"
#include "common/lines.h"
#include "common/npy.h"

namespace {

class TextFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path().string() + "/vmem-text.XXXXXX";
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::string write(const std::string& bytes) const {
    std::ofstream(folder_ + "/file", std::ios::binary) << bytes;
    return folder_ + "/file";
  }
  std::string folder_;
};

// Makes a file of version `version` that claims a header of `said` bytes (0: its true length).
std::string npy_file(const std::string& header, size_t data, char version = 1, uint32_t said = 0) {
  const uint32_t size = said != 0 ? said : static_cast<uint32_t>(header.size());
  std::string out = std::string("\x93NUMPY", 6) + version + '\0';
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) out += static_cast<char>(size >> (8 * i));
  return out + header + std::string(data, '\1');
}

std::string header(const std::string& type, const std::string& order, const std::string& shape) {
  return "{'descr': " + type + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

TEST_F(TextFiles, AMatrixIsWhatItsHeaderSaysAndNothingElseIs) {
  const std::string good = header("'<f4'", "False", "(2, 3)");
  for (const char version : {1, 2, 3}) {
    const npy::File file(write(npy_file(good, 24, version)));
    EXPECT_EQ(file.rows, 2u);
    EXPECT_EQ(file.columns, 3u);
  }
  const std::vector<std::string> wrong = {
      "",
      "\x93NUMPY",
      npy_file(good, 23),
      npy_file(good, 24, 4),
      npy_file(good, 24, 1, 60000),
      npy_file(good, 24, 2, 0xffffffff),
      npy_file(good, 24, 2, static_cast<uint32_t>(good.size()) | 0x1000000),
      npy_file(header("'<f8'", "False", "(2, 3)"), 48),
      npy_file(header("[('a', '<f4'), ('b', '<f8')]", "False", "(2, 3)"), 72),
      npy_file(header("'<f4'", "True", "(2, 3)"), 24),
      npy_file(header("'<f4'", "False", "(6,)"), 24),
      npy_file(header("'<f4'", "False", "(1, 2, 3)"), 24),
      npy_file(header("'<f4'", "False", "(-2, 3)"), 24),
      npy_file(header("'<f4'", "False", "(0, 3)"), 24),
      npy_file(header("'<f4'", "False", "(4294967295, 4294967295)"), 24),
      npy_file(header("'<f4'", "False", "(4611686018427387904, 4)"), 24),
      npy_file(header("'<f4'", "False", "(99999999999999999999999, 3)"), 24),
  };
  for (size_t i = 0; i < wrong.size(); ++i) EXPECT_THROW(npy::File{write(wrong[i])}, std::runtime_error) << i;
}

TEST_F(TextFiles, AMatrixIsNotWaitedForWhereAPipeHasTheName) {
  const std::string pipe = folder_ + "/pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THROW(npy::File{pipe}, input::Refused);
  EXPECT_THROW(npy::File{"/dev/zero"}, input::Refused);
}

TEST_F(TextFiles, LinesAreReadToTheLastAndNoLongerThanTheyMayBe) {
  Lines lines(write(std::string("one\n\ntwo\0three\nlast", 19)), 9);
  std::string line;
  for (const std::string& wanted :
       {std::string("one"), std::string(), std::string("two\0three", 9), std::string("last")}) {
    ASSERT_TRUE(lines.next(&line));
    EXPECT_EQ(line, wanted);
  }
  EXPECT_FALSE(lines.next(&line));
  Lines long_line(write("0123456789\n"), 9);
  EXPECT_THROW(long_line.next(&line), std::runtime_error);
  Lines endless("/dev/zero", 1 << 20);
  EXPECT_THROW(endless.next(&line), std::runtime_error);
}

// A pipe can be read only once: a second read would return nothing, and build another graph.
TEST_F(TextFiles, InputsAreOrdinaryFilesWithAsManyBytesAsTheySay) {
  const std::string pipe = folder_ + "/pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const auto why = [](const std::string& path) -> std::string {
    try {
      const input::File file(path);
      return "taken";
    } catch (const input::Refused& e) {
      return e.what();
    }
  };
  EXPECT_EQ(why(write("0 1\n")), "taken");
  EXPECT_EQ(why(write("")), "taken");
  EXPECT_NE(why(pipe).find("is a pipe, which can be read only once: write"), std::string::npos) << why(pipe);
  EXPECT_NE(why("/dev/zero").find("is a device"), std::string::npos);
  EXPECT_NE(why(folder_).find("is a folder"), std::string::npos);
  EXPECT_NE(why(folder_ + "/none").find("No such file"), std::string::npos);
  EXPECT_NE(why("/proc/self/maps").find("says that it has 0 bytes"), std::string::npos);
  if (access("/sys/kernel/mm/transparent_hugepage/enabled", R_OK) == 0) {
    EXPECT_NE(why("/sys/kernel/mm/transparent_hugepage/enabled").find("says that it has 4096"), std::string::npos);
  }
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  EXPECT_NE(why("/proc/self/fd/" + std::to_string(ends[0])).find("is a pipe"), std::string::npos);
  close(ends[0]);
  close(ends[1]);
}

TEST_F(TextFiles, EdgesAreRefusedOfAFileThatChangesWhileItIsRead) {
  const std::string path = write("0 1\n1 2\n");
  const input::File file(path);
  size_t seen = 0;
  EXPECT_EQ(edges::read(file, [&](uint32_t, uint32_t) { ++seen; }), 3u);
  EXPECT_EQ(seen, 2u);
  const auto change = [&](uint32_t, uint32_t) { std::ofstream(path, std::ios::app) << "2 3\n"; };
  EXPECT_THROW(edges::read(file, change), std::runtime_error);
  EXPECT_THROW(edges::read_plainly(file, change), std::runtime_error);
}

// The missing lines would pass for keys that do not exist.
TEST_F(TextFiles, LinesThatCannotBeReadAreNoEnd) {
  std::string line;
  Lines folder(folder_, 9);
  EXPECT_THROW(folder.next(&line), input::Refused);
  EXPECT_THROW(Lines(folder_ + "/none", 9), input::Refused);
}

}  // namespace
