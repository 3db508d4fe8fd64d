// The application's side of RamDevices, for the contract suite.
#pragma once

#include "unit/device_contract_fixture.h"

namespace vmem::device::testing {

// Makes the devices by their name, from the registry.
std::unique_ptr<Bench> make_ram_bench(std::string* skip);

}  // namespace vmem::device::testing
