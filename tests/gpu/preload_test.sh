#!/bin/bash
# preload_test.sh FOLDER: preloads libvmem-cuda-calls.so into a program that uses CUDA's shared
# runtime, on a GPU. The program's cudaMemPrefetchAsync moves the blocks of a region, and CUDA
# serves its own managed memory as before. FOLDER has the library of a wheel (make wheel:
# build/wheel/libvmem-tier.so.1) and build/libvmem-cuda-calls.so. Exit code 77: no GPU, no toolkit.
set -euo pipefail
folder=$(realpath "${1:-.}"); cuda=${CUDA_HOME:-/usr/local/cuda}; root=$(dirname "$0")/../..
work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-preload.XXXXXX"); trap 'rm -rf "$work"' EXIT
runtime=$(find "$cuda/lib64/" -maxdepth 1 -name 'libcudart.so*' 2>/dev/null | sort | head -1)
if [ ! -e "$cuda/include/cuda_runtime_api.h" ] || [ -z "$runtime" ]; then echo "skipped: no CUDA toolkit with a shared runtime in $cuda"; exit 77; fi
cat >"$work/app.c" <<'C'
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <vmem/vmem.h>

enum { SIZE = 16 << 20 };
#define MUST(holds) do { if (!(holds)) return printf("line %d: %s: %s\n", __LINE__, #holds, vmem_last_error()), 1; } while (0)
#if CUDART_VERSION >= 13000
static const struct cudaMemLocation device = { .type = cudaMemLocationTypeDevice, .id = 0 }, host = { .type = cudaMemLocationTypeHost, .id = 0 };
#define FLAGS , 0
#else
enum { device = 0, host = cudaCpuDeviceId };
#define FLAGS
#endif

static int on_device(const void *p, unsigned long want)
{
	struct vmem_residency where = { .size = sizeof(where) };
	int looks;

	for (looks = 0; looks < 10000; looks++) {
		if (vmem_query(p, SIZE, &where) == 0 && where.device_bytes == want)
			return 1;
		usleep(1000);
	}
	return 0;
}

int main(int argc, char **argv)
{
	int devices = 0, preloaded = argc > 1 && strcmp(argv[1], "preloaded") == 0;
	cudaStream_t stream;
	unsigned char *p;
	void *region, *managed;
	size_t i;

	if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
		return puts("skipped: no GPU"), 77;
	MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
	MUST(vmem_set("device", "handles") == 0 && vmem_set("host_budget", "128MiB") == 0 && vmem_set("device_budget", "64MiB") == 0);
	MUST(vmem_alloc(&region, SIZE, 0) == 0);
	p = region;
	for (i = 0; i < SIZE; i++)
		p[i] = (unsigned char)(i % 251);
	if (!preloaded) {
		const cudaError_t refused = cudaMemPrefetchAsync(region, SIZE, device FLAGS, stream);
		printf("without it: %s\n", cudaGetErrorName(refused));
		return refused == cudaSuccess;
	}
	MUST(cudaMemPrefetchAsync(region, SIZE, device FLAGS, stream) == cudaSuccess);
	MUST(on_device(region, SIZE));
	MUST(cudaMemAdvise(region, SIZE, cudaMemAdviseSetReadMostly, device) == cudaSuccess);
	MUST(cudaMemAdvise(region, SIZE, cudaMemAdviseSetPreferredLocation, device) == cudaSuccess);
	MUST(cudaMemPrefetchAsync(region, SIZE, host FLAGS, stream) == cudaSuccess);
	MUST(on_device(region, 0));
	for (i = 0; i < SIZE; i++)
		MUST(p[i] == i % 251);
	MUST(cudaMallocManaged(&managed, SIZE, cudaMemAttachGlobal) == cudaSuccess);
	MUST(cudaMemAdvise(managed, SIZE, cudaMemAdviseSetPreferredLocation, device) == cudaSuccess);
	MUST(cudaMemPrefetchAsync(managed, SIZE, device FLAGS, stream) == cudaSuccess);
	MUST(cudaStreamSynchronize(stream) == cudaSuccess);
	MUST(cudaFree(managed) == cudaSuccess);
	MUST(vmem_free(region) == 0);
	puts("with it: the region's blocks moved, CUDA's own memory is CUDA's");
	return 0;
}
C
${CC:-cc} -std=gnu11 -O1 -Wall -I"$root/include" -I"$cuda/include" "$work/app.c" "$runtime" "$folder/libvmem-tier.so.1" -o "$work/app" -Wl,--allow-shlib-undefined
export LD_LIBRARY_PATH=$folder:$cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
timeout -k 3 30 "$work/app"
LD_PRELOAD=$folder/libvmem-cuda-calls.so timeout -k 3 30 "$work/app" preloaded
