// With the signatures of CUDA 12.
#define CUDART_VERSION 12040
#define CUDA_CALLS_SUITE CudaCalls12
#include "cuda_calls_suite.h"
