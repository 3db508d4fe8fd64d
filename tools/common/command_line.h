// The command line of an example or a tool, and how it ends: what is wrong is said in one line that begins with the
// program's name.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <optional>

#include "common/input.h"
#include "core/text.h"

// The status to end with, if the program is not to go on: 0 after --help, 2 for a line that is not understood.
inline std::optional<int> command_line(CLI::App& app, const char* name, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return std::nullopt;
  } catch (const CLI::Success& e) {
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    fprintf(stderr, "%s: %s; %s --help lists the options\n", name, vmem::core::printable(e.what()).c_str(), name);
    return 2;
  }
}

// An example from its command line to its status: what `run` returns; 1 where a result is wrong or cannot be made, 2
// where the command line or an input is not right.
template <typename Run>
int run_program(CLI::App& app, const char* name, int argc, char** argv, Run run) {
  if (const auto status = command_line(app, name, argc, argv)) return *status;
  try {
    return run();
  } catch (const input::Refused& e) {
    fprintf(stderr, "%s: %s\n", name, vmem::core::printable(e.what()).c_str());
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "%s: %s\n", name, vmem::core::printable(e.what()).c_str());
    return 1;
  }
}
