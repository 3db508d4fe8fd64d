#!/bin/bash
# Tests the packages in a clean system of this machine's release: installed by apt, used by a
# program, a project, a tool and Python, the module built by DKMS, and purged without a trace. Needs
# root and mounts; it changes nothing of this system.
#
# The clean system (a minimal one, with compilers and kernel headers; 200 MB) is made once with
# mmdebstrap from the archive that this machine's apt uses. It is kept in
# ${VMEM_CACHE:-~/.cache/vmem}/chroot for 30 days, with the dependencies of the packages: a later
# run needs no network.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
. tests/package/common.sh
need mmdebstrap zstd
[ -z "${CI:-}" ] || [ -n "${VMEM_LONG:-}" ] || skip "it takes six minutes with the clean system that it makes: scripts/nightly.sh runs it"
[ "$(id -u)" = 0 ] || skip "only root may make and enter a clean system"
# Run in namespaces of its own, so that mounts and processes end with this script in any case.
if [ -z "${VMEM_CHROOT_INSIDE:-}" ]; then
  unshare --mount --pid --fork true 2>/dev/null || skip "mounts in a namespace of one's own are not permitted here (unshare: CAP_SYS_ADMIN)"
  VMEM_CHROOT_INSIDE=1 exec unshare --mount --pid --fork --kill-child "$0" "$@"
fi
make_packages
# shellcheck disable=SC1091
id=$(. /etc/os-release && echo "$ID") codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
case $id in debian) headers=linux-headers-amd64 ;; ubuntu) headers=linux-headers-generic ;;
  *) skip "packages are made for Debian and Ubuntu; this is ${id:-unknown}" ;; esac
version=$(dpkg-deb -f "$debs"/libvmem-tier1_*.deb Version); upstream=${version%-*}
names="libvmem-tier1 libvmem-tier-dev python3-vmem vmem-tier-dkms vmem-tier-tools"
root=$(realpath "$build")/deb-root
cache=${VMEM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vmem}/chroot

# ---- a clean system ------------------------------------------------------------------------------------------------------
# Prints sources.list lines for the distribution itself, from apt's configuration.
sources() {
  apt-get indextargets --format '$(ORIGIN) $(CODENAME) $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
    awk -v id="$id" -v codename="$codename" 'tolower($1) == id && ($2 == codename || index($2, codename "-") == 1) && $5 ~ /^(main|universe)$/ && !seen[$0]++ {print "deb", $3, $4, $5}'
}
lines=$(sources)
[ -n "$lines" ] || { apt-get update -qq >/dev/null 2>&1; lines=$(sources); }
[ -n "$lines" ] || skip "apt has no source of $id ${codename:-(no codename)}: nothing to make a clean system from"
include=g++,cmake,make,openssl,pkg-config,$headers
tarball=$cache/$id-$codename-$(printf '%s\n' "$lines" "$include" "$(for deb in "$debs"/*.deb; do dpkg-deb -f "$deb" Depends; done)" | sha256sum | cut -c1-12).tar.zst

make_clean_system() {
  local fresh log=$build/deb-chroot.log
  mkdir -p "$cache" && fresh=$(mktemp "$cache/.fresh-XXXXXX.tar") || return 1
  find "$cache" -name '.fresh-*' -mmin +120 -delete
  # How apt reaches the archive from here: proxies etc.
  apt-config dump Acquire | grep -E '^Acquire::(http|https|Retries|ForceIPv4|Check-Valid-Until)\b.* "..*";$' >"$build/deb-apt.conf"
  # The packages are copied in only so that their dependencies are downloaded.
  local hook='cp "$DEBS"/*.deb "$1/tmp/" && rm -f "$1"/var/cache/apt/archives/*.deb && chroot "$1" sh -c "apt-get -y --no-install-recommends --download-only install /tmp/*.deb" && rm -f "$1"/tmp/*.deb'
  if ! DEBS=$debs mmdebstrap --mode=root --variant=minbase --include="$include" --skip=cleanup/apt --aptopt='Acquire::Languages "none"' --aptopt="$build/deb-apt.conf" \
    --aptopt='APT::Install-Recommends "false"' --customize-hook="$hook" --format=tar "$codename" "$fresh" "$lines" >"$log" 2>&1; then
    rm -f "$fresh"; tail -5 "$log"; return 1
  fi
  zstd -q -3 -T0 --rm -f "$fresh" -o "$fresh.zst" && mv "$fresh.zst" "$tarball" && find "$cache" -name '*.tar.zst' -mtime +30 -delete
}
find "$tarball" -mtime +30 -delete 2>/dev/null
if [ ! -s "$tarball" ]; then
  began=$SECONDS
  said=$(make_clean_system) || skip "no clean system could be made: $(tr '\n' ' ' <<<"$said")"
  echo "a clean $id $codename was made ($((SECONDS - began)) s): $tarball"
