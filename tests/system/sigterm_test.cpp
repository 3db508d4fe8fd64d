// SIGTERM ends a program whose thread waits in a call, whatever it waits for, by the signal's
// default action and without code of the program.
#include <sys/file.h>

#include <csignal>
#include <functional>
#include <thread>

#include "device/sim/sim_device.h"
#include "faulty_disk.h"
#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;
using vmem::store::Fault;
using vmem::store::FaultyEngine;
using vmem::store::Io;

constexpr size_t kMiB = 1 << 20, kSize = 4 * kMiB;
constexpr int kNotTrapped = 77;

FaultyEngine* disk = nullptr;

void hang(Io::Op op) {
  Fault fault;
  fault.action = Fault::Action::hang;
  fault.op = op;
  disk->add_rule(fault);
}

// Tells the parent when the call waits. Blocks all signals: the thread in the call must get it.
void tell_when(const std::function<bool()>& waits) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([waits] {
    vmem::test::eventually(waits);
    if (write(STDOUT_FILENO, "w", 1) != 1) _exit(90);
  }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}
bool disk_hangs() {
  return disk->wait_hanging(1, 100);
}
// For waits without a hook of ours: the thread sleeps, and has all signals blocked as in a call.
std::function<bool()> this_thread_sleeps_in_a_call() {
  return [thread = std::to_string(gettid())] {
    std::ifstream in("/proc/self/task/" + thread + "/status");
    bool sleeps = false, blocks = false;
    for (std::string line; std::getline(in, line);) {
      if (line.rfind("State:\tS", 0) == 0) sleeps = true;
      if (line.rfind("SigBlk:\t", 0) == 0)
        blocks = (std::stoull(line.substr(8), nullptr, 16) >> (SIGTERM - 1) & 1) != 0;
    }
    return sleeps && blocks;
  };
}

void start() {
  signal(SIGTERM, SIG_DFL);
  for (const auto& [name, value] : systest::Settings{
           {"host_budget", "32MiB"}, {"block_size", "2MiB"}, {"device", "none"}, {"fault_timeout_ms", "3600000"}})
    ASSERT_EQ(vmem_set(name, value.c_str()), 0) << vmem_last_error();
  systest::wrap_engine(&disk);
  const int rc = vmem_init();
  if (rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(kNotTrapped);
  ASSERT_EQ(rc, 0) << vmem_last_error();
}

void* evicted() {
  void* p = nullptr;
  EXPECT_EQ(vmem_alloc(&p, kSize, VMEM_HOST_ONLY), 0) << vmem_last_error();
  memset(p, 1, kSize);
  EXPECT_EQ(vmem_evict(p, kSize, VMEM_SSD), 0) << vmem_last_error();
  return p;
}
void* changed_file(const TempFile& file) {
  void* p = nullptr;
  EXPECT_EQ(vmem_map(&p, kSize, file.path().c_str(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY), 0) << vmem_last_error();
  memset(p, 1, kSize);
  return p;
}

void waits_for_a_read(const std::function<void(void*)>& call) {
  void* const p = evicted();
  hang(Io::Op::read);
  tell_when(disk_hangs);
  call(p);
}
void waits_for_a_write(Io::Op op, const std::function<void(void*)>& call) {
  static const TempFile file(kSize);
  void* const p = changed_file(file);
  unlink(file.path().c_str());
  hang(op);
  tell_when(disk_hangs);
  call(p);
}

// Both a full budget and a lease are in the way.
void waits_for_memory() {
  void *held = nullptr, *other = evicted();
  ASSERT_EQ(vmem_alloc(&held, 16 * kMiB, VMEM_HOST_ONLY), 0) << vmem_last_error();
  hang(Io::Op::write);
  memset(held, 1, 16 * kMiB);
  tell_when(this_thread_sleeps_in_a_call());
  for (size_t at = 0;; at = (at + 2 * kMiB) % kSize) {
    vmem_acquire(static_cast<char*>(other) + at, 1, VMEM_READ, VMEM_HOST, nullptr);
    void* more = nullptr;
    vmem_alloc(&more, 2 * kMiB, VMEM_HOST_ONLY);
    vmem_acquire(more, 1, VMEM_WRITE, VMEM_HOST, nullptr);
  }
}

void waits_in_init() {
  signal(SIGTERM, SIG_DFL);
  ASSERT_EQ(vmem_set("device", "none"), 0);
  vmem::api::test_hooks().wrap_engine = [](auto inner) {
    for (;;) pause();
    return inner;
  };
  tell_when(this_thread_sleeps_in_a_call());
  vmem_init();
}

void waits_for_a_stream() {
  signal(SIGTERM, SIG_DFL);
  for (const auto& [name, value] : systest::Settings{{"host_budget", "64MiB"}, {"fault_timeout_ms", "3600000"}})
    ASSERT_EQ(vmem_set(name, value.c_str()), 0) << vmem_last_error();
  vmem::api::test_hooks().make_devices = [](size_t, std::unique_ptr<vmem::device::Devices>* out) {
    vmem::device::SimOptions options;
    options.memory_bytes = 64 * kMiB;
    std::unique_ptr<vmem::device::SimDevices> made;
    vmem::core::Status s = vmem::device::make_sim_devices(options, &made);
    *out = std::move(made);
    return s;
  };
  if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(kNotTrapped);
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, kSize, 0), 0) << vmem_last_error();
  auto* const sim = vmem::device::current_sim();
  void* const stream = sim->create_stream(0);
  ASSERT_EQ(vmem_acquire(p, kSize, VMEM_WRITE, 0, stream), 0) << vmem_last_error();
  ASSERT_TRUE(sim->launch(stream,
                          [](vmem::device::SimKernel&) {
                            for (;;) pause();
                          })
                  .ok());
  ASSERT_EQ(vmem_release(p, kSize, stream), 0) << vmem_last_error();
  tell_when(this_thread_sleeps_in_a_call());
  vmem_acquire(p, kSize, VMEM_WRITE, VMEM_HOST, nullptr);
}

