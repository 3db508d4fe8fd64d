#!/bin/bash
# The CUDA driver as the library loads it, replaced by a libcuda.so.1 that works on host memory in
# one thread. Blocks go to its device and come back right. If the driver is too old, lacks a call or
# does not start, the error names the driver.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$(realpath "${BUILD:-build}"); work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-driver.XXXXXX"); trap 'rm -rf "$work"' EXIT
if ! grep -q VMEM_HAVE_CUDA "$build/flags"; then echo "skipped: built without CUDA"; exit 77; fi
if grep -q -e '-fsanitize' "$build/flags"; then echo "skipped: a sanitized library cannot be opened by a program that is not"; exit 77; fi

# The stub has only the calls that libvmem uses, as of CUDA 12.0. Its streams and events are always
# complete.
cat >"$work/libcuda.c" <<'C'
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

enum { OK, INVALID, NO_MEMORY, NOT_READY = 600, NOT_FOUND = 500, NO_PTX = 218, CONTEXTS = 16, ALL = 4096 };
static const size_t memory = 1ul << 30, unit = 2ul << 20;
static struct mapping { uint64_t at; size_t size; char *bytes; } mapped[ALL];
static struct handle { char *bytes; size_t size; int users; } handles[ALL];
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread void *stack[CONTEXTS];
static __thread int depth, mode;
static const int context;
int fake_retained, fake_pinned, fake_streams, fake_events, fake_reserved;
long fake_in, fake_out;

#ifndef INIT
#define INIT OK
#endif
#ifndef LACKS
#define LACKS "nothing"
#endif
static int need_context(void) { return depth == 0 ? 201 : OK; }
#define IN_CONTEXT do { if (need_context() != OK) return 201; } while (0)

