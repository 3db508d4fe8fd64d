// Builds a pager from settings: trap, engine and store, with their fallbacks.
#include <numa.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>
#include <utility>

#include "api/memory_limit.h"
#include "api/runtime.h"
#include "api/test_hooks.h"
#include "core/log.h"
#include "core/process/fork.h"
#include "device/backend.h"
#include "pager/pager.h"
#include "store/cipher_engine.h"
#include "trap/trap.h"

namespace vmem::api {

using core::error;
using core::Option;
using core::Status;

namespace {

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
  if (wanted != "uffd" && wanted != "signal" && transfer == "auto") {
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
  user.in_signal_handler = wanted == "signal";
  adjust_trap(&user);
  Status s = trap::make_userfault_trap(user, out);
  if (s.ok() && !(*out)->caps().system_calls && !user.in_signal_handler) {
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
  if (options.text(Option::trap) == "signal" && setting != device::kNone) {
    constexpr char kWhy[] =
        "trap is signal, which serves faults of host memory alone; set device to none, or trap to auto";
    if (setting != device::kAutomatic) return error(ENOTSUP, "setting device is %s, but %s", setting.c_str(), kWhy);
    core::log(core::Level::info, "no device tier: %s", kWhy);
    return {};
  }
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

}  // namespace vmem::api
