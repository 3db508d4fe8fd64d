#include "core/log.h"

#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <new>
#include <utility>

#include "core/mutex.h"
#include "core/outside_lock.h"
#include "core/signals.h"
#include "core/step.h"
#include "core/text.h"

namespace vmem::core {

namespace {

constexpr size_t kLine = 1024;                // longest line, with its terminating zero
constexpr size_t kNotice = 80;                // longest line that counts dropped lines
constexpr std::chrono::seconds kPatience{1};  // longest wait for a sink that does not return
constexpr uint64_t kSecond = 1000000000;      // ns between two lines of one Often
// Polling interval; time that a call has to deliver its own lines.
constexpr unsigned kLookUs = 200, kCallUs = 100 * 1000;

// Lines are numbered from 1. Lines up to `done` are delivered. `taken` is in the sink if it differs
// from `done`. Lines up to `put` wait in `room`, each as a Head and its characters.
struct Head {
  uint16_t length;
  uint16_t level;
};
struct Lines {
  Mutex mutex;  // leaf, held while a line is copied
  uint64_t put VMEM_GUARDED_BY(mutex) = 0, taken VMEM_GUARDED_BY(mutex) = 0, done VMEM_GUARDED_BY(mutex) = 0;
  uint64_t urgent VMEM_GUARDED_BY(mutex) = 0;   // the last line that no call will deliver
  uint64_t stuck VMEM_GUARDED_BY(mutex) = 0;    // a line that settle_log() waited for in vain
  uint64_t dropped VMEM_GUARDED_BY(mutex) = 0;  // lines dropped after the last one in `room`
  size_t first VMEM_GUARDED_BY(mutex) = 0, used VMEM_GUARDED_BY(mutex) = 0;
  LogSink sink VMEM_GUARDED_BY(mutex) = nullptr;
  void* user VMEM_GUARDED_BY(mutex) = nullptr;
  bool delivering VMEM_GUARDED_BY(mutex) = false;  // a thread takes lines out and calls the sink
  bool has_thread VMEM_GUARDED_BY(mutex) = false;
  char room[kLogRoom] VMEM_GUARDED_BY(mutex) = {};

