// The promises of the device tier through the C API, with data four times the device budget.
// Instantiated for the simulated devices in device_tier_test.cpp and for CUDA in
// tests/gpu/pager_cuda_test.cpp. Tests of suite DeviceTierLoss end with a lost device: on CUDA each
// needs a process of its own.
#pragma once

#include "device_suite_copies.h"
#include "device_suite_hints.h"
#include "device_suite_leases.h"
#include "device_suite_work.h"
