// Shares per person: a user with subordinate ids can act as many users, but counts as one person.
#include "vmemctl/persons.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <filesystem>
#include <sstream>
#include <thread>

#include "support.h"
#include "vmemctl/metrics.h"

namespace {

using namespace ctltest;
using namespace vmemctl;

constexpr uid_t kMallory = 61541, kAlice = 61542, kFarAway = 1200000;  // the last is from a company's directory
constexpr uid_t kFirst = 700000;                                       // the first subordinate id of Mallory

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

// Other users' publications need descriptors too. With a limit of 1024, a request that finds none
// left loses a row.
TEST(CtlPersons, TakeFewDescriptorsHoweverManyFoldersTheyHave) {
  constexpr size_t kFolders = 24, kFiles = 32, kOfAProcess = 6;
  const TempFolder place;
  const auto home = [&](size_t i) { return place / std::to_string(i); };
  std::vector<pid_t> silent;  // they listen and never answer
  for (size_t first = 0; first < kFolders; first += kOfAProcess) {
    int ready[2] = {-1, -1};
    ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
    silent.push_back(fork());
    if (silent.back() == 0) {
      for (size_t i = first; i < first + kOfAProcess; ++i) {
        if (mkdir(home(i).c_str(), 0700) != 0) _exit(1);
        for (size_t n = 0; n < kFiles; ++n) {
          char name[64];
          snprintf(name, sizeof name, "/%d-%016zx", getpid(), n);
          const std::string path = home(i) + name;
          const int file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
          sockaddr_un address{};
          address.sun_family = AF_UNIX;
          vmem::publish::put_text(address.sun_path, path + ".sock");
          const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
          if (!vmem::publish::mark_alive(file) ||
              bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || listen(fd, 4) != 0)
            _exit(2);
        }
      }
      if (write(ready[1], "r", 1) != 1) _exit(3);
      for (;;) pause();
    }
    close(ready[1]);
    char r = 0;
    EXPECT_EQ(read(ready[0], &r, 1), 1) << "its process could not make them";
    close(ready[0]);
  }
  const auto descriptors = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = descriptors();
  auto most = before;
  std::atomic<size_t> reading{kFolders};
  std::vector<Found> found(kFolders);
  std::vector<std::thread> threads;
  const auto deadline = Clock::now() + std::chrono::milliseconds(600);
  for (size_t i = 0; i < kFolders; ++i) {
    threads.emplace_back([&, i] {
      const Folder folder(home(i), geteuid());
      const vmem::publish::Fd fd(open(folder.path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      read_folder(folder, fd.get(), 0, deadline, &found[i]);
      --reading;
    });
  }
  while (reading != 0) {
    try {
      most = std::max(most, descriptors());
    } catch (const std::filesystem::filesystem_error&) {  // no descriptor is left to look with
      most = before + 1024;
    }
    usleep(1000);
  }
  for (std::thread& thread : threads) thread.join();
  for (const pid_t pid : silent) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  EXPECT_LT(most - before, 800);
  size_t told = 0;
  for (const Found& f : found) told += f.unread.size();
  EXPECT_EQ(told, kFolders * kFiles) << "of none of them has anything been read, and none is left out without a word";
}

TEST(CtlPersons, ManyDeadDoNotStandInTheWayOfTheLiving) {
  const TempFolder place;
  const auto make = [&](const char* name) {
    return vmem::publish::Fd(open((place / name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  };
  for (int n = 0; n < 300; ++n) {
    char name[64];
    snprintf(name, sizeof name, "1-%016x", n);
    ASSERT_TRUE(make(name));
  }
  const vmem::publish::Fd living = make("9-0000000000000000");
  ASSERT_TRUE(vmem::publish::mark_alive(living.get()));
  Found found;
  const Folder folder(place.path(), geteuid());
  const vmem::publish::Fd fd(open(folder.path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  read_folder(folder, fd.get(), 0, Clock::now() + std::chrono::seconds(20), &found);
  EXPECT_TRUE(found.unread.empty()) << found.unread.front().why;
  ASSERT_EQ(found.forged.size(), 1u) << "nobody answers for it, and so it was looked at";
  EXPECT_EQ(found.forged.front().file, place / "9-0000000000000000");
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
