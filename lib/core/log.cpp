#include "core/log.h"

#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "core/text.h"

namespace vmem::core {

namespace {

std::mutex sink_mutex;  // protects sink and user, and is held while a line is delivered
LogSink sink = nullptr;
void* sink_user = nullptr;
constinit thread_local bool in_sink = false;  // this thread delivers a line, and so holds sink_mutex
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

}  // namespace

void set_log_sink(LogSink new_sink, void* user) {
  std::unique_lock lock(sink_mutex, std::defer_lock);
  if (!in_sink) lock.lock();  // else exit() was called in the sink, and a destructor takes it away
  sink = new_sink;
  sink_user = user;
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
  if (in_sink) return default_sink(static_cast<int>(level), line);
  std::lock_guard lock(sink_mutex);
  if (sink == nullptr) return default_sink(static_cast<int>(level), line);
  in_sink = true;
  sink(static_cast<int>(level), line, sink_user);
  in_sink = false;
}

}  // namespace vmem::core
