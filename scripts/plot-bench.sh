#!/bin/bash
# plot-bench.sh FIGURES.json [PLOT.svg]: draws what a benchmark wrote with --json: libvmem and mmap as shares of the limit
# of the same run (rates; lines are the lowest and highest of the rounds). Latencies have no share and are left out.
set -euo pipefail
figures=${1:?usage: plot-bench.sh FIGURES.json [PLOT.svg]} plot=${2:-${1%.json}.svg}
for tool in gnuplot python3; do
  command -v "$tool" >/dev/null || { echo "plot-bench: $tool is not installed; scripts/setup.sh bench installs it"; exit 77; }
done
data=$(mktemp); trap 'rm -f "$data"' EXIT
python3 - "$figures" >"$data" <<'PYTHON'
import json, sys
for row in json.load(open(sys.argv[1])):
    if row["unit"] == "us" or not row["limit"]:
        continue
    share = lambda key: row[key] / row["limit"]
    other = f'{share("mmap"):.3f}' if row["mmap"] else "?"
    print(f'"{row["what"]}" {share("libvmem"):.3f} {share("low"):.3f} {share("high"):.3f} {other}')
PYTHON
[ -s "$data" ] || { echo "plot-bench: $figures has no rates"; exit 1; }
gnuplot <<GNUPLOT
set terminal svg size 1000,600 font "sans,11" background "white"
set output "$plot"
set title "Share of the limit measured in the same run"
set style data histogram
set style histogram errorbars gap 1 lw 1
set style fill solid 0.8 border -1
set datafile missing "?"
set yrange [0:*]
set grid ytics
set xtics rotate by -35
set bmargin 12
set key top left
set arrow from graph 0, first 1 to graph 1, first 1 nohead dashtype 2
plot "$data" using 2:3:4:xtic(1) title "libvmem" lc rgb "#3366aa", "" using 5:5:5 title "mmap, same memory" lc rgb "#bbbbbb"
GNUPLOT
echo "plot-bench: $plot"
