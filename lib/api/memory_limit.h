// How much memory this process may reasonably use.
#pragma once

#include <cstdint>
#include <string>

namespace vmem::api {

// The smaller of MemAvailable and the limits of the process's memory cgroups (v1 or v2, every level). Bytes; never 0.
// root: "" for the machine; tests give a folder with proc/ and sys/ in it.
uint64_t usable_memory(const std::string& root);

// A line for who sets a budget above that, of which `held` is taken already; empty where it fits.
std::string warn_of_budget(uint64_t budget, uint64_t held, const std::string& root);

}  // namespace vmem::api