static int init(unsigned flags) { (void)flags; return INIT; }
static int count(int *n) { return *n = 1, OK; }
static int name(char *out, int size, int d) { return snprintf(out, (size_t)size, "fake %d", d), OK; }
static int total(size_t *out, int d) { (void)d; return *out = memory, OK; }
static int pci(char *out, int size, int d) { return snprintf(out, (size_t)size, "0000:AB:0%d.0", d), OK; }
static int attribute(int *out, int what, int d) { (void)d; return *out = what != 110, OK; }
static int peer(int *out, int a, int b) { (void)a; (void)b; return *out = 0, OK; }
static int p2p(int *out, int what, int a, int b) { (void)what; return peer(out, a, b); }
static int retain(void **out, int d) { (void)d; return ++fake_retained, *out = (void *)&context, OK; }
static int release(int d) { (void)d; return --fake_retained, OK; }
static int state(int d, unsigned *flags, int *active) { (void)d; return *flags = 0, *active = fake_retained > 0, OK; }
static int push(void *c) { return depth == CONTEXTS || c != &context ? INVALID : (stack[depth++] = c, OK); }
static int pop(void **out) { IN_CONTEXT; return *out = stack[--depth], OK; }
static int current(void **out) { return *out = depth ? stack[depth - 1] : NULL, OK; }
static int device(int *out) { IN_CONTEXT; return *out = 0, OK; }
static int id(void *c, unsigned long long *out) { return c == &context ? (*out = 7, OK) : INVALID; }
static int synchronize(void) { return need_context(); }
static int enable_peer(void *c, unsigned flags) { (void)c; (void)flags; return INVALID; }
static int exchange(int *m) { const int old = mode; return mode = *m, *m = old, OK; }
static int of_stream(void *s, void **out) { (void)s; return *out = (void *)&context, OK; }
static int capturing(void *s, int *out) { (void)s; return *out = 0, OK; }
static int make_stream(void **out, unsigned flags, int priority) { IN_CONTEXT; (void)priority; return flags != 1 ? INVALID : (*out = (void *)(0x10000L + ++fake_streams), OK); }
static int end_stream(void *s) { (void)s; IN_CONTEXT; return --fake_streams, OK; }
static int on_stream(void *s) { (void)s; return need_context(); }
static int wait_event(void *s, void *e, unsigned flags) { (void)s; return e == NULL || flags != 0 ? INVALID : need_context(); }
static int make_event(void **out, unsigned flags) { IN_CONTEXT; return flags & ~3u ? INVALID : (*out = (void *)(0x20000L + ++fake_events), OK); }
static int end_event(void *e) { IN_CONTEXT; return e == NULL ? INVALID : (--fake_events, OK); }
static int of_event(void *e) { return e == NULL ? INVALID : need_context(); }
static int record(void *e, void *s) { (void)s; return of_event(e); }
static int info(size_t *left, size_t *all) { IN_CONTEXT; return *all = memory, *left = memory - used, OK; }
static int pin(void *p, size_t size, unsigned flags) { IN_CONTEXT; return p == NULL || size == 0 || flags & ~3u ? INVALID : (++fake_pinned, OK); }
static int unpin(void *p) { IN_CONTEXT; return p == NULL ? INVALID : (--fake_pinned, OK); }
static int seen(uint64_t *out, void *p, unsigned flags) { (void)flags; return *out = (uint64_t)p, OK; }
/* Where the device has it; NULL: nowhere. */
static char *find(uint64_t at, size_t size)
{
	for (int i = 0; i < ALL; ++i)
		if (mapped[i].size && at >= mapped[i].at && at + size <= mapped[i].at + mapped[i].size)
			return mapped[i].bytes + (at - mapped[i].at);
	return NULL;
}
static int copy(char *to, const char *from, size_t size, long *counted)
{
	if (need_context() != OK || to == NULL || from == NULL)
		return INVALID;
	memcpy(to, from, size);
	*counted += (long)size;
	return OK;
}
static int locked(int r) { return pthread_mutex_unlock(&lock), r; }
static int in(uint64_t to, const void *from, size_t size, void *s) { (void)s; pthread_mutex_lock(&lock); return locked(copy(find(to, size), from, size, &fake_in)); }
static int out(void *to, uint64_t from, size_t size, void *s) { (void)s; pthread_mutex_lock(&lock); return locked(copy(to, find(from, size), size, &fake_out)); }
static int reserve(uint64_t *at, size_t size, size_t align, uint64_t hint, unsigned long long flags)
{
	(void)hint; (void)flags;
	char *const p = mmap(NULL, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return NO_MEMORY;
	*at = ((uint64_t)p + align - 1) / align * align;
	munmap(p, *at - (uint64_t)p);
	munmap((void *)(*at + size), (uint64_t)p + align - *at);
	return ++fake_reserved, OK;
}
static int unreserve(uint64_t at, size_t size) { return munmap((void *)at, size) ? INVALID : (--fake_reserved, OK); }
static int create(unsigned long long *handle, size_t size, const int *what, unsigned long long flags)
{
	if (need_context() != OK || flags || size % unit || what[0] != 1 || what[2] != 1 || what[3] != 0)
		return INVALID;
	pthread_mutex_lock(&lock);
	for (int i = 1; i < ALL; ++i)
		if (handles[i].users == 0) {
			char *const p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
			memset(p, 0xa5, size);
			handles[i] = (struct handle){p, size, 1};
			used += size;
			return *handle = (unsigned)i, locked(OK);
		}
	return locked(NO_MEMORY);
}
static int drop(unsigned long long handle)
{
	struct handle *const h = &handles[handle];
	if (--h->users == 0) {
		munmap(h->bytes, h->size);
		used -= h->size;
	}
	return OK;
}
static int destroy(unsigned long long handle) { pthread_mutex_lock(&lock); return locked(drop(handle)); }
static int map(uint64_t at, size_t size, size_t offset, unsigned long long handle, unsigned long long flags)
{
	pthread_mutex_lock(&lock);
	if (offset || flags || handles[handle].size != size || find(at, 1))
		return locked(INVALID);
	for (int i = 0; i < ALL; ++i)
		if (mapped[i].size == 0) {
			mapped[i] = (struct mapping){at, size, handles[handle].bytes};
			++handles[handle].users;
			return locked(OK);
		}
	return locked(NO_MEMORY);
}
static int unmap(uint64_t at, size_t size)
{
	size_t gone = 0;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < ALL; ++i)
		if (mapped[i].size && mapped[i].at >= at && mapped[i].at + mapped[i].size <= at + size) {
			gone += mapped[i].size;
			for (int k = 1; k < ALL; ++k)
				if (handles[k].users && handles[k].bytes == mapped[i].bytes) {
					drop((unsigned)k);
					break;
				}
			mapped[i].size = 0;
		}
	return locked(gone == size ? OK : INVALID);
}
static int access_to(uint64_t at, size_t size, const int *what, size_t n)
{
	(void)size;
	pthread_mutex_lock(&lock);
	return locked(find(at, 1) && n == 1 && what[0] == 1 && what[1] == 0 && what[2] == 3 ? OK : INVALID);
}
static int priorities(int *least, int *greatest) { return *least = 0, *greatest = -5, OK; }
static int load(void **out, const void *image) { (void)out; (void)image; return NO_PTX; }
static int never(void) { return INVALID; }
static int words(int e, const char **out) { return *out = e == 802 ? "system not yet initialized" : "fake error", OK; }

