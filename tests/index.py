"""Which file tests what: each file, with the first line of its docstring.

    python tests/index.py            # all
    python tests/index.py devices    # those with the word in their path or in the line
    python tests/index.py --quick    # the paths alone of those with quick tests

Quick tests are those marked so, and those that quick.txt names.
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


def quick():
    """The tests that quick.txt names, as pytest does, in folders below tests."""
    lines = (TESTS / "quick.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def quick_files():
    """The paths of the files that have quick tests."""
    marked = "mark." + "quick"
    paths = (x for x in TESTS.rglob("test_*.py") if marked in x.read_text("utf-8"))
    return sorted({*paths, *(TESTS / name.partition("::")[0] for name in quick())})


def main(words):
    """Prints it."""
    if words == ["--quick"]:
        print(*(path.relative_to(TESTS.parent) for path in quick_files()))
        return
    rows = index()
    width = max(map(len, rows))
    for path, line in rows.items():
        if all(word in f"{path} {line}" for word in words):
            print(f"{path:{width}}  {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
