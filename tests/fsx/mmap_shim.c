/*
 * Preloaded into a program that does not know libvmem. The program's mappings of files in the folder
 * VMEM_SHIM_FOLDER become regions, msync becomes vmem_sync, and munmap becomes vmem_free. So
 * programs that exercise mmap exercise vmem_map.
 *
 * A region ends with the file, a mapping with its last page: the bytes between read as zeros in
 * both. At exit the shim prints on stderr how many mappings it took; with none, every test would
 * pass. With VMEM_SHIM_LOSE no store reaches its file: a program that does not notice tests
 * nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "vmem/vmem.h"

#define EXPORT __attribute__((visibility("default")))

static struct mapping {
	char *at;
	size_t size; /* of the region: the file may have ended before the mapping */
} mappings[256];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned long taken, synced;
/* Set while the library itself runs: its own mappings are not ours. */
static __thread int inside;

static int failed(const char *what, int rc)
{
	fprintf(stderr, "shim: %s: %d %s\n", what, rc, vmem_last_error());
	errno = -rc;
	return -1;
}

static struct mapping *find(const void *at)
{
	for (size_t i = 0; i < sizeof mappings / sizeof *mappings; ++i)
		if (mappings[i].at && (const char *)at >= mappings[i].at && (const char *)at < mappings[i].at + mappings[i].size)
			return &mappings[i];
	return NULL;
}

static int is_ours(int fd, off_t offset, size_t *size, char *path)
{
	const char *folder = getenv("VMEM_SHIM_FOLDER");
	char link[64];
	struct stat st;
	ssize_t n;

	if (inside || fd < 0 || !folder || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || offset >= st.st_size)
		return 0;
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	n = readlink(link, path, PATH_MAX - 1);
	if (n <= 0)
		return 0;
	path[n] = 0;
	if (strncmp(path, folder, strlen(folder)) != 0)
		return 0;
	if (*size > (size_t)(st.st_size - offset))
		*size = (size_t)(st.st_size - offset);
	return 1;
}

EXPORT void *mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset)
{
	static void *(*real)(void *, size_t, int, int, int, off_t);
	char path[PATH_MAX];
	size_t size = length;
	void *p = NULL;
	int rc;

	if (!real)
		real = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
	if (addr || !is_ours(fd, offset, &size, path))
		return real(addr, length, prot, flags, fd, offset);
	inside = 1;
	rc = vmem_map(&p, size, path, (uint64_t)offset,
		      (!(prot & PROT_WRITE)  ? VMEM_MAP_READ
		       : (flags & MAP_SHARED) && !getenv("VMEM_SHIM_LOSE") ? VMEM_MAP_SHARED
									   : VMEM_MAP_PRIVATE) |
			      VMEM_HOST_ONLY);
	inside = 0;
	if (rc != 0) {
		failed("vmem_map", rc);
		return MAP_FAILED;
	}
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < sizeof mappings / sizeof *mappings; ++i)
		if (!mappings[i].at) {
			mappings[i].at = p;
			mappings[i].size = size;
			++taken;
			break;
		}
	pthread_mutex_unlock(&lock);
	return p;
}
EXPORT void *mmap64(void *, size_t, int, int, int, off_t) __attribute__((alias("mmap")));

EXPORT int munmap(void *addr, size_t length)
{
	static int (*real)(void *, size_t);
	struct mapping *m = NULL;
	int rc;

	if (!real)
		real = (int (*)(void *, size_t))dlsym(RTLD_NEXT, "munmap");
	if (!inside) {
		pthread_mutex_lock(&lock);
		m = find(addr);
		if (m && m->at == addr)
			m->at = NULL;
		else
			m = NULL;
		pthread_mutex_unlock(&lock);
	}
	if (!m)
		return real(addr, length);
	inside = 1;
	rc = vmem_free(addr);
	inside = 0;
	return rc == 0 ? 0 : failed("vmem_free", rc);
}

EXPORT int msync(void *addr, size_t length, int flags)
{
	static int (*real)(void *, size_t, int);
	struct mapping *m = NULL;
	int rc;

	if (!real)
		real = (int (*)(void *, size_t, int))dlsym(RTLD_NEXT, "msync");
	if (!inside) {
		pthread_mutex_lock(&lock);
		m = find(addr);
		if (m && (size_t)(m->at + m->size - (char *)addr) < length)
			length = (size_t)(m->at + m->size - (char *)addr);
		pthread_mutex_unlock(&lock);
	}
	if (!m)
		return real(addr, length, flags);
	inside = 1;
	++synced;
	rc = vmem_sync(addr, length);
	inside = 0;
	return rc == 0 ? 0 : failed("vmem_sync", rc);
}

__attribute__((destructor)) static void say(void)
{
	fprintf(stderr, "shim: %lu mappings, %lu syncs\n", taken, synced);
}
