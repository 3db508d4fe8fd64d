#!/bin/bash
# plot-bench.sh [--check] | FIGURES.json [PLOT.svg]: draws figures of benchmarks as SVG. It needs python3 alone.
#
# Without arguments it draws the plots of docs/benchmarks.md from docs/benchmarks/*.json; --check says which of them are not
# those of the data. With a file it draws what a benchmark wrote with --json: libvmem and mmap as shares of the limit.
set -euo pipefail
command -v python3 >/dev/null || { echo "plot-bench: python3 is not installed; scripts/setup.sh bench installs it"; exit 77; }
here=$(cd "$(dirname "$0")" && pwd)
[ $# -gt 0 ] && [ "$1" != --check ] || cd "$here/.."
exec python3 "$here/lib/plot_bench.py" "$@"
