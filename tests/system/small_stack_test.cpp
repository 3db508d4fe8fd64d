// Every call from threads with the smallest stack that POSIX allows: a call gets the stack it needs
// elsewhere. Also from threads whose stack is just large enough to run a call in place: no call
// takes more than half of the stack reserved for it.
#include <sys/mman.h>
#include <sys/resource.h>

#include <atomic>
#include <csetjmp>
#include <functional>

#include "child.h"
#include "core/stack.h"
#include "sim_support.h"

namespace {

using systest::kBlock;
using systest::TempFile;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kSmall = size_t{128} << 10;  // a sanitizer's own thread start takes most of it
constexpr size_t kOfTheCaller = kSmall;
#else
constexpr size_t kSmall = size_t{16} << 10;
constexpr size_t kOfTheCaller = size_t{10} << 10;  // including lazy work of the C library
#endif

// A stack that records how much of it was used.
class Stack {
 public:
  explicit Stack(size_t size) : size_(size) {
    low_ = static_cast<unsigned char*>(mmap(nullptr, kGuard + size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(low_, MAP_FAILED);
    low_ += kGuard;
    EXPECT_EQ(mprotect(low_, size, PROT_READ | PROT_WRITE), 0);
    memset(low_, kPaint, size);
  }
  ~Stack() { munmap(low_ - kGuard, kGuard + size_); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  void run(const std::function<void()>& what) const {
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    EXPECT_EQ(pthread_attr_setstack(&attributes, low_, size_), 0);
    const int rc = pthread_create(
        &thread, &attributes,
        [](void* f) -> void* {
          (*static_cast<const std::function<void()>*>(f))();
          return nullptr;
        },
        const_cast<std::function<void()>*>(&what));
    pthread_attr_destroy(&attributes);
    ASSERT_EQ(rc, 0) << strerror(rc);
    pthread_join(thread, nullptr);
  }
  size_t used() const {
    size_t untouched = 0;
    while (untouched < size_ && low_[untouched] == kPaint) ++untouched;
    return size_ - untouched;
  }

 private:
  static constexpr size_t kGuard = size_t{64} << 10;
  static constexpr unsigned char kPaint = 0xa7;
  const size_t size_;
  unsigned char* low_ = nullptr;
};

// A failed expectation as plain text: a test's own macros need more stack than there is.
struct Wrong {
  const char* call = nullptr;
  int line = 0, got = 0;
  char words[256] = "";
  void expect(int should, int is, const char* what, int at) {
    if (is == should || call != nullptr) return;
    call = what, line = at, got = is;
    strncpy(words, vmem_last_error(), sizeof words - 1);
  }
};
#define CALL(should, call) wrong.expect(should, call, #call, __LINE__)

struct Work {
  const char* path;
  void* stream;
  bool handles;
};

void ready(struct vmem_lease*, int, void* told) {
  static_cast<std::atomic<int>*>(told)->store(1);
}

void settings(Wrong& wrong) {
  char value[64];
  struct vmem_stats stats = {};
  stats.size = sizeof stats;
  struct vmem_device_stats device = {};
  device.size = sizeof device;
  CALL(0, vmem_set("readahead", "0"));
  CALL(0, vmem_get("host_budget", value, sizeof value));
  CALL(0, vmem_stats(&stats));
  CALL(0, vmem_device_stats(0, &device));
  CALL(-EINVAL, vmem_set("readahead", "seven"));
  CALL(-ENOENT, vmem_set("no_such_setting_that_is_near_to_none", "1"));
  CALL(-ERANGE, vmem_get("host_budget", value, 1));
  CALL(-ENODEV, vmem_device_stats(17, &device));
  CALL(0, vmem_version() < 1);
  CALL(0, vmem_strerror(-EIO) == nullptr);
}

void host(Wrong& wrong, const Work& work) {
  void *p = nullptr, *q = nullptr;
  struct vmem_lease* lease = nullptr;
  struct vmem_residency where = {};
  where.size = sizeof where;
  for (const char* codec : {"zstd", "lz4", "none"}) {
    struct vmem_region_attr attr = {};
    attr.size = sizeof attr;
    attr.block_size = 65536;
    attr.codec = codec;
    attr.flags = VMEM_HOST_ONLY;
    CALL(0, vmem_create(&p, kBlock, &attr));
    if (wrong.call != nullptr) return;
    memset(p, 7, kBlock);
    CALL(0, vmem_name(p, "a region of a small thread"));
    CALL(0, vmem_sync(p, kBlock));
    CALL(0, vmem_evict(p, kBlock, VMEM_SSD));
    CALL(0, vmem_query(p, kBlock, &where));
    CALL(0, vmem_prefetch(p, kBlock, VMEM_HOST, nullptr));
    CALL(0, vmem_acquire(p, kBlock, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr));
    CALL(0, vmem_release(p, kBlock, nullptr));
    const struct vmem_range range = {p, kBlock, VMEM_READ, 0};
    CALL(0, vmem_acquire_ranges(&range, 1, VMEM_HOST, nullptr));
    CALL(0, vmem_release_ranges(&range, 1, nullptr));
    CALL(0, vmem_lease(&lease, &range, 1, VMEM_HOST, nullptr));
    CALL(0, vmem_lease_end(lease, nullptr));
    CALL(-EINVAL, vmem_acquire_ranges(&range, size_t{1} << 50, VMEM_HOST, nullptr));
    CALL(-EINVAL, vmem_acquire(static_cast<char*>(p) + kBlock, kBlock, VMEM_READ, VMEM_HOST, nullptr));
    CALL(0, vmem_advise(p, kBlock, VMEM_ADVISE_DONT_NEED, 0));
    CALL(0, vmem_free(p));
    CALL(-EINVAL, vmem_free(p));
  }
  CALL(-ENOENT, vmem_map(&q, kBlock, "/nowhere/at/all", 0, VMEM_MAP_READ));
  CALL(0, vmem_map(&q, kBlock, work.path, 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY));
  if (wrong.call != nullptr) return;
  memset(q, 3, 4096);
  CALL(0, vmem_sync(q, 4096));
  CALL(0, vmem_sync(nullptr, 0));
  memset(q, 4, 4096);
  CALL(0, vmem_flush());
  CALL(-EINVAL, vmem_flush_on(nullptr, 0));
  CALL(0, vmem_discard(q));
}

void device(Wrong& wrong, const Work& work) {
  void* p = nullptr;
  struct vmem_lease* lease = nullptr;
  std::atomic<int> told{0};
  CALL(0, vmem_alloc(&p, 4 * kBlock, 0));
  if (wrong.call != nullptr) return;
  memset(p, 7, 4 * kBlock);
  CALL(0, vmem_advise(p, kBlock, VMEM_ADVISE_SET_READ_MOSTLY, 0));
  CALL(0, vmem_advise(p, kBlock, VMEM_ADVISE_SET_ACCESSED_BY, VMEM_HOST));
  CALL(0, vmem_evict(p, 4 * kBlock, VMEM_SSD));
  CALL(0, vmem_acquire(p, 4 * kBlock, VMEM_READ | VMEM_WRITE, 0, work.stream));
  int fd = -1;
  CALL(work.handles ? 0 : -EOPNOTSUPP, vmem_export(p, 8, 0, &fd));
  if (fd >= 0) close(fd);
  CALL(0, vmem_release(p, 4 * kBlock, work.stream));
  CALL(0, static_cast<char*>(p)[3 * kBlock] - 7);  // in place, or after it has arrived, in a signal handler
  const struct vmem_range range = {p, 2 * kBlock, VMEM_READ, 0};
  CALL(0, vmem_lease_async(&lease, &range, 1, 0, work.stream, ready, &told));
  CALL(0, vmem_lease_fd(lease) < 0);
  while (vmem_lease_poll(lease) == -EAGAIN) usleep(100);
  CALL(0, vmem_lease_end(lease, work.stream));
  CALL(0, vmem_prefetch(p, kBlock, 0, work.stream));
  CALL(0, vmem_evict(p, 4 * kBlock, VMEM_HOST));
  CALL(0, static_cast<char*>(p)[kBlock] - 7);
  if (work.handles) {
    struct vmem_kernel* kernel = nullptr;
    struct vmem_kernel_view view;
    CALL(0, vmem_kernel_begin(&kernel, p, 4 * kBlock, VMEM_READ, 0, 0, &view));
    CALL(0, vmem_kernel_end(kernel, work.stream));
  }
  CALL(-ENODEV, vmem_acquire(p, kBlock, VMEM_READ, 5, work.stream));
  CALL(0, vmem_free(p));
}

class SmallStack : public systest::SimTest, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override { start(1, {}, GetParam()); }
  // The library also starts and stops there.
  size_t use_everything(size_t size) {
    TempFile file(kBlock);
    Wrong wrong;
    const Work work{file.path().c_str(), stream_, GetParam()};
    const Stack stack(size);
    stack.run([&] {
      settings(wrong);
      host(wrong, work);
      device(wrong, work);
    });
    EXPECT_TRUE(wrong.call == nullptr) << wrong.call << ", line " << wrong.line << ": " << wrong.got << ", "
                                       << wrong.words;
    return stack.used();
  }
};

TEST_P(SmallStack, EveryCallIsRightOnTheSmallestStack) {
  if (IsSkipped()) return;
  const size_t used = use_everything(kSmall);
  // On managed memory accesses may run a handler, which puts the processor's registers on the
  // stack.
  EXPECT_LE(used, GetParam() ? kOfTheCaller : kSmall);
  RecordProperty("used", static_cast<int>(used));
}

TEST_P(SmallStack, NoCallThatRunsInPlaceNeedsHalfOfWhatIsKeptForIt) {
  if (IsSkipped()) return;
  const size_t used = use_everything(2 * vmem::core::kStackForCalls);
  EXPECT_LE(used, vmem::core::kStackForCalls / 2);
  RecordProperty("used", static_cast<int>(used));
}

INSTANTIATE_TEST_SUITE_P(Backends, SmallStack, ::testing::Bool(),
                         [](const auto& body) { return body.param ? "Handles" : "Managed"; });

class SmallStackHost : public systest::SystemTest {};

TEST_F(SmallStackHost, TheLibraryStartsAndStopsOnTheSmallestStack) {
  Wrong wrong;
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  const Stack stack(kSmall);
  stack.run([&] {
    vmem_log([](int, const char*, void*) {}, nullptr);
    CALL(0, vmem_init());
    vmem_shutdown();
    CALL(-EINVAL, vmem_set("host_budget", "lots"));
    vmem_log(nullptr, nullptr);
  });
  EXPECT_TRUE(wrong.call == nullptr) << wrong.call << ": " << wrong.got << ", " << wrong.words;
  EXPECT_LE(stack.used(), kOfTheCaller);
}

// A sink may call the library, on the stack of the call.
TEST_F(SmallStackHost, ASinkThatCallsTheLibraryHasStackForThat) {
  configure({});
  if (IsSkipped()) return;
  struct Sink {
    std::atomic<int> lines{0}, wrong{0};
    size_t left = SIZE_MAX;
  } sink;
  vmem_log(
      [](int, const char*, void* user) {
        auto& s = *static_cast<Sink*>(user);
        s.left = std::min(s.left, vmem::core::stack_left());
        struct vmem_stats stats = {};
        stats.size = sizeof stats;
        s.wrong += vmem_stats(&stats) != 0;
        ++s.lines;
      },
      &sink);
  const Stack stack(kSmall);
  stack.run([] {
    vmem_set("log", "debug");
    void* p = nullptr;
    if (vmem_alloc(&p, 1 << 20, VMEM_HOST_ONLY) == 0) vmem_free(p);
    vmem::core::log(vmem::core::Level::warning, "a line");
    struct vmem_stats stats = {};
    stats.size = sizeof stats;
    vmem_stats(&stats);
  });
  vmem::core::flush_log();
  vmem_log(nullptr, nullptr);
  EXPECT_GT(sink.lines, 0);
  EXPECT_EQ(sink.wrong, 0);
  EXPECT_LE(stack.used(), kOfTheCaller);
}

// The smallest default stack: the library's threads get it too.
TEST_F(SmallStackHost, TheLibrarysThreadsWorkWhateverStackThreadsHaveByDefault) {
  pthread_attr_t before, small;
  ASSERT_EQ(pthread_getattr_default_np(&before), 0);
  ASSERT_EQ(pthread_getattr_default_np(&small), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&small, kSmall), 0);
  ASSERT_EQ(pthread_setattr_default_np(&small), 0);
  configure({{"host_budget", "16MiB"}, {"compression", "zstd"}, {"encryption", "on"}});
  ASSERT_EQ(pthread_setattr_default_np(&before), 0);
  pthread_attr_destroy(&before), pthread_attr_destroy(&small);
  if (IsSkipped()) return;
  for (const char* block : {"64KiB", "2MiB"}) {
    ASSERT_EQ(vmem_set("block_size", block), 0) << vmem_last_error();
    vmem::region r(32 << 20, VMEM_HOST_ONLY);
    const auto words = r.view<uint64_t>();
    for (size_t i = 0; i < words.size(); i += 512) words[i] = systest::stamp(i, 1);
    size_t wrong = 0;
    for (size_t i = 0; i < words.size(); i += 512) wrong += words[i] != systest::stamp(i, 1);
    EXPECT_EQ(wrong, 0u);
  }
}

class SmallStackChild : public systest::SystemTest {};

TEST_F(SmallStackChild, DISABLED_ExitsFromASmallThread) {
  configure({{"block_size", "64KiB"}});
  if (IsSkipped()) _exit(77);
  void* p = nullptr;
  ASSERT_EQ(vmem_map(&p, 1 << 20, getenv("VMEM_TEST_FILE"), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY), 0)
      << vmem_last_error();
  memset(p, 42, 1 << 20);
  const Stack stack(kSmall);
  stack.run([] { exit(0); });
}

TEST_F(SmallStackHost, ExitOfASmallThreadWritesSharedFiles) {
  const TempFile file(1 << 20);
  const pid_t child =
      systest::start_child("SmallStackChild.DISABLED_ExitsFromASmallThread",
                           {{"VMEM_TEST_FILE", file.path()}, {"ASAN_OPTIONS", systest::without_leak_check()}});
  const int status = systest::wait_for_child(child, 60);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "no way to trap absent blocks here";
  EXPECT_EQ(status, 0);
  EXPECT_EQ(file.read(), std::vector<unsigned char>(1 << 20, 42));
}

// The library knows the limit of the main thread and the stack size of others; any other stack
// counts as small.
TEST_F(SmallStackHost, EveryThreadKnowsWhatIsLeft) {
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_STACK, &limit), 0);
  if (limit.rlim_cur >= size_t{1} << 20) {
    EXPECT_GE(vmem::core::stack_left(), size_t{512} << 10);
  }
  EXPECT_LE(vmem::core::stack_left(), limit.rlim_cur);
  const Stack stack(kSmall);
  size_t left = 0, inner = 0, again = 0;
  stack.run([&] {
    left = vmem::core::stack_left();
    vmem::core::with_stack([&] {
      inner = vmem::core::stack_left();
      vmem::core::with_stack([&] { again = vmem::core::stack_left(); });
    });
  });
  EXPECT_GT(left, 0u);
  EXPECT_LT(left, kSmall);
  EXPECT_GE(inner, vmem::core::kStackForCalls);
  EXPECT_GE(again, inner - 4096) << "what has enough stays where it is";
}

// Threads in concurrent calls have a stack each. Afterwards only the cached stacks remain.
TEST_F(SmallStackHost, ManySmallThreadsCallAtOnce) {
  configure({});
  if (IsSkipped()) return;
  constexpr int kThreads = 24;
  std::atomic<int> wrong{0};
  std::vector<std::unique_ptr<Stack>> stacks;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) stacks.push_back(std::make_unique<Stack>(kSmall));
  const std::function<void()> work = [&] {
    for (int round = 0; round < 4; ++round) {
      void* p = nullptr;
      if (vmem_alloc(&p, 1 << 20, VMEM_HOST_ONLY) != 0) {
        ++wrong;
        return;
      }
      static_cast<char*>(p)[4096] = 1;
      wrong += vmem_evict(p, 1 << 20, VMEM_SSD) != 0;
      wrong += static_cast<char*>(p)[4096] != 1;
      wrong += vmem_free(p) != 0;
    }
  };
  for (int i = 0; i < kThreads; ++i) threads.emplace_back([&, i] { stacks[static_cast<size_t>(i)]->run(work); });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0) << vmem_last_error();
}

}  // namespace
