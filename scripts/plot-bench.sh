#!/bin/bash
# plot-bench.sh [--check] | FIGURES.json [PLOT.svg]: draws benchmark figures as SVG. It needs only
# python3.
#
# Without arguments it draws the plots of docs/benchmarks.md from docs/benchmarks/*.json; --check
# names those that do not match the data. With a file it draws a benchmark's --json output: libvmem
# and mmap as shares of the limit.
set -euo pipefail
command -v python3 >/dev/null || { echo "plot-bench: python3 is not installed; scripts/setup.sh bench installs it"; exit 77; }
here=$(cd "$(dirname "$0")" && pwd)
[ $# -gt 0 ] && [ "$1" != --check ] || cd "$here/.."
exec python3 "$here/lib/plot_bench.py" "$@"
