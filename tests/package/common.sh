# shellcheck shell=bash
# Sourced by the tests of this folder, in the repository's top folder. Each test is a step with a name; they are counted.
build=${BUILD:-build}
passed=0 failed=0 skipped=0
skip() { echo "skipped: $1"; exit 77; }
need() {
  local tool
  for tool in "$@"; do command -v "$tool" >/dev/null || skip "$tool is not installed (scripts/setup.sh package)"; done
}
# step NAME COMMAND..: passes if the command exits with 0; otherwise shows its output.
step() {
  local name=$1 said began=$SECONDS; shift
  if said=$("$@" 2>&1); then printf 'ok   %s (%d s)\n' "$name" $((SECONDS - began)); passed=$((passed + 1))
  else printf 'FAIL %s\n' "$name"; tail -40 <<<"$said" | sed 's/^/       /'; failed=$((failed + 1)); return 1; fi
}
step_skipped() { printf 'skip %s\n       skipped: %s\n' "$1" "$2"; skipped=$((skipped + 1)); }
finish() { echo "$passed passed, $failed failed, $skipped skipped"; [ $failed = 0 ]; exit; }

# Makes the packages of the current build, once for all tests that run side by side. They get their
# own folder, since build/deb may hold packages of another compilation (FRESH=1).
make_packages() {
  need dpkg-buildpackage dh dh_dkms dh_python3 flock
  mkdir -p "$build"
  flock "$build/.deb.lock" make BUILD="$build" DEB="$build/deb-test" NO_SETUP=1 deb >"$build/deb.log" 2>&1 || { tail -40 "$build/deb.log"; echo "make deb failed"; exit 1; }
  debs=$(realpath "$build/deb-test")
}
