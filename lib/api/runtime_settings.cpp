// Settings of the runtime: read from the environment, inherited by a forked child, and changed by
// calls of the program and by requests from outside.
#include <unistd.h>

#include <cerrno>
#include <new>
#include <utility>
#include <vector>

#include "api/memory_limit.h"
#include "api/runtime.h"
#include "core/log.h"
#include "core/process/at_exit.h"
#include "core/process/fork.h"
#include "pager/pager.h"

namespace vmem::api {

using core::error;
using core::Option;
using core::Status;

namespace {

Status shutting_down() {
  return error(ECANCELED, "the process is shutting libvmem down");
}

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

}  // namespace

void Runtime::inherit_settings() {
  if (const Settings* const set = settings_now.exchange(nullptr); set != nullptr) settings_of_parent.store(set);
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

}  // namespace vmem::api
