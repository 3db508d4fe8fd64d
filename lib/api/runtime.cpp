#include "api/runtime.h"

#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <utility>

#include "api/page_size.h"
#include "api/published.h"
#include "core/break.h"
#include "core/log.h"
#include "core/process/at_exit.h"
#include "core/process/cancellation.h"
#include "core/process/fork.h"
#include "core/process/valgrind.h"
#include "core/scheduling.h"
#include "core/thread.h"
#include "pager/pager.h"
#include "store/engine.h"

namespace vmem::api {

using core::error;
using core::Option;
using core::Status;

namespace {

// The runtime outlives all else, so that threads and destructors may use regions to the end. A
// forked child starts without one.
constinit std::atomic<Runtime*> made{nullptr};
constinit thread_local unsigned calls = 0;  // calls of this thread that have not returned

// Leaves the parent's runtime untouched: threads that the child does not have may have left it in
// any state. A child forked inside a call would go on with that runtime, so it may not begin anew.
void begin_anew_in_child() {
  if (calls != 0 || core::broken("anew_in_child")) return;
  made.store(nullptr);
  Runtime::inherit_settings();
}

void at_exit() {
  if (core::in_child() || made.load() == nullptr) return;
  const core::NoCancellation whole;
  made.load()->finish();
  core::deliver_log_at_exit(Runtime::Call::may_hold_locks());
}

// Builds the pager on a thread of ours. Threads that the kernel and drivers start inherit the
// scheduling of their creator, and the caller's may not be the default. Also, a disk or a driver
// may be slow while the caller has signals to handle.
Status build_aside(core::Options& options, std::unique_ptr<pager::Pager>* out) {
  Status built;
  bool logged = false;
  const auto build = [&] {
    core::begin_call_that_logs();
    try {
      built = build_pager(options, out);
    } catch (const std::bad_alloc&) {
      built = error(ENOMEM, "no memory to start");
    }
    logged = core::end_call_that_logs();
  };
  if (!core::run_aside(build)) build();
  if (logged) core::log_of_call_waits();
  return built;
}

}  // namespace

Runtime::Runtime() {
  core::keep_own_memory_in_children();  // before any error has a message
  core::mark_this_process();
  static constinit std::atomic<bool> prepared{false};
  if (prepared.exchange(true)) return;
  pthread_atfork(nullptr, nullptr, publish::Publisher::after_fork_in_child);
  pthread_atfork(nullptr, nullptr, store::renew_in_child);
  pthread_atfork(nullptr, nullptr, begin_anew_in_child);
}

// Uses no lock and no compiler guard: a child could find it held by a thread that it does not have.
Runtime& Runtime::get() {
  Runtime* runtime = made.load(std::memory_order_acquire);
  if (runtime != nullptr) return *runtime;
  auto* const mine = new Runtime;
  if (!made.compare_exchange_strong(runtime, mine)) {
    delete mine;
    return *runtime;
  }
  core::set_exit_work(at_exit);
  return *mine;
}

Status Runtime::start() {
  const FairLock setup(setup_);
  if (Status s = load_environment(); !s.ok()) return s;
  if (gate_.pager != nullptr) return {};
  if (Status s = check_page_size(static_cast<size_t>(sysconf(_SC_PAGESIZE))); !s.ok()) return s;
  if (core::on_valgrind()) {
    return error(ENOTSUP,
                 "valgrind runs this program, and stops libvmem's threads while a thread of the program waits for "
                 "them; run without valgrind, or build with -fsanitize=address or thread instead");
  }
  if (Status s = core::set_thread_cpus(options_.text(Option::cpus)); !s.ok()) return s;
  if (Status s = core::start_log_thread(core::start_thread); !s.ok()) return s;
  std::unique_ptr<pager::Pager> pager;
  if (Status s = build_aside(options_, &pager); !s.ok()) return s;
  {
    pager::Closed gate(gate_);
    gate.drain();
    gate_.pager = std::move(pager);
  }
  update_publication();
  return {};
}

// Starts or stops publishing, as the setting says. A failure affects only vmemctl.
void Runtime::update_publication() {
  if (publisher_ != nullptr && publisher_->stopping()) {
    if (options_.number(Option::publish) == 0) return;  // a request stopped it on its own thread, and it ends itself
    publisher_.reset();
  }
  if (options_.number(Option::publish) == 0) {
    if (publisher_ != nullptr) publisher_->stop();
    return;
  }
  if (publisher_ != nullptr || gate_.pager == nullptr) return;
  publish::Source source;
  source.take = snapshots_of(gate_);
  source.set = [this](const std::atomic<bool>& stop, const std::string& name, const std::string& value) {
    return set_from_outside(stop, name, value);
  };
  source.get = [this](const std::atomic<bool>& stop, const std::string& name, std::string* value) {
    return get_from_outside(stop, name, value);
  };
  if (Status s = publish::Publisher::start(source, "", &publisher_); !s.ok()) {
    core::log(core::Level::info, "vmemctl will not see this process: %.*s", static_cast<int>(s.text().size()),
              s.text().data());
  }
}

Runtime::Call::Call() {
  ++calls;
}

Runtime::Call::~Call() {
  --calls;
}

bool Runtime::Call::may_hold_locks() {
  return calls != 0 || (core::on_library_thread() && !core::in_log_sink());
}

bool Runtime::Call::refused() const {
  if (!core::exiting()) return false;
  return calls > 1 || (core::on_library_thread() && !core::in_log_sink());
}

std::string Runtime::published_at() {
  const FairLock setup(setup_);
  return publisher_ != nullptr && !publisher_->stopping() ? publisher_->path() : "";
}

Status Runtime::use(Use* out) {
  for (;;) {
    if (Status s = use_if_running(out); !s.ok()) return s;
    if (*out) return {};
    if (Status s = start(); !s.ok()) return s;
  }
}

// Ends a pager without regions. Its threads end when disks and devices have done their requests.
// Until then signals are let in, and their handlers may end the process.
void Runtime::end_pager() {
  const auto end = [this] { gate_.pager.reset(); };
  nothing_to_write_ = true;
  if (!core::run_aside(end)) end();
  nothing_to_write_ = false;
}

void Runtime::shutdown() {
  if (!pager::check_fork().ok()) return;
  {
    const FairLock setup(setup_);
    publisher_.reset();
    if (gate_.pager != nullptr) {
      leases_.cancel();
      kernels_.stop(*gate_.pager);
      pager::Closed gate(gate_);
      gate_.pager->shutdown();  // makes calls that wait inside return
      gate.drain();
      kernels_.over();
      gate_.pager->shutdown();  // for regions that the last calls made
      leases_.over();
      end_pager();
    }
  }
  kernels_.drain();
  leases_.drain();  // with no lock held: it waits for code of the application
}

std::string Runtime::check() {
  Use pager;
  if (!use_if_running(&pager).ok() || !pager) return "";
  return pager->check();
}

}  // namespace vmem::api
