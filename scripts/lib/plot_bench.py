# SPDX-License-Identifier: Apache-2.0
"""plot_bench.py [--check] | FIGURES.json [PLOT.svg]: draws figures of benchmarks as SVG.

Without arguments it draws the plots of docs/benchmarks.md from docs/benchmarks/*.json. --check draws nothing: it
prints a line for each plot that differs from its data, and for each departure of a data file from the schema of
docs/benchmarks.md. With a file it draws the figures that a benchmark wrote with --json as shares of their limit."""

import glob
import json
import os
import re
import sys
from xml.sax.saxutils import escape

FOLDER = "docs/benchmarks"
TEXT = {"subject", "date", "commit", "hardware", "command"}
NEEDED = {"subject", "date", "hardware", "command", "rows"}
FIGURES = ("libvmem", "low", "high", "limit")
COLOURS = {"limit": "#8c959f", "libvmem": "#2f6db5", "peer": "#c77d2b"}
WIDTH, LEFT, RIGHT, BAR = 860, 290, 170, 15

# A plot: title, panels, note. A panel: heading, bars. A bar: label, kind, file, date, commit, row,
# key of the row or of its peers. A bar that is None leaves a gap.
HOST = ("host", "2026-11-21", None)
SWAP = ("host", "2026-11-28", "eef7c80")
OLD = ("models", "2026-11-21", None)
NEW = ("models", "2026-11-27", "ef265ea")
NEWEST = ("models", "2026-11-27", "33dd75c")


def beside(label, run, row, peer="mmap"):
    bars = [(f"{label}: limit", "limit", *run, row, "limit"), ("libvmem", "libvmem", *run, row, "libvmem")]
    return bars + ([(peer, "peer", *run, row, peer)] if peer else []) + [None]


def ways(run, *bars):
    """Returns bars of rows that have one way each: (label, row, key), libvmem first."""
    return [(label, "peer" if key != "libvmem" else "libvmem", *run, row, key) for label, row, key in bars]


DISK, HAND = "libvmem, from disk, ", "by hand: two pinned buffers, from disk"
PLOTS = {
    "sequential": ("Sequential read and write, data four times the memory, 2 MiB blocks", [(
        "GB/s, more is better (2026-11-21, H200 machine, virtual disk)",
        beside("read of a file", HOST, "sequential read of a file, 2 MiB")
        + beside("read of anonymous memory", HOST, "sequential read of anonymous memory, 2 MiB, verified")
        + beside("change a shared file, sync", HOST, "read-modify-write + sync, shared file, 2 MiB")
        + beside("change anonymous memory, sync", HOST, "read-modify-write + sync, anonymous, 2 MiB", None),
    )], "limit: raw io_uring in the same run; mmap: a file, the same memory limit; "
        "lines: lowest to highest of three rounds"),
    "random": ("Random access, data larger than memory", [(
        "8-byte reads of a file, operations/s, more is better (2026-11-21, H200 machine, virtual disk)",
        beside("4 KiB blocks, 1 thread", HOST, "random 8-byte reads, 4 KiB blocks, 1 threads")
        + beside("4 KiB blocks, 8 threads", HOST, "random 8-byte reads, 4 KiB blocks, 8 threads")
        + beside("64 KiB blocks, 1 thread", HOST, "random 8-byte reads, 64 KiB blocks, 1 threads")
        + beside("64 KiB blocks, 8 threads", HOST, "random 8-byte reads, 64 KiB blocks, 8 threads"),
    ), (
        "anonymous memory, us per operation, less is better (2026-11-28, 16 cores)",
        [(f"{threads}: {name}", kind, *SWAP, f"random accesses, {row}, {threads}", key)
         for threads in ("1 thread", "8 threads")
         for name, kind, row, key in (("swap", "peer", "4 KiB blocks", "swap"),
                                      ("libvmem, 4 KiB blocks", "libvmem", "4 KiB blocks", "libvmem"),
                                      ("libvmem, auto blocks", "libvmem", "auto blocks", "libvmem"))],
    )], "limit: raw io_uring in the same run; mmap with MADV_RANDOM reads 4 KiB a fault; "
        "not drawn: anonymous memory in 2 MiB blocks, 1,180 us"),
    "models": ("Llama, 6.25 GiB of weights, GPU memory for a quarter of them: tokens/s, more is better", [(
        "from disk, cold (2026-11-27, H100)", ways(
            NEW, ("libvmem", DISK + "cold", "libvmem"), ("loop by hand", DISK + "cold", HAND),
            ("accelerate disk_offload", DISK + "cold", "accelerate disk_offload, cold")),
    ), (
        "from disk, later passes (2026-11-21, H200, managed memory)", ways(
            OLD, ("libvmem", DISK + "steady", "libvmem"), ("loop by hand", HAND + ", steady", HAND),
            ("accelerate disk_offload, page cache warm", "accelerate disk_offload, steady", "accelerate disk_offload")),
    ), (
        "weights in host memory (2026-11-27, H100)", ways(
            NEWEST, ("libvmem", "libvmem, weights in host memory", "libvmem"),
            ("loop by hand", "libvmem, weights in host memory", "by hand: pinned host memory")),
    ), (
        "weights in host memory (2026-11-21, H200, managed memory)", ways(
            OLD, ("libvmem", "libvmem, weights in host memory, anonymous, steady", "libvmem"),
            ("loop by hand", "by hand: pinned host memory, steady", "by hand: pinned host memory"),
            ("accelerate cpu_offload", "accelerate cpu_offload, steady", "accelerate cpu_offload")),
    )], "each panel has its own scale and is from one run; the loop by hand is in tests/gpu; lines: lowest to highest"),
}


