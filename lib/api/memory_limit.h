// Determines how much memory a process may reasonably use.
#pragma once

#include <cstdint>
#include <string>

namespace vmem::api {

// Returns the smaller of MemAvailable and the limits of the process's memory cgroups, in bytes,
// never 0. Every level of v1 and v2 counts; memory.high of v2 is taken as a limit, since it slows a
// process down severely. root: "" for the machine; tests give a folder with proc/ and sys/ in it.
// held: bytes of that memory that the process already has. process: "self" or a pid.
uint64_t usable_memory(const std::string& root, uint64_t held = 0, const std::string& process = "self");

// Returns a warning for a budget above that, of which `held` bytes are taken already; empty if it
// fits.
std::string warn_of_budget(uint64_t budget, uint64_t held, const std::string& root,
                           const std::string& process = "self");

}  // namespace vmem::api
