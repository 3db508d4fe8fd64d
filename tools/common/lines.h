// Reads a text line by line. Used by the examples.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/input.h"

class Lines {
 public:
  // most: the longest line in bytes; a longer one might not fit into memory. Also accepts files
  // that can be read only once.
  Lines(const std::string& path, size_t most)
      : path_(path), most_(most), own_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY)), fd_(own_) {
    if (fd_ < 0) throw input::Refused(path + ": " + strerrordesc_np(errno));
  }
  // Reads from the file's beginning up to its size at open: a file that keeps growing would never
  // end.
  Lines(const input::File& file, size_t most)
      : path_(file.path()), most_(most), fd_(file.fd()), at_(0), end_(file.status().st_size) {}
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;
  ~Lines() {
    if (own_ >= 0) close(own_);
  }
  // Gets the next line, without its end. Returns false at the end of the file. Throws if the file
  // cannot be read or a line is too long.
  bool next(std::string* line) {
    line->clear();
    ++number_;
    for (;;) {
      if (used_ == filled_ && !fill()) return !line->empty();
      const char* const from = buffer_.data() + used_;
      const auto* end = static_cast<const char*>(memchr(from, '\n', filled_ - used_));
      const size_t n = end != nullptr ? static_cast<size_t>(end - from) : filled_ - used_;
      if (line->size() + n > most_)
        throw input::refused_line(path_, number_, "it has more than " + std::to_string(most_) + " bytes");
      line->append(from, n);
      used_ += n + (end != nullptr ? 1 : 0);
      if (end != nullptr) return true;
    }
  }
  // The number of the line that next() returned, from 1.
  uint64_t number() const { return number_; }

 private:
  bool fill() {
    ssize_t n;
    do {
      n = at_ < 0 ? read(fd_, buffer_.data(), buffer_.size())
                  : pread(fd_, buffer_.data(), std::min(buffer_.size(), static_cast<size_t>(end_ - at_)), at_);
    } while (n < 0 && errno == EINTR);
    if (n < 0) throw input::Refused(path_ + ": " + strerrordesc_np(errno));
    if (at_ >= 0) at_ += n;
    used_ = 0;
    filled_ = static_cast<size_t>(n);
    return n != 0;
  }
  std::string path_;
  size_t most_;
  int own_ = -1, fd_;
  off_t at_ = -1, end_ = 0;  // -1: read at the descriptor's own position
  std::vector<char> buffer_ = std::vector<char>(64 << 10);
  size_t used_ = 0, filled_ = 0;
  uint64_t number_ = 0;
};

// A line may end with CR and LF.
inline std::string_view without_cr(std::string_view line) {
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}
