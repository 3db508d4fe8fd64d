#!/bin/bash
# libvmem-cuda-calls.so preloaded into a program that only knows CUDA: its cudaMemPrefetchAsync and
# cudaMemAdvise on addresses of regions go to libvmem, all others to CUDA unchanged. A fake CUDA
# runtime records its calls, with the signatures of 12 and of 13. libvmem is linked in, opened for
# one module alone, or absent.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$(realpath "${BUILD:-build}"); work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-preload.XXXXXX"); trap 'rm -rf "$work"' EXIT
if grep -q -e '-fsanitize' "$build/flags" 2>/dev/null; then echo "skipped: a sanitized library cannot be opened by a program that is not"; exit 77; fi
for needed in libvmem-cuda-calls.so sim/libvmem.so; do [ -e "$build/$needed" ] || { echo "FAILED: $build/$needed is not built"; exit 1; }; done

cat >"$work/cuda.h" <<'C'
#include <stddef.h>
struct place { int type, id; };
#if CUDA >= 13
#define TO struct place to, unsigned flags
#define AT struct place to
static const struct place device0 = { 1, 0 }, device9 = { 1, 9 }, host = { 2, 0 };
#define FLAGS , 0
#else
#define TO int to
#define AT int to
enum { device0 = 0, device9 = 9, host = -1 };
#define FLAGS
int cudaMemPrefetchAsync_v2(const void *p, size_t n, struct place to, unsigned flags, void *stream);
int cudaMemAdvise_v2(const void *p, size_t n, int advice, struct place to);
#endif
int cudaMemPrefetchAsync(const void *p, size_t n, TO, void *stream);
int cudaMemAdvise(const void *p, size_t n, int advice, AT);
int cudaRuntimeGetVersion(int *version);
extern char cuda_asked[256];
C
cat >"$work/cudart.c" <<'C'
#include <stdio.h>
#include <string.h>
#include "cuda.h"
char cuda_asked[256];
static int note(const char *call, const void *p, size_t n, int id, long more)
{
	char *const end = cuda_asked + strlen(cuda_asked);
	snprintf(end, (size_t)(cuda_asked + sizeof(cuda_asked) - end), "%s %d %zu %d %ld;", call, p != NULL, n, id, more);
	return 1;
}
int cudaRuntimeGetVersion(int *version) { return *version = CUDA * 1000, 0; }
#if CUDA >= 13
int cudaMemPrefetchAsync(const void *p, size_t n, TO, void *s) { return note("prefetch", p, n, to.id + to.type * 100, (long)s + flags); }
int cudaMemAdvise(const void *p, size_t n, int advice, AT) { return note("advise", p, n, to.id + to.type * 100, advice); }
#else
int cudaMemPrefetchAsync(const void *p, size_t n, TO, void *s) { return note("prefetch", p, n, to, (long)s); }
int cudaMemAdvise(const void *p, size_t n, int advice, AT) { return note("advise", p, n, to, advice); }
int cudaMemPrefetchAsync_v2(const void *p, size_t n, struct place to, unsigned flags, void *s) { return note("prefetch_v2", p, n, to.id + to.type * 100, (long)s + flags); }
int cudaMemAdvise_v2(const void *p, size_t n, int advice, struct place to) { return note("advise_v2", p, n, to.id + to.type * 100, advice); }
#endif
C
cat >"$work/app.c" <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <vmem/vmem.h>
#include "cuda.h"

enum { SIZE = 8 << 20 };
#define MUST(holds) do { if (!(holds)) return fprintf(stderr, "line %d: %s; CUDA was asked: %s\n", __LINE__, #holds, cuda_asked), 1; } while (0)

static int (*query)(const void *, size_t, struct vmem_residency *);

static int on_device(const void *p, unsigned long want)
{
	struct vmem_residency where = { .size = sizeof(where) };
	int looks;

	for (looks = 0; looks < 60000; looks++) {
		if (query(p, SIZE, &where) == 0 && where.device_bytes == want)
			return 1;
		usleep(1000);
	}
	return 0;
}

