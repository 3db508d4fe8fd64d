#!/usr/bin/env python3
"""check_prose.py FILE..: counts the sentences of comments and documents that have to be read twice,
by the patterns below, and fails where a folder has more than one in a hundred. It only counts: zero
here does not make a page readable."""
import collections
import re
import sys

LIMIT = 0.01  # of the sentences of a folder
ENOUGH = 40  # sentences; a folder with fewer is counted with its parent
PATTERNS = {
    "a clause as the subject": r"^(What|Who|Whoever|Whatever)\b(?!.*\?$)",
    "an actor without a name": r"(?i)\b(nobody|somebody|whoever|anybody)\b",
    "starts with Of": r"^Of (what|an?|the|those|one|two|it|all)\b",
    "continues the line above": r"^\.\.\s*\w",
    "is had": r"\b(is|are|was|be) had\b",
    "more than 40 words": r"^(?:\S+\s+){40,}\S+",
}
SLASHES = re.compile(r"^\s*(?://+|/\*+|\*(?!/))\s?(.*?)(?:\*/)?\s*$|^.*\S\s+//\s(.*)$")
HASH = re.compile(r"^\s*#(?!!)\s?(.*)$")


def texts(path):
    """Yields (line number, text) of each comment, or of each paragraph of a document."""
    document = path.endswith(".md")
    comment = SLASHES if re.search(r"\.(cpp|hpp|h|cuh?|c)$", path) else HASH
    lines, start, code = [], 0, False
    for number, line in enumerate(open(path, encoding="utf-8", errors="replace"), 1):
        if document:
            code ^= line.lstrip().startswith("```")
            text = "" if code or line.startswith(("#", "|", "    ", "```")) else line.strip(" *->\n")
        else:
            found = comment.match(line)
            text = next((part.strip() for part in found.groups() if part), "") if found else ""
        # An item of a list, a row of a table and a comment behind code stand alone.
        alone = (re.match(r"\s*[-*] ", line) if document else found and found.lastindex == 2) or re.match(
            r"-|\.\.|\d+\. |.*\S   ", text)
        if lines and (not text or alone):
            yield start, " ".join(lines)
            lines = []
        if text:
            start = start if lines else number
            lines.append(text)
    if lines:
        yield start, " ".join(lines)


def main(paths):
    total, wrong = collections.Counter(), collections.defaultdict(list)
    for path in paths:
        folder = path.rsplit("/", 1)[0] if "/" in path else "."
        for number, text in texts(path):
            for sentence in re.split(r"(?<=[.;:!?])\s+(?=[A-Z(-])", re.sub(r"`[^`]*`", "CODE", text)):
                if len(sentence.split()) < 3:
                    continue
                total[folder] += 1
                for name, pattern in PATTERNS.items():
                    if re.search(pattern, sentence):
                        wrong[folder].append(f"{path}:{number}: {name}: {sentence[:100]}")
                        break
    for folder in sorted(total, key=len, reverse=True):
        if total[folder] < ENOUGH and "/" in folder:
            parent = folder.rsplit("/", 1)[0]
            total[parent] += total.pop(folder)
            wrong[parent] += wrong.pop(folder, [])
    for folder, found in sorted(wrong.items()):
        if len(found) > max(1, LIMIT * total[folder]):
            print(*found, sep="\n")


main(sys.argv[1:])
