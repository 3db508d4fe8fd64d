"""Thousands of odd files: compares the examples' readers with SciPy, NumPy and rules in a few
lines.

    formats.py PROGRAM [FILES [SEED]]

A file begins as a correct one and is changed in up to three places. If only one side accepts a
file, the reason must be in one of the lists below. If both accept it, they must agree to the last
edge and bit.
"""
import collections
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import warnings

import numpy as np
import scipy

try:  # use SciPy's reader in Python: the one in C++ of newer versions crashes on some of these files
    from scipy.io._mmio import mmread
except ImportError:
    from scipy.io import mmread

warnings.simplefilter("ignore")

# Files that SciPy accepts and we refuse: the words of our refusal, and why. SciPy's result does not
# follow the format, or is no graph.
WE_REFUSE = {
    "edges": [
        (r"a Matrix Market file begins with %%MatrixMarket", "newer SciPy takes one % and blanks before the banner"),
        (r"four words are expected", "newer SciPy takes more words"),
        (r"words are expected, there are", "SciPy leaves out what follows an entry"),
        (r"above its diagonal", "the format stores the lower triangle; SciPy mirrors entries of both"),
        (r"on its diagonal", "the diagonal of a skew-symmetric matrix is zero, and is not stored"),
        (r"is no graph", "no square matrix, arrays, vectors"),
        (r"only a complex matrix can be hermitian|a pattern cannot be skew", "no such kind in the format"),
        (r"field .* is none of|symmetry .* is none of", "no such word in the format"),
        (r"is no value of this matrix", "SciPy takes the beginning of the word, or Python's underscores"),
        (r"is no index|three numbers are expected", "older SciPy takes Python's integers (+1, 1_0) and form feeds"),
        (r"comments are lines before", "older SciPy takes comments among entries"),
        (r"index [0-9]{10,} is not in", "older SciPy takes the last 32 bits of an index"),
        (r"more than the 0 entries", "older SciPy does not look for what follows no entries"),
        (r"vertices have 32 bits", "a limit of the example"),
    ],
    "npy": [
        (r"only float32", "other types are for other programs"),
        (r"written by columns", "not served"),
        (r"has \d+ dimension|has no numbers", "no matrix"),
        (r"each once", "a key twice"),
        (r"no tuple of numbers", "Python's other numbers: True, 1_0, 0x2"),
    ],
}
# Files that we accept and SciPy refuses: a property of the file.
THEY_REFUSE = {
    "edges": [
        (lambda b: not b.startswith(b"%%MatrixMarket"), "the banner in any case"),
        (lambda b: re.search(rb"\n[ \t]*\r?\n[ \t]*%|\n[ \t]+%|\n[ \t]*\r?\n", b),
            "blank lines before the size, blanks before %"),
        (lambda b: re.search(rb"[ \t]\+[0-9.]", b), "a value with a plus sign"),
    ],
    "npy": [(lambda b: re.search(rb"}[ \t]*\n[ \t]+\n", b), "a line of blanks behind the dictionary")],
}

REAL = ["1.5", "-2e-3", ".5", "5.", "1e400", "nan", "-inf", "+7", "0", "1d5", "0x1p3", "1_0", "1e", "1.5abc",
    "1e-400", "--1"]
INTEGER = ["7", "-3", "+4", "0", "7.5", "99999999999999999999", "9223372036854775807", "1e3", "x"]