  uint64_t last() const VMEM_REQUIRES(mutex) { return put + (dropped != 0 ? 1 : 0); }
};
constinit Lines lines;
constinit Often* first_often VMEM_GUARDED_BY(lines.mutex) = nullptr;
constinit std::atomic<bool> waiting{false};    // lines wait for delivery
constinit std::atomic<uint32_t> news{0};       // futex that wakes the log's thread
constinit thread_local bool in_sink = false;   // this thread delivers
constinit thread_local unsigned in_calls = 0;  // nested calls of the application
constinit thread_local bool call_logged = false;
constinit std::atomic<int> max_level{static_cast<int>(Level::warning)};
constinit std::atomic<bool> debugging{false};

// Locks the lines, with signals blocked: a handler that calls exit() would log again.
class VMEM_LOCKS(scoped_lockable) Held {
 public:
  Held() VMEM_ACQUIRE(lines.mutex) { lines.mutex.lock(); }
  ~Held() VMEM_RELEASE() { lines.mutex.unlock(); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  SignalsBlocked blocked_;
};

void default_sink(int level, const char* line) {
  static const char* const kNames[] = {"error", "warning", "info", "debug"};
  char buffer[1200];
  const int n = snprintf(buffer, sizeof buffer, "libvmem: %s: %s\n", kNames[level & 3], line);
  if (n <= 0) return;
  const size_t length = std::min(static_cast<size_t>(n), sizeof buffer - 1);
  if (::write(STDERR_FILENO, buffer, length) < 0) return;  // there is no other way to report it
}

void copy_in(const void* from, size_t bytes) VMEM_REQUIRES(lines.mutex) {
  const size_t at = (lines.first + lines.used) % kLogRoom, whole = std::min(bytes, kLogRoom - at);
  memcpy(lines.room + at, from, whole);
  memcpy(lines.room, static_cast<const char*>(from) + whole, bytes - whole);
  lines.used += bytes;
}

void copy_out(void* to, size_t bytes) VMEM_REQUIRES(lines.mutex) {
  const size_t whole = std::min(bytes, kLogRoom - lines.first);
  memcpy(to, lines.room + lines.first, whole);
  memcpy(static_cast<char*>(to) + whole, lines.room, bytes - whole);
  lines.first = (lines.first + bytes) % kLogRoom;
  lines.used -= bytes;
  if (lines.used == 0) lines.first = 0;  // reuse the same memory
}

void put(int level, const char* text, size_t length) VMEM_REQUIRES(lines.mutex) {
  const Head head{static_cast<uint16_t>(length), static_cast<uint16_t>(level)};
  copy_in(&head, sizeof head);
  copy_in(text, length);
  ++lines.put;
}

size_t say_dropped(char* text) VMEM_REQUIRES(lines.mutex) {
  const int n = snprintf(text, kNotice, "%llu lines of the log were dropped here",
                         static_cast<unsigned long long>(lines.dropped));
  return static_cast<size_t>(n);
}

// Queues a line, or counts it as dropped if it does not fit. The caller then calls wake_thread()
// without the lock.
void enter(int level, const char* text, size_t length) VMEM_REQUIRES(lines.mutex) {
  char notice[kNotice];
  const size_t noticed = lines.dropped != 0 ? say_dropped(notice) : 0;
  if (lines.used + 2 * sizeof(Head) + noticed + length > kLogRoom) {
    ++lines.dropped;
  } else {
    if (noticed != 0) put(static_cast<int>(Level::warning), notice, noticed);
    lines.dropped = 0;
    put(level, text, length);
    if (in_calls == 0 || in_sink) lines.urgent = lines.put;
  }
  call_logged = in_calls != 0;
  waiting.store(true, std::memory_order_relaxed);
}

uint64_t now_ns() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

void say_left_out(Often& often) VMEM_REQUIRES(lines.mutex) {
  if (often.left_out == 0) return;
  char text[kNotice + sizeof often.like];
  const int n = snprintf(text, sizeof text, ".. and %llu more since, like: %s",
                         static_cast<unsigned long long>(std::exchange(often.left_out, 0)), often.like);
  enter(often.level, text, static_cast<size_t>(n));
}

// Reports the lines left out of each Often that was last logged at least a second ago. Returns the
// time of the next report, or UINT64_MAX if no lines are left out. now = UINT64_MAX reports all.
uint64_t say_all_left_out(uint64_t now) VMEM_REQUIRES(lines.mutex) {
  uint64_t next = UINT64_MAX;
  for (Often* often = first_often; often != nullptr; often = often->next) {
    if (often->left_out == 0) continue;
    if (now - often->said_ns >= kSecond) {
      say_left_out(*often);
    } else {
      next = std::min(next, often->said_ns + kSecond);
    }
  }
  return next;
}

// Counts this line as left out if one was logged within the last second.
bool leave_out(Often& often, uint64_t now, bool* first) VMEM_REQUIRES(lines.mutex) {
  if (often.said_ns == 0 || now - often.said_ns >= kSecond) return false;
  *first = ++often.left_out == 1;
  return true;
}

// Starts an interval: later lines are counted.
void begin_often(Often& often, uint64_t now) VMEM_REQUIRES(lines.mutex) {
  say_left_out(often);
  often.said_ns = now;
  if (std::exchange(often.listed, true)) return;
  often.next = first_often;
  first_often = &often;
}

// Keeps the line as the example of those left out, cut between characters.
void note_often(Often& often, int level, const char* text, size_t length) VMEM_REQUIRES(lines.mutex) {
  size_t n = std::min(length, sizeof often.like - 1);
  while (n != length && n != 0 && (static_cast<unsigned char>(text[n]) & 0xc0) == 0x80) --n;
  memcpy(often.like, text, n);
  often.like[n] = '\0';
  often.level = level;
}

// Takes the next line, of at most kLine bytes. Returns false if there is none.
bool take(int* level, char* text) VMEM_REQUIRES(lines.mutex) {
  if (lines.used == 0) {
    if (lines.dropped == 0) return false;
    say_dropped(text);
    lines.dropped = 0;
    *level = static_cast<int>(Level::warning);
    ++lines.put;
  } else {
    Head head;
    copy_out(&head, sizeof head);
    copy_out(text, head.length);
    text[head.length] = '\0';
    *level = head.level;
  }
  ++lines.taken;
  waiting.store(lines.used != 0 || lines.dropped != 0, std::memory_order_relaxed);
  return true;
}

long futex(int op, uint32_t value, const timespec* most) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&news), op | FUTEX_PRIVATE_FLAG, value, most, nullptr, 0);
}

void wake_thread() {
  news.fetch_add(1, std::memory_order_release);
  futex(FUTEX_WAKE, 1, nullptr);
}

