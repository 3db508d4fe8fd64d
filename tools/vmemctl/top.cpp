// vmemctl top: a live status. Plain ANSI: the alternate screen, each frame drawn over the last one.
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <deque>
#include <iterator>
#include <set>
#include <utility>

#include "commands.h"
#include "history.h"
#include "view.h"

namespace vmemctl {

namespace {

volatile sig_atomic_t stopped = 0, suspended = 0;

// Sets up the terminal and restores it in every case. Signals that end or stop the program or
// report a new size are delivered only while it waits for a key.
class Screen {
 public:
  Screen() {
    tcgetattr(STDIN_FILENO, &before_);
    sigset_t held;
    sigemptyset(&held);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGTSTP, SIGWINCH}) sigaddset(&held, signal);
    sigprocmask(SIG_BLOCK, &held, &waiting_);
    struct sigaction action {};
    action.sa_handler = [](int) { stopped = 1; };
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
    action.sa_handler = [](int) { suspended = 1; };
    sigaction(SIGTSTP, &action, nullptr);
    action.sa_handler = [](int) {};
    sigaction(SIGWINCH, &action, nullptr);
    enter();
  }
  ~Screen() { leave(); }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;
  void draw(const std::vector<std::string>& lines, size_t rows) {
    printf("\033[H");
    for (size_t i = 0; i < std::min(lines.size(), rows); ++i)
      printf("%s\033[K%s", lines[i].c_str(), i + 1 < rows ? "\r\n" : "");
    printf("\033[J");
    fflush(stdout);
  }
  // Waits for a key at most this long, or until a signal. Returns true if there is input, or its
  // end.
  bool key(double seconds) {
    pollfd fd{STDIN_FILENO, POLLIN, 0};
    const double whole = std::floor(std::max(0.0, seconds));
    const timespec time{static_cast<time_t>(whole), static_cast<long>((std::max(0.0, seconds) - whole) * 1e9)};
    const bool readable = ppoll(&fd, 1, &time, &waiting_) > 0 && (fd.revents & (POLLIN | POLLHUP)) != 0;
    if (suspended != 0) suspend();
    return readable;
  }

 private:
  void enter() {
    termios raw = before_;
    raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
    tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    printf("\033[?1049h\033[?25l");
  }
  void leave() {
    printf("\033[?25h\033[?1049l");
    fflush(stdout);
    tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }
  // Stops the process as SIGTSTP does, with the terminal restored while it is stopped.
  void suspend() {
    suspended = 0;
    leave();
    struct sigaction by_itself {
    }, ours{};
    by_itself.sa_handler = SIG_DFL;
    sigaction(SIGTSTP, &by_itself, &ours);
    raise(SIGTSTP);
    sigset_t held;
    sigprocmask(SIG_SETMASK, &waiting_, &held);  // the process stops here
    sigprocmask(SIG_SETMASK, &held, nullptr);
    sigaction(SIGTSTP, &ours, nullptr);
    enter();
  }

  termios before_{};
  sigset_t waiting_{};  // signals that are blocked outside of waits
};

// Draws the newest values that fit.
std::string bars(const std::deque<double>& values, size_t width) {
  const size_t n = std::min(values.size(), width);
  return sparkline({values.end() - static_cast<std::ptrdiff_t>(n), values.end()});
}

struct Look {
  std::vector<Process> before, now;
  std::string refused;  // a line about what is not shown, or ""
};

// "vmemctl status has all: 7 publications are FORGED, by users 1001, 1002; 2 problems: .."
std::string refused_words(const Found& found) {
  constexpr size_t kUsers = 3;
  std::set<uid_t> users;
  for (const Refused& f : found.forged) users.insert(f.user);
  std::string out;
  size_t told = 0;
  for (const uid_t user : users) {
    if (++told > kUsers) break;
    out += (told > 1 ? ", " : "") + std::to_string(user);
  }
  if (users.size() > kUsers) out += " and " + std::to_string(users.size() - kUsers) + " more";
  if (!users.empty())
    out = std::to_string(found.forged.size()) + (found.forged.size() == 1 ? " publication is" : " publications are") +
          " FORGED, by " + (users.size() == 1 ? "user " : "users ") + out;
  if (!found.problems.empty()) {
    const size_t n = found.problems.size();
    out += (out.empty() ? "" : "; ") + std::to_string(n) + (n == 1 ? " problem: " : " problems: ") +
           printable(found.problems.front());
  }
  return out.empty() ? out : "vmemctl status has all: " + out;
}

