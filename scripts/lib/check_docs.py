# SPDX-License-Identifier: Apache-2.0
"""check_docs.py FILE..: prints what is wrong with the documents, a line each:

- Lines of text have at most 100 columns, each table has its head, links lead somewhere, files and
  tests that are named exist.
- docs/architecture.md lists exactly the folders of lib/, and its walks name functions that are in
  the files they name.
- The names in lib/README.md are in the code, and its table of threads has those that the code
  starts.
- Each room of lib/ROOMS has a README.md, or is in that of the folder above. A README.md says, as
  lib/ROOMS does, which rooms may include its own.
- Files and classes that these and docs/architecture.md name are in the sources, in the file of
  their row where there is one.
- The table of states in lib/pager/block has the changes that the code allows.
"""

import fnmatch
import functools
import glob
import os
import re
import sys

COLUMNS = 100
ARCHITECTURE = "docs/architecture.md"
GLOSSARY = "lib/README.md"
STATES = "lib/pager/block/README.md"
# Paths of this repository in `..`, including patterns with *.
PATH = re.compile(r"`((?:lib|include|tests|tools|scripts|examples|docs|kmod|python|packages)/[\w./*-]+)`")


# A test, as GoogleTest names it: Suite.NameThatIsASentence.
TEST = re.compile(r"`([A-Z]\w+)\.([A-Z]\w{12,})`")


def tests():
    found = set()
    for path in glob.glob("tests/**/*.*", recursive=True):
        if path.endswith((".cpp", ".h", ".cu")):
            with open(path, encoding="utf-8", errors="replace") as f:
                found.update(re.findall(r"TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)", f.read()))
    return found


def blocks(text):
    """The lines of a document with their numbers and what they are part of: text, code or a table."""
    fence = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fence = not fence
            yield number, line, "code"
        elif fence or line.startswith("    "):
            yield number, line, "code"
        else:
            yield number, line, "table" if line.startswith("|") else "text"


def anchors(path):
    """What a link to a heading of this document may name."""
    with open(path, encoding="utf-8") as f:
        heads = [line.lstrip("#").strip() for _, line, kind in blocks(f.read()) if kind == "text" and line[:1] == "#"]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def check_links(path, number, line):
    for target in re.findall(r"\]\(([^)\s]+)\)", line):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        full = os.path.normpath(os.path.join(os.path.dirname(path), name)) if name else path
        if not os.path.exists(full):
            print(f"{path}:{number}: links to {target}, which is not there")
        elif anchor and anchor not in anchors(full):
            print(f"{path}:{number}: links to {target}: there is no such heading")


def check(path, known):
    with open(path, encoding="utf-8") as f:
        lines = list(blocks(f.read()))
    before = ""
    for at, (number, line, kind) in enumerate(lines):
        if kind == "text" and len(line) > COLUMNS and " " in line.strip():
            print(f"{path}:{number}: {len(line)} columns, at most {COLUMNS}")
        if kind == "table" and before != "table":
            following = lines[at + 1][1] if at + 1 < len(lines) else ""
            if not re.fullmatch(r"\|[-:| ]+\|", following):
                print(f"{path}:{number}: a table without a head (a blank line ends a table)")
        if kind != "code":
            check_links(path, number, line)
            for name in PATH.findall(line):
                if not glob.glob(name.rstrip("/")) and not glob.glob(name + ".c*"):  # a program, found by its source
                    print(f"{path}:{number}: names {name}, which is not there")
            for test in TEST.findall(line):
                if test not in known:
                    print(f"{path}:{number}: names the test {'.'.join(test)}, which is not there")
        before = kind


