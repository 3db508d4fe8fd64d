// vmemctl's text for publications with arbitrary contents.
#include "vmemctl/view.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "vmemctl/history.h"

namespace {

using vmemctl::folded;
namespace publish = vmem::publish;

size_t width_of(const std::string& text) {
  size_t n = 0;
  for (const char c : text) n += (c & 0xc0) != 0x80;
  return n;
}

using Lines = std::vector<std::string>;

TEST(CtlView, ALineIsFoldedAtBlanksAndNothingFollowsBlanksAtItsEnd) {
  EXPECT_EQ(folded("short", 20, 2), Lines{"short"});
  EXPECT_EQ(folded("one two three four five", 14, 2), (Lines{"one two three", "  four five"}));
  // The trailing blanks do not fit.
  EXPECT_EQ(folded("one two three" + std::string(9, ' '), 14, 2).back().find_last_not_of(' '), 12u);
  for (size_t blanks = 0; blanks < 100; ++blanks) {
    for (size_t letters = 0; letters < 60; ++letters) {
      const std::string line = std::string(letters, 'x') + std::string(blanks, ' ');
      size_t found = 0;
      for (const std::string& part : folded(line, 40, 12)) {
        EXPECT_LE(width_of(part), 40u) << letters << " letters, " << blanks << " blanks";
        found += static_cast<size_t>(std::count(part.begin(), part.end(), 'x'));
      }
      EXPECT_EQ(found, std::min<size_t>(letters, 40)) << letters << " letters, " << blanks << " blanks";
    }
  }
}

// Writes what a user may write into the file, and reads it as vmemctl does.
class Author {
 public:
  explicit Author(uint32_t seed) : random_(seed) {}

  publish::Snapshot write() {
    publish::Snapshot s;
    fill(&s.header);
    s.devices.resize(pick(5));
    s.regions.resize(pick(9));
    for (publish::Device& d : s.devices) fill(&d), name(d.name);
    for (publish::Region& g : s.regions) fill(&g), name(g.name);
    name(s.header.command);
    name(s.header.library);
    name(s.header.trap);
    name(s.header.device_tier);
    std::vector<std::byte> bytes;
    publish::pack(s, &bytes);
    publish::Snapshot read;
    const vmem::core::Status status = publish::unpack(bytes, &read);
    EXPECT_TRUE(status.ok()) << status.text();
    return read;
  }
  size_t pick(size_t n) { return random_() % n; }
  double number() { return std::ldexp(1.0, static_cast<int>(pick(90))); }

 private:
  // Fills eight bytes at a time with zeros, small values, all ones, or random bits.
  template <typename T>
  void fill(T* what) {
    auto* at = reinterpret_cast<std::byte*>(what);
    for (size_t i = 0; i + 8 <= sizeof *what; i += 8) {
      const uint64_t values[] = {0, pick(300), UINT64_MAX, (uint64_t{random_()} << 32) | random_()};
      memcpy(at + i, &values[pick(4)], 8);
    }
  }
  template <size_t N>
  void name(char (&text)[N]) {
    const std::string parts[] = {" ", "x", "               ", "\xe2\x96\x88", "\xff", "\n", "\"", "word "};
    std::string all;
    while (all.size() < pick(N) + 1) all += parts[pick(std::size(parts))];
    publish::put_text(text, all);
  }
  std::mt19937 random_;
};

TEST(CtlView, EveryPublicationIsShownInTheColumnsThatThereAre) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    Author author(seed);
    vmemctl::Process p;
    p.pid = static_cast<pid_t>(author.pick(2) * 12345);
    p.answers = author.pick(2) != 0;
    p.age_seconds = std::min(author.number(), 0x1p34);
    p.now = author.write();
    vmemctl::Rates r;
    r.known = author.pick(2) != 0;
    r.faults = author.number(), r.ssd_read = author.number(), r.ssd_written = author.number();
    for (size_t columns = 40; columns <= 200; ++columns) {
      const vmemctl::ViewOptions options{columns, author.pick(10), author.pick(std::size(vmemctl::kSorts)),
                                         author.pick(2) != 0, author.pick(3) == 0 ? "x" : ""};
      Lines lines;
      ASSERT_NO_THROW(lines = vmemctl::view(p, r, options)) << "seed " << seed << ", " << columns << " columns";
      ASSERT_FALSE(lines.empty());
      for (const std::string& line : lines) {
        ASSERT_EQ(width_of(line), columns) << "seed " << seed << ": " << line;
        ASSERT_EQ(line.find_first_of("\n\r\033"), std::string::npos) << "seed " << seed << ": " << line;
      }
    }
  }
}

vmemctl::Process process(uid_t owner, pid_t pid, const std::string& name, uint64_t at_ns) {
  vmemctl::Process p;
  p.owner = owner;
  p.pid = pid;
  p.name = name;
  p.folder = "/run/user/" + std::to_string(owner) + "/vmem";
  p.now.header.taken_monotonic_ns = at_ns;
  p.now.header.pid = 77;  // what the process claims about itself
  p.now.header.start_ticks = 4242;
  return p;
}

TEST(CtlHistories, NobodyWritesIntoAnothersHistoryByWhatHePublishes) {
  vmemctl::Histories histories;
  std::vector<vmemctl::Process> before, now;
  for (uint64_t second = 1; second <= 5; ++second) {
    before = std::move(now);
    now = {process(1001, 77, "77-a", second * 1000000000), process(1002, 990, "77-b", second * 1000000000)};
    now[0].now.header.stats.read_bytes = second * 100;
    now[1].now.header.stats.read_bytes = second * 1000000;
    histories.add(before, now);
  }
  ASSERT_NE(histories.of(now[0]), nullptr);
  ASSERT_NE(histories.of(now[1]), nullptr);
  EXPECT_EQ(histories.of(now[0])->read, std::deque<double>(4, 100));
  EXPECT_EQ(histories.of(now[1])->read, std::deque<double>(4, 1000000));
}

TEST(CtlHistories, WhatIsNotThereAnyMoreIsForgotten) {
  vmemctl::Histories histories;
  std::vector<vmemctl::Process> before, now;
  for (uint64_t look = 1; look < 1000; ++look) {
    before = std::move(now);
    now = {process(1001, 5, "5-a", look), process(1002, static_cast<pid_t>(look + 10), "x", look)};
    histories.add(before, now);
    ASSERT_LE(histories.size(), 2u);
  }
  ASSERT_NE(histories.of(now[0]), nullptr);
  EXPECT_EQ(histories.of(now[0])->faults.size(), 120u) << "and no more of one that stays than is shown";
  EXPECT_EQ(histories.of(before[1]), nullptr);
}

TEST(CtlWords, WhatIsForgedTakesFewLinesWhoeverMadeItAndTheOftenestReasonIsFirst) {
  std::vector<vmemctl::Refused> all;
  for (uid_t user = 0; user < 1000; ++user) {
    for (int i = 0; i < 8; ++i) all.push_back({"file", 1000 + user, i < 4 ? "often" : "for once " + std::to_string(i)});
  }
  const Lines lines = vmemctl::words_of(all);
  ASSERT_EQ(lines.size(), 16u * 4 + 1);
  EXPECT_EQ(lines[0], "FORGED by user 1000: file and 3 more: often");
  EXPECT_EQ(lines[3], "FORGED by user 1000: 2 more publications");
  EXPECT_EQ(lines.back(), "FORGED by 984 more users: 7872 publications");
}

}  // namespace
