// Files that examples and tools make in folders of all users. Another user must not be able to
// predict their paths, or to redirect what is written.
#include "common/own_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "common/raw_disk.h"

namespace {

class OwnFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path().string() + "/vmem-own.XXXXXX";
    ASSERT_NE(mkdtemp(path_.data()), nullptr);
    ASSERT_EQ(chmod(path_.c_str(), 01777), 0);  // like /tmp
    const char* before = getenv("TMPDIR");
    before_ = before != nullptr ? before : "";
    setenv("TMPDIR", path_.c_str(), 1);
  }
  void TearDown() override {
    before_.empty() ? unsetenv("TMPDIR") : setenv("TMPDIR", before_.c_str(), 1);
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string at(const std::string& name) const { return path_ + "/" + name; }
  std::string text(const std::string& name) const {
    std::ifstream in(at(name));
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
  std::string path_, before_;
};

TEST_F(OwnFiles, APrivateFolderIsNobodyElsesAndGoesWithItsFiles) {
  std::string first;
  {
    const ownfiles::PrivateFolder a("vmem-sort"), b("vmem-sort");
    first = a.path();
    EXPECT_NE(a.path(), b.path()) << "a name that could be known beforehand";
    struct stat s {};
    ASSERT_EQ(stat(a.path().c_str(), &s), 0);
    EXPECT_EQ(s.st_mode & 07777, 0700u);
    const ownfiles::OwnFile file(a.path() + "/in");
    EXPECT_EQ(access(file.path().c_str(), F_OK), 0);
  }
  EXPECT_NE(access(first.c_str(), F_OK), 0);
}

TEST_F(OwnFiles, AFileIsNeverWrittenThroughALinkThatLaysReady) {
  std::ofstream(at("thesis")) << "text";
  const std::string part = at("out") + "." + std::to_string(getpid()) + ".0.part";
  ASSERT_EQ(symlink(at("thesis").c_str(), part.c_str()), 0);
  const ownfiles::OwnFile file(at("out"));
  EXPECT_NE(file.path(), part);
  ASSERT_EQ(symlink(at("thesis").c_str(), at("link").c_str()), 0);
  EXPECT_NE(rawdisk::fill(at("link"), 4096, 1), "");
  ASSERT_EQ(link(at("thesis").c_str(), at("hard").c_str()), 0);
  EXPECT_NE(rawdisk::fill(at("hard"), 4096, 1), "");
  ASSERT_EQ(mkfifo(at("fifo").c_str(), 0600), 0);
  EXPECT_NE(rawdisk::fill(at("fifo"), 4096, 1), "");
  EXPECT_EQ(text("thesis"), "text");
  EXPECT_EQ(rawdisk::fill(at("new"), 4096, 1), "");
  EXPECT_EQ(text("new").size(), 4096u);
}

TEST_F(OwnFiles, NothingStaysWhateverSignalEndsTheProgram) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGBUS, SIGPIPE, SIGXCPU, SIGXFSZ, SIGALRM, SIGVTALRM,
                           SIGUSR1, SIGUSR2, SIGABRT}) {
    const pid_t child = fork();
    if (child == 0) {
      for (int n = 1; n < 32; ++n) ::signal(n, SIG_DFL);
      ownfiles::handle_signals();
      const ownfiles::PrivateFolder folder("vmem-sort");
      const ownfiles::OwnFile in(folder.path() + "/in"), out(at("out"));
      raise(signal);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << strsignal(signal) << ": " << status;
    EXPECT_TRUE(std::filesystem::is_empty(path_)) << strsignal(signal);
  }
}

TEST_F(OwnFiles, WhatCameToBeThereMeanwhileIsNotReplaced) {
  std::string part;
  {
    ownfiles::OwnFile file(at("out"));
    part = file.path();
    std::ofstream(at("out")) << "somebody's";
    EXPECT_THROW(file.put_as_new(at("out")), std::system_error);
  }
  EXPECT_EQ(text("out"), "somebody's");
  EXPECT_NE(access(part.c_str(), F_OK), 0);
  ownfiles::OwnFile(at("new")).put_as_new(at("new"));
  EXPECT_EQ(access(at("new").c_str(), F_OK), 0);
}

TEST_F(OwnFiles, AFileIsOpenedAgainWhateverHasItsName) {
  std::ofstream(at("thesis")) << "text";
  const ownfiles::OwnFile file(at("out"));
  ASSERT_EQ(unlink(file.path().c_str()), 0);
  ASSERT_EQ(symlink(at("thesis").c_str(), file.path().c_str()), 0);
  std::ofstream(file.again()) << "result";
  EXPECT_EQ(text("thesis"), "text");
  char seen[6] = {};
  EXPECT_EQ(pread(file.fd(), seen, sizeof seen, 0), 6);
  EXPECT_EQ(std::string(seen, sizeof seen), "result");
}

TEST_F(OwnFiles, AFileMayBeItsOwnersAlone) {
  const ownfiles::OwnFile file(at("out"), 0600);
  struct stat s {};
  ASSERT_EQ(fstat(file.fd(), &s), 0);
  EXPECT_EQ(s.st_mode & 0777, 0600u);
}

TEST_F(OwnFiles, AnotherUsersFileIsNotTakenByRootNorByAnybody) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  constexpr uid_t kMallory = 61501, kAlice = 61502;
  std::ofstream(at("mallorys")) << "mine";
  ASSERT_EQ(chown(at("mallorys").c_str(), kMallory, kMallory), 0);
  ASSERT_EQ(chmod(at("mallorys").c_str(), 0666), 0);
  for (const uid_t user : {uid_t{0}, kAlice}) {
    const pid_t child = fork();
    if (child == 0) {
      if (user != 0 && (setgid(user) != 0 || setuid(user) != 0)) _exit(2);
      _exit(rawdisk::fill(at("mallorys"), 4096, 1).empty() ? 1 : 0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), 0) << user;
  }
  EXPECT_EQ(text("mallorys"), "mine");
}

}  // namespace
