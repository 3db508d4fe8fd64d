/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libvmem-cuda-calls.so, for LD_PRELOAD: a program's own cudaMemPrefetchAsync and cudaMemAdvise on addresses of regions
 * ask libvmem, as <vmem/cuda.h> has them, in programs that are not compiled with it. All other ranges are CUDA's.
 *
 * It needs neither libvmem nor CUDA: both are found when a call comes, in whatever the process has loaded by then. A
 * process that has no libvmem has no regions. Nothing is kept between calls, so there is nothing to protect.
 *
 * The two calls have one name and two signatures. Arguments are taken as the registers they come in (x86-64 and aarch64
 * pass integers and a struct of two ints alike), and read as the runtime that the process has says that they are meant.
 */
#include "preload.h"

#include <dlfcn.h>
#include <errno.h>
#include <vmem/vmem.h>

#define EXPORTED __attribute__((visibility("default")))
#define NOT_INITIALIZED 3     /* cudaErrorInitializationError */
#define PER_THREAD ((void*)2) /* cudaStreamPerThread */

/* dlsym gives objects; ISO C has no way from there to a function but through memory. */
union call {
  void* object;
  int (*query)(const void*, size_t, struct vmem_residency*);
  int (*prefetch)(const void*, size_t, int, void*);
  int (*advise)(const void*, size_t, int, int);
  int (*version)(int*);
};

/* The program's own, linked into it; or a shared one, however it was loaded. */
static union call of_libvmem(const char* name) {
  union call found;
  void* library;

  found.object = dlsym(RTLD_DEFAULT, name);
  if (found.object) return found;
  library = dlopen(VMEM_SONAME, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return found;
  found.object = dlsym(library, name);
  dlclose(library);
  return found;
}

int vmem_preload_query(const void* ptr, size_t size, struct vmem_residency* out) {
  const union call call = of_libvmem("vmem_query");

  return call.query ? call.query(ptr, size, out) : -EINVAL;
}

int vmem_preload_prefetch(const void* ptr, size_t size, int location, void* stream) {
  const union call call = of_libvmem("vmem_prefetch");

  return call.prefetch ? call.prefetch(ptr, size, location, stream) : -ENOSYS;
}

int vmem_preload_advise(const void* ptr, size_t size, int advice, int location) {
  const union call call = of_libvmem("vmem_advise");

  return call.advise ? call.advise(ptr, size, advice, location) : -ENOSYS;
}

/* Behind this library among those that everybody sees; or one that was loaded for somebody, as Python's modules do. */
static union call of_cuda(const char* name) {
  static const char* const names[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so"};
  union call found;
  void* library;
  size_t i;

  found.object = dlsym(RTLD_NEXT, name);
  for (i = 0; !found.object && i < sizeof(names) / sizeof(names[0]); i++) {
    library = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD);
    if (!library) continue;
    found.object = dlsym(library, name);
    dlclose(library);
  }
  return found;
}

static int version(void) {
  const union call call = of_cuda("cudaRuntimeGetVersion");
  int number = 0;

  return call.version && call.version(&number) == 0 ? number : 0;
}

static int prefetch(const char* name, int with_location, const void* ptr, size_t size, uint64_t a, uint64_t b,
                    uint64_t c, int per_thread) {
  const union call real = of_cuda(name);
  void* stream = (void*)(uintptr_t)(with_location ? c : b);

  if (!real.object) return NOT_INITIALIZED;
  if (per_thread && !stream) stream = PER_THREAD;
  if (with_location) return vmem_preload_prefetch_13(ptr, size, a, (unsigned)b, stream, real.object);
  return vmem_preload_prefetch_12(ptr, size, (int)a, stream, real.object);
}

static int advise(const char* name, int with_location, const void* ptr, size_t size, int advice, uint64_t a) {
  const union call real = of_cuda(name);

  if (!real.object) return NOT_INITIALIZED;
  if (with_location) return vmem_preload_advise_13(ptr, size, advice, a, real.object);
  return vmem_preload_advise_12(ptr, size, advice, (int)a, real.object);
}

#define PREFETCH(name, with_location, per_thread)                                       \
  EXPORTED int name(const void* ptr, size_t size, uint64_t a, uint64_t b, uint64_t c);  \
  EXPORTED int name(const void* ptr, size_t size, uint64_t a, uint64_t b, uint64_t c) { \
    return prefetch(#name, with_location, ptr, size, a, b, c, per_thread);              \
  }
#define ADVISE(name, with_location)                                         \
  EXPORTED int name(const void* ptr, size_t size, int advice, uint64_t a);  \
  EXPORTED int name(const void* ptr, size_t size, int advice, uint64_t a) { \
    return advise(#name, with_location, ptr, size, advice, a);              \
  }

/* The names of both runtimes; _v2 has a location in CUDA 12, _ptsz means default streams of threads. */
PREFETCH(cudaMemPrefetchAsync, version() >= 13000, 0)
PREFETCH(cudaMemPrefetchAsync_ptsz, version() >= 13000, 1)
PREFETCH(cudaMemPrefetchAsync_v2, 1, 0)
PREFETCH(cudaMemPrefetchAsync_v2_ptsz, 1, 1)
ADVISE(cudaMemAdvise, version() >= 13000)
ADVISE(cudaMemAdvise_v2, 1)