fi
rm -rf --one-file-system "$root" && mkdir -p "$root" && tar -I zstd -xf "$tarball" -C "$root" || { echo "$tarball cannot be unpacked"; exit 1; }
trap 'umount -R "$root"/proc "$root"/sys "$root"/dev 2>/dev/null; rm -rf --one-file-system "$root"' EXIT
mount --make-rprivate / && mount -t proc proc "$root/proc" && mount --bind /sys "$root/sys" && mount -t tmpfs -o mode=755 tmpfs "$root/dev" ||
  skip "proc, sys and dev cannot be mounted in a clean system here"
mkdir "$root/dev/shm" && chmod 1777 "$root/dev/shm" && ln -s /proc/self/fd "$root/dev/fd"
for node in null zero full random urandom tty; do touch "$root/dev/$node" && mount --bind "/dev/$node" "$root/dev/$node" || skip "/dev/$node cannot be had in a clean system here"; done
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"; chmod +x "$root/usr/sbin/policy-rc.d"
inside() { env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 HOME=/root TMPDIR=/var/tmp DEBIAN_FRONTEND=noninteractive chroot "$root" "$@"; }
as_nobody() { inside setpriv --reuid=65534 --regid=65534 --clear-groups --bounding-set=-all --inh-caps=-all "$@"; }

