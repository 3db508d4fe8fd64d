// The answers of vmem_map for each kind of file, to root and to an ordinary user.
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/syscall.h>

#include <functional>
#include <memory>

#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;

constexpr size_t kSize = 256 << 10;
constexpr int kAny = 1;  // a refusal whose number comes from the system

// A file of some kind, for the life of the object. Without a path and a descriptor it could not be
// made here; `why` has the reason.
struct Made {
  std::string path;
  int fd = -1;
  std::string why;
  uint64_t offset = 0;
  size_t size = kSize;
  std::shared_ptr<void> keeps = {};  // undoes changes to the file
  ~Made() {
    keeps.reset();
    if (fd >= 0) close(fd);
  }
  Made() = default;
  Made(Made&& other) noexcept
      : path(std::move(other.path)),
        fd(std::exchange(other.fd, -1)),
        why(std::move(other.why)),
        offset(other.offset),
        size(other.size),
        keeps(std::move(other.keeps)) {}
  Made& operator=(Made&&) = delete;
};

Made cannot(const std::string& why) {
  Made made;
  made.why = why;
  return made;
}

Made at_path(const std::string& path) {
  Made made;
  if (access(path.c_str(), R_OK) != 0) return cannot(path + ": " + strerror(errno));
  made.path = path;
  return made;
}

std::shared_ptr<void> at_end(std::function<void()> undo) {
  return {nullptr, [undo = std::move(undo)](void*) { undo(); }};
}

Made file(const std::function<std::string(const std::string&)>& prepare = {}) {
  auto its = std::make_shared<TempFile>(kSize, 3);
  Made made;
  if (std::string why = prepare ? prepare(its->path()) : ""; !why.empty()) return cannot(why);
  made.path = its->path();
  made.keeps = its;
  return made;
}

Made opened(int flags) {
  Made made = file();
  made.fd = open(made.path.c_str(), flags | O_CLOEXEC);
  made.path.clear();
  return made;
}

Made memory_file(unsigned flags, int seals, off_t size = kSize) {
  Made made;
  made.fd = memfd_create("kind", flags | MFD_ALLOW_SEALING | MFD_CLOEXEC);
  if (made.fd < 0 || ftruncate(made.fd, size) != 0) return cannot(std::string("memfd_create: ") + strerror(errno));
  if (seals != 0 && fcntl(made.fd, F_ADD_SEALS, seals) != 0) return cannot(std::string("seals: ") + strerror(errno));
  return made;
}

// Sets an attribute of chattr(1), and clears it at the end.
Made with_attribute(int attribute) {
  const auto set = [attribute](const std::string& path, bool on) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    int flags = 0;
    bool done = ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0;
    flags = on ? flags | attribute : flags & ~attribute;
    done = done && ioctl(fd, FS_IOC_SETFLAGS, &flags) == 0;
    const int error = errno;
    close(fd);
    return done ? "" : std::string("chattr: ") + strerror(error);
  };
  Made made = file([&](const std::string& path) { return set(path, true); });
  if (made.path.empty()) return made;
  const std::shared_ptr<void> its = made.keeps;
  made.keeps = at_end([set, its, path = made.path] { set(path, false); });
  return made;
}

Made swap_file() {
  Made made = file([](const std::string& path) -> std::string {
    std::vector<char> page(4096);
    const uint32_t header[] = {1, kSize / 4096 - 1, 0};
    memcpy(page.data() + 1024, header, sizeof header);
    memcpy(page.data() + 4086, "SWAPSPACE2", 10);
    const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    const bool written = pwrite(fd, page.data(), page.size(), 0) == 4096 && fsync(fd) == 0;
    close(fd);
    if (written && chmod(path.c_str(), 0600) == 0 && swapon(path.c_str(), 0) == 0) return "";
    return std::string("swapon: ") + strerror(errno);
  });
  if (made.path.empty()) return made;
  const std::shared_ptr<void> its = made.keeps;
  made.keeps = at_end([its, path = made.path] { swapoff(path.c_str()); });
  return made;
}

