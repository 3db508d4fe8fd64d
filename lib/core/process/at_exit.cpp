#include "core/process/at_exit.h"

#include <atomic>
#include <cstdlib>

#include "core/break.h"
#include "core/stack.h"

namespace vmem::core {

namespace {

std::atomic<void (*)()> the_work{nullptr};
std::atomic<bool> begun{false}, ours{false};

void at_exit() {
  begun.store(true);
  void (*const work)() = the_work.load();
  if (!with_stack([work] { work(); })) work();
}

}  // namespace

void set_exit_work(void (*work)()) {
  the_work.store(work);
  std::atexit(at_exit);
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
