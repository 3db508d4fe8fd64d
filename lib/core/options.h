// The one table of settings: vmem_set, vmem_get, the environment, docs/settings.md and the machine's defaults all come
// from it.
#pragma once

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

struct OptionInfo {
  Option id;
  const char* name;  // "host_budget"; the environment has VMEM_HOST_BUDGET
  OptionKind kind;
  const char* unit;          // "bytes", "requests", ..; "" where it has none
  const char* default_text;  // what applies when nobody sets it, in words or as a value
  uint64_t min, max;         // bytes and number: inclusive bounds
  const char* choices;       // choice: "auto|kmod|uffd"
  bool live;                 // may change while regions exist
  const char* help;          // one sentence
};

std::span<const OptionInfo> option_table();
const OptionInfo* find_option(std::string_view name);

// "8GiB", "512M", "4096" -> bytes. K, M, G, T with or without iB or B; case does not matter; "max" is not a size.
Status parse_bytes(std::string_view text, uint64_t* out);

// This program runs with more rights than who started it (AT_SECURE): he gives it no settings and sees nothing of it.
bool has_more_rights();

// The variable that a mistyped one stands for, such as VMEM_HOST_BUDGET for VMEM_HOST_BUGDET; "" where none is near.
std::string meant_by(std::string_view variable);

// What number() answers of a block_size that is "auto".
inline constexpr uint64_t kAuto = 0;

// A set of values. Thread-safe. Unset options answer with `is_set() == false` and the numeric default.
class Options {
 public:
  Options();
  // Unknown name -ENOENT; bad value -EINVAL with the accepted form. Nothing changes on error.
  Status set(std::string_view name, std::string_view value);
  Status set(Option id, std::string_view value);
  Status get(std::string_view name, std::string* value) const;
  // Reads VMEM_<NAME> for every option; the first bad one is returned, naming variable, value and accepted form.
  // Variables that are nearly one of these are named in a warning. Under AT_SECURE the environment is not looked at.
  Status load_environment();

  bool is_set(Option id) const;
  // As if it had never been set.
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

// docs/settings.md and the manual page vmem-settings(7), from the table.
std::string options_markdown();
std::string options_manual();

}  // namespace vmem::core
