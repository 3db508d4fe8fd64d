// vmemctl export: the metrics, how they are served and refused, and a real Prometheus that runs
// every query of the dashboard.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include "common/patience.h"
#include "support.h"
#include "vmemctl/latest.h"
#include "vmemctl/metrics.h"

namespace {

using namespace ctltest;
using nlohmann::json;

int connect_to(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

// Sends these bytes and returns the server's answer; "" if no server listens.
std::string talk(int port, const std::string& request) {
  const int fd = connect_to(port);
  if (fd < 0) return "";
  std::string answer;
  if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) >= 0) {
    char buffer[4096];
    for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;) answer.append(buffer, static_cast<size_t>(n));
  }
  close(fd);
  return answer;
}

std::string get(int port, const std::string& path) {
  const std::string answer = talk(port, "GET " + path + " HTTP/1.0\r\n\r\n");
  const size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? "" : answer.substr(body + 4);
}

int port_of(const std::string& text) {
  const size_t colon = text.rfind(':');
  return colon == std::string::npos ? 0 : atoi(text.c_str() + colon + 1);
}

class CtlExport : public Ctl {
 protected:
  // Starts a server on a free port.
  int start(const std::vector<std::string>& more = {}) {
    std::vector<std::string> words{tool(),     "--folder",    folder(),  "export",
                                   "--listen", "127.0.0.1:0", "--sysfs", temp_ / "knobs"};
    words.insert(words.end(), more.begin(), more.end());
    server_ = std::make_unique<Running>(words);
    const std::string line = server_->line();
    EXPECT_NE(line.find("listening on http://127.0.0.1:"), std::string::npos) << line;
    return port_of(line.substr(0, line.rfind('/')));
  }
  std::string labels() const {
    return "pid=\"" + me() + "\",user=\"" + std::to_string(geteuid()) + "\",command=\"ctl_tests\"";
  }
  std::unique_ptr<Running> server_;
};

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (part) << "\nnot in\n" << (text)

TEST_F(CtlExport, CountsWhatTheProcessCounts) {
  if (IsSkipped()) return;
  vmem::region r(32 * kMiB, VMEM_HOST_ONLY);
  r.name("wei\"ghts\\");
  memset(r.data(), 1, 8 * kMiB);
  ASSERT_EQ(vmem_evict(r.data(), 4 * kMiB, VMEM_SSD), 0) << vmem_last_error();
  temp_.write("knobs/frame_limit_bytes", "77\n");
  temp_.write("knobs/uevent", "not a number\n");
  const auto stats = vmem::stats();
  Ran ran;
  // The count of faults includes a fault only after its thread has continued.
  const std::string timed = "vmem_fault_seconds_count{" + labels() + "} " + std::to_string(stats.faults) + "\n";
  for (int i = 0; i < 100 && ran.out.find(timed) == std::string::npos; ++i) {
    ran = ctl({"export", "--once", "--sysfs", temp_ / "knobs"});
    ASSERT_EQ(ran.status, 0) << ran.err;
  }
  const auto sample = [&](const std::string& name, const std::string& more, uint64_t value) {
    EXPECT_HAS(ran.out, name + "{" + labels() + more + "} " + std::to_string(value) + "\n");
  };
  sample("vmem_faults_total", "", stats.faults);
  sample("vmem_evictions_total", "", stats.evictions);
  sample("vmem_ssd_written_bytes_total", "", stats.write_bytes);
  sample("vmem_held_bytes", ",tier=\"host\"", stats.host_bytes);
  sample("vmem_held_bytes", ",tier=\"ssd\"", stats.ssd_bytes);
  sample("vmem_fault_seconds_count", "", stats.faults);
  sample("vmem_move_seconds_count", ",way=\"host_to_ssd\"", 2);
  sample("vmem_region_bytes", ",region=\"1\",name=\"wei\\\"ghts\\\\\",tier=\"ssd\"", 4 * kMiB);
  EXPECT_HAS(ran.out, "vmem_module{file=\"frame_limit_bytes\"} 77\n");
  EXPECT_EQ(ran.out.find("uevent"), std::string::npos);
  EXPECT_HAS(ran.out, "# TYPE vmem_fault_seconds histogram\n");
  EXPECT_HAS(ran.out, "le=\"+Inf\"} " + std::to_string(stats.faults));
}