std::vector<std::string> frame(const Look& look, const Histories& histories, ViewOptions options, size_t rows) {
  double read = 0, written = 0, in = 0, out = 0;
  uint64_t host = 0, device = 0;
  std::vector<std::string> lines;
  size_t count = 0;
  for (const Process& p : look.now) {
    if (!is_wanted(p, options.filter)) continue;
    ++count;
    const Process* earlier = same_process(look.before, p);
    const Rates r = earlier != nullptr ? rates(*earlier, p) : Rates();
    read += r.ssd_read, written += r.ssd_written, in += r.to_device, out += r.from_device;
    host += p.now.header.stats.host_bytes, device += p.now.header.stats.device_bytes;
    options.regions = std::max<size_t>(3, rows);
    // Show the faults of this frame, if there were any.
    Process shown = p;
    if (earlier != nullptr) {
      const auto fresh = difference(earlier->now.header.fault, p.now.header.fault);
      if (quantile_ns(fresh, 1) != 0) shown.now.header.fault = fresh;
    }
    lines.emplace_back();
    std::vector<std::string> text = view(shown, r, options);
    if (const Histories::Rows* h = histories.of(p); h != nullptr && h->read.size() > 1) {
      const size_t width = (options.columns - std::min<size_t>(options.columns, 45)) / 3;
      text.insert(text.begin() + 1, column("  history   read " + bars(h->read, width) + "  written " +
                                               bars(h->written, width) + "  faults " + bars(h->faults, width),
                                           options.columns));
    }
    for (std::string& line : text) lines.push_back(std::move(line));
  }
  const std::string head = std::to_string(count) + (count == 1 ? " process" : " processes") + ", host " +
                           bytes(static_cast<double>(host)) + ", device " + bytes(static_cast<double>(device)) +
                           "; SSD read " + bytes_per_second(read) + ", written " + bytes_per_second(written) +
                           "; to devices " + bytes_per_second(in) + ", from " + bytes_per_second(out);
  const std::vector<std::string> heads = folded(head, options.columns, 2);
  if (!look.refused.empty()) lines.insert(lines.begin(), column(look.refused, options.columns));
  lines.insert(lines.begin(), heads.begin(), heads.end());
  return lines;
}

// The state that keys change.
class Pane {
 public:
  explicit Pane(const TopOptions& options) : filter_(options.filter) {
    for (size_t i = 0; i < std::size(kSorts); ++i)
      if (options.sort == kSorts[i]) sort_ = i;
  }
  size_t sort() const { return sort_; }
  const std::string& filter() const { return filter_; }
  // Returns the part of `lines` visible in `rows` rows, the keys' line first.
  std::vector<std::string> visible(const std::vector<std::string>& lines, size_t columns, size_t rows) {
    page_ = rows > 1 ? rows - 1 : 1;
    const size_t last = lines.size() > page_ ? lines.size() - page_ : 0;
    at_ = std::min(at_, last);
    std::string keys = asking_ ? "filter: " + printable(filter_) + "_"
                               : std::string("q quits, arrows scroll, s sorts (") + kSorts[sort_] + "), / filters" +
                                     (filter_.empty() ? "" : " (" + printable(filter_) + ")");
    if (last != 0) keys += "; " + std::to_string(at_ + 1) + " of " + std::to_string(last + 1);
    std::vector<std::string> out{column(keys, columns)};
    for (size_t i = at_; i < std::min(lines.size(), at_ + page_); ++i) out.push_back(lines[i]);
    return out;
  }
  // Returns false if the user asked to quit.
  bool keys(std::string_view text) {
    while (!text.empty()) {
      size_t used = 1;
      if (asking_) {
        ask(text[0]);
      } else if (text.starts_with("\033[")) {
        used = 3;
        if (text.starts_with("\033[A")) up(1);
        if (text.starts_with("\033[B")) at_ += 1;
        if (text.starts_with("\033[5~")) up(page_), used = 4;
        if (text.starts_with("\033[6~")) at_ += page_, used = 4;
      } else if (!key(text[0])) {
        return false;
      }
      text.remove_prefix(std::min(used, text.size()));
    }
    return true;
  }

