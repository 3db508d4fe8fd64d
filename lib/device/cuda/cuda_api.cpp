#include "device/cuda/cuda_api.h"

#include <dlfcn.h>
#include <errno.h>

#include <atomic>
#include <cstdio>

#include "device/device.h"
#include "device/presence.h"

namespace vmem::device::cuda {

namespace {

constexpr int kVersion = 12000;

std::atomic<CUresult (*)(CUresult, const char**)> error_string{nullptr};

// The calls of an open libcuda, by base name.
class Calls {
 public:
  explicit Calls(void* library) : get_(reinterpret_cast<Get*>(dlsym(library, "cuGetProcAddress_v2"))) {}
  explicit operator bool() const { return get_ != nullptr; }
  // Calls with a null stream work on the legacy default stream, however the application was
  // compiled.
  template <class F>
  bool get(const char* name, F* out) {
    void* found = nullptr;
    auto status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    const CUresult r = get_(name, &found, kVersion, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &status);
    *out = reinterpret_cast<F>(found);
    const bool has = r == CUDA_SUCCESS && status == CU_GET_PROC_ADDRESS_SUCCESS && found != nullptr;
    if (!has) *out = nullptr;
    if (!has && missing_ == nullptr) missing_ = name;
    return has;
  }
  // Name of the first call that was not found.
  const char* missing() const { return missing_; }

