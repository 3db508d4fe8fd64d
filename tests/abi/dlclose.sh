#!/bin/bash
# dlclose of the library while threads access regions: the library and the regions stay, and later
# stores reach the file. Tested with the shared library, and with a plugin that contains the static
# one. Runs each VMEM_EXIT_RUNS times.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$(realpath "${BUILD:-build}"); work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-dlclose.XXXXXX"); trap 'rm -rf "$work"' EXIT
if grep -q -e '-fsanitize' "$build/flags" 2>/dev/null; then echo "skipped: a sanitized library cannot be opened by a program that is not"; exit 77; fi
runs=${VMEM_EXIT_RUNS:-$([ -n "${VMEM_LONG:-}" ] && echo 1000 || echo 10)}

cat >"$work/app.c" <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vmem/vmem.h>

enum { SIZE = 16 << 20, PAGE = 4096 };
static volatile unsigned long *words;
static volatile int rounds;

static void *store(void *unused)
{
	for (;;) {
		for (size_t at = PAGE / 8; at < SIZE / 8; at += PAGE / 8)
			words[at] = at;
		++rounds;
	}
	return unused;
}

/* The library is opened, used, closed, and used on: returns from main with a thread that stores. */
static int child(const char *library, const char *path)
{
	void *const l = dlopen(library, RTLD_NOW | RTLD_LOCAL), *p;
	int (*set)(const char *, const char *);
	int (*map)(void **, size_t, const char *, uint64_t, unsigned);
	pthread_t thread;
	int rc, before;

	if (!l)
		return fprintf(stderr, "%s\n", dlerror()), 2;
	*(void **)&set = dlsym(l, "vmem_set");
	*(void **)&map = dlsym(l, "vmem_map");
	if (!set || !map || set("host_budget", "8MiB") || set("block_size", "64KiB") || set("device", "none"))
		return 3;
	rc = map(&p, SIZE, path, 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
	if (rc == -1 || rc == -38 || rc == -95)
		return 77;
	if (rc)
		return 4;
	words = p;
	if (pthread_create(&thread, NULL, store, NULL))
		return 5;
	while (rounds < 1)
		usleep(100);
	if (dlclose(l))
		return 6;
	/* Blocks come and go as before. */
	for (before = rounds; rounds < before + 2;)
		usleep(100);
	if (!dlopen(library, RTLD_NOW | RTLD_NOLOAD))
		return 7;
	words[0] = 42;
	return 0;
}

int main(int argc, char **argv)
{
	unsigned long word = 0;
	int status = -1, fd = open(argv[2], O_RDWR | O_CREAT | O_TRUNC, 0600);
	const pid_t pid = argc == 3 && fd >= 0 && !ftruncate(fd, SIZE) ? fork() : -1;

	if (pid == 0)
		return child(argv[1], argv[2]);
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return 8;
	if (WIFSIGNALED(status))
		return fprintf(stderr, "ended by signal %d\n", WTERMSIG(status)), 9;
	if (WEXITSTATUS(status))
		return WEXITSTATUS(status);
	for (size_t at = 0; at < SIZE / 8; at += PAGE / 8)
		if (pread(fd, &word, 8, (off_t)at * 8) != 8 || word != (at ? at : 42))
			return fprintf(stderr, "word %zu is %lu\n", at, word), 10;
	return 0;
}
C
${CC:-cc} -std=gnu99 -O1 -Wall -Wextra -Werror -Iinclude "$work/app.c" -o "$work/app" -ldl -pthread
libs=(-luring -lnuma -llz4 -lzstd -lxxhash -ldl -lrt -pthread)
# The program decides what a plugin exports: this one exports what the library does.
${CXX:-g++} -shared -o "$work/plugin.so" -Wl,--whole-archive "$build/libvmem.a" -Wl,--no-whole-archive "${libs[@]}"

for library in "$build/libvmem.so" "$work/plugin.so"; do
  for ((run = 1; run <= runs; ++run)); do
    status=0; timeout -k 3 120 "$work/app" "$library" "$work/file" || status=$?
    if [ "$status" = 77 ]; then echo "skipped: no way to trap absent blocks here"; exit 77; fi
    [ "$status" = 0 ] || { echo "FAILED: ${library##*/}, run $run: status $status"; exit 1; }
  done
  echo "${library##*/}: closed $runs times while a thread stores"
done
