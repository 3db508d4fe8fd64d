// Publications: packing, what a reader refuses, whose folders are used, and files that dead
// processes leave.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>

#include "common/user_namespace.h"
#include "core/counters.h"
#include "publish/layout.h"
#include "publish/place.h"

namespace {

using namespace vmem::publish;
using vmem::core::Status;

class PublishFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path().string() + "/vmem-publish.XXXXXX";
    ASSERT_NE(mkdtemp(path_.data()), nullptr);
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Fd make(const std::string& name) const {
    return Fd(open((path_ + "/" + name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  }
  bool exists(const std::string& name) const {
    struct stat s {};
    return lstat((path_ + "/" + name).c_str(), &s) == 0;
  }
  // Writes a file as a dead process left it.
  void write_one(const std::string& name) const {
    Snapshot s;
    std::vector<std::byte> bytes;
    pack(s, &bytes);
    const Fd fd = make(name);
    ASSERT_EQ(write(fd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  void make_socket(const std::string& name) const {
    const Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    put_text(address.sun_path, path_ + "/" + name);
    ASSERT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0) << name;
  }
  void age(const std::string& name) const {
    const timespec old[2] = {{1, 0}, {1, 0}};
    ASSERT_EQ(utimensat(AT_FDCWD, (path_ + "/" + name).c_str(), old, AT_SYMLINK_NOFOLLOW), 0) << name;
  }
  std::string path_;
};

constexpr const char* kName = "12345-0123456789abcdef";

Snapshot sample() {
  Snapshot s;
  put_text(s.header.command, "a program");
  s.header.pid = 7;
  s.header.stats.faults = 42;
  s.devices.resize(2);
  put_text(s.devices[1].name, "second");
  s.regions.resize(3);
  put_text(s.regions[2].name, "weights");
  s.regions[2].size = 4096;
  return s;
}

TEST(PublishLayout, WhatIsPackedIsRead) {
  Snapshot s = sample(), read;
  std::vector<std::byte> bytes;
  pack(s, &bytes);
  bytes.resize(bytes.size() + 4096);  // the file may be longer than its valid part
  ASSERT_TRUE(unpack(bytes, &read).ok());
  EXPECT_EQ(read.header.pid, 7u);
  EXPECT_EQ(read.header.stats.faults, 42u);
  EXPECT_STREQ(read.devices.at(1).name, "second");
  EXPECT_STREQ(read.regions.at(2).name, "weights");
}

TEST(PublishLayout, AFileBeingRewrittenIsReadAgainAndNeverBelieved) {
  Snapshot s = sample(), other = sample(), read;
  other.header.stats.faults = 43;
  std::vector<std::byte> a, b;
  pack(s, &a);
  pack(other, &b);
  for (size_t cut = 8; cut < a.size(); cut += 8) {  // the writer is at `cut`
    std::vector<std::byte> torn(b.begin(), b.begin() + static_cast<std::ptrdiff_t>(cut));
    torn.insert(torn.end(), a.begin() + static_cast<std::ptrdiff_t>(cut), a.end());
    if (torn == a || torn == b) continue;
    ASSERT_EQ(unpack(torn, &read).code(), -EAGAIN) << cut;
  }
  EXPECT_EQ(unpack({}, &read).code(), -EAGAIN);
  EXPECT_EQ(unpack(std::vector<std::byte>(4096), &read).code(), -EAGAIN) << "room taken, nothing written yet";
}

TEST(PublishLayout, WhatContradictsItselfIsRefused) {
  Snapshot read;
  std::vector<std::byte> good;
  Snapshot s = sample();
  pack(s, &good);
  const auto with = [&](size_t offset, uint32_t value) {
    std::vector<std::byte> bytes = good;
    memcpy(bytes.data() + offset, &value, sizeof value);
    return unpack(bytes, &read);
  };
  EXPECT_EQ(with(0, 0x41414141).code(), -EINVAL);
  const Status version = with(offsetof(Header, version), 2);
  EXPECT_EQ(version.code(), -EPROTO);
  EXPECT_NE(version.text().find("version 2"), std::string_view::npos);
  EXPECT_EQ(with(offsetof(Header, regions), 0xffffffff).code(), -EINVAL);
  EXPECT_EQ(with(offsetof(Header, devices), kMaxDevices + 1).code(), -EINVAL);
  EXPECT_EQ(with(offsetof(Header, region_bytes), 8).code(), -EINVAL);
  EXPECT_EQ(with(offsetof(Header, regions), 4).code(), -EAGAIN) << "more regions than there are bytes";
  EXPECT_EQ(unpack(std::span(good).first(20), &read).code(), -EINVAL);
}

TEST(PublishLayout, TextsThatDoNotEndAreEnded) {
  Snapshot s = sample(), read;
  memset(s.header.command, 'x', sizeof s.header.command);
  memset(s.regions[0].name, 'y', sizeof s.regions[0].name);
  s.regions[0].backing = 77;
  std::vector<std::byte> bytes;
  pack(s, &bytes);
  ASSERT_TRUE(unpack(bytes, &read).ok());
  EXPECT_EQ(strlen(read.header.command), sizeof s.header.command - 1);
  EXPECT_EQ(strlen(read.regions[0].name), sizeof s.regions[0].name - 1);
  EXPECT_LT(read.regions[0].backing, std::size(kBackingNames));
}

TEST(PublishLayout, MoreRegionsThanFitAreCutAndCounted) {
  Snapshot s, read;
  s.regions.resize(kMaxRegions + 10);
  s.header.regions_total = s.regions.size();
  std::vector<std::byte> bytes;
  pack(s, &bytes);
  EXPECT_LE(bytes.size(), kMaxBytes);
  ASSERT_TRUE(unpack(bytes, &read).ok());
  EXPECT_EQ(read.regions.size(), kMaxRegions);
  EXPECT_EQ(read.header.regions_total, kMaxRegions + 10);
}

TEST(CoreHistogram, EachTimeIsInTheBucketOfItsPowerOfTwo) {
  using vmem::core::Histogram;
  EXPECT_EQ(Histogram::bucket(0), 0u);
  EXPECT_EQ(Histogram::bucket(1), 1u);
  EXPECT_EQ(Histogram::bucket(1023), 10u);
  EXPECT_EQ(Histogram::bucket(1024), 11u);
  EXPECT_EQ(Histogram::bucket(UINT64_MAX), Histogram::kBuckets - 1);
  vmem::core::Counters counters;
  for (const uint64_t ns : {1000u, 1500u, 5u}) counters.fault_took(ns);
  EXPECT_EQ(counters.fault_ns.count[10], 1u);
  EXPECT_EQ(counters.fault_ns.count[11], 1u);
  EXPECT_EQ(counters.fault_ns.sum_ns, counters.fault_ns_total);
}

TEST_F(PublishFolder, IsMadeForItsUserAloneAndClosedToOthers) {
  Fd fd;
  ASSERT_TRUE(open_folder(path_ + "/new", geteuid(), true, &fd).ok());
  struct stat s {};
  ASSERT_EQ(stat((path_ + "/new").c_str(), &s), 0);
  EXPECT_EQ(s.st_mode & 07777, 0700u);
  ASSERT_EQ(mkdir((path_ + "/open").c_str(), 0755), 0);
  ASSERT_TRUE(open_folder(path_ + "/open", geteuid(), true, &fd).ok());
  ASSERT_EQ(stat((path_ + "/open").c_str(), &s), 0);
  EXPECT_EQ(s.st_mode & 077, 0u);
}

TEST_F(PublishFolder, ASymbolicLinkOrSomebodyElsesFolderIsNotUsed) {
  Fd fd;
  ASSERT_EQ(mkdir((path_ + "/real").c_str(), 0700), 0);
  ASSERT_EQ(symlink((path_ + "/real").c_str(), (path_ + "/link").c_str()), 0);
  EXPECT_EQ(open_folder(path_ + "/link", geteuid(), true, &fd).code(), -EACCES);
  const Status s = open_folder(path_ + "/real", geteuid() + 1, true, &fd);
  EXPECT_EQ(s.code(), -EACCES);
  EXPECT_NE(s.text().find("belongs to user"), std::string_view::npos) << s.text();
  make("file");
  EXPECT_EQ(open_folder(path_ + "/file", geteuid(), true, &fd).code(), -EACCES);
  EXPECT_EQ(open_folder(path_ + "/none", geteuid(), false, &fd).code(), -ENOENT);
  EXPECT_FALSE(fd);
}

TEST_F(PublishFolder, FoldersOfARuntimeDirectoryThatIsNotTheUsersAreNotTaken) {
  const auto own = folders(geteuid(), path_.c_str());
  EXPECT_EQ(own.front(), path_ + "/vmem");
  EXPECT_EQ(own.back(), "/dev/shm/vmem-" + std::to_string(geteuid()));
  for (const char* bad : {"relative", "/nonexistent", ""})
    EXPECT_NE(folders(geteuid(), bad).front(), std::string(bad) + "/vmem");
  EXPECT_NE(folders(geteuid() + 1, path_.c_str()).front(), path_ + "/vmem");
}

TEST_F(PublishFolder, InAUserNamespaceNobodysFolderIsUsedAndOnesOwnHasTheNumberFromOutside) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to give numbers to users";
  ASSERT_EQ(chmod(path_.c_str(), 0755), 0);
  ASSERT_EQ(chown(path_.c_str(), 61522, 61522), 0);  // looks like the caller's own, whose number is missing, too
  const int unmapped = vmem::test::in_user_namespace(61521, "", [&] {
    Fd fd;
    const Status s = open_folder(path_, geteuid(), false, &fd);
    return s.code() == -EACCES && s.text().find("no number") != std::string_view::npos ? 0 : 1;
  });
  if (unmapped == vmem::test::kNoUserNamespace) GTEST_SKIP() << "user namespaces are not permitted here";
  EXPECT_EQ(unmapped, 0);
  EXPECT_EQ(vmem::test::in_user_namespace(61521, "0 61521 1\n1 700000 99\n",
                                          [] {
                                            if (folders(0, nullptr).back() != "/dev/shm/vmem-61521") return 1;
                                            return folders(5, nullptr).back() == "/dev/shm/vmem-700004" ? 0 : 2;
                                          }),
            0);
}

TEST_F(PublishFolder, OnlyRegularFilesOfTheOwnerAreRead) {
  Fd folder, file;
  ASSERT_TRUE(open_folder(path_, geteuid(), true, &folder).ok());
  make("target");
  ASSERT_EQ(symlink("target", (path_ + "/" + kName).c_str()), 0);
  EXPECT_FALSE(open_file(folder.get(), kName, geteuid(), &file).ok());
  ASSERT_EQ(unlink((path_ + "/" + kName).c_str()), 0);
  ASSERT_EQ(mkfifo((path_ + "/" + kName).c_str(), 0600), 0);  // a reader must not hang in open
  EXPECT_EQ(open_file(folder.get(), kName, geteuid(), &file).code(), -EACCES);
}

TEST_F(PublishFolder, WhatTheDeadLeftIsRemovedAndTheLivingStay) {
  Fd folder, other;
  ASSERT_TRUE(open_folder(path_, geteuid(), true, &folder).ok());
  Fd living = make(kName);
  ASSERT_TRUE(mark_alive(living.get()));
  write_one("777-00000000000000aa");
  make_socket("777-00000000000000aa.sock");
  make("unrelated");
  EXPECT_EQ(sweep(folder.get(), geteuid()), 1u);
  EXPECT_TRUE(exists(kName));
  EXPECT_FALSE(exists("777-00000000000000aa"));
  EXPECT_FALSE(exists("777-00000000000000aa.sock"));
  EXPECT_TRUE(exists("unrelated"));
  living.reset();  // the process dies
  EXPECT_EQ(sweep(folder.get(), geteuid()), 1u);
  EXPECT_FALSE(exists(kName));
}

TEST_F(PublishFolder, WhatIsNotOursIsNeverRemoved) {
  Fd folder;
  ASSERT_TRUE(open_folder(path_, geteuid(), true, &folder).ok());
  const std::string text = "777-00000000000000aa", linked = "777-00000000000000ab", link = "777-00000000000000ac",
                    open_to_others = "777-00000000000000ad", ours = "777-00000000000000ae";
  const Fd thesis = make(text);
  ASSERT_EQ(write(thesis.get(), "a thesis", 8), 8);
  write_one(linked);
  ASSERT_EQ(::link((path_ + "/" + linked).c_str(), (path_ + "/other name").c_str()), 0);
  ASSERT_EQ(symlink(text.c_str(), (path_ + "/" + link).c_str()), 0);
  write_one(open_to_others);
  ASSERT_EQ(chmod((path_ + "/" + open_to_others).c_str(), 0644), 0);
  make(text + ".sock");  // an ordinary file with a socket's name
  make(".new-something");
  make_socket("docker.sock");
  make_socket("778-00000000000000ff.sock");
  write_one(ours);
  for (const char* name : {".new-something", "docker.sock", "778-00000000000000ff.sock"}) age(name);
  ASSERT_EQ(chmod(path_.c_str(), 0755), 0);
  EXPECT_EQ(sweep(folder.get(), geteuid()), 0u) << "a folder that others can enter is none of ours";
  EXPECT_TRUE(exists(ours));
  EXPECT_TRUE(exists("778-00000000000000ff.sock"));
  ASSERT_EQ(chmod(path_.c_str(), 0700), 0);
  EXPECT_EQ(sweep(folder.get(), geteuid()), 1u);
  EXPECT_FALSE(exists(ours));
  EXPECT_FALSE(exists("778-00000000000000ff.sock"));
  for (const std::string& kept :
       {text, linked, link, open_to_others, text + ".sock", std::string(".new-something"), std::string("docker.sock")})
    EXPECT_TRUE(exists(kept)) << kept;
}

TEST_F(PublishFolder, ASocketIsOpenedOnlyIfItIsOneAndNoLink) {
  Fd folder, fd;
  ASSERT_TRUE(open_folder(path_, geteuid(), true, &folder).ok());
  const std::string socket = std::string(kName) + ".sock";
  EXPECT_EQ(open_socket(folder.get(), kName, geteuid(), &fd).code(), -ENOENT);
  make_socket("other.sock");
  ASSERT_EQ(symlink("other.sock", (path_ + "/" + socket).c_str()), 0);
  EXPECT_EQ(open_socket(folder.get(), kName, geteuid(), &fd).code(), -EACCES);
  ASSERT_EQ(unlink((path_ + "/" + socket).c_str()), 0);
  make(socket);
  EXPECT_EQ(open_socket(folder.get(), kName, geteuid(), &fd).code(), -EACCES);
  ASSERT_EQ(unlink((path_ + "/" + socket).c_str()), 0);
  make_socket(socket);
  EXPECT_EQ(open_socket(folder.get(), kName, geteuid() + 1, &fd).code(), -EACCES);
  EXPECT_TRUE(open_socket(folder.get(), kName, geteuid(), &fd).ok());
}

TEST_F(PublishFolder, TheMarkOfAWriterEndsWithExec) {
  Fd living = make(kName);
  ASSERT_TRUE(mark_alive(living.get()));
  const int kept = living.get();
  int gate[2];
  ASSERT_EQ(pipe2(gate, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    char c;
    (void)!read(gate[0], &c, 1);
    execlp("true", "true", nullptr);
    _exit(1);
  }
  living.reset();
  Fd look = make(kName);
  EXPECT_TRUE(is_alive(look.get())) << "the child has a copy of the descriptor";
  ASSERT_EQ(write(gate[1], "x", 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_FALSE(is_alive(look.get()));
  EXPECT_GE(kept, 0);
  close(gate[0]);
  close(gate[1]);
}

TEST(PublishPlace, NamesAreAPidAndSixteenDigits) {
  EXPECT_TRUE(is_name(kName));
  for (const char* bad : {"", "-0123456789abcdef", "12345", "12345-", "12a-0123456789abcdef", "1-0123456789abcdeg",
                          "1-0123456789abcdef0", ".new-1-0123456789abcdef", "1-0123456789abcdef.sock", "../etc/passwd"})
    EXPECT_FALSE(is_name(bad)) << bad;
}

TEST(PublishPlace, TheStartOfThisProcessIsKnownAndThatOfNoneIsZero) {
  EXPECT_NE(start_ticks(getpid()), 0u);
  EXPECT_EQ(start_ticks(0x7fffffff), 0u);
  EXPECT_NE(pid_namespace(), 0u);
}

}  // namespace