TEST_F(CtlExport, HistogramsAreCumulativeAndEveryFamilyIsDescribedOnce) {
  if (IsSkipped()) return;
  vmem::region r(8 * kMiB, VMEM_HOST_ONLY);
  memset(r.data(), 1, r.size());
  std::istringstream in(ctl({"export", "--once"}).out);
  std::set<std::string> types;
  double last = 0;
  std::string last_series;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("# TYPE ", 0) == 0) {
      EXPECT_TRUE(types.insert(line).second) << line;
    } else if (const size_t le = line.find(",le="); le != std::string::npos) {
      const double value = atof(line.c_str() + line.rfind(' '));
      if (line.substr(0, le) == last_series) {
        EXPECT_GE(value, last) << line;
      }
      last_series = line.substr(0, le);
      last = value;
    }
  }
  EXPECT_GT(types.size(), 20u);
}

TEST_F(CtlExport, ServesHttpOnLoopbackUntilItIsStopped) {
  if (IsSkipped()) return;
  const int port = start();
  EXPECT_HAS(get(port, "/metrics"), "vmem_process_up{" + labels() + "} 1");
  EXPECT_HAS(get(port, "/metrics?x=1"), "vmem_process_up");
  EXPECT_HAS(get(port, "/"), "/metrics");
  EXPECT_HAS(talk(port, "GET /nothing HTTP/1.1\r\nHost: localhost:1\r\n\r\n"), "HTTP/1.1 404");
  const std::string refused = talk(port, "POST /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n");
  EXPECT_HAS(refused, "HTTP/1.1 405");
  EXPECT_HAS(refused, "Allow: GET, HEAD");
  EXPECT_HAS(talk(port, "GET /metrics HTTP/1.1\r\n\r\n"), "HTTP/1.1 400") << "names no host";
  const std::string head = talk(port, "HEAD /metrics HTTP/1.0\r\n\r\n");
  EXPECT_HAS(head, " 200 OK");
  EXPECT_HAS(head, "text/plain; version=0.0.4");
  EXPECT_EQ(head.find("vmem_"), std::string::npos);
  server_->stop(SIGTERM);
  EXPECT_EQ(server_->finish().status, 0);
}

TEST_F(CtlExport, OnlyNamesThatAreOursAreAnswered) {
  if (IsSkipped()) return;
  const int port = start({"--allow-host", "metrics.example"});
  const auto asked_as = [&](const std::string& host) {
    return talk(port, "GET /metrics HTTP/1.1\r\nHost: " + host + "\r\n\r\n");
  };
  char own[256] = "";
  ASSERT_EQ(gethostname(own, sizeof own - 1), 0);
  for (const std::string& host :
       {std::string("localhost"), "LocalHost:" + std::to_string(port), std::string("127.0.0.1"),
        std::string("[::1]:9448"), std::string("metrics.example:9448"), std::string(own)})
    EXPECT_HAS(asked_as(host), "HTTP/1.1 200") << host;
  // DNS rebinding: a hostile page's name resolves to our address, so its requests have a foreign
  // Host.
  for (const char* host : {"evil.example", "evil.example:9448", "localhost.evil.example", "127.0.0.1.evil.example",
                           "[::1].evil.example", "127.1.evil"}) {
    const std::string answer = asked_as(host);
    EXPECT_HAS(answer, "HTTP/1.1 403") << host;
    EXPECT_EQ(answer.find("vmem_"), std::string::npos) << host;
  }
}

