# SPDX-License-Identifier: Apache-2.0
"""draw_rooms.py [--check]: draws docs/architecture.svg from lib/ROOMS.

A room stands above the rooms that it may include, and its box is as wide as those. An arrow goes to
each room that is reached in no other way. --check draws nothing, and prints a line if the picture
is outdated. Rooms without words here, and words without a room, are also reported.
"""

import fnmatch
import os
import sys
from xml.sax.saxutils import escape

PICTURE = "docs/architecture.svg"
WIDTH, MARGIN, GAP, BOX, ROW = 960, 140, 14, 66, 98
# The rooms at the bottom, from left to right, and the outside systems that each of them alone uses.
OUTSIDE = {"trap": "userfaultfd, vmem.ko", "device": "CUDA, GPUs", "policy": "", "store": "io_uring, disks",
           "publish": "vmemctl"}
WORDS = {
    "core": "types, errors, settings, threads, the log, the process: for every room", "core/process": "",
    "trap": "what is visible\nat an address", "policy": "what to evict,\nwhat to read",
    "store": "I/O engines,\nroom on the SSD",
    "publish": "what others\nmay see",
    "device": "device memory,\ncopies, streams",
    "device/managed": "", "device/units": "", "device/sim": "", "device/cuda": "",
    "memory": "budgets, frames, buffers for I/O, staging frames",
    "pager": "the sole writer of block states, under one lock",
    "pager/block": "", "pager/account": "", "pager/host": "", "pager/lease": "", "pager/tier": "", "pager/calls": "",
    "pager/threads": "",
    "kernel_paging": "serves kernels that ask for blocks", "api": "the C boundary, the one runtime",
}
# No variables: not every SVG viewer supports them.
STYLE = """text, .tip { fill: #24292f; } .line { fill: none; stroke: #24292f; stroke-width: 1.5; }
.box { fill: #f6f8fa; stroke: #57606a; } .inner { fill: #ffffff; stroke: #57606a; }
.small { font-size: 12px; } .tiny { font-size: 11px; } .name { font-weight: bold; }
@media (prefers-color-scheme: dark) { text, .tip { fill: #e6edf3; } .line { stroke: #e6edf3; }
.box { fill: #161b22; stroke: #8b949e; } .inner { fill: #21262d; stroke: #8b949e; } }"""


def read_rooms():
    rooms = {}
    with open("lib/ROOMS", encoding="utf-8") as f:
        for line in f:
            words = line.partition("#")[0].split()
            if words and words[1:2] not in (["->"], ["="]):
                rooms[words[0]] = words[1:]
    return {room: {one for name in named for one in fnmatch.filter(rooms, name)} - {room}
            for room, named in rooms.items()}


def text(x, y, words, kind="", anchor="start"):
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def arrow(x, top, bottom):
    return (f'<path class="line" d="M{x:g} {top:g}V{bottom - 7:g}"/>'
            f'<path class="tip" d="M{x - 5:g} {bottom - 8:g}h10l-5 8z"/>')


