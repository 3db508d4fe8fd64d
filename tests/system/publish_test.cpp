// A process that publishes itself: its file, its socket, and the effects of fork, shutdown, and
// changes by others.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "child.h"
#include "common/patience.h"
#include "publish/layout.h"
#include "publish/place.h"
#include "support.h"

namespace {

namespace publish = vmem::publish;
using systest::SystemTest;

class Publication : public SystemTest {
 protected:
  void SetUp() override {
    runtime_dir_ = systest::temp_folder() + "/vmem-runtime.XXXXXX";
    ASSERT_NE(mkdtemp(runtime_dir_.data()), nullptr);
    setenv("XDG_RUNTIME_DIR", runtime_dir_.c_str(), 1);
    SystemTest::SetUp();
  }
  void TearDown() override {
    SystemTest::TearDown();
    vmem_set("publish", "on");
    vmem_set("debug", "off");
    unsetenv("XDG_RUNTIME_DIR");
    std::error_code ignored;
    std::filesystem::remove_all(runtime_dir_, ignored);
  }
  static std::string path() { return vmem::api::Runtime::get().published_at(); }
  size_t files() const {
    size_t n = 0;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(runtime_dir_ + "/vmem", none))
      n += entry.exists() || true;
    return n;
  }
  // One exchange with the process that published `path`; code 1: no answer.
  static publish::Reply ask(const std::string& path, publish::Ask what, const char* name = "", const char* value = "") {
    publish::Request request{};
    memcpy(request.magic, publish::kRequestMagic, sizeof request.magic);
    request.version = publish::kVersion;
    request.ask = static_cast<uint32_t>(what);
    publish::put_text(request.name, name);
    publish::put_text(request.value, value);
    return exchange(path, &request, sizeof request);
  }
  static publish::Reply exchange(const std::string& path, const void* data, size_t size) {
    publish::Reply reply{};
    reply.code = 1;
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    publish::put_text(address.sun_path, publish::socket_name(path));
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
        send(fd, data, size, MSG_NOSIGNAL) >= 0 && recv(fd, &reply, sizeof reply, 0) != sizeof reply)
      reply.code = 1;
    close(fd);
    return reply;
  }
  static publish::Snapshot read(const std::string& path) {
    publish::Snapshot out;
    vmem::core::Status s;
    const bool whole = vmem::test::eventually(
        [&] {
          std::ifstream in(path, std::ios::binary);
          const std::vector<char> text((std::istreambuf_iterator<char>(in)), {});
          s = publish::unpack(std::as_bytes(std::span(text)), &out);
          return s.code() != -EAGAIN;
        },
        std::chrono::seconds(20), std::chrono::milliseconds(1));
    EXPECT_TRUE(whole) << path << " never became whole";
    EXPECT_TRUE(s.ok()) << s.text();
    return out;
  }

  std::string runtime_dir_;
};

TEST_F(Publication, IsReadableByItsUserAloneAndTellsWhatVmemStatsTells) {
  configure({});
  if (IsSkipped()) return;
  vmem::region r(32 << 20, VMEM_HOST_ONLY);
  r.name("weights");
  memset(r.data(), 1, 8 << 20);
  const std::string at = path();
  ASSERT_EQ(at.rfind(runtime_dir_ + "/vmem/" + std::to_string(getpid()) + "-", 0), 0u) << at;
  for (const std::string& file : {at, publish::socket_name(at)}) {
    struct stat s {};
    ASSERT_EQ(lstat(file.c_str(), &s), 0) << file;
    EXPECT_EQ(s.st_mode & 0777, 0600u) << file;
    EXPECT_EQ(s.st_uid, geteuid());
  }
  // The count of faults includes a fault only after its thread has continued.
  publish::Snapshot seen;
  uint64_t faults = 0;
  for (int i = 0; i < 1000 && faults < 4; ++i) {
    ASSERT_EQ(ask(at, publish::Ask::refresh).code, 0);
    seen = read(at);
    faults = 0;
    for (const uint64_t n : seen.header.fault.count) faults += n;
  }
  EXPECT_EQ(seen.header.pid, static_cast<uint32_t>(getpid()));
  EXPECT_EQ(seen.header.regions_total, 1u);
  ASSERT_EQ(seen.regions.size(), 1u);
  EXPECT_STREQ(seen.regions[0].name, "weights");
  EXPECT_EQ(seen.regions[0].host_bytes, size_t{8} << 20);
  EXPECT_EQ(seen.regions[0].zero_bytes, size_t{24} << 20);
  const auto stats = vmem::stats();
  EXPECT_EQ(seen.header.stats.faults, stats.faults);
  EXPECT_EQ(seen.header.stats.host_bytes, stats.host_bytes);
  EXPECT_EQ(faults, stats.faults);
  EXPECT_EQ(seen.header.fault.sum_ns, stats.fault_ns_total);
}