Made leased_file() {
  Made made = file();
  const int fd = open(made.path.c_str(), O_RDWR | O_CLOEXEC);
  fcntl(fd, F_SETSIG, SIGURG);  // ignored
  const std::shared_ptr<void> its = made.keeps;
  made.keeps = at_end([its, fd] { close(fd); });
  if (fcntl(fd, F_SETLEASE, F_WRLCK) != 0) return cannot(std::string("F_SETLEASE: ") + strerror(errno));
  return made;
}

Made with(Made made, uint64_t offset, size_t size) {
  made.offset = offset;
  made.size = size;
  return made;
}

Made pipe_end() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return cannot("pipe");
  Made made;
  made.fd = ends[0];
  made.keeps = at_end([other = ends[1]] { close(other); });
  return made;
}

Made secret_memory() {
  Made made;
  made.fd = static_cast<int>(syscall(SYS_memfd_secret, O_CLOEXEC));
  if (made.fd < 0 || ftruncate(made.fd, kSize) != 0) return cannot(std::string("memfd_secret: ") + strerror(errno));
  return made;
}

struct Kind {
  const char* name;
  std::function<Made()> make;
  int read, shared, private_;  // 0: accepted
  const char* words;           // message of each refusal
};

const Kind kKinds[] = {
    {"a file", [] { return file(); }, 0, 0, 0, ""},
    {"a file, longer than it is", [] { return with(file(), 0, 4 * kSize); }, 0, 0, 0, ""},
    {"a file, behind its end", [] { return with(file(), 4 * kSize, kSize); }, 0, 0, 0, ""},
    {"an empty file",
     [] { return file([](const std::string& p) { return truncate(p.c_str(), 0) ? "truncate" : ""; }); }, 0, 0, 0, ""},
    {"a sparse file",
     [] {
       return with(file([](const std::string& p) { return truncate(p.c_str(), 1l << 40) ? "no" : ""; }), 1l << 39,
                   kSize);
     },
     0, 0, 0, ""},
    {"an offset that is no page", [] { return with(file(), 100, 4096); }, -EINVAL, -EINVAL, -EINVAL,
     "multiple of 4096"},
    {"offset + size beyond any file", [] { return with(file(), INT64_MAX - 4095, 8192); }, -EINVAL, -EINVAL, -EINVAL,
     "beyond the largest file"},
    {"an offset beyond any file", [] { return with(file(), 1ull << 63, 8192); }, -EINVAL, -EINVAL, -EINVAL,
     "beyond the largest file"},
    {"a descriptor for reading", [] { return opened(O_RDONLY); }, 0, 0, 0, ""},
    {"a descriptor for writing", [] { return opened(O_WRONLY); }, 0, 0, 0, ""},
    {"a descriptor that appends", [] { return opened(O_RDWR | O_APPEND); }, 0, 0, 0, ""},
    {"a descriptor by O_PATH", [] { return opened(O_PATH); }, 0, 0, 0, ""},
    {"a deleted file",
     [] {
       Made made = opened(O_RDONLY);
       made.keeps.reset();
       return made;
     },
     0, 0, 0, ""},
    {"a closed descriptor",
     [] {
       Made made = opened(O_RDONLY);
       close(std::exchange(made.fd, 1000));
       return made;
     },
     -EBADF, -EBADF, -EBADF, "descriptor 1000 is not open"},
    {"a file of /dev/shm",
     [] {
       const std::string path = "/dev/shm/vmem-test-kind-" + std::to_string(getpid());
       const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
       if (fd < 0 || ftruncate(fd, kSize) != 0) return cannot("/dev/shm");
       close(fd);
       Made made = at_path(path);
       made.keeps = at_end([path] { unlink(path.c_str()); });
       return made;
     },
     0, 0, 0, ""},
    {"a memfd", [] { return memory_file(0, 0); }, 0, 0, 0, ""},
    {"a memfd sealed in size", [] { return memory_file(0, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL); }, 0, 0, 0, ""},
    {"a memfd sealed in size, longer than it is", [] { return with(memory_file(0, F_SEAL_GROW), 0, kSize + 1); },
     -EINVAL, -EINVAL, -EINVAL, "F_SEAL_GROW"},
    {"a memfd sealed against writing", [] { return memory_file(0, F_SEAL_WRITE); }, 0, -EPERM, 0, "(F_SEAL_WRITE)"},
    {"a memfd sealed against later writing", [] { return memory_file(0, 0x10 /* F_SEAL_FUTURE_WRITE */); }, 0, -EPERM,
     0, "F_SEAL_FUTURE_WRITE"},
    {"a memfd of huge pages", [] { return memory_file(MFD_HUGETLB, 0, 2 << 20); }, 0, -EINVAL, 0, "huge pages"},
    {"secret memory", secret_memory, kAny, kAny, kAny, ""},
    {"an immutable file", [] { return with_attribute(FS_IMMUTABLE_FL); }, 0, -EPERM, 0, "immutable (chattr -i"},
    {"an append-only file", [] { return with_attribute(FS_APPEND_FL); }, 0, -EPERM, 0, "append-only (chattr -a"},
    {"a swap file", swap_file, 0, -ETXTBSY, 0, "active swap file"},
    {"a program that runs", [] { return at_path("/proc/self/exe"); }, 0, kAny, 0, ""},
    {"a file under a lease", leased_file, -EBUSY, -EBUSY, -EBUSY, "F_SETLEASE"},
    {"a file that nobody may write to",
     [] { return geteuid() == 0 ? cannot("root may write to it") : at_path("/etc/passwd"); }, 0, -EACCES, 0,
     "/etc/passwd"},
    {"a directory", [] { return at_path(systest::temp_folder()); }, -EISDIR, -EISDIR, -EISDIR, "directory"},
    {"/dev/zero", [] { return at_path("/dev/zero"); }, -EINVAL, -EINVAL, -EINVAL, "character device"},
    {"a pipe", pipe_end, -EINVAL, -EINVAL, -EINVAL, "FIFO"},
    {"a file of sysfs", [] { return with(at_path("/sys/kernel/mm/transparent_hugepage/enabled"), 0, 4096); }, -EINVAL,
     kAny, -EINVAL, ""},
    {"a file of proc without a size", [] { return with(at_path("/proc/self/status"), 0, 4096); }, -EINVAL, kAny,
     -EINVAL, ""},
    {"memory by /proc/self/mem", [] { return at_path("/proc/self/mem"); }, -EINVAL, -EINVAL, -EINVAL, "on proc"},
    {"a namespace", [] { return at_path("/proc/self/ns/mnt"); }, -EINVAL, kAny, -EINVAL, ""},
    {"a file of cgroup2", [] { return at_path("/sys/fs/cgroup/cgroup.controllers"); }, -EINVAL, kAny, -EINVAL, ""},
    {"a file of tracefs", [] { return at_path("/sys/kernel/tracing/README"); }, -EINVAL, kAny, -EINVAL, ""},
};