TEST_F(CtlExport, ARequestThatIsTooLongOrNoneIsEndedAndTheOthersAreServed) {
  if (IsSkipped()) return;
  const int port = start();
  for (const std::string& request :
       {"GET /" + std::string(40000, 'x'), "GET / HTTP/1.0\r\nX: " + std::string(40000, 'x'),
        std::string("hello\r\n\r\n"), std::string(40000, '\0')})
    EXPECT_EQ(talk(port, request).find(" 200 "), std::string::npos);
  // A client that sends one byte after the other without end: it has ten seconds in all.
  const int slow = connect_to(port);
  const std::string request = "GET /metrics HTTP/1.0\r\nX: ";
  ASSERT_EQ(send(slow, request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  bool ended = false;
  for (int i = 0; i < 600 && !ended; ++i) {
    ended = send(slow, "x", 1, MSG_NOSIGNAL) != 1;
    usleep(100000);
  }
  EXPECT_TRUE(ended);
  close(slow);
  EXPECT_HAS(get(port, "/metrics"), "vmem_process_up");
}

TEST_F(CtlExport, HundredsOfSilentClientsKeepNobodyOut) {
  if (IsSkipped()) return;
  const int port = start();
  std::vector<int> silent;
  for (int i = 0; i < 300; ++i) silent.push_back(connect_to(port));
  EXPECT_HAS(get(port, "/metrics"), "vmem_process_up");
  for (const int fd : silent) close(fd);
}

// Run as a hostile user: requests with a foreign name, headers without end, connections kept open.
int attack(int port) {
  if (talk(port, "GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n").find("HTTP/1.1 403") == std::string::npos)
    return 2;
  if (talk(port, "GET / HTTP/1.0\r\nX: " + std::string(1 << 20, 'x')).find(" 200 ") != std::string::npos) return 3;
  for (int i = 0; i < 200; ++i) {
    const int fd = connect_to(port);
    if (fd >= 0 && i % 2 == 0) (void)!write(fd, "GET /metrics HTTP/1.0\r\nX:", 25);
  }
  return 0;
}

// Serves as root, and as an ordinary user, while another user is in the way.
TEST(CtlExportOther, ServesWhileAnotherUserMeansHarm) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become two other users";
  constexpr uid_t kMallory = 61513, kAlice = 61514;
  const TempFolder place;
  ASSERT_EQ(chmod(place.path().c_str(), 0755), 0);
  std::filesystem::copy_file(tool(), place / "vmemctl");
  for (const uid_t server : {uid_t{0}, kAlice}) {
    Running exporter({place / "vmemctl", "export", "--listen", "127.0.0.1:0"}, server);
    const std::string line = exporter.line();
    const int port = port_of(line.substr(0, line.rfind('/')));
    ASSERT_NE(port, 0) << line;
    int ready[2];
    ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
    const pid_t mallory = fork();
    if (mallory == 0) {
      if (setgroups(0, nullptr) != 0 || setgid(kMallory) != 0 || setuid(kMallory) != 0) _exit(4);
      const auto how = static_cast<char>(attack(port));
      if (write(ready[1], &how, 1) != 1) _exit(5);
      for (;;) pause();
    }
    close(ready[1]);
    char how = 1;
    EXPECT_EQ(read(ready[0], &how, 1), 1) << "it could not become another user";
    EXPECT_EQ(how, 0) << "2: asked under a foreign name; 3: a header of a megabyte";
    const auto start = std::chrono::steady_clock::now();
    EXPECT_HAS(get(port, "/metrics"), "vmem_process_up") << server;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5) * vmem::test::patience()) << server;
    kill(mallory, SIGKILL);
    EXPECT_EQ(waitpid(mallory, nullptr, 0), mallory);
    close(ready[0]);
  }
}

// Returns the processor time of a process in clock ticks.
long ticks_of(pid_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::string word;
  for (int i = 3; i < 14; ++i) fields >> word;
  long user = 0, system = 0;
  fields >> user >> system;
  return user + system;
}

