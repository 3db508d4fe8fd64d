// Shared by vmemctl's commands: exit codes, failures, text that is safe to print, a JSON writer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/text.h"

namespace vmemctl {

// vmemctl(1) documents them.
enum Exit : int {
  kDone = 0,
  kFailed = 1,     // refused by libvmem, or something essential is missing (doctor)
  kUsage = 2,      // the command line
  kAbsent = 3,     // no such process, no module
  kForbidden = 4,  // not permitted
  kTaken = 5,      // the port, or the file, is taken
};

struct Failure {
  Exit exit;
  std::string words;
};

struct Common {
  bool json = false;
  std::string folder;  // of publications; "" the usual ones
};

// Makes names printable: they come from untrusted processes.
using vmem::core::printable;
// "1.5 GiB", "0"
std::string bytes(double n);
std::string bytes_per_second(double n);
std::string duration(double seconds);
// Pads to `width` columns; longer text is cut.
std::string column(const std::string& text, size_t width, bool right = false);

// Writes one JSON text. Keys come from the program; strings are made printable.
class Json {
 public:
  Json& object() { return open('{', '}'); }
  Json& array() { return open('[', ']'); }
  Json& end();
  Json& key(std::string_view name);
  Json& value(std::string_view text);
  Json& value(const char* text) { return value(std::string_view(text)); }
  Json& value(uint64_t n) { return raw(std::to_string(n)); }
  Json& value(int n) { return raw(std::to_string(n)); }
  Json& value(uint32_t n) { return raw(std::to_string(n)); }
  Json& value(bool b) { return raw(b ? "true" : "false"); }
  Json& value(double d);
  Json& null() { return raw("null"); }
  template <typename T>
  Json& field(std::string_view name, const T& v) {
    return key(name).value(v);
  }
  const std::string& text() const { return out_; }

 private:
  Json& open(char begin, char close);
  Json& raw(std::string_view text);
  void comma();
  std::string out_, closers_;
  bool first_ = true, after_key_ = false;
};

}  // namespace vmemctl
