// vmem_map of real files.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <thread>

#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;

constexpr size_t kMiB = 1 << 20;

struct Case {
  const char* name;
  const char* block;
  const char* transfer;
  const char* direct;
  size_t size;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

class Files : public SystemTest, public ::testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    configure({{"block_size", GetParam().block},
               {"transfer", GetParam().transfer},
               {"direct_io", GetParam().direct},
               {"host_budget", "16MiB"}});
  }
  size_t size() const { return GetParam().size; }
};

TEST_P(Files, ReadShowsTheFileAndNeverWritesIt) {
  TempFile file(size(), 3);
  const auto want = TempFile::content(size(), 3);
  vmem::region region(size(), file.path(), 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
  ASSERT_EQ(memcmp(region.data(), want.data(), size()), 0);
  ASSERT_EQ(memcmp(region.data(), want.data(), size()), 0);
  EXPECT_EQ(vmem::stats().write_bytes, 0u);
  EXPECT_EQ(vmem_acquire(region.data(), 4096, VMEM_WRITE, VMEM_HOST, nullptr), -EACCES);
  region.free();
  EXPECT_EQ(file.read(), want);
}

TEST_P(Files, SharedChangesReachTheFileBySync) {
  TempFile file(size(), 4);
  auto want = TempFile::content(size(), 4);
  vmem::region region(size(), file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  auto bytes = region.view<unsigned char>();
  for (size_t i = 0; i < size(); i += 3001) want[i] = bytes[i] = static_cast<unsigned char>(bytes[i] ^ 0x77);
  want[size() - 1] = bytes[size() - 1] = 42;
  region.sync();
  EXPECT_TRUE(file.read() == want);
  for (size_t i = 1; i < size(); i += 9001) want[i] = bytes[i] = 9;
  region.free();
  EXPECT_TRUE(file.read() == want) << "free writes what changed since";
  EXPECT_EQ(file.read().size(), size()) << "write-back stops at the file's end";
}

TEST_P(Files, PrivateChangesStayInTheRegion) {
  TempFile file(size(), 5);
  const auto original = TempFile::content(size(), 5);
  auto want = original;
  vmem::region region(size(), file.path(), 0, VMEM_MAP_PRIVATE | VMEM_HOST_ONLY);
  auto bytes = region.view<unsigned char>();
  for (size_t i = 0; i < size(); i += 5003) want[i] = bytes[i] = static_cast<unsigned char>(i);
  region.evict();
  ASSERT_EQ(memcmp(region.data(), want.data(), size()), 0);
  region.advise(VMEM_ADVISE_DONT_NEED);
  ASSERT_EQ(memcmp(region.data(), original.data(), size()), 0) << "dropped changes show the file again";
  region.free();
  EXPECT_TRUE(file.read() == original);
}

TEST_P(Files, APartOfAFileIsMappedFromItsOffset) {
  TempFile file(size(), 6);
  const auto want = TempFile::content(size(), 6);
  const size_t offset = 8192, length = size() - offset - 100;
  {
    vmem::region region(length, file.path(), offset, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
    ASSERT_EQ(memcmp(region.data(), want.data() + offset, length), 0);
    static_cast<unsigned char*>(region.data())[length - 1] ^= 1;
    region.sync();
  }
  auto changed = want;
  changed[offset + length - 1] ^= 1;
  EXPECT_TRUE(file.read() == changed) << "bytes around the region are left alone";
}

const Case kCases[] = {
    {"move_2m", "2MiB", "auto", "on", 64 * kMiB + 12345},  {"copy_2m", "2MiB", "copy", "on", 64 * kMiB + 4096},
    {"copy_64k", "64KiB", "auto", "on", 20 * kMiB + 777},  {"copy_4k", "4KiB", "auto", "on", 8 * kMiB + 1},
    {"buffered_2m", "2MiB", "auto", "off", 32 * kMiB + 5},
};
INSTANTIATE_TEST_SUITE_P(, Files, ::testing::ValuesIn(kCases), [](const auto& p) { return p.param.name; });

class FilesMore : public SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    configure({{"host_budget", "16MiB"}});
  }
  static int map(const std::string& path, size_t size, uint64_t offset, unsigned flags) {
    void* p = nullptr;
    const int rc = vmem_map(&p, size, path.c_str(), offset, flags | VMEM_HOST_ONLY);
    if (rc == 0) vmem_free(p);
    return rc;
  }
  static bool words(const char* text) { return std::string(vmem_last_error()).find(text) != std::string::npos; }
};

TEST_F(FilesMore, EachWrongArgumentHasItsOwnError) {
  TempFile file(10000);
  EXPECT_EQ(map(file.path(), 100, 100, VMEM_MAP_READ), -EINVAL);
  EXPECT_TRUE(words("multiple of 4096")) << vmem_last_error();
  EXPECT_EQ(map(file.path(), 100, 0, 0), -EINVAL);
  EXPECT_EQ(map(file.path(), 100, 0, VMEM_MAP_READ | VMEM_MAP_SHARED), -EINVAL);
  EXPECT_EQ(map(file.path(), 100, 0, VMEM_MAP_READ | 0x1000), -EINVAL);
  EXPECT_EQ(map(file.path(), 0, 0, VMEM_MAP_READ), -EINVAL);
  EXPECT_EQ(map("/no/such/file", 100, 0, VMEM_MAP_READ), -ENOENT);
  EXPECT_EQ(map(systest::temp_folder(), 100, 0, VMEM_MAP_READ), -EISDIR);
  EXPECT_EQ(map("/dev/null", 100, 0, VMEM_MAP_READ), -EINVAL);
  EXPECT_EQ(map(file.path(), 10000, 0, VMEM_MAP_READ), 0) << vmem_last_error();
  EXPECT_EQ(vmem::stats().regions, 0u);
}

TEST_F(FilesMore, NoPermissionIsSaid) {
  if (geteuid() == 0) GTEST_SKIP() << "root may read everything";
  TempFile file(10000);
  chmod(file.path().c_str(), 0);
  EXPECT_EQ(map(file.path(), 100, 0, VMEM_MAP_READ), -EACCES);
}

TEST_F(FilesMore, SharedIsExclusive) {
  TempFile file(4 * kMiB);
  vmem::region region(4 * kMiB, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  EXPECT_EQ(map(file.path(), 4096, 0, VMEM_MAP_SHARED), -EBUSY);
  EXPECT_TRUE(words(file.path().c_str())) << vmem_last_error();
  EXPECT_EQ(map(file.path(), 4096, 0, VMEM_MAP_READ), 0) << "readers need no lock";
  region.free();
  EXPECT_EQ(map(file.path(), 4096, 0, VMEM_MAP_SHARED), 0);
}

TEST_F(FilesMore, SharedRegionsOfOneFileKeepToTheirOwnBytes) {
  for (const char* block : {"2MiB", "64KiB"}) {
    ASSERT_EQ(vmem_set("block_size", block), 0);
    constexpr size_t kPart = 4 * kMiB + 12288;  // ends inside a block, where the next part begins
    TempFile file(3 * kPart + 77, 14);
    auto want = TempFile::content(3 * kPart + 77, 14);
    std::vector<vmem::region> parts;
    for (size_t n = 0; n < 3; ++n) {
      parts.emplace_back(n < 2 ? kPart : kPart + 77, file.path(), n * kPart, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
    }
    EXPECT_EQ(map(file.path(), 8192, kPart - 4096, VMEM_MAP_SHARED), -EBUSY);
    const std::string numbers = "bytes " + std::to_string(kPart - 4096) + " to " + std::to_string(kPart + 4096);
    EXPECT_TRUE(words(numbers.c_str())) << vmem_last_error();
    // Bring in all blocks before the first change: each holds some old bytes of the adjacent part.
    for (size_t n = 0; n < 3; ++n) {
      ASSERT_EQ(memcmp(parts[n].data(), want.data() + n * kPart, parts[n].size()), 0);
    }
    for (int round = 0; round < 3; ++round) {
      for (size_t i = static_cast<size_t>(round); i < want.size(); i += 1009) {
        const size_t n = std::min<size_t>(i / kPart, 2);
        parts[n].view<unsigned char>()[i - n * kPart] = want[i] = static_cast<unsigned char>(i + 3);
      }
      // Sync and evict in an order that could bring back old bytes at both edges.
      parts[1].sync();
      parts[0].sync();
      parts[2].evict();
      parts[1].evict();
    }
    for (auto& part : parts) part.sync();
    EXPECT_TRUE(file.read() == want) << block;
    parts.clear();
    EXPECT_TRUE(file.read() == want) << block;
  }
}

TEST_F(FilesMore, WithoutDescriptorsAMapIsRefusedAndTheRestGoesOn) {
  TempFile file(8 * kMiB + 5, 15), other(4096, 16);
  const auto want = TempFile::content(8 * kMiB + 5, 15);
  vmem::region region(8 * kMiB + 5, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  rlimit none = limit;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const int refused = map(other.path(), 4096, 0, VMEM_MAP_READ);
  const std::string why = vmem_last_error();
  auto bytes = region.view<unsigned char>();
  const bool right = memcmp(bytes.data(), want.data(), want.size()) == 0;
  bytes[8 * kMiB + 4] = 1;  // in the part of a page with which the file ends
  const int synced = vmem_sync(region.data(), region.size());
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(refused, -EMFILE) << why;
  EXPECT_NE(why.find(other.path()), std::string::npos) << why;
  EXPECT_TRUE(right);
  EXPECT_EQ(synced, 0) << vmem_last_error();
  EXPECT_EQ(file.read().back(), 1);
  EXPECT_EQ(map(other.path(), 4096, 0, VMEM_MAP_READ), 0) << vmem_last_error();
}

TEST_F(FilesMore, AFileThatBecomesShorterGivesSigbusAndSaysWhy) {
  TempFile file(16 * kMiB, 8);
  const auto want = TempFile::content(16 * kMiB, 8);
  vmem::region region(16 * kMiB, file.path(), 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
  systest::LogLines log;
  ASSERT_EQ(truncate(file.path().c_str(), 6 * kMiB), 0);
  auto* bytes = static_cast<volatile unsigned char*>(region.data());
  EXPECT_EQ(bytes[kMiB], want[kMiB]);
  EXPECT_TRUE(systest::raises_sigbus([&] { (void)bytes[12 * kMiB]; }));
  EXPECT_TRUE(log.contains("shorter"));
  EXPECT_TRUE(log.contains(file.path()));
  EXPECT_EQ(vmem_acquire(const_cast<unsigned char*>(bytes) + 12 * kMiB, 10, VMEM_READ, VMEM_HOST, nullptr), -EIO);
  EXPECT_TRUE(words("shorter")) << vmem_last_error();
  EXPECT_EQ(bytes[2 * kMiB], want[2 * kMiB]) << "the rest is served";
}

TEST_F(FilesMore, WhatAFileThatWasCutDidNotTakeIsStillAChangeUnderALease) {
  ASSERT_EQ(vmem_set("writeback_interval", "0"), 0);  // otherwise data written earlier would be gone
  for (const char* block : {"2MiB", "64KiB"}) {
    ASSERT_EQ(vmem_set("block_size", block), 0);
    TempFile file(4 * kMiB, 17);
    vmem::region region(4 * kMiB, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
    auto* bytes = static_cast<volatile unsigned char*>(region.data());
    const size_t at = 2 * kMiB + 8192;
    bytes[2 * kMiB] = 'Y';
    bytes[at] = 'Z';
    ASSERT_EQ(vmem_acquire(region.data(), region.size(), VMEM_READ, VMEM_HOST, nullptr), 0) << vmem_last_error();
    ASSERT_EQ(truncate(file.path().c_str(), 2 * kMiB + 4096), 0);
    region.sync();
    EXPECT_EQ(file.read().size(), 2 * kMiB + 4096);
    EXPECT_EQ(file.read().back(), TempFile::content(4 * kMiB, 17)[2 * kMiB + 4095]);
    ASSERT_EQ(truncate(file.path().c_str(), 4 * kMiB), 0);
    EXPECT_EQ(bytes[at], 'Z') << "the lease keeps it in memory";
    region.sync();
    EXPECT_EQ(file.read()[2 * kMiB], 'Y');
    EXPECT_EQ(file.read()[at], 'Z') << "and it is no cleaner than it was";
    EXPECT_EQ(vmem_release(region.data(), region.size(), nullptr), 0);
  }
}

// A file whose length changes under a region, compared with a plain mapping of the same file.
class Truncation : public SystemTest, public ::testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    configure({{"block_size", GetParam().block},
               {"transfer", GetParam().transfer},
               {"direct_io", GetParam().direct},
               {"host_budget", "16MiB"},
               {"readahead", "0"},
               {"trap", "uffd"}});
    fd_ = open(file_.path().c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd_, 0);
    mapping_ = static_cast<volatile unsigned char*>(mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0));
    ASSERT_NE(const_cast<unsigned char*>(mapping_), MAP_FAILED);
  }
  void TearDown() override {
    if (mapping_ != nullptr) munmap(const_cast<unsigned char*>(mapping_), kSize);
    if (fd_ >= 0) close(fd_);
    vmem_shutdown();
    vmem_set("trap", "auto");
    SystemTest::TearDown();
  }
  vmem::region map(unsigned how) { return vmem::region(kSize, file_.path(), 0, how | VMEM_HOST_ONLY); }
  // Loads at each offset give the same result in both, signals included.
  void expect_as_mmap(volatile unsigned char* bytes, const char* when) {
    for (const size_t at : kOffsets) {
      int ours = -1, theirs = -1;
      const bool our_signal = systest::raises_sigbus([&] { ours = bytes[at]; });
      const bool their_signal = systest::raises_sigbus([&] { theirs = mapping_[at]; });
      EXPECT_EQ(our_signal, their_signal) << when << ", offset " << at;
      EXPECT_EQ(ours, theirs) << when << ", offset " << at;
    }
  }
  off_t length() const {
    struct stat st {};
    fstat(fd_, &st);
    return st.st_size;
  }
  static constexpr size_t kSize = 8 * kMiB;
  static constexpr size_t kEnd = kMiB + 100;  // inside a page, and inside a block of 2 MiB
  static constexpr size_t kOffsets[] = {0,           4096,        kMiB - 1,     kMiB,     kEnd - 1,     kEnd,
                                        kMiB + 4095, kMiB + 4096, 2 * kMiB - 1, 2 * kMiB, 5 * kMiB + 7, kSize - 1};
  TempFile file_{kSize, 21};
  int fd_ = -1;
  volatile unsigned char* mapping_ = nullptr;
};

TEST_P(Truncation, ATouchMeetsWhatItMeetsInAMapping) {
  const auto want = TempFile::content(kSize, 21);
  for (const unsigned how : {VMEM_MAP_READ, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE}) {
    vmem::region region = map(how);
    auto* bytes = static_cast<volatile unsigned char*>(region.data());
    ASSERT_EQ(ftruncate(fd_, kEnd), 0);
    expect_as_mmap(bytes, "shorter");
    EXPECT_EQ(bytes[4096], want[4096]);
    ASSERT_EQ(ftruncate(fd_, 6 * kMiB), 0);
    expect_as_mmap(bytes, "longer, a hole");
    ASSERT_EQ(pwrite(fd_, want.data(), kSize, 0), static_cast<ssize_t>(kSize));
    expect_as_mmap(bytes, "as long as it was");
    EXPECT_EQ(bytes[kSize - 1], want[kSize - 1]);
    if (how == VMEM_MAP_SHARED) {
      bytes[5 * kMiB] = 77;
      region.sync();
      EXPECT_EQ(mapping_[5 * kMiB], 77);
    } else {
      bytes[5 * kMiB] = 78;
      EXPECT_EQ(bytes[5 * kMiB], 78);
      EXPECT_NE(mapping_[5 * kMiB], 78) << "a store that is nobody else's";
    }
    region.free();
    ASSERT_EQ(pwrite(fd_, want.data(), kSize, 0), static_cast<ssize_t>(kSize));
  }
  EXPECT_EQ(length(), static_cast<off_t>(kSize));
}

TEST_P(Truncation, WriteBackMakesNoFileLongerAndBringsNoByteBack) {
  const auto want = TempFile::content(kSize, 21);
  for (const off_t end : {off_t{0}, off_t{4096}, off_t{5 * kMiB + 4096 + 50}, off_t{5 * kMiB + 8192}}) {
    vmem::region region = map(VMEM_MAP_SHARED);
    auto* bytes = static_cast<volatile unsigned char*>(region.data());
    for (size_t at = 5 * kMiB; at < 5 * kMiB + 16384; at += 7) bytes[at] = 'Z';
    ASSERT_EQ(ftruncate(fd_, end), 0);
    region.sync();
    EXPECT_EQ(length(), end);
    ASSERT_EQ(ftruncate(fd_, kSize), 0);
    expect_as_mmap(bytes, "grown again");
    for (size_t at = 5 * kMiB; at < 5 * kMiB + 16384; ++at) {
      const int is = static_cast<off_t>(at) >= end ? 0 : (at - 5 * kMiB) % 7 == 0 ? 'Z' : want[at];
      ASSERT_EQ(int{bytes[at]}, is) << at << " of a file cut at " << end;
      ASSERT_EQ(int{mapping_[at]}, is) << at << " of a file cut at " << end;
    }
    bytes[5 * kMiB + 12000] = 'n';
    region.free();
    EXPECT_EQ(mapping_[5 * kMiB + 12000], 'n');
    EXPECT_EQ(mapping_[5 * kMiB + 12001], end > off_t{5 * kMiB + 12001} ? want[5 * kMiB + 12001] : 0);
    EXPECT_EQ(length(), static_cast<off_t>(kSize));
    ASSERT_EQ(pwrite(fd_, want.data(), kSize, 0), static_cast<ssize_t>(kSize));
  }
}

TEST_P(Truncation, ALeaseGetsWhatTheFileHas) {
  const auto want = TempFile::content(kSize, 21);
  vmem::region region = map(VMEM_MAP_READ);
  auto* bytes = static_cast<unsigned char*>(region.data());
  ASSERT_EQ(ftruncate(fd_, kEnd), 0);
  ASSERT_EQ(vmem_acquire(bytes, kEnd, VMEM_READ, VMEM_HOST, nullptr), 0) << vmem_last_error();
  EXPECT_EQ(memcmp(bytes, want.data(), kEnd), 0);
  EXPECT_EQ(vmem_release(bytes, kEnd, nullptr), 0);
  EXPECT_EQ(vmem_acquire(bytes + 4 * kMiB, 10, VMEM_READ, VMEM_HOST, nullptr), -EIO);
  EXPECT_NE(std::string(vmem_last_error()).find("shorter"), std::string::npos) << vmem_last_error();
  ASSERT_EQ(pwrite(fd_, want.data(), kSize, 0), static_cast<ssize_t>(kSize));
  EXPECT_EQ(vmem_acquire(bytes + 4 * kMiB, 10, VMEM_READ, VMEM_HOST, nullptr), 0) << vmem_last_error();
  EXPECT_EQ(bytes[4 * kMiB], want[4 * kMiB]);
  EXPECT_EQ(vmem_release(bytes + 4 * kMiB, 10, nullptr), 0);
  EXPECT_EQ(vmem_advise(bytes, kSize, VMEM_ADVISE_DONT_NEED, VMEM_HOST), 0) << vmem_last_error();
  EXPECT_EQ(memcmp(bytes, want.data(), kSize), 0);
}
// The last block is larger than its part of the region.
TEST_P(Truncation, BeyondTheEndOfARegionThatShowsItsFileAccessesGetSigbus) {
  if (std::string(GetParam().block) == "4KiB") GTEST_SKIP() << "such blocks end where the region does";
  TempFile file(5 * 4096, 18);
  vmem::region region(5 * 4096, file.path(), 0, VMEM_MAP_PRIVATE | VMEM_HOST_ONLY);
  auto* bytes = static_cast<volatile unsigned char*>(region.data());
  ASSERT_EQ(truncate(file.path().c_str(), 4096 + 100), 0);
  const unsigned char first = bytes[1];
  EXPECT_EQ(first, TempFile::content(5 * 4096, 18)[1]);
  EXPECT_TRUE(systest::raises_sigbus([&] { (void)bytes[6 * 4096]; }));
  bytes[1] = static_cast<unsigned char>(first + 1);
  EXPECT_EQ(vmem_advise(region.data(), region.size(), VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error();
  EXPECT_EQ(bytes[1], first) << "its own bytes are gone";
  EXPECT_TRUE(systest::raises_sigbus([&] { (void)bytes[6 * 4096]; })) << "neither let in nor left waiting";
  EXPECT_TRUE(systest::raises_sigbus([&] { (void)bytes[3 * 4096]; })) << "beyond the end of the file";
}

INSTANTIATE_TEST_SUITE_P(, Truncation, ::testing::ValuesIn(kCases), [](const auto& p) { return p.param.name; });

TEST_F(FilesMore, ChangesOfASharedFileReachItAtExit) {
  TempFile file(8 * kMiB, 9);
  auto want = TempFile::content(8 * kMiB, 9);
  vmem_shutdown();
  const pid_t child = systest::start_child("FilesChild.DISABLED_WritesAndExits", {{"VMEM_TEST_FILE", file.path()}});
  ASSERT_EQ(systest::wait_for_child(child, 60), 0);
  for (size_t i = 0; i < want.size(); i += 4096) want[i] = 0xee;
  EXPECT_TRUE(file.read() == want);
}

// Run by the test above in its own process: exits without vmem_sync, vmem_free or vmem_shutdown.
TEST(FilesChild, DISABLED_WritesAndExits) {
  void* p = nullptr;
  const char* path = getenv("VMEM_TEST_FILE");
  ASSERT_NE(path, nullptr);
  ASSERT_EQ(vmem_map(&p, 8 * kMiB, path, 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY), 0) << vmem_last_error();
  for (size_t i = 0; i < 8 * kMiB; i += 4096) static_cast<unsigned char*>(p)[i] = 0xee;
}

TEST_F(FilesMore, TheFileMayBeUnlinkedWhileItIsMapped) {
  std::string path;
  vmem::region region;
  {
    TempFile file(4 * kMiB, 12);
    path = file.path();
    region = vmem::region(4 * kMiB, path, 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
  }
  EXPECT_NE(access(path.c_str(), F_OK), 0);
  const auto want = TempFile::content(4 * kMiB, 12);
  EXPECT_EQ(memcmp(region.data(), want.data(), want.size()), 0);
}

TEST_F(FilesMore, AStrayStoreIntoAReadRegionNeverReachesTheFile) {
  TempFile file(8 * kMiB, 13);
  const auto want = TempFile::content(8 * kMiB, 13);
  for (const char* block : {"2MiB", "64KiB"}) {
    ASSERT_EQ(vmem_set("block_size", block), 0);
    vmem::region region(8 * kMiB, file.path(), 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
    auto* bytes = static_cast<volatile unsigned char*>(region.data());
    bytes[5] = 1;
    vmem_evict(region.data(), region.size(), VMEM_SSD);
    EXPECT_EQ(bytes[5], want[5]) << "the stray store is gone with the block";
    region.sync();
    region.free();
    EXPECT_TRUE(file.read() == want);
  }
}

}  // namespace