TEST_F(CtlExport, WithoutDescriptorsItWaitsAndDoesNotSpin) {
  if (IsSkipped()) return;
  server_ = std::make_unique<Running>(std::vector<std::string>{
      "bash", "-c", "exec " + tool() + " --folder " + folder() + " export --listen 127.0.0.1:0"});
  const std::string line = server_->line();
  const int port = port_of(line.substr(0, line.rfind('/')));
  ASSERT_NE(port, 0) << line;
  EXPECT_HAS(get(port, "/metrics"), "vmem_process_up");  // now it has opened everything it needs
  const pid_t pid = server_->pid();
  rlimit enough{};
  ASSERT_EQ(prlimit(pid, RLIMIT_NOFILE, nullptr, &enough), 0);
  const rlimit none{3, enough.rlim_max};
  ASSERT_EQ(prlimit(pid, RLIMIT_NOFILE, &none, nullptr), 0);
  std::vector<int> waiting;
  for (int i = 0; i < 20; ++i) waiting.push_back(connect_to(port));
  const long first = ticks_of(pid);
  sleep(2);
  // Two seconds are 200 ticks; trying fifty times a second to get a descriptor takes almost none.
  EXPECT_LT(ticks_of(pid) - first, 50);
  ASSERT_EQ(prlimit(pid, RLIMIT_NOFILE, &enough, nullptr), 0);
  EXPECT_HAS(get(port, "/metrics"), "vmem_process_up");
  for (const int fd : waiting) close(fd);
}

TEST_F(CtlExport, ClientsThatSayNothingOrGoAwayDoNotKeepTheOthers) {
  if (IsSkipped()) return;
  const int port = start();
  std::vector<int> silent;
  for (int i = 0; i < 8; ++i) silent.push_back(connect_to(port));
  const int gone = connect_to(port);
  ASSERT_EQ(send(gone, "GET /metrics HTTP/1.0\r\n\r\n", 25, MSG_NOSIGNAL), 25);
  close(gone);
  EXPECT_HAS(get(port, "/metrics"), "vmem_process_up");
  for (const int fd : silent) close(fd);
}

TEST_F(CtlExport, APortThatIsTakenOrAnAddressThatIsNoneIsAClearFailure) {
  if (IsSkipped()) return;
  const int port = start();
  const Ran taken = ctl({"export", "--json", "--listen", "127.0.0.1:" + std::to_string(port)});
  EXPECT_EQ(taken.status, 5);
  EXPECT_HAS(taken.err, "127.0.0.1:" + std::to_string(port) + " is taken by another program");
  EXPECT_EQ(taken.json()["error"]["exit"], 5);
  EXPECT_EQ(ctl({"export", "--listen", "192.0.2.1:0"}).status, 1) << "not an address of this machine";
  for (const char* bad : {"9448", "localhost:9448", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:-1"})
    EXPECT_EQ(ctl({"export", "--listen", bad}).status, 2) << bad;
}

// ---- users who try to fill the memory of the process that serves or scrapes ----

size_t lines_with(const std::string& text, const std::string& part) {
  std::istringstream in(text);
  size_t n = 0;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("vmem_samples_left_out", 0) != 0 && line.find(part) != std::string::npos) ++n;
  }
  return n;
}

vmemctl::Process process_of(uid_t user, pid_t pid) {
  vmemctl::Process p;
  p.owner = p.person = user;
  p.pid = pid;
  vmem::publish::put_text(p.now.header.command, std::string(63, '"'));
  p.now.devices.resize(64);
  for (uint32_t d = 0; d < 64; ++d) p.now.devices[d].ordinal = d;
  p.now.regions.resize(16);
  for (uint64_t r = 0; r < 16; ++r) p.now.regions[r].id = r;
  return p;
}

