// Lines of a text, by and by. Used by examples.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

class Lines {
 public:
  // most: bytes of a line. A file may have one that no memory would hold.
  Lines(const std::string& path, size_t most) : path_(path), most_(most), file_(fopen(path.c_str(), "re"), fclose) {
    if (file_ == nullptr) throw std::system_error(errno, std::generic_category(), path);
  }
  int fd() const { return fileno(file_.get()); }
  // The next line, without its end. False: there are no more. A file that cannot be read to its end is an exception,
  // and so is a line that is too long.
  bool next(std::string* line) {
    line->clear();
    ++number_;
    int c;
    while ((c = getc_unlocked(file_.get())) != EOF && c != '\n') {
      if (line->size() == most_)
        throw std::runtime_error(path_ + ", line " + std::to_string(number_) + " has more than " +
                                 std::to_string(most_) + " bytes");
      line->push_back(static_cast<char>(c));
    }
    if (ferror(file_.get()) != 0) throw std::system_error(errno, std::generic_category(), path_);
    return c == '\n' || !line->empty();
  }

 private:
  std::string path_;
  size_t most_;
  uint64_t number_ = 0;
  std::unique_ptr<FILE, int (*)(FILE*)> file_;
};
