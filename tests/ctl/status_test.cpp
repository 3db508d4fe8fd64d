// vmemctl status, top and tune: what they show of a running process, what they change, and what
// they refuse.
#include <algorithm>
#include <sstream>
#include <thread>

#include "common/patience.h"
#include "support.h"

namespace {

using namespace ctltest;
using nlohmann::json;

TEST_F(Ctl, StatusShowsNamedRegionsAndTheBytesOfEachTier) {
  if (IsSkipped()) return;
  vmem::region weights(32 * kMiB, VMEM_HOST_ONLY), other(8 * kMiB, VMEM_HOST_ONLY);
  weights.name("weights");
  memset(weights.data(), 1, 12 * kMiB);
  ASSERT_EQ(vmem_evict(weights.data(), 4 * kMiB, VMEM_SSD), 0) << vmem_last_error();
  const json p = mine();
  EXPECT_EQ(p["pid"], getpid());
  EXPECT_EQ(p["command"], "ctl_tests");
  EXPECT_EQ(p["answers"], true);
  EXPECT_EQ(p["regions_total"], 2);
  const auto stats = vmem::stats();
  EXPECT_EQ(p["stats"]["faults"], stats.faults);
  EXPECT_EQ(p["stats"]["host_budget"], 64 * kMiB);
  EXPECT_EQ(p["stats"]["ssd_bytes"], stats.ssd_bytes);
  for (const json& r : p["regions"]) {
    if (r["name"] != "weights") continue;
    EXPECT_EQ(r["ssd_bytes"], 4 * kMiB);
    EXPECT_EQ(r["host_bytes"], 8 * kMiB);
    EXPECT_EQ(r["zero_bytes"], 20 * kMiB);
    EXPECT_EQ(r["address"], reinterpret_cast<uintptr_t>(weights.data()));
    EXPECT_EQ(r["backing"], "anonymous");
    const Ran text = ctl({"status", "--seconds", "0"});
    EXPECT_NE(text.out.find("weights"), std::string::npos) << text.out;
    EXPECT_NE(text.out.find(me() + "  ctl_tests"), std::string::npos) << text.out;
    return;
  }
  FAIL() << p.dump(1);
}

TEST_F(Ctl, TopShowsInWhichPartsOfARegionItsFaultsAre) {
  if (IsSkipped()) return;
  vmem::region r(64 * kMiB, VMEM_HOST_ONLY);
  r.name("warm");
  std::atomic<bool> stop{false};
  std::thread worker([&] {
    while (!stop) {
      memset(r.view<char>().data() + 32 * kMiB, 1, 4 * kMiB);
      r.evict();
    }
  });
  json heat;
  const bool warm = vmem::test::eventually([&] {
    const json p = mine();  // named, so that it outlives the loop
    for (const json& g : p["regions"]) heat = g["heat"];
    return heat.size() == 32 && heat[16] != 0;
  });
  std::string row;
  const bool shown = vmem::test::eventually([&] {
    row = ctl({"top", "--once", "--interval", "0.1", "--columns", "80"}).out;
    return row.find("faults in ................") != std::string::npos;
  });
  stop = true;
  worker.join();
  EXPECT_TRUE(warm) << heat;
  for (size_t i = 0; i < heat.size(); ++i) {
    if (i < 16 || i >= 18) {
      EXPECT_EQ(heat[i], 0) << i;
    }
  }
  EXPECT_TRUE(shown) << row;
}

TEST_F(Ctl, RatesAreWhatHappenedBetweenTwoLooks) {
  if (IsSkipped()) return;
  vmem::region r(32 * kMiB, VMEM_HOST_ONLY);
  std::atomic<bool> stop{false};
  std::thread worker([&] {
    while (!stop) {
      memset(r.data(), 1, r.size());
      r.evict();
    }
  });
  json rates;
  // On a slow machine two looks may have no event between them.
  const bool moved = vmem::test::eventually([&] {
    const Ran ran = ctl({"status", "--json", "--pid", me(), "--seconds", "0.2"});
    if (ran.status != 0) return true;
    rates = ran.json()["processes"][0]["rates"];
    return rates["faults"].get<double>() > 0 && rates["evictions"].get<double>() > 0;
  });
  stop = true;
  worker.join();
  ASSERT_TRUE(moved) << rates.dump();
  ASSERT_FALSE(rates.is_null());
  EXPECT_GT(rates["seconds"].get<double>(), 0.1);
  EXPECT_GT(rates["faults"].get<double>(), 0);
  EXPECT_GT(rates["evictions"].get<double>(), 0);
}

TEST_F(Ctl, ANameCannotHarmATerminalOrBreakJson) {
  if (IsSkipped()) return;
  vmem::region r(8 * kMiB, VMEM_HOST_ONLY);
  r.name("\033[2J\"quo\\te\xff\xc3\xa4\n");
  EXPECT_EQ(mine()["regions"][0]["name"], "?[2J\"quo\\te?\xc3\xa4?");
  for (const char* command : {"status", "top"}) {
    const Ran text = ctl(command == std::string("top") ? std::vector<std::string>{"top", "--once", "--interval", "0.1"}
                                                       : std::vector<std::string>{"status", "--seconds", "0"});
    EXPECT_EQ(text.out.find('\033'), std::string::npos) << command;
    EXPECT_EQ(text.out.find('\xff'), std::string::npos) << command;
  }
}

TEST_F(Ctl, NoProcessIsNoFailureButOneThatWasAskedForIs) {
  if (IsSkipped()) return;
  const std::string pid = me();
  vmem_shutdown();
  const Ran none = ctl({"status", "--json"});
  EXPECT_EQ(none.status, 0) << none.err;
  EXPECT_TRUE(none.json()["processes"].empty());
  EXPECT_NE(ctl({"status"}).out.find("no process"), std::string::npos);
  const Ran one = ctl({"status", "--json", "--pid", pid});
  EXPECT_EQ(one.status, 3);
  EXPECT_NE(one.err.find("does not use libvmem"), std::string::npos) << one.err;
  EXPECT_EQ(one.json()["error"]["exit"], 3);
  const Ran gone = ctl({"status", "--pid", "2147483647"});
  EXPECT_EQ(gone.status, 3);
  EXPECT_NE(gone.err.find("there is no process"), std::string::npos) << gone.err;
  EXPECT_EQ(run({tool(), "--folder", temp_ / "absent", "status"}).status, 3);
}

TEST_F(Ctl, AProcessThatDoesNotAnswerIsShownAsItLastWas) {
  if (IsSkipped()) return;
  Running app({"/proc/self/exe", "--gtest_filter=CtlChild.DISABLED_UsesLibvmem", "--gtest_also_run_disabled_tests"});
  ASSERT_TRUE(app.says("ready"));
  const std::string pid = std::to_string(app.pid());
  app.stop(SIGSTOP);
  const Ran ran = ctl({"status", "--json", "--seconds", "0", "--pid", pid});
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json p = ran.json()["processes"][0];
  EXPECT_EQ(p["answers"], false);
  EXPECT_EQ(p["regions"][0]["name"], "of the child");
  EXPECT_NE(ctl({"status", "--seconds", "0", "--pid", pid}).out.find("does not answer"), std::string::npos);
  const Ran tuned = ctl({"tune", "--pid", pid, "readahead=1MiB"});
  EXPECT_EQ(tuned.status, 1);
  EXPECT_NE(tuned.err.find("does not answer"), std::string::npos) << tuned.err;
}

// A look waits one second for the silent process. The rates of the others are still measured over
// the time that was asked for.
TEST_F(Ctl, AProcessThatDoesNotAnswerDoesNotAddToTheTimeBetweenTwoLooks) {
  if (IsSkipped()) return;
  vmem::region r(8 * kMiB, VMEM_HOST_ONLY);
  Running app({"/proc/self/exe", "--gtest_filter=CtlChild.DISABLED_UsesLibvmem", "--gtest_also_run_disabled_tests"});
  ASSERT_TRUE(app.says("ready"));
  app.stop(SIGSTOP);
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"status", "--json", "--seconds", "2"}, {"top", "--json", "--interval", "2"}}) {
    double seconds = 1e9;
    for (int i = 0; i < 3 && seconds >= 2.9; ++i) {  // excludes other load on the machine
      const json all = ctl(command).json()["processes"];
      for (const json& p : all) {
        if (p["pid"] == getpid() && !p["rates"].is_null())
          seconds = std::min(seconds, p["rates"]["seconds"].get<double>());
      }
    }
    EXPECT_LT(seconds, 2.9) << command[0];
  }
}

