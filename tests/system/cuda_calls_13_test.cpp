// With the signatures of CUDA 13.
#define CUDART_VERSION 13000
#define CUDA_CALLS_SUITE CudaCalls13
#include "cuda_calls_suite.h"