def draw(rooms):
    """Draws rooms with a / inside their outer room."""
    below = {room: {one for one in named if "/" not in one} for room, named in rooms.items() if "/" not in room}
    del below["core"]
    reach = {}

    def reached(room):
        if room not in reach:
            reach[room] = below[room].union(*(reached(one) for one in below[room]))
        return reach[room]

    def rank(room):
        return 1 + max((rank(one) for one in below[room]), default=-1)
    columns = [room for room in OUTSIDE if room in below]
    width = (WIDTH - MARGIN - GAP * len(columns)) / (len(columns) + 1)
    place, x = {}, MARGIN
    for room in columns:  # the room with inner rooms gets more width
        wide = 2 * width if room == "device" else width
        place[room], x = (x, wide), x + wide + GAP
    top = max(rank(room) for room in below)
    for room in sorted(below, key=rank):
        reached(room)
        if room not in place:
            on = [place[one] for one in reach[room]]
            left = min(at for at, _ in on)
            place[room] = left, max(at + wide for at, wide in on) - left
    height = {room: BOX + (30 if any(one.startswith(room + "/") for one in rooms) else 0) for room in below}
    y, at = 60, {}
    for level in range(top, -1, -1):
        row = [room for room in below if rank(room) == level]
        for room in row:
            at[room] = y
        y += max(height[room] for room in row) + ROW - BOX
    out = []
    for room in sorted(below):
        for one in sorted(below[room] - set().union(*(reach[other] for other in below[room]))):
            out.append(arrow(place[one][0] + place[one][1] / 2, at[room] + height[room], at[one]))
    for room in sorted(below):
        left, wide = place[room]
        out.append(f'<rect class="box" x="{left:g}" y="{at[room]}" width="{wide:g}" height="{height[room]}" rx="5"/>')
        out.append(text(left + 10, at[room] + 22, "lib/" + room, "name"))
        for i, words in enumerate(WORDS[room].split("\n")):
            out.append(text(left + 10, at[room] + 40 + 15 * i, words, "small"))
        inner = [one for one in rooms if one.startswith(room + "/")]
        step = (wide - 20) / max(len(inner), 1)
        for i, one in enumerate(inner):
            start = left + 10 + i * step
            out.append(f'<rect class="inner" x="{start:g}" y="{at[room] + 64}" width="{step - 4:g}" height="24" '
                       'rx="4"/>')
            out.append(text(start + (step - 4) / 2, at[room] + 80, one.partition("/")[2], "tiny", "middle"))
    # The outside systems, above and below.
    bottom = max(at[room] + height[room] for room in columns)
    for room in columns:
        left, wide = place[room]
        if OUTSIDE[room]:
            out.append(f'<path class="line" stroke-dasharray="3 3" d="M{left + 20:g} {at[room] + height[room]}'
                       f'V{bottom + 16}"/>')
            out.append(text(left + 10, bottom + 30, OUTSIDE[room], "small"))
    out.append(text(place["api"][0] + place["api"][1] / 2, 24, "a thread calls libvmem (vmem.h, vmem.hpp, Python)",
                    "small", "middle"))
    out.append(arrow(place["api"][0] + place["api"][1] / 2, 32, at["api"]))
    for i, words in enumerate(("a thread accesses", "a block that is not", "present, and sleeps")):
        out.append(text(10, 24 + 16 * i, words, "small"))
    out.append(f'<path class="line" d="M60 68V{at["trap"] + 28}H{MARGIN - 7}"/>'
               f'<path class="tip" d="M{MARGIN - 8} {at["trap"] + 23}v10l8 -5z"/>')
    out.append(f'<rect class="box" x="{MARGIN}" y="{bottom + 46}" width="{WIDTH - MARGIN - GAP}" height="32" rx="5"/>')
    out.append(text(MARGIN + 10, bottom + 67, "lib/core", "name"))
    out.append(text(MARGIN + 90, bottom + 67, WORDS["core"], "small"))
    tall = bottom + 90
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" width="{WIDTH}" height="{tall}" '
            'font-family="sans-serif" font-size="14" role="img">\n<title>The rooms of lib/, and which includes which'
            f'</title>\n<style>{STYLE}</style>\n' + "\n".join(out) + "\n</svg>\n")


def main(arguments):
    rooms = read_rooms()
    without = set(rooms) ^ set(WORDS)
    if without:
        print(f"scripts/lib/draw_rooms.py: its words and lib/ROOMS differ in {', '.join(sorted(without))}")
        return 1
    drawn = draw(rooms)
    if arguments == ["--check"]:
        there = ""
        if os.path.exists(PICTURE):
            with open(PICTURE, encoding="utf-8") as f:
                there = f.read()
        if there != drawn:
            print(f"{PICTURE} is not what lib/ROOMS says: python3 scripts/lib/draw_rooms.py")
        return 0
    with open(PICTURE, "w", encoding="utf-8") as f:
        f.write(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
