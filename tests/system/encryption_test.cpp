// Setting encryption: the data on the disk is unreadable, and the data read back is right, on every
// path of a block.
#include <fcntl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "support.h"

namespace {

using systest::Settings;
using systest::SystemTest;

constexpr size_t kBlock = 64 << 10, kBlocks = 512;
constexpr const char kMarker[] = "what nobody else may read..";

struct Way {
  const char *engine, *compression, *transfer, *direct;
};

// ThreadSanitizer does not see why an image cannot change while it is written (tests/tsan.supp),
// and is slow for each stored word in it.
#if defined(__SANITIZE_THREAD__)
constexpr size_t kSparse = 4096;
#else
constexpr size_t kSparse = 8;
#endif

// Read everything at once: one character at a time takes minutes if every access is checked.
std::string contents(const std::string& path) {
  std::string all(std::filesystem::file_size(path), '\0');
  std::ifstream(path, std::ios::binary).read(all.data(), static_cast<std::streamsize>(all.size()));
  return all;
}
bool holds(const std::string& all, const std::string& text) {
  return memmem(all.data(), all.size(), text.data(), text.size()) != nullptr;
}

class EncryptionDevice : public SystemTest {};

class Encryption : public SystemTest, public ::testing::WithParamInterface<Way> {
 protected:
  void start(const std::string& store, const char* encryption) {
    vmem_shutdown();
    const Way w = GetParam();
    configure({{"ssd_path", store},
               {"encryption", encryption},
               {"io_engine", w.engine},
               {"compression", w.compression},
               {"transfer", w.transfer},
               {"direct_io", w.direct},
               {"block_size", std::to_string(kBlock)},
               {"host_budget", "16MiB"}});
  }
  static size_t stride() { return GetParam().compression == std::string("none") ? kSparse : 8; }
  // Stores a marker in every block, between bytes that compress by half.
  static void write(const vmem::region& r, uint64_t round) {
    auto* bytes = static_cast<char*>(r.data());
    for (size_t b = 0; b < kBlocks; ++b) {
      for (size_t i = 0; i < kBlock / 2; i += stride()) {
        const uint64_t word = systest::stamp(b * kBlock + i, round);
        memcpy(bytes + b * kBlock + i, &word, sizeof word);
      }
      memcpy(bytes + b * kBlock + kBlock * 3 / 4, kMarker, sizeof kMarker);
    }
  }
  static size_t wrong(const vmem::region& r, uint64_t round) {
    const auto* bytes = static_cast<const char*>(r.data());
    size_t bad = 0;
    for (size_t b = 0; b < kBlocks; ++b) {
      bool good = memcmp(bytes + b * kBlock + kBlock * 3 / 4, kMarker, sizeof kMarker) == 0;
      for (size_t i = 0; i < kBlock / 2; i += stride()) {
        const uint64_t word = systest::stamp(b * kBlock + i, round);
        good = good && memcmp(bytes + b * kBlock + i, &word, sizeof word) == 0;
      }
      bad += !good;
    }
    return bad;
  }
  static bool holds_marker(const std::string& path) {
    const std::string all = contents(path);
    EXPECT_GT(all.size(), kBlocks * kBlock / 4) << "nothing was stored";
    return holds(all, kMarker);
  }
};

TEST_P(Encryption, TheDiskTellsNothingAndEveryByteComesBack) {
  for (const bool encrypted : {true, false}) {
    systest::TempFile store;
    start(store.path(), encrypted ? "on" : "off");
    if (IsSkipped()) return;
    vmem::region r(kBlocks * kBlock, VMEM_HOST_ONLY);
    write(r, 1);
    EXPECT_EQ(wrong(r, 1), 0u);
    write(r, 2);  // over the blocks already in the store
    r.evict();
    // Without compression, a plain store shows the marker: so the check would find it.
    const bool would_show = GetParam().compression == std::string("none");
    if (encrypted || would_show) {
      EXPECT_EQ(holds_marker(store.path()), !encrypted);
    }
    EXPECT_EQ(wrong(r, 2), 0u);
    EXPECT_EQ(vmem::stats().checksum_errors, 0u);
    EXPECT_EQ(vmem::stats().io_errors, 0u);
  }
}

TEST_P(Encryption, WhatIsLeftAfterAKillTellsNothing) {
  systest::TempFile store;
  int said[2];
  ASSERT_EQ(pipe2(said, O_CLOEXEC), 0);
  const pid_t child = systest::start_child("EncryptionChild.DISABLED_StoresAndWaits",
                                           {{"ENCRYPTION_STORE", store.path()}}, {.user = {}, .output = said[1]});
  close(said[1]);
  std::string output;
  char c;
  while (output.find("stored\n") == std::string::npos && output.find("skipped\n") == std::string::npos &&
         read(said[0], &c, 1) == 1)
    output += c;
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(said[0]);
  if (output.find("skipped\n") != std::string::npos) GTEST_SKIP() << output;
  ASSERT_NE(output.find("stored\n"), std::string::npos) << output;
  EXPECT_FALSE(holds_marker(store.path()));
}

// Run by the test above.
TEST(EncryptionChild, DISABLED_StoresAndWaits) {
  for (const auto& [name, value] : {std::pair{"encryption", "on"}, {"device", "none"}, {"host_budget", "16MiB"}})
    ASSERT_EQ(vmem_set(name, value), 0) << vmem_last_error();
  ASSERT_EQ(vmem_set("ssd_path", getenv("ENCRYPTION_STORE")), 0) << vmem_last_error();
  const int rc = vmem_init();
  if (rc != 0) {
    printf("%s\nskipped\n", vmem_last_error());
    fflush(stdout);
    return;
  }
  vmem::region r(kBlocks * kBlock, VMEM_HOST_ONLY);
  for (size_t b = 0; b < kBlocks; ++b) memcpy(static_cast<char*>(r.data()) + b * kBlock, kMarker, sizeof kMarker);
  r.evict();
  printf("stored\n");
  fflush(stdout);
  for (;;) pause();
}

// Moves blocks from device memory to the store and back, through staging frames.
TEST_F(EncryptionDevice, BlocksThatADeviceChangedComeBack) {
  const std::string device = vmem::get("device");
  systest::TempFile store;
  configure({{"ssd_path", store.path()},
             {"encryption", "on"},
             {"device", "sim"},
             {"device_budget", "16MiB"},
             {"host_budget", "32MiB"}});
  if (IsSkipped()) return;
  {
    constexpr size_t kBytes = size_t{64} << 20, kStep = size_t{4} << 20;
    vmem::region r(kBytes);
    auto* bytes = static_cast<char*>(r.data());
    for (size_t at = 0; at < kBytes; at += kStep) {
      memset(bytes + at, static_cast<int>(1 + at / kStep), kStep);
      memcpy(bytes + at + 5000, kMarker, sizeof kMarker);
      ASSERT_EQ(vmem_acquire(bytes + at, kStep, VMEM_WRITE, 0, nullptr), 0) << vmem_last_error();
      vmem_release(bytes + at, kStep, nullptr);
    }
    for (size_t at = 0; at < kBytes; at += kStep) {
      EXPECT_EQ(bytes[at], static_cast<char>(1 + at / kStep));
      EXPECT_EQ(bytes[at + kStep - 1], static_cast<char>(1 + at / kStep));
      EXPECT_EQ(memcmp(bytes + at + 5000, kMarker, sizeof kMarker), 0);
    }
    EXPECT_GT(vmem::stats().write_bytes, uint64_t{16} << 20);
    EXPECT_FALSE(holds(contents(store.path()), kMarker));
  }
  vmem_shutdown();
  ASSERT_EQ(vmem_set("device", device.c_str()), 0);
  ASSERT_EQ(vmem_set("device_budget", "32MiB"), 0);
}

// An attacker who writes to the store can put back the old contents of a place, which also decrypt
// there.
TEST_F(EncryptionDevice, AnOlderPageInItsOldPlaceIsFound) {
  systest::TempFile store;
  configure({{"ssd_path", store.path()}, {"encryption", "on"}, {"device", "none"}, {"block_size", "64KiB"}});
  if (IsSkipped()) return;
  systest::LogLines log;
  vmem::region r(8 * kBlock, VMEM_HOST_ONLY);
  const auto stored = [&](int byte) {
    memset(r.data(), byte, r.size());
    r.evict();
    return contents(store.path());
  };
  const std::string older = stored(1), kZeros(4096, '\0');
  size_t again = 0;  // pages that have been overwritten in place: a block may move first
  for (int round = 2; round < 9 && again == 0; ++round) {
    const std::string newer = stored(round);
    for (size_t at = 0; at + 4096 <= std::min(older.size(), newer.size()); at += 4096)
      again += older.compare(at, 4096, newer, at, 4096) != 0 && older.compare(at, 4096, kZeros) != 0;
  }
  EXPECT_GT(again, 0u);
  const int fd = open(store.path().c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_EQ(pwrite(fd, older.data(), older.size(), 0), static_cast<ssize_t>(older.size()));
  ASSERT_EQ(fsync(fd), 0);
  close(fd);
  for (size_t b = 0; b < 8; ++b)
    EXPECT_EQ(vmem_acquire(r.view<char>().data() + b * kBlock, kBlock, VMEM_READ, VMEM_HOST, nullptr), -EIO) << b;
  EXPECT_GE(vmem::stats().checksum_errors, 8u);
  EXPECT_TRUE(log.contains("checksum mismatch"));
}

INSTANTIATE_TEST_SUITE_P(Ways, Encryption,
                         ::testing::Values(Way{"auto", "none", "auto", "on"}, Way{"threads", "none", "copy", "on"},
                                           Way{"auto", "lz4", "auto", "on"}, Way{"threads", "zstd", "copy", "off"}),
                         [](const auto& way) {
                           return std::string(way.param.engine) + "_" + way.param.compression + "_" +
                                  way.param.transfer + "_" + way.param.direct;
                         });

}  // namespace
