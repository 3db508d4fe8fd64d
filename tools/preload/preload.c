/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libvmem-cuda-calls.so, for LD_PRELOAD. It makes a program's own cudaMemPrefetchAsync and cudaMemAdvise work on
 * regions, as <vmem/cuda.h> does for programs that are compiled with it. Other ranges go to CUDA.
 *
 * It links neither libvmem nor CUDA: each call looks both up in what the process has loaded by then. A process without
 * libvmem has no regions. No state is kept between calls, so no lock is needed.
 *
 * Each of the two calls has one name and two signatures. The arguments are taken as raw registers (x86-64 and aarch64
 * pass integers and a struct of two ints alike) and interpreted by the version of the caller's runtime.
 */
#include "preload.h"

#include <dlfcn.h>
#include <errno.h>
#include <vmem/vmem.h>

#define EXPORTED __attribute__((visibility("default")))
#define NOT_INITIALIZED 3     /* cudaErrorInitializationError */
#define PER_THREAD ((void*)2) /* cudaStreamPerThread */

/* dlsym returns object pointers; ISO C converts them to function pointers only through memory. */
union call {
  void* object;
  int (*query)(const void*, size_t, struct vmem_residency*);
  int (*prefetch)(const void*, size_t, int, void*);
  int (*advise)(const void*, size_t, int, int);
  int (*version)(int*);
};

/* Finds libvmem's call: in a shared libvmem, however it was loaded, or in the program itself, if exported (-rdynamic).
 */
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

/*
 * Finds a call of the runtime that the caller is linked with; a process may have several runtimes. Looks in the
 * caller's module and its dependencies, then (for the program itself) in what follows this library. own: this
 * library's own function, which is not wanted.
 */
static union call of_cuda(const char* name, const void* caller, const void* own) {
  static const char* const names[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so"};
  union call found = {0};
  Dl_info module;
  void* library;
  size_t i;

  if (dladdr(caller, &module) && module.dli_fname) {
    library = dlopen(module.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library) {
      found.object = dlsym(library, name);
      dlclose(library);
    }
  }
  if (!found.object || found.object == own) found.object = dlsym(RTLD_NEXT, name);
  /* A caller without a runtime among its dependencies got one from dlopen. */
  for (i = 0; !found.object && i < sizeof(names) / sizeof(names[0]); i++) {
    library = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD);
    if (!library) continue;
    found.object = dlsym(library, name);
    dlclose(library);
  }
  return found;
}

static int version(const void* caller) {
  const union call call = of_cuda("cudaRuntimeGetVersion", caller, NULL);
  int number = 0;

  return call.version && call.version(&number) == 0 ? number : 0;
}

struct from {
  const char* name;
  const void *own, *caller;
};

static int prefetch(struct from from, int with_location, const void* ptr, size_t size, uint64_t a, uint64_t b,
                    uint64_t c, int per_thread) {
  const union call real = of_cuda(from.name, from.caller, from.own);
  void* stream = (void*)(uintptr_t)(with_location ? c : b);

  if (!real.object) return NOT_INITIALIZED;
  if (per_thread && !stream) stream = PER_THREAD;
  if (with_location) return vmem_preload_prefetch_13(ptr, size, a, (unsigned)b, stream, real.object);
  return vmem_preload_prefetch_12(ptr, size, (int)a, stream, real.object);
}

static int advise(struct from from, int with_location, const void* ptr, size_t size, int advice, uint64_t a) {
  const union call real = of_cuda(from.name, from.caller, from.own);

  if (!real.object) return NOT_INITIALIZED;
  if (with_location) return vmem_preload_advise_13(ptr, size, advice, a, real.object);
  return vmem_preload_advise_12(ptr, size, advice, (int)a, real.object);
}

/* Converts a function pointer to an object pointer, as dlsym does (POSIX). */
#define FROM(name) ((struct from){#name, (const void*)name, caller})

#define PREFETCH(name, with_location, per_thread)                                       \
  EXPORTED int name(const void* ptr, size_t size, uint64_t a, uint64_t b, uint64_t c);  \
  EXPORTED int name(const void* ptr, size_t size, uint64_t a, uint64_t b, uint64_t c) { \
    const void* const caller = __builtin_return_address(0);                             \
    return prefetch(FROM(name), with_location, ptr, size, a, b, c, per_thread);         \
  }
#define ADVISE(name, with_location)                                         \
  EXPORTED int name(const void* ptr, size_t size, int advice, uint64_t a);  \
  EXPORTED int name(const void* ptr, size_t size, int advice, uint64_t a) { \
    const void* const caller = __builtin_return_address(0);                 \
    return advise(FROM(name), with_location, ptr, size, advice, a);         \
  }

/* The names of both runtimes: _v2 takes a location in CUDA 12, _ptsz means per-thread default streams. */
PREFETCH(cudaMemPrefetchAsync, version(caller) >= 13000, 0)
PREFETCH(cudaMemPrefetchAsync_ptsz, version(caller) >= 13000, 1)
PREFETCH(cudaMemPrefetchAsync_v2, 1, 0)
PREFETCH(cudaMemPrefetchAsync_v2_ptsz, 1, 1)
ADVISE(cudaMemAdvise, version(caller) >= 13000)
ADVISE(cudaMemAdvise_v2, 1)