def market(rng):
    """Returns a Matrix Market file, and the changes made to it."""
    field = rng.choice(["pattern", "real", "integer", "complex"])
    symmetry = rng.choice(["general", "general", "symmetric", "skew-symmetric", "hermitian"])
    if symmetry == "hermitian":
        field = "complex"
    if symmetry == "skew-symmetric" and field == "pattern":
        field = "real"
    n, m = rng.randint(1, 9), rng.randint(0, 12)
    words = ["%%MatrixMarket", "matrix", "coordinate", field, symmetry]
    entries = []
    for _ in range(m):
        i, j = rng.randint(1, n), rng.randint(1, n)
        if symmetry != "general" and i < j:
            i, j = j, i
        if symmetry == "skew-symmetric" and i == j:
            continue
        value = {"pattern": [], "real": ["%g" % rng.gauss(0, 9)], "integer": [str(rng.randint(-9, 9))],
                 "complex": ["%g" % rng.gauss(0, 9), "%g" % rng.gauss(0, 9)]}[field]
        entries.append([str(i), str(j), *value])
    size = [str(n), str(n), str(len(entries))]
    comments, blank_at, ends, last = [], None, "\n", "\n"
    text_after = before = ""

    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        what = rng.randrange(24)
        row = rng.choice(entries) if entries else size
        if what == 0:
            k = rng.randrange(len(words))
            words[k] = rng.choice([words[k].upper(), words[k].title(), words[k].lower()])
        elif what == 1:
            words[0] = rng.choice(["%MatrixMarket", "%%%MatrixMarket", "%% MatrixMarket", "MatrixMarket",
                "%%MatrixMarkets"])
        elif what == 2:
            words[1:] = rng.choice([words[1:4], words[1:] + ["more"], ["vector"] + words[2:], ["matrix", "array",
                "real", "general"]])
        elif what == 3:
            words[-2] = rng.choice(["double", "unsigned-integer", "float", "real", "pattern", "complex", "integer"])
        elif what == 4:
            words[-1] = rng.choice(["general", "symmetric", "skew-symmetric", "hermitian", "skew", "Symmetric",
                "SYMMETRIC"])
        elif what == 5:
            size[rng.randrange(len(size))] = rng.choice(["0", "-1", "99999999999999999999", "4294967295",
                "4294967296", "x", "3.0", str(n + 1)])
        elif what == 6:
            size[:] = rng.choice([size + ["7"], size[:2], size[:1]])
        elif what == 7:
            size[-1] = str(len(entries) + rng.choice([-1, 1, 100]))
        elif what == 8 and len(row) > 1:
            row[rng.randrange(2)] = rng.choice(["0", "-1", "+1", str(n + 1), "1.0", "99999999999999999999", "01",
                "x", "4294967297", "1_0"])
        elif what == 9 and len(row) > 2:
            row[rng.randrange(2, len(row))] = rng.choice(INTEGER if field == "integer" else REAL)
        elif what == 10:
            row.append(rng.choice(["9", "x", "% c", "#"]))
        elif what == 11 and len(row) > 1:
            row.pop()
        elif what == 12 and row:
            row[0], row[-1] = row[-1], row[0]
        elif what == 13:
            comments += rng.choice([["% a comment"], ["%"], ["", "% x"], ["  % x"], ["% " + "y" * 3000], ["# no"], [""],
                                    ["% MatrixMarket file of x"], ["%%MatrixMarket vector"], ["% 3 3 3"]])
        elif what == 14:
            blank_at = rng.randrange(len(entries) + 1)
        elif what == 15:
            ends = rng.choice(["\r\n", "\r\n", "\r", "\n\n"])
        elif what == 16:
            last = rng.choice(["", "\n\n", "\n  \n", "\nend\n", "\n% end\n", "\r", "\0"])
        elif what == 17:
            before = rng.choice(["\n", " ", "\ufeff", "% first\n", "\t"])
        elif what == 18 and row:
            row[0] = rng.choice([" ", "\t", "    ", " " * 2000, "\f", "\v"]) + row[0]
        elif what == 19 and row:
            row[0] += rng.choice(["\t", "  ", ",", "\f", "\0", ";"])
        elif what == 20 and entries:
            entries.append(list(rng.choice(entries)))
            size[-1:] = [str(len(entries))]
        elif what == 21 and entries:
            rng.choice(entries).insert(1, "\n")
        elif what == 22:
            text_after = rng.choice(["", " ", "1 1\n"])
        elif what == 23 and entries:
            entries.insert(rng.randrange(len(entries)), ["% in the body"])
    lines = [" ".join(words), *comments, " ".join(size), *(" ".join(e) for e in entries)]
    if blank_at is not None:
        lines.insert(len(lines) - blank_at, "")
    return (before + ends.join(lines) + last + text_after).encode()


