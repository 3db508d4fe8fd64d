// Shows a program's progress on stderr. On a terminal a bar moves twice a second; elsewhere a line
// appears at once, after a second, and every ten seconds. Without a total it shows the elapsed
// time. Used by the examples.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <thread>

class Progress {
 public:
  explicit Progress(const char* what, uint64_t total = 0)
      : what_(what), total_(total), start_(std::chrono::steady_clock::now()) {
    show();
    thread_ = std::thread([this] { tick(); });
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() {
    {
      std::lock_guard lock(mutex_);
      done_with_ = true;
    }
    ended_.notify_one();
    thread_.join();
    if (tty_) fprintf(stderr, "\r\033[K");
  }
  void add(uint64_t n) { done_.fetch_add(n, std::memory_order_relaxed); }

 private:
  void tick() {
    const auto every = tty_ ? std::chrono::milliseconds(500) : std::chrono::milliseconds(10000);
    auto next = std::min<std::chrono::milliseconds>(every, std::chrono::seconds(1));
    std::unique_lock lock(mutex_);
    for (; !ended_.wait_for(lock, next, [this] { return done_with_; }); next = every) show();
  }
  void show() const {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    if (total_ == 0) {
      fprintf(stderr, tty_ ? "\r%s: %.0f s" : "%s: %.0f s\n", what_, seconds);
      return;
    }
    const uint64_t done = std::min(done_.load(std::memory_order_relaxed), total_);
    const auto percent = static_cast<unsigned>(100.0 * static_cast<double>(done) / static_cast<double>(total_));
    if (!tty_) {
      fprintf(stderr, "%s: %u %%, %.0f s\n", what_, percent, seconds);
      return;
    }
    char bar[31];
    for (unsigned i = 0; i < 30; ++i) bar[i] = i * 100 / 30 < percent ? '#' : '.';
    bar[30] = '\0';
    fprintf(stderr, "\r%-10s [%s] %3u %%, %.0f s", what_, bar, percent, seconds);
  }
  const char* what_;
  const uint64_t total_;
  const std::chrono::steady_clock::time_point start_;
  std::atomic<uint64_t> done_{0};
  const bool tty_ = isatty(STDERR_FILENO) != 0;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_with_ = false;
  std::thread thread_;
};
