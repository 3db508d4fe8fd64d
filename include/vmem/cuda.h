/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vmem_cudaMemPrefetchAsync and vmem_cudaMemAdvise, for programs whose pointers are of regions or
 * of CUDA's own managed memory. They take the arguments of cudaMemPrefetchAsync and cudaMemAdvise.
 * For a range of a region they call libvmem (vmem_prefetch, vmem_advise), on any backend; otherwise
 * they call CUDA. If VMEM_CUDA_CALLS is defined before this header is included, CUDA's two names
 * mean these calls from there on. C99 or C++; needs CUDA's headers, 12.0 to 13.
 *
 * An error of libvmem becomes the nearest of CUDA's: cudaErrorInvalidValue, InvalidDevice,
 * MemoryAllocation, StreamCaptureUnsupported, else Unknown. vmem_last_error() has its message.
 * cudaGetLastError() does not return it.
 */
#ifndef VMEM_CUDA_H
#define VMEM_CUDA_H

#include <errno.h>
#ifndef CUDART_VERSION
#include <cuda_runtime_api.h>
#endif
#include <vmem/vmem.h>

/* Nonzero if the first byte is of a region of this process. */
static inline int vmem_cuda_is_region(const void *ptr)
{
	struct vmem_residency where;

	where.size = sizeof(where);
	return vmem_query(ptr, 1, &where) == 0;
}

static inline cudaError_t vmem_cuda_error(int result)
{
	switch (result) {
	case 0:
		return cudaSuccess;
	case -EINVAL:
		return cudaErrorInvalidValue;
	case -ENODEV:
		return cudaErrorInvalidDevice;
	case -ENOMEM:
		return cudaErrorMemoryAllocation;
	case -EBUSY:
		return cudaErrorStreamCaptureUnsupported;
	default:
		return cudaErrorUnknown;
	}
}

/* The pairs of CUDA's advice and of libvmem's have different orders. 0: unknown. */
static inline int vmem_cuda_advice(enum cudaMemoryAdvise advice)
{
	switch (advice) {
	case cudaMemAdviseSetReadMostly:
		return VMEM_ADVISE_SET_READ_MOSTLY;
	case cudaMemAdviseUnsetReadMostly:
		return VMEM_ADVISE_UNSET_READ_MOSTLY;
	case cudaMemAdviseSetPreferredLocation:
		return VMEM_ADVISE_SET_PREFERRED_LOCATION;
	case cudaMemAdviseUnsetPreferredLocation:
		return VMEM_ADVISE_UNSET_PREFERRED_LOCATION;
	case cudaMemAdviseSetAccessedBy:
		return VMEM_ADVISE_SET_ACCESSED_BY;
	case cudaMemAdviseUnsetAccessedBy:
		return VMEM_ADVISE_UNSET_ACCESSED_BY;
	default:
		return 0;
	}
}

/* In C++ CUDA's calls have a default for the stream. */
#ifdef __cplusplus
#define VMEM_CUDA_NO_STREAM = NULL
#else
#define VMEM_CUDA_NO_STREAM
#endif

#if CUDART_VERSION >= 13000

/* Every location in host memory is VMEM_HOST. Other types are no device. */
static inline int vmem_cuda_location(struct cudaMemLocation location)
{
	switch (location.type) {
	case cudaMemLocationTypeDevice:
		return location.id >= 0 ? location.id : VMEM_SSD - 1;
	case cudaMemLocationTypeHost:
	case cudaMemLocationTypeHostNuma:
	case cudaMemLocationTypeHostNumaCurrent:
		return VMEM_HOST;
	default:
		return VMEM_SSD - 1;
	}
}

static inline cudaError_t vmem_cudaMemPrefetchAsync(const void *ptr, size_t size, struct cudaMemLocation location,
						    unsigned int flags, cudaStream_t stream VMEM_CUDA_NO_STREAM)
{
	if (!vmem_cuda_is_region(ptr))
		return cudaMemPrefetchAsync(ptr, size, location, flags, stream);
	if (flags != 0)
		return cudaErrorInvalidValue;
	return vmem_cuda_error(vmem_prefetch(ptr, size, vmem_cuda_location(location), stream));
}

static inline cudaError_t vmem_cudaMemAdvise(const void *ptr, size_t size, enum cudaMemoryAdvise advice,
					     struct cudaMemLocation location)
{
	if (!vmem_cuda_is_region(ptr))
		return cudaMemAdvise(ptr, size, advice, location);
	return vmem_cuda_error(vmem_advise(ptr, size, vmem_cuda_advice(advice), vmem_cuda_location(location)));
}

#else

/* cudaCpuDeviceId is VMEM_HOST; other negative numbers are no device. */
static inline int vmem_cuda_location(int device)
{
	return device >= cudaCpuDeviceId ? device : VMEM_SSD - 1;
}

static inline cudaError_t vmem_cudaMemPrefetchAsync(const void *ptr, size_t size, int device,
						    cudaStream_t stream VMEM_CUDA_NO_STREAM)
{
	if (!vmem_cuda_is_region(ptr))
		return cudaMemPrefetchAsync(ptr, size, device, stream);
	return vmem_cuda_error(vmem_prefetch(ptr, size, vmem_cuda_location(device), stream));
}

static inline cudaError_t vmem_cudaMemAdvise(const void *ptr, size_t size, enum cudaMemoryAdvise advice, int device)
{
	if (!vmem_cuda_is_region(ptr))
		return cudaMemAdvise(ptr, size, advice, device);
	return vmem_cuda_error(vmem_advise(ptr, size, vmem_cuda_advice(advice), vmem_cuda_location(device)));
}

#endif

#ifdef VMEM_CUDA_CALLS
#undef cudaMemPrefetchAsync /* a macro of CUDA with default streams of threads */
#undef cudaMemAdvise
#define cudaMemPrefetchAsync vmem_cudaMemPrefetchAsync
#define cudaMemAdvise vmem_cudaMemAdvise
#endif

#endif