const std::vector<std::pair<std::string, std::function<void()>>>& kinds() {
  static const std::vector<std::pair<std::string, std::function<void()>>> all = {
      {"access", [] { waits_for_a_read([](void* p) { *static_cast<volatile char*>(p) = 1; }); }},
      {"acquire", [] { waits_for_a_read([](void* p) { vmem_acquire(p, 1, VMEM_READ, VMEM_HOST, nullptr); }); }},
      {"lease_end",
       [] {
         waits_for_a_read([](void* p) {
           const vmem_range range{p, 1, VMEM_READ, 0};
           struct vmem_lease* lease = nullptr;
           vmem_lease_async(&lease, &range, 1, VMEM_HOST, nullptr, nullptr, nullptr);
           disk->wait_hanging(1, 60000);
           vmem_lease_end(lease, nullptr);
           pause();
         });
       }},
      {"sync", [] { waits_for_a_write(Io::Op::write, [](void* p) { vmem_sync(p, kSize); }); }},
      {"sync_flush", [] { waits_for_a_write(Io::Op::flush, [](void* p) { vmem_sync(p, kSize); }); }},
      {"sync_all", [] { waits_for_a_write(Io::Op::write, [](void*) { vmem_sync(nullptr, 0); }); }},
      {"evict", [] { waits_for_a_write(Io::Op::write, [](void* p) { vmem_evict(p, kSize, VMEM_SSD); }); }},
      {"free", [] { waits_for_a_write(Io::Op::write, [](void* p) { vmem_free(p); }); }},
      {"shutdown_writes", [] { waits_for_a_write(Io::Op::write, [](void*) { vmem_shutdown(); }); }},
      {"shutdown_reads",
       [] {
         waits_for_a_read([](void* p) {
           vmem_prefetch(p, kSize, VMEM_HOST, nullptr);
           disk->wait_hanging(1, 60000);
           vmem_shutdown();
         });
       }},
      {"dont_need",
       [] {
         waits_for_a_read([](void* p) {
           vmem_prefetch(p, kSize, VMEM_HOST, nullptr);
           disk->wait_hanging(1, 60000);
           vmem_advise(p, kSize, VMEM_ADVISE_DONT_NEED, VMEM_HOST);
           vmem_free(p);
         });
       }},
      {"memory", waits_for_memory},
      {"init", waits_in_init},
      {"stream", waits_for_a_stream},
  };
  return all;
}

TEST(SigtermChild, DISABLED_WaitsInACall) {
  for (const auto& [name, wait] : kinds()) {
    if (name != getenv("VMEM_TEST_CALL")) continue;
    if (name != "init" && name != "stream") start();
    wait();
    FAIL() << "the call has returned: " << vmem_last_error();
  }
  _exit(91);
}

class Sigterm : public SystemTest, public testing::WithParamInterface<size_t> {};
INSTANTIATE_TEST_SUITE_P(Calls, Sigterm, testing::Range<size_t>(0, 14),
                         [](const auto& p) { return kinds()[p.param].first; });

TEST_P(Sigterm, EndsAProgramThatWaitsInACall) {
  ASSERT_EQ(kinds().size(), 14u);
  int told[2];
  ASSERT_EQ(pipe2(told, O_CLOEXEC), 0);
  systest::ChildOf of;
  of.output = told[1];
  const pid_t child =
      systest::start_child("SigtermChild.DISABLED_WaitsInACall",
                           {{"VMEM_TEST_CALL", kinds()[GetParam()].first}, {"VMEM_PUBLISH", "off"}}, of);
  close(told[1]);
  char waits = 0;
  while (read(told[0], &waits, 1) == 1 && waits != 'w') continue;
  close(told[0]);
  if (waits == 'w') kill(child, SIGTERM);
  const int status = systest::wait_for_child(child, 5);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNotTrapped) GTEST_SKIP() << "accesses cannot be trapped here";
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << (status == -1 ? "it went on" : "ended otherwise");
}

}  // namespace