def find(file, date, commit, name):
    with open(f"{FOLDER}/{file}.json", encoding="utf-8") as f:
        for run in json.load(f):
            if run["date"].startswith(date) and run.get("commit", "").startswith(commit or ""):
                for row in run["rows"]:
                    if row["what"] == name:
                        return row
    sys.exit(f"plot_bench: {file}.json has no row '{name}' of {date}")


def figure(row, key):
    """Returns a figure of a row, or of one of its peers, with the lowest and the highest if
    known."""
    if key in FIGURES:
        spread = (row.get("low"), row.get("high")) if key == "libvmem" else (None, None)
        return row[key], *spread
    value = row["peer"][key]
    if not isinstance(value, str):
        return value, None, None
    found = re.match(r"([\d.]+)(?: \(([\d.]+) to ([\d.]+)\))?", value)
    return tuple(None if part is None else float(part) for part in found.groups())


def text(x, y, words, size=12, anchor="start", weight="normal", fill="#24292f"):
    return (f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
            f'fill="{fill}">{escape(words)}</text>')


def svg(title, panels, note):
    """Draws panels of (heading, [(label, kind, value, low, high) or None]), each with its own
    scale. The background is opaque and light, so that the plot is readable on a dark page."""
    out, y = [text(16, 26, title, 14, weight="bold")], 40
    for heading, bars in panels:
        y += 22
        out.append(text(16, y, heading, 12, weight="bold"))
        y += 8
        most = max(bar[4] or bar[2] for bar in bars if bar)
        scale = (WIDTH - LEFT - RIGHT) / most
        for bar in bars:
            if bar is None:
                y += 7
                continue
            label, kind, value, low, high = bar
            out.append(text(LEFT - 8, y + 11.5, label, 12, "end"))
            out.append(f'<rect x="{LEFT}" y="{y + 1}" width="{value * scale:.1f}" height="{BAR - 2}" '
                       f'fill="{COLOURS[kind]}"/>')
            end = value
            if low is not None:
                ends = f"M{LEFT + low * scale:.1f} {y + BAR / 2}H{LEFT + high * scale:.1f}"
                out.append(f'<path d="{ends}" stroke="#24292f"/>')
                end = max(value, high)
            shown = f"{value:,.0f}" if value >= 1000 else f"{value:g}"
            if low is not None:
                ends = (f"{part:,.0f}" if part >= 1000 else f"{part:g}" for part in (low, high))
                shown += f" ({' to '.join(ends)})"
            out.append(text(LEFT + end * scale + 6, y + 11.5, shown, 11))
            y += BAR
    y += 24
    out.append(text(16, y, note, 11, fill="#57606a"))
    height = y + 14
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'font-family="sans-serif" role="img">\n<title>{escape(title)}</title>\n'
            f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#f6f8fa"/>\n' + "\n".join(out) + "\n</svg>\n")


