// Matrices of 32-bit floats in NumPy's files (.npy, written by rows). Used by examples.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

namespace npy {

class File {
 public:
  explicit File(const std::string& path)
      : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), path);
    struct stat s;
    if (fstat(fd_, &s) != 0 || !S_ISREG(s.st_mode)) fail("is no ordinary file");
    unsigned char start[12];
    if (pread(fd_, start, sizeof start, 0) != sizeof start || memcmp(start, "\x93NUMPY", 6) != 0 || start[6] < 1 ||
        start[6] > 3)
      fail("is no .npy file");
    const size_t before = start[6] == 1 ? 10 : 12;
    size_t size = start[8] + 256u * start[9];
    if (start[6] != 1) size += 65536u * start[10] + 16777216u * start[11];
    if (size > kMostHeader) fail("has a header that no matrix needs");
    std::string header(size, ' ');
    if (pread(fd_, header.data(), size, static_cast<off_t>(before)) != static_cast<ssize_t>(size)) fail("is cut off");
    // As NumPy writes it. Of a structure the type would be only a part.
    if (header.find("'descr': '<f4',") == std::string::npos) fail("does not hold 32-bit floats (float32)");
    if (header.find("'fortran_order': False") == std::string::npos) fail("is written by columns (fortran_order)");
    const size_t shape = header.find("'shape': (");
    unsigned long long r = 0, c = 0;
    char end = 0;
    if (shape == std::string::npos || sscanf(header.c_str() + shape, "'shape': (%llu, %llu%c", &r, &c, &end) != 3 ||
        end != ')' || r == 0 || c == 0 || r > UINT32_MAX || c > UINT32_MAX)
      fail("holds no matrix of two dimensions");
    rows = r, columns = c;
    data_ = before + size;
    // In this order nothing of it wraps, whatever the shape is.
    if (static_cast<uint64_t>(s.st_size) < data_ || (static_cast<uint64_t>(s.st_size) - data_) / 4 / columns < rows)
      fail("is cut off");
  }
  // Makes a file that is there one of that shape.
  File(const std::string& path, size_t r, size_t c)
      : rows(r), columns(c), path_(path), fd_(open(path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), path);
    std::string header =
        "{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(r) + ", " + std::to_string(c) + "), }";
    header.resize((header.size() + 11 + 63) / 64 * 64 - 11, ' ');
    header = std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size() + 1) + '\0' + header + '\n';
    data_ = header.size();
    if (pwrite(fd_, header.data(), header.size(), 0) != static_cast<ssize_t>(header.size())) fail_io();
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(fd_); }
  // `count` elements of a row from a column on.
  void read(size_t row, size_t column, float* to, size_t count) const {
    if (pread(fd_, to, count * 4, at(row, column)) != static_cast<ssize_t>(count * 4)) fail_io();
  }
  void write(size_t row, size_t column, const float* from, size_t count) const {
    if (pwrite(fd_, from, count * 4, at(row, column)) != static_cast<ssize_t>(count * 4)) fail_io();
  }

  size_t rows = 0, columns = 0;

 private:
  static constexpr size_t kMostHeader = 64 << 10;

  off_t at(size_t row, size_t column) const { return static_cast<off_t>(data_ + (row * columns + column) * 4); }
  [[noreturn]] void fail(const char* what) {
    close(fd_);
    throw std::runtime_error(path_ + " " + what);
  }
  [[noreturn]] void fail_io() const {
    throw std::system_error(errno != 0 ? errno : EIO, std::generic_category(), path_);
  }
  std::string path_;
  int fd_;
  uint64_t data_ = 0;
};

}  // namespace npy
