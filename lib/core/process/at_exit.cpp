#include "core/process/at_exit.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>

#include "core/break.h"
#include "core/log.h"
#include "core/stack.h"

namespace vmem::core {

namespace {

std::atomic<void (*)()> the_work{nullptr};
std::atomic<bool> begun{false}, registered{false}, ours{false};
std::atomic<int> working{0};                // threads that run the work at exit
std::atomic<pid_t> worker{0};               // of this process
constinit thread_local bool works = false;  // this thread does

void at_exit() {
  worker.store(getpid());
  ++working;
  begun.store(true);
  works = true;
  void (*const work)() = the_work.load();
  if (!with_stack([work] { work(); })) work();
  works = false;
  --working;
}

// Several threads may call exit() at once. Before glibc 2.41 each runs the handlers that no other has
// taken, and the first that finds none ends the process, although another may still write. So there
// are handlers that wait for the work, enough for kExits threads. The work has limits of its own. A
// forked child waits for none of its parent's, and a sink of the log, which may call exit(), for none
// that may wait for the sink.
constexpr int kExits = 16;
void wait_for_work() {
  if (works || in_log_sink()) return;
  for (int ms = 0; ms < 1000 && registered.load() && !begun.load(); ++ms) usleep(1000);  // it is about to begin
  while (working.load() != 0 && worker.load() == getpid()) usleep(1000);
}

}  // namespace

void set_exit_work(void (*work)()) {
  the_work.store(work);
  for (int i = 0; i < kExits; ++i) std::atexit(wait_for_work);
  registered.store(std::atexit(at_exit) == 0);
}

void do_exit_work_before_this() {
  if (the_work.load() != nullptr && !broken("exit_before_context")) std::atexit(at_exit);
}

void do_exit_work_at_our_end() {
  ours.store(true);
  if (the_work.load() != nullptr) the_work.load()();
}

bool at_our_end() {
  return ours.load();
}

bool exiting() {
  return begun.load(std::memory_order_relaxed);
}

// Runs the work once more after the program's static objects are gone, to include what their
// destructors stored.
__attribute__((destructor(101))) static void after_destructors() {
  if (the_work.load() != nullptr && !broken("exit_after_destructors")) at_exit();
}

}  // namespace vmem::core
