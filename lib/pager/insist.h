// Steps at a device that there is no way around.
#pragma once

#include <unistd.h>

#include "core/log.h"
#include "core/status.h"
#include "device/device.h"

namespace vmem::pager {

// Unlocked. Takes the step again, however often it is refused, until it is done or the device is lost.
template <typename Step>
core::Status insist(device::Devices& devices, int d, const char* what, Step step) {
  constexpr unsigned kSayAfter = 1000;  // ms
  for (unsigned tries = 1;; ++tries) {
    core::Status s = step();
    if (s.ok() || !devices.health(d).ok()) return s;
    if (tries == kSayAfter) {
      core::log(core::Level::error, "%s is refused by device %d and tried on: %.*s", what, d,
                static_cast<int>(s.text().size()), s.text().data());
    }
    usleep(1000);
  }
}

}  // namespace vmem::pager
