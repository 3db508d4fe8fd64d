/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The calls in the signatures of CUDA 12 and CUDA 13. A struct cudaMemLocation, two ints, is passed on as the register
 * it arrives in. real: CUDA's own call, for ranges outside regions.
 */
#ifndef VMEM_PRELOAD_H
#define VMEM_PRELOAD_H

#include <stddef.h>
#include <stdint.h>

int vmem_preload_prefetch_12(const void* ptr, size_t size, int device, void* stream, void* real);
int vmem_preload_advise_12(const void* ptr, size_t size, int advice, int device, void* real);
int vmem_preload_prefetch_13(const void* ptr, size_t size, uint64_t location, unsigned flags, void* stream, void* real);
int vmem_preload_advise_13(const void* ptr, size_t size, int advice, uint64_t location, void* real);

#endif
