# shellcheck shell=bash
# Sourced by scripts that work in a clean system of a release of Debian or Ubuntu. mmdebstrap makes
# it from the archive that this machine's apt uses, if that has the release, else from mmdebstrap's
# default. It is kept as an archive in ${VMEM_CACHE:-~/.cache/vmem}/compilers for 30 days. This
# needs root, mounts, and the network the first time. The caller sets $work, its own folder, and
# defines skip_all REASON, which ends it.

cache=${VMEM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vmem}/compilers

need_clean_systems() {
  [ "$(id -u)" = 0 ] || skip_all "only root may make and enter a clean system"
  for tool in mmdebstrap zstd; do command -v $tool >/dev/null || skip_all "$tool is not installed (scripts/setup.sh package)"; done
  unshare --mount --pid --fork true 2>/dev/null || skip_all "mounts in a namespace of one's own are not permitted here (unshare: CAP_SYS_ADMIN)"
  mkdir -p "$work" "$cache"
  exec 9>"$work/lock"; flock -n 9 || skip_all "another run is at work in $work"
  find "$cache" -name '*.tar.zst' -mtime +30 -delete
  find "$cache" -name '.fresh-*' -mmin +120 -delete
}

# apt's settings for reaching the archive from here, such as proxies.
apt_reaches() { apt-config dump Acquire | grep -E '^Acquire::(http|https|Retries|ForceIPv4|Check-Valid-Until)\b.* "..*";$'; }

# vendor_of RELEASE: Debian or Ubuntu.
vendor_of() { if cut -d, -f3 /usr/share/distro-info/ubuntu.csv 2>/dev/null | grep -qx "$1"; then echo Ubuntu; else echo Debian; fi; }
# archive_of VENDOR: the archive where this machine's apt gets that vendor's packages, or nothing.
archive_of() { apt-get indextargets --format '$(ORIGIN) $(REPO_URI) $(COMPONENT) $(RELEASE)' 'Created-By: Packages' 2>/dev/null | awk -v vendor="$1" '$1 == vendor && $3 == "main" && $4 !~ /security/ {print $2; exit}'; }

# ubuntu_keys FOLDER: puts the keys of Ubuntu's archive there. Debian has a package of them since
# 13; on an older release apt downloads that package and checks it with Debian's own keys.
ubuntu_keys() (
  keys=usr/share/keyrings/ubuntu-archive-keyring.gpg
  cd "$1" && chmod 755 . || exit 1
  [ ! -r "/$keys" ] || { cp "/$keys" .; exit; }
  mkdir -p lists/partial cache/archives/partial
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(archive_of Debian) trixie main" >sources.list
  apt=(timeout -k 5 300 apt-get -qq -o "Dir::State=$PWD" -o "Dir::Cache=$PWD/cache" -o "Dir::Etc::sourcelist=$PWD/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Acquire::Languages=none)
  "${apt[@]}" update && "${apt[@]}" download ubuntu-keyring && dpkg-deb -x ubuntu-keyring_*.deb . && mv "$keys" .
)

# clean_system RELEASE PACKAGES: prints the archive that contains it, made if needed, or why it
# failed.
clean_system() {
  local release=$1 include=$2 tarball fresh vendor keys options=()
  tarball=$cache/$release-$(sha256sum <<<"$include" | cut -c1-12).tar.zst
  exec 6>"$cache/.lock-$release"; flock 6
  if [ ! -s "$tarball" ]; then
    # The folder must be readable by the user that apt downloads as.
    vendor=$(vendor_of "$release"); keys=$(mktemp -d /tmp/vmem-keys.XXXXXX) || return 1
    if [ "$vendor" = Ubuntu ]; then
      ubuntu_keys "$keys" >"$work/$release.log" 2>&1 </dev/null || { rm -rf "$keys"; echo "no keys of Ubuntu's archive:"; tail -3 "$work/$release.log"; return 1; }
      options=("--keyring=$keys/ubuntu-archive-keyring.gpg" "--components=main,universe")
    fi
    apt_reaches >"$work/apt.conf"
    fresh=$(mktemp "$cache/.fresh-XXXXXX.tar") || return 1
    # shellcheck disable=SC2046  # no archive: mmdebstrap knows one
    timeout -k 5 900 mmdebstrap --mode=root --variant=apt "${options[@]}" --include="$include" --aptopt='Acquire::Languages "none"' --aptopt="$work/apt.conf" --aptopt='APT::Install-Recommends "false"' \
      --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --format=tar "$release" "$fresh" $(archive_of "$vendor") >"$work/$release.log" 2>&1 </dev/null ||
      { rm -rf "$fresh" "$keys"; tail -3 "$work/$release.log"; return 1; }
    rm -rf "$keys"
    zstd -q -3 -T0 --rm -f "$fresh" -o "$fresh.zst" && mv "$fresh.zst" "$tarball" || { rm -f "$fresh"*; return 1; }
  fi
  exec 6>&-
  echo "$tarball"
}

# unpack TARBALL ROOT: unpacks a system to work in. Removes a truncated archive, so that the next
# run makes it again.
unpack() {
  rm -rf --one-file-system "$2" && mkdir -p "$2" || return 1
  tar -I zstd -xf "$1" -C "$2" --exclude='./dev/*' || { rm -f "$1"; return 1; }
  mkdir -p "$2"/{src,dev,proc,sys}
}

# copy_sources ROOT: copies the files of the working tree, but nothing built, to /src there.
copy_sources() { rm -rf "$1/src" && mkdir "$1/src" && git ls-files --cached --others --exclude-standard -z | tar -c --null --files-from=- --ignore-failed-read 2>/dev/null | tar -x -C "$1/src"; }

# inside ROOT COMMAND..: runs it in its own mount and process namespaces, which end with it.
inside() {
  unshare --mount --pid --fork --kill-child bash -c 'set -e; root=$1; shift; mount --make-rprivate /
    mount --rbind /dev "$root/dev"; mount -t proc proc "$root/proc"; mount -t sysfs sys "$root/sys"
    exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 TMPDIR=/tmp chroot "$root" "$@"' inside "$@" 6>&- 9>&-
}
