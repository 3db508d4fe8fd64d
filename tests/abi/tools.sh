#!/bin/bash
# A program that uses the library, under tools that watch programs. vmem_init refuses valgrind with
# a message, and SIGTERM ends the program there too. strace and gdb work.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$(realpath "${BUILD:-build}"); work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-tools.XXXXXX"); trap 'rm -rf "$work"' EXIT
if grep -q -e '-fsanitize' "$build/flags" 2>/dev/null; then echo "skipped: a sanitized library cannot be opened by a program that is not"; exit 77; fi

cat >"$work/program.c" <<'C'
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <vmem/vmem.h>
int main(int argc, char **argv)
{
	const size_t size = 64 << 20;
	char *p = NULL;
	int rc = vmem_set("host_budget", "16MiB") || vmem_set("device", "none") ? -1 : vmem_init();
	printf("init %d %s\n", rc, rc ? vmem_last_error() : "");
	fflush(stdout);
	if (argc > 1)
		pause();
	if (rc == -EPERM || rc == -ENOSYS)
		return 77;
	if (rc)
		return rc == -ENOTSUP ? 3 : 1;
	if (vmem_alloc((void **)&p, size, VMEM_HOST_ONLY))
		return 1;
	memset(p, 7, size);
	for (size_t at = 0; at < size; at += 4096)
		if (p[at] != 7)
			return 2;
	return vmem_free(p) ? 1 : 0;
}
C
"${CC:-gcc}" -g -O1 -I include "$work/program.c" -o "$work/program" -L "$build" -lvmem -Wl,-rpath,"$build"
plain=0; "$work/program" >"$work/plain" || plain=$?
[ $plain != 77 ] || { echo "skipped: accesses cannot be trapped here"; exit 77; }
[ $plain = 0 ] || { echo "FAILED: without any tool: $(cat "$work/plain")"; exit 1; }

fail=0 tried=0
for tool in strace gdb; do
  command -v $tool >/dev/null || { echo "$tool is not installed (scripts/setup.sh tools)"; continue; }
  case $tool in
    strace) words=(strace -f -o /dev/null) ;;
    gdb) words=(gdb -q -batch -ex run -ex 'quit $_exitcode' --args) ;;
  esac
  timeout -k 3 300 "${words[@]}" true >/dev/null 2>&1 || { echo "$tool may not trace here"; continue; }
  tried=1
  timeout -k 3 300 "${words[@]}" "$work/program" >"$work/said" 2>&1 </dev/null || { echo "FAILED under $tool ($?): $(cat "$work/said")"; fail=1; }
done
if command -v valgrind >/dev/null && timeout -k 3 300 valgrind -q --tool=none true; then
  tried=1
  rc=0; timeout -k 3 300 valgrind -q --tool=none "$work/program" >"$work/said" 2>&1 || rc=$?
  [ $rc = 3 ] && grep -q 'init -95 valgrind' "$work/said" || { echo "FAILED under valgrind ($rc): $(cat "$work/said")"; fail=1; }
  mkfifo "$work/told"
  timeout -k 3 300 valgrind -q --tool=none "$work/program" waits >"$work/told" 2>/dev/null & timer=$!
  read -r _ <"$work/told"
  kill -TERM "$(pgrep -P $timer)"
  rc=0; wait $timer || rc=$?
  [ $rc = 143 ] || { echo "FAILED: SIGTERM under valgrind: $rc"; fail=1; }
else
  echo "valgrind is not installed (scripts/setup.sh tools)"
fi
[ $tried = 1 ] || { echo "skipped: no such tool is installed (scripts/setup.sh tools)"; exit 77; }
exit $fail
