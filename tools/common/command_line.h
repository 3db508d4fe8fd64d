// Parses the command line of an example or a tool and chooses its exit status. An error is one line
// on stderr that begins with the program's name.
#pragma once

#include <fcntl.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "common/input.h"
#include "core/options.h"
#include "core/status.h"
#include "core/text.h"

// For an option's transform(): parses a size as settings do and accepts `least` to `most` bytes.
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

// Like size_from(), with the bounds of a setting.
inline CLI::Validator size_of(vmem::core::Option setting) {
  const vmem::core::OptionInfo& info = vmem::core::option_table()[static_cast<size_t>(setting)];
  return size_from(info.min, info.max);
}

// For an option's check(): the values of a setting that has fixed ones.
inline CLI::Validator one_of(vmem::core::Option setting) {
  std::vector<std::string> names;
  std::istringstream all(vmem::core::option_table()[static_cast<size_t>(setting)].choices.names());
  for (std::string name; std::getline(all, name, '|');) names.push_back(name);
  return CLI::IsMember(names);
}

// For an option's check(): CLI::Range would accept NaN.
inline CLI::Validator between(double least, double most) {
  const std::string words = vmem::core::strprintf("%g to %g", least, most);
  return {[=](std::string& text) -> std::string {
            double value = 0;
            const bool is = CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
            return is ? "" : text + " is no number from " + words;
          },
          words};
}

// Refuses an option whose value is empty, such as an unset shell variable: it is neither a file
// name nor a missing option.
inline void refuse_empty(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& text : option->results()) {
      if (text.empty()) throw CLI::ValidationError(option->get_name(), "the text that was given is empty");
    }
  }
  for (const CLI::App* command : app.get_subcommands()) refuse_empty(*command);
}

// Opens /dev/null on closed standard streams. Otherwise the next file opened would get that
// descriptor, and printed text would go into the file.
inline void open_closed_streams() {
  for (int fd = 0; fd < 3; ++fd) {
    if (fcntl(fd, F_GETFD) < 0) static_cast<void>(open("/dev/null", O_RDONLY));  // a write is an error
  }
}

// Returns the exit status: `status`, or 1 if standard output could not be written (a full disk, a
// closed pipe).
inline int ended(const char* name, int status) {
  if (fflush(stdout) == 0 && ferror(stdout) == 0) return status;
  fprintf(stderr, "%s: standard output cannot be written\n", name);
  return status != 0 ? status : 1;
}

// Returns the exit status if the program must end now (0 after --help, 2 for a bad command line),
// else nullopt.
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

// Returns the status of `run`; 1 if a result is wrong or cannot be made or printed; 2 if the
// command line or an input is wrong.
template <typename Run>
int run_to_end(const char* name, Run run) {
  open_closed_streams();
  int status = 1;
  try {
    status = run();
  } catch (const std::bad_alloc&) {
    fprintf(stderr, "%s: out of memory\n", name);
  } catch (const std::exception& e) {
    fprintf(stderr, "%s: %s\n", name, vmem::core::printable(e.what()).c_str());
    if (dynamic_cast<const input::Refused*>(&e) != nullptr) status = 2;
  }
  return ended(name, status);
}

// Parses the command line and runs an example. Returns its exit status.
template <typename Run>
int run_program(CLI::App& app, const char* name, int argc, char** argv, Run run) {
  return run_to_end(name, [&] {
    const auto status = command_line(app, name, argc, argv);
    return status ? *status : run();
  });
}
