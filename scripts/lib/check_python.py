# SPDX-License-Identifier: Apache-2.0
"""check_python.py FILE..: prints the faults of Python sources, a line each. They must be Python
3.9, without unused imports or names, with lines of at most 120 columns."""

import ast
import sys

COLUMNS = 120


def unused(tree, path):
    """Prints names that a module imports and never uses, unless it re-exports them (__all__)."""
    imported = {}
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", "") != "__future__":
            for name in node.names:
                imported[(name.asname or name.name).split(".")[0]] = node.lineno
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words = {word for text in strings for word in text.replace("[", " ").replace("]", " ").replace(".", " ").split()}
    for name, line in imported.items():
        if name not in used and name not in words and not path.endswith("conftest.py"):
            print(f"{path}:{line}: {name} is imported and not used")


def check(path):
    with open(path, encoding="utf-8") as f:
        text = f.read()
    try:
        tree = ast.parse(text, path, feature_version=(3, 9))
    except SyntaxError as e:
        print(f"{path}:{e.lineno}: {e.msg} (Python 3.9)")
        return
    unused(tree, path)
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > COLUMNS:
            print(f"{path}:{number}: {len(line)} columns, at most {COLUMNS}")
        if line != line.rstrip():
            print(f"{path}:{number}: blanks at the end of the line")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check(name)
