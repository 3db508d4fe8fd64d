// Shared by the tests of vmemctl: this process uses libvmem, publishes in its own folder, and runs
// the tool.
#pragma once

#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "api/runtime.h"
#include "vmem/vmem.hpp"

namespace ctltest {

inline constexpr size_t kMiB = 1 << 20;

// A folder that is removed at the end of the test.
class TempFolder {
 public:
  TempFolder() {
    path_ = std::filesystem::temp_directory_path().string() + "/vmemctl-test.XXXXXX";
    EXPECT_NE(mkdtemp(path_.data()), nullptr) << path_;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path_ + "/" + name).parent_path());
    std::ofstream(path_ + "/" + name) << text;
  }

 private:
  std::string path_;
};

struct Ran {
  int status = -1;  // exit code; 128 + signal
  std::string out, err;
  nlohmann::json json() const { return nlohmann::json::parse(out); }
};

inline std::string tool() {
  const char* build = getenv("BUILD");
  return std::string(build != nullptr ? build : "build") + "/tools/vmemctl/vmemctl";
}

// A program that runs beside the test and is killed at its end.
class Running {
 public:
  // user: the user to run as; 0: our own.
  explicit Running(const std::vector<std::string>& words, uid_t user = 0) {
    int out[2] = {-1, -1}, err[2] = {-1, -1};
    EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(err, O_CLOEXEC), 0);
    std::vector<char*> argv;
    for (const std::string& w : words) argv.push_back(const_cast<char*>(w.c_str()));
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(out[1], 1);
      dup2(err[1], 2);
      close(open("/dev/null", O_RDONLY));
      if (user != 0 && (setgroups(0, nullptr) != 0 || setgid(user) != 0 || setuid(user) != 0)) _exit(126);
      execvp(argv[0], argv.data());
      _exit(127);
    }
    close(out[1]);
    close(err[1]);
    out_ = out[0];
    err_ = err[0];
  }
  ~Running() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(out_);
    close(err_);
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  pid_t pid() const { return pid_; }
  // Returns the next line of its output, or the rest if it ends.
  std::string line() {
    std::string text;
    char c = 0;
    while ((ended_ = read(out_, &c, 1) != 1) == false && c != '\n') text += c;
    return text;
  }
  // Waits for that line. Returns false if the program ends without it.
  bool says(const std::string& wanted) {
    while (!ended_) {
      if (line() == wanted) return true;
    }
    return false;
  }
  // Reads both outputs to the end and waits.
  Ran finish() {
    Ran ran;
    pollfd fds[2] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};
    while (fds[0].fd >= 0 || fds[1].fd >= 0) {
      poll(fds, 2, -1);
      for (int i = 0; i < 2; ++i) {
        if (fds[i].fd < 0 || fds[i].revents == 0) continue;
        char buffer[4096];
        const ssize_t n = read(fds[i].fd, buffer, sizeof buffer);
        if (n <= 0) {
          fds[i].fd = -1;
        } else {
          (i == 0 ? ran.out : ran.err).append(buffer, static_cast<size_t>(n));
        }
      }
    }
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    ran.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return ran;
  }
  void stop(int signal) const { kill(pid_, signal); }

 private:
  pid_t pid_ = -1;
  int out_ = -1, err_ = -1;
  bool ended_ = false;
};

inline Ran run(std::vector<std::string> words, uid_t user = 0) {
  return Running(words, user).finish();
}

// A process that uses libvmem, with one named region; vmemctl sees it in its own folder.
class Ctl : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("XDG_RUNTIME_DIR", temp_.path().c_str(), 1);
    vmem_shutdown();
    for (const auto& [name, value] : {std::pair{"host_budget", "64MiB"}, {"device", "none"}, {"publish", "on"}})
      ASSERT_EQ(vmem_set(name, value), 0) << vmem_last_error();
    const int rc = vmem_init();
    if (rc == -EPERM || rc == -ENOSYS) GTEST_SKIP() << vmem_last_error();
    ASSERT_EQ(rc, 0) << vmem_last_error();
  }
  void TearDown() override {
    vmem_shutdown();
    vmem_set("device", "auto");
    unsetenv("XDG_RUNTIME_DIR");
  }
  std::string folder() const { return temp_ / "vmem"; }
  // Runs vmemctl with these arguments, on our folder only.
  Ran ctl(const std::vector<std::string>& words, uid_t user = 0) const {
    std::vector<std::string> all{tool(), "--folder", folder()};
    all.insert(all.end(), words.begin(), words.end());
    return run(all, user);
  }
  static std::string me() { return std::to_string(getpid()); }
  // Returns the only process of a status, which is ours.
  nlohmann::json mine() const {
    const Ran ran = ctl({"status", "--json", "--seconds", "0", "--pid", me()});
    EXPECT_EQ(ran.status, 0) << ran.err;
    const nlohmann::json all = ran.json();
    EXPECT_EQ(all["processes"].size(), 1u);
    return all["processes"].at(0);
  }

  TempFolder temp_;
};

}  // namespace ctltest
