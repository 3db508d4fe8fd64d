// The thin layer over CUDA that cuda_device.cpp is written against: driver calls found at run time, the signatures that
// differ between CUDA 12 and 13, errors as errno. Included by the CUDA body only, and only with VMEM_HAVE_CUDA.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>

#include "core/status.h"

namespace vmem::device::cuda {

// libcuda is opened by cudart, when the first call needs it; nothing here links against it.
struct Driver {
  CUresult (*primary_retain)(CUcontext*, CUdevice);
  CUresult (*primary_release)(CUdevice);
  CUresult (*primary_state)(CUdevice, unsigned*, int*);
  CUresult (*ctx_push)(CUcontext);
  CUresult (*ctx_pop)(CUcontext*);
  CUresult (*ctx_current)(CUcontext*);
  CUresult (*ctx_device)(CUdevice*);
  CUresult (*ctx_id)(CUcontext, unsigned long long*);
  CUresult (*stream_ctx)(CUstream, CUcontext*);
  CUresult (*stream_capturing)(CUstream, CUstreamCaptureStatus*);
  CUresult (*event_query)(CUevent);
  CUresult (*stream_query)(CUstream);
  // load_handles()
  CUresult (*device_attribute)(int*, CUdevice_attribute, CUdevice);
  CUresult (*address_reserve)(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long);
  CUresult (*address_free)(CUdeviceptr, size_t);
  CUresult (*mem_create)(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long);
  CUresult (*mem_release)(CUmemGenericAllocationHandle);
  CUresult (*mem_map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
  CUresult (*mem_unmap)(CUdeviceptr, size_t);
  CUresult (*mem_set_access)(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t);
  // null: the driver has none
  CUresult (*mem_export)(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long);
  CUresult (*range_handle)(void*, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long);
  CUresult (*stream_write32)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
  CUresult (*stream_write64)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
  CUresult (*host_register)(void*, size_t, unsigned);
  CUresult (*host_unregister)(void*);
  CUresult (*stream_priorities)(int* least, int* greatest);
  CUresult (*stream_create)(CUstream*, unsigned, int);
  CUresult (*stream_destroy)(CUstream);
  CUresult (*event_record)(CUevent, CUstream);
  CUresult (*stream_wait_event)(CUstream, CUevent, unsigned);
  CUresult (*module_load)(CUmodule*, const void*);
  CUresult (*module_function)(CUfunction*, CUmodule, const char*);
  CUresult (*module_unload)(CUmodule);
  CUresult (*function_attribute)(int*, CUfunction_attribute, CUfunction);
  CUresult (*launch_kernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                            void**, void**);
};
// -ENODEV with the reason: no driver, too old a driver, no device.
core::Status load_driver(Driver* out, int* devices);
// What physical handles need besides. -ENODEV: the driver lacks it.
core::Status load_handles(Driver* out);

// Did the call succeed? If not, forgets it as this thread's last error: for calls that may fail.
bool did(cudaError_t error);
// "an illegal memory access was encountered (CUDA error 700)"; needs no memory.
struct Words {
  char text[160];
  const char* c_str() const { return text; }
};
// Also forgets it as this thread's last error.
Words error_words(cudaError_t error);
int errno_of(cudaError_t error);
// May mean that every later call in the context fails the same way: it does if a second call says so.
bool is_sticky(cudaError_t error);

// location: a device or kHost.
cudaError_t prefetch(void* address, size_t size, int location, cudaStream_t stream);
cudaError_t advise(void* address, size_t size, cudaMemoryAdvise advice, int location);

// Makes a device's primary context current for a scope, and lets this thread's calls pass captures of graphs. The
// application's current context and capture mode come back afterwards; no context is made that was not there.
class Enter {
 public:
  Enter(const Driver& driver, CUcontext context) : driver_(driver), pushed_(driver.ctx_push(context) == CUDA_SUCCESS) {
    if (pushed_) cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~Enter() {
    if (!pushed_) return;
    cudaThreadExchangeStreamCaptureMode(&mode_);
    CUcontext ignored;
    driver_.ctx_pop(&ignored);
  }
  Enter(const Enter&) = delete;
  Enter& operator=(const Enter&) = delete;
  bool ok() const { return pushed_; }

 private:
  const Driver& driver_;
  const bool pushed_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A range in the timeline of Nsight Systems; costs a test of one pointer when nobody records.
class Timeline {
 public:
  explicit Timeline(const char* what);
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;
};

}  // namespace vmem::device::cuda
