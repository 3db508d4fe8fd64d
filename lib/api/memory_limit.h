// How much memory a process may reasonably use.
#pragma once

#include <cstdint>
#include <string>

namespace vmem::api {

// The smaller of MemAvailable and the limits of the process's memory cgroups (v1; v2, where memory.high slows a process
// down so much that it is one; every level). Bytes; never 0.
// root: "" for the machine; tests give a folder with proc/ and sys/ in it. held: what the process has of it already.
// process: "self" or a pid.
uint64_t usable_memory(const std::string& root, uint64_t held = 0, const std::string& process = "self");

// A line for who sets a budget above that, of which `held` is taken already; empty where it fits.
std::string warn_of_budget(uint64_t budget, uint64_t held, const std::string& root,
                           const std::string& process = "self");

}  // namespace vmem::api
