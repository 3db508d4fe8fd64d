#include "api/runtime.h"

#include <numa.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "api/cancellation.h"
#include "api/memory_limit.h"
#include "api/page_size.h"
#include "api/published.h"
#include "api/test_hooks.h"
#include "core/break.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/mutex.h"
#include "core/process/at_exit.h"
#include "core/process/fork.h"
#include "core/process/valgrind.h"
#include "core/scheduling.h"
#include "core/signals.h"
#include "core/thread.h"
#include "device/backend.h"
#include "pager/block/stall_clock.h"
#include "pager/pager.h"
#include "store/cipher_engine.h"
#include "trap/trap.h"

namespace vmem::api {

using core::error;
using core::Option;
using core::Status;

namespace {

// How long exit waits without progress; shorter if the exiting thread may itself hold what it waits
// for.
constexpr uint64_t kExitPatience = 30000000000, kExitPatienceInside = 5000000000;  // ns
constexpr uint64_t kExitPatienceKernels = 4000000000;  // ns; for threads that serve kernels; leaves time to write

Status shutting_down() {
  return error(ECANCELED, "the process is shutting libvmem down");
}

// The runtime outlives all else, so that threads and destructors may use regions to the end. A
// forked child starts without one.
constinit std::atomic<Runtime*> made{nullptr};
constinit thread_local unsigned calls = 0;  // calls of this thread that have not returned

// The settings of the process. A child starts with them: it reads a complete set whatever the
// threads of its parent were doing.
using Settings = std::vector<std::pair<Option, std::string>>;
constinit std::atomic<const Settings*> settings_now{nullptr}, settings_of_parent{nullptr};

void note_settings(const core::Options& options) {
  try {
    auto now = std::make_unique<Settings>();
    for (const core::OptionInfo& info : core::option_table()) {
      if (options.is_set(info.id)) now->emplace_back(info.id, options.text(info.id));
    }
    delete settings_now.exchange(now.release());
  } catch (const std::bad_alloc&) {  // a child gets the settings noted before
  }
}

// Leaves the parent's runtime untouched: threads that the child does not have may have left it in
// any state. A child forked inside a call would go on with that runtime, so it may not begin anew.
void begin_anew_in_child() {
  if (calls != 0 || core::broken("anew_in_child")) return;
  made.store(nullptr);
  if (const Settings* const set = settings_now.exchange(nullptr); set != nullptr) settings_of_parent.store(set);
}

// Returns whether this thread may hold our locks. Inside the log's sink, also on the log's own
// thread, it holds none.
bool holds_locks() {
  return calls != 0 || (core::on_library_thread() && !core::in_log_sink());
}

void at_exit() {
  if (core::in_child() || made.load() == nullptr) return;
  const NoCancellation whole;
  made.load()->finish();
  core::deliver_log_at_exit(holds_locks());
}

unsigned by_cpus() {
  return std::clamp(std::thread::hardware_concurrency() / 4, 1u, 4u);
}

unsigned threads_or(core::Options& options, Option option) {
  return options.is_set(option) ? static_cast<unsigned>(options.number(option)) : by_cpus();
}

Status parse_nodes(const std::string& text, std::vector<int>* out) {
  if (text.empty()) return {};
  if (numa_available() < 0) {
    return error(ENOTSUP, "numa_nodes is \"%s\", but this kernel has no NUMA support; leave it unset", text.c_str());
  }
  // libnuma prints text that it does not parse to stderr, and also accepts names of files and
  // devices.
  const bool is_list = text == "all" || text.find_first_not_of("0123456789,-!+") == std::string::npos;
  bitmask* nodes = is_list ? numa_parse_nodestring_all(text.c_str()) : nullptr;
  if (nodes == nullptr) {
    return error(EINVAL,
                 "numa_nodes: \"%s\" is not accepted; give nodes of this machine (0 to %d) as in \"0\", \"0,2\", "
                 "\"0-3\" or \"all\"",
                 text.c_str(), numa_max_node());
  }
  for (unsigned i = 0; i < nodes->size; ++i) {
    if (numa_bitmask_isbitset(nodes, i) != 0) out->push_back(static_cast<int>(i));
  }
  numa_bitmask_free(nodes);
  return {};
}

Status make_trap(core::Options& options, std::unique_ptr<trap::Trap>* out) {
  const std::string wanted = options.text(Option::trap), transfer = options.text(Option::transfer);
  if (wanted != "uffd" && transfer == "auto") {
    Status s = trap::make_kmod_trap({}, out);
    if (s.ok() && options.number(Option::core_dump) != 0)
      core::log(core::Level::warning, "setting core_dump is on, but mappings of the module are in no core dump");
    if (s.ok() || wanted == "kmod") return s;
    // Most machines have no module; a module that cannot be used is worth a warning.
    core::log(s.code() == -ENOENT ? core::Level::info : core::Level::warning,
              "userfaultfd in place of the module: %.*s", static_cast<int>(s.text().size()), s.text().data());
  } else if (wanted == "kmod") {
    return error(EINVAL,
                 "setting trap is kmod, which installs frames, but setting transfer is %s; leave transfer at auto, or "
                 "set trap to uffd",
                 transfer.c_str());
  }
  trap::UserfaultOptions user;
  user.core_dump = options.number(Option::core_dump) != 0;
  adjust_trap(&user);
  Status s = trap::make_userfault_trap(user, out);
  if (s.ok() && !(*out)->caps().system_calls) {
    VMEM_LOG_ONCE(core::Level::warning,
                  "userfaultfd is unprivileged here, so %s; `vmemctl doctor` says how to change that",
                  trap::kSystemCallsNeedLeases);
  }
  if (s.ok() && options.text(Option::transfer) == "move" && !(*out)->caps().move) {
    return error(ENOTSUP,
                 "setting transfer is move, but this kernel cannot move pages (UFFDIO_MOVE, Linux 6.8); set auto");
  }
  return s;
}

Status make_devices(core::Options& options, std::unique_ptr<device::Devices>* out) {
  const size_t wanted = options.number(Option::device_block_size);
  const size_t unit = wanted != core::kAuto ? wanted : device::kUnit;  // auto: the pager chooses for each region
  if (Status s; replace_devices(unit, out, &s)) return s;
  static constinit std::atomic<bool> had_devices{false};  // in this process or an ancestor
  const std::string setting = options.text(Option::device);
  if (had_devices.load() && core::has_parents_state() && setting != device::kNone) {
    constexpr char kWhy[] =
        "this process was forked from one that had a device tier, and CUDA cannot be used after fork; start it by "
        "exec (spawn), or fork before libvmem and CUDA are used";
    if (setting != device::kAutomatic) return error(ENOTSUP, "setting device is %s, but %s", setting.c_str(), kWhy);
    core::log(core::Level::warning, "no device tier: %s", kWhy);
    return {};
  }
  std::string why;
  if (Status s = device::make_devices(setting, unit, out, &why); !s.ok()) return s;
  if (*out != nullptr) had_devices.store(true);
  if (*out == nullptr) {
    core::log(core::Level::info, "no device tier: %s", why.c_str());
  } else if (!why.empty()) {
    core::log(core::Level::info, "the device tier is %s; %s", (*out)->name(), why.c_str());
  }
  return {};
}

}  // namespace

Status build_pager(core::Options& options, std::unique_ptr<pager::Pager>* out) {
  pager::Config config;
  pager::Tunables tunables;
  tunables.host_budget =
      options.is_set(Option::host_budget) ? options.number(Option::host_budget) : usable_memory("") / 2;
  if (const std::string line = warn_of_budget(tunables.host_budget, 0, ""); !line.empty()) {
    core::log(core::Level::warning, "%s", line.c_str());
  }
  config.staging_share = static_cast<unsigned>(options.number(Option::staging_share));
  config.peer_spill_percent = static_cast<unsigned>(options.number(Option::peer_spill_percent));
  config.io_depth = static_cast<unsigned>(options.number(Option::io_depth));
  config.evict_threads = threads_or(options, Option::evict_threads);
  tunables.readahead_bytes = options.number(Option::readahead);
  config.checksum = options.number(Option::checksum) != 0;
  tunables.fault_timeout_ms = static_cast<unsigned>(options.number(Option::fault_timeout_ms));
  tunables.writeback_interval_ns = options.number(Option::writeback_interval) * uint64_t{1000000000};
  tunables.dirty_limit = options.number(Option::dirty_limit);
  config.allow_move = options.text(Option::transfer) != "copy";
  config.direct_io = options.number(Option::direct_io) != 0;
  if (Status s = parse_nodes(options.text(Option::numa_nodes), &config.numa_nodes); !s.ok()) return s;

  pager::Parts parts;
  if (Status s = make_trap(options, &parts.trap); !s.ok()) return s;
  store::EngineOptions engine;
  engine.depth = config.io_depth;
  engine.threads = threads_or(options, Option::io_threads);
  engine.kind = store::engine_kind(options.text(Option::io_engine));
  if (Status s = store::make_engine(engine, &parts.engine); !s.ok()) return s;
  parts.engine = wrap_engine(std::move(parts.engine));
  if (options.number(Option::encryption) != 0) {
    config.io_buffer_bytes = store::cipher_engine_bytes(engine);
    std::unique_ptr<store::Engine> plain = std::move(parts.engine);
    if (Status s = store::make_cipher_engine(engine, std::move(plain), &parts.engine); !s.ok()) return s;
  }
  store::SpaceOptions space;
  space.paths = options.text(Option::ssd_path);
  space.budget = options.number(Option::ssd_budget);
  space.direct = config.direct_io;
  if (Status s = store::make_space(space, *parts.engine, &parts.space); !s.ok()) return s;
  if (Status s = make_devices(options, &parts.devices); !s.ok()) return s;
  tunables.device_budget = options.is_set(Option::device_budget) ? options.number(Option::device_budget) : 0;
  if (options.is_set(Option::device_reserve)) tunables.device_reserve = options.number(Option::device_reserve);
  config.auto_device_blocks = options.number(Option::device_block_size) == core::kAuto;
  auto pager = std::make_unique<pager::Pager>(std::move(parts), std::move(config), tunables);
  if (Status s = pager->start(); !s.ok()) return s;
  *out = std::move(pager);
  return {};
}

namespace {

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

// A bad variable is reported by every call until it is corrected.
Status Runtime::load_environment() {
  if (environment_read_) return {};
  if (const Settings* const parents = settings_of_parent.load(); parents != nullptr) {
    for (const auto& [id, value] : *parents) options_.set(id, value).ignore();  // the value was accepted before
  } else if (Status s = options_.load_environment(); !s.ok()) {
    return s;
  }
  environment_read_ = true;
  note_settings(options_);
  core::set_debug(options_.number(Option::debug) != 0);
  return apply(Option::log);
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
  if (Status s = core::start_log_thread(); !s.ok()) return s;
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

bool Runtime::Call::refused() const {
  if (!core::exiting()) return false;
  return calls > 1 || (core::on_library_thread() && !core::in_log_sink());
}

// The state of exit(), which waits while another thread writes.
struct Runtime::Finishing {
  Finishing* before = nullptr;
  core::Mutex mutex;
  std::condition_variable changed;
  bool done VMEM_GUARDED_BY(mutex) = false;
  const core::Counters* counters VMEM_GUARDED_BY(mutex) = nullptr;  // the pager's, while it writes
};

void Runtime::hide() {
  if (!setup_.try_lock()) return;  // any thread may hold it when exit() is called
  const FairLock setup(setup_, std::adopt_lock);
  if (publisher_ != nullptr) publisher_->retire();
}

// Writes changes of shared files, as with mmap; all else dies with the process.
void Runtime::write_shared_files(Finishing* finishing) {
  if (nothing_to_write_) return;
  Use pager;
  gate_.use_at_exit(&pager);
  if (!pager) return;
  const auto tell = [&](const core::Counters* counters) {
    if (finishing == nullptr) return;
    const core::MutexLock lock(finishing->mutex);
    finishing->counters = counters;
  };
  tell(&pager->counters());
  pager->flush_host().ignore();  // flush_shared() tries failed writes again
  if (gave_up_) return tell(nullptr);
  kernels_.stop(*pager, kExitPatienceKernels);
  if (core::debug()) pager->look_for_loss();
  pager->flush_shared().ignore();  // it has logged errors
  tell(nullptr);
}

namespace {

// Logs why shared files may lack changes.
void say_given_up(bool inside, uint64_t patience) {
  if (core::at_our_end()) {
    core::log(core::Level::error,
              "the process ends for the reason above: changes of shared files that could not be written because of it, "
              "or were not written when nothing made progress for %u s, are lost",
              static_cast<unsigned>(patience / 1000000000));
    return;
  }
  if (inside) {
    core::log(core::Level::error,
              "exit was called inside a call of libvmem (by a signal handler), and shared files cannot be written "
              "during that call: changes that vmem_sync had not written are lost");
    return;
  }
  core::log(core::Level::error,
            "at exit no write and no copy from a device made progress for %u s: changes of shared files that were not "
            "written by then are lost",
            static_cast<unsigned>(patience / 1000000000));
}

}  // namespace

void Runtime::finish() {
  if (core::in_child()) return;
  // Inside a call, or on a thread of ours, this thread may hold what the write waits for.
  const bool inside = holds_locks();
  core::leave_sink();
  // So another thread writes, and this one waits while that makes progress. Neither a stream that
  // never ends nor a disk that never answers keeps the process.
  if (gave_up_ && inside) return;
  static std::atomic<Finishing*> left_behind{nullptr};  // the other thread may use it late
  auto* finishing = new Finishing;
  finishing->before = left_behind.exchange(finishing);
  std::thread writer;
  const Status started = core::start_thread(
      "vmem-exit",
      [this, finishing] {
        hide();
        write_shared_files(finishing);
        const core::MutexLock lock(finishing->mutex);
        finishing->done = true;
        finishing->changed.notify_all();
      },
      &writer);
  if (!started.ok() && !inside) {
    const core::SignalsDeferred deferred;
    hide();
    return write_shared_files(nullptr);
  }
  if (started.ok()) writer.detach();
  const core::MutexLock lock(finishing->mutex);
  const uint64_t patience = inside || gave_up_ ? kExitPatienceInside : kExitPatience;
  pager::StallClock progress;
  progress.look(core::now_ns(), true);
  uint64_t seen = 0;
  while (started.ok() && !finishing->done) {
    finishing->mutex.wait_until(finishing->changed, std::chrono::steady_clock::now() + std::chrono::milliseconds(50));
    const core::Counters* counters = finishing->counters;
    const uint64_t now = counters != nullptr ? counters->write_bytes.load() + counters->swept_blocks.load() : 0;
    if (now != seen) progress.made();
    seen = now;
    progress.look(core::now_ns(), false);
    if (progress.over(0, patience)) break;
  }
  if (finishing->done) return;
  gave_up_ = true;
  say_given_up(inside, patience);
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

Status Runtime::apply(Option option) {
  if (option == Option::log) {
    const std::string level = options_.text(option);
    core::set_log_level(level == "error"   ? core::Level::error
                        : level == "info"  ? core::Level::info
                        : level == "debug" ? core::Level::debug
                                           : core::Level::warning);
    return {};
  }
  if (option == Option::debug) {
    core::set_debug(options_.number(option) != 0);
    return {};
  }
  if (option == Option::publish) {
    // With set-group-ID or capabilities the user is still the one who started the program, and
    // would own the file and the socket.
    if (options_.number(option) != 0 && core::has_more_rights()) {
      return error(EPERM,
                   "publish stays off: this program runs with more rights than the user who started it (AT_SECURE)");
    }
    update_publication();
    return {};
  }
  Use pager;
  if (Status s = use_if_running(&pager); !s.ok() || !pager) return s;
  switch (option) {
    case Option::host_budget: {
      struct vmem_stats stats = {};
      pager->queries().stats(&stats);
      const std::string line = warn_of_budget(options_.number(option), stats.host_bytes, "");
      if (!line.empty()) core::log(core::Level::warning, "%s", line.c_str());
      return pager->tunables_update().set_host_budget(options_.number(option));
    }
    case Option::device_budget:
      return pager->tunables_update().set_device_budget(options_.number(option));
    case Option::device_reserve:
      pager->tunables_update().set_device_reserve(options_.number(option));
      break;
    case Option::staging_share:
      pager->tunables_update().set_staging_share(static_cast<unsigned>(options_.number(option)));
      break;
    case Option::peer_spill_percent:
      pager->tunables_update().set_peer_spill(static_cast<unsigned>(options_.number(option)));
      break;
    case Option::ssd_budget:
      pager->tunables_update().set_space_budget(options_.number(option));
      break;
    case Option::readahead:
      pager->tunables_update().set_readahead(options_.number(option));
      break;
    case Option::checksum:
      pager->tunables_update().set_checksum(options_.number(option) != 0);
      break;
    case Option::writeback_interval:
    case Option::dirty_limit:
      pager->tunables_update().set_writeback(options_.number(Option::writeback_interval) * uint64_t{1000000000},
                                             options_.number(Option::dirty_limit));
      break;
    case Option::fault_timeout_ms:
      pager->tunables_update().set_fault_timeout(static_cast<unsigned>(options_.number(option)));
      break;
    default:
      break;  // takes effect for the next region
  }
  return {};
}

// For a setting that is read at start: ends a runtime without regions, so that the next use starts
// a new one.
Status Runtime::stop_if_idle(const char* name) {
  if (gate_.pager == nullptr) return {};
  const auto busy = [&] {
    return error(EBUSY, "%s cannot change while regions exist; set it before the first one, or free them", name);
  };
  if (gate_.pager->has_regions()) return busy();
  pager::Closed gate(gate_);
  // Without regions no call inside waits for another that is held outside.
  if (gate_.pager->has_regions()) return busy();
  gate.drain();
  if (gate_.pager->has_regions()) return busy();
  end_pager();
  return {};
}

Status Runtime::set(std::string_view name, std::string_view value) {
  if (Status s = pager::check_fork(); !s.ok()) return s;
  const FairLock setup(setup_);
  return set_locked(name, value);
}

Status Runtime::set_locked(std::string_view name, std::string_view value) {
  if (Status s = load_environment(); !s.ok()) return s;
  const core::OptionInfo* info = core::find_option(name);
  if (info == nullptr) return options_.set(name, value);  // reports that there is no such setting
  std::string before = options_.text(info->id);
  const bool was_set = options_.is_set(info->id);
  core::Options trial;
  if (Status s = trial.set(name, value); !s.ok()) return s;
  if (!info->live) {
    if (Status s = stop_if_idle(info->name); !s.ok()) return s;
  }
  if (Status s = options_.set(name, value); !s.ok()) return s;
  Status s = apply(info->id);
  if (!s.ok() && was_set) {
    options_.set(name, before).ignore();  // the value was accepted before
  } else if (!s.ok()) {
    options_.unset(info->id);
  }
  note_settings(options_);
  return s;
}

Status Runtime::get(std::string_view name, std::string* value) {
  if (Status s = pager::check_fork(); !s.ok()) return s;
  const FairLock setup(setup_);
  return get_locked(name, value);
}

Status Runtime::get_locked(std::string_view name, std::string* value) {
  if (Status s = load_environment(); !s.ok()) return s;
  if (Status s = options_.get(name, value); !s.ok()) return s;
  if (name == "host_budget" && value->empty()) {
    Use pager;
    if (Status s = use_if_running(&pager); !s.ok()) return s;
    struct vmem_stats stats = {};
    if (pager) pager->queries().stats(&stats);
    *value = std::to_string(pager ? stats.host_budget : usable_memory("") / 2);
  }
  return {};
}

// Returns false if `stop` was set before it got the lock.
bool Runtime::lock_setup(const std::atomic<bool>& stop) {
  while (!setup_.try_lock()) {
    if (stop.load(std::memory_order_acquire)) return false;
    usleep(1000);
  }
  return true;
}

Status Runtime::set_from_outside(const std::atomic<bool>& stop, std::string_view name, std::string_view value) {
  const core::OptionInfo* info = core::find_option(name);
  if (info != nullptr && !info->live) {
    return error(EBUSY, "%s cannot change while a process runs; set it in the process's environment when it is started",
                 info->name);
  }
  if (!lock_setup(stop)) return shutting_down();
  const FairLock setup(setup_, std::adopt_lock);
  return set_locked(name, value);
}

Status Runtime::get_from_outside(const std::atomic<bool>& stop, std::string_view name, std::string* value) {
  if (!lock_setup(stop)) return shutting_down();
  const FairLock setup(setup_, std::adopt_lock);
  return get_locked(name, value);
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
