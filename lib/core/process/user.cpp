#include "core/process/user.h"

#include <unistd.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace vmem::core {

namespace {

struct Range {
  uint32_t inside, outside, count;
};

// Returns false if there is no such file.
bool read_map(const std::string& process, std::vector<Range>* out) {
  FILE* const f = fopen(("/proc/" + process + "/uid_map").c_str(), "re");
  if (f == nullptr) return false;
  Range r{};
  while (fscanf(f, "%" SCNu32 " %" SCNu32 " %" SCNu32, &r.inside, &r.outside, &r.count) == 3) out->push_back(r);
  fclose(f);
  return true;
}

uid_t mapped(const std::vector<Range>& map, uid_t user, uid_t otherwise) {
  for (const Range& r : map) {
    if (user - r.inside < r.count) return user - r.inside + r.outside;
  }
  return otherwise;
}

uid_t overflow_uid() {
  uid_t user = 65534;
  if (FILE* const f = fopen("/proc/sys/kernel/overflowuid", "re"); f != nullptr) {
    if (fscanf(f, "%" SCNu32, &user) != 1) user = 65534;
    fclose(f);
  }
  return user;
}

}  // namespace

bool is_one_user(uid_t user) {
  if (user != overflow_uid()) return true;
  std::vector<Range> map;
  // A kernel without user namespaces has no such file. Without /proc the answer is unknown.
  if (!read_map("self", &map)) return access("/proc/self", F_OK) == 0;
  uint64_t all = 0;
  for (const Range& r : map) all += r.count;
  return all >= UINT32_MAX;
}

uid_t uid_outside(uid_t user) {
  std::vector<Range> map;
  read_map("self", &map);
  return mapped(map, user, user);
}

uid_t uid_of_namespace(pid_t pid, uid_t user) {
  std::vector<Range> map;
  read_map(std::to_string(pid), &map);
  return mapped(map, user, UINT32_MAX);
}

}  // namespace vmem::core
