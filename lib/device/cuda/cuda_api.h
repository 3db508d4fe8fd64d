// Thin layer over CUDA for the CUDA backend: the driver's calls, found at run time, and its errors
// as errno. Needs VMEM_HAVE_CUDA.
//
// - It does not link against CUDA, but opens libcuda when a device is first asked for. A program
//   without devices loads nothing of it, and needs none of its thread-local storage.
// - It does not use CUDA's runtime, whose last error, current device and state are the
//   application's.
// - It asks for every call as of CUDA 12.0, whatever headers the library is built with. The
//   signatures below are of that version, and a driver of CUDA 12 or later has all calls.
//   those of that version, and a driver of CUDA 12 or later has them all.
#pragma once

#include <cuda.h>
#include <nvtx3/nvToolsExt.h>

#include "core/status.h"

namespace vmem::device::cuda {

struct Driver {
  CUresult (*init)(unsigned);
  CUresult (*device_count)(int*);
  CUresult (*device_name)(char*, int, CUdevice);
  CUresult (*device_memory)(size_t*, CUdevice);
  CUresult (*device_pci)(char*, int, CUdevice);
  CUresult (*device_attribute)(int*, CUdevice_attribute, CUdevice);
  CUresult (*can_access_peer)(int*, CUdevice, CUdevice);
  CUresult (*peer_attribute)(int*, CUdevice_P2PAttribute, CUdevice, CUdevice);
  CUresult (*primary_retain)(CUcontext*, CUdevice);
  CUresult (*primary_release)(CUdevice);
  CUresult (*primary_state)(CUdevice, unsigned*, int*);
  CUresult (*ctx_push)(CUcontext);
  CUresult (*ctx_pop)(CUcontext*);
  CUresult (*ctx_current)(CUcontext*);
  CUresult (*ctx_device)(CUdevice*);
  CUresult (*ctx_id)(CUcontext, unsigned long long*);
  CUresult (*ctx_synchronize)();
  CUresult (*ctx_enable_peer)(CUcontext, unsigned);
  CUresult (*exchange_capture_mode)(CUstreamCaptureMode*);
  CUresult (*stream_ctx)(CUstream, CUcontext*);
  CUresult (*stream_capturing)(CUstream, CUstreamCaptureStatus*);
  CUresult (*stream_create)(CUstream*, unsigned, int);
  CUresult (*stream_destroy)(CUstream);
  CUresult (*stream_query)(CUstream);
  CUresult (*stream_synchronize)(CUstream);
  CUresult (*stream_wait_event)(CUstream, CUevent, unsigned);
  CUresult (*event_create)(CUevent*, unsigned);
  CUresult (*event_destroy)(CUevent);
  CUresult (*event_query)(CUevent);
  CUresult (*event_record)(CUevent, CUstream);
  CUresult (*event_synchronize)(CUevent);
  CUresult (*mem_info)(size_t* free, size_t* total);
  CUresult (*mem_alloc_managed)(CUdeviceptr*, size_t, unsigned);
  CUresult (*mem_free)(CUdeviceptr);
  CUresult (*mem_prefetch)(CUdeviceptr, size_t, CUdevice, CUstream);
  CUresult (*mem_advise)(CUdeviceptr, size_t, CUmem_advise, CUdevice);
  CUresult (*host_register)(void*, size_t, unsigned);
  CUresult (*host_unregister)(void*);
  CUresult (*host_device_pointer)(CUdeviceptr*, void*, unsigned);
  CUresult (*copy_in)(CUdeviceptr, const void*, size_t, CUstream);
  CUresult (*copy_out)(void*, CUdeviceptr, size_t, CUstream);
  CUresult (*copy_within)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
  CUresult (*copy_peer)(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream);
  // load_handles()
  CUresult (*address_reserve)(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long);
  CUresult (*address_free)(CUdeviceptr, size_t);
  CUresult (*mem_create)(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long);
  CUresult (*mem_release)(CUmemGenericAllocationHandle);
  CUresult (*mem_map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
  CUresult (*mem_unmap)(CUdeviceptr, size_t);
  CUresult (*mem_set_access)(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t);
  // null if the driver lacks them
  CUresult (*mem_export)(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long);
  CUresult (*range_handle)(void*, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long);
  CUresult (*stream_write32)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
  CUresult (*stream_write64)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
  CUresult (*stream_priorities)(int* least, int* greatest);
  CUresult (*module_load)(CUmodule*, const void*);
  CUresult (*module_function)(CUfunction*, CUmodule, const char*);
  CUresult (*module_unload)(CUmodule);
  CUresult (*function_attribute)(int*, CUfunction_attribute, CUfunction);
  CUresult (*launch_kernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                            void**, void**);
};
// Opens libcuda, which stays open. -ENODEV with the reason: no driver, too old a driver, no device.
core::Status load_driver(Driver* out, int* devices);
// Loads the further calls that physical handles need. -ENODEV: the driver lacks one.
core::Status load_handles(Driver* out);

// "an illegal memory access was encountered (CUDA error 700)"; allocates nothing.
struct Words {
  char text[160];
  const char* c_str() const { return text; }
};
Words error_words(CUresult error);
int errno_of(CUresult error);
// True if every later call in the context may fail the same way; a second call tells.
bool is_sticky(CUresult error);

// Makes a device's primary context current for a scope, and lets this thread's calls pass graph
// captures. Then restores the application's current context and capture mode. Creates no context.
class Enter {
 public:
  Enter(const Driver& driver, CUcontext context) : driver_(driver), pushed_(driver.ctx_push(context) == CUDA_SUCCESS) {
    if (pushed_) driver_.exchange_capture_mode(&mode_);
  }
  ~Enter() {
    if (!pushed_) return;
    driver_.exchange_capture_mode(&mode_);
    CUcontext ignored;
    driver_.ctx_pop(&ignored);
  }
  Enter(const Enter&) = delete;
  Enter& operator=(const Enter&) = delete;
  bool ok() const { return pushed_; }

 private:
  const Driver& driver_;
  const bool pushed_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// A range in the timeline of Nsight Systems; costs a test of one pointer unless that records.
class Timeline {
 public:
  explicit Timeline(const char* what);
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;
};

}  // namespace vmem::device::cuda