int map(const Made& made, unsigned how, void** at) {
  vmem_region_attr attr = {};
  attr.size = sizeof attr;
  attr.flags = how | VMEM_HOST_ONLY;
  attr.block_size = 64 << 10;
  attr.offset = made.offset;
  attr.path = made.path.empty() ? nullptr : made.path.c_str();
  attr.fd = made.path.empty() ? made.fd : -1;
  return vmem_create(at, made.size, &attr);
}

// A region over an accepted file shows what read(2) returns, and with SHARED a store reaches the
// file.
void expect_right(const Made& made, unsigned how, void* at) {
  auto* const bytes = static_cast<volatile unsigned char*>(at);
  const std::string path = made.path.empty() ? "/proc/self/fd/" + std::to_string(made.fd) : made.path;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  unsigned char first = 0;
  const auto offset = static_cast<off_t>(made.offset);
  if (pread(fd, &first, 1, offset) == 1) {
    EXPECT_EQ(bytes[0], first);
    if (how == VMEM_MAP_SHARED) {
      bytes[0] = static_cast<unsigned char>(first + 1);
      EXPECT_EQ(vmem_sync(at, 1), 0) << vmem_last_error();
      EXPECT_EQ(pread(fd, &first, 1, offset), 1);
      EXPECT_EQ(bytes[0], first);
    }
  } else {
    EXPECT_TRUE(systest::raises_sigbus([&] { (void)bytes[0]; }));
  }
  close(fd);
}

