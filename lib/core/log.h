// One log for the whole library. Lines are complete sentences without a newline, safe to print (core/text.h); the
// default sink writes warnings and errors to stderr. Any thread may log. The sink must not touch a region.
#pragma once

#include <atomic>

namespace vmem::core {

enum class Level : int { error = 0, warning = 1, info = 2, debug = 3 };

using LogSink = void (*)(int level, const char* line, void* user);

// nullptr restores the default sink. Returns after no thread is inside the old one.
void set_log_sink(LogSink sink, void* user);
// At exit: when this thread delivers a line, the sink called exit() and will not return. Lines of other threads go to
// the default sink from here on, and nobody waits for this one.
void leave_sink();
// The most talkative level that is delivered (VMEM_LOG: error, warning, info, debug). Default: warning.
void set_log_level(Level level);
// Setting debug: says more after an error than every log should hold. Off at first.
void set_debug(bool on);
bool debug();
void log(Level level, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace vmem::core

// Says it the first time this line is reached in the process, and never again.
#define VMEM_LOG_ONCE(level, ...)                                           \
  do {                                                                      \
    static ::std::atomic<bool> vmem_said{false};                            \
    if (!vmem_said.exchange(true)) ::vmem::core::log((level), __VA_ARGS__); \
  } while (0)
