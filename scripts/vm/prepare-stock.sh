#!/bin/bash
# prepare-stock.sh 6.1|6.12 [--refresh]: downloads a stock Debian kernel and its headers and unpacks
# them in the cache.
#
# Installs nothing and needs no root. Prints the folder. Does nothing if the folder exists, unless
# --refresh is given. Exit 77 with a reason if the kernel is neither cached nor available (no apt,
# no network, no such package).
set -euo pipefail
. "$(dirname "$0")/common.sh"
line=${1:?usage: prepare-stock.sh 6.1|6.12 [--refresh]} refresh=${2:-}

mkdir -p "$cache"
exec 9>"$cache/.lock-$line"; flock 9   # two test runs at once must not unpack into the same folder
if [ -z "$refresh" ] && kernel_dir "$line"; then exit 0; fi
command -v apt-get >/dev/null || skip "stock kernel $line: not cached, and this system has no apt-get"

# Point releases disappear from the archive, so no version is written here: the meta-package names
# the current one.
resolve() {
  local meta
  for meta in "linux-image-$line-amd64" linux-image-amd64; do
    apt-cache depends "$meta" 2>/dev/null | awk '/Depends: linux-image-/{sub("linux-image-","",$2);print $2;exit}'
  done | grep -m1 "^${line//./\\.}\." || true
}
version=$(resolve)
if [ -z "$version" ] && [ "$(id -u)" = 0 ]; then note "apt-get update (package lists name no $line kernel)"; apt-get update -qq >&2 || true; version=$(resolve); fi
[ -n "$version" ] || skip "stock kernel $line: not cached, and the package lists of this system name none"

fresh=$(mktemp -d "$cache/.unpack-XXXXXX"); trap 'rm -rf "$fresh"' EXIT
mkdir "$fresh/debs" "$fresh/root"
download() { (cd "$fresh/debs" && apt-get -o APT::Sandbox::User=root download -qq "$@" >&2); }
note "downloading kernel $version and its headers"
base=${version%-amd64}
common=$(apt-cache depends "linux-headers-$version" | awk '/Depends: linux-headers-.*common/{print $2;exit}')
kbuild=$(apt-cache depends "linux-headers-$version" | awk '/Depends: linux-kbuild/{print $2;exit}')
download "linux-image-$version" "linux-headers-$version" "${common:-linux-headers-$base-common}" "${kbuild:-linux-kbuild-$base}" ||
  skip "stock kernel $line: not cached, and downloading $version failed"
for deb in "$fresh"/debs/*.deb; do dpkg -x "$deb" "$fresh/root"; done
# Packages of Debian 13 and newer have their modules in /usr/lib.
if [ ! -d "$fresh/root/lib/modules" ]; then mkdir -p "$fresh/root/lib" && mv "$fresh/root/usr/lib/modules" "$fresh/root/lib/"; fi

# Debian's header makefile includes its common part by absolute path; change it to the cache.
target=$cache/stock-$line
sed -i "s# /usr/src/# $target/usr/src/#" "$fresh/root/usr/src/linux-headers-$version/Makefile"
PATH=$PATH:/sbin:/usr/sbin depmod -b "$fresh/root" "$version"
rm -rf "$target"; mv "$fresh/root" "$target"
kernel_dir "$line"
