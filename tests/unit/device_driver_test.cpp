// Compares the driver calls that the library declares with NVIDIA's own list of each call in each
// version. The library requests those of CUDA 12.0: the newest here that is not newer.
#include <gtest/gtest.h>

#if defined(VMEM_HAVE_CUDA) && __has_include(<cudaTypedefs.h>)
#include <cudaTypedefs.h>

#include <type_traits>

#include "device/cuda/cuda_api.h"

namespace {

using vmem::device::cuda::Driver;

#define SAME(member, type) \
  static_assert(std::is_same_v<decltype(Driver::member), type>, #member " is not declared as " #type)
SAME(init, PFN_cuInit_v2000);
SAME(device_count, PFN_cuDeviceGetCount_v2000);
SAME(device_name, PFN_cuDeviceGetName_v2000);
SAME(device_memory, PFN_cuDeviceTotalMem_v3020);
SAME(device_pci, PFN_cuDeviceGetPCIBusId_v4010);
SAME(device_attribute, PFN_cuDeviceGetAttribute_v2000);
SAME(can_access_peer, PFN_cuDeviceCanAccessPeer_v4000);
SAME(peer_attribute, PFN_cuDeviceGetP2PAttribute_v8000);
SAME(primary_retain, PFN_cuDevicePrimaryCtxRetain_v7000);
SAME(primary_release, PFN_cuDevicePrimaryCtxRelease_v11000);
SAME(primary_state, PFN_cuDevicePrimaryCtxGetState_v7000);
SAME(ctx_push, PFN_cuCtxPushCurrent_v4000);
SAME(ctx_pop, PFN_cuCtxPopCurrent_v4000);
SAME(ctx_current, PFN_cuCtxGetCurrent_v4000);
SAME(ctx_device, PFN_cuCtxGetDevice_v2000);
SAME(ctx_id, PFN_cuCtxGetId_v12000);
SAME(ctx_synchronize, PFN_cuCtxSynchronize_v2000);
SAME(ctx_enable_peer, PFN_cuCtxEnablePeerAccess_v4000);
SAME(exchange_capture_mode, PFN_cuThreadExchangeStreamCaptureMode_v10010);
SAME(stream_ctx, PFN_cuStreamGetCtx_v9020);
SAME(stream_capturing, PFN_cuStreamIsCapturing_v10000);
SAME(stream_create, PFN_cuStreamCreateWithPriority_v5050);
SAME(stream_destroy, PFN_cuStreamDestroy_v4000);
SAME(stream_query, PFN_cuStreamQuery_v2000);
SAME(stream_synchronize, PFN_cuStreamSynchronize_v2000);
SAME(stream_wait_event, PFN_cuStreamWaitEvent_v3020);
SAME(event_create, PFN_cuEventCreate_v2000);
SAME(event_destroy, PFN_cuEventDestroy_v4000);
SAME(event_query, PFN_cuEventQuery_v2000);
SAME(event_record, PFN_cuEventRecord_v2000);
SAME(event_synchronize, PFN_cuEventSynchronize_v2000);
SAME(mem_info, PFN_cuMemGetInfo_v3020);
SAME(mem_alloc_managed, PFN_cuMemAllocManaged_v6000);
SAME(mem_free, PFN_cuMemFree_v3020);
SAME(mem_prefetch, PFN_cuMemPrefetchAsync_v8000);
SAME(mem_advise, PFN_cuMemAdvise_v8000);
SAME(host_register, PFN_cuMemHostRegister_v6050);
SAME(host_unregister, PFN_cuMemHostUnregister_v4000);
SAME(host_device_pointer, PFN_cuMemHostGetDevicePointer_v3020);
SAME(copy_in, PFN_cuMemcpyHtoDAsync_v3020);
SAME(copy_out, PFN_cuMemcpyDtoHAsync_v3020);
SAME(copy_within, PFN_cuMemcpyDtoDAsync_v3020);
SAME(copy_peer, PFN_cuMemcpyPeerAsync_v4000);
SAME(address_reserve, PFN_cuMemAddressReserve_v10020);
SAME(address_free, PFN_cuMemAddressFree_v10020);
SAME(mem_create, PFN_cuMemCreate_v10020);
SAME(mem_release, PFN_cuMemRelease_v10020);
SAME(mem_map, PFN_cuMemMap_v10020);
SAME(mem_unmap, PFN_cuMemUnmap_v10020);
SAME(mem_set_access, PFN_cuMemSetAccess_v10020);
SAME(mem_export, PFN_cuMemExportToShareableHandle_v10020);
SAME(range_handle, PFN_cuMemGetHandleForAddressRange_v11070);
SAME(stream_write32, PFN_cuStreamWriteValue32_v11070);
SAME(stream_write64, PFN_cuStreamWriteValue64_v11070);
SAME(stream_priorities, PFN_cuCtxGetStreamPriorityRange_v5050);
SAME(module_load, PFN_cuModuleLoadData_v2000);
SAME(module_function, PFN_cuModuleGetFunction_v2000);
SAME(module_unload, PFN_cuModuleUnload_v2000);
SAME(function_attribute, PFN_cuFuncGetAttribute_v2020);
SAME(launch_kernel, PFN_cuLaunchKernel_v4000);
#undef SAME

// Each member must be in the list above: add a new one there.
TEST(DeviceDriver, EveryCallIsDeclaredAsNvidiaHasIt) {
  constexpr size_t kListed = 60;
  EXPECT_EQ(sizeof(Driver) / sizeof(void*), kListed);
}

}  // namespace
#endif
