// vmemctl top on a terminal: its display, keys, changes of size, signals, and how it ends.
#include <pty.h>
#include <sys/ioctl.h>
#include <termios.h>

#include <algorithm>
#include <functional>

#include "common/patience.h"
#include "support.h"

namespace {

using namespace ctltest;

using Lines = std::vector<std::string>;

size_t width_of(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

// Runs top on a terminal of its own, which sends it signals. Its output is read as a terminal
// would, frame by frame.
class LiveTop {
 public:
  LiveTop(const std::string& folder, const std::string& interval, winsize size) : size_(size) {
    const std::string program = tool();
    pid_ = forkpty(&screen_, nullptr, nullptr, &size);
    if (pid_ == 0) {
      execl(program.c_str(), program.c_str(), "--folder", folder.c_str(), "top", "--interval", interval.c_str(),
            nullptr);
      _exit(127);
    }
    EXPECT_GT(pid_, 0);
    fcntl(screen_, F_SETFD, FD_CLOEXEC);
  }
  ~LiveTop() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    hang_up();
  }
  LiveTop(const LiveTop&) = delete;
  LiveTop& operator=(const LiveTop&) = delete;
  pid_t pid() const { return pid_; }
  void type(const std::string& keys) const {
    EXPECT_EQ(write(screen_, keys.data(), keys.size()), static_cast<ssize_t>(keys.size()));
  }
  void resize(winsize size) {
    size_ = size;
    EXPECT_EQ(ioctl(screen_, TIOCSWINSZ, &size), 0);
  }
  void hang_up() {
    if (screen_ >= 0) close(screen_);
    screen_ = -1;
  }
  tcflag_t modes() const {
    termios t{};
    EXPECT_EQ(tcgetattr(screen_, &t), 0);
    return t.c_lflag;
  }
  // Waits until a frame fulfils `wanted`; returns false if none does. It is in frame() then. Checks
  // the common rules on every frame.
  bool shows(const std::function<bool(const Lines&)>& wanted) {
    return reads([&] {
      for (size_t end; (end = said_.find("\033[J")) != std::string::npos;) {
        const size_t begin = said_.rfind("\033[H", end);
        if (begin != std::string::npos) {  // else the beginning of the frame was skipped
          frame_ = lines_of(said_.substr(begin + 3, end - begin - 3));
          between_ += said_.substr(0, begin);
        }
        said_.erase(0, end + 3);
        if (begin == std::string::npos) continue;
        if (wanted(frame_)) return true;
      }
      return false;
    });
  }
  bool shows(const std::string& word) {
    return shows([&](const Lines&) { return row_of(word) >= 0; });
  }
  // Waits until the text appears outside of frames, from now on.
  bool says(const std::string& wanted) {
    return reads([&] { return said_.find(wanted) != std::string::npos; });
  }
  // Drops the text so far; called after says().
  void forget() { said_.clear(); }
  const Lines& frame() const { return frame_; }
  // The text outside of frames before the last frame.
  const std::string& between() const { return between_; }
  // Returns the first row of the frame that contains the word, or -1.
  int row_of(const std::string& word) const {
    const auto has = [&](const std::string& line) { return line.find(word) != std::string::npos; };
    const auto it = std::find_if(frame_.begin(), frame_.end(), has);
    return it != frame_.end() ? static_cast<int>(it - frame_.begin()) : -1;
  }
  std::string text() const {
    std::string all;
    for (const std::string& line : frame_) all += line + "\n";
    return all;
  }
  bool fits() const {
    return frame_.size() <= size_.ws_row &&
           std::all_of(frame_.begin(), frame_.end(), [&](const auto& line) { return width_of(line) <= size_.ws_col; });
  }
  // Returns its exit code; -1: it does not end, or a signal ended it.
  int finish() {
    int status = 0;
    const bool ended = vmem::test::eventually([&] {
      if (screen_ >= 0) take(0);
      return waitpid(pid_, &status, WNOHANG) == pid_;
    });
    if (!ended) return -1;
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  // Reads until that holds.
  bool reads(const std::function<bool()>& done) {
    return vmem::test::eventually(
        [&] {
          if (done()) return true;
          take(50);
          return done();
        },
        std::chrono::seconds(20), std::chrono::milliseconds(0));
  }
  void take(int timeout_ms) {
    pollfd fd{screen_, POLLIN, 0};
    char buffer[4096];
    if (poll(&fd, 1, timeout_ms) <= 0) return;
    const ssize_t n = read(screen_, buffer, sizeof buffer);
    if (n > 0) said_.append(buffer, static_cast<size_t>(n));
  }
  static Lines lines_of(std::string text) {
    for (size_t at; (at = text.find("\033[K")) != std::string::npos;) text.erase(at, 3);
    text.erase(std::remove(text.begin(), text.end(), '\r'), text.end());
    Lines out;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
      EXPECT_TRUE(std::none_of(line.begin(), line.end(), [](unsigned char c) { return c < ' ' || c == 127; })) << line;
      out.push_back(line.substr(0, line.find_last_not_of(' ') + 1));
    }
    return out;
  }

  winsize size_;
  int screen_ = -1;
  pid_t pid_ = -1;
  std::string said_, between_;
  Lines frame_;
};

constexpr const char* kNever = "3600";
constexpr winsize k80x24{24, 80, 0, 0};

class CtlTerminal : public Ctl {
 protected:
  // The region part-0. is the largest.
  void make_parts(int count) {
    for (int i = 0; i < count; ++i) {
      parts_.emplace_back(static_cast<size_t>(80 - i) * kMiB, VMEM_HOST_ONLY);
      parts_.back().name("part-" + std::to_string(i) + ".");
    }
  }
  void TearDown() override {
    parts_.clear();
    Ctl::TearDown();
  }
  std::vector<vmem::region> parts_;
};

TEST_F(CtlTerminal, KeysScroll) {
  if (IsSkipped()) return;
  make_parts(40);
  LiveTop top(folder(), kNever, k80x24);
  ASSERT_TRUE(top.shows("part-0.")) << top.text();
  EXPECT_NE(top.between().find("\033[?1049h"), std::string::npos) << "the other screen";
  EXPECT_TRUE(top.fits()) << top.text();
  EXPECT_EQ(top.frame().size(), 24u) << top.text();
  EXPECT_NE(top.frame()[0].find("q quits, arrows scroll, s sorts (size), / filters; 1 of "), std::string::npos);
  EXPECT_LT(top.row_of("part-39."), 0) << "24 rows have no room for it";
  const int row = top.row_of("part-0.");
  // A step moves by one row, and the opposite key moves back.
  for (const auto& [there, back] : {std::pair{"\033[B", "\033[A"}, {"j", "k"}}) {
    top.type(there);
    ASSERT_TRUE(top.shows("2 of ")) << top.text();
    EXPECT_EQ(top.row_of("part-0."), row - 1);
    top.type(back);
    ASSERT_TRUE(top.shows("1 of ")) << top.text();
    EXPECT_EQ(top.row_of("part-0."), row);
  }
  // A page is the visible area below the keys.
  for (const auto& [there, back] : {std::pair{"\033[6~", "\033[5~"}, {" ", "b"}}) {
    top.type(there);
    ASSERT_TRUE(top.shows("; 24 of ")) << top.text();
    EXPECT_LT(top.row_of("part-0."), 0) << top.text();
    top.type(back);
    ASSERT_TRUE(top.shows("; 1 of ")) << top.text();
  }
  top.type("G");
  ASSERT_TRUE(top.shows("part-39.")) << top.text();
  EXPECT_EQ(top.row_of("part-39."), 23) << top.text();
  // The selection does not move beyond either end.
  top.type("jjj");
  ASSERT_TRUE(top.shows("part-39."));
  EXPECT_EQ(top.row_of("part-39."), 23) << top.text();
  top.type("gkkk");
  ASSERT_TRUE(top.shows("; 1 of ")) << top.text();
  EXPECT_TRUE(top.fits()) << top.text();
}

TEST_F(CtlTerminal, KeysSort) {
  if (IsSkipped()) return;
  vmem::region b(8 * kMiB, VMEM_HOST_ONLY), a(16 * kMiB, VMEM_HOST_ONLY), c(32 * kMiB, VMEM_HOST_ONLY);
  a.name("aaa"), b.name("bbb"), c.name("ccc");
  memset(b.data(), 1, 6 * kMiB);
  memset(a.data(), 1, 2 * kMiB);
  auto* late = static_cast<std::byte*>(a.data()) + 4 * kMiB;
  memset(late, 1, 10 * kMiB);
  ASSERT_EQ(vmem_evict(late, 10 * kMiB, VMEM_SSD), 0) << vmem_last_error();
  LiveTop top(folder(), kNever, k80x24);
  const auto first = [&] {
    return std::min({std::pair{top.row_of("aaa"), 'a'}, {top.row_of("bbb"), 'b'}, {top.row_of("ccc"), 'c'}}).second;
  };
  ASSERT_TRUE(top.shows("sorts (size)"));
  EXPECT_EQ(first(), 'c') << top.text();
  const std::pair<const char*, char> sorts[] = {{"device", 'b'}, {"host", 'b'}, {"ssd", 'a'},
                                                {"leased", 'b'}, {"name", 'a'}, {"size", 'c'}};
  for (const auto& [name, wanted] : sorts) {
    top.type("s");
    ASSERT_TRUE(top.shows("sorts (" + std::string(name) + ")")) << top.text();
    EXPECT_EQ(first(), wanted) << name << "\n" << top.text();
  }
}

TEST_F(CtlTerminal, KeysFilter) {
  if (IsSkipped()) return;
  make_parts(40);
  LiveTop top(folder(), kNever, k80x24);
  ASSERT_TRUE(top.shows("part-0.")) << top.text();
  top.type("G/part-1");
  ASSERT_TRUE(top.shows("filter: part-1_")) << top.text();
  EXPECT_GE(top.row_of("  part-1."), 0) << "while it is typed, from the first row on\n" << top.text();
  EXPECT_LT(top.row_of("  part-2."), 0) << top.text();
  top.type("7x\177\t\001.\r");
  ASSERT_TRUE(top.shows("/ filters (part-17.)")) << top.text();
  EXPECT_GE(top.row_of("  part-17."), 0) << top.text();
  EXPECT_LT(top.row_of("  part-1."), 0) << top.text();
  // Keys are letters while it prompts for text, and keys again afterwards.
  top.type("/qs");
  ASSERT_TRUE(top.shows("filter: qs_")) << top.text();
  top.type("\xc3\xa4\177");
  ASSERT_TRUE(top.shows("filter: qs_")) << "all bytes of a character\n" << top.text();
  EXPECT_EQ(top.row_of("part-"), -1) << top.text();
  top.type("\033");
  ASSERT_TRUE(top.shows("  part-0.")) << top.text();
  EXPECT_NE(top.frame()[0].find("sorts (size), / filters;"), std::string::npos) << top.text();
  top.type("q");
  EXPECT_EQ(top.finish(), 0);
}

TEST_F(CtlTerminal, WhatHasBeenIsShownAsBarsInItsColumns) {
  if (IsSkipped()) return;
  make_parts(1);
  LiveTop top(folder(), "0.1", k80x24);
  // The last bar of faults is the highest, since there were none before.
  const auto bars = [](const Lines& frame) {
    for (const std::string& line : frame) {
      if (line.starts_with("  history ")) return line;
    }
    return std::string();
  };
  ASSERT_TRUE(top.shows([&](const Lines& f) { return bars(f).find("faults \u2581\u2581") != std::string::npos; }))
      << top.text();
  memset(parts_[0].data(), 1, 32 * kMiB);
  ASSERT_TRUE(top.shows([&](const Lines& f) {
    const std::string line = bars(f);
    return line.find("\u2588", std::min(line.size(), line.find("faults "))) != std::string::npos;
  })) << top.text();
  EXPECT_TRUE(top.fits()) << top.text();
  EXPECT_GE(top.row_of("    faults in "), 0) << "and where they are\n" << top.text();
}

// The next refresh is an hour away: only the new size causes the redraw.
TEST_F(CtlTerminal, AnotherSizeIsFilledAtOnce) {
  if (IsSkipped()) return;
  make_parts(20);
  LiveTop top(folder(), kNever, k80x24);
  ASSERT_TRUE(top.shows("part-0.")) << top.text();
  EXPECT_LT(top.row_of("blocks of"), 0) << "kinds need more columns";
  for (const winsize size : {winsize{10, 60, 0, 0}, {60, 160, 0, 0}, {3, 20, 0, 0}, {1, 1, 0, 0}, {24, 80, 0, 0}}) {
    top.resize(size);
    const size_t rows = std::min<size_t>(size.ws_row, 24);
    ASSERT_TRUE(top.shows([&](const Lines& f) { return top.fits() && (f.size() >= rows); }))
        << size.ws_row << "x" << size.ws_col << "\n"
        << top.text();
    if (size.ws_col == 160) {
      EXPECT_GE(top.row_of("blocks of"), 0) << top.text();
    }
  }
  top.type("q");
  EXPECT_EQ(top.finish(), 0);
}

// Control characters in names of regions do not reach the terminal.
TEST_F(CtlTerminal, ControlCharactersInNamesAreNotSentToTheTerminal) {
  if (IsSkipped()) return;
  vmem::region r(8 * kMiB, VMEM_HOST_ONLY);
  ASSERT_EQ(vmem_name(r.data(),
                      "a\033]0;title\a\033[H\x9b"
                      "31m\b\nb"),
            0)
      << vmem_last_error();
  LiveTop top(folder(), kNever, k80x24);
  ASSERT_TRUE(top.shows("where")) << top.text();  // lines_of() has checked each of them
  EXPECT_GE(top.row_of("  a?]0;title??[H"), 0) << top.text();
  EXPECT_TRUE(top.fits()) << top.text();
  EXPECT_EQ(top.between(), "\033[?1049h\033[?25l");
}

TEST_F(CtlTerminal, HoweverItEndsTheTerminalIsAsItWas) {
  if (IsSkipped()) return;
  make_parts(1);
  for (const std::string how : {"q", "Q", "\003", "SIGTERM", "SIGHUP"}) {
    LiveTop top(folder(), kNever, k80x24);
    ASSERT_TRUE(top.shows("part-0.")) << top.text();
    EXPECT_EQ(top.modes() & (ICANON | ECHO), 0u);
    if (how.starts_with("SIG"))
      kill(top.pid(), how == "SIGTERM" ? SIGTERM : SIGHUP);
    else
      top.type(how);
    EXPECT_TRUE(top.says("\033[?25h\033[?1049l")) << how;
    EXPECT_EQ(top.finish(), 0) << how;
  }
  LiveTop top(folder(), kNever, k80x24);
  ASSERT_TRUE(top.shows("part-0.")) << top.text();
  top.hang_up();
  EXPECT_GE(top.finish(), 0) << "it ends when the terminal is gone";
}

TEST_F(CtlTerminal, WhileItIsStoppedTheTerminalIsAsItWas) {
  if (IsSkipped()) return;
  make_parts(1);
  LiveTop top(folder(), kNever, k80x24);
  ASSERT_TRUE(top.shows("part-0.")) << top.text();
  for (int i = 0; i < 2; ++i) {
    // No shell could resume it, so the kernel does not stop it and it continues.
    top.type("\032");
    ASSERT_TRUE(top.says("\033[?25h\033[?1049l"));
    ASSERT_TRUE(top.says("\033[?1049h\033[?25l"));
    top.forget();
    top.type("s");
    ASSERT_TRUE(top.shows(i == 0 ? "sorts (device)" : "sorts (host)")) << top.text();
  }
  top.type("q");
  EXPECT_EQ(top.finish(), 0);
}

}  // namespace