def too_long(*_):
    raise TimeoutError("read for ever")


def scipy_edges(path):
    # SciPy's reader in Python does not stop on some files that lack a size
    signal.setitimer(signal.ITIMER_REAL, 2)
    try:
        matrix = mmread(path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not hasattr(matrix, "tocoo"):
        return None
    matrix = matrix.tocoo()
    return matrix.shape[0], sorted(zip(matrix.row.tolist(), matrix.col.tolist()))


def npy(rng):
    rows, columns = rng.randint(1, 5), rng.randint(1, 5)
    version = rng.choice([1, 1, 2, 3])
    keys = {"descr": "'<f4'", "fortran_order": "False", "shape": "(%d, %d)" % (rows, columns)}
    order, comma, pad, close = list(keys), ", ", "", "}"
    minor, magic, cut, said = 0, b"\x93NUMPY", 0, 0
    quote = "'"
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        what = rng.randrange(16)
        if what == 0:
            keys["descr"] = rng.choice(["'>f4'", "'<f8'", "'<i4'", "'<f2'", "'|u1'", "'f4'", "[('a', '<f4')]",
                "'<f4", "\"<f4\"", "'<f4' ", "<f4", "('<f4', (2,))", "'O'", "'=f4'", "'|f4'", "'<f'",
                "'float32'", "'single'", "u'<f4'", "b'<f4'", "'<float32'", "'<=f4'"])
        elif what == 1:
            keys["fortran_order"] = rng.choice(["True", "False", "0", "None", "false", "Falsey", " False "])
        elif what == 2:
            keys["shape"] = rng.choice(["()", "(%d,)" % rows, "(%d)" % rows, "(1, 2, 1)", "(0, 3)", "(-1, 2)",
                "(%dL, %dL)" % (rows, columns), "(%d, %d,)" % (rows, columns), "( %d ,%d )" % (rows, columns),
                "[%d, %d]" % (rows, columns), "(99999999999999999999, 1)", "(1_0, 1)", "(0x2, 1)", "(True, 1)",
                "(01, 2)", "(1.0, 2)", "(4294967295, 4294967295)", "(,)", "(2 2)"])
        elif what == 3:
            rng.shuffle(order)
        elif what == 4:
            keys["more"] = "1"
            order = list(keys)
        elif what == 5:
            order = rng.sample(order, max(1, len(order) - 1))
        elif what == 6:
            comma = rng.choice([",", " , ", ",\n", ",,", ";", " "])
        elif what == 7:
            close = rng.choice([", }", ",}", "} ", "}\n", "} x", "", "}}", ", , }"])
        elif what == 8:
            pad = " " * rng.choice([1, 20, 60, 9000, 20000])
        elif what == 9:
            version, minor = rng.choice([(0, 0), (4, 0), (1, 1), (2, 1), (1, 0), (2, 0), (3, 0)])
        elif what == 10:
            magic = rng.choice([b"\x93NUMPX", b"PK\3\4..", b"NUMPY\x93"])
        elif what == 11:
            cut = rng.choice([1, 4, -1, -7, 10**6, rows * columns * 4, rows * columns * 4 + 3])
        elif what == 12:
            said = rng.choice([-1, 1, 5, 60000])
        elif what == 13:
            quote = '"'
        elif what == 14:
            order.append(rng.choice(order))
        elif what == 15:
            pad = rng.choice(["\t", "\n", "\0", " \n "])
    items = comma.join("%s%s%s: %s" % (quote, k, quote, keys[k]) for k in order if k in keys)
    header = ("{" + items + close + pad + "\n").encode()
    size = max(0, len(header) + said)
    size = size % 65536 if version == 1 else size
    length = size.to_bytes(2 if version == 1 else 4, "little")
    data = np.array([rng.getrandbits(32) for _ in range(rows * columns)], dtype="<u4").tobytes()
    whole = magic + bytes([version, minor]) + length + header + data
    return whole[: len(whole) - cut] if cut > 0 else whole + bytes(-cut)


def numpy_matrix(path):
    matrix = np.load(path, allow_pickle=False)
    if not isinstance(matrix, np.ndarray):
        return None
    return matrix


def edge_list(rng):
    lines = []
    for _ in range(rng.randint(0, 8)):
        lines.append("%d%s%d" % (rng.randint(0, 9), rng.choice([" ", "\t", ",", ", ", "  "]), rng.randint(0, 9)))
        if rng.random() < 0.2:
            lines[-1] += rng.choice([" 0.5", " 1 1234567", "\t-2e3", " # note", " {'weight': 3}", ",7"])
    for _ in range(rng.choice([0, 0, 1, 2])):
        odd = ["1.5 2", "1 2.5", "-1 2", "1 -2", "4294967294 1", "4294967295 1", "1 99999999999999999999", "1", "",
            "# c", "% c",
               "a b", "1 2x", "1;2", "1,,2", ",1 2", "1 2 3 4", "1 2 3 4 5", "1 2 x", "0x1 2", "1e3 2", "+1 2",
                   "  3 4  ",
               "1 2\0", "007 1", "%%MatrixMarket matrix coordinate pattern general", "%MatrixMarket x", "1 2 nan",
                   "1 2,", "1\f2", "0 " + " " * 2000 + "1"]
        lines.insert(rng.randint(0, len(lines)), rng.choice(odd))
    return (rng.choice(["\n", "\n", "\r\n", "\r"]).join(lines) + rng.choice(["", "\n", "\r\n"])).encode()


def rules_of_lists(data):
    """The documented rules, as regular expressions. Returns vertices and edges, or None."""
    number = r"\d+"
    real = r"(?:[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|nan|inf))"
    two = r"(%s)(?:[ \t]+,?[ \t]*|,[ \t]*)(%s)" % (number, number)
    more = r"(?:(?:[ \t]*,[ \t]*|[ \t]+)%s){0,2}(?:[ \t]*,?[ \t]*)(?:[#%%].*)?" % real
    line_of = re.compile("%s%s|%s(?:[ \t]+|,[ \t]*)[{].*" % (two, more, two), re.A | re.S)
    edges = []
    for line in data.decode("latin1").split("\n"):
        line = line[:-1] if line.endswith("\r") else line
        if re.match(r"(?i)[% \t]*%[% \t]*matrixmarket", line):
            return None
        line = line.lstrip(" \t")
        if not line or line[0] in "#%":
            continue
        found = line_of.fullmatch(line)
        if not found:
            return None
        ends = [int(e) for e in found.groups() if e is not None]
        if max(ends) >= 2**32 - 1:
            return None
        edges.append(tuple(ends))
    return max((max(e) + 1 for e in edges), default=0), sorted(edges)


def pairs(rng):
    bits = ["k", "key", "\t", "value", "\r", "\0", "", " ", "\u00e9", "x" * 300]
    lines = ["".join(rng.choice(bits) for _ in range(rng.randint(0, 4))) + ("\t" if rng.random() < 0.97 else "") +
             "".join(rng.choice(bits) for _ in range(rng.randint(0, 4))) for _ in range(rng.randint(0, 6))]
    return (rng.choice(["\n", "\n", "\r\n"]).join(lines) + rng.choice(["", "\n", "\n\n"])).encode()


def rules_of_pairs(data):
    out = {}
    for line in data.split(b"\n"):
        line = line[:-1] if line.endswith(b"\r") else line
        if not line:
            continue
        key, tab, value = line.partition(b"\t")
        if not tab:
            return None
        out[key] = value
    return out


class Parsers:
    """The program that runs the examples' readers, for all files."""

    def __init__(self, program):
        self.program = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self, files):
        """Returns the program's output for each (kind, path)."""
        self.program.stdin.write("".join("%s %s\n" % each for each in files))
        self.program.stdin.flush()
        lines = [self.program.stdout.readline() for _ in files]
        if not all(lines):
            raise RuntimeError("the program ended: status %s" % self.program.wait())
        return [line.rstrip("\n") for line in lines]


