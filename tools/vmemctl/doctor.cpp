// vmemctl doctor: reports what this machine and this user's rights offer to libvmem, by trying
// where possible.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "api/memory_limit.h"
#include "commands.h"
#include "core/status.h"
#include "device/backend.h"
#include "device/presence.h"
#include "publish/place.h"
#include "ssd_path.h"
#include "store/engine.h"
#include "trap/trap.h"

namespace vmemctl {

using vmem::core::human_bytes;
using vmem::core::Status;
using vmem::core::strprintf;

namespace {

enum class State { ok, degraded, missing };
constexpr const char* kStates[] = {"ok", "degraded", "missing"};

struct Line {
  const char* name;
  State state;
  std::string found, advice;  // advice: "" if there is nothing to do
  bool essential = false;     // missing: libvmem does not work here
};

class Doctor {
 public:
  explicit Doctor(const DoctorOptions& options) : options_(options) {}
  const std::vector<Line>& examine();

 private:
  void kernel();
  void trap();
  void io_uring();
  void huge_pages();
  void limits();
  void memory();
  void ssd();
  void driver();
  void device_tier();
  void container();
  void module();
  void visible();

  std::string path(const std::string& p) const { return options_.root + p; }
  std::string first_line(const std::string& p) const {
    std::ifstream in(path(p));
    std::string line;
    std::getline(in, line);
    return printable(line);
  }
  bool exists(const std::string& p) const { return access(path(p).c_str(), F_OK) == 0; }
  void add(const char* name, State state, std::string found, std::string advice = "", bool essential = false) {
    lines_.push_back({name, state, std::move(found), std::move(advice), essential});
  }

