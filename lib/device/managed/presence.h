// Whether there is a GPU at all, and a driver for it: the first cause of a device tier that is not to be had.
#pragma once

#include <string>

namespace vmem::device {

enum class Presence {
  no_gpu,     // whether a driver is loaded or not
  no_driver,  // a GPU, which nobody drives
  driver,
};

// root: a prefix of /proc, /sys and /dev, for tests; "" for the machine's.
Presence gpu_presence(const std::string& root);

}  // namespace vmem::device