# ---- install -------------------------------------------------------------------------------------------------------------
mkdir "$root/debs" "$root/try"; cp "$debs"/*.deb "$root/debs/"; chmod 1777 "$root/try"
apt_get() { inside apt-get -y -qq -o Dpkg::Use-Pty=0 -o APT::Keep-Downloaded-Packages=true "$@"; }
# Install the dependencies that apt would add first, so that files that our packages leave behind
# can be told apart.
install_dependencies() {
  local wanted
  wanted=$(inside sh -c 'apt-get install -s --no-install-recommends /debs/*.deb' | awk -v ours=" $names " '/^Inst / && !index(ours, " " $2 " ") {print $2}')
  echo "apt wants: $wanted"
  # shellcheck disable=SC2086  # names
  [ -z "$wanted" ] || apt_get --no-install-recommends install $wanted || { apt_get update && apt_get --no-install-recommends install $wanted; }
}
files() { inside find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /try -o -path /debs -o -path /tmp -o -path /var/tmp -o -path /var/cache -o -path /var/log -o -path /var/lib/apt -o -path /var/lib/dpkg \) -prune -o -print | sort; }
install_packages() {
  local name
  inside sh -c 'apt-get -y -qq -o Dpkg::Use-Pty=0 install --no-install-recommends /debs/*.deb' || return 1
  for name in $names; do [ "$(inside dpkg-query -W -f '${Status} ${Version}' "$name")" = "install ok installed $version" ] || { echo "$name is not installed"; return 1; }; done
  inside dpkg --audit && inside apt-get -qq check && inside dpkg --verify $names
}

# ---- use -----------------------------------------------------------------------------------------------------------------
# The example that the development package brings: a region of 256 MiB over a budget of 64.
pkg_config_program() {
  inside sh -ec 'cd /try; g++ -std=c++20 /usr/share/doc/libvmem-tier-dev/examples/hello.cpp -o hello $(pkg-config --cflags --libs vmem); readelf -d hello' | grep 'NEEDED.*\[libvmem-tier\.so\.1\]' || return 1
  [ "$(inside pkg-config --modversion vmem)" = "$upstream" ] || { echo "pkg-config says version $(inside pkg-config --modversion vmem), the package $upstream"; return 1; }
}
# Correct sums alone could come from memory: some data must have gone to the SSD and come back.
hello() { "$@" /try/hello | tee "$root/try/said" && awk '/^sum 562949936644096, / && $3 > 0 && $9 > 0 {good = 1} END {exit !good}' "$root/try/said"; }
cmake_project() {
  cat >"$root/try/app.c" <<'C'
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <vmem/vmem.h>
enum { MIB = 1 << 20, REGION = 128 * MIB };
static int failed(const char *what) { printf("%s: %s\n", what, vmem_last_error()); return 1; }
int main(void) {
  void *region; uint64_t *words, i; struct vmem_residency where;
  if (vmem_set("host_budget", "32MiB")) return failed("vmem_set");
  if (vmem_alloc(&region, REGION, VMEM_HOST_ONLY)) return failed("vmem_alloc");
  words = region;
  for (i = 0; i < REGION / 8; i++) words[i] = i * 0x9e3779b97f4a7c15u;
  memset(&where, 0, sizeof where); where.size = sizeof where;
  if (vmem_query(region, REGION, &where)) return failed("vmem_query");
  if (where.host_bytes > 32 * MIB || where.ssd_bytes < 64 * MIB) return printf("%llu bytes in memory, %llu on the SSD\n", (unsigned long long)where.host_bytes, (unsigned long long)where.ssd_bytes), 1;
  for (i = 0; i < REGION / 8; i++) if (words[i] != i * 0x9e3779b97f4a7c15u) return printf("word %llu is wrong\n", (unsigned long long)i), 1;
  if (vmem_free(region)) return failed("vmem_free");
  printf("right: %d MiB over %d MiB\n", REGION / MIB, 32);
  return 0;
}
C
  cat >"$root/try/CMakeLists.txt" <<'C'
cmake_minimum_required(VERSION 3.16)
project(app C CXX)
find_package(vmem 1.0 REQUIRED COMPONENTS shared OPTIONAL_COMPONENTS static)
add_executable(app app.c)
target_link_libraries(app vmem::vmem)
if(vmem_static_FOUND)
  add_executable(app_static app.c)
  target_link_libraries(app_static vmem::static)
endif()
C
  # Put /bin first: CMake then finds the package through the link from /lib.
  inside sh -ec 'cd /try; export PATH=/bin:/usr/bin; cmake -S . -B cmake && cmake --build cmake; readelf -d cmake/app | grep -F "[libvmem-tier.so.1]"; cmake/app' | tee "$root/try/said"
  grep -q '^right: 128 MiB over 32 MiB$' "$root/try/said"
}
# The static library needs nothing of the CUDA toolkit, wherever it was built.
static_program() {
  inside sh -ec 'cd /try; cc -c app.c; g++ app.o -o static -Wl,-Bstatic -lvmem-tier -Wl,-Bdynamic $(pkg-config --static --libs vmem | sed s/-lvmem-tier//)
    for each in static cmake/app_static; do ! readelf -d $each | grep vmem; ./$each; done' | tee "$root/try/said"
  [ "$(grep -c '^right: 128 MiB over 32 MiB$' "$root/try/said")" = 2 ]
}
tools() {
  inside vmemctl --version | grep -F " $upstream" && inside vmemctl doctor | tee "$root/try/said" && grep -q '^libvmem works here$' "$root/try/said" || return 1
  inside sh -ec 'for page in man1/vmemctl.1 man3/libvmem-tier.3 man7/vmem-settings.7; do gzip -dc /usr/share/man/$page.gz | grep -q "^\.TH"; done'
}
python() {
  cat >"$root/try/use.py" <<'P'
import importlib.metadata, os, sys
import vmem
assert vmem.__file__.startswith("/usr/lib/python3/dist-packages/"), vmem.__file__
assert importlib.metadata.version("vmem") == vmem.__version__ == sys.argv[1], (importlib.metadata.version("vmem"), vmem.__version__)
assert "/libvmem-tier.so.1" in open("/proc/self/maps").read() and not os.path.exists(os.path.dirname(vmem.__file__) + "/libvmem-tier.so.1")
vmem.configure(host_budget="32MiB")
size = 128 << 20
with vmem.alloc(size) as region:
    view = region.memoryview()
    for at in range(0, size, 4096): view[at] = at >> 12 & 255
    where = region.query()
    assert where.host_bytes <= 32 << 20 and where.ssd_bytes >= 64 << 20, where
    assert all(view[at] == at >> 12 & 255 for at in range(0, size, 4096))
    del view
print("right")
P
  inside python3 /try/use.py "$upstream" | grep '^right$' && as_nobody python3 /try/use.py "$upstream" | grep '^right$'
}
# ---- the module ----------------------------------------------------------------------------------------------------------
kernel=$(cd "$root/lib/modules" && ls | sort -V | tail -1)
module() {
  inside dkms status -m vmem -v "$upstream" | tee "$root/try/said"; grep -q "^vmem/$upstream" "$root/try/said" || { echo "DKMS does not know vmem/$upstream"; return 1; }
  inside test -e "/lib/modules/$kernel/updates/dkms/vmem.ko" || inside dkms install -m vmem -v "$upstream" -k "$kernel" || { inside sh -c 'cat /var/lib/dkms/vmem/*/build/make.log'; return 1; }
  inside modinfo -F vermagic "/lib/modules/$kernel/updates/dkms/vmem.ko" | grep "^$kernel " || return 1
  # The module is signed with the key that docs/install.md says to enrol.
  inside modinfo -F signer "/lib/modules/$kernel/updates/dkms/vmem.ko" | grep -i 'DKMS' && inside openssl x509 -inform DER -in /var/lib/dkms/mok.pub -noout -subject || { echo "the module is not signed by DKMS's key"; return 1; }
}
permissions() {
  inside getent group vmem && inside grep -q 'GROUP="vmem", MODE="0660"' /usr/lib/udev/rules.d/60-vmem.rules && inside dpkg-query -W -f '${Conffiles}' vmem-tier-dkms | grep /etc/modprobe.d/vmem.conf
}
# ---- and gone ------------------------------------------------------------------------------------------------------------
purge() {
  local left
  # shellcheck disable=SC2086  # names
  inside apt-get -y -qq -o Dpkg::Use-Pty=0 purge $names || return 1
  # shellcheck disable=SC2086
  left=$(inside dpkg-query -W -f '${Package} ${Status}\n' $names 2>/dev/null | grep -v 'not-installed$'); [ -z "$left" ] || { echo "dpkg still knows: $left"; return 1; }
  left=$(inside sh -c 'ls /var/lib/dpkg/info' | grep -E "^($(tr ' ' '|' <<<"$names"))[.:]"); [ -z "$left" ] || { echo "in dpkg's folder: $left"; return 1; }
  # Not ours: DKMS's key and its certificate, depmod's modules.*, adduser's lock, the backup copies
  # (with a -) of the group tools.
  left=$(comm -13 "$root/try/before" <(files) | grep -vE '^(/var/lib/dkms/mok\.(key|pub)|(/usr)?/lib/modules/[^/]*/modules\.[a-z.]*|/run/adduser|/etc/(group|gshadow|passwd|shadow|subuid|subgid)-|(/usr)?/lib/modules/[^/]*/updates(/dkms)?)$')
  [ -z "$left" ] || { echo "left behind:"; echo "$left"; return 1; }
  left=$(comm -23 "$root/try/before" <(files)); [ -z "$left" ] || { echo "gone, and not ours:"; echo "$left"; return 1; }
  ! inside test -e /dev/shm/vmem-0 || [ -z "$(inside find /dev/shm/vmem-0 -type f)" ] || { echo "in /dev/shm:"; inside find /dev/shm; return 1; }
}

step "apt resolves and installs what they depend on" install_dependencies || finish
files >"$root/try/before"
step "apt installs the five packages" install_packages || finish
if step "a C++ program by pkg-config" pkg_config_program; then
  step "it runs: a region four times its budget, as root" hello inside
  step "the same as an ordinary user" hello as_nobody
fi
step "a C project by CMake's find_package, run: four times its budget" cmake_project
step "the static library, or what it lacks" static_program
step "vmemctl, doctor, manual pages" tools
step "Python: four times its budget, as root and as an ordinary user" python
step "DKMS builds and signs the module for $kernel" module
step "group, udev rule and modprobe's file" permissions
step "purged: nothing is left" purge
finish
