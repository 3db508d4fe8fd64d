// The library neither allocates nor frees memory under the pager's lock. malloc belongs to the
// application, which may hold malloc's lock, or keep its heap in a region, while it waits for the
// pager. Here malloc is this binary's own. A thread that calls it with the lock held makes the
// current test fail, with a backtrace. Exceptions are not exempt: the library throws them without
// malloc, also when an allocation is refused (memory_test.cpp, device_memory_test.cpp).
#include <dlfcn.h>
#include <execinfo.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "core/big_lock.h"
#include "core/os_allocator.h"
#include "core/scope_guard.h"
#include "core/status.h"
#include "refusals.h"
#include "support.h"

namespace {

constexpr int kDepth = 40;

struct Way {
  std::atomic<uint64_t> hash{0};
  std::atomic<bool> whole{false};
  std::atomic<uint64_t> times{0};
  const char* call = nullptr;
  void* frames[kDepth] = {};
  int depth = 0;
};
constinit Way ways[4096];
constinit std::atomic<bool> looking{false};  // set from the first test on
constinit thread_local bool noting = false;

[[gnu::noinline]] void note(const char* call) {
  if (noting || !looking.load(std::memory_order_relaxed)) return;
  noting = true;
  void* frames[kDepth];
  const int depth = backtrace(frames, kDepth);
  uint64_t hash = 1;
  for (int i = 2; i < std::min(depth, 9); ++i)
    hash = (hash ^ reinterpret_cast<uint64_t>(frames[i])) * 0x9e3779b97f4a7c15u;
  for (Way& way : ways) {
    uint64_t free = 0;
    if (way.hash.compare_exchange_strong(free, hash)) {
      way.call = call;
      std::copy_n(frames, depth, way.frames);
      way.depth = depth;
      way.whole.store(true);
    } else if (free != hash) {
      continue;
    }
    way.times.fetch_add(1);
    break;
  }
  noting = false;
}

[[maybe_unused]] inline void look(const char* call) {
  if (vmem::core::big_locks_held != 0) [[unlikely]]
    note(call);
}

// Returns one line per call, the innermost first; only calls in this binary.
std::string describe(const Way& way) {
  Dl_info self{};
  if (dladdr(reinterpret_cast<void*>(&describe), &self) == 0) return "";
  std::string command = "addr2line -Cfspie /proc/" + std::to_string(getpid()) + "/exe", text;
  for (int i = 2; i < way.depth; ++i) {
    Dl_info at{};
    auto* const call = static_cast<char*>(way.frames[i]) - 1;  // not the return address
    if (dladdr(call, &at) == 0 || at.dli_fbase != self.dli_fbase) continue;
    char offset[32];
    snprintf(offset, sizeof offset, " %#zx", static_cast<size_t>(call - static_cast<char*>(at.dli_fbase)));
    command += offset;
  }
  FILE* const out = popen(command.c_str(), "r");
  if (out == nullptr) return command;
  for (char line[512]; fgets(line, sizeof line, out) != nullptr;) text += std::string("  ") + line;
  pclose(out);
  return text;
}

// Returns the calls noted since it was last called; "": none.
std::string take_noted() {
  std::string text;
  for (Way& way : ways) {
    if (!way.whole.load() || way.depth == 0) continue;
    text += std::string(way.call) + "() under the pager's lock, " + std::to_string(way.times.load()) + " times:\n" +
            describe(way);
    way.depth = 0;
  }
  return text;
}

class Watch : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override {
    void* frames[4];
    backtrace(frames, 4);  // loads its libraries
    looking.store(true);
  }
  void OnTestEnd(const testing::TestInfo&) override {
    const std::string noted = take_noted();
    if (!noted.empty()) ADD_FAILURE() << noted;
  }
};

const bool watching = (testing::UnitTest::GetInstance()->listeners().Append(new Watch), true);

TEST(LockedMemory, ACallOfMallocUnderTheLockIsSeen) {
  if (systest::kSanitized) GTEST_SKIP() << "malloc is the sanitizer's";
  vmem::core::BigMutex mutex;
  void* volatile at = nullptr;
  at = malloc(8);
  free(at);
  EXPECT_EQ(take_noted(), "");
  {
    const vmem::core::BigLock lock(mutex);
    at = malloc(8);
  }
  EXPECT_NE(take_noted().find("malloc() under the pager's lock"), std::string::npos);
  {
    const vmem::core::BigLock lock(mutex);
    free(at);
  }
  EXPECT_NE(take_noted().find("free() under the pager's lock"), std::string::npos);
}

// An exception that is caught while another one is in flight is separate, and each can be thrown
// again and again.
TEST(LockedMemory, AnAllocationThatIsRefusedUnderTheLockCallsMallocForNoException) {
  if (systest::kSanitized) GTEST_SKIP() << "malloc is the sanitizer's";
  vmem::core::BigMutex mutex;
  vmem::core::OwnVector<int> some;
  const std::string words(1000, 'x');
  size_t caught = 0, nested = 0, told = 0;
  for (int i = 0; i < 1000; ++i) {
    const vmem::core::BigLock lock(mutex);
    systest::refused_in = 0;  // and all later ones
    try {
      const vmem::core::ScopeGuard meanwhile([&] {
        nested += std::uncaught_exceptions() == 1;
        try {
          some.reserve(10);
        } catch (const std::bad_alloc& e) {
          nested += e.what() != nullptr;
        }
      });
      some.push_back(i);
    } catch (const std::bad_alloc&) {
      try {
        try {
          some.push_back(i);
        } catch (...) {
          throw;
        }
      } catch (const std::exception&) {
        ++caught;
      }
    }
    told += vmem::core::error(ENOSPC, "%s", words.c_str()).code() == -ENOSPC;
    systest::refused_in = -1;
  }
  EXPECT_EQ(caught, 1000u);
  EXPECT_EQ(nested, 2000u);
  EXPECT_EQ(std::uncaught_exceptions(), 0);
  EXPECT_TRUE(some.empty());
  EXPECT_EQ(told, 1000u);
  EXPECT_EQ(take_noted(), "");
}

// The exception passes the end of the lock's scope, on many threads.
TEST(LockedMemory, ARefusalIsCaughtBeyondTheLock) {
  if (systest::kSanitized) GTEST_SKIP() << "malloc is the sanitizer's";
  vmem::core::BigMutex mutex;
  std::atomic<int> caught{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        systest::refused_in = 0;
        try {
          const vmem::core::BigLock lock(mutex);
          vmem::core::OwnVector<char>().resize(i % 2 == 0 ? 64 : 1 << 20);
        } catch (const std::bad_alloc&) {
          ++caught;
        }
        systest::refused_in = -1;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(caught, 2000);
  EXPECT_EQ(take_noted(), "");
}

}  // namespace

// The allocator of the whole binary. With a sanitizer it is the sanitizer's.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* p, size_t size);
void* __libc_memalign(size_t alignment, size_t size);
void __libc_free(void* p);

void* malloc(size_t size) {
  look("malloc");
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  look("calloc");
  return __libc_calloc(count, size);
}
void* realloc(void* p, size_t size) {
  look("realloc");
  return __libc_realloc(p, size);
}
void* memalign(size_t alignment, size_t size) {
  look("memalign");
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  look("aligned_alloc");
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** out, size_t alignment, size_t size) {
  look("posix_memalign");
  void* const p = __libc_memalign(alignment, size);
  if (p == nullptr) return ENOMEM;
  *out = p;
  return 0;
}
void free(void* p) {
  if (p != nullptr) look("free");
  __libc_free(p);
}
}
#endif