def edges_of(line):
    words = line.split(" ")
    return int(words[0]), sorted(tuple(map(int, w.split("-"))) for w in words[1:])


def compare(kind, path, data, said, seen):
    """Returns an error, or None. `seen` counts the reasons that were met."""
    refused = said.startswith("refused: ")
    if "READERS DIFFER" in said:
        return "our two readers differ"
    if kind in ("list", "pairs"):
        theirs = (rules_of_lists if kind == "list" else rules_of_pairs)(data)
        ours = None
        if not refused:
            ours = edges_of(said) if kind == "list" else {
                bytes.fromhex(k): bytes.fromhex(v) for k, v in (w.split("=") for w in said.split())}
        seen[kind, "taken" if ours is not None else "refused"] += 1
        return None if ours == theirs else "by the rules it is %r" % (theirs,)
    try:
        theirs = (scipy_edges if kind == "edges" else numpy_matrix)(path)
    except Exception as e:  # each reader has its own exceptions
        theirs, why = None, "%s: %s" % (type(e).__name__, e)
    else:
        why = "no matrix of this kind"
    if refused and theirs is None:
        seen[kind, "refused by both"] += 1
        return None
    if refused:
        for words, reason in WE_REFUSE[kind]:
            if re.search(words, said):
                seen[kind, "we refuse: " + reason] += 1
                return None
        return "taken by the other side, and not refused for a reason that is listed"
    if theirs is None:
        for has, reason in THEY_REFUSE[kind]:
            if has(data):
                seen[kind, "they refuse: " + reason] += 1
                return None
        return "refused by the other side (%s)" % why
    seen[kind, "read by both"] += 1
    if kind == "edges":
        return None if edges_of(said) == theirs else "the other side reads %r" % (theirs,)
    rows, columns, bits = said.split(" ")
    same = (int(rows), int(columns)) == theirs.shape and bytes.fromhex(bits) == theirs.astype("<f4").tobytes()
    return None if same and theirs.dtype == np.dtype("<f4") else "the other side reads %r" % (theirs,)