// Formats a line without the lock, then queues it. `often` is its class, or nullptr. Another thread
// may have logged a line of the class since the caller's check, so this one may be left out. Lines
// are counted only once one of the class is queued; otherwise settle_log() would find no line to
// wait for.
void say(Often* often, Level level, const char* format, va_list args) {
  char text[kLine];
  const int n = vsnprintf(text, sizeof text, format, args);
  if (n < 0) return;
  // Paths and names may hold anything.
  const size_t length = make_printable(text, std::min(static_cast<size_t>(n), sizeof text - 1));
  step("log.printed");
  bool wakes = true;
  {
    const Held held;
    const uint64_t now = often != nullptr ? now_ns() : 0;
    if (often == nullptr || !leave_out(*often, now, &wakes)) {
      if (often != nullptr) begin_often(*often, now);
      if (often != nullptr) note_often(*often, static_cast<int>(level), text, length);
      enter(static_cast<int>(level), text, length);
    }
  }
  if (wakes) wake_thread();
}

// Waits for news, until the given time.
void wait_for_news(uint32_t seen, uint64_t until_ns) {
  const uint64_t now = now_ns(), most = until_ns - std::min(now, until_ns);
  const timespec time{static_cast<time_t>(most / kSecond), static_cast<long>(most % kSecond)};
  if (most != 0) futex(FUTEX_WAIT, seen, until_ns == UINT64_MAX ? nullptr : &time);
}

// Returns false if another thread delivers, or if this one is in the sink.
bool begin_delivery() {
  must_be_outside("the sink of the log");
  if (in_sink) return false;
  const Held held;
  if (lines.delivering) return false;
  lines.delivering = in_sink = true;
  return true;
}

bool stderr_takes_more() {
  pollfd out{STDERR_FILENO, POLLOUT, 0};
  return poll(&out, 1, 0) == 1;
}

// Ends a begin_delivery(): delivers the lines up to number `until`, and leaves the rest to the
// log's thread. careful: deliver only to stderr, and only while it accepts more.
void deliver(uint64_t until, bool careful = false) {
  for (;;) {
    int level;
    char text[kLine];
    LogSink sink;
    void* user;
    const bool may = !careful || stderr_takes_more();
    {
      const Held held;
      lines.done = lines.taken;
      sink = lines.sink;
      user = lines.user;
      if (!may || (careful && sink != nullptr) || lines.done >= until || !take(&level, text)) {
        lines.delivering = in_sink = false;
        break;
      }
    }
    if (sink != nullptr) {
      const FaultsLetIn faults;
      sink(level, text, user);
    } else {
      default_sink(level, text);
    }
  }
  if (waiting.load(std::memory_order_relaxed)) wake_thread();
}

uint64_t last_line() {
  const Held held;
  return lines.last();
}

bool is_done(uint64_t line) {
  const Held held;
  return lines.done >= line;
}

// Body of the log's thread; never returns.
void deliver_for_ever() {
  for (;;) {
    const uint32_t seen = news.load(std::memory_order_acquire);
    bool urgent;
    uint64_t next;
    {
      const Held held;
      next = say_all_left_out(now_ns());
      urgent = lines.urgent > lines.taken || lines.dropped != 0;
    }
    if (waiting.load(std::memory_order_relaxed)) {
      if (!urgent) usleep(kCallUs);
      if (begin_delivery()) deliver(last_line());  // otherwise the delivering thread wakes us for the rest
    }
    wait_for_news(seen, next);
  }
}

// Only the forking thread exists in the child: deliveries of other threads never end there.
void after_fork_in_child() {
  new (&lines.mutex) Mutex;
  const Held held;
  lines.first = lines.used = 0;
  lines.dropped = 0;
  lines.taken = lines.done = lines.put;
  lines.sink = nullptr;
  lines.delivering = lines.has_thread = false;
  waiting.store(false);
  for (Often* often = first_often; often != nullptr; often = often->next) often->said_ns = often->left_out = 0;
}

void prepare_fork() {
  static std::atomic<bool> prepared{false};
  if (!prepared.exchange(true)) pthread_atfork(nullptr, nullptr, after_fork_in_child);
}

void wait_until(std::chrono::steady_clock::time_point end, uint64_t line) {
  while (!is_done(line) && std::chrono::steady_clock::now() < end) usleep(kLookUs);
}

