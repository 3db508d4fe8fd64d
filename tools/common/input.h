// Input files of a program: regular files that really have the size they report and can be read
// repeatedly. Used by the examples.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace input {

// An argument or an input is wrong: the program ends with status 2 (common/command_line.h).
class Refused : public std::runtime_error {
 public:
  explicit Refused(const std::string& why) : std::runtime_error(without_nul(why)) {}

 private:
  // The reason may quote an input, and what() would end at a NUL in it.
  static std::string without_nul(std::string text) {
    std::replace(text.begin(), text.end(), '\0', '?');
    return text;
  }
};

// Names the wrong line of a text, and the reason.
inline Refused refused_line(const std::string& path, uint64_t line, const std::string& why) {
  return Refused(path + ", line " + std::to_string(line) + ": " + why);
}

// Why a file of this mode cannot be read repeatedly, as the end of a sentence; "" for a regular
// file.
inline std::string kind_words(mode_t mode) {
  constexpr const char* kOnce = ", which can be read only once: write what comes from it to a file, and give that";
  if (S_ISREG(mode)) return "";
  if (S_ISFIFO(mode)) return std::string("is a pipe") + kOnce;
  if (S_ISSOCK(mode)) return std::string("is a socket") + kOnce;
  if (S_ISDIR(mode)) return "is a folder, no ordinary file";
  return "is a device or a terminal, no ordinary file";
}

class File {
 public:
  // Refuses anything but a regular file, without opening it, and files of /proc and /sys, which
  // report size 0.
  explicit File(const std::string& path) : path_(path) {
    if (stat(path.c_str(), &status_) != 0) throw Refused(path + ": " + strerrordesc_np(errno));
    if (!S_ISREG(status_.st_mode)) throw Refused(path + " " + kind_words(status_.st_mode));
    fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd_ < 0) throw Refused(path + ": " + strerrordesc_np(errno));
    char byte;
    const bool is = fstat(fd_, &status_) == 0 && S_ISREG(status_.st_mode) &&
                    (status_.st_size == 0 || pread(fd_, &byte, 1, status_.st_size - 1) == 1) &&
                    pread(fd_, &byte, 1, status_.st_size) == 0;
    if (is) return;
    close(fd_);
    throw Refused(path + " says that it has " + std::to_string(status_.st_size) +
                  " bytes, and does not (a file of the kernel's, or one that grows): give a copy of it");
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(fd_); }
  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  uint64_t size() const { return static_cast<uint64_t>(status_.st_size); }
  const struct stat& status() const { return status_; }
  // A path to open this file again, even if its name now leads to another file.
  std::string again() const { return "/proc/self/fd/" + std::to_string(fd_); }
  // Reads `size` bytes at an offset into plain memory: a system call must not wait for a block of a
  // region.
  void read(void* to, size_t size, uint64_t at) const {
    for (size_t done = 0; done < size;) {
      const ssize_t n = pread(fd_, static_cast<char*>(to) + done, size - done, static_cast<off_t>(at + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw std::runtime_error(path_ + " could not be read: " + strerrordesc_np(errno));
      if (n == 0) throw changed();
      done += static_cast<size_t>(n);
    }
  }
  // For a file that is read several times: another user may own it and change it.
  void must_be_unchanged() const {
    struct stat now;
    const auto same = [](const timespec& a, const timespec& b) {
      return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
    };
    if (fstat(fd_, &now) != 0 || now.st_size != status_.st_size || !same(now.st_mtim, status_.st_mtim) ||
        !same(now.st_ctim, status_.st_ctim))
      throw changed();
  }
  std::runtime_error changed() const { return std::runtime_error(path_ + " was changed meanwhile"); }

 private:
  std::string path_;
  struct stat status_ {};
  int fd_ = -1;
};

}  // namespace input
