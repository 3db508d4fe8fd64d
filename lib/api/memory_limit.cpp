#include "api/memory_limit.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "core/status.h"

namespace vmem::api {

namespace {

constexpr uint64_t kUnknown = UINT64_MAX;

uint64_t read_number(const std::string& path) {
  std::ifstream in(path);
  std::string word;
  if (!(in >> word) || word == "max") return kUnknown;
  char* end = nullptr;
  const uint64_t value = strtoull(word.c_str(), &end, 10);
  return end == word.c_str() ? kUnknown : value;
}

// Returns the smallest limit of `group` and the groups above it.
uint64_t smallest_limit(const std::string& base, std::string group, const char* limit_file) {
  uint64_t room = kUnknown;
  for (;;) {
    const uint64_t limit = read_number(base + group + "/" + limit_file);
    // v1 reports "no limit" as a number near 2^63.
    if (limit < uint64_t{1} << 60) room = std::min(room, limit);
    if (group.empty() || group == "/") return room;
    group = group.substr(0, group.rfind('/'));
  }
}

// Returns kUnknown if neither the kernel nor a cgroup gives a limit.
uint64_t limit_of_memory(const std::string& root, uint64_t held, const std::string& process) {
  uint64_t usable = kUnknown;
  std::ifstream meminfo(root + "/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    if (line.rfind("MemAvailable:", 0) == 0) usable = strtoull(line.c_str() + 13, nullptr, 10) * 1024;
  }
  usable += std::min(held, UINT64_MAX - usable);  // a limit includes the memory held, MemAvailable does not
  std::ifstream cgroups(root + "/proc/" + process + "/cgroup");
  for (std::string line; std::getline(cgroups, line);) {
    // hierarchy-id:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") {
      for (const char* base : {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}) {
        for (const char* limit : {"memory.max", "memory.high"}) {
          usable = std::min(usable, smallest_limit(root + base, group, limit));
        }
      }
    } else if (controllers.find(",memory,") != std::string::npos) {
      usable = std::min(usable, smallest_limit(root + "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes"));
    }
  }
  return usable;
}

}  // namespace

uint64_t usable_memory(const std::string& root, uint64_t held, const std::string& process) {
  const uint64_t usable = limit_of_memory(root, held, process);
  return usable == kUnknown ? uint64_t{1} << 30 : std::max<uint64_t>(usable, uint64_t{16} << 20);
}

std::string warn_of_budget(uint64_t budget, uint64_t held, const std::string& root, const std::string& process) {
  const uint64_t usable = limit_of_memory(root, held, process);  // also a limit below any default
  if (budget <= usable) return "";
  return core::strprintf(
      "host_budget %s is above the memory that the process may use, %s (the smaller of MemAvailable and the limits of "
      "its cgroups): the system may swap, slow the process down to nearly nothing, or end it; lower host_budget",
      core::human_bytes(budget).c_str(), core::human_bytes(usable).c_str());
}

}  // namespace vmem::api
