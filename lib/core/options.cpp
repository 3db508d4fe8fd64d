#include "core/options.h"

#include <sys/auxv.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdlib>

#include "core/log.h"
#include "core/types.h"

namespace vmem::core {

namespace {

constexpr uint64_t kKiB = 1024, kMiB = kKiB * 1024, kGiB = kMiB * 1024, kPiB = kGiB * 1024 * 1024;

// In the order of enum Option.
constexpr OptionInfo kTable[] = {
    {Option::host_budget, "host_budget", OptionKind::bytes, "bytes",
     "half of the smaller of the memory-cgroup limit and what is available", 8 * kMiB, kPiB, nullptr, true,
     "Host memory that libvmem may use for blocks, I/O buffers and its own tables, including moves in flight."},
    {Option::device_budget, "device_budget", OptionKind::bytes, "bytes", "0.8 of the device memory that is free",
     2 * kMiB, kPiB, nullptr, true,
     "Device memory that libvmem may use on each GPU, including moves in flight. If other programs leave less, blocks "
     "use the rest."},
    {Option::device_reserve, "device_reserve", OptionKind::bytes, "bytes", "1/32 of the device's memory", 0, kPiB,
     nullptr, true,
     "If a GPU has less free memory than this, libvmem keeps no memory there for later blocks, but returns it to the "
     "driver for other programs. It does not limit blocks: device_budget does."},
    {Option::device_block_size, "device_block_size", OptionKind::bytes, "bytes", "auto", 2 * kMiB, kMaxBlock, nullptr,
     false,
     "Block of regions with a device tier that are made without their own block_size: a power of two, or auto. auto is "
     "the largest of 2, 4 and 8 MiB (up to 32 if made with advice SEQUENTIAL, 2 with RANDOM) for which rounding adds "
     "at most 3 % to the region, and device_budget and the staging frames hold 16 blocks. The driver's cost of a move, "
     "apart from its bytes, is the same for any size; an access of one word moves its whole block. Above 2 MiB only on "
     "devices with their own page tables (device=handles)."},
    {Option::staging_share, "staging_share", OptionKind::number, "percent", "50", 10, 90, nullptr, true,
     "Part of host_budget that blocks of the device tier may take while they move and, if unchanged, afterwards. It is "
     "pinned memory, taken when needed and then kept. The rest is for blocks that the CPU accesses."},
    {Option::peer_spill_percent, "peer_spill_percent", OptionKind::number, "percent", "50", 0, 90, nullptr, true,
     "Part of a GPU's device_budget that blocks of other GPUs may use while its own blocks do not need it. A block "
     "without room on its GPU goes there first, if NVLink links both and this process has used both. 0: always to host "
     "memory."},
    {Option::ssd_path, "ssd_path", OptionKind::text, "", "$TMPDIR, or /var/tmp", 0, 0, nullptr, false,
     "Colon-separated files, directories or block devices that hold blocks of anonymous regions; a directory gets an "
     "unlinked file; several are striped. A name that does not exist becomes a file; if it ends in / it is an error, "
     "like a $TMPDIR that does not exist. An existing file must be empty or an earlier store, and yours alone (mode "
     "0600); a device must be blank at its start, or an earlier store."},
    {Option::ssd_budget, "ssd_budget", OptionKind::bytes, "bytes", "no limit but the disk's", 0, kPiB, nullptr, true,
     "Bytes that anonymous regions may occupy in the store; 0 stores nothing."},
    {Option::block_size, "block_size", OptionKind::bytes, "bytes", "2 MiB", kMinBlock, kMaxBlock, nullptr, true,
     "Block of regions made from now on: a power of two, or auto. auto is 64 KiB, and a fault reads several blocks "
     "together, as many as their use suggests. A region with a device tier has blocks of device_block_size."},
    {Option::io_depth, "io_depth", OptionKind::number, "requests", "16", 1, 1024, nullptr, false,
     "Reads and writes in flight at the store; one of more than 2 MiB is split into parts of 2 MiB, and each part "
     "counts."},
    {Option::io_engine, "io_engine", OptionKind::choice, "", "auto", 0, 0, io_engine_choices, false,
     "How the store talks to the kernel; auto takes io_uring if it is permitted."},
    {Option::direct_io, "direct_io", OptionKind::boolean, "", "on", 0, 1, nullptr, false,
     "O_DIRECT where the file system allows it; off goes through the page cache."},
    {Option::readahead, "readahead", OptionKind::bytes, "bytes", "64 MiB", 0, 4 * kGiB, nullptr, true,
     "Largest read-ahead window of one access stream; 0 turns read-ahead off."},
    {Option::checksum, "checksum", OptionKind::boolean, "", "on", 0, 1, nullptr, true,
     "Verify every block read from the store against the digest taken when it was written. Off: wrong bytes from the "
     "disk, or from another user who can write to the store, go unnoticed."},
    {Option::encryption, "encryption", OptionKind::boolean, "", "off", 0, 1, nullptr, false,
     "Encrypt the store (AES-256-XTS by OpenSSL's libcrypto, with a key that exists only in the process); mapped files "
     "stay as they are."},
    {Option::core_dump, "core_dump", OptionKind::boolean, "", "off", 0, 1, nullptr, false,
     "Include regions in core dumps: the bytes in host memory; the rest reads as zeros. Mappings of the module are "
     "never dumped."},
    {Option::compression, "compression", OptionKind::choice, "", "none", 0, 0, "none|lz4|zstd", true,
     "How blocks of regions made from now on are stored; a block that does not shrink is stored raw."},
    {Option::trap, "trap", OptionKind::choice, "", "auto", 0, 0, "auto|kmod|uffd|signal", false,
     "The trap that catches accesses of blocks that are not present: the module vmem.ko or userfaultfd. auto takes the "
     "module if it is loaded and the user may open it. signal: userfaultfd, and the thread that accesses a block "
     "brings it "
     "in a handler of SIGBUS (docs/reliability.md)."},
    {Option::transfer, "transfer", OptionKind::choice, "", "auto", 0, 0, "auto|move|copy", false,
     "How userfaultfd puts bytes in place; auto moves pages if the kernel can (6.8), else copies. A value other than "
     "auto selects userfaultfd."},
    {Option::device, "device", OptionKind::choice, "", "auto", 0, 0, device_choices, false,
     "Which device tier to use (docs/device-tier.md): auto takes what is available, handles first; handles are CUDA's "
     "physical handles (devices with their own page tables), managed is its unified memory, each an error if not "
     "available; sim and sim-handles are simulated devices like those "
     "two, for tests, in libraries that have them (make SIM=yes, the Python wheel). In a program that runs with more "
     "rights than the user who started it (AT_SECURE) auto is none: CUDA would load code that the environment names."},
    {Option::numa_nodes, "numa_nodes", OptionKind::text, "", "the kernel's choice", 0, 0, nullptr, false,
     "NUMA nodes that host frames come from, as in numactl: \"0\", \"0,2\", \"0-3\", \"all\"."},
    {Option::cpus, "cpus", OptionKind::text, "", "those of the main thread when the library was loaded", 0, 0, nullptr,
     false,
     "CPUs on which the library's threads run, as in \"0\", \"0,2\" or \"0-3,8\". They run with SCHED_OTHER and nice "
     "0, whatever the thread that makes the first call has."},
    {Option::io_threads, "io_threads", OptionKind::number, "threads", "by the number of CPUs, 1 to 4", 1, 64, nullptr,
     false, "Threads that complete I/O, verify and put blocks in place."},
    {Option::evict_threads, "evict_threads", OptionKind::number, "threads", "by the number of CPUs, 1 to 4", 1, 64,
     nullptr, false, "Threads that take blocks out and write them back."},
    {Option::fault_timeout_ms, "fault_timeout_ms", OptionKind::number, "milliseconds", "10000", 10, 3600000, nullptr,
     true,
     "How long a fault may wait for memory while nothing is read, written or evicted (SSD full, say) before SIGBUS."},
    {Option::writeback_interval, "writeback_interval", OptionKind::number, "seconds", "5", 0, 86400, nullptr, true,
     "Age at which changed blocks of shared files are written in the background, so that a process that is killed "
     "loses no older stores. 0: only when they leave memory, at a sync and at exit, and without dirty_limit. A block "
     "that is stored to all the time is written once in each interval."},
    {Option::dirty_limit, "dirty_limit", OptionKind::bytes, "bytes", "a quarter of host_budget, at least 64 MiB", 0,
     kPiB, nullptr, true,
     "Changed bytes of shared files in host memory at which accesses that would change more blocks wait for the "
     "disk; from half of it on blocks are written whatever their age. 0: the default. Blocks of 2 MiB and more count "
     "from their first access on, until they are written or found to be unchanged."},
    {Option::log, "log", OptionKind::choice, "", "warning", 0, 0, "error|warning|info|debug", true,
     "The most verbose level of log lines to deliver."},
    {Option::publish, "publish", OptionKind::boolean, "", "on", 0, 1, nullptr, true,
     "Lets vmemctl see this process, and change its live settings: one helper thread, one small file of its user's. "
     "Off, and refused, in a program that runs with more rights than the user who started it (AT_SECURE)."},
    {Option::debug, "debug", OptionKind::boolean, "", "off", 0, 1, nullptr, true,
     "After a device is lost (an illegal address, say), log the live leases, the regions and which ranges were "
     "not present."},
};
static_assert(std::size(kTable) == static_cast<size_t>(Option::count_));

}  // namespace

bool has_more_rights() {
  return getauxval(AT_SECURE) != 0;
}

namespace {

uint64_t default_number(Option id) {
  switch (id) {
    case Option::block_size:
      return 2 * kMiB;
    case Option::device_block_size:
      return kAuto;
    case Option::io_depth:
      return 16;
    case Option::staging_share:
    case Option::peer_spill_percent:
      return 50;
    case Option::direct_io:
    case Option::checksum:
      return 1;
    case Option::publish:
      return has_more_rights() ? 0 : 1;
    case Option::readahead:
      return 64 * kMiB;
    case Option::fault_timeout_ms:
      return 10000;
    case Option::writeback_interval:
      return 5;
    case Option::ssd_budget:
      return UINT64_MAX;
    default:
      return 0;
  }
}

std::string default_choice(Option id) {
  switch (id) {
    case Option::compression:
      return "none";
    case Option::log:
      return "warning";
    case Option::io_engine:
    case Option::trap:
    case Option::transfer:
    case Option::device:
    case Option::device_block_size:
      return "auto";
    default:
      return "";
  }
}

bool same_word(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

bool in_choices(std::string_view choices, std::string_view value) {
  while (!choices.empty()) {
    const size_t bar = choices.find('|');
    if (choices.substr(0, bar) == value) return true;
    choices = bar == std::string_view::npos ? std::string_view() : choices.substr(bar + 1);
  }
  return false;
}

std::string environment_name(const char* name) {
  std::string out = "VMEM_";
  for (const char* c = name; *c != '\0'; ++c) out += static_cast<char>(std::toupper(static_cast<unsigned char>(*c)));
  return out;
}

std::string accepted_form(const OptionInfo& info) {
  switch (info.kind) {
    case OptionKind::bytes:
      return strprintf(
          "%s from %s to %s, such as %s",
          info.id == Option::block_size || info.id == Option::device_block_size ? "auto, or a power of two" : "a size",
          human_bytes(info.min).c_str(), human_bytes(info.max).c_str(),
          info.id == Option::block_size          ? "64KiB or 2MiB"
          : info.id == Option::device_block_size ? "8MiB"
                                                 : "512MiB or 8G");
    case OptionKind::number:
      return strprintf("a whole number from %llu to %llu", static_cast<unsigned long long>(info.min),
                       static_cast<unsigned long long>(info.max));
    case OptionKind::boolean:
      return "on or off";
    case OptionKind::choice:
      return "one of " + info.choices.names();
    case OptionKind::text:
      return "text";
  }
  return "";
}

}  // namespace

std::string Choices::names() const {
  return registry_ != nullptr ? registry_() : fixed_ != nullptr ? fixed_ : "";
}

std::span<const OptionInfo> option_table() {
  return kTable;
}

const OptionInfo* find_option(std::string_view name) {
  for (const OptionInfo& info : kTable) {
    if (name == info.name) return &info;
  }
  return nullptr;
}

Status parse_bytes(std::string_view text, uint64_t* out) {
  uint64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [after, err] = std::from_chars(text.data(), end, value);
  if (err != std::errc() || after == text.data()) {
    return error(EINVAL, "\"%.*s\" is not a size", static_cast<int>(text.size()), text.data());
  }
  std::string_view unit(after, static_cast<size_t>(end - after));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  unsigned shift = 0;
  if (!unit.empty() && !same_word(unit, "B")) {
    static constexpr std::string_view kPrefixes = "KMGTP";
    const size_t at = kPrefixes.find(static_cast<char>(std::toupper(static_cast<unsigned char>(unit.front()))));
    const std::string_view rest = unit.substr(1);
    if (at == std::string_view::npos || !(rest.empty() || same_word(rest, "B") || same_word(rest, "iB"))) {
      return error(EINVAL, "\"%.*s\" has an unknown unit \"%.*s\"; use K, M, G or T, with or without iB",
                   static_cast<int>(text.size()), text.data(), static_cast<int>(unit.size()), unit.data());
    }
    shift = 10 * (static_cast<unsigned>(at) + 1);
  }
  if (shift != 0 && value > UINT64_MAX >> shift) {
    return error(EINVAL, "\"%.*s\" does not fit in 64 bits", static_cast<int>(text.size()), text.data());
  }
  *out = value << shift;
  return {};
}

namespace {

Status no_setting(std::string_view name) {
  const std::string variable = environment_name(std::string(name).c_str()), meant = meant_by(variable);
  std::string near;
  for (const OptionInfo& info : kTable) {
    const std::string other = environment_name(info.name);
    if (other == meant || other == variable) near = " (" + std::string(info.name) + "?)";
  }
  return error(ENOENT, "there is no setting \"%.*s\"%s; docs/settings.md lists them", static_cast<int>(name.size()),
               name.data(), near.c_str());
}

}  // namespace

Options::Options() : values_(static_cast<size_t>(Option::count_)) {
  for (const OptionInfo& info : kTable) unset(info.id);
}

void Options::unset(Option id) {
  MutexLock lock(mutex_);
  values_[static_cast<size_t>(id)] = {false, default_number(id), default_choice(id)};
}

Status Options::set(std::string_view name, std::string_view value) {
  const OptionInfo* info = find_option(name);
  if (info == nullptr) {
    return no_setting(name);
  }
  return set(info->id, value);
}

Status Options::set(Option id, std::string_view value) {
  const OptionInfo& info = kTable[static_cast<size_t>(id)];
  Value parsed;
  parsed.set = true;
  parsed.text = std::string(value);
  bool good = true;
  switch (info.kind) {
    case OptionKind::bytes:
      if ((id == Option::block_size || id == Option::device_block_size) && same_word(value, "auto")) {
        parsed.number = kAuto;
        parsed.text = "auto";
        break;
      }
      good = parse_bytes(value, &parsed.number).ok() && parsed.number >= info.min && parsed.number <= info.max;
      if (good && (id == Option::block_size || id == Option::device_block_size)) {
        good = (parsed.number & (parsed.number - 1)) == 0;
      }
      parsed.text = std::to_string(parsed.number);
      break;
    case OptionKind::number: {
      const char* const end = value.data() + value.size();
      const auto [after, err] = std::from_chars(value.data(), end, parsed.number);
      good = err == std::errc() && after == end && !value.empty() && parsed.number >= info.min &&
             parsed.number <= info.max;
      parsed.text = std::to_string(parsed.number);
      break;
    }
    case OptionKind::boolean:
      if (same_word(value, "on") || value == "1" || same_word(value, "true") || same_word(value, "yes")) {
        parsed.number = 1;
      } else if (same_word(value, "off") || value == "0" || same_word(value, "false") || same_word(value, "no")) {
        parsed.number = 0;
      } else {
        good = false;
      }
      parsed.text = parsed.number != 0 ? "on" : "off";
      break;
    case OptionKind::choice:
      good = in_choices(info.choices.names(), value);
      break;
    case OptionKind::text:
      good = value.find('\0') == std::string_view::npos;
      break;
  }
  if (!good) {
    return error(EINVAL, "%s: \"%.*s\" is not accepted; give %s", info.name, static_cast<int>(value.size()),
                 value.data(), accepted_form(info).c_str());
  }
  MutexLock lock(mutex_);
  values_[static_cast<size_t>(id)] = std::move(parsed);
  return {};
}

Status Options::get(std::string_view name, std::string* value) const {
  const OptionInfo* info = find_option(name);
  if (info == nullptr) {
    return no_setting(name);
  }
  *value = text(info->id);
  return {};
}

namespace {

constexpr size_t kLongestVariable = 64;

// Edit distance: letters changed, added, left out, or swapped with a neighbour.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1] ? 1 : 0)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

}  // namespace

std::string meant_by(std::string_view variable) {
  // Variables of tests and tools are no settings. Only VMEM_LONG is close to one (log).
  if (variable.substr(0, 5) != "VMEM_" || variable == "VMEM_LONG") return "";
  if (variable.size() > kLongestVariable) return "";  // near to none, and costly to compare
  std::string nearest;
  size_t least = variable.size() >= 10 ? 3 : 2;  // tolerates one wrong letter in a short name, two in others
  for (const OptionInfo& info : kTable) {
    const std::string name = environment_name(info.name);
    if (name == variable) return "";
    // A part of a name also counts: VMEM_BUDGET.
    const std::string_view part = variable.substr(5);
    const size_t far = part.size() >= 4 && name.find(part) != std::string::npos ? 1 : distance(name, variable);
    if (far < least) {
      least = far;
      nearest = name;
    }
  }
  return nearest;
}

Status Options::load_environment() {
  for (const OptionInfo& info : kTable) {
    const std::string variable = environment_name(info.name);
    // Not under AT_SECURE: the user who starts a set-user-ID program must not choose the files it
    // writes.
    const char* value = secure_getenv(variable.c_str());
    if (value == nullptr) continue;
    if (Status s = set(info.id, value); !s.ok()) {
      return error(EINVAL, "environment variable %s=\"%s\" is not accepted; give %s", variable.c_str(), value,
                   accepted_form(info).c_str());
    }
  }
  if (text(Option::log) == "error" || has_more_rights()) return {};
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view variable = std::string_view(*entry).substr(0, std::string_view(*entry).find('='));
    if (const std::string meant = meant_by(variable); !meant.empty()) {
      log(Level::warning, "environment variable %.*s is no setting and does nothing; is %s meant?",
          static_cast<int>(variable.size()), variable.data(), meant.c_str());
    }
  }
  return {};
}

bool Options::is_set(Option id) const {
  MutexLock lock(mutex_);
  return values_[static_cast<size_t>(id)].set;
}

uint64_t Options::number(Option id) const {
  MutexLock lock(mutex_);
  return values_[static_cast<size_t>(id)].number;
}

std::string Options::text(Option id) const {
  const OptionInfo& info = kTable[static_cast<size_t>(id)];
  MutexLock lock(mutex_);
  const Value& value = values_[static_cast<size_t>(id)];
  if (value.set || info.kind == OptionKind::choice) return value.text;
  if (info.kind == OptionKind::boolean) return value.number != 0 ? "on" : "off";
  if (info.kind == OptionKind::text || (value.number == 0 && info.kind == OptionKind::bytes)) return value.text;
  return std::to_string(value.number);
}

std::string options_markdown() {
  std::string out =
      "# Settings\n\n<!-- Generated from the table in lib/core/options.cpp by `make docs`; do not edit. -->\n\n"
      "Set with `vmem_set(name, value)` or the environment variable, which is read by `vmem_init`, but not\n"
      "in a program that runs with more rights than the user who started it (set-user-ID, capabilities;\n"
      "AT_SECURE). A variable that is nearly one of these is named in a warning. Sizes take K, M, G or T,\n"
      "with or without iB. \"Live\" settings may change while regions exist; the others only before the\n"
      "first region.\n\n"
      "| name | environment | default | accepted | live | what it does |\n|---|---|---|---|---|---|\n";
  for (const OptionInfo& info : kTable) {
    std::string form = accepted_form(info);
    for (size_t at = 0; (at = form.find('|', at)) != std::string::npos; at += 2) form.replace(at, 1, "\\|");
    out += strprintf("| `%s` | `%s` | %s | %s | %s | %s |\n", info.name, environment_name(info.name).c_str(),
                     info.default_text, form.c_str(), info.live ? "yes" : "no", info.help);
  }
  return out;
}

std::string options_manual() {
  std::string out =
      ".\\\" Generated from the table in lib/core/options.cpp by `make docs`; do not edit.\n"
      ".TH VMEM-SETTINGS 7 \"\" libvmem \"libvmem\"\n.SH NAME\nvmem-settings \\- settings of libvmem\n"
      ".SH DESCRIPTION\nA setting is given by\n.BR vmem_set (\"name\", \" value\")\nor by its environment variable, "
      "which is read when libvmem starts, but not in a program that runs with more rights than the user who started "
      "it (set-user-ID, capabilities; AT_SECURE). Sizes take K, M, G or T, with or without iB. Those marked live may "
      "change while regions exist, also from outside with\n.BR \"vmemctl tune\" ;\nthe others only before the first "
      "region.\n.SH SETTINGS\n";
  for (const OptionInfo& info : kTable) {
    out += strprintf(".TP\n.B %s\n%s\n.br\nEnvironment: %s. Default: %s. Accepted: %s.%s\n", info.name, info.help,
                     environment_name(info.name).c_str(), info.default_text, accepted_form(info).c_str(),
                     info.live ? " Live." : "");
  }
  return out + ".SH SEE ALSO\n.BR vmemctl (1),\n.BR libvmem-tier (3)\n";
}

}  // namespace vmem::core
