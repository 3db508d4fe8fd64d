/* SPDX-License-Identifier: Apache-2.0 */
#define CUDART_VERSION 12000
#include "cuda_types.h"
#include "preload.h"

int vmem_preload_prefetch_12(const void* ptr, size_t size, int device, void* stream, void* real) {
  if (!vmem_cuda_is_region(ptr)) return ((int (*)(const void*, size_t, int, void*))real)(ptr, size, device, stream);
  return vmem_cuda_error(vmem_prefetch(ptr, size, vmem_cuda_location(device), stream));
}

int vmem_preload_advise_12(const void* ptr, size_t size, int advice, int device, void* real) {
  if (!vmem_cuda_is_region(ptr)) return ((int (*)(const void*, size_t, int, int))real)(ptr, size, advice, device);
  return vmem_cuda_error(
      vmem_advise(ptr, size, vmem_cuda_advice((enum cudaMemoryAdvise)advice), vmem_cuda_location(device)));
}