static const struct { const char *name; void *call; } calls[] = {
	{"cuInit", init}, {"cuDeviceGetCount", count}, {"cuDeviceGetName", name}, {"cuDeviceTotalMem", total}, {"cuDeviceGetPCIBusId", pci},
	{"cuDeviceGetAttribute", attribute}, {"cuDeviceCanAccessPeer", peer}, {"cuDeviceGetP2PAttribute", p2p},
	{"cuDevicePrimaryCtxRetain", retain}, {"cuDevicePrimaryCtxRelease", release}, {"cuDevicePrimaryCtxGetState", state},
	{"cuCtxPushCurrent", push}, {"cuCtxPopCurrent", pop}, {"cuCtxGetCurrent", current}, {"cuCtxGetDevice", device}, {"cuCtxGetId", id},
	{"cuCtxSynchronize", synchronize}, {"cuCtxEnablePeerAccess", enable_peer}, {"cuThreadExchangeStreamCaptureMode", exchange},
	{"cuStreamGetCtx", of_stream}, {"cuStreamIsCapturing", capturing}, {"cuStreamCreateWithPriority", make_stream},
	{"cuStreamDestroy", end_stream}, {"cuStreamQuery", on_stream}, {"cuStreamSynchronize", on_stream}, {"cuStreamWaitEvent", wait_event},
	{"cuEventCreate", make_event}, {"cuEventDestroy", end_event}, {"cuEventQuery", of_event}, {"cuEventRecord", record},
	{"cuEventSynchronize", of_event}, {"cuMemGetInfo", info}, {"cuMemAllocManaged", never}, {"cuMemFree", never},
	{"cuMemPrefetchAsync", never}, {"cuMemAdvise", never}, {"cuMemHostRegister", pin}, {"cuMemHostUnregister", unpin},
	{"cuMemHostGetDevicePointer", seen}, {"cuMemcpyHtoDAsync", in}, {"cuMemcpyDtoHAsync", out}, {"cuMemcpyDtoDAsync", never},
	{"cuMemcpyPeerAsync", never}, {"cuMemAddressReserve", reserve}, {"cuMemAddressFree", unreserve}, {"cuMemCreate", create},
	{"cuMemRelease", destroy}, {"cuMemMap", map}, {"cuMemUnmap", unmap}, {"cuMemSetAccess", access_to}, {"cuStreamWriteValue32", never},
	{"cuStreamWriteValue64", never}, {"cuCtxGetStreamPriorityRange", priorities}, {"cuModuleLoadData", load},
	{"cuModuleGetFunction", never}, {"cuModuleUnload", never}, {"cuFuncGetAttribute", never}, {"cuLaunchKernel", never},
	{"cuGetErrorString", words},
};
#ifndef OLD
int cuGetProcAddress_v2(const char *wanted, void **out, int version, uint64_t flags, int *found)
{
	*out = NULL;
	*found = 1;
	if (version != 12000 || flags != 1)
		return INVALID;
	for (size_t i = 0; i < sizeof calls / sizeof *calls && strcmp(wanted, LACKS) != 0; ++i)
		if (strcmp(wanted, calls[i].name) == 0)
			return *out = calls[i].call, *found = 0, OK;
	return OK;
}
#endif
C
cat >"$work/app.c" <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vmem/vmem.h>

enum { BLOCK = 2 << 20, BLOCKS = 24, SIZE = BLOCK * BLOCKS };
#define DO(call) do { const int rc_ = (call); if (rc_) return printf("%s: %d %s\n", #call, rc_, vmem_last_error()), (void *)1; } while (0)

