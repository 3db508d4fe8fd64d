// The ranges that Devices::migrate_all moves between devices, named one by one while it runs.
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
  // Returns the next range, or nothing for now. Called while earlier ranges are under way, and once
  // more after the last has ended.
  virtual std::optional<Range> next() = 0;
  // Called for each range of next(), in that order, while later ranges are under way.
  virtual void ended(Range range, core::Status status) = 0;

 protected:
  Migration() = default;
  Migration(const Migration&) = default;
  Migration& operator=(const Migration&) = default;
  ~Migration() = default;
};

}  // namespace vmem::device
