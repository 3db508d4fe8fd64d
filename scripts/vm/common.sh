# shellcheck shell=bash
# Sourced by the scripts of this folder: where kernels are kept, and how they are named.
#
# Kernel names: "6.1" and "6.12" are Debian's stock kernels of that line, "debug" is the KASAN +
# lockdep kernel. A prepared kernel is a folder: a stock one is an unpacked root (boot/,
# lib/modules/, usr/src/), the debug one contains vmlinux-dbg and kdbg-build/.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
cache=${VMEM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vmem}
build=${BUILD:-$repo/build}
case $build in /*) ;; *) build=$repo/$build ;; esac

note() { echo "vm: $*" >&2; }
die() { note "$*"; exit 1; }
# The test runner counts exit 77 as skipped; the reason is the last line of standard output.
skip() { echo "skipped: $*"; exit 77; }

# Prints the folder of a kernel that is already prepared; fails silently otherwise.
kernel_dir() {
  case $1 in
    debug)
      local d=${VMEM_DEBUG_KERNEL:-$cache/debug-6.12}
      [ -f "$d/vmlinux-dbg" ] && echo "$d" ;;
    *)
      local d=$cache/stock-$1
      compgen -G "$d/boot/vmlinuz-*" >/dev/null && compgen -G "$d/lib/modules/*/modules.dep" >/dev/null && echo "$d" ;;
  esac
}
# Unpacks a debug kernel from beside the repository into the cache, once. It unpacks to a temporary
# name and renames: an interrupted run must not leave half a kernel.
unpack_debug_kernel() {
  local archive=$repo/../shared/kernel/debug-kernel-6.12.tar.zst fresh found
  [ -z "${VMEM_DEBUG_KERNEL:-}" ] || [ "$VMEM_DEBUG_KERNEL" = "$cache/debug-6.12" ] || return 1
  [ -f "$archive" ] && command -v zstd >/dev/null && mkdir -p "$cache" || return 1
  exec 8>"$cache/.lock-debug"; flock 8
  if ! kernel_dir debug >/dev/null; then
    fresh=$(mktemp -d "$cache/.debug-XXXXXX") || return 1
    if tar -I zstd -xf "$archive" -C "$fresh" && found=$(find "$fresh" -maxdepth 2 -name vmlinux-dbg -printf '%h\n' | head -1) && [ -n "$found" ]; then
      rm -rf "$cache/debug-6.12"; mv "$found" "$cache/debug-6.12"
    else note "the debug kernel beside the repository could not be unpacked"; fi
    rm -rf "$fresh"
  fi
  exec 8>&-
  kernel_dir debug >/dev/null
}
kernel_image() { if [ -f "$1/vmlinux-dbg" ]; then echo "$1/vmlinux-dbg"; else compgen -G "$1/boot/vmlinuz-*" | tail -1; fi; }
# Prints the KDIR for `make -C kmod KDIR=`.
kernel_headers() {
  if [ -d "$1/kdbg-build" ]; then echo "$1/kdbg-build"; else compgen -G "$1/usr/src/linux-headers-*-amd64" | tail -1; fi
}