def plot(name):
    title, panels, note = PLOTS[name]
    return svg(title, [(heading, [bar and (bar[0], bar[1], *figure(find(*bar[2:6]), bar[6])) for bar in bars])
                       for heading, bars in panels], note)


def shares(path):
    """Returns rates of a run as shares of its own limit. Latencies have no share and are left
    out."""
    bars = []
    with open(path, encoding="utf-8") as f:
        for row in json.load(f):
            if row["unit"] == "us" or not row["limit"]:
                continue
            part = [round(row[key] / row["limit"], 3) for key in ("libvmem", "low", "high", "mmap")]
            bars.append((row["what"][:44], "libvmem", *part[:3]))
            if part[3]:
                bars.append(("mmap, same memory", "peer", part[3], None, None))
    if not bars:
        sys.exit(f"plot_bench: {path} has no rates")
    note = "lines: lowest to highest of the rounds"
    return svg("Share of the limit measured in the same run", [("share of the limit, which is 1", bars)], note)


def is_figure(value):
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number or value and (isinstance(value, str) or isinstance(value, list) and all(map(is_figure, value)))


def wrong(path):
    """Returns each departure of a data file from the schema."""
    with open(path, encoding="utf-8") as f:
        for at, run in enumerate(json.load(f)):
            lacks, strange = NEEDED - set(run), set(run) - TEXT - {"rows", "note"}
            if lacks or strange or not all(isinstance(run[key], str) for key in TEXT & set(run)):
                yield f"run {at}: lacks {sorted(lacks)}, has {sorted(strange)}"
                continue
            if not all(isinstance(note, str) for note in run.get("note", [])):
                yield f"run {at}: a note is no text"
            for row in run["rows"]:
                name = row.get("what", "a row without a name")
                if not {"what", "unit"} <= set(row) <= {"what", "unit", "peer", "note", *FIGURES}:
                    yield f"run {at}: {name}: has {sorted(row)}"
                figures = [row[key] for key in FIGURES if key in row] + list(row.get("peer", {}).values())
                if not figures or not all(map(is_figure, figures)):
                    yield f"run {at}: {name}: no figure, or one that is neither a number, nor numbers, nor text"
                spread = [row.get(key) for key in ("low", "libvmem", "high")]
                if all(isinstance(value, (int, float)) for value in spread) and sorted(spread) != spread:
                    yield f"run {at}: {name}: {spread} do not ascend"


def main(arguments):
    if arguments and arguments != ["--check"]:
        target = arguments[1] if len(arguments) > 1 else arguments[0].removesuffix(".json") + ".svg"
        with open(target, "w", encoding="utf-8") as f:
            f.write(shares(arguments[0]))
        print(f"plot_bench: {target}")
        return
    if arguments:
        for path in sorted(glob.glob(f"{FOLDER}/*.json")):
            for fault in wrong(path):
                print(f"{path}: {fault}")
    for name in PLOTS:
        path, drawn = f"{FOLDER}/{name}.svg", plot(name)
        old = None
        if os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                old = f.read()
        if arguments and old != drawn:
            print(f"{path} is not what the data say: scripts/plot-bench.sh")
        elif not arguments:
            with open(path, "w", encoding="utf-8") as f:
                f.write(drawn)


if __name__ == "__main__":
    main(sys.argv[1:])
