// The table of settings: which values are accepted, which are refused, and the messages.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "core/log.h"
#include "core/options.h"

namespace vmem::core {
namespace {

bool has(const Status& s, const std::string& words) {
  return s.text().find(words) != std::string_view::npos;
}

// Sets a variable for one test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name_); }

 private:
  const char* name_;
};

TEST(CoreParseBytes, TakesEveryUnitWithAndWithoutIB) {
  const std::pair<const char*, uint64_t> good[] = {
      {"0", 0},
      {"4096", 4096},
      {"1K", 1024},
      {"1k", 1024},
      {"1KiB", 1024},
      {"1kb", 1024},
      {"3MiB", 3ull << 20},
      {"8G", 8ull << 30},
      {"8GiB", 8ull << 30},
      {"8 GiB", 8ull << 30},
      {"2T", 2ull << 40},
      {"1P", 1ull << 50},
      {"7B", 7},
      {"7b", 7},
      {"18446744073709551615", UINT64_MAX},
      {"16383P", 16383ull << 50},
  };
  for (const auto& [text, want] : good) {
    uint64_t value = 1;
    EXPECT_TRUE(parse_bytes(text, &value).ok()) << text;
    EXPECT_EQ(value, want) << text;
  }
}

TEST(CoreParseBytes, RefusesWhatIsNoSizeAndLeavesTheResultAlone) {
  for (const char* text : {"", " ", "max", "GiB", "-1", "+1", "1.5G", "1X", "1Ki", "1GiBs", "0x10", " 1", "1 2",
                           "18446744073709551616", "16384P", "99999999999T"}) {
    uint64_t value = 77;
    const Status s = parse_bytes(text, &value);
    EXPECT_EQ(s.code(), -EINVAL) << text;
    EXPECT_TRUE(has(s, "\"" + std::string(text) + "\"")) << s.text();
    EXPECT_EQ(value, 77u) << text;
  }
}

TEST(CoreOptions, TheTableIsInTheOrderOfItsIdsWithUniqueNames) {
  std::set<std::string> names;
  for (size_t i = 0; i < option_table().size(); ++i) {
    const OptionInfo& info = option_table()[i];
    EXPECT_EQ(static_cast<size_t>(info.id), i) << info.name;
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_EQ(find_option(info.name), &info);
    EXPECT_NE(std::string(info.help), "") << info.name;
    EXPECT_LE(info.min, info.max) << info.name;
    EXPECT_EQ(info.choices.any(), info.kind == OptionKind::choice) << info.name;
  }
  EXPECT_EQ(find_option("no_such"), nullptr);
  EXPECT_EQ(find_option(""), nullptr);
}

TEST(CoreOptions, BoundsAreInclusiveAndNamedWhenMissed) {
  for (const OptionInfo& info : option_table()) {
    if (info.kind != OptionKind::bytes && info.kind != OptionKind::number) continue;
    Options options;
    EXPECT_TRUE(options.set(info.id, std::to_string(info.min)).ok()) << info.name;
    EXPECT_EQ(options.number(info.id), info.min);
    EXPECT_TRUE(options.set(info.id, std::to_string(info.max)).ok()) << info.name;
    EXPECT_EQ(options.number(info.id), info.max);
    const Status above = options.set(info.name, std::to_string(info.max + 1));
    EXPECT_EQ(above.code(), -EINVAL) << info.name;
    EXPECT_TRUE(has(above, info.name) && has(above, "give")) << above.text();
    if (info.min != 0) {
      EXPECT_EQ(options.set(info.name, std::to_string(info.min - 1)).code(), -EINVAL) << info.name;
    }
    EXPECT_EQ(options.set(info.name, "many").code(), -EINVAL) << info.name;
    EXPECT_EQ(options.set(info.name, "").code(), -EINVAL) << info.name;
    EXPECT_EQ(options.number(info.id), info.max) << info.name << " changed by a refused value";
  }
}

TEST(CoreOptions, ABlockIsAPowerOfTwo) {
  Options options;
  const Status s = options.set("block_size", "3MiB");
  EXPECT_EQ(s.code(), -EINVAL);
  EXPECT_TRUE(has(s, "power of two")) << s.text();
  EXPECT_EQ(
      options.set("block_size", "3").text(),
      "block_size: \"3\" is not accepted; give auto, or a power of two from 4 KiB to 64 MiB, such as 64KiB or 2MiB");
  EXPECT_TRUE(options.set("block_size", "Auto").ok());
  EXPECT_EQ(options.number(Option::block_size), kAuto);
  EXPECT_EQ(options.text(Option::block_size), "auto");
  EXPECT_FALSE(options.set("block_size", "automatic").ok());
  EXPECT_FALSE(options.set("readahead", "auto").ok());
  EXPECT_TRUE(options.set("block_size", "64K").ok());
  EXPECT_EQ(options.number(Option::block_size), 65536u);
}

TEST(CoreOptions, ChoicesAreExactAndListedWhenMissed) {
  for (const OptionInfo& info : option_table()) {
    if (info.kind != OptionKind::choice) continue;
    Options options;
    std::string rest = info.choices.names();
    while (!rest.empty()) {
      const std::string one = rest.substr(0, rest.find('|'));
      EXPECT_TRUE(options.set(info.name, one).ok()) << info.name << " " << one;
      EXPECT_EQ(options.text(info.id), one);
      rest = rest.size() > one.size() ? rest.substr(one.size() + 1) : "";
    }
    for (const char* bad : {"", "nothing", "|", "auto|uffd"}) {
      const Status s = options.set(info.name, bad);
      EXPECT_EQ(s.code(), -EINVAL) << info.name << " \"" << bad << "\"";
      EXPECT_TRUE(has(s, info.choices.names())) << s.text();
    }
  }
}

TEST(CoreOptions, BooleansTakeTheUsualWordsAndReadBackAsOnOrOff) {
  Options options;
  for (const char* yes : {"on", "ON", "1", "true", "yes"}) {
    EXPECT_TRUE(options.set("checksum", yes).ok()) << yes;
    EXPECT_EQ(options.text(Option::checksum), "on");
  }
  for (const char* no : {"off", "0", "False", "no"}) {
    EXPECT_TRUE(options.set("checksum", no).ok()) << no;
    EXPECT_EQ(options.text(Option::checksum), "off");
    EXPECT_EQ(options.number(Option::checksum), 0u);
  }
  const Status s = options.set("checksum", "maybe");
  EXPECT_EQ(s.code(), -EINVAL);
  EXPECT_TRUE(has(s, "on or off")) << s.text();
}

TEST(CoreOptions, AnUnknownNameIsEnoentForSetAndGet) {
  Options options;
  std::string value = "kept";
  EXPECT_EQ(options.set("host_bugdet", "8G").code(), -ENOENT);
  EXPECT_TRUE(has(options.set("host_bugdet", "8G"), "host_bugdet"));
  EXPECT_EQ(options.get("host_bugdet", &value).code(), -ENOENT);
  EXPECT_EQ(value, "kept");
}

TEST(CoreOptions, WhatNobodySetIsNotSet) {
  Options options;
  for (const OptionInfo& info : option_table()) EXPECT_FALSE(options.is_set(info.id)) << info.name;
  ASSERT_TRUE(options.set("io_depth", "4").ok());
  EXPECT_TRUE(options.is_set(Option::io_depth));
  EXPECT_FALSE(options.is_set(Option::io_threads));
}

TEST(CoreOptions, TheEnvironmentSetsEachOptionByItsUpperCaseName) {
  Variable depth("VMEM_IO_DEPTH", "7"), budget("VMEM_HOST_BUDGET", "1G"), codec("VMEM_COMPRESSION", "lz4");
  Options options;
  ASSERT_TRUE(options.load_environment().ok());
  EXPECT_EQ(options.number(Option::io_depth), 7u);
  EXPECT_EQ(options.number(Option::host_budget), 1ull << 30);
  EXPECT_EQ(options.text(Option::compression), "lz4");
  EXPECT_FALSE(options.is_set(Option::io_threads));
}

TEST(CoreOptions, ABadVariableIsRefusedWithVariableValueAndForm) {
  const struct {
    const char *variable, *value, *form;
  } bad[] = {
      {"VMEM_HOST_BUDGET", "lots", "a size from 8 MiB to 1 PiB"},
      {"VMEM_IO_DEPTH", "0", "a whole number from 1 to 1024"},
      {"VMEM_CHECKSUM", "2", "on or off"},
      {"VMEM_COMPRESSION", "gzip", "one of none|lz4|zstd"},
  };
  for (const auto& b : bad) {
    Variable variable(b.variable, b.value);
    Options options;
    const Status s = options.load_environment();
    EXPECT_EQ(s.code(), -EINVAL) << b.variable;
    EXPECT_TRUE(has(s, b.variable)) << s.text();
    EXPECT_TRUE(has(s, std::string("\"") + b.value + "\"")) << s.text();
    EXPECT_TRUE(has(s, b.form)) << s.text();
  }
}

TEST(CoreOptions, AMistypedVariableIsNamedInAWarningWithWhatIsMeant) {
  EXPECT_EQ(meant_by("VMEM_HOST_BUGDET"), "VMEM_HOST_BUDGET");
  EXPECT_EQ(meant_by("VMEM_HOSTBUDGET"), "VMEM_HOST_BUDGET");
  EXPECT_EQ(meant_by("VMEM_SSDPATHS"), "VMEM_SSD_PATH");
  EXPECT_EQ(meant_by("VMEM_CHECKSUMS"), "VMEM_CHECKSUM");
  EXPECT_EQ(meant_by("VMEM_BLOCKSIZE"), "VMEM_BLOCK_SIZE");
  EXPECT_EQ(meant_by("VMEM_TRAPS"), "VMEM_TRAP");
  EXPECT_NE(meant_by("VMEM_BUDGET"), "");
  for (const OptionInfo& info : option_table()) {
    std::string variable = "VMEM_";
    for (const char* c = info.name; *c != '\0'; ++c) variable += static_cast<char>(toupper(*c));
    EXPECT_EQ(meant_by(variable), "") << variable;
  }
  for (const char* other : {"VMEM_LIBRARY", "VMEM_CACHE", "VMEM_QUICK", "VMEM_LONG", "VMEM_PYTHON", "VMEM_DEBUG_KERNEL",
                            "VMEM_STRESS_SECONDS", "VMEM_TEST_BLOCK_DEVICE", "VMEM_VM_FULL", "VMEM_", "PATH", ""})
    EXPECT_EQ(meant_by(other), "") << other;
  EXPECT_EQ(meant_by("VMEM_" + std::string(100000, 'X')), "");

  std::vector<std::string> lines;
  const auto take = [](int, const char* line, void* to) {
    static_cast<std::vector<std::string>*>(to)->push_back(line);
  };
  Variable wrong("VMEM_HOST_BUGDET", "1G");
  set_log_sink(take, &lines);
  EXPECT_TRUE(Options().load_environment().ok());
  {
    Variable quiet("VMEM_LOG", "error");
    EXPECT_TRUE(Options().load_environment().ok());
  }
  set_log_sink(nullptr, nullptr);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0],
            "environment variable VMEM_HOST_BUGDET is no setting and does nothing; is VMEM_HOST_BUDGET meant?");
}

