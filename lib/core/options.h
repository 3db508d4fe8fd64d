// The table of settings. vmem_set, vmem_get, the environment, docs/settings.md and the machine's
// defaults all come from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/mutex.h"
#include "core/status.h"

namespace vmem::core {

enum class Option : unsigned {
  host_budget,
  device_budget,
  device_reserve,
  device_block_size,
  staging_share,
  peer_spill_percent,
  ssd_path,
  ssd_budget,
  block_size,
  io_depth,
  io_engine,
  direct_io,
  readahead,
  checksum,
  encryption,
  core_dump,
  compression,
  trap,
  transfer,
  device,
  numa_nodes,
  cpus,
  io_threads,
  evict_threads,
  fault_timeout_ms,
  writeback_interval,
  dirty_limit,
  log,
  publish,
  debug,
  count_,
};

enum class OptionKind : uint8_t { bytes, number, boolean, choice, text };

// The values of a setting of kind choice: a fixed list, or the names in a registry of another room.
class Choices {
 public:
  constexpr Choices(std::nullptr_t) {}
  constexpr Choices(const char* fixed) : fixed_(fixed) {}
  constexpr Choices(std::string (*registry)()) : registry_(registry) {}
  constexpr bool any() const { return fixed_ != nullptr || registry_ != nullptr; }
  std::string names() const;  // "auto|kmod|uffd"

 private:
  const char* fixed_ = nullptr;
  std::string (*registry_)() = nullptr;
};
// Rooms that core does not know define these beside their registries, which stay the only lists.
std::string io_engine_choices();  // lib/store/engine.cpp
std::string device_choices();     // lib/device/backend.cpp

struct OptionInfo {
  Option id;
  const char* name;  // "host_budget"; in the environment VMEM_HOST_BUDGET
  OptionKind kind;
  const char* unit;          // "bytes", "requests", ..; "" if it has none
  const char* default_text;  // the default, in words or as a value
  uint64_t min, max;         // bytes and number: inclusive bounds
  Choices choices;           // choice: "auto|kmod|uffd"
  bool live;                 // may change while regions exist
  const char* help;          // one sentence
};

std::span<const OptionInfo> option_table();
const OptionInfo* find_option(std::string_view name);

// Parses "8GiB", "512M" or "4096" into bytes. Units are K, M, G and T, with or without iB or B;
// case does not matter. "max" is not a size.
Status parse_bytes(std::string_view text, uint64_t* out);

// True if this program runs with more rights than the user who started it (AT_SECURE). That user
// must not set its settings or see its state.
bool has_more_rights();

// Returns the variable that a mistyped one probably means, such as VMEM_HOST_BUDGET for
// VMEM_HOST_BUGDET; "" if none is near.
std::string meant_by(std::string_view variable);

// number() returns this for a block size that is "auto".
inline constexpr uint64_t kAuto = 0;

// A set of values. Thread-safe. An option that is not set has is_set() == false and its default.
class Options {
 public:
  Options();
  // Returns -ENOENT for an unknown name, or -EINVAL, naming the accepted form, for a bad value.
  // Changes nothing on error.
  Status set(std::string_view name, std::string_view value);
  Status set(Option id, std::string_view value);
  Status get(std::string_view name, std::string* value) const;
  // Reads VMEM_<NAME> for every option. Returns an error for the first bad one, naming variable,
  // value and accepted form. Logs a warning for variables that nearly match one. Ignores the
  // environment under AT_SECURE.
  Status load_environment();

  bool is_set(Option id) const;
  // Restores the state before any set().
  void unset(Option id);
  uint64_t number(Option id) const;   // bytes, number, boolean (0/1)
  std::string text(Option id) const;  // choice, text; also the canonical form of the others

 private:
  struct Value {
    bool set = false;
    uint64_t number = 0;
    std::string text;
  };
  mutable Mutex mutex_;
  std::vector<Value> values_ VMEM_GUARDED_BY(mutex_);  // indexed by Option
};

// Generate docs/settings.md and the manual page vmem-settings(7) from the table.
std::string options_markdown();
std::string options_manual();

}  // namespace vmem::core