TEST(CtlMetrics, AUserHasHisShareOfSamplesWhateverHeFillsThemWith) {
  constexpr uid_t kMallory = 61601, kAlice = 61602;
  constexpr size_t kProcesses = 300;
  const auto of = [](uid_t user) { return "user=\"" + std::to_string(user) + "\""; };
  vmemctl::Found found;
  found.processes.push_back(process_of(kAlice, 1));
  const std::string alone = vmemctl::metrics(found, "");
  const size_t of_one = lines_with(alone, of(kAlice));
  EXPECT_GT(of_one, 500u);
  EXPECT_EQ(alone.find("vmem_samples_left_out{"), std::string::npos);
  found.processes.clear();
  for (size_t i = 0; i < kProcesses; ++i) found.processes.push_back(process_of(kMallory, static_cast<pid_t>(i + 2)));
  found.processes.push_back(process_of(kAlice, 1));
  const std::string all = vmemctl::metrics(found, "");
  const size_t served = lines_with(all, of(kMallory));
  EXPECT_LE(served, vmemctl::kMaxSamples);
  EXPECT_HAS(all, "vmem_samples_left_out{" + of(kMallory) + "} " + std::to_string(kProcesses * of_one - served) + "\n");
  EXPECT_EQ(lines_with(all, "vmem_process_up{"), kProcesses + 1) << "all are there in what is told first";
  EXPECT_EQ(lines_with(all, "le=\"+Inf\""), lines_with(all, "_count{")) << "a histogram is served whole or not";
  EXPECT_EQ(lines_with(all, of(kAlice)), of_one);
  EXPECT_EQ(all.find("vmem_samples_left_out{" + of(kAlice)), std::string::npos);
}

TEST(CtlMetrics, ClientsThatReadSlowlyKeepFewTexts) {
  vmemctl::Latest latest;
  std::chrono::steady_clock::time_point now{std::chrono::hours(1)};
  size_t made = 0;
  const auto make = [&] { return std::to_string(++made); };
  std::vector<vmemctl::Body> kept;
  for (int client = 0; client < 100; ++client, now += std::chrono::seconds(1)) kept.push_back(latest.get(now, make));
  EXPECT_EQ(made, vmemctl::Latest::kMaxOlder + 1);
  EXPECT_EQ(kept.back(), kept[vmemctl::Latest::kMaxOlder]) << "shared, not copied";
  kept.erase(kept.begin());  // one of them has been read
  EXPECT_EQ(*latest.get(now, make), std::to_string(vmemctl::Latest::kMaxOlder + 2));
  kept.clear();
  for (int client = 0; client < 10; ++client, now += std::chrono::seconds(1)) latest.get(now, make);
  EXPECT_GT(made, vmemctl::Latest::kMaxOlder + 10) << "who reads and goes gets the latest";
  const vmemctl::Body same = latest.get(now, make);
  EXPECT_EQ(latest.get(now + vmemctl::Latest::kFresh, make), same) << "who asks at the same time gets the same";
  // If making the text fails, the next request makes it.
  EXPECT_THROW(latest.get(now + std::chrono::seconds(1), []() -> std::string { throw std::bad_alloc(); }),
               std::bad_alloc);
  EXPECT_NE(latest.get(now + std::chrono::seconds(1), make), nullptr);
}

// ---- a real Prometheus ----

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

std::string url_encoded(const std::string& text) {
  std::string out;
  char hex[4];
  for (const unsigned char c : text) {
    if (isalnum(c) != 0) {
      out += static_cast<char>(c);
    } else {
      snprintf(hex, sizeof hex, "%%%02X", c);
      out += hex;
    }
  }
  return out;
}