static int regions(void *l)
{
	int (*set)(const char *, const char *);
	int (*alloc)(void **, size_t, unsigned);
	void *p;
	size_t i;
	int rc, advice;

	*(void **)&set = dlsym(l, "vmem_set");
	*(void **)&alloc = dlsym(l, "vmem_alloc");
	*(void **)&query = dlsym(l, "vmem_query");
	if (!set || !alloc || !query || set("device", "sim-handles") || set("host_budget", "64MiB") || set("device_budget", "16MiB"))
		return 3;
	rc = alloc(&p, SIZE, 0);
	if (rc == -1 || rc == -38 || rc == -95)
		return 77;
	MUST(rc == 0);
	for (i = 0; i < SIZE / sizeof(unsigned long); i++)
		((unsigned long *)p)[i] = i;
	MUST(cudaMemPrefetchAsync(p, SIZE, device0 FLAGS, NULL) == 0);
	MUST(on_device(p, SIZE));
	MUST(cudaMemPrefetchAsync(p, SIZE, host FLAGS, NULL) == 0);
	MUST(on_device(p, 0));
	for (advice = 1; advice <= 6; advice++)
		MUST(cudaMemAdvise(p, SIZE, advice, device0) == 0);
	MUST(cudaMemAdvise(p, SIZE, 77, device0) == 1);
	MUST(cudaMemAdvise(p, SIZE, 3, device9) == 101);
	MUST(cudaMemPrefetchAsync(p, SIZE, device9 FLAGS, NULL) == 101);
	MUST(cudaMemPrefetchAsync(p, SIZE + 1, device0 FLAGS, NULL) == 1);
#if CUDA < 13
	MUST(cudaMemPrefetchAsync_v2(p, SIZE, (struct place){ 1, 0 }, 0, NULL) == 0);
	MUST(on_device(p, SIZE));
	MUST(cudaMemAdvise_v2(p, SIZE, 3, (struct place){ 1, 9 }) == 101);
#endif
	for (i = 0; i < SIZE / sizeof(unsigned long); i++)
		MUST(((unsigned long *)p)[i] == i);
	MUST(cuda_asked[0] == '\0');
	return 0;
}

int main(int argc, char **argv)
{
	static char other[64];
	void *l = NULL;
	int rc;

	if (argc > 1) {
		l = strcmp(argv[1], "linked") == 0 ? dlopen(NULL, RTLD_NOW) : dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
		if (!l)
			return fprintf(stderr, "%s\n", dlerror()), 2;
		rc = regions(l);
		if (rc)
			return rc;
	}
	MUST(cudaMemPrefetchAsync(other, 64, host FLAGS, (void *)0x1230) == 1);
	MUST(cudaMemAdvise(other, 63, 5, device9) == 1);
#if CUDA >= 13
	MUST(strcmp(cuda_asked, "prefetch 1 64 200 4656;advise 1 63 109 5;") == 0);
#else
	MUST(strcmp(cuda_asked, "prefetch 1 64 -1 4656;advise 1 63 9 5;") == 0);
	cuda_asked[0] = '\0';
	MUST(cudaMemPrefetchAsync_v2(other, 64, (struct place){ 1, 3 }, 4, (void *)0x1230) == 1);
	MUST(cudaMemAdvise_v2(other, 62, 2, (struct place){ 2, 0 }) == 1);
	MUST(strcmp(cuda_asked, "prefetch_v2 1 64 103 4660;advise_v2 1 62 200 2;") == 0);
#endif
	return 0;
}
C
cat >"$work/module.c" <<'C'
#include <stdio.h>
#include <string.h>
#include "cuda.h"
int run(void);
int run(void)
{
	static char other[64];
	const int told = cudaMemPrefetchAsync(other, 64, host FLAGS, (void *)0x1230) + cudaMemAdvise(other, 63, 5, device9);
#if CUDA >= 13
	const char *const want = "prefetch 1 64 200 4656;advise 1 63 109 5;";
#else
	const char *const want = "prefetch 1 64 -1 4656;advise 1 63 9 5;";
#endif

	if (told == 2 && strcmp(cuda_asked, want) == 0)
		return 0;
	return fprintf(stderr, "%d, CUDA was asked: %s\n", told, cuda_asked), 1;
}
C
cat >"$work/opens.c" <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv)
{
	void *modules[8];
	int i, (*run)(void), rc = argc < 2 || argc > 8;

	for (i = 1; i < argc; i++)
		if (!(modules[i] = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL)))
			return fprintf(stderr, "%s\n", dlerror()), 2;
	for (i = 1; i < argc; i++) {
		*(void **)&run = dlsym(modules[i], "run");
		rc |= run();
	}
	return rc;
}
C
flags="-std=gnu11 -O1 -Wall -Wextra -Werror -Wno-unused-variable -Iinclude"
sim=$build/sim calls=$build/libvmem-cuda-calls.so
! readelf -d "$calls" | grep NEEDED | grep -E 'cuda|vmem' || { echo "FAILED: it needs a library that the program may not have"; exit 1; }
[ "$(nm -D --defined-only "$calls" | awk '{ print $3 }' | sort | xargs)" = "cudaMemAdvise cudaMemAdvise_v2 cudaMemPrefetchAsync cudaMemPrefetchAsync_ptsz cudaMemPrefetchAsync_v2 cudaMemPrefetchAsync_v2_ptsz" ] ||
  { echo "FAILED: it has other names than CUDA's"; nm -D --defined-only "$calls"; exit 1; }