class RefusedFiles : public SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    configure({{"host_budget", "32MiB"}, {"log", "error"}});
  }
  static void expect_table() {
    struct How {
      unsigned flag;
      int Kind::*wanted;
      const char* name;
    };
    const How hows[] = {{VMEM_MAP_READ, &Kind::read, "READ"},
                        {VMEM_MAP_SHARED, &Kind::shared, "SHARED"},
                        {VMEM_MAP_PRIVATE, &Kind::private_, "PRIVATE"}};
    std::string skipped;
    for (const Kind& kind : kKinds) {
      const Made made = kind.make();
      if (made.path.empty() && made.fd < 0) {
        skipped += std::string(skipped.empty() ? "" : "; ") + kind.name + " (" + made.why + ")";
        continue;
      }
      for (const How& how : hows) {
        SCOPED_TRACE(std::string(kind.name) + ", " + how.name);
        void* at = nullptr;
        const int rc = map(made, how.flag, &at), wanted = kind.*how.wanted;
        const std::string words = rc == 0 ? "" : vmem_last_error();
        if (wanted == kAny) {
          EXPECT_LT(rc, 0);
        } else {
          EXPECT_EQ(rc, wanted) << words;
        }
        if (rc != 0) {
          EXPECT_NE(words.find(kind.words), std::string::npos) << words;
        } else {
          expect_right(made, how.flag, at);
          EXPECT_EQ(vmem_free(at), 0) << vmem_last_error();
        }
      }
    }
    EXPECT_EQ(vmem::stats().regions, 0u);
    if (!skipped.empty()) GTEST_SKIP() << "cannot be made here: " << skipped;
  }
};

TEST_F(RefusedFiles, EachKindIsTakenOrRefusedWithItsReason) {
  expect_table();
}

TEST(RefusedFilesOfAUser, EachKindIsTakenOrRefusedWithItsReason) {
  if (geteuid() != 0) GTEST_SKIP() << "the test above is an ordinary user's already";
  const pid_t child =
      systest::start_child("RefusedFilesChild.DISABLED_Table", {{"VMEM_PUBLISH", "off"}}, {.user = 65534});
  EXPECT_EQ(systest::wait_for_child(child, 120), 0);
}

class RefusedFilesChild : public RefusedFiles {};
TEST_F(RefusedFilesChild, DISABLED_Table) {
  expect_table();
}

// Locks of this process.

class OwnLocks : public RefusedFiles {
 protected:
  int map_file(unsigned how, void** at) const {
    return vmem_map(at, kSize, file_.path().c_str(), 0, how | VMEM_HOST_ONLY);
  }
  TempFile file_{kSize, 4};
  const int fd_ = open(file_.path().c_str(), O_RDWR | O_CLOEXEC);
  void* at_ = nullptr;
  void TearDown() override {
    close(fd_);
    RefusedFiles::TearDown();
  }
};

