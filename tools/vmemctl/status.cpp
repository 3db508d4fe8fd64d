// vmemctl status
#include <unistd.h>

#include <cstdio>

#include "commands.h"
#include "processes.h"
#include "view.h"

namespace vmemctl {

namespace {

// A process that was named must exist; a look at all processes may find none.
Found see(const Common& common, int pid) {
  if (pid == 0) return look(common, 0);
  Found found;
  found.processes.push_back(find_process(common, pid));
  return found;
}

void write_forged(Json& json, const std::vector<Refused>& forged) {
  json.key("forged").array();
  for (const Refused& f : forged) json.object().field("file", f.file).field("user", f.user).field("why", f.why).end();
  json.end();
}

}  // namespace

int status(const Common& common, const StatusOptions& options) {
  std::vector<Process> before;
  if (options.seconds > 0) {
    const Clock::time_point start = Clock::now();
    before = see(common, options.pid).processes;
    if (!before.empty()) wait_since(start, options.seconds);
  }
  const Found found = see(common, options.pid);
  const std::vector<Process>& now = found.processes;
  Json json;
  json.object().key("processes").array();
  for (const Process& p : now) {
    const Process* earlier = same_process(before, p);
    const Rates r = earlier != nullptr ? rates(*earlier, p) : Rates();
    if (common.json) {
      write_process(json, p, r);
      continue;
    }
    for (const std::string& line : view(p, r, {0, vmem::publish::kMaxRegions, 0, false, ""}))
      printf("%s\n", line.c_str());
    printf("\n");
  }
  json.end();
  write_forged(json, found.forged);
  json.key("problems").array();
  for (const std::string& problem : found.problems) json.value(problem);
  json.end().end();
  if (common.json) {
    printf("%s\n", json.text().c_str());
    return kDone;
  }
  for (const std::string& line : words_of(found.forged)) printf("%s\n", printable(line).c_str());
  for (const std::string& problem : found.problems) fprintf(stderr, "vmemctl: %s\n", printable(problem).c_str());
  if (now.empty()) printf("no process %s uses libvmem\n", geteuid() == 0 ? "on this machine" : "of this user");
  return kDone;
}

}  // namespace vmemctl