TEST_F(Publication, TellsWhichDeviceTierThereIs) {
  for (const char* device : {"sim-handles", "sim", "none"}) {
    vmem_shutdown();
    configure({{"device", device}});
    if (IsSkipped()) return;
    ASSERT_EQ(ask(path(), publish::Ask::refresh).code, 0);
    EXPECT_STREQ(read(path()).header.device_tier, device == std::string("none") ? "" : device);
  }
  vmem_set("device", "auto");
}

TEST_F(Publication, CountsBlocksThatWentToTheSsdAndCameBack) {
  configure({});
  if (IsSkipped()) return;
  vmem::region r(16 << 20, VMEM_HOST_ONLY);
  memset(r.data(), 1, r.size());
  r.evict();
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, VMEM_HOST, nullptr), 0) << vmem_last_error();
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, VMEM_HOST, nullptr), 0) << vmem_last_error();
  ASSERT_EQ(ask(path(), publish::Ask::refresh).code, 0);
  const publish::Snapshot seen = read(path());
  const auto total = [&](vmem::core::Way way) {
    uint64_t n = 0;
    for (const uint64_t count : seen.header.move[static_cast<size_t>(way)].count) n += count;
    return n;
  };
  EXPECT_EQ(total(vmem::core::Way::host_to_ssd), 8u);
  EXPECT_EQ(total(vmem::core::Way::ssd_to_host), 8u);
  EXPECT_EQ(total(vmem::core::Way::to_device), 0u);
  EXPECT_EQ(seen.header.stats.lease_blocks, 16u);
  EXPECT_EQ(seen.header.stats.lease_hits, 8u);
  EXPECT_EQ(seen.regions.at(0).leased_bytes, r.size());
  for (int i = 0; i < 2; ++i) ASSERT_EQ(vmem_release(r.data(), r.size(), nullptr), 0);
}

TEST_F(Publication, LiveSettingsChangeFromOutsideAndEverythingElseIsRefusedWithWords) {
  configure({});
  if (IsSkipped()) return;
  const auto good = ask(path(), publish::Ask::set, "readahead", "4MiB");
  EXPECT_EQ(good.code, 0) << good.text;
  EXPECT_EQ(vmem::get("readahead"), std::to_string(4 << 20));
  EXPECT_STREQ(ask(path(), publish::Ask::get, "readahead").text, "4194304");
  const auto bad = ask(path(), publish::Ask::set, "readahead", "many");
  EXPECT_EQ(bad.code, -EINVAL);
  EXPECT_NE(std::string(bad.text).find("\"many\" is not accepted"), std::string::npos) << bad.text;
  const auto fixed = ask(path(), publish::Ask::set, "io_depth", "8");
  EXPECT_EQ(fixed.code, -EBUSY);
  EXPECT_NE(std::string(fixed.text).find("io_depth cannot change"), std::string::npos) << fixed.text;
  EXPECT_EQ(vmem::get("io_depth"), "16");
  EXPECT_EQ(ask(path(), publish::Ask::set, "nonsense", "1").code, -ENOENT);
  EXPECT_EQ(ask(path(), static_cast<publish::Ask>(99)).code, -ENOSYS);
  publish::Request request{};
  EXPECT_EQ(exchange(path(), &request, sizeof request).code, -EPROTO);
  EXPECT_EQ(exchange(path(), "hello", 5).code, -EPROTO);
  EXPECT_EQ(ask(path(), publish::Ask::refresh).code, 0) << "and it goes on answering";
}

