// vmemctl top: the same, live. Plain ANSI: the alternate screen, a frame drawn over the last one.
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "commands.h"
#include "view.h"

namespace vmemctl {

namespace {

volatile sig_atomic_t stopped = 0;

// The terminal as it was, whatever happens.
class Screen {
 public:
  Screen() {
    tcgetattr(STDIN_FILENO, &before_);
    termios raw = before_;
    raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
    tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    struct sigaction action {};
    action.sa_handler = [](int) { stopped = 1; };
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
    printf("\033[?1049h\033[?25l");
  }
  ~Screen() {
    printf("\033[?25h\033[?1049l");
    fflush(stdout);
    tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;
  void draw(const std::vector<std::string>& lines, size_t rows) {
    printf("\033[H");
    for (size_t i = 0; i < std::min(lines.size(), rows); ++i)
      printf("%s\033[K%s", lines[i].c_str(), i + 1 < rows ? "\r\n" : "");
    printf("\033[J");
    fflush(stdout);
  }

 private:
  termios before_{};
};

std::vector<std::string> frame(const std::vector<Process>& now, const std::vector<Process>& before, size_t columns,
                               size_t rows) {
  double read = 0, written = 0, in = 0, out = 0;
  uint64_t host = 0, device = 0;
  std::vector<std::string> lines;
  const size_t each = now.empty() ? 0 : std::max<size_t>(3, rows / now.size());
  for (const Process& p : now) {
    const Process* earlier = same_process(before, p);
    const Rates r = earlier != nullptr ? rates(*earlier, p) : Rates();
    read += r.ssd_read, written += r.ssd_written, in += r.to_device, out += r.from_device;
    host += p.now.header.stats.host_bytes, device += p.now.header.stats.device_bytes;
    lines.emplace_back();
    for (std::string& line : view(p, r, columns, each)) lines.push_back(std::move(line));
  }
  lines.insert(
      lines.begin(),
      column(std::to_string(now.size()) + " processes, host " + bytes(static_cast<double>(host)) + ", device " +
                 bytes(static_cast<double>(device)) + "; SSD read " + bytes_per_second(read) + ", written " +
                 bytes_per_second(written) + "; to devices " + bytes_per_second(in) + ", from " + bytes_per_second(out),
             columns));
  return lines;
}

}  // namespace

int top(const Common& common, const TopOptions& options) {
  std::vector<std::string> problems;
  const auto look = [&] {
    return options.pid != 0 ? std::vector<Process>{find_process(common, options.pid)}
                            : find_processes(common, true, 0, &problems);
  };
  std::vector<Process> before = look();
  if (options.once || common.json) {
    usleep(static_cast<useconds_t>(std::min(options.interval, 60.0) * 1e6));
    const std::vector<Process> now = look();
    if (!common.json) {
      for (const std::string& line : frame(now, before, 200, 1000)) {
        printf("%s\n", line.substr(0, line.find_last_not_of(' ') + 1).c_str());
      }
      return kDone;
    }
    Json json;
    json.object().key("processes").array();
    for (const Process& p : now) {
      const Process* earlier = same_process(before, p);
      write_process(json, p, earlier != nullptr ? rates(*earlier, p) : Rates());
    }
    printf("%s\n", json.end().end().text().c_str());
    return kDone;
  }
  if (isatty(STDIN_FILENO) == 0 || isatty(STDOUT_FILENO) == 0)
    throw Failure{kUsage, "top needs a terminal; --once prints one frame without one"};
  Screen screen;
  for (;;) {
    winsize size{};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) size.ws_col = 80, size.ws_row = 24;
    std::vector<Process> now = look();
    std::vector<std::string> lines = frame(now, before, size.ws_col, size.ws_row);
    lines.insert(lines.begin() + 1, column("q quits", size.ws_col));
    screen.draw(lines, size.ws_row);
    before = std::move(now);
    pollfd key{STDIN_FILENO, POLLIN, 0};
    poll(&key, 1, static_cast<int>(std::lround(std::min(options.interval, 3600.0) * 1000)));
    char c = 0;
    if (stopped != 0) return kDone;
    if ((key.revents & (POLLIN | POLLHUP)) != 0 && (read(STDIN_FILENO, &c, 1) <= 0 || c == 'q' || c == 'Q'))
      return kDone;
  }
}

}  // namespace vmemctl
