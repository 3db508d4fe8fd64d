#!/bin/bash
# mkinitrd.sh OUT KERNEL_DIR PLAN CONFIG [--in-tree MODULE].. [--load|--helper FILE.ko[:params]].. [--file HOST:GUEST].. [PROGRAM]..
#
# Makes the initial root of a test guest: busybox, init.sh, the kernel modules for the disks, the
# modules under test (--load: removed after the programs), and the programs with all shared
# libraries they need. PLAN is the script that init runs, CONFIG its settings.
set -euo pipefail
. "$(dirname "$0")/common.sh"
out=$1 kernel=$2 plan=$3 config=$4; shift 4
root=$(mktemp -d); chmod 755 "$root"; trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{bin,dev,proc,sys,tmp,modules,load,lib,lib64,data,etc}
busybox=$(command -v busybox) || skip "busybox is not installed (package busybox-static)"
cp "$busybox" "$root/bin/busybox"; ln -s busybox "$root/bin/sh"
cp "$here/init.sh" "$root/init"; chmod +x "$root/init"
cp "$plan" "$root/plan"; cp "$config" "$root/config"
printf 'root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/data:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\nnobody:x:65534:\n' >"$root/etc/group"

in_tree() {
  local version file name
  [ -d "$kernel/lib/modules" ] || return 0   # the debug kernel has everything built in
  version=$(find "$kernel/lib/modules" -mindepth 1 -maxdepth 1 -printf '%f\n' | grep -v cloud | head -1)
  # Prints nothing for a module that is built into this kernel or missing.
  { PATH=$PATH:/sbin:/usr/sbin modprobe -d "$kernel" -S "$version" --show-depends "$1" 2>/dev/null || true; } |
    awk '$1 == "insmod" {print $2}' |
    while read -r file; do
      name=$(basename "$file"); name=${name%.xz}; name=${name%.zst}
      [ -f "$root/modules/$name" ] && continue
      case $file in *.xz) xz -dc "$file" ;; *.zst) zstd -qdc "$file" ;; *) cat "$file" ;; esac >"$root/modules/$name"
      echo "$name" >>"$root/modules.order"
    done
}
# install FILE GUEST_PATH: installs a file, for a program also its shared libraries. Strips debug
# information: it is most of a test program's size and would all be unpacked into the guest's
# memory.
install() {
  local target=$root$2 library
  mkdir -p "${target%/*}"; cp -L "$1" "$target"
  [ "$(head -c4 "$1" | tr -d '\0')" = $'\177ELF' ] || return 0
  strip --strip-debug "$target" 2>/dev/null || true
  { ldd "$1" 2>/dev/null | grep -oE '/[^ ]+' || true; } | while read -r library; do
    mkdir -p "$root${library%/*}"; cp -Ln "$library" "$root$library"
  done
}
for name in virtio_pci virtio_blk ext4 crc32c_generic; do in_tree "$name"; done
while [ $# -gt 0 ]; do
  case $1 in
    --in-tree) in_tree "$2"; shift 2 ;;
    --load | --helper) file=${2%%:*} args=; [ "$file" = "$2" ] || args=${2#*:}
      cp "$file" "$root/load/"; echo "${1#--} ${file##*/} $args" >>"$root/load.order"; shift 2 ;;
    --file) install "${2%%:*}" "${2#*:}"; shift 2 ;;
    *) install "$1" "/bin/${1##*/}"; chmod 755 "$root/bin/${1##*/}"; shift ;;
  esac
done
(cd "$root" && find . -print0 | cpio --null -o -H newc -R 0:0 --quiet | gzip -1) >"$out"