TEST_F(OwnLocks, AFlockOfThisProcessIsNamedAndNeedNotBeTaken) {
  ASSERT_EQ(flock(fd_, LOCK_EX), 0);
  EXPECT_EQ(map_file(VMEM_MAP_SHARED, &at_), -EBUSY);
  const std::string words = vmem_last_error();
  EXPECT_NE(words.find("by this process itself: FLOCK WRITE through descriptor " + std::to_string(fd_)),
            std::string::npos)
      << words;
  EXPECT_NE(words.find("VMEM_NO_LOCK"), std::string::npos) << words;
  EXPECT_EQ(map_file(VMEM_MAP_READ, &at_), 0) << "reading takes none";
  EXPECT_EQ(vmem_free(at_), 0);
  ASSERT_EQ(map_file(VMEM_MAP_SHARED | VMEM_NO_LOCK, &at_), 0) << vmem_last_error();
  static_cast<char*>(at_)[0] = 'n';
  EXPECT_EQ(vmem_free(at_), 0) << vmem_last_error();
  EXPECT_EQ(file_.read()[0], 'n');
  const int other = open(file_.path().c_str(), O_RDWR | O_CLOEXEC);
  EXPECT_NE(flock(other, LOCK_EX | LOCK_NB), 0) << "the program's lock is as it was";
  close(other);
}

