// Steps at a device that there is no way around, and waits for copies.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "core/break.h"
#include "core/log.h"
#include "core/status.h"
#include "core/thread.h"
#include "device/device.h"

namespace vmem::pager {

// Threads that wait, at exit, for all of a device's work, which may never end: its Devices stay for them.
inline std::atomic<unsigned> drains{0};

// Unlocked. Takes the step again, however often it is refused, until it is done or the device is lost; and once more
// then, since a device that is lost refuses no step that is to end what it had.
template <typename Step>
core::Status retry_until_done(device::Devices& devices, int d, const char* what, Step step) {
  constexpr unsigned kSayAfter = 1000;  // ms
  for (unsigned tries = 1;; ++tries) {
    core::Status s = step();
    if (s.ok()) return s;
    if (!devices.health(d).ok()) return step();
    if (tries == kSayAfter) {
      VMEM_LOG_OFTEN(core::Level::error, "%s is refused by device %d and tried on: %.*s", what, d,
                     static_cast<int>(s.text().size()), s.text().data());
    }
    usleep(1000);
  }
}

// Unlocked. Until a copy has ended, or its device is lost. One that does not tell ends with all the device's work.
inline core::Status wait_for_copy(device::Devices& devices, int d, const device::Ticket& ticket) {
  constexpr unsigned kDrainAfter = 100;  // ms
  unsigned tries = 0;
  return retry_until_done(devices, d, "waiting for a copy", [&] {
    core::Status s = devices.wait(ticket);
    if (!s.ok() && ++tries % kDrainAfter == 0 && devices.drain(d).ok()) return core::Status();
    return s;
  });
}

// Unlocked. The same in a call of the application's, for as long as no signal is kept out by it: false, one is, and the
// copy goes on. It may take as long as a stream of the application's is held that shares a queue with it.
inline bool wait_in_call(device::Devices& devices, const device::Ticket& ticket) {
  constexpr std::chrono::microseconds kWatch{1000};  // a copy of 32 MiB takes 610, to wake up 50 and more
  if (ticket == nullptr || !core::signals_deferred() || core::broken("signals_in_copies") || core::broken("copy_wait"))
    return true;
  const auto begun = std::chrono::steady_clock::now();
  unsigned pause = 50;  // us
  for (bool done = false;;) {
    if (!devices.poll(ticket, &done).ok() || done) return true;
    if (std::chrono::steady_clock::now() - begun < kWatch) {
      std::this_thread::yield();
      continue;
    }
    if (core::signals_have_come()) return false;
    usleep(pause);
    pause = std::min(pause + pause / 4, 1000u);
  }
}

}  // namespace vmem::pager