def check_architecture():
    """The first table lists the folders of lib/; the walks are the tables with functions."""
    with open(ARCHITECTURE, encoding="utf-8") as f:
        text = f.read()
    rooms = {f"lib/{name}" for name in os.listdir("lib") if os.path.isdir(f"lib/{name}")}
    listed = re.findall(r"^\| \[?`(lib/\w+)`", text, re.M)
    for room in sorted(rooms - set(listed)):
        print(f"{ARCHITECTURE}: {room} is not in its table")
    for room in sorted(set(listed) - rooms):
        print(f"{ARCHITECTURE}: {room} of its table is no folder")
    for room in sorted({room for room in listed if listed.count(room) > 1}):
        print(f"{ARCHITECTURE}: {room} is twice in its table")
    walks = 0
    for path, functions in re.findall(r"^\| `(lib/[\w/]+\.cpp)` \| ([^|]*) \|", text, re.M):
        walks += 1
        if not os.path.exists(path):
            continue  # already reported
        with open(path, encoding="utf-8") as f:
            code = f.read()
        for name in re.findall(r"`(\w+)`", functions):
            if not re.search(rf"^[\w\s:<>,&*\[\]]*\b{name}\(", code, re.M):
                print(f"{ARCHITECTURE}: {path} has no function {name}")
    if walks < 12:
        print(f"{ARCHITECTURE}: {walks} steps of walks are left, 12 at least")


def check_glossary():
    with open(GLOSSARY, encoding="utf-8") as f:
        text = f.read().partition("## Threads")[0]
    code = ""
    for path in glob.glob("lib/**/*.h", recursive=True):
        with open(path, encoding="utf-8") as f:
            code += f.read()
    for row in re.findall(r"^\|[^|\n]*\|[^|\n]*\|([^|\n]*)\|$", text, re.M):
        for name in re.findall(r"`(\w+)`", row):
            if not re.search(rf"\b{name}\b", code):
                print(f"{GLOSSARY}: the glossary says that the code has {name}, which it has not")


def check_threads():
    """The threads of the page are those that the sources start."""
    started = set()
    for path in glob.glob("lib/**/*.*", recursive=True):
        if path.endswith((".h", ".cpp")) and "start_thread(" in source(path):
            started |= {re.sub(r"%z?u", "N", name) for name in re.findall(r'"(vmem-[\w%-]+)"', source(path))}
    listed = re.findall(r"`(vmem-[\w-]+)`", source(GLOSSARY).partition("## Threads")[2])
    for name in sorted(started - set(listed)):
        print(f"{GLOSSARY}: its table of threads lacks {name}")
    for name in sorted(set(listed) - started):
        print(f"{GLOSSARY}: its table of threads has {name}, which no source starts")
    for name in sorted({name for name in listed if listed.count(name) > 1}):
        print(f"{GLOSSARY}: its table of threads has {name} twice")


# `Class`, `Class::member`, `space::Class`; but no constant (kName) and no macro.
CLASS = re.compile(r"`((?:\w+::)*)([A-Z]+[a-z]\w*)((?:::~?\w+)*)`")
FILE = re.compile(r"`([\w./]+\.(?:h|cpp|map))`")