  const DoctorOptions& options_;
  std::vector<Line> lines_;
  bool refused_ = false;  // a container's filter may have refused something
};

void Doctor::kernel() {
  const std::string release = first_line("/proc/sys/kernel/osrelease");
  int major = 0, minor = 0;
  if (sscanf(release.c_str(), "%d.%d", &major, &minor) != 2) {
    add("kernel", State::degraded, "its version cannot be read", "mount /proc");
  } else if (major * 1000 + minor >= 6008) {
    add("kernel", State::ok, release + ": pinned pages stay (direct I/O without leases)");
  } else if (major * 1000 + minor >= 5007) {
    add("kernel", State::degraded, release + ": blocks are copied in place of moved, and pins are not seen",
        "use Linux 6.8 or later (UFFDIO_MOVE), or hold VMEM_HOST leases over what direct I/O uses");
  } else {
    add("kernel", State::missing, release + ": userfaultfd is too old", "use Linux 5.7 or later, best 6.8", true);
  }
}

void Doctor::trap() {
  std::unique_ptr<vmem::trap::Trap> trap;
  Status s = vmem::trap::make_userfault_trap({}, &trap);
  if (!s.ok()) {
    refused_ = true;
    const bool module = access(path("/dev/vmem").c_str(), R_OK | W_OK) == 0;  // replaces userfaultfd
    add("userfaultfd", State::missing, module ? "not available; the module does its work" : "not available",
        std::string(s.text()), !module);
    return;
  }
  const vmem::trap::Caps& caps = trap->caps();
  std::string lacks;
  const auto lack = [&](bool has, const char* what) {
    if (!has) lacks += (lacks.empty() ? "" : "; ") + std::string(what);
  };
  lack(caps.move, "cannot move pages (Linux 6.8): blocks are copied");
  lack(caps.write_protect, "cannot write-protect");
  lack(caps.poison, "cannot poison (Linux 6.6): a failed block costs a mapping");
  lack(caps.system_calls, vmem::trap::kSystemCallsNeedLeases);
  if (lacks.empty()) {
    add("userfaultfd", State::ok, "everything");
  } else {
    add("userfaultfd", State::degraded, lacks,
        caps.system_calls
            ? "use a newer kernel"
            : "lease what system calls are given (vmem_acquire, VMEM_HOST): that needs no right. Else "
              "access to /dev/userfaultfd (Linux 6.1) or /dev/vmem for one group. Wider than needed: sysctl "
              "vm.unprivileged_userfaultfd=1 lets every user hold up system calls, which eases attacks on "
              "the kernel; CAP_SYS_PTRACE lets the program read and change every process "
              "(docs/security.md)");
  }
}

void Doctor::io_uring() {
  vmem::store::EngineOptions options;
  options.kind = vmem::store::EngineKind::io_uring;
  std::unique_ptr<vmem::store::Engine> engine;
  Status s = vmem::store::make_engine(options, &engine);
  if (s.ok()) {
    add("io_uring", State::ok, "permitted");
    return;
  }
  refused_ = true;
  const std::string disabled = first_line("/proc/sys/kernel/io_uring_disabled");
  add("io_uring", State::degraded, "threads do the I/O, slower at small blocks: " + std::string(s.text()),
      !disabled.empty() && disabled != "0" ? "sysctl kernel.io_uring_disabled=1 and kernel.io_uring_group=GID for one "
                                             "group, or kernel.io_uring_disabled=0 for every user (it is " +
                                                 disabled + ")"
                                           : "allow it in the container's seccomp profile (docs/install.md)");
}

void Doctor::huge_pages() {
  const std::string modes = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  if (modes.find("[always]") != std::string::npos || modes.find("[madvise]") != std::string::npos) {
    add("huge pages", State::ok, modes);
  } else {
    add("huge pages", State::degraded, modes.empty() ? "the kernel has none" : modes,
        "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled: I/O is at less than half of the disk's speed "
        "without");
  }
}

void Doctor::limits() {
  rlimit locked{}, files{};
  getrlimit(RLIMIT_MEMLOCK, &locked);
  getrlimit(RLIMIT_NOFILE, &files);
  const auto words = [](rlim_t n) { return n == RLIM_INFINITY ? std::string("unlimited") : human_bytes(n); };
  if (locked.rlim_cur == RLIM_INFINITY || geteuid() == 0 || locked.rlim_cur >= rlim_t{64} << 20) {
    add("locked memory", State::ok, words(locked.rlim_cur));
  } else {
    add("locked memory", State::degraded, words(locked.rlim_cur) + ": I/O buffers beyond it are not registered",
        "ulimit -l unlimited, or memlock in /etc/security/limits.conf");
  }
  if (files.rlim_cur >= 256) {
    add("open files", State::ok, std::to_string(files.rlim_cur));
  } else {
    add("open files", State::degraded, std::to_string(files.rlim_cur), "ulimit -n 1024");
  }
  const std::string maps = first_line("/proc/sys/vm/max_map_count");
  const long long count = atoll(maps.c_str());
  if (count >= 65530) {
    add("max_map_count", State::ok,
        maps + ": enough for about " + std::to_string(count / 2) + " scattered blocks on devices");
  } else {
    add("max_map_count", State::degraded, maps.empty() ? "cannot be read" : maps,
        "sysctl vm.max_map_count=1048576: each scattered block of a device costs up to two mappings");
  }
}

void Doctor::memory() {
  const uint64_t usable = vmem::api::usable_memory(options_.root);
  const std::string found = human_bytes(usable) + " usable; host_budget would be " + human_bytes(usable / 2);
  if (usable >= uint64_t{256} << 20) {
    add("memory", State::ok, found);
  } else {
    add("memory", State::degraded, found, "raise the memory limit of the control group, or set host_budget");
  }
}

void Doctor::ssd() {
  constexpr long kTmpfs = 0x01021994;
  const std::string all = ssd_path(options_.path), one = all.substr(0, all.find(':'));
  struct stat s {};
  if (stat(one.c_str(), &s) != 0) {
    add("SSD", State::missing, one + ": " + strerrordesc_np(errno),
        "set ssd_path (VMEM_SSD_PATH) to a folder on an SSD", true);
    return;
  }
  if (access(one.c_str(), R_OK | W_OK) != 0) {
    add("SSD", State::missing, one + " may not be written", "set ssd_path (VMEM_SSD_PATH) to a folder on an SSD", true);
    return;
  }
  struct statfs fs {};
  statfs(one.c_str(), &fs);
  struct statvfs room {};
  statvfs(one.c_str(), &room);
  const std::string space =
      S_ISDIR(s.st_mode) ? ", " + human_bytes(uint64_t{room.f_bavail} * room.f_frsize) + " free" : "";
  if (fs.f_type == kTmpfs) {
    add("SSD", State::degraded, one + " is memory (tmpfs): what leaves host memory goes to host memory",
        "set ssd_path (VMEM_SSD_PATH) to a folder on an SSD");
    return;
  }
  if (S_ISDIR(s.st_mode)) {
    vmem::publish::Fd direct(open(one.c_str(), O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600));
    if (!direct && errno == EINVAL) {
      add("SSD", State::degraded, one + space + ", no O_DIRECT: the page cache holds second copies outside the budget",
          "use another file system (ext4, XFS)");
      return;
    }
  }
  add("SSD", State::ok, one + space);
}

// Reports the backend that auto chooses here, and whether the others are available.
void Doctor::device_tier() {
  std::unique_ptr<vmem::device::Devices> devices;
  std::string why, taken;
  Status s = vmem::device::make_devices(vmem::device::kAutomatic, vmem::device::kUnit, &devices, &why);
  if (s.ok() && devices != nullptr) {
    taken = devices->name();
    std::string found = taken + ": ";
    for (int d = 0; d < devices->count(); ++d)
      found += (d == 0 ? "" : ", ") + devices->info(d).name + " " + human_bytes(devices->info(d).total_bytes);
    add("device tier", State::ok, printable(found));
  } else {
    add("device tier", State::degraded, "off: " + (s.ok() ? why : std::string(s.text())),
        "host memory and SSD work without it; the finding says what is needed");
  }
  for (const vmem::device::Backend* backend : vmem::device::backends()) {
    if (!backend->automatic || taken == backend->name) continue;
    devices.reset();  // only one may exist at a time
    s = vmem::device::make_devices(backend->name, vmem::device::kUnit, &devices, &why);
    if (s.ok()) {
      add(backend->name, State::ok, "available, but auto does not take it (docs/device-tier.md)");
    } else {
      add(backend->name, State::degraded, printable(s.text()), "nothing, while another device tier will do");
    }
  }
}

void Doctor::driver() {
  const std::string version = first_line("/proc/driver/nvidia/version");
  const vmem::device::Presence presence = vmem::device::gpu_presence(options_.root);
  if (presence == vmem::device::Presence::no_gpu) {
    add("GPU", State::ok,
        std::string("no NVIDIA GPU") + (version.empty() ? "" : ", though its driver is loaded") +
            ": host memory and SSD work alone");
    return;
  }
  if (presence == vmem::device::Presence::no_driver) {
    add("driver", State::missing, "an NVIDIA GPU, but no driver",
        "install the NVIDIA driver, and load nvidia and nvidia_uvm");
    return;
  }
  add("driver", State::ok, version.empty() ? "Windows'" : version);
  if (access(path("/dev/nvidia-uvm").c_str(), R_OK | W_OK) != 0)
    add("nvidia-uvm", State::missing, "/dev/nvidia-uvm cannot be opened",
        "modprobe nvidia_uvm; in a container, give it the device");
  if (options_.root.empty()) device_tier();
  const std::string disabled = first_line("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm");
  if (disabled == "N") {
    add("HMM", State::ok, "not switched off in the driver");
  } else {
    add("HMM", State::degraded,
        disabled.empty() ? "this driver has none" : "switched off (uvm_disable_hmm=" + disabled + ")",
        "nothing, while every GPU access is under a lease; else the open driver, and options nvidia_uvm "
        "uvm_disable_hmm=0");
  }
}

void Doctor::container() {
  std::string which;
  if (exists("/.dockerenv")) which = "docker";
  if (exists("/run/.containerenv")) which = "podman";
  const std::string group = first_line("/proc/1/cgroup");
  for (const char* word : {"docker", "kubepods", "lxc", "containerd"}) {
    if (which.empty() && group.find(word) != std::string::npos) which = word;
  }
  bool filtered = false;
  std::ifstream status(path("/proc/self/status"));
  for (std::string line; std::getline(status, line);) filtered |= line.starts_with("Seccomp:\t2");
  const std::string found = (which.empty() ? "none" : which) + (filtered ? ", system calls are filtered" : "");
  if ((filtered || !which.empty()) && refused_) {
    add("container", State::degraded, found,
        "run it with a profile from scripts/container-profile.sh (docs/install.md)");
  } else {
    add("container", State::ok, found);
  }
}

void Doctor::module() {
  if (!exists("/sys/class/misc/vmem")) {
    add("module", State::degraded, "vmem.ko is not loaded: userfaultfd does its work",
        "optional: modprobe vmem (docs/kernel-module.md)");
    return;
  }
  if (access(path("/dev/vmem").c_str(), R_OK | W_OK) != 0) {
    add("module", State::degraded, std::string("loaded, but /dev/vmem: ") + strerrordesc_np(errno),
        "add the user to the group of /dev/vmem");
    return;
  }
  add("module", State::ok, "loaded");
}

void Doctor::visible() {
  std::string tried;
  for (const std::string& folder : vmem::publish::folders(geteuid(), secure_getenv("XDG_RUNTIME_DIR"))) {
    vmem::publish::Fd fd;
    Status s = vmem::publish::open_folder(folder, geteuid(), true, &fd);
    if (s.ok()) {
      add("publication", State::ok, folder);
      return;
    }
    tried += (tried.empty() ? "" : "; ") + std::string(s.text());
  }
  add("publication", State::degraded, tried, "vmemctl sees no process of this user; make one of the folders possible");
}

const std::vector<Line>& Doctor::examine() {
  kernel();
  trap();
  io_uring();
  huge_pages();
  limits();
  memory();
  ssd();
  driver();
  container();
  module();
  visible();
  return lines_;
}

}  // namespace

int doctor(const Common& common, const DoctorOptions& options) {
  Doctor doctor(options);
  Json json;
  json.object().key("checks").array();
  bool works = true;
  for (const Line& line : doctor.examine()) {
    works &= !(line.essential && line.state == State::missing);
    const char* state = kStates[static_cast<size_t>(line.state)];
    json.object().field("name", line.name).field("state", state).field("found", line.found);
    json.field("advice", line.advice).end();
    if (common.json) continue;
    printf("%-9s %-14s %s\n", state, line.name, printable(line.found).c_str());
    if (!line.advice.empty()) printf("%-24s -> %s\n", "", printable(line.advice).c_str());
  }
  json.end().field("works", works).end();
  if (common.json) {
    printf("%s\n", json.text().c_str());
  } else {
    printf("%s\n", works ? "libvmem works here" : "libvmem does not work here: see what is missing");
  }
  return works ? kDone : kFailed;
}

}  // namespace vmemctl
