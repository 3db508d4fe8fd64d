// How long a test waits for an event. Deadlines only catch events that never come: they are longer
// on a slow machine, and no deadline asserts speed.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>

namespace vmem::test {

// Returns how much slower this machine is than a quiet one, from 1 to 12: the greater of
// TEST_PATIENCE, which the runner has measured, and a count on the first call (instruments and
// emulation are slow on a quiet machine, too).
inline unsigned patience() {
  static const unsigned measured = [] {
    const char* said = getenv("TEST_PATIENCE");
    const auto start = std::chrono::steady_clock::now();
    std::atomic<uint64_t> n{0};
    while (n.fetch_add(1) < 2000000) continue;  // 10 ms
    const auto took = std::chrono::steady_clock::now() - start;
    const auto counted = static_cast<unsigned long>(took / std::chrono::milliseconds(20)) + 1;
    const unsigned long most = std::max(said != nullptr ? strtoul(said, nullptr, 10) : 1, counted);
    return static_cast<unsigned>(std::clamp<unsigned long>(most, 1, 12));
  }();
  return measured;
}

// Scales a deadline for a quiet machine to this machine.
template <typename Duration>
Duration patiently(Duration quiet) {
  return quiet * patience();
}

// Polls the condition every `pause`; returns whether it became true. `quiet` must be ample on a
// quiet machine.
template <typename Condition>
bool eventually(Condition condition, std::chrono::milliseconds quiet = std::chrono::seconds(20),
                std::chrono::milliseconds pause = std::chrono::milliseconds(5)) {
  const auto end = std::chrono::steady_clock::now() + patiently(quiet);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return condition();
    std::this_thread::sleep_for(pause);
  }
  return true;
}

}  // namespace vmem::test
