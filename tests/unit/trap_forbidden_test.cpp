// A userfaultfd of which a filter of system calls later forbids one call.
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "common/forbid.h"
#include "core/process/page_map.h"
#include "core/step.h"
#include "core/types.h"
#include "system/child.h"
#include "trap_contract.h"

namespace vmem::trap::testing {
namespace {

void run_child(const std::string& test, systest::Environment environment = {}) {
  const pid_t child = systest::start_child("TrapForbiddenChild." + test, environment);
  const int status = systest::wait_for_child(child, 60);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
    GTEST_SKIP() << "there is no such body, or filters of system calls are refused";
  EXPECT_EQ(status, 0) << (status == -1 ? "hung" : "");
}

// PAGEMAP_SCAN reports protected pages; before Linux 6.7, one word a page does.
class TrapForbidden : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Pages, TrapForbidden, ::testing::Values("scanned", "read"),
                         [](const auto& pages) { return std::string(pages.param); });

// Without UFFDIO_WAKE, the trap wakes threads by removing write protection from pages that have
// none. Pages that another thread puts in place with protection at that moment must keep it, or a
// store would not be reported.
TEST_P(TrapForbidden, PagesPutInPlaceWhileSomebodyIsWokenKeepTheirProtection) {
  std::unique_ptr<Trap> trap;
  if (const Status s = backends().front().make(&trap); !s.ok()) GTEST_SKIP() << s.text();
  if (!trap->caps().write_protect) GTEST_SKIP() << "this kernel cannot write-protect";
  trap.reset();
  run_child("DISABLED_Wakes", {{"VMEM_TEST_PAGES", GetParam()}});
}

struct Filler {
  Trap* trap;
  void *words, *frame;
  std::thread thread;
  std::atomic<bool> filled{false};
};
Filler* filler = nullptr;
constexpr size_t kSize = 16 * core::kPage;

bool is_protected(const void* address) {
  const int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  uint64_t entry = 0;
  EXPECT_EQ(pread(fd, &entry, sizeof entry, static_cast<off_t>(reinterpret_cast<uintptr_t>(address) / core::kPage * 8)),
            static_cast<ssize_t>(sizeof entry));
  close(fd);
  EXPECT_NE(entry >> 63, 0u) << "the page is not present";
  return (entry & core::kPageProtected) != 0;
}

TEST(TrapForbiddenChild, DISABLED_Wakes) {
  std::unique_ptr<Trap> trap;
  ASSERT_TRUE(backends().front().make(&trap).ok());
  void *words = nullptr, *frame = nullptr;
  ASSERT_TRUE(trap->attach(kSize, core::kPage, Transfer::copy, &words).ok());
  ASSERT_TRUE(trap->reserve_frames(kSize, false, &frame).ok());
  write_pattern(frame, kSize, 1);
  if (!vmem::test::forbid_ioctl(UFFDIO_WAKE, EPERM)) _exit(77);
  if (getenv("VMEM_TEST_PAGES") == std::string_view("read")) {
    ASSERT_TRUE(vmem::test::forbid_ioctl(core::kIoctlScan, ENOTTY));
  }
  // The first refused call logs it; from then on the trap wakes threads the other way.
  ASSERT_TRUE(trap->wake(words, kSize).ok());
  Filler f{trap.get(), words, frame, {}, {}};
  filler = &f;
  core::step_hook = [](const char* step) {
    if (std::string_view(step) != "trap.wake.looked" || filler->thread.joinable()) return;
    filler->thread = std::thread([] {
      EXPECT_TRUE(filler->trap->fill(filler->words, kSize, filler->frame, Transfer::copy, Protect::yes).ok());
      filler->filled = true;
    });
    // The fill may wait for the end of this wake; otherwise it takes microseconds.
    for (int i = 0; i < 200 && !filler->filled; ++i) usleep(1000);
  };
  EXPECT_TRUE(trap->wake(words, kSize).ok());
  ASSERT_TRUE(f.thread.joinable()) << "no step of a wake";
  f.thread.join();
  core::step_hook = nullptr;
  for (size_t at = 0; at < kSize; at += core::kPage)
    EXPECT_TRUE(is_protected(static_cast<std::byte*>(words) + at)) << at;
  EXPECT_EQ(first_wrong(words, kSize, 1), -1);
  EXPECT_TRUE(trap->detach(words, kSize).ok());
  EXPECT_TRUE(trap->unmap(words, kSize).ok());
  EXPECT_TRUE(trap->release_frames(frame, kSize).ok());
}

// A thread whose access of a page waits and has been reported.
class Parked {
 public:
  Parked(Trap& trap, void* page, bool store)
      : thread_([this, page, store] {
          uint64_t* const word = static_cast<uint64_t*>(page);
          uint64_t value = 0;
          if (store) __atomic_store_n(word, 7, __ATOMIC_RELAXED);
          result_ = load(word, &value);
        }) {
    EXPECT_EQ(next_fault(trap).address, reinterpret_cast<uintptr_t>(page));
  }
  // Returns the signal that it got, or 0.
  int result() {
    thread_.join();
    return result_;
  }