TEST(CoreOptions, ANameThatIsNoSettingIsAnsweredWithWhatIsMeant) {
  Options options;
  std::string value;
  for (const char* name : {"host_budgte", "HOST_BUDGET", "hostbudget"}) {
    const std::string wanted = "there is no setting \"" + std::string(name) + "\" (host_budget?); ";
    const auto set = options.set(name, "1G"), get = options.get(name, &value);
    EXPECT_TRUE(set.text().starts_with(wanted)) << set.text();
    EXPECT_TRUE(get.text().starts_with(wanted)) << get.text();
  }
  const auto other = options.set("no_such_setting", "1");
  EXPECT_TRUE(other.text().starts_with("there is no setting \"no_such_setting\"; ")) << other.text();
}

TEST(CoreOptions, ThePageHasEachOptionWithItsVariableAndForm) {
  const std::string page = options_markdown();
  for (const OptionInfo& info : option_table()) {
    std::string variable = "`VMEM_";
    for (const char* c = info.name; *c != '\0'; ++c) variable += static_cast<char>(toupper(*c));
    const size_t row = page.find("| `" + std::string(info.name) + "` | " + variable + "` |");
    ASSERT_NE(row, std::string::npos) << info.name;
    const std::string line = page.substr(row, page.find('\n', row) - row);
    EXPECT_NE(line.find(info.help), std::string::npos) << info.name;
    EXPECT_NE(line.find(info.live ? "| yes |" : "| no |"), std::string::npos) << info.name;
  }
}

}  // namespace
}  // namespace vmem::core