uint64_t replace_sink(LogSink sink, void* user) {
  const Held held;
  lines.sink = sink;
  lines.user = user;
  for (Often* often = first_often; often != nullptr; often = often->next) often->said_ns = 0;
  return lines.taken;
}

}  // namespace

void set_log_sink(LogSink sink, void* user) {
  prepare_fork();
  {
    const Held held;
    say_all_left_out(UINT64_MAX);
  }
  flush_log();
  const uint64_t line = replace_sink(sink, user);
  while (!in_sink && !is_done(line)) usleep(kLookUs);
}

void set_log_sink_at_exit(LogSink sink, void* user) {
  const uint64_t line = replace_sink(sink, user);
  if (!in_sink) wait_until(std::chrono::steady_clock::now() + kPatience, line);
}

void leave_sink() {
  if (!in_sink) return;
  const Held held;
  lines.sink = nullptr;
  lines.done = lines.taken;
  lines.delivering = false;
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
  va_list args;
  va_start(args, format);
  say(nullptr, level, format, args);
  va_end(args);
}

void log_often(Often& often, Level level, const char* format, ...) {
  if (static_cast<int>(level) > max_level.load(std::memory_order_relaxed)) return;
  bool left_out = false, first = false;
  {
    const Held held;
    left_out = leave_out(often, now_ns(), &first);
  }
  if (left_out) {
    if (first) wake_thread();  // it has to report the count later
    return;
  }
  va_list args;
  va_start(args, format);
  say(&often, level, format, args);
  va_end(args);
}

Status start_log_thread(StartThread* start_thread) {
  prepare_fork();
  {
    const Held held;
    if (lines.has_thread) return {};
    lines.has_thread = true;
  }
  std::thread thread;
  if (Status s = start_thread("vmem-log", deliver_for_ever, &thread); !s.ok()) {
    const Held held;
    lines.has_thread = false;
    return s;
  }
  thread.detach();
  return {};
}

void begin_call_that_logs() {
  ++in_calls;
}

bool end_call_that_logs() {
  if (--in_calls != 0 || !call_logged) return false;
  call_logged = false;
  return !in_sink;
}

void log_of_call_waits() {
  call_logged = in_calls != 0;
}

void deliver_log_of_call() {
  if (begin_delivery()) return deliver(last_line());
  if (in_sink) return;
  {
    const Held held;
    lines.urgent = lines.put;
  }
  wake_thread();
}

void flush_log() {
  for (const uint64_t line = last_line(); !in_sink && !is_done(line);) {
    if (begin_delivery()) {
      deliver(line);
    } else {
      usleep(kLookUs);
    }
  }
}

void settle_log() {
  must_be_outside("the sink of the log");
  if (in_sink) return;
  uint64_t line;
  bool to_stderr;
  {
    const Held held;
    line = lines.last();
    to_stderr = lines.sink == nullptr;
    if (lines.done >= line || lines.stuck > lines.done || (!to_stderr && !lines.has_thread)) return;
    lines.urgent = lines.put;
  }
  wake_thread();
  for (const auto end = std::chrono::steady_clock::now() + kPatience; std::chrono::steady_clock::now() < end;) {
    if (to_stderr && begin_delivery()) deliver(line, true);
    if (is_done(line)) return;
    usleep(kLookUs);
  }
  const Held held;
  if (lines.done < line) lines.stuck = lines.done + 1;
}

void deliver_log_at_exit(bool locks) {
  uint64_t line;
  bool wait;
  {
    const Held held;
    say_all_left_out(UINT64_MAX);
    line = lines.last();
    lines.urgent = lines.put;
    wait = !in_sink && lines.stuck <= lines.done && (!locks || (lines.sink != nullptr && lines.has_thread));
  }
  for (const auto end = std::chrono::steady_clock::now() + kPatience; wait && !is_done(line);) {
    if (!locks && begin_delivery()) {
      deliver(line);
    } else if (std::chrono::steady_clock::now() > end) {
      const Held held;
      lines.stuck = lines.done + 1;
      break;
    } else {
      wake_thread();
      usleep(kLookUs);
    }
  }
  log_to_stderr();
}

void log_to_stderr() {
  {
    const Held held;
    say_all_left_out(UINT64_MAX);
  }
  for (;;) {
    int level;
    char text[kLine];
    {
      const Held held;
      if (!take(&level, text)) return;
    }
    default_sink(level, text);
  }
}

bool in_log_sink() {
  return in_sink;
}

}  // namespace vmem::core