 private:
  using Get = CUresult(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
  Get* const get_;
  const char* missing_ = nullptr;
};

// Stays open for good: the driver has threads, and work at exit. Each call returns the same handle.
void* open_library() {
  return dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
}

Status no_library() {
  const char* const words = dlerror();
  switch (gpu_presence("")) {
    case Presence::no_gpu:
      return error(ENODEV, "no NVIDIA GPU was found in this machine");
    case Presence::no_driver:
      return error(ENODEV, "an NVIDIA GPU, but no driver: install it, and load nvidia and nvidia_uvm");
    case Presence::driver:
      break;
  }
  return error(ENODEV,
               "an NVIDIA GPU, but the driver's library cannot be opened: %s; install the user-space part of the "
               "driver (in a container, start it with the GPU)",
               words != nullptr ? words : "libcuda.so.1");
}

Status does_not_start(CUresult r) {
  // The driver reports a machine without a GPU by several errors.
  const Presence presence = r == CUDA_ERROR_NO_DEVICE ? gpu_presence("") : Presence::driver;
  if (presence == Presence::no_gpu) return error(ENODEV, "no NVIDIA GPU was found in this machine");
  if (presence == Presence::no_driver)
    return error(ENODEV, "an NVIDIA GPU, but no driver: install it, and load nvidia and nvidia_uvm");
  return error(ENODEV, "CUDA does not start: %s", error_words(r).c_str());
}

bool load_contexts(Calls& calls, Driver* out) {
  return calls.get("cuInit", &out->init) && calls.get("cuDeviceGetCount", &out->device_count) &&
         calls.get("cuDeviceGetName", &out->device_name) && calls.get("cuDeviceTotalMem", &out->device_memory) &&
         calls.get("cuDeviceGetPCIBusId", &out->device_pci) &&
         calls.get("cuDeviceGetAttribute", &out->device_attribute) &&
         calls.get("cuDeviceCanAccessPeer", &out->can_access_peer) &&
         calls.get("cuDeviceGetP2PAttribute", &out->peer_attribute) &&
         calls.get("cuDevicePrimaryCtxRetain", &out->primary_retain) &&
         calls.get("cuDevicePrimaryCtxRelease", &out->primary_release) &&
         calls.get("cuDevicePrimaryCtxGetState", &out->primary_state) &&
         calls.get("cuCtxPushCurrent", &out->ctx_push) && calls.get("cuCtxPopCurrent", &out->ctx_pop) &&
         calls.get("cuCtxGetCurrent", &out->ctx_current) && calls.get("cuCtxGetDevice", &out->ctx_device) &&
         calls.get("cuCtxGetId", &out->ctx_id) && calls.get("cuCtxSynchronize", &out->ctx_synchronize) &&
         calls.get("cuCtxEnablePeerAccess", &out->ctx_enable_peer) &&
         calls.get("cuThreadExchangeStreamCaptureMode", &out->exchange_capture_mode);
}

bool load_streams(Calls& calls, Driver* out) {
  return calls.get("cuStreamGetCtx", &out->stream_ctx) && calls.get("cuStreamIsCapturing", &out->stream_capturing) &&
         calls.get("cuStreamCreateWithPriority", &out->stream_create) &&
         calls.get("cuStreamDestroy", &out->stream_destroy) && calls.get("cuStreamQuery", &out->stream_query) &&
         calls.get("cuStreamSynchronize", &out->stream_synchronize) &&
         calls.get("cuStreamWaitEvent", &out->stream_wait_event) && calls.get("cuEventCreate", &out->event_create) &&
         calls.get("cuEventDestroy", &out->event_destroy) && calls.get("cuEventQuery", &out->event_query) &&
         calls.get("cuEventRecord", &out->event_record) && calls.get("cuEventSynchronize", &out->event_synchronize);
}

bool load_memory(Calls& calls, Driver* out) {
  return calls.get("cuMemGetInfo", &out->mem_info) && calls.get("cuMemAllocManaged", &out->mem_alloc_managed) &&
         calls.get("cuMemFree", &out->mem_free) && calls.get("cuMemPrefetchAsync", &out->mem_prefetch) &&
         calls.get("cuMemAdvise", &out->mem_advise) && calls.get("cuMemHostRegister", &out->host_register) &&
         calls.get("cuMemHostUnregister", &out->host_unregister) &&
         calls.get("cuMemHostGetDevicePointer", &out->host_device_pointer) &&
         calls.get("cuMemcpyHtoDAsync", &out->copy_in) && calls.get("cuMemcpyDtoHAsync", &out->copy_out) &&
         calls.get("cuMemcpyDtoDAsync", &out->copy_within) && calls.get("cuMemcpyPeerAsync", &out->copy_peer);
}

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("libvmem");
  return handle;
}

}  // namespace

Status load_driver(Driver* out, int* devices) {
  *devices = 0;
  void* const library = open_library();
  if (library == nullptr) return no_library();
  Calls calls(library);
  if (!calls)
    return error(ENODEV,
                 "the NVIDIA driver is older than CUDA 12 (libcuda.so.1 has no cuGetProcAddress_v2): update it");
  CUresult (*words)(CUresult, const char**) = nullptr;
  if (calls.get("cuGetErrorString", &words)) error_string.store(words);
  if (!load_contexts(calls, out) || !load_streams(calls, out) || !load_memory(calls, out))
    return error(ENODEV, "the NVIDIA driver lacks %s of CUDA 12: update it", calls.missing());
  CUresult r = out->init(0);
  if (r == CUDA_SUCCESS) r = out->device_count(devices);
  if (r != CUDA_SUCCESS) return does_not_start(r);
  if (*devices == 0) return error(ENODEV, "CUDA shows this process no device");
  return {};
}

Status load_handles(Driver* out) {
  Calls calls(open_library());
  if (!calls.get("cuMemAddressReserve", &out->address_reserve) || !calls.get("cuMemAddressFree", &out->address_free) ||
      !calls.get("cuMemCreate", &out->mem_create) || !calls.get("cuMemRelease", &out->mem_release) ||
      !calls.get("cuMemMap", &out->mem_map) || !calls.get("cuMemUnmap", &out->mem_unmap) ||
      !calls.get("cuMemSetAccess", &out->mem_set_access) || !calls.get("cuStreamWriteValue32", &out->stream_write32) ||
      !calls.get("cuStreamWriteValue64", &out->stream_write64) ||
      !calls.get("cuCtxGetStreamPriorityRange", &out->stream_priorities) ||
      !calls.get("cuModuleLoadData", &out->module_load) || !calls.get("cuModuleGetFunction", &out->module_function) ||
      !calls.get("cuModuleUnload", &out->module_unload) || !calls.get("cuFuncGetAttribute", &out->function_attribute) ||
      !calls.get("cuLaunchKernel", &out->launch_kernel))
    return error(ENODEV, "the NVIDIA driver lacks %s, which physical handles need: update it", calls.missing());
  calls.get("cuMemExportToShareableHandle", &out->mem_export);
  calls.get("cuMemGetHandleForAddressRange", &out->range_handle);
  return {};
}

Words error_words(CUresult e) {
  const char* text = nullptr;
  const auto string = error_string.load();
  if (string == nullptr || string(e, &text) != CUDA_SUCCESS || text == nullptr) text = "an unknown error";
  Words words;
  snprintf(words.text, sizeof words.text, "%s (CUDA error %d)", text, static_cast<int>(e));
  return words;
}

bool is_sticky(CUresult e) {
  switch (static_cast<int>(e)) {
    case 4:    // the driver is shutting down because the process exits
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
    case 806:  // the MPS server does not answer
    case 807:  // the MPS server is not ready
    case 810:  // the MPS server has ended this client
    case 999:  // unknown
      return true;
    default:
      return false;
  }
}

int errno_of(CUresult e) {
  if (e >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && e <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) return EBUSY;
  switch (e) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return ENOMEM;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_HANDLE:
      return EINVAL;
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
      return ENODEV;
    case CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
      return EEXIST;
    case CUDA_ERROR_NOT_SUPPORTED:
      return EOPNOTSUPP;
    default:
      return EIO;
  }
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
