// The contract of every backend of device::Devices. Instantiated for the simulated one in
// device_contract_test.cpp and for CUDA in tests/gpu/device_cuda_test.cpp. Tests of suite
// DeviceLoss end with a lost device: on CUDA each needs its own process.
#pragma once

#include "device_contract_cpu.h"
#include "device_contract_failures.h"
#include "device_contract_memory.h"
#include "device_contract_order.h"
#include "device_contract_parts.h"
