// What moves from one device to another, named as it goes (Devices::migrate_all).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/status.h"

namespace vmem::device {

struct Range {
  uintptr_t address;
  size_t size;  // bytes
};

class Migration {
 public:
  // The next range; nothing: none for now. Asked while those before it are under way, and once more after the last has
  // ended.
  virtual std::optional<Range> next() = 0;
  // Of each that next() has named, in that order. Meanwhile those after it are under way.
  virtual void ended(Range range, core::Status status) = 0;

 protected:
  Migration() = default;
  Migration(const Migration&) = default;
  Migration& operator=(const Migration&) = default;
  ~Migration() = default;
};

}  // namespace vmem::device
