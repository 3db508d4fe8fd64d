// Text for a terminal: names, paths and messages lose the characters that would control it.
#include <gtest/gtest.h>

#include <cerrno>
#include <string>

#include "core/log.h"
#include "core/status.h"
#include "core/text.h"
#include "vmem/vmem.h"

namespace {

using vmem::core::make_printable;
using vmem::core::printable;

std::string utf8(uint32_t c) {
  const auto byte = [](uint32_t b) { return static_cast<char>(b); };
  if (c < 0x80) return {byte(c)};
  if (c < 0x800) return {byte(0xc0 | c >> 6), byte(0x80 | (c & 0x3f))};
  if (c < 0x10000) return {byte(0xe0 | c >> 12), byte(0x80 | (c >> 6 & 0x3f)), byte(0x80 | (c & 0x3f))};
  return {byte(0xf0 | c >> 18), byte(0x80 | (c >> 12 & 0x3f)), byte(0x80 | (c >> 6 & 0x3f)), byte(0x80 | (c & 0x3f))};
}

TEST(CoreText, TextOfAnyLanguageStaysAsItIs) {
  for (const char* text :
       {"", "plain words, 42 %",
        "Gr\xc3\xb6\xc3\x9f"
        "e",
        "\xd7\xa9\xd7\x9c\xd7\x95\xd7\x9d", "\xe6\xbc\xa2\xe5\xad\x97", "\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x92\xbb"})
    EXPECT_EQ(printable(text), text);
}

TEST(CoreText, WhatSteersATerminalBecomesAQuestionMark) {
  for (uint32_t c = 0; c < 0x20; ++c) EXPECT_EQ(printable("a" + utf8(c) + "b"), "a?b") << c;
  for (uint32_t c = 0x7f; c < 0xa0; ++c) EXPECT_EQ(printable("a" + utf8(c) + "b"), "a?b") << c;
  // Every character with the property Bidi_Control, and the two separators of lines.
  for (const uint32_t c : {0x061cu, 0x200eu, 0x200fu, 0x202au, 0x202bu, 0x202cu, 0x202du, 0x202eu, 0x2066u, 0x2067u,
                           0x2068u, 0x2069u, 0x2028u, 0x2029u, 0xfeffu, 0xe0041u})
    EXPECT_EQ(printable("a" + utf8(c) + "b"), "a?b") << std::hex << c;
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a?b");
}

TEST(CoreText, BrokenSequencesBecomeQuestionMarksAndTheRestStays) {
  EXPECT_EQ(printable("\xff\xc3\xa4"), "?\xc3\xa4");
  EXPECT_EQ(printable("\xc0\x9b[2J"), "??[2J") << "an overlong escape";
  EXPECT_EQ(printable("\xed\xa0\x80"), "???") << "a surrogate";
  EXPECT_EQ(printable("cut \xe2\x80"), "cut ??");
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "????") << "beyond the last character";
  EXPECT_EQ(printable("\x9b"
                      "31m"),
            "?31m")
      << "a control of one byte";
  // The result is never longer than the input, and a second pass changes nothing.
  for (uint32_t c = 0; c < 0x11000; ++c) {
    const std::string text = "x" + utf8(c), once = printable(text);
    ASSERT_LE(once.size(), text.size());
    ASSERT_EQ(printable(once), once);
  }
}

constexpr const char* kPath =
    "/tmp/\033]0;owned\007\xe2\x80\xae"
    "txt.exe\n";
constexpr const char* kShown = "/tmp/?]0;owned??txt.exe?";

TEST(CoreText, NoMessageOfAFailureSteersATerminal) {
  EXPECT_EQ(vmem::core::error(EINVAL, "%s", kPath).text(), kShown);
  EXPECT_EQ(
      vmem::core::system_error(ENOENT, "cannot open %s", kPath).text().rfind(std::string("cannot open ") + kShown, 0),
      0u);
  ASSERT_NE(vmem_set("no such setting \033[2J\xe2\x81\xa6", "1"), 0);
  const std::string words = vmem_last_error();
  EXPECT_EQ(words, printable(words)) << words;
  EXPECT_NE(words.find("no such setting ?[2J?"), std::string::npos) << words;
}

TEST(CoreText, AMessageThatIsCutIsNotCutInACharacter) {
  std::string name = "x";
  for (int i = 0; i < 1000; ++i) name += "\xc3\xa4";
  for (int i = 0; i < 2; ++i, name += "x") {
    ASSERT_NE(vmem_set(name.c_str(), "1"), 0);
    const std::string words = vmem_last_error();
    EXPECT_EQ(words, printable(words));
  }
}

TEST(CoreText, NoLineOfTheLogSteersATerminal) {
  testing::internal::CaptureStderr();
  vmem::core::log(vmem::core::Level::error, "cannot write %s", kPath);
  vmem::core::flush_log();
  EXPECT_EQ(testing::internal::GetCapturedStderr(), std::string("libvmem: error: cannot write ") + kShown + "\n");
  std::string seen;
  vmem::core::set_log_sink([](int, const char* line, void* user) { *static_cast<std::string*>(user) = line; }, &seen);
  vmem::core::log(vmem::core::Level::error, "%s", kPath);
  vmem::core::set_log_sink(nullptr, nullptr);
  EXPECT_EQ(seen, kShown);
}

}  // namespace
