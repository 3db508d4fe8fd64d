// The pager over the fakes, for tests that force every interleaving and every failure step by step.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pager/pager.h"
#include "pager_fakes.h"

namespace vmem::pager::test {

inline constexpr size_t kSmall = 64 << 10;

// Copy mode, unless a test uses blocks of 2 MiB, which are moved.
class PagerSteps : public ::testing::Test {
 protected:
  struct Settings : Config, Tunables {};

  void start(const Settings& settings, std::unique_ptr<FakeTrap> with = std::make_unique<FakeTrap>(),
             std::unique_ptr<device::Devices> devices = nullptr) {
    Parts parts;
    parts.trap = std::move(with);
    parts.devices = std::move(devices);
    parts.engine = std::make_unique<FakeEngine>();
    parts.space = std::make_unique<FakeSpace>();
    trap = static_cast<FakeTrap*>(parts.trap.get());
    engine = static_cast<FakeEngine*>(parts.engine.get());
    space = static_cast<FakeSpace*>(parts.space.get());
    pager = std::make_unique<Pager>(std::move(parts), settings, settings);
    ASSERT_TRUE(pager->start().ok());
  }
  static Settings config(uint64_t budget = 16 << 20) {
    Settings c;
    c.host_budget = budget;
    c.readahead_bytes = 0;
    c.fault_timeout_ms = 60000;
    return c;
  }
  std::byte* region(size_t blocks, size_t block_size = kSmall) {
    void* at = nullptr;
    RegionSpec what;
    what.size = blocks * block_size;
    what.block_size = block_size;
    const core::Status s = pager->create(what, &at);
    EXPECT_TRUE(s.ok()) << s.text();
    return static_cast<std::byte*>(at);
  }
  // A shared mapping of `bytes` of a file, in blocks of block_size. Only the engine's memory has
  // the file's bytes (so it has no holes).
  std::byte* shared(size_t bytes, size_t block_size = kSmall, Backing backing = Backing::file_shared) {
    std::string path = "/var/tmp/vmem-steps.XXXXXX";
    if (const char* tmp = getenv("TMPDIR"); tmp != nullptr) path = std::string(tmp) + "/vmem-steps.XXXXXX";
    const int fd = mkstemp(path.data());
    EXPECT_EQ(posix_fallocate(fd, 0, static_cast<off_t>(bytes)), 0);
    close(fd);
    void* at = nullptr;
    RegionSpec what;
    what.size = bytes;
    what.block_size = block_size;
    what.backing = backing;
    what.path = path;
    const core::Status s = pager->create(what, &at);
    EXPECT_TRUE(s.ok()) << s.text();
    unlink(path.c_str());
    return static_cast<std::byte*>(at);
  }
  void TearDown() override {
    if (pager == nullptr) return;
    pager->shutdown();
    EXPECT_EQ(pager->check(), "");
    EXPECT_EQ(space->extents(), 0u) << "every extent was released";
  }
  void put(void* at, uint64_t value) { EXPECT_TRUE(trap->store(at, value)); }
  uint64_t get(const void* at) {
    uint64_t value = 0;
    EXPECT_TRUE(trap->load(at, &value)) << "SIGBUS";
    return value;
  }
  bool bus(const void* at) {
    uint64_t value;
    return !trap->load(at, &value);
  }
  // Loads on a thread of its own; the future has the value.
  std::future<uint64_t> getting(const void* at) {
    const size_t before = trap->met(at);
    auto value = std::async(std::launch::async, [this, at] { return get(at); });
    trap->until_met(at, before + 1);
    return value;
  }
  std::future<void> putting(void* at, uint64_t value) {
    const size_t before = trap->met(at);
    auto put_it = std::async(std::launch::async, [this, at, value] { put(at, value); });
    trap->until_met(at, before + 1);
    return put_it;
  }
  template <typename Call>
  std::future<core::Status> calling(Call call) {
    return std::async(std::launch::async, call);
  }
  // A write of the block stops half way, then the program undoes its change: the store must get the
  // old bytes again.
  void tear_and_take_back(std::byte* at, size_t block, uint64_t was) {
    put(at, was + 1);
    engine->tear(EIO);
    EXPECT_EQ(pager->sync(at, block).code(), -EIO);
    put(at, was);
    evict(at, block);
    EXPECT_EQ(get(at), was);
    EXPECT_EQ(pager->counters().checksum_errors, 0u);
  }
  void evict(void* at, size_t size) {
    const core::Status s = pager->evict(at, size, VMEM_SSD);
    EXPECT_TRUE(s.ok()) << s.text();
  }
  uint64_t ssd(const void* at, size_t size) {
    vmem_residency out = {};
    EXPECT_TRUE(pager->queries().query(at, size, &out).ok());
    return out.ssd_bytes;
  }
  // Returns a word of the first mapped file, as the engine has it.
  uint64_t in_file(size_t offset) { return engine->word(1, offset); }
  struct vmem_stats stats() {
    struct vmem_stats out = {};
    pager->queries().stats(&out);
    return out;
  }
  static vmem_range range(void* at, size_t size, unsigned access = VMEM_READ) { return {at, size, access, 0}; }

  std::unique_ptr<Pager> pager;
  FakeTrap* trap = nullptr;
  FakeEngine* engine = nullptr;
  FakeSpace* space = nullptr;
};

}  // namespace vmem::pager::test
