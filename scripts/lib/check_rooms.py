# SPDX-License-Identifier: Apache-2.0
"""check_rooms.py [--uses FOLDER] FILE..: prints the includes of these files of lib/ that the table
lib/ROOMS does not allow, a line each. The files of a room must not include each other in a circle
(a source and its header count as one, and a source may include the header that puts its room
together); nor may the table have a circle.

--uses: a file may use a name of a header that it does not include itself. FOLDER has the fixes of
clang-tidy's misc-include-cleaner, which name that header; it counts as included, too."""

import fnmatch
import os
import re
import sys


def circle(graph):
    """Returns the first circle found, as a list of its members, or an empty list."""
    done, path = set(), []

    def visit(node):
        if node in path:
            return path[path.index(node):] + [node]
        if node not in done:
            path.append(node)
            for below in sorted(graph.get(node, ())):
                if found := visit(below):
                    return found
            done.add(path.pop())
        return []
    for node in sorted(graph):
        if found := visit(node):
            return found
    return []


rooms, assemblies = {}, set()
with open("lib/ROOMS", encoding="utf-8") as f:
    for line in f:
        words = line.partition("#")[0].split()
        if "=" in words:
            assemblies.add(f"{words[0]}/{words[2]}")
        elif words:
            rooms[words[0]] = words[1:]
for room, named in rooms.items():
    if not os.path.isdir("lib/" + room):
        print(f"lib/ROOMS: lib/{room} is no folder")
    for one in named:
        if not fnmatch.filter(rooms, one):
            print(f"lib/ROOMS: {one}, which {room} may include, is no room")
    core = ["core"] if room.startswith("core") else ["core", "core/*"]
    rooms[room] = {below for one in named + core for below in fnmatch.filter(rooms, one)} - {room}
if found := circle(rooms):
    print(f"lib/ROOMS: a circle: {' -> '.join(found)}")

arrows = {}  # (file, file) without extensions -> where the first includes the second
uses = {}    # file -> the headers whose names it uses without including them
files = sys.argv[1:]
if files[:1] == ["--uses"]:
    for name in os.listdir(files[1]):
        with open(os.path.join(files[1], name), encoding="utf-8") as f:
            fixes = f.read()
        path = os.path.relpath(re.search(r"MainSourceFile: +'(.*)'", fixes).group(1))
        uses[path] = set(re.findall(r'#include \\"([^"\\]+)\\"', fixes))
    files = files[2:]
for path in files:
    room, mine = os.path.dirname(path)[len("lib/"):], os.path.splitext(path)[0][len("lib/"):]
    if room not in rooms:
        print(f"{path}: lib/ROOMS has no such room")
        continue
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            named = re.match(r' *# *include *"([^"]+)"', line)
            if not named or named.group(1).startswith("vmem/"):
                continue
            target = named.group(1)
            if os.path.isfile("lib/" + target):
                arrows.setdefault((mine, os.path.splitext(target)[0]), f"{path}:{number}")
            elif os.path.isfile(os.path.join("lib", room, target)):
                print(f"{path}:{number}: include it as \"{room}/{target}\"")
            else:
                print(f"{path}:{number}: \"{target}\" is in no room")

for path, headers in uses.items():
    for target in headers:
        if os.path.isfile("lib/" + target):
            arrows.setdefault((os.path.splitext(path)[0][len("lib/"):], os.path.splitext(target)[0]),
                              f"{path}: by a name alone")

inside = {}
for (mine, other), where in sorted(arrows.items()):
    home, away = os.path.dirname(mine), os.path.dirname(other)
    if mine == other:
        continue
    if home == away:
        if other in assemblies and where.partition(":")[0].endswith(".cpp"):
            continue
        inside.setdefault(mine, set()).add(other)
    elif away not in rooms[home]:
        print(f"{where}: lib/{home} may not include \"{other}.h\"")
if found := circle(inside):
    print(f"a circle in lib/{os.path.dirname(found[0])}: {' -> '.join(map(os.path.basename, found))}")
