// The command line of an example or a tool: what is wrong with it is said in one line that begins with the program's
// name.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <optional>

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
