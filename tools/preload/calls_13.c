/* SPDX-License-Identifier: Apache-2.0 */
#define CUDART_VERSION 13000
#include <string.h>

#include "cuda_types.h"
#include "preload.h"

static struct cudaMemLocation unpack(uint64_t location) {
  struct cudaMemLocation out;

  memcpy(&out, &location, sizeof(out));
  return out;
}

int vmem_preload_prefetch_13(const void* ptr, size_t size, uint64_t location, unsigned flags, void* stream,
                             void* real) {
  if (!vmem_cuda_is_region(ptr))
    return ((int (*)(const void*, size_t, struct cudaMemLocation, unsigned, void*))real)(ptr, size, unpack(location),
                                                                                         flags, stream);
  if (flags != 0) return cudaErrorInvalidValue;
  return vmem_cuda_error(vmem_prefetch(ptr, size, vmem_cuda_location(unpack(location)), stream));
}

int vmem_preload_advise_13(const void* ptr, size_t size, int advice, uint64_t location, void* real) {
  if (!vmem_cuda_is_region(ptr))
    return ((int (*)(const void*, size_t, int, struct cudaMemLocation))real)(ptr, size, advice, unpack(location));
  return vmem_cuda_error(
      vmem_advise(ptr, size, vmem_cuda_advice((enum cudaMemoryAdvise)advice), vmem_cuda_location(unpack(location))));
}