TEST_F(OwnLocks, ALockOfAnotherProcessIsNamedWithIt) {
  int ready[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  const pid_t child = systest::fork_child([&] {
    const int fd = open(file_.path().c_str(), O_RDWR | O_CLOEXEC);
    const bool locked = flock(fd, LOCK_EX) == 0 && write(ready[1], "x", 1) == 1;
    if (locked) pause();
    return 1;
  });
  char byte = 0;
  close(ready[1]);
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_EQ(map_file(VMEM_MAP_SHARED, &at_), -EBUSY);
  EXPECT_NE(std::string(vmem_last_error()).find("process " + std::to_string(child)), std::string::npos)
      << vmem_last_error();
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(ready[0]);
}

TEST_F(OwnLocks, OfWhatHasNoLockARegionWithOneTakesIt) {
  void* second = nullptr;
  ASSERT_EQ(vmem_map(&at_, kSize / 2, file_.path().c_str(), 0, VMEM_MAP_SHARED | VMEM_NO_LOCK | VMEM_HOST_ONLY), 0);
  EXPECT_EQ(flock(fd_, LOCK_EX | LOCK_NB), 0) << "it has no lock";
  const auto map_second = [&] {
    return vmem_map(&second, kSize / 2, file_.path().c_str(), kSize / 2, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  };
  EXPECT_EQ(map_second(), -EBUSY);
  ASSERT_EQ(flock(fd_, LOCK_UN), 0);
  ASSERT_EQ(map_second(), 0) << vmem_last_error();
  EXPECT_NE(flock(fd_, LOCK_EX | LOCK_NB), 0);
  EXPECT_EQ(vmem_free(second), 0);
  EXPECT_EQ(vmem_free(at_), 0);
  EXPECT_EQ(flock(fd_, LOCK_EX | LOCK_NB), 0) << "and leaves it";
}

// A descriptor stays open for a POSIX lock. If the program closes it, as daemons do, another file
// may get its number.
TEST_F(OwnLocks, AFileOfTheProgramAtTheNumberOfAClosedDescriptorStays) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  ASSERT_EQ(fcntl(fd_, F_SETLK, &lock), 0);
  ASSERT_EQ(map_file(VMEM_MAP_PRIVATE, &at_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_free(at_), 0);
  struct stat own = {}, there = {};
  ASSERT_EQ(fstat(fd_, &own), 0);
  int parked = -1;
  for (int fd = 0; fd < 1000; ++fd)
    if (fd != fd_ && fstat(fd, &there) == 0 && there.st_ino == own.st_ino && there.st_dev == own.st_dev) parked = fd;
  ASSERT_GE(parked, 0) << "it keeps the lock";
  const TempFile other(4096);
  const int opened = open(other.path().c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(dup2(opened, parked), parked);
  ASSERT_EQ(vmem_map(&at_, 4096, other.path().c_str(), 0, VMEM_MAP_READ | VMEM_HOST_ONLY), 0) << vmem_last_error();
  EXPECT_EQ(vmem_free(at_), 0);
  EXPECT_EQ(fstat(parked, &own), 0) << "the library closed it";
  close(parked);
  close(opened);
}

// The kernel's rule: closing any descriptor of a file drops all POSIX locks of the process on it.
TEST_F(OwnLocks, PosixLocksOfThisProcessStayWhenRegionsGo) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 100;
  const auto is_locked = [&] {  // an OFD lock would conflict with the process's locks
    struct flock asked = lock;
    return fcntl(fd_, F_OFD_GETLK, &asked) == 0 && asked.l_type != F_UNLCK;
  };
  ASSERT_EQ(fcntl(fd_, F_SETLK, &lock), 0);
  ASSERT_TRUE(is_locked());
  for (const unsigned how : {VMEM_MAP_READ, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE}) {
    ASSERT_EQ(map_file(how, &at_), 0) << vmem_last_error();
    ASSERT_EQ(vmem_free(at_), 0);
    EXPECT_TRUE(is_locked()) << how;
  }
  ASSERT_EQ(vmem_map(&at_, 4096, file_.path().c_str(), 100, VMEM_MAP_READ | VMEM_HOST_ONLY), -EINVAL);
  EXPECT_TRUE(is_locked()) << "nor by a map that is refused";
  const auto count_all = [] {
    int count = 0;
    for (int fd = 0; fd < 1000; ++fd) count += fcntl(fd, F_GETFD) >= 0;
    return count;
  };
  const int before = count_all();
  for (int i = 0; i < 20; ++i) {
    for (const unsigned how : {VMEM_MAP_READ, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE}) {
      ASSERT_EQ(map_file(how, &at_), 0) << vmem_last_error();
      ASSERT_EQ(vmem_free(at_), 0);
    }
  }
  EXPECT_LE(count_all(), before) << "what stays open serves the next region of the file";
  {
    ASSERT_EQ(map_file(VMEM_MAP_PRIVATE, &at_), 0) << vmem_last_error();
    rlimit limit = {}, none = {};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    none = {3, limit.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);  // no descriptor is left to look with
    EXPECT_EQ(vmem_free(at_), 0);
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    EXPECT_TRUE(is_locked());
  }
  lock.l_type = F_UNLCK;
  ASSERT_EQ(fcntl(fd_, F_SETLK, &lock), 0);
  const auto descriptors = [&] {
    int count = 0;
    for (int fd = 0; fd < 1000; ++fd) {
      struct stat its {
      }, ours{};
      count += fstat(fd, &its) == 0 && fstat(fd_, &ours) == 0 && its.st_ino == ours.st_ino && its.st_dev == ours.st_dev;
    }
    return count;
  };
  ASSERT_EQ(map_file(VMEM_MAP_READ, &at_), 0);
  ASSERT_EQ(vmem_free(at_), 0);
  EXPECT_EQ(descriptors(), 1) << "what stayed open for them is closed with the next file";
}

TEST_F(RefusedFiles, AFolderInMemoryServesAsStoreAndIsSaidToBeMemory) {
  if (access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "/dev/shm cannot be written to";
  // The warning appears once per process.
  const int status = systest::wait_for_child(systest::start_child("RefusedFilesChild.DISABLED_StoreInMemory"), 60);
  EXPECT_EQ(status, 0);
}

TEST_F(RefusedFilesChild, DISABLED_StoreInMemory) {
  vmem_shutdown();
  systest::LogLines lines;
  configure({{"ssd_path", "/dev/shm"}, {"log", "warning"}});
  void* at = nullptr;
  ASSERT_EQ(vmem_alloc(&at, 64 << 20, VMEM_HOST_ONLY), 0) << vmem_last_error();
  memset(at, 1, 64 << 20);
  EXPECT_TRUE(lines.contains("tmpfs, which is memory"));
  EXPECT_EQ(vmem_free(at), 0);
}

}  // namespace
