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

// For an option's transform(): a size as settings are given, from `least` to `most` bytes.
inline CLI::Validator size_from(uint64_t least, uint64_t most = uint64_t{1} << 50) {
  return {[least, most](std::string& text) -> std::string {
            uint64_t bytes = 0;
            if (const vmem::core::Status s = vmem::core::parse_bytes(text, &bytes); !s.ok())
              return std::string(s.text());
            if (bytes < least || bytes > most)
              return text + " is no size from " + vmem::core::human_bytes(least) + " to " +
                     vmem::core::human_bytes(most);
            text = std::to_string(bytes);
            return "";
          },
          "SIZE"};
}

// The same with the bounds of a setting.
inline CLI::Validator size_of(vmem::core::Option setting) {
  const vmem::core::OptionInfo& info = vmem::core::option_table()[static_cast<size_t>(setting)];
  return size_from(info.min, info.max);
}

// For an option's check(): CLI::Range takes NaN, whatever the bounds are.
inline CLI::Validator between(double least, double most) {
  const std::string words = vmem::core::strprintf("%g to %g", least, most);
  return {[=](std::string& text) -> std::string {
            double value = 0;
            const bool is = CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
            return is ? "" : text + " is no number from " + words;
          },
          words};
}

// An empty variable of a shell is no name of a file, and is not as if nothing was given either.
inline void refuse_empty(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& text : option->results()) {
      if (text.empty()) throw CLI::ValidationError(option->get_name(), "the text that was given is empty");
    }
  }
  for (const CLI::App* command : app.get_subcommands()) refuse_empty(*command);
}

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
    refuse_empty(app);
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
