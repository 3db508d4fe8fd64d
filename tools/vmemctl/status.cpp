// vmemctl status
#include <unistd.h>

#include <cstdio>

#include "commands.h"
#include "view.h"

namespace vmemctl {

namespace {

// One process that was asked for must be there; all of them may be none.
std::vector<Process> look(const Common& common, int pid, std::vector<std::string>* problems) {
  if (pid != 0) return {find_process(common, pid)};
  return find_processes(common, true, 0, problems);
}

}  // namespace

int status(const Common& common, const StatusOptions& options) {
  std::vector<std::string> problems;
  std::vector<Process> before;
  if (options.seconds > 0) {
    before = look(common, options.pid, &problems);
    if (!before.empty()) usleep(static_cast<useconds_t>(options.seconds * 1e6));
    problems.clear();
  }
  const std::vector<Process> now = look(common, options.pid, &problems);
  Json json;
  json.object().key("processes").array();
  for (const Process& p : now) {
    const Process* earlier = same_process(before, p);
    const Rates r = earlier != nullptr ? rates(*earlier, p) : Rates();
    if (common.json) {
      write_process(json, p, r);
      continue;
    }
    for (const std::string& line : view(p, r, 0, vmem::publish::kMaxRegions)) printf("%s\n", line.c_str());
    printf("\n");
  }
  json.end().key("problems").array();
  for (const std::string& problem : problems) json.value(problem);
  json.end().end();
  if (common.json) {
    printf("%s\n", json.text().c_str());
    return kDone;
  }
  for (const std::string& problem : problems) fprintf(stderr, "vmemctl: %s\n", printable(problem).c_str());
  if (now.empty()) printf("no process %s uses libvmem\n", geteuid() == 0 ? "on this machine" : "of this user");
  return kDone;
}

}  // namespace vmemctl