def main():
    signal.signal(signal.SIGALRM, too_long)
    parsers = Parsers(sys.argv[1])
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 10000
    rng = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 32)
    makers = {"edges": market, "npy": npy, "list": edge_list, "pairs": pairs}
    seen, wrong = collections.Counter(), 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        for first in range(0, count, 100):
            kinds = [["edges", "edges", "npy", "list", "pairs"][n % 5] for n in range(first, min(first + 100, count))]
            texts = [makers[kind](rng) for kind in kinds]
            # SciPy and NumPy go by the ending of a name. Use new names: rewriting a file waits for
            # its data on ext4.
            paths = ["%s/%d.%s" % (folder, first + i, {"edges": "mtx",
                "npy": "npy"}.get(kind, "txt")) for i, kind in enumerate(kinds)]
            for path, data in zip(paths, texts):
                with open(path, "wb") as f:
                    f.write(data)
            answers = parsers.read([("edges" if kind == "list" else kind, path) for kind, path in zip(kinds, paths)])
            for kind, path, data, said in zip(kinds, paths, texts, answers):
                problem = compare(kind, path, data, said, seen)
                wrong += problem is not None
                if problem and wrong <= 20:
                    print("WRONG %s: %s\n  %r\n  we say: %s" % (kind, problem, data[:400], said[:300]))
                os.unlink(path)
    for (kind, what), n in sorted(seen.items()):
        print("%-6s %6d  %s" % (kind, n, what))
    print("%d files, %d wrong; NumPy %s, SciPy %s" % (count, wrong, np.__version__, scipy.__version__))
    # The test proves nothing if all files are refused.
    few = [k for k, least in (("edges", "read by both"), ("npy", "read by both"), ("list", "taken"), ("pairs",
        "taken")) if seen[k, least] < count // 100]
    if few:
        print("too few files were read: %s" % ", ".join(few))
    return 1 if wrong or few else 0


if __name__ == "__main__":
    sys.exit(main())
