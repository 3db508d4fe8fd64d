// Integers by size, also for programs that are compiled at run time (NVRTC) without the C library's
// headers.
#pragma once

#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
using uint32_t = unsigned;
using uint64_t = unsigned long;
using int32_t = int;
#else
#include <cstddef>
#include <cstdint>
#endif
