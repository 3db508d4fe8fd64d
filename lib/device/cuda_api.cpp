#include "device/cuda_api.h"

#include <errno.h>

#include <cstdio>

#include "device/device.h"
#include "device/presence.h"

namespace vmem::device::cuda {

namespace {

template <class F>
bool entry(const char* name, F* out) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t e = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t e = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  *out = reinterpret_cast<F>(found);
  return e == cudaSuccess && result == cudaDriverEntryPointSuccess && found != nullptr;
}

#if CUDART_VERSION >= 13000
cudaMemLocation place(int location) {
  cudaMemLocation out = {};
  out.type = location == kHost ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice;
  out.id = location == kHost ? 0 : location;
  return out;
}
#else
int place(int location) {
  return location == kHost ? cudaCpuDeviceId : location;
}
#endif

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("libvmem");
  return handle;
}

}  // namespace

Status load_driver(Driver* out, int* devices) {
  *devices = 0;
  const cudaError_t e = cudaGetDeviceCount(devices);
  // CUDA calls a machine without a GPU one whose driver is too old.
  if (e == cudaErrorInsufficientDriver || e == cudaErrorNoDevice) {
    const Words words = error_words(e);
    const Presence presence = gpu_presence("");
    if (presence == Presence::no_gpu) return error(ENODEV, "no NVIDIA GPU was found in this machine");
    if (presence == Presence::no_driver)
      return error(ENODEV, "an NVIDIA GPU, but no driver: install it, and load nvidia and nvidia_uvm");
    if (e == cudaErrorInsufficientDriver)
      return error(ENODEV, "the NVIDIA driver is older than CUDA %d.%d needs: %s", CUDART_VERSION / 1000,
                   CUDART_VERSION / 10 % 100, words.c_str());
  }
  if (e != cudaSuccess) return error(ENODEV, "CUDA does not start: %s", error_words(e).c_str());
  if (*devices == 0) return error(ENODEV, "CUDA shows this process no device");
  if (!entry("cuDevicePrimaryCtxRetain", &out->primary_retain) ||
      !entry("cuDevicePrimaryCtxRelease", &out->primary_release) ||
      !entry("cuDevicePrimaryCtxGetState", &out->primary_state) || !entry("cuCtxPushCurrent", &out->ctx_push) ||
      !entry("cuCtxPopCurrent", &out->ctx_pop) || !entry("cuCtxGetCurrent", &out->ctx_current) ||
      !entry("cuCtxGetDevice", &out->ctx_device) || !entry("cuCtxGetId", &out->ctx_id) ||
      !entry("cuStreamGetCtx", &out->stream_ctx) || !entry("cuStreamIsCapturing", &out->stream_capturing) ||
      !entry("cuEventQuery", &out->event_query) || !entry("cuStreamQuery", &out->stream_query))
    return error(ENODEV, "the NVIDIA driver lacks calls of CUDA 12; update it");
  return {};
}

Status load_handles(Driver* out) {
  if (!entry("cuDeviceGetAttribute", &out->device_attribute) || !entry("cuMemAddressReserve", &out->address_reserve) ||
      !entry("cuMemAddressFree", &out->address_free) || !entry("cuMemCreate", &out->mem_create) ||
      !entry("cuMemRelease", &out->mem_release) || !entry("cuMemMap", &out->mem_map) ||
      !entry("cuMemUnmap", &out->mem_unmap) || !entry("cuMemSetAccess", &out->mem_set_access) ||
      !entry("cuStreamWriteValue32", &out->stream_write32) || !entry("cuStreamWriteValue64", &out->stream_write64) ||
      !entry("cuMemHostRegister", &out->host_register) || !entry("cuMemHostUnregister", &out->host_unregister) ||
      !entry("cuCtxGetStreamPriorityRange", &out->stream_priorities) ||
      !entry("cuStreamCreateWithPriority", &out->stream_create) || !entry("cuStreamDestroy", &out->stream_destroy) ||
      !entry("cuEventRecord", &out->event_record) || !entry("cuStreamWaitEvent", &out->stream_wait_event) ||
      !entry("cuModuleLoadData", &out->module_load) || !entry("cuModuleGetFunction", &out->module_function) ||
      !entry("cuModuleUnload", &out->module_unload) || !entry("cuFuncGetAttribute", &out->function_attribute) ||
      !entry("cuLaunchKernel", &out->launch_kernel))
    return error(ENODEV, "the NVIDIA driver lacks the calls of physical handles; update it");
  if (!entry("cuMemExportToShareableHandle", &out->mem_export)) out->mem_export = nullptr;
  if (!entry("cuMemGetHandleForAddressRange", &out->range_handle)) out->range_handle = nullptr;
  return {};
}

bool did(cudaError_t e) {
  if (e != cudaSuccess) cudaGetLastError();
  return e == cudaSuccess;
}

Words error_words(cudaError_t e) {
  cudaGetLastError();
  Words words;
  snprintf(words.text, sizeof words.text, "%s (CUDA error %d)", cudaGetErrorString(e), static_cast<int>(e));
  return words;
}

bool is_sticky(cudaError_t e) {
  switch (static_cast<int>(e)) {
    case 4:    // the runtime is unloading: the process exits
    case 201:  // invalid context
    case 214:  // uncorrectable ECC error
    case 219:  // graphics context lost
    case 220:  // uncorrectable NVLink error
    case 226:  // contained error
    case 700:  // illegal address
    case 702:  // launch timeout
    case 709:  // context destroyed
    case 710:  // assert
    case 714:  // hardware stack error
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // invalid address space
    case 718:  // invalid program counter
    case 719:  // launch failure
    case 721:  // tensor memory leak
    case 805:  // no connection to the MPS server
    case 806:  // .. which answers nothing
    case 807:  // .. or is not ready
    case 810:  // .. or has ended this client
    case 999:  // unknown
      return true;
    default:
      return false;
  }
}

int errno_of(cudaError_t e) {
  if (e >= cudaErrorStreamCaptureUnsupported && e <= cudaErrorStreamCaptureWrongThread) return EBUSY;
  switch (e) {
    case cudaErrorMemoryAllocation:
      return ENOMEM;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorInvalidDevicePointer:
      return EINVAL;
    case cudaErrorInvalidDevice:
    case cudaErrorNoDevice:
    case cudaErrorDevicesUnavailable:
      return ENODEV;
    case cudaErrorHostMemoryAlreadyRegistered:
      return EEXIST;
    case cudaErrorNotSupported:
      return EOPNOTSUPP;
    default:
      return EIO;
  }
}

cudaError_t prefetch(void* address, size_t size, int location, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  return cudaMemPrefetchAsync(address, size, place(location), 0, stream);
#else
  return cudaMemPrefetchAsync(address, size, place(location), stream);
#endif
}

cudaError_t advise(void* address, size_t size, cudaMemoryAdvise advice, int location) {
  return cudaMemAdvise(address, size, advice, place(location));
}

Timeline::Timeline(const char* what) {
  nvtxEventAttributes_t attributes = {};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = what;
  nvtxDomainRangePushEx(domain(), &attributes);
}

Timeline::~Timeline() {
  nvtxDomainRangePop(domain());
}

}  // namespace vmem::device::cuda