// Works with regions, an SSD and a simulated device, so that every panel has data.
class CtlPrometheus : public CtlExport {
 protected:
  void SetUp() override {
    if (run({"sh", "-c", "command -v prometheus"}).status != 0)
      GTEST_SKIP() << "prometheus is not installed (scripts/setup.sh monitoring)";
    CtlExport::SetUp();
    if (IsSkipped()) return;
    vmem_shutdown();
    ASSERT_EQ(vmem_set("device", "sim"), 0) << vmem_last_error();
    ASSERT_EQ(vmem_set("device_budget", "32MiB"), 0) << vmem_last_error();
    ASSERT_EQ(vmem_init(), 0) << vmem_last_error();
    worker_ = std::thread([this] { work(); });
  }
  void TearDown() override {
    stop_ = true;
    if (worker_.joinable()) worker_.join();
    prometheus_.reset();
    server_.reset();
    Ctl::TearDown();
  }
  void work() {
    vmem::region r(96 * kMiB);
    r.name("weights");
    auto* at = static_cast<unsigned char*>(r.data());
    for (size_t i = 0; !stop_; i = (i + 8 * kMiB) % r.size()) {
      memset(at + i, 1, 4 * kMiB);
      if (vmem_acquire(at + i, 4 * kMiB, VMEM_WRITE, 0, nullptr) != 0) {
        ADD_FAILURE() << vmem_last_error();
        return;
      }
      vmem_release(at + i, 4 * kMiB, nullptr);
      vmem_prefetch(at + (i + 8 * kMiB) % r.size(), 4 * kMiB, VMEM_HOST, nullptr);
      usleep(2000);
    }
  }
  // Starts Prometheus with our config, scraping `target`; returns its port, or 0.
  int start_prometheus(int target) {
    // A scrape that times out does not count; a rate covers 10 s.
    const std::string often = std::to_string(std::min(200 * vmem::test::patience(), 2000u)) + "ms";
    temp_.write("prometheus.yml", "global:\n  scrape_interval: " + often + "\n  scrape_timeout: " + often +
                                      "\nscrape_configs:\n  - job_name: vmem\n"
                                      "    static_configs:\n      - targets: [\"127.0.0.1:" +
                                      std::to_string(target) + "\"]\n");
    const int port = free_port();
    prometheus_ = std::make_unique<Running>(std::vector<std::string>{
        "prometheus", "--config.file=" + (temp_ / "prometheus.yml"), "--storage.tsdb.path=" + (temp_ / "data"),
        "--web.listen-address=127.0.0.1:" + std::to_string(port), "--log.level=error"});
    const bool ready = vmem::test::eventually([&] { return get(port, "/-/ready").find("Ready") != std::string::npos; },
                                              std::chrono::seconds(30), std::chrono::milliseconds(100));
    return ready ? port : 0;
  }
  static int free_port() {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    const bool bound = bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                       getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
    close(fd);
    return bound ? ntohs(address.sin_port) : 0;
  }
  static json query(int port, const std::string& expression) {
    return json::parse(get(port, "/api/v1/query?query=" + url_encoded(expression)), nullptr, false);
  }

  // Returns whether the answer has at least one series with a number.
  static bool answered(const json& answer) {
    if (!answer.is_object() || answer["status"] != "success") return false;
    const json& result = answer["data"]["result"];
    return std::any_of(result.begin(), result.end(), [](const json& r) { return r["value"][1] != "NaN"; });
  }

  std::atomic<bool> stop_{false};
  std::thread worker_;
  std::unique_ptr<Running> prometheus_;
};

// Each published statistic must be shown on the dashboard, or errors in it would stay unnoticed.
TEST_F(CtlExport, TheDashboardShowsEveryMetricThatIsToBeLookedAt) {
  if (IsSkipped()) return;
  const std::map<std::string, std::string> left_out = {
      {"vmem_process_info", "labels alone: versions and names"},
      {"vmem_copied_bytes_total", "a figure for tuning: no amount of it is a fault"},
      {"vmem_fault_around_blocks_total", "a figure for tuning: no amount of it is a fault"}};
  std::string queries;
  const json dashboard = json::parse(std::ifstream("docs/monitoring/grafana-dashboard.json"));
  for (const json& panel : dashboard["panels"]) {
    for (const json& target : panel["targets"]) queries += target["expr"].get<std::string>() + "\n";
  }
  size_t families = 0;
  std::istringstream text(ctl({"export", "--once"}).out);
  for (std::string line; std::getline(text, line);) {
    std::istringstream words(line);
    std::string hash, type, name;
    if (!(words >> hash >> type >> name) || hash != "#" || type != "TYPE") continue;
    ++families;
    const size_t at = queries.find(name);
    EXPECT_NE(at != std::string::npos, left_out.contains(name))
        << name
        << (at == std::string::npos ? " is in no panel of docs/monitoring/grafana-dashboard.json"
                                    : " is in a panel, and in the list of those that are not");
  }
  EXPECT_GE(families, 28u);
}

