/* SPDX-License-Identifier: Apache-2.0 */
/* The declarations of CUDA that <vmem/cuda.h> uses, with the signatures of CUDART_VERSION: this is built without a
   toolkit. */
#ifndef VMEM_PRELOAD_CUDA_TYPES_H
#define VMEM_PRELOAD_CUDA_TYPES_H

#include <stddef.h>
#include <stdint.h>

typedef enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidDevice = 101,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorUnknown = 999
} cudaError_t;

enum cudaMemoryAdvise {
  cudaMemAdviseSetReadMostly = 1,
  cudaMemAdviseUnsetReadMostly,
  cudaMemAdviseSetPreferredLocation,
  cudaMemAdviseUnsetPreferredLocation,
  cudaMemAdviseSetAccessedBy,
  cudaMemAdviseUnsetAccessedBy
};

enum cudaMemLocationType {
  cudaMemLocationTypeInvalid,
  cudaMemLocationTypeDevice,
  cudaMemLocationTypeHost,
  cudaMemLocationTypeHostNuma,
  cudaMemLocationTypeHostNumaCurrent
};

struct cudaMemLocation {
  enum cudaMemLocationType type;
  int id;
};

typedef struct CUstream_st* cudaStream_t;
#define cudaCpuDeviceId (-1)

#if CUDART_VERSION >= 13000
cudaError_t cudaMemPrefetchAsync(const void* ptr, size_t size, struct cudaMemLocation location, unsigned int flags,
                                 cudaStream_t stream);
cudaError_t cudaMemAdvise(const void* ptr, size_t size, enum cudaMemoryAdvise advice, struct cudaMemLocation location);
#else
cudaError_t cudaMemPrefetchAsync(const void* ptr, size_t size, int device, cudaStream_t stream);
cudaError_t cudaMemAdvise(const void* ptr, size_t size, enum cudaMemoryAdvise advice, int device);
#endif

/* The calls of the process's copy of libvmem, wherever it is: preload.c. */
#define vmem_query vmem_preload_query
#define vmem_prefetch vmem_preload_prefetch
#define vmem_advise vmem_preload_advise
#include <vmem/cuda.h>

#endif