for cuda in 12 13; do
  mkdir "$work/$cuda"
  echo "libcudart.so.$cuda { global: *; };" >"$work/$cuda/map"
  # shellcheck disable=SC2086  # flags are words
  ${CC:-cc} $flags -DCUDA=$cuda -shared -fPIC "$work/cudart.c" -o "$work/$cuda/libcudart.so.$cuda" -Wl,-soname,libcudart.so.$cuda -Wl,--version-script="$work/$cuda/map"
  # shellcheck disable=SC2086
  ${CC:-cc} $flags -DCUDA=$cuda "$work/app.c" -o "$work/$cuda/alone" "$work/$cuda/libcudart.so.$cuda" -ldl
  # shellcheck disable=SC2086
  ${CC:-cc} $flags -DCUDA=$cuda "$work/app.c" -o "$work/$cuda/linked" "$work/$cuda/libcudart.so.$cuda" -L"$sim" -Wl,--no-as-needed -lvmem -ldl
  run() {  # run HOW PROGRAM ARGS..
    status=0; LD_LIBRARY_PATH=$work/$cuda:$sim timeout -k 3 240 env "${@:2}" || status=$?
    if [ "$status" = 77 ]; then echo "skipped: no way to trap absent blocks here"; exit 77; fi
    [ "$status" = 0 ] || { echo "FAILED: CUDA $cuda, $1: status $status"; exit 1; }
    echo "CUDA $cuda, $1: ok"
  }
  run "libvmem linked" LD_PRELOAD="$calls" "$work/$cuda/linked" linked
  run "libvmem opened for one module" LD_PRELOAD="$calls" "$work/$cuda/alone" "$sim/libvmem.so"
  run "no libvmem" LD_PRELOAD="$calls" "$work/$cuda/alone"
  # Check that the test can tell: without the preload, the region's addresses reach CUDA.
  if LD_LIBRARY_PATH=$work/$cuda:$sim timeout -k 3 240 "$work/$cuda/linked" linked 2>"$work/said"; then echo "FAILED: it is not needed"; exit 1; fi
  grep -q 'CUDA was asked: prefetch' "$work/said" || { echo "FAILED: without it:"; cat "$work/said"; exit 1; }
done
# Two runtimes in one process, and one under another name, each for its own module.
modules=()
for kind in 12 13 12-renamed; do
  cuda=${kind%-renamed}
  runtime=$work/$cuda/libcudart.so.$cuda
  if [ "$kind" != "$cuda" ]; then
    runtime=$work/$cuda/libcudart-1a2b.so.$cuda.0
    # shellcheck disable=SC2086
    ${CC:-cc} $flags -DCUDA="$cuda" -shared -fPIC "$work/cudart.c" -o "$runtime" -Wl,-soname,"${runtime##*/}"
  fi
  # shellcheck disable=SC2086
  ${CC:-cc} $flags -DCUDA="$cuda" -shared -fPIC "$work/module.c" -o "$work/module-$kind.so" "$runtime" -Wl,-rpath,"$work/$cuda"
  modules+=("$work/module-$kind.so")
done
# shellcheck disable=SC2086
${CC:-cc} $flags "$work/opens.c" -o "$work/opens" -ldl
for order in "${modules[*]}" "${modules[1]} ${modules[0]}" "${modules[2]}" "${modules[2]} ${modules[1]}"; do
  # shellcheck disable=SC2086  # a list of files
  LD_PRELOAD=$calls timeout -k 3 60 "$work/opens" $order || { echo "FAILED: each module's calls are its own runtime's: $order"; exit 1; }
done
echo "modules with runtimes of their own: ok"