 private:
  void up(size_t n) { at_ -= std::min(at_, n); }
  bool key(char c) {
    switch (c) {
      case 'q':
      case 'Q':
        return false;
      case 'k':
        up(1);
        break;
      case 'j':
        at_ += 1;
        break;
      case 'b':
        up(page_);
        break;
      case ' ':
        at_ += page_;
        break;
      case 'g':
        at_ = 0;
        break;
      case 'G':
        at_ = SIZE_MAX / 2;
        break;
      case 's':
        sort_ = (sort_ + 1) % std::size(kSorts);
        break;
      case '/':
        asking_ = true;
        filter_.clear();
        break;
      default:
        break;
    }
    return true;
  }
  void ask(char c) {
    if (c == '\r' || c == '\n') {
      asking_ = false;
    } else if (c == '\033') {
      asking_ = false;
      filter_.clear();
    } else if (c == '\177' || c == '\b') {
      while (!filter_.empty() && (filter_.back() & 0xc0) == 0x80) filter_.pop_back();  // the rest of a character
      if (!filter_.empty()) filter_.pop_back();
    } else if (static_cast<unsigned char>(c) >= ' ' && filter_.size() < 64) {
      filter_ += c;
    }
    at_ = 0;
  }

  size_t at_ = 0, sort_ = 0, page_ = 1;
  bool asking_ = false;
  std::string filter_;
};

double seconds_now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

}  // namespace

int top(const Common& common, const TopOptions& options) {
  std::string refused;
  const auto look = [&] {
    if (options.pid != 0) return std::vector<Process>{find_process(common, options.pid)};
    Found found = vmemctl::look(common, 0);
    refused = refused_words(found);
    return std::move(found.processes);
  };
  const Clock::time_point start = Clock::now();
  std::vector<Process> before = look();
  if (options.once || common.json) {
    wait_since(start, std::min(options.interval, 60.0));
    const std::vector<Process> now = look();
    if (!common.json) {
      const Pane pane(options);
      const ViewOptions shown{static_cast<size_t>(options.columns), 0, pane.sort(), true, pane.filter()};
      for (const std::string& line : frame({before, now, refused}, {}, shown, vmem::publish::kMaxRegions)) {
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
  Pane pane(options);
  Histories histories;
  Look seen{std::move(before), {}, {}};
  double next = 0;
  for (;;) {
    if (seconds_now() >= next) {
      if (!seen.now.empty()) seen.before = std::move(seen.now);
      seen.now = look();
      seen.refused = refused;
      histories.add(seen.before, seen.now);
      next = seconds_now() + std::min(options.interval, 3600.0);
    }
    winsize size{};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) size.ws_col = 80, size.ws_row = 24;
    const auto lines =
        frame(seen, histories, {size.ws_col, 0, pane.sort(), true, pane.filter()}, vmem::publish::kMaxRegions);
    screen.draw(pane.visible(lines, size.ws_col, size.ws_row), size.ws_row);
    const bool typing = screen.key(next - seconds_now());
    if (stopped != 0) return kDone;
    if (!typing) continue;
    char typed[64];
    const ssize_t n = read(STDIN_FILENO, typed, sizeof typed);
    if (n <= 0 || !pane.keys({typed, static_cast<size_t>(n)})) return kDone;
  }
}

}  // namespace vmemctl
