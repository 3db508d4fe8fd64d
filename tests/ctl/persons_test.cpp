// Shares of persons: who has subordinate ids is as many users as he likes, and one person.
#include "vmemctl/persons.h"

#include <sstream>

#include "support.h"
#include "vmemctl/metrics.h"

namespace {

using namespace ctltest;
using namespace vmemctl;

constexpr uid_t kMallory = 61541, kAlice = 61542, kFarAway = 1200000;  // the last from a directory of a company
constexpr uid_t kFirst = 700000;                                       // of Mallory's

Persons persons() {
  std::istringstream file(
      "# a comment\nroot:600000:65536\n61541:700000:65536\nnobody at all:800000:65536\n61542:x:65536\n61542:900000\n"
      "61542:99999999999:1\n");
  return Persons(file);
}

TEST(CtlPersons, AreWhoseSubordinateIdsUsersAre) {
  const Persons p = persons();
  EXPECT_EQ(p.of(kMallory), kMallory);
  EXPECT_EQ(p.of(kFirst), kMallory);
  EXPECT_EQ(p.of(kFirst + 65535), kMallory);
  EXPECT_EQ(p.of(kFirst + 65536), kFirst + 65536);
  EXPECT_EQ(p.of(kFirst - 1), kFirst - 1);
  EXPECT_EQ(p.of(600005), 0u);
  EXPECT_EQ(p.of(800000), 800000u);
  EXPECT_EQ(p.of(900000), 900000u);
  EXPECT_EQ(Persons().of(kFirst), kFirst);
}

TEST(CtlPersons, HaveTheirFirstFoldersReadBeforeAnybodysSecond) {
  std::vector<Folder> folders;
  folders.emplace_back("/run/user/mallory", kMallory);
  for (uid_t i = 0; i < 1000; ++i) folders.emplace_back("/dev/shm/subordinate", kFirst + i);
  folders.emplace_back("/run/user/alice", kAlice);
  folders.emplace_back("/dev/shm/alice", kAlice);
  folders.emplace_back("/dev/shm/far", kFarAway);
  take_turns(persons(), &folders);
  ASSERT_EQ(folders.size(), 1004u);
  std::vector<uid_t> first;
  for (size_t i = 0; i < 5; ++i) first.push_back(folders[i].owner);
  EXPECT_EQ(first, (std::vector<uid_t>{kMallory, kAlice, kFarAway, kFirst, kAlice}));
  for (size_t i = 5; i < folders.size(); ++i) EXPECT_EQ(folders[i].person, kMallory);
  EXPECT_EQ(folders.back().turn, 1000u);
  EXPECT_EQ(folders.back().share, folders[0].share) << "one share for all of them";
  EXPECT_NE(folders[1].share, folders[0].share);
  EXPECT_EQ(*folders[2].share, kMaxOfAPerson);
}

TEST(CtlPersons, GetNoMorePublicationsReadThanTheirShare) {
  const TempFolder place;
  std::vector<vmem::publish::Fd> alive;
  const int kFiles = 20;
  for (int i = 0; i < kFiles; ++i) {
    char name[64];
    snprintf(name, sizeof name, "%d-%016x", getpid(), i);
    const std::string path = place / name;
    alive.emplace_back(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    ASSERT_TRUE(vmem::publish::mark_alive(alive.back().get()));
  }
  const vmem::publish::Fd fd(open(place.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  Folder folder(place.path(), geteuid());
  folder.share = std::make_shared<std::atomic<size_t>>(kFiles + 5);
  const auto unread = [&] {
    Found found;
    read_folder(folder, fd.get(), 0, Clock::now() + std::chrono::seconds(1), &found);
    EXPECT_TRUE(found.processes.empty());
    return found;
  };
  Found all = unread();
  EXPECT_EQ(all.forged.size(), static_cast<size_t>(kFiles)) << "nobody answers for them";
  EXPECT_EQ(*folder.share, 5u);
  all = unread();
  EXPECT_EQ(all.forged.size(), 5u);
  ASSERT_EQ(all.unread.size(), 1u);
  EXPECT_NE(all.unread[0].why.find("15 publications there are more than"), std::string::npos) << all.unread[0].why;
  EXPECT_EQ(unread().forged.size(), 0u);
}

TEST(CtlPersons, HaveOneShareOfTheMetrics) {
  Found found;
  for (uid_t i = 0; i < 300; ++i) {
    Process p;
    p.owner = kFirst + i;
    p.person = kMallory;
    p.pid = static_cast<pid_t>(i + 2);
    p.now.regions.resize(64);
    found.processes.push_back(p);
  }
  Process alice;
  alice.owner = alice.person = kAlice;
  alice.pid = 1;
  found.processes.push_back(alice);
  const std::string text = metrics(found, "");
  size_t mallorys = 0;
  bool told = false;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("vmem_samples_left_out{user=\"7", 0) == 0) {
      told = true;
    } else {
      mallorys += line.find("user=\"7") != std::string::npos;
    }
  }
  EXPECT_TRUE(told);
  EXPECT_LE(mallorys, kMaxSamples);
  EXPECT_GT(mallorys, kMaxSamples / 2);
  EXPECT_EQ(text.find("vmem_samples_left_out{user=\"61542\""), std::string::npos);
}

}  // namespace
