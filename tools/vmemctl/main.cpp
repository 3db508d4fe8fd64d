// vmemctl shows and controls what libvmem does on this machine. Manual: docs/man/vmemctl.1.
#include <CLI/CLI.hpp>
#include <climits>
#include <cstdio>
#include <exception>
#include <functional>

#include "commands.h"
#include "common/command_line.h"
#include "vmem/vmem.h"

namespace {

using namespace vmemctl;

struct Options {
  Common common;
  StatusOptions status;
  TopOptions top;
  TuneOptions tune;
  BenchOptions bench;
  DoctorOptions doctor;
  ExportOptions serve;
};

// Describes the command line; sets `chosen` to the requested command.
void describe(CLI::App& app, Options& o, std::function<int()>& chosen) {
  app.description("Shows and controls what libvmem does on this machine.");
  app.set_version_flag("--version",
                       "vmemctl " + std::to_string(VMEM_VERSION_MAJOR) + "." + std::to_string(VMEM_VERSION_MINOR));
  app.add_flag("--json", o.common.json, "JSON on standard output, failures included");
  app.add_option("--folder", o.common.folder, "Look for processes in this folder only");
  app.require_subcommand(1);
  app.fallthrough();
  const CLI::Range pids(1, INT_MAX);

  CLI::App* status = app.add_subcommand("status", "Processes that use libvmem: regions, bytes per tier, rates");
  status->add_option("--pid", o.status.pid, "This process only")->check(pids);
  status->add_option("--seconds", o.status.seconds, "Measure rates for so long; 0: no rates")->check(between(0, 3600));
  status->callback([&] { chosen = [&] { return vmemctl::status(o.common, o.status); }; });

  CLI::App* top = app.add_subcommand("top", "The same, live");
  top->add_option("--pid", o.top.pid, "This process only")->check(pids);
  top->add_option("--interval", o.top.interval, "Seconds between two frames")->check(between(0.1, 3600));
  top->add_flag("--once", o.top.once, "One frame, as plain text, then end");
  top->add_option("--columns", o.top.columns, "Width of that frame")->check(CLI::Range(40, 1000));
  top->add_option("--sort", o.top.sort, "Regions by size, device, host, ssd, leased or name")
      ->check(CLI::IsMember({"size", "device", "host", "ssd", "leased", "name"}));
  top->add_option("--filter", o.top.filter,
                  "Only processes with this in their command, or regions with it in their name");
  top->callback([&] { chosen = [&] { return vmemctl::top(o.common, o.top); }; });

  CLI::App* tune = app.add_subcommand("tune", "Change live settings of a process, or tunables of the module");
  tune->add_option("settings", o.tune.assignments, "NAME=VALUE, or NAME to see it; none: all of them");
  tune->add_option("--pid", o.tune.pid, "The process")->check(pids);
  tune->add_flag("--machine", o.tune.machine, "The module's tunables (docs/kernel-module.md)");
  tune->add_option("--sysfs", o.tune.sysfs, "Folder of the module's tunables");
  tune->callback([&] { chosen = [&] { return vmemctl::tune(o.common, o.tune); }; });

  CLI::App* bench = app.add_subcommand("bench", "Find depth and block size for this SSD and this GPU");
  bench->add_option("--path", o.bench.path, "A folder on the SSD; default: as setting ssd_path");
  bench->add_option("-o,--output", o.bench.output, "Write the settings here, to be sourced by a shell");
  bench->add_flag("--force", o.bench.force, "Write over the file");
  bench->add_option("--size", o.bench.size, "Of the test file");
  bench->add_option("--seconds", o.bench.seconds, "Of each measurement")->check(between(0.01, 60));
  bench->add_option("--spread", o.bench.spread, "Per cent that figures may be off; beyond it nothing is chosen")
      ->check(between(0, 1e6));
  bench->add_option("--device", o.bench.device, "As setting device")->check(one_of(vmem::core::Option::device));
  bench->callback([&] { chosen = [&] { return vmemctl::bench(o.common, o.bench); }; });

  CLI::App* doctor =
      app.add_subcommand("doctor", "Report what this machine and your rights offer libvmem, and what to do");
  doctor->add_option("--path", o.doctor.path, "Where the SSD tier would be; default: as setting ssd_path");
  doctor->add_option("--root", o.doctor.root, "Read /proc, /sys and /dev under this folder");
  doctor->callback([&] { chosen = [&] { return vmemctl::doctor(o.common, o.doctor); }; });

  CLI::App* serve = app.add_subcommand("export", "Serve metrics to Prometheus");
  serve->add_option("--listen", o.serve.listen, "ADDRESS:PORT; every client that reaches it may read");
  serve->add_option("--allow-host", o.serve.hosts, "A host name for requests, beside localhost and this machine's");
  serve->add_flag("--once", o.serve.once, "Metrics to standard output, then end");
  serve->add_option("--sysfs", o.serve.sysfs, "Folder of the module's counters");
  serve->callback([&] { chosen = [&] { return vmemctl::serve_metrics(o.common, o.serve); }; });
}

int fail(const Common& common, Exit exit, const std::string& words) {
  fflush(stdout);
  fprintf(stderr, "vmemctl: %s\n", printable(words).c_str());
  if (common.json) {
    Json json;
    json.object().key("error").object().field("words", words).field("exit", static_cast<int>(exit)).end().end();
    printf("%s\n", json.text().c_str());
  }
  return exit;
}

int run(int argc, char** argv) {
  CLI::App app;
  Options options;
  std::function<int()> chosen;
  try {
    describe(app, options, chosen);
    app.parse(argc, argv);
    refuse_empty(app);
    return chosen();
  } catch (const CLI::Success& e) {
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    std::string words = e.what();
    if (app.get_subcommands().empty()) {
      for (const std::string& word : app.remaining()) {
        if (word[0] != '-') words = "there is no command \"" + word + "\"";
      }
    }
    return fail(options.common, kUsage, words + "; vmemctl --help lists commands and options");
  } catch (const Failure& f) {
    return fail(options.common, f.exit, f.words);
  } catch (const std::exception& e) {
    return fail(options.common, kFailed, e.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    open_closed_streams();
    return ended("vmemctl", run(argc, argv));
  } catch (...) {
    fputs("vmemctl: no memory left to say what is wrong\n", stderr);
    return kFailed;
  }
}
