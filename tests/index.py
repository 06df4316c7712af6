"""Which file tests what: each file, with the first line of its docstring.

python tests/index.py            # all
python tests/index.py devices    # those with the word in their path or in the line
"""

import ast
import pathlib
import sys

TESTS = pathlib.Path(__file__).parent


def index():
    """`{path below tests: first line of its docstring}`, by folder; the root first."""
    paths = sorted(TESTS.rglob("*.py"), key=lambda path: (path.parent, path.name))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    names = {path: path.relative_to(TESTS).as_posix() for path in paths}
    docs = {names[x]: ast.get_docstring(tree) or "" for x, tree in trees.items()}
    return {name: doc.split("\n")[0] for name, doc in docs.items()}


def main(words):
    """Prints it."""
    rows = index()
    width = max(map(len, rows))
    for path, line in rows.items():
        if all(word in f"{path} {line}" for word in words):
            print(f"{path:{width}}  {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
