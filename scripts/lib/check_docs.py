# SPDX-License-Identifier: Apache-2.0
"""check_docs.py FILE..: prints what is wrong with the documents, a line each: lines of text have at most 100 columns,
each table has its head, links lead somewhere, files and tests that are named exist. docs/architecture.md draws and
lists exactly the folders of lib/, its walks name functions that are in the files they name, its glossary names that
are in the code; each class that it lists has a suite of tests that makes one. The table of states in docs/internals.md
has the changes that the code allows."""

import glob
import os
import re
import sys

COLUMNS = 100
ARCHITECTURE = "docs/architecture.md"
INTERNALS = "docs/internals.md"
# Named in `..`: a path of this repository, patterns with * included.
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


def with_headers(path, seen):
    """The text of a test and of the headers beside it that it includes."""
    if path in seen or not os.path.exists(path):
        return ""
    seen.add(path)
    with open(path, encoding="utf-8") as f:
        text = f.read()
    headers = re.findall(r'^#include "(\w+\.h)"', text, re.M)
    return text + "".join(with_headers(f"tests/unit/{header}", seen) for header in headers)


def made_by_suites():
    """What each suite of tests/unit makes: `Name it;`, `Name it{..}` or `make_unique<Name>`, here or in a header."""
    made = {}
    for path in glob.glob("tests/unit/*.cpp"):
        text = with_headers(path, set())
        names = set(re.findall(r"\b([A-Z]\w+) \w+ ?[;({]|make_unique<(?:\w+::)*(\w+)>", text))
        for suite in re.findall(r"TEST(?:_[FP])?\(\s*(\w+),", text):
            made.setdefault(suite, set()).update(name for pair in names for name in pair)
    return made


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
                if not glob.glob(name.rstrip("/")) and not glob.glob(name + ".c*"):  # a program, by its source
                    print(f"{path}:{number}: names {name}, which is not there")
            for test in TEST.findall(line):
                if test not in known:
                    print(f"{path}:{number}: names the test {'.'.join(test)}, which is not there")
        before = kind


def check_architecture():
    """The picture is the first block of code; the list is the first table; the walks are the tables with functions."""
    with open(ARCHITECTURE, encoding="utf-8") as f:
        text = f.read()
    rooms = {f"lib/{name}" for name in os.listdir("lib") if os.path.isdir(f"lib/{name}")}
    picture = re.search(r"^```\n(.*?)^```", text, re.M | re.S)
    drawn = re.findall(r"\blib/\w+", picture.group(1)) if picture else []
    listed = re.findall(r"^\| `(lib/\w+)` \|", text, re.M)
    for what, found in (("picture", drawn), ("table", listed)):
        for room in sorted(rooms - set(found)):
            print(f"{ARCHITECTURE}: {room} is not in its {what}")
        for room in sorted(set(found) - rooms):
            print(f"{ARCHITECTURE}: {room} of its {what} is no folder")
        for room in sorted({room for room in found if found.count(room) > 1}):
            print(f"{ARCHITECTURE}: {room} is twice in its {what}")
    walks = 0
    for path, functions in re.findall(r"^\| `(lib/[\w/]+\.cpp)` \| ([^|]*) \|", text, re.M):
        walks += 1
        if not os.path.exists(path):
            continue  # said already
        with open(path, encoding="utf-8") as f:
            code = f.read()
        for name in re.findall(r"`(\w+)`", functions):
            if not re.search(rf"^[\w\s:<>,&*\[\]]*\b{name}\(", code, re.M):
                print(f"{ARCHITECTURE}: {path} has no function {name}")
    code = ""
    for path in glob.glob("lib/**/*.h", recursive=True):
        with open(path, encoding="utf-8") as f:
            code += f.read()
    for row in re.findall(r"^\|[^|\n]*\|[^|\n]*\|([^|\n]*)\|$", text[text.find("## Glossary"):], re.M):
        for name in re.findall(r"`(\w+)`", row):
            if not re.search(rf"\b{name}\b", code):
                print(f"{ARCHITECTURE}: the glossary says that the code has {name}, which it has not")
    # Each class of lib/pager that it lists has tests: a suite of its name, but for Queue at its end, which makes one.
    made = made_by_suites()
    for name in re.findall(r"^\| `([A-Z]\w+)` \| [^|]* \|$", text, re.M):
        short = name.removesuffix("Queue")
        suites = set(made) & {name, short, f"Pager{name}", f"Pager{short}"}
        if not suites:
            print(f"{ARCHITECTURE}: {name} has no tests of its own (a suite Pager{name} in tests/unit)")
        elif not any(name in made[suite] for suite in suites):
            print(f"{ARCHITECTURE}: {', '.join(suites)} makes no {name}")
    if walks < 12:
        print(f"{ARCHITECTURE}: {walks} steps of walks are left, 12 at least")


def check_states():
    """docs/internals.md lists the changes that lib/pager/block/block_table.cpp allows, no more and no fewer."""
    with open("lib/pager/block/block_table.cpp", encoding="utf-8") as f:
        code = re.sub(r"//.*", "", re.search(r"kLegal\[\] = \{(.*?)\};", f.read(), re.S).group(1))
    rows = re.findall(r"/\*\s*(\w+)\s*\*/([^/]*)", code)
    legal = {(name, to) for name, bits in rows for to in re.findall(r"State::(\w+)", bits)}
    states = {name for name, _ in rows}
    with open(INTERNALS, encoding="utf-8") as f:
        table = re.search(r"^\| from \| to \|.*?\n(.*?)\n\n", f.read(), re.M | re.S)
    told = set()
    for row in table.group(1).splitlines()[1:] if table else []:
        cells = [set(re.findall(r"\w+", cell)) & states for cell in row.split("|")[1:3]]
        told |= {(name, to) for name in cells[0] for to in cells[1]}
    for pair in sorted(legal - told):
        print(f"{INTERNALS}: its table of states lacks {pair[0]} -> {pair[1]}")
    for pair in sorted(told - legal):
        print(f"{INTERNALS}: its table of states has {pair[0]} -> {pair[1]}, which is illegal")


everything = tests()
for argument in sys.argv[1:]:
    check(argument, everything)
    if argument == ARCHITECTURE:
        check_architecture()
    if argument == INTERNALS:
        check_states()