TEST_F(Ctl, WhatAKilledProcessLeftIsNotShownAndIsRemoved) {
  if (IsSkipped()) return;
  std::string pid;
  {
    Running app({"/proc/self/exe", "--gtest_filter=CtlChild.DISABLED_UsesLibvmem", "--gtest_also_run_disabled_tests"});
    ASSERT_TRUE(app.says("ready"));
    pid = std::to_string(app.pid());
    EXPECT_EQ(ctl({"status", "--json", "--seconds", "0"}).json()["processes"].size(), 2u);
  }
  const auto left = [&] {
    size_t n = 0;
    for (const auto& e : std::filesystem::directory_iterator(folder()))
      n += e.path().filename().string().rfind(pid + "-", 0) == 0;
    return n;
  };
  EXPECT_EQ(left(), 2u);
  EXPECT_EQ(ctl({"status", "--json", "--seconds", "0"}).json()["processes"].size(), 1u);
  EXPECT_EQ(left(), 0u);
}

// Run by the tests above: uses libvmem until it is killed.
TEST(CtlChild, DISABLED_UsesLibvmem) {
  vmem::region r(8 * kMiB, VMEM_HOST_ONLY);
  r.name("of the child");
  const std::string at = vmem::api::Runtime::get().published_at();
  // After the file's time has changed, the file includes the region's name.
  const auto first = std::filesystem::last_write_time(at);
  while (std::filesystem::last_write_time(at) == first) usleep(10000);
  printf("ready\n");
  fflush(stdout);
  for (;;) pause();
}