static void *work(void *with_device)
{
	struct vmem_region_attr a = { .size = sizeof a, .block_size = BLOCK };
	struct vmem_residency where = { .size = sizeof where };
	uint64_t *w;

	if (!with_device)
		return NULL;
	DO(vmem_create((void **)&w, SIZE, &a));
	for (size_t i = 0; i < SIZE / 8; ++i) w[i] = i * 0x9e3779b97f4a7c15u;
	for (int round = 0; round < 2; ++round)
		for (size_t b = 0; b < BLOCKS; b += 2) {
			DO(vmem_acquire(w + b * BLOCK / 8, 2 * BLOCK, VMEM_READ | VMEM_WRITE, 0, NULL));
			DO(vmem_query(w + b * BLOCK / 8, 2 * BLOCK, &where));
			if (where.device_bytes != 2 * BLOCK) return puts("not on the device"), (void *)1;
			DO(vmem_release(w + b * BLOCK / 8, 2 * BLOCK, NULL));
		}
	DO(vmem_evict(w, SIZE, VMEM_SSD));
	for (size_t i = 0; i < SIZE / 8; ++i)
		if (w[i] != i * 0x9e3779b97f4a7c15u) return printf("word %zu is wrong\n", i), (void *)1;
	DO(vmem_free(w));
	return NULL;
}
static long of(void *driver, const char *name) { const int *p = dlsym(driver, name); return p ? *p : -1; }
int main(int argc, char **argv)
{
	pthread_attr_t small;
	pthread_t thread;
	void *failed, *driver;
	int rc;

	(void)argc;
	if (vmem_set("device", argv[1]) || vmem_set("host_budget", "32MiB") || vmem_set("device_budget", "16MiB")) return printf("%s\n", vmem_last_error()), 2;
	if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD)) return puts("CUDA is loaded before it is asked for"), 1;
	rc = vmem_init();
	if (rc == -1 || rc == -38) return 77;
	if (rc) return printf("%d %s\n", rc, vmem_last_error()), 3;
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 16384);
	if (pthread_create(&thread, &small, work, strcmp(argv[1], "none") ? "" : NULL) || pthread_join(thread, &failed)) return 4;
	if (failed) return 5;
	vmem_shutdown();
	driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	if (!driver) return puts("CUDA is not loaded"), 0;
	printf("%s in, %s out, kept: %ld contexts, %ld pinned, %ld streams, %ld events, %ld reservations\n", *(long *)dlsym(driver, "fake_in") >= SIZE ? "all" : "part", *(long *)dlsym(driver, "fake_out") >= SIZE ? "all" : "part",
		of(driver, "fake_retained"), of(driver, "fake_pinned"), of(driver, "fake_streams"), of(driver, "fake_events"), of(driver, "fake_reserved"));
	return 0;
}
C
${CC:-cc} -std=gnu99 -O1 -Wall -Wextra -Werror -Iinclude "$work/app.c" -o "$work/app" -L"$build" -lvmem -Wl,-rpath,"$build" -ldl -pthread
# try NAME DEVICE STATUS WORDS [FLAG..]: builds the driver with the flags, runs the program, and
# expects STATUS and WORDS.
try() {
  local name=$1 device=$2 status=$3 words=$4 got=0; shift 4
  mkdir -p "$work/$name"
  ${CC:-cc} -std=gnu99 -O1 -Wall -Wextra -Werror -Wno-pointer-sign -shared -fPIC -Wl,-soname,libcuda.so.1 "$@" "$work/libcuda.c" -o "$work/$name/libcuda.so.1" -pthread
  LD_LIBRARY_PATH=$work/$name timeout -k 3 120 "$work/app" "$device" >"$work/said" 2>&1 || got=$?
  if [ "$got" = 77 ]; then echo "skipped: no way to trap absent blocks here"; exit 77; fi
  if [ "$got" != "$status" ] || ! grep -qF -- "$words" "$work/said"; then
    echo "FAILED: $name: status $got for $status, and not '$words':"; cat "$work/said"; exit 1
  fi
}
try none none 0 "CUDA is not loaded"
try works handles 0 "all in, all out, kept: 0 contexts, 0 pinned, 0 streams, 0 events, 0 reservations"
try automatic auto 0 "all in, all out, kept: 0 contexts"
try old handles 3 "-19 setting device is handles, which is not available here: the NVIDIA driver is older than CUDA 12" -DOLD -Wno-unused
try lacks handles 3 "the NVIDIA driver lacks cuStreamWriteValue64, which physical handles need: update it" '-DLACKS="cuStreamWriteValue64"'
try basic handles 3 "the NVIDIA driver lacks cuMemFree of CUDA 12: update it" '-DLACKS="cuMemFree"'
try starts handles 3 "CUDA does not start: system not yet initialized (CUDA error 802)" -DINIT=802
try absent handles 3 "CUDA does not start: fake error (CUDA error 999)" -DINIT=999
echo "8 passed, 0 failed, 0 skipped"
