#include "core/log.h"

#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "core/text.h"

namespace vmem::core {

namespace {

constexpr uint32_t kTaken = 1, kLeft = 2;
std::atomic<uint32_t> sink_state{0};  // kTaken: protects sink and user, and is set while a line is delivered
LogSink sink = nullptr;
void* sink_user = nullptr;
constinit thread_local bool in_sink = false;  // this thread delivers a line, or is about to
std::atomic<int> max_level{static_cast<int>(Level::warning)};
std::atomic<bool> debugging{false};

void default_sink(int level, const char* line) {
  static const char* const kNames[] = {"error", "warning", "info", "debug"};
  char buffer[1200];
  const int n = snprintf(buffer, sizeof buffer, "libvmem: %s: %s\n", kNames[level & 3], line);
  if (n <= 0) return;
  const size_t length = std::min(static_cast<size_t>(n), sizeof buffer - 1);
  if (::write(STDERR_FILENO, buffer, length) < 0) return;  // nobody is left to tell
}

// False: whoever has it will not give it back.
bool take_sink() {
  in_sink = true;  // first: a signal handler may call exit() at any point
  uint32_t seen = sink_state.load(std::memory_order_relaxed);
  for (;;) {
    if ((seen & kTaken) == 0) {
      if (sink_state.compare_exchange_weak(seen, seen | kTaken, std::memory_order_acquire, std::memory_order_relaxed))
        return true;
    } else if ((seen & kLeft) != 0) {
      in_sink = false;
      return false;
    } else {
      sink_state.wait(seen, std::memory_order_relaxed);
      seen = sink_state.load(std::memory_order_relaxed);
    }
  }
}

void give_sink() {
  sink_state.fetch_and(~kTaken, std::memory_order_release);
  sink_state.notify_one();
  in_sink = false;
}

}  // namespace

void set_log_sink(LogSink new_sink, void* user) {
  const bool inside = in_sink;  // exit() was called in the sink, and a destructor takes it away
  const bool taken = !inside && take_sink();
  sink = new_sink;
  sink_user = user;
  if (taken) give_sink();
}

void leave_sink() {
  if (!in_sink) return;
  sink_state.fetch_or(kLeft, std::memory_order_relaxed);
  sink_state.notify_all();
}

void set_log_level(Level level) {
  max_level.store(static_cast<int>(level), std::memory_order_relaxed);
}

void set_debug(bool on) {
  debugging.store(on, std::memory_order_relaxed);
}

bool debug() {
  return debugging.load(std::memory_order_relaxed);
}

void log(Level level, const char* format, ...) {
  if (static_cast<int>(level) > max_level.load(std::memory_order_relaxed)) return;
  char line[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
  line[make_printable(line, strlen(line))] = '\0';  // paths and names are in it, and sinks print it
  if (in_sink || !take_sink()) return default_sink(static_cast<int>(level), line);
  if (sink == nullptr) {
    default_sink(static_cast<int>(level), line);
  } else {
    sink(static_cast<int>(level), line, sink_user);
  }
  give_sink();
}

}  // namespace vmem::core
