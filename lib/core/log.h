// One log for the whole library. Lines are complete sentences without a newline, and safe to print
// (core/text.h). The default sink writes warnings and errors to stderr.
//
// - Any thread may log, even under the pager's lock: a line goes into a queue of fixed size.
// - A thread that holds no lock of the library delivers lines later, in order, one at a time. It is
//   the thread whose call logged the line, when the call returns, or the log's own thread.
// - Lines that do not fit are counted, and the count is logged.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>

#include "core/status.h"

namespace vmem::core {

enum class Level : int { error = 0, warning = 1, info = 2, debug = 3 };

inline constexpr size_t kLogRoom = 256 << 10;  // bytes of queued lines

using LogSink = void (*)(int level, const char* line, void* user);

// Replaces the sink; nullptr restores the default. Lines logged before go to the old sink. Returns
// after no thread is inside the old sink, unless called from inside a sink.
void set_log_sink(LogSink sink, void* user);
// Same at exit, on a thread that may hold any lock: delivers nothing, and waits at most a second.
void set_log_sink_at_exit(LogSink sink, void* user);
// Called at exit. If this thread is delivering a line, the sink has called exit() and will not
// return. From here on lines of other threads go to the default sink, and no thread waits for this
// one.
void leave_sink();
// Sets the most verbose level that is delivered (VMEM_LOG: error, warning, info, debug). Default:
// warning.
void set_log_level(Level level);
// Setting `debug`: log more after an error than every log should hold. Off by default.
void set_debug(bool on);
bool debug();
void log(Level level, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Rate limit for a line that may come for every block or request, for example when a disk fails.
// The first is logged, then at most one a second, with a line between that counts those left out
// (`like` holds the last one logged). Replacing the sink resets the limit.
struct Often {  // owned by the log
  uint64_t said_ns = 0, left_out = 0;
  Often* next = nullptr;
  int level = 0;
  bool listed = false;
  char like[256] = {};
};
void log_often(Often& often, Level level, const char* format, ...) __attribute__((format(printf, 3, 4)));

// Starts the thread that delivers lines of library threads, by start_thread() of core/thread.h, whose
// threads log. Call once; the thread runs to the end of the process.
using StartThread = Status(const char* name, std::function<void()> body, std::thread* out);
Status start_log_thread(StartThread* start_thread);
// Brackets an application's call. Lines that it logs wait some time for deliver_log_of_call().
void begin_call_that_logs();
bool end_call_that_logs();  // true: the outermost call ends, and it has logged
// In a call: treats lines that a library thread logged for it as this thread's own.
void log_of_call_waits();
// Delivers the call's lines at its end. Call without a lock. Does not wait if another thread is
// delivering; that thread delivers these lines too.
void deliver_log_of_call();
// Returns when all lines logged before are delivered. Returns at once inside a sink.
void flush_log();
// Called before an access is answered with a signal that may end the process: waits until the line
// that explains it is delivered. Call without a lock. Waits at most a second, and not again while
// the sink is still busy with the same line.
void settle_log();
// For exit(): delivers the remaining lines. Waits at most a second for a sink that another thread
// is in; then the rest goes to stderr. `locks`: this thread may hold locks, so the log's own thread
// must deliver.
void deliver_log_at_exit(bool locks);
// Called before abort(): writes the remaining lines to stderr at once.
void log_to_stderr();
// True on a thread that is inside the sink. It holds no lock of the library, even if it is a
// library thread.
bool in_log_sink();

}  // namespace vmem::core

// Logs the line the first time it is reached in the process, and never again.
#define VMEM_LOG_ONCE(level, ...)                                           \
  do {                                                                      \
    static ::std::atomic<bool> vmem_said{false};                            \
    if (!vmem_said.exchange(true)) ::vmem::core::log((level), __VA_ARGS__); \
  } while (0)

// Each use has its own Often, which is one class of lines.
#define VMEM_LOG_OFTEN(level, ...)                             \
  do {                                                         \
    static constinit ::vmem::core::Often vmem_often;           \
    ::vmem::core::log_often(vmem_often, (level), __VA_ARGS__); \
  } while (0)
