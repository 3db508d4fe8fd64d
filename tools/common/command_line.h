// The command line of an example or a tool, and how it ends: what is wrong is said in one line that begins with the
// program's name.
#pragma once

#include <fcntl.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>

#include "common/input.h"
#include "core/options.h"
#include "core/status.h"
#include "core/text.h"

// Where a standard stream was closed, the next file that is opened has its number, and gets what is printed.
inline void open_closed_streams() {
  for (int fd = 0; fd < 3; ++fd) {
    if (fcntl(fd, F_GETFD) < 0) static_cast<void>(open("/dev/null", O_RDONLY));  // a write is an error
  }
}

// The status to end with: a full disk or a closed output does not look like success.
inline int ended(const char* name, int status) {
  if (fflush(stdout) == 0 && ferror(stdout) == 0) return status;
  fprintf(stderr, "%s: standard output cannot be written\n", name);
  return status != 0 ? status : 1;
}

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

// What `run` returns; 1 where a result is wrong or cannot be made or printed, 2 where the command line or an input is
// not right.
template <typename Run>
int run_to_end(const char* name, Run run) {
  open_closed_streams();
  int status = 1;
  try {
    status = run();
  } catch (const std::exception& e) {
    fprintf(stderr, "%s: %s\n", name, vmem::core::printable(e.what()).c_str());
    if (dynamic_cast<const input::Refused*>(&e) != nullptr) status = 2;
  }
  return ended(name, status);
}

// An example from its command line to its status.
template <typename Run>
int run_program(CLI::App& app, const char* name, int argc, char** argv, Run run) {
  return run_to_end(name, [&] {
    const auto status = command_line(app, name, argc, argv);
    return status ? *status : run();
  });
}
