// Temporary files on the way to a result. They are removed however the program ends, except by
// SIGKILL. Used by the examples and by vmemctl bench.
#pragma once

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "common/input.h"

namespace ownfiles {

struct Slot {
  char path[PATH_MAX];
  std::atomic<bool> there{false};
};
inline Slot slots[4];
inline Slot folders[2];

// Removes the files, then raises the signal with its default action, so that the exit status shows
// it. Async-signal-safe.
inline void on_signal(int signal) {
  for (Slot& slot : slots) {
    if (slot.there.load()) unlink(slot.path);
  }
  for (Slot& slot : folders) {
    if (slot.there.load()) rmdir(slot.path);
  }
  struct sigaction standard = {};
  standard.sa_handler = SIG_DFL;
  sigaction(signal, &standard, nullptr);
  raise(signal);
}

// Installs on_signal(), also for SIGBUS (libvmem could not provide a block), SIGPIPE (the reader of
// the output has gone) and SIGXCPU, SIGXFSZ (a limit).
inline void handle_signals() {
  struct sigaction ours = {}, before;
  ours.sa_handler = on_signal;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGBUS, SIGPIPE, SIGXCPU, SIGXFSZ, SIGALRM, SIGVTALRM,
                           SIGUSR1, SIGUSR2, SIGABRT}) {
    if (sigaction(signal, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) sigaction(signal, &ours, nullptr);
  }
}

// Runs `make`, which uses the name of a result from the command line. A failure counts as a wrong
// command line.
template <typename Make>
decltype(auto) as_named(Make make) {
  try {
    return make();
  } catch (const std::runtime_error& e) {
    throw input::Refused(e.what());
  }
}

// Throws if the path exists: the result must not replace anything.
inline void must_be_new(const std::string& path) {
  if (access(path.c_str(), F_OK) == 0) throw std::system_error(EEXIST, std::generic_category(), path);
}

// Blocks signals during its life: between the creation of a file and its entry in a slot.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

// The folder for files whose name the user did not choose.
inline std::string temporary_place() {
  const char* tmp = secure_getenv("TMPDIR");
  return tmp != nullptr && tmp[0] != '\0' ? tmp : "/var/tmp";
}

// A new folder in `place` that only this user can enter, under an unpredictable name: in a folder
// of all users, another user could have put a link at a predictable name. The folder is removed at
// the end if it is empty.
class PrivateFolder {
 public:
  explicit PrivateFolder(const std::string& name, const std::string& place = temporary_place()) {
    for (Slot& slot : folders) {
      if (!slot.there.load()) slot_ = &slot;
    }
    path_ = place + "/" + name + ".XXXXXX";
    if (slot_ == nullptr || path_.size() + 1 > sizeof slot_->path)
      throw std::system_error(ENAMETOOLONG, std::generic_category(), path_);
    const NoSignals quiet;
    const int why = mkdtemp(path_.data()) == nullptr ? errno : 0;
    strcpy(slot_->path, path_.c_str());
    slot_->there = why == 0;
    if (why != 0) throw std::system_error(why, std::generic_category(), place);
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;
  ~PrivateFolder() {
    if (slot_->there.exchange(false)) rmdir(path_.c_str());
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  Slot* slot_ = nullptr;
};

// A new file beside `path`, named after it. It is removed at the end unless it was renamed to its
// final name or replaced another file.
class OwnFile {
 public:
  // mode: as for open().
  explicit OwnFile(const std::string& path, mode_t mode = 0666) {
    for (Slot& slot : slots) {
      if (!slot.there.load()) slot_ = &slot;
    }
    if (slot_ == nullptr || path.size() + 32 > sizeof slot_->path)
      throw std::system_error(ENAMETOOLONG, std::generic_category(), path);
    for (int n = 0; fd_ < 0; ++n) {
      path_ = path + "." + std::to_string(getpid()) + "." + std::to_string(n) + ".part";
      const NoSignals quiet;  // a file that existed before must not be removed by us
      fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode);
      const int why = errno;
      strcpy(slot_->path, path_.c_str());
      slot_->there = fd_ >= 0;
      if (fd_ >= 0) break;
      if (why != EEXIST || n == 100) throw std::system_error(why, std::generic_category(), path_);
    }
  }
  OwnFile(const OwnFile&) = delete;
  OwnFile& operator=(const OwnFile&) = delete;
  ~OwnFile() {
    close(fd_);
    if (!slot_->there.load()) return;
    unlink(path_.c_str());
    slot_->there = false;
  }
  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  // A path to open this file again, even if another user has replaced its name in a shared folder.
  std::string again() const { return "/proc/self/fd/" + std::to_string(fd_); }
  // Replaces `path` atomically and durably: an open of `path` finds the old file or the whole new
  // one.
  void put_in_place_of(const std::string& path) {
    if (fsync(fd_) != 0 || rename(path_.c_str(), path.c_str()) != 0)
      throw std::system_error(errno, std::generic_category(), path);
    named(path);
  }
  // Like put_in_place_of(), but fails with EEXIST if `path` exists; the existing file stays and
  // this one is removed.
  void put_as_new(const std::string& path) {
    int rc = fsync(fd_);
    if (rc == 0) {
      rc = renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, path.c_str(), RENAME_NOREPLACE);
      if (rc != 0 && (errno == EINVAL || errno == ENOSYS)) {  // not supported by this file system (NFS)
        rc = link(path_.c_str(), path.c_str());
        if (rc == 0) unlink(path_.c_str());
      }
    }
    if (rc != 0) throw std::system_error(errno, std::generic_category(), path);
    named(path);
  }

 private:
  void named(const std::string& path) {
    slot_->there = false;
    const size_t slash = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    if (const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); fd >= 0) {
      fsync(fd);
      close(fd);
    }
  }
  std::string path_;
  int fd_ = -1;
  Slot* slot_ = nullptr;
};

}  // namespace ownfiles
