// vmemctl export: metrics for Prometheus.
#include <cstdio>

#include "commands.h"
#include "http.h"
#include "metrics.h"

namespace vmemctl {

int serve_metrics(const Common& common, const ExportOptions& options) {
  if (options.once) {
    const Found now = look(common, 0);
    if (common.json) {
      Json json;
      json.object().key("processes").array();
      for (const Process& p : now.processes) write_process(json, p, Rates());
      printf("%s\n", json.end().end().text().c_str());
    } else {
      fputs(metrics(now, options.sysfs).c_str(), stdout);
    }
    return kDone;
  }
  HttpServer server(options.listen, options.hosts);
  if (common.json) {
    Json json;
    printf("%s\n", json.object().field("listening", server.address()).end().text().c_str());
  } else {
    printf("listening on http://%s/metrics\n", server.address().c_str());
  }
  fflush(stdout);
  Latest latest;
  server.run([&](const std::string& path) -> Answer {
    if (path == "/metrics") {
      // Requests in quick succession get the same text: each look asks every process.
      return {200, "text/plain; version=0.0.4; charset=utf-8",
              latest.get(Clock::now(), [&] { return metrics(look(common, 0), options.sysfs); })};
    }
    if (path == "/") return plain(200, "vmemctl: metrics are at /metrics\n");
    return plain(404, "metrics are at /metrics\n");
  });
  return kDone;
}

}  // namespace vmemctl
