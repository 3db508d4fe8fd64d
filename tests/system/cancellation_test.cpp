// Threads that are cancelled while they are in calls: the call completes, and then the thread ends.
// Run in a process of their own, which would end if the stack were unwound through a call.
#include <pthread.h>

#include <atomic>
#include <cstring>

#include "child.h"
#include "support.h"

namespace {

using systest::SystemTest;

constexpr size_t kMiB = 1 << 20, kRegion = 64 * kMiB;

struct Caller {
  void (*call)(char* region, size_t at);
  char* region;
  std::atomic<unsigned> calls{0};
};

void* calls_until_it_is_cancelled(void* argument) {
  auto* const caller = static_cast<Caller*>(argument);
  for (size_t at = 0;; at = (at + 6 * kMiB) % kRegion) {
    pthread_testcancel();
    caller->call(caller->region, at);
    ++caller->calls;
  }
}

void evicts(char* region, size_t at) {
  region[at] = 1;
  EXPECT_EQ(vmem_evict(region + at, 2 * kMiB, VMEM_SSD), 0) << vmem_last_error();
}
void syncs(char* region, size_t at) {
  region[at] = 1;
  EXPECT_EQ(vmem_sync(region, kRegion), 0) << vmem_last_error();
}
void leases(char* region, size_t at) {
  ASSERT_EQ(vmem_acquire(region + at, 2 * kMiB, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr), 0) << vmem_last_error();
  ASSERT_EQ(vmem_release(region + at, 2 * kMiB, nullptr), 0) << vmem_last_error();
}
void makes_and_frees(char*, size_t) {
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, kMiB, VMEM_HOST_ONLY), 0) << vmem_last_error();
  ASSERT_EQ(vmem_free(p), 0) << vmem_last_error();
}
void replaces_the_sink(char* region, size_t at) {
  vmem_log([](int, const char*, void*) {}, region + at);
}

TEST(CancellationChild, DISABLED_CancelsCallers) {
  vmem::region region(kRegion, VMEM_HOST_ONLY);
  char* const bytes = static_cast<char*>(region.data());
  memset(bytes, 1, kRegion);
  for (const auto call : {evicts, syncs, leases, makes_and_frees, replaces_the_sink}) {
    for (unsigned round = 0; round < 8; ++round) {
      Caller caller{call, bytes};
      pthread_t thread;
      ASSERT_EQ(pthread_create(&thread, nullptr, calls_until_it_is_cancelled, &caller), 0);
      while (caller.calls.load() < 2) usleep(100);
      usleep(round * 300);
      ASSERT_EQ(pthread_cancel(thread), 0);
      void* ended = nullptr;
      ASSERT_EQ(pthread_join(thread, &ended), 0);
      EXPECT_EQ(ended, PTHREAD_CANCELED);
    }
  }
  EXPECT_EQ(vmem::stats().regions, 1u) << "none was left by a call that ended half way";
  EXPECT_EQ(vmem_evict(bytes, kRegion, VMEM_SSD), 0) << "nor a lease: " << vmem_last_error();
}

class Cancellation : public SystemTest {};
TEST_F(Cancellation, WaitsForTheEndOfACall) {
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  const int status = systest::wait_for_child(
      systest::start_child("CancellationChild.DISABLED_CancelsCallers", {{"VMEM_HOST_BUDGET", "32MiB"}}), 120);
  EXPECT_EQ(status, 0) << (status == -1 ? "hung" : "ended by itself");
}

}  // namespace
