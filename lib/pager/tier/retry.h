// Repeats device steps that must succeed, and waits for copies.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "core/break.h"
#include "core/log.h"
#include "core/signals.h"
#include "core/status.h"
#include "device/stream_ops.h"

namespace vmem::pager {

// Threads that wait at exit for all work of a device, which may never end. They keep its Devices
// alive.
inline std::atomic<unsigned> drains{0};

// Unlocked. Repeats the step until it succeeds or the device is lost. Then takes it once more: a
// lost device refuses no step that frees what it had.
template <typename Step>
core::Status retry_until_done(device::StreamOps& devices, int d, const char* what, Step step) {
  constexpr unsigned kSayAfter = 1000;  // ms
  for (unsigned tries = 1;; ++tries) {
    core::Status s = step();
    if (s.ok()) return s;
    if (!devices.health(d).ok()) return step();
    if (tries == kSayAfter) {
      VMEM_LOG_OFTEN(core::Level::error, "%s is refused by device %d and tried again: %.*s", what, d,
                     static_cast<int>(s.text().size()), s.text().data());
    }
    usleep(1000);
  }
}

// Unlocked. Waits until a copy has ended, or its device is lost. If the ticket does not tell, waits
// for all work of the device.
inline core::Status wait_for_copy(device::StreamOps& devices, int d, const device::Ticket& ticket) {
  constexpr unsigned kDrainAfter = 100;  // ms
  unsigned tries = 0;
  return retry_until_done(devices, d, "waiting for a copy", [&] {
    core::Status s = devices.wait(ticket);
    if (!s.ok() && ++tries % kDrainAfter == 0 && devices.drain(d).ok()) return core::Status();
    return s;
  });
}

// Unlocked. Waits for a copy in a call of the application, unless that delays a signal: returns
// false if one has come; the copy continues. The copy may take as long as an application's stream
// is held that shares a queue with it.
inline bool wait_in_call(device::StreamOps& devices, const device::Ticket& ticket) {
  constexpr std::chrono::microseconds kWatch{1000};  // poll so long: a sleep would delay a short copy
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