 private:
  int result_ = -1;
  std::thread thread_;
};

// Each call of the trap that ends a wait must end it, whatever else it has to do.
void end_waits(Trap* trap, std::span<const unsigned long> forbidden) {
  void *words = nullptr, *other = nullptr, *frame = nullptr;
  ASSERT_TRUE(trap->attach(kSize, core::kPage, Transfer::copy, &words).ok());
  ASSERT_TRUE(trap->attach(kSize, core::kPage, Transfer::copy, &other).ok());
  ASSERT_TRUE(trap->reserve_frames(kSize, false, &frame).ok());
  write_pattern(frame, kSize, 1);
  const auto page = [](void* at, size_t i) { return static_cast<std::byte*>(at) + i * core::kPage; };
  const auto reported = [&](size_t i) {
    return next_fault(*trap).address == reinterpret_cast<uintptr_t>(page(words, i));
  };
  Parked shut(*trap, page(other, 3), false), failed(*trap, page(words, 15), false), waits(*trap, page(words, 2), false);
  for (const unsigned long request : forbidden)
    if (!vmem::test::forbid_ioctl(request, EPERM)) _exit(77);
  if (trap->caps().move || (trap->caps().write_protect && forbidden.size() == 1)) {  // there is another way to wake
    EXPECT_TRUE(trap->wake(page(words, 2), core::kPage).ok());
    EXPECT_TRUE(reported(2)) << "it is made again";
    EXPECT_TRUE(trap->wake(words, 8 * core::kPage).ok());
    EXPECT_TRUE(reported(2));
  }
  EXPECT_TRUE(trap->fill(words, 8 * core::kPage, frame, Transfer::copy, Protect::no).ok());
  EXPECT_EQ(waits.result(), 0);
  EXPECT_TRUE(trap->fail(page(words, 15), core::kPage).ok());
  EXPECT_EQ(failed.result(), SIGBUS);
  EXPECT_TRUE(trap->detach(other, kSize).ok());
  EXPECT_EQ(shut.result(), SIGBUS);
  if (trap->caps().write_protect) {
    EXPECT_TRUE(trap->fill(page(words, 8), 4 * core::kPage, page(frame, 8), Transfer::copy, Protect::yes).ok());
    Parked stores(*trap, page(words, 9), true);
    EXPECT_TRUE(trap->unprotect(page(words, 8), 4 * core::kPage).ok());
    EXPECT_EQ(stores.result(), 0);
    auto* const stored = reinterpret_cast<uint64_t*>(page(words, 9));
    EXPECT_EQ(std::exchange(*stored, pattern(1, 9 * core::kPage / sizeof *stored)), 7u);
    EXPECT_EQ(first_wrong(words, 12 * core::kPage, 1), -1);
  }
  EXPECT_EQ(first_wrong(words, 8 * core::kPage, 1), -1);
  Parked last(*trap, page(words, 13), false);  // the trap is still in place
  EXPECT_TRUE(trap->detach(words, kSize).ok());
  EXPECT_EQ(last.result(), SIGBUS);
  for (void* at : {words, other}) EXPECT_TRUE(trap->unmap(at, kSize).ok());
  EXPECT_TRUE(trap->release_frames(frame, kSize).ok());
}

class TrapWithout : public ::testing::TestWithParam<Backend> {};
INSTANTIATE_TEST_SUITE_P(Backends, TrapWithout, ::testing::ValuesIn(backends()),
                         [](const auto& backend) { return backend.param.name; });

TEST_P(TrapWithout, WakeAllWaitsEnd) {
  run_child("DISABLED_EndWaits", {{"VMEM_TEST_BODY", GetParam().name}});
}

TEST_P(TrapWithout, WakeAndWriteProtectAllWaitsEnd) {
  run_child("DISABLED_EndWaits", {{"VMEM_TEST_BODY", GetParam().name}, {"VMEM_TEST_BOTH", "1"}});
}

TEST(TrapForbiddenChild, DISABLED_EndWaits) {
  const auto all = backends();
  const auto backend =
      std::find_if(all.begin(), all.end(), [](const Backend& b) { return b.name == getenv("VMEM_TEST_BODY"); });
  ASSERT_NE(backend, all.end());
  std::unique_ptr<Trap> trap;
  // The module has calls of its own, and a trap in a signal handler wakes threads without a call.
  if (backend->name == "signal" || !backend->make(&trap).ok() || trap->caps().install) _exit(77);
  constexpr unsigned long kBoth[] = {UFFDIO_WAKE, UFFDIO_WRITEPROTECT};
  end_waits(trap.get(), std::span(kBoth, getenv("VMEM_TEST_BOTH") != nullptr ? 2 : 1));
}

// Only a transfer that itself wakes can wake threads here. The very first one does not, but has
// already put its pages in place.
TEST_P(TrapWithout, AllThatWakesTheFirstTransferOfAllWakesItsThreads) {
  for (const char* how : {"fill", "zero", "move"})
    run_child("DISABLED_FirstTransferWakes", {{"VMEM_TEST_BODY", GetParam().name}, {"VMEM_TEST_HOW", how}});
}

uint64_t* stored_at = nullptr;

TEST(TrapForbiddenChild, DISABLED_FirstTransferWakes) {
  const auto all = backends();
  const auto backend =
      std::find_if(all.begin(), all.end(), [](const Backend& b) { return b.name == getenv("VMEM_TEST_BODY"); });
  ASSERT_NE(backend, all.end());
  std::unique_ptr<Trap> trap;
  if (!backend->make(&trap).ok() || trap->caps().install) _exit(77);
  const std::string_view how = getenv("VMEM_TEST_HOW");
  const bool moves = how == "move";
  if (moves && !trap->caps().move) return;
  const size_t size = moves ? core::kHugePage : kSize;
  const Transfer transfer = moves ? Transfer::move : Transfer::copy;
  void *words = nullptr, *frame = nullptr;
  ASSERT_TRUE(trap->attach(size, moves ? core::kHugePage : core::kPage, transfer, &words).ok());
  ASSERT_TRUE(trap->reserve_frames(core::kHugePage, false, &frame).ok());
  write_pattern(frame, size, 1);
  Parked waits(*trap, static_cast<std::byte*>(words) + 2 * core::kPage, false);
  for (const unsigned long request : {UFFDIO_WAKE, UFFDIO_WRITEPROTECT, UFFDIO_UNREGISTER})
    if (!vmem::test::forbid_ioctl(request, EPERM)) _exit(77);
  stored_at = static_cast<uint64_t*>(words);
  core::step_hook = [](const char* step) {
    if (std::string_view(step) == "trap.fill.filled") ++*stored_at;  // as a thread that met the page in place
  };
  const Status s = how == "zero" ? trap->fill_zero(words, size) : trap->fill(words, size, frame, transfer, Protect::no);
  core::step_hook = nullptr;
  EXPECT_TRUE(s.ok()) << s.text();
  EXPECT_EQ(waits.result(), 0);
  if (how == "zero") {
    EXPECT_EQ(*stored_at, 0u);
  } else {
    EXPECT_EQ((*stored_at)--, pattern(1, 0) + 1) << "what was stored meanwhile is kept";
    EXPECT_EQ(first_wrong(words, size, 1), -1);
  }
}

}  // namespace
}  // namespace vmem::trap::testing
