// One log for the whole library. Lines are complete sentences without a newline, safe to print (core/text.h); the
// default sink writes warnings and errors to stderr. Any thread may log, also under the pager's lock: a line is put
// into memory of a fixed size, and delivered later, in order, one at a time, by a thread that holds no lock of the
// library. That is the one whose call logged it, when the call returns, or the log's own. Lines that find no room are
// counted, and the count is a line.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/status.h"

namespace vmem::core {

enum class Level : int { error = 0, warning = 1, info = 2, debug = 3 };

inline constexpr size_t kLogRoom = 256 << 10;  // bytes of lines that wait

using LogSink = void (*)(int level, const char* line, void* user);

// nullptr restores the default sink. What was logged before goes to the old one. Returns after no thread is inside
// that, unless it is called from inside a sink.
void set_log_sink(LogSink sink, void* user);
// The same at exit, on a thread that may hold any lock: delivers nothing, and waits for a second at most.
void set_log_sink_at_exit(LogSink sink, void* user);
// At exit: when this thread delivers a line, the sink called exit() and will not return. Lines of other threads go to
// the default sink from here on, and nobody waits for this one.
void leave_sink();
// The most talkative level that is delivered (VMEM_LOG: error, warning, info, debug). Default: warning.
void set_log_level(Level level);
// Setting debug: says more after an error than every log should hold. Off at first.
void set_debug(bool on);
bool debug();
void log(Level level, const char* format, ...) __attribute__((format(printf, 2, 3)));

// What may come for every block or request, as where a disk fails: said once, and then at most once a second, with a
// line in between that says how many were not ("like" is what was said). Who replaces the sink hears the next at once.
struct Often {  // the log's
  uint64_t said_ns = 0, left_out = 0;
  Often* next = nullptr;
  int level = 0;
  bool listed = false;
  char like[256] = {};
};
void log_often(Often& often, Level level, const char* format, ...) __attribute__((format(printf, 3, 4)));

// Starts the thread that delivers what threads of the library log. Once; it stays to the end of the process.
Status start_log_thread();
// Around a call of the application: what it logs is left to deliver_log_of_call(), for a while.
void begin_call_that_logs();
bool end_call_that_logs();  // true: the outermost one ends, and it has logged
// In a call, for which a thread of ours has logged: as if this one had.
void log_of_call_waits();
// At its end, without a lock. Does not wait for another thread that delivers: that one goes on with these lines.
void deliver_log_of_call();
// Returns when everything logged before is delivered. At once from inside a sink.
void flush_log();
// Before an access is answered with a signal that may end the process: waits until the line that says why is
// delivered, without a lock held. At most a second, and not again while the sink is still busy with the same line.
void settle_log();
// For exit(): delivers what is left, and waits for a second at most for a sink that another thread is in; then the
// rest goes to stderr. locks: this thread may hold some, so the log's own thread has to do it.
void deliver_log_at_exit(bool locks);
// Before abort(): what is left goes to stderr, at once.
void log_to_stderr();
// True on a thread that is inside the sink. It holds no lock of the library, whoever's thread it is.
bool in_log_sink();

}  // namespace vmem::core

// Says it the first time this line is reached in the process, and never again.
#define VMEM_LOG_ONCE(level, ...)                                           \
  do {                                                                      \
    static ::std::atomic<bool> vmem_said{false};                            \
    if (!vmem_said.exchange(true)) ::vmem::core::log((level), __VA_ARGS__); \
  } while (0)

// One Often for each place, which is one class of lines.
#define VMEM_LOG_OFTEN(level, ...)                             \
  do {                                                         \
    static constinit ::vmem::core::Often vmem_often;           \
    ::vmem::core::log_often(vmem_often, (level), __VA_ARGS__); \
  } while (0)