@functools.lru_cache(maxsize=None)
def source(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


@functools.lru_cache(maxsize=None)
def declared():
    """Each class, structure, enumeration or alias of the sources, and the files that declare it."""
    found = {}
    for path in glob.glob("lib/**/*.*", recursive=True):
        if path.endswith((".h", ".cpp")):
            kinds = r"\b(?:class|struct|enum|union|using)\s+(?:class\s+)?(?:VMEM_\w+\(.*?\)\)? |\[\[\w+\]\] )*"
            for name in re.findall(kinds + r"(?:\w+::)*([A-Z]\w*)\b(?!\s*;)", source(path)):
                found.setdefault(name, set()).add(path)
    return found


def check_names(path):
    """The files and classes that a document about the sources names are there."""
    folder = os.path.dirname(path) if path.startswith("lib/") else "lib"
    with open(path, encoding="utf-8") as f:
        lines = [(number, line) for number, line, kind in blocks(f.read()) if kind != "code"]
    for number, line in lines:
        files = []
        for name in FILE.findall(line):
            places = (f"{folder}/{name}", f"lib/{name}", name, f"include/vmem/{name}")
            full = [place for place in places if os.path.exists(place)]
            files += full[:1]
            if not full:
                print(f"{path}:{number}: names {name}, which is not there")
        cells = line.split("|")
        row = files if len(cells) > 3 and FILE.search(cells[1]) and not cells[1].strip().startswith("`lib/") else []
        for space, name, members in CLASS.findall(line):
            homes = declared().get(name, set())
            if not homes:
                print(f"{path}:{number}: names the class {name}, which no source of lib/ declares")
            elif row and f"`{space}{name}{members}`" in cells[2] and not homes & set(row):
                print(f"{path}:{number}: {name} is declared in {', '.join(sorted(homes))}")
            for member in re.findall(r"\w+", members):
                if homes and not any(re.search(rf"\b{member}\b", source(home)) for home in homes):
                    print(f"{path}:{number}: {name} has no {member}")


@functools.lru_cache(maxsize=None)
def table_of_rooms():
    """Each room of lib/ROOMS, and the rooms that may include it."""
    may = {}
    with open("lib/ROOMS", encoding="utf-8") as f:
        for line in f:
            words = line.partition("#")[0].split()
            if words and words[1:2] not in (["->"], ["="]):
                may[words[0]] = words[1:]
    return {room: {f"lib/{other}" for other, named in may.items()
                   if other != room and (room == "core" or any(fnmatch.fnmatch(room, one) for one in named))}
            for room in may}


def check_readmes(readmes):
    """Each room has its page, or is in that of the folder above."""
    for room in table_of_rooms():
        above = f"lib/{os.path.dirname(room)}/README.md"
        if f"lib/{room}/README.md" in readmes or (above in readmes and f"`lib/{room}`" in source(above)):
            continue
        print(f"lib/ROOMS: {room} has no lib/{room}/README.md")


def check_included_by(path):
    """A room's page says which rooms may include it: in its last paragraph, up to a full stop."""
    room = os.path.dirname(path)[len("lib/"):]
    said = re.search(r"^\*\*Included by\*\* ([^.]*)\.", source(path), re.M)
    if room not in table_of_rooms() or not said:
        print(f"{path}: it is no room of lib/ROOMS, or does not say what it is included by")
        return
    every = {f"lib/{one}" for one in table_of_rooms()}
    named = {one for name in re.findall(r"`([^`]+)`", said.group(1)) for one in fnmatch.filter(every, name)}
    if said.group(1) == "every room":
        named = every
    named.discard(f"lib/{room}")
    for one in sorted(named ^ table_of_rooms()[room]):
        print(f"{path}: {one} {'may not' if one in named else 'may'} include it, says lib/ROOMS")


def check_states():
    """The page of lib/pager/block lists the changes that its block_table.cpp allows, no more and no fewer."""
    code = source("lib/pager/block/block_table.cpp")
    sets = dict(re.findall(r"^constexpr uint16_t (k\w+) = (.*?);", code, re.M | re.S))
    legal = set()
    for call in re.findall(r"\bchange\(i,\s*(.*?)\);", code, re.S):
        parts = re.fullmatch(r"((?:bit\(State::\w+\)|k[A-Z]\w+|[|\s])+),\s*(State::\w+|absent\(i\))", call)
        if not parts:
            print(f"{STATES}: block_table.cpp has change(i, {call}), which this check cannot read")
            continue
        origin = re.sub(r"k[A-Z]\w+", lambda name: sets[name.group()], parts.group(1))
        ends = re.findall(r"State::(\w+)", parts.group(2)) or ["stored", "unpopulated"]
        legal |= {(name, end) for name in re.findall(r"State::(\w+)", origin) for end in ends}
    states = {name for pair in legal for name in pair}
    with open(STATES, encoding="utf-8") as f:
        table = re.search(r"^\| from \| to \|.*?\n(.*?)\n\n", f.read(), re.M | re.S)
    told = set()
    for row in table.group(1).splitlines()[1:] if table else []:
        cells = [set(re.findall(r"\w+", cell)) & states for cell in row.split("|")[1:3]]
        told |= {(name, to) for name in cells[0] for to in cells[1]}
    for pair in sorted(legal - told):
        print(f"{STATES}: its table of states lacks {pair[0]} -> {pair[1]}")
    for pair in sorted(told - legal):
        print(f"{STATES}: its table of states has {pair[0]} -> {pair[1]}, which is illegal")


everything = tests()
for argument in sys.argv[1:]:
    check(argument, everything)
    if argument == ARCHITECTURE:
        check_architecture()
        check_readmes(set(sys.argv[1:]))
    if argument == GLOSSARY:
        check_glossary()
        check_threads()
    if argument == STATES:
        check_states()
    if argument.startswith("lib/") and argument != GLOSSARY:
        check_included_by(argument)
    if argument == ARCHITECTURE or argument.startswith("lib/"):
        check_names(argument)