TEST_F(Publication, PublishOffTakesItAwayAlsoWhenAskedFromOutsideAndOnBringsItBack) {
  configure({});
  if (IsSkipped()) return;
  EXPECT_EQ(files(), 2u);
  ASSERT_EQ(vmem_set("publish", "off"), 0) << vmem_last_error();
  EXPECT_EQ(files(), 0u);
  EXPECT_EQ(path(), "");
  ASSERT_EQ(vmem_set("publish", "on"), 0) << vmem_last_error();
  EXPECT_EQ(files(), 2u);
  EXPECT_EQ(ask(path(), publish::Ask::set, "publish", "off").code, 0);
  EXPECT_EQ(path(), "");
  ASSERT_EQ(vmem_set("publish", "on"), 0) << vmem_last_error();  // waits for the thread that is ending
  EXPECT_EQ(files(), 2u);
  EXPECT_EQ(ask(path(), publish::Ask::refresh).code, 0);
  vmem_shutdown();
  EXPECT_EQ(files(), 0u);
}

TEST_F(Publication, AForkedChildLeavesTheParentsFileAloneAndTellsNothing) {
  configure({});
  if (IsSkipped()) return;
  const std::string at = path();
  EXPECT_EQ(systest::status_of_fork([]() -> int {
              vmem_shutdown();
              std::exit(0);  // runs the handlers of exit()
            }),
            0);
  EXPECT_EQ(files(), 2u);
  EXPECT_EQ(ask(at, publish::Ask::refresh).code, 0);
}

TEST_F(Publication, AFileThatSomebodyRemovedOrTruncatedIsMadeAgainAndHurtsNobody) {
  configure({});
  if (IsSkipped()) return;
  vmem::region r(8 << 20, VMEM_HOST_ONLY);
  const std::string at = path();
  ASSERT_EQ(truncate(at.c_str(), 0), 0);
  memset(r.data(), 1, r.size());
  ASSERT_EQ(ask(at, publish::Ask::refresh).code, 0);
  EXPECT_EQ(read(at).header.regions_total, 1u);
  std::filesystem::remove_all(runtime_dir_ + "/vmem");
  vmem::test::eventually([&] { return path() != at && files() == 2; });
  EXPECT_NE(path(), at);
  ASSERT_EQ(ask(path(), publish::Ask::refresh).code, 0);
  EXPECT_EQ(read(path()).header.regions_total, 1u);
}

TEST_F(Publication, AClientThatSaysNothingDoesNotStopShutdown) {
  configure({});
  if (IsSkipped()) return;
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  publish::put_text(address.sun_path, publish::socket_name(path()));
  ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  vmem_shutdown();
  EXPECT_EQ(files(), 0u);
  close(fd);
}

TEST_F(Publication, SettingsFromOutsideAndShutdownAtOnceEndBoth) {
  configure({});
  if (IsSkipped()) return;
  std::atomic<bool> stop{false};
  std::atomic<unsigned> answered{0};
  std::thread asker([&] {
    while (!stop) {
      std::error_code none;
      for (const auto& entry : std::filesystem::directory_iterator(runtime_dir_ + "/vmem", none)) {
        const std::string at = entry.path();
        if (!publish::is_name(entry.path().filename())) continue;
        answered += ask(at, publish::Ask::set, "readahead", "2MiB").code == 0;
        ask(at, publish::Ask::refresh);
      }
    }
  });
  for (int round = 0; round < 20 || (answered == 0 && round < 2000); ++round) {
    ASSERT_EQ(vmem_init(), 0) << vmem_last_error();
    vmem::region r(4 << 20, VMEM_HOST_ONLY);
    memset(r.data(), 1, r.size());
    ASSERT_EQ(vmem_set("readahead", "8MiB"), 0);
    r.free();
    vmem_shutdown();
  }
  stop = true;
  asker.join();
  EXPECT_GT(answered, 0u);
  EXPECT_EQ(files(), 0u);
}

}  // namespace