TEST(CtlMetrics, HaveEveryStatisticThatIsPublished) {
  const std::map<std::string, std::string> elsewhere = {{"fault_ns_total", "vmem_fault_seconds_sum"},
                                                        {"fault_ns_max", "the buckets of vmem_fault_seconds"},
                                                        {"host_to_device_bytes", "vmem_device_moved_bytes_total"},
                                                        {"device_to_host_bytes", "vmem_device_moved_bytes_total"}};
  vmemctl::Found found;
  vmemctl::Process& p = found.processes.emplace_back();
  uint64_t n = 1000000007;
  for (const vmemctl::Field& f : vmemctl::kFields) p.now.header.stats.*f.member = n++;
  const std::string text = vmemctl::metrics(found, "");
  n = 1000000007;
  for (const vmemctl::Field& f : vmemctl::kFields)
    EXPECT_NE(text.find(" " + std::to_string(n++) + "\n") != std::string::npos, elsewhere.contains(f.name)) << f.name;
  EXPECT_EQ(vmemctl::kFields.size() + std::size(p.now.header.stats.reserved), sizeof(vmem::publish::Stats) / 8);
  // Each field of vmem_stats must be published too, except its size and a number that the list of
  // regions has.
  std::string header{std::istreambuf_iterator<char>(std::ifstream("include/vmem/vmem.h").rdbuf()), {}};
  header = header.substr(header.find("struct vmem_stats {"));
  header = std::regex_replace(header.substr(0, header.find("};")), std::regex("/[*][^]*?[*]/"), "");
  const std::regex field("[a-z_]+(?=[,;])");
  std::set<std::string> names;
  for (std::sregex_iterator at(header.begin(), header.end(), field), end; at != end; ++at) names.insert(at->str());
  EXPECT_GE(names.size(), 25u);
  for (const vmemctl::Field& f : vmemctl::kFields) names.erase(f.name);
  EXPECT_EQ(names, (std::set<std::string>{"regions", "size"}));
}

TEST_F(CtlPrometheus, AnswersEveryQueryOfTheDashboard) {
  if (IsSkipped()) return;
  const int port = start_prometheus(start());
  ASSERT_NE(port, 0) << prometheus_->finish().err;
  const json dashboard = json::parse(std::ifstream("docs/monitoring/grafana-dashboard.json"));
  size_t panels = 0, queries = 0;
  for (const json& panel : dashboard["panels"]) {
    ++panels;
    for (const json& target : panel["targets"]) {
      ++queries;
      std::string expression = target["expr"];
      expression = replaced(replaced(expression, "$__rate_interval", "10s"), "$pid", me());
      ASSERT_EQ(expression.find('$'), std::string::npos) << expression;
      json answer;
      // Rates need two scrapes after the events, ratios need events.
      vmem::test::eventually(
          [&] {
            answer = query(port, expression);
            return answered(answer) || (answer.is_object() && answer["status"] == "error");
          },
          std::chrono::seconds(15), std::chrono::milliseconds(100));
      ASSERT_TRUE(answer.is_object()) << expression;
      EXPECT_EQ(answer["status"], "success") << expression << "\n" << answer.dump();
      EXPECT_TRUE(answered(answer)) << panel["title"] << ": " << expression << "\n" << answer.dump();
    }
  }
  EXPECT_GE(panels, 12u);
  EXPECT_GE(queries, 20u);
  // The scraped values are those of the process.
  stop_ = true;
  worker_.join();
  const std::string faults = std::to_string(vmem::stats().faults);
  json seen;
  vmem::test::eventually(
      [&] {
        seen = query(port, "vmem_faults_total{pid=\"" + me() + "\"}");
        return !seen["data"]["result"].empty() && seen["data"]["result"][0]["value"][1] == faults;
      },
      std::chrono::seconds(15), std::chrono::milliseconds(100));
  EXPECT_EQ(seen["data"]["result"][0]["value"][1], faults) << seen.dump();
}

}  // namespace
