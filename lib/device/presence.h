// Whether the machine has a GPU, and a driver for it. Without them there is no device tier.
#pragma once

#include <string>

namespace vmem::device {

enum class Presence {
  no_gpu,     // with or without a driver
  no_driver,  // a GPU without a driver
  driver,
};

// root: a prefix of /proc, /sys and /dev, for tests; "" for the machine's own.
Presence gpu_presence(const std::string& root);

}  // namespace vmem::device