TEST_F(Ctl, TuneChangesARunningProcessAndShowsItsSettings) {
  if (IsSkipped()) return;
  const Ran ran = ctl({"tune", "--json", "--pid", me(), "readahead=4MiB", "log=error", "host_budget"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_EQ(vmem::get("readahead"), std::to_string(4 * kMiB));
  EXPECT_EQ(vmem::get("log"), "error");
  const json settings = ran.json()["settings"];
  EXPECT_EQ(settings[0], json({{"name", "readahead"}, {"value", "4194304"}, {"changed", true}}));
  EXPECT_EQ(settings[2], json({{"name", "host_budget"}, {"value", "67108864"}, {"changed", false}}));
  const Ran all = ctl({"tune", "--pid", me()});
  EXPECT_NE(all.out.find("readahead=4194304\n"), std::string::npos) << all.out;
  EXPECT_EQ(all.out.find("io_depth="), std::string::npos) << "only what can change";
  ASSERT_EQ(vmem_set("log", "warning"), 0);
  ASSERT_EQ(vmem_set("readahead", "64MiB"), 0);
  ASSERT_EQ(vmem::get("ssd_budget"), std::to_string(UINT64_MAX));
  EXPECT_EQ(ctl({"tune", "--pid", me(), "ssd_budget"}).out, "ssd_budget=unlimited\n");
}

// Both numbers appear in the tool's output and in the process's log.
TEST_F(Ctl, TuneWarnsOfABudgetThatTheMachineCannotGive) {
  if (IsSkipped()) return;
  const Ran fits = ctl({"tune", "--pid", me(), "host_budget=64MiB"});
  ASSERT_EQ(fits.status, 0) << fits.err;
  EXPECT_EQ(fits.err, "");
  const Ran ran = ctl({"tune", "--pid", me(), "host_budget=4096GiB"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_NE(ran.err.find("warning: host_budget 4 TiB is above the memory that the process may use, "),
            std::string::npos)
      << ran.err;
  ASSERT_EQ(vmem_set("host_budget", "64MiB"), 0) << vmem_last_error();
}

TEST_F(Ctl, TuneSaysWhyASettingIsRefused) {
  if (IsSkipped()) return;
  const struct {
    std::vector<std::string> words;
    int status;
    const char* says;
  } cases[] = {
      {{"tune", "--pid", me(), "readahead=lots"}, 1, "\"lots\" is not accepted; give a size"},
      {{"tune", "--pid", me(), "io_depth=4"}, 1, "io_depth cannot change while a process runs"},
      {{"tune", "--pid", me(), "no_such=1"}, 1, "there is no setting \"no_such\""},
      {{"tune", "--pid", me(), "host_budget=1MiB"}, 1, "host_budget"},
      {{"tune", "--pid", me(), "=1"}, 2, "names no setting"},
      {{"tune", "--pid", me(), std::string(100, 'x') + "=1"}, 2, "too long"},
      {{"tune", "readahead=1MiB"}, 2, "--pid PID or --machine"},
      {{"tune", "--pid", "2147483647", "readahead=1MiB"}, 3, "no process"},
      {{"tune", "--machine", "--sysfs", temp_ / "absent", "frame_order=9"}, 3, "not loaded"},
  };
  for (const auto& c : cases) {
    const Ran ran = ctl(c.words);
    EXPECT_EQ(ran.status, c.status) << c.says << "\n" << ran.err;
    EXPECT_NE(ran.err.find(c.says), std::string::npos) << ran.err;
  }
  EXPECT_EQ(vmem::get("host_budget"), std::to_string(64 * kMiB));
}

TEST_F(Ctl, TuneOfTheMachineWritesTheModulesKnobs) {
  if (IsSkipped()) return;
  const std::string sysfs = temp_ / "knobs";
  temp_.write("knobs/frame_limit_bytes", "0\n");
  temp_.write("knobs/faults_read", "5\n");
  ASSERT_EQ(chmod((sysfs + "/faults_read").c_str(), 0444), 0);
  const Ran ran = ctl({"tune", "--machine", "--sysfs", sysfs, "frame_limit_bytes=8GiB"});
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_EQ(ran.out, "frame_limit_bytes=8589934592\n");
  EXPECT_EQ(ctl({"tune", "--machine", "--sysfs", sysfs}).out.find("faults_read"), std::string::npos) << "not writable";
  EXPECT_EQ(ctl({"tune", "--machine", "--sysfs", sysfs, "faults_read"}).out, "faults_read=5\n");
  EXPECT_EQ(ctl({"tune", "--machine", "--sysfs", sysfs, "nothing=1"}).status, 3);
  EXPECT_EQ(ctl({"tune", "--machine", "--sysfs", sysfs, "../knobs/frame_limit_bytes=1"}).status, 2);
}

TEST_F(Ctl, AnotherUserSeesNothingAndIsToldWhy) {
  if (IsSkipped()) return;
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  // A copy of the tool that the user can reach.
  TempFolder place;
  ASSERT_EQ(chmod(place.path().c_str(), 0755), 0);
  ASSERT_EQ(chmod(temp_.path().c_str(), 0755), 0);
  std::filesystem::copy_file(tool(), place / "vmemctl");
  constexpr uid_t kNobody = 65534;
  const auto as_nobody = [&](std::vector<std::string> words) {
    words.insert(words.begin(), place / "vmemctl");
    return run(words, kNobody);
  };
  const Ran status = as_nobody({"status", "--pid", me()});
  EXPECT_EQ(status.status, 4) << status.out << status.err;
  EXPECT_NE(status.err.find("be that user, or root"), std::string::npos) << status.err;
  EXPECT_EQ(as_nobody({"tune", "--pid", me(), "readahead=1MiB"}).status, 4);
  const Ran all = as_nobody({"--folder", folder(), "status", "--json"});
  EXPECT_EQ(all.status, 0) << all.err;
  EXPECT_TRUE(all.json()["processes"].empty());
  EXPECT_NE(all.json()["problems"].dump().find("Permission denied"), std::string::npos) << all.out;
  EXPECT_EQ(vmem::get("readahead"), std::to_string(64 * kMiB));
}

TEST_F(Ctl, TopPrintsOneFrameWithoutATerminalAndRefusesToBeLiveThere) {
  if (IsSkipped()) return;
  vmem::region r(8 * kMiB, VMEM_HOST_ONLY);
  r.name("weights");
  const Ran once = ctl({"top", "--once", "--interval", "0.1"});
  EXPECT_EQ(once.status, 0) << once.err;
  EXPECT_NE(once.out.find("1 process, host"), std::string::npos) << once.out;
  EXPECT_NE(once.out.find("weights"), std::string::npos) << once.out;
  EXPECT_EQ(ctl({"top", "--json", "--interval", "0.1"}).json()["processes"].size(), 1u);
  const Ran live = ctl({"top"});
  EXPECT_EQ(live.status, 2);
  EXPECT_NE(live.err.find("needs a terminal"), std::string::npos) << live.err;
}

TEST_F(Ctl, TopFoldsTo80ColumnsSortsAndFilters) {
  if (IsSkipped()) return;
  vmem::region small(8 * kMiB, VMEM_HOST_ONLY), large(32 * kMiB, VMEM_HOST_ONLY);
  small.name("activations-of-a-layer-with-a-long-name");
  large.name("weights");
  memset(small.data(), 1, small.size());
  const auto top = [&](std::vector<std::string> more) {
    std::vector<std::string> words{"top", "--once", "--interval", "0.1", "--columns", "80"};
    words.insert(words.end(), more.begin(), more.end());
    const Ran ran = ctl(words);
    EXPECT_EQ(ran.status, 0) << ran.err;
    std::istringstream lines(ran.out);
    for (std::string line; std::getline(lines, line);) {
      const auto columns = std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; });
      EXPECT_LE(columns, 80) << line;
    }
    return ran.out;
  };
  const std::string all = top({});
  for (const char* word : {"p50 under ", "p99 under ", "longest", "evictions", "leases found", "where", "HHHHHHHHHHHH"})
    EXPECT_NE(all.find(word), std::string::npos) << word << "\n" << all;
  EXPECT_LT(all.find("weights"), all.find("activations")) << "the largest first";
  const std::string by_name = top({"--sort", "name"}), by_host = top({"--sort", "host"});
  EXPECT_GT(by_name.find("weights"), by_name.find("activations"));
  EXPECT_GT(by_host.find("weights"), by_host.find("activations"));
  const std::string filtered = top({"--filter", "weig"});
  EXPECT_NE(filtered.find("weights"), std::string::npos) << filtered;
  EXPECT_EQ(filtered.find("activations"), std::string::npos) << filtered;
  EXPECT_EQ(top({"--filter", "nowhere"}).find("weights"), std::string::npos);
  EXPECT_EQ(ctl({"top", "--once", "--sort", "colour"}).status, 2);
}

TEST_F(Ctl, TopAdvisesWhatTheFiguresAskFor) {
  if (IsSkipped()) return;
  vmem_shutdown();
  ASSERT_EQ(vmem_set("block_size", "64KiB"), 0) << vmem_last_error();
  {
    const std::string path = temp_ / "file";
    std::ofstream(path) << std::string(16 * kMiB, 'x');
    vmem::region r(16 * kMiB, path, 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
    EXPECT_EQ(ctl({"top", "--once", "--interval", "0.1"}).out.find("read-ahead wasted"), std::string::npos);
    r.prefetch();
    ASSERT_TRUE(vmem::test::eventually([&] { return r.query().host_bytes == r.size(); }));
    r.evict();
    const Ran once = ctl({"top", "--once", "--interval", "0.1"});
    EXPECT_NE(once.out.find("advice    100 % of read-ahead wasted: advise RANDOM"), std::string::npos) << once.out;
  }
  vmem_shutdown();
  EXPECT_EQ(vmem_set("block_size", "2MiB"), 0) << vmem_last_error();
}

// The library cannot see whether blocks read by fault-around are used.
TEST_F(Ctl, NeighboursAreShownAsWhatTheyAreAndNotAsReadAhead) {
  if (IsSkipped()) return;
  vmem_shutdown();
  ASSERT_EQ(vmem_set("block_size", "auto"), 0) << vmem_last_error();
  char readahead[32];
  ASSERT_EQ(vmem_get("readahead", readahead, sizeof readahead), 0);
  ASSERT_EQ(vmem_set("readahead", "0"), 0) << vmem_last_error();
  {
    const std::string path = temp_ / "file";
    std::ofstream(path) << std::string(16 * kMiB, 'x');
    vmem::region r(16 * kMiB, path, 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
    const auto bytes = r.view<volatile char>();
    size_t wrong = 0;
    for (size_t at = 0; at < r.size(); at += 64 << 10) wrong += bytes[at] != 'x';
    EXPECT_EQ(wrong, 0u);
    r.evict();
    const json stats = mine()["stats"];
    EXPECT_EQ(stats["fault_around_blocks"], 8 * 26) << "in each group of 32 blocks six are missed";
    EXPECT_EQ(stats["prefetched_blocks"], 0);
    EXPECT_EQ(stats["prefetch_wasted"], 0);
    EXPECT_EQ(ctl({"top", "--once", "--interval", "0.1"}).out.find("of read-ahead"), std::string::npos);
  }
  vmem_shutdown();
  EXPECT_EQ(vmem_set("block_size", "2MiB"), 0) << vmem_last_error();
  EXPECT_EQ(vmem_set("readahead", readahead), 0) << vmem_last_error();
}

TEST_F(Ctl, AWrongCommandLineIsExitCodeTwo) {
  if (IsSkipped()) return;
  for (const std::vector<std::string>& words : {std::vector<std::string>{},
                                                {"nonsense"},
                                                {"status", "--pid", "x"},
                                                {"status", "--pid", "-1"},
                                                {"status", "--pid", "0"},
                                                {"status", "--seconds", "nan"},
                                                {"top", "--pid", "99999999999"},
                                                {"top", "--interval", "0"},
                                                {"tune", "--pid", "0"},
                                                {"tune", "--pid", "1", ""},
                                                {"status", "--folder", ""},
                                                {"bench", "--spread", "nan"},
                                                {"status", "extra"},
                                                {"bench", "--size", "tiny"},
                                                {"bench", "--device", "abacus"},
                                                {"export", "--listen", "localhost"},
                                                {"export", "--listen", "127.0.0.1:99999"}}) {
    const Ran ran = ctl(words);
    EXPECT_EQ(ran.status, 2) << (words.empty() ? "" : words[0]) << ran.err;
    EXPECT_EQ(ran.err.rfind("vmemctl: ", 0), 0u) << ran.err;
    EXPECT_LT(ran.err.size(), 200u) << ran.err;
  }
  EXPECT_NE(ctl({"tpo"}).err.find("there is no command \"tpo\""), std::string::npos);
  EXPECT_EQ(ctl({"--help"}).status, 0);
  EXPECT_EQ(ctl({"--version"}).out.rfind("vmemctl 1.", 0), 0u);
}

TEST_F(Ctl, AnOutputThatCannotBeWrittenIsAFailure) {
  if (IsSkipped()) return;
  for (const char* words : {" status --seconds 0 >/dev/full", " status --seconds 0 >&-", " --help >/dev/full"}) {
    const Ran ran = run({"bash", "-c", tool() + " --folder " + folder() + words});
    EXPECT_EQ(ran.status, 1) << words;
    EXPECT_NE(ran.err.find("cannot be written"), std::string::npos) << words << ran.err;
  }
}

}  // namespace
