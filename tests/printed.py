"""Prints anew what pages and notebooks show: for `make printed`.

    python tests/printed.py                      # all of them, where they stand
    python tests/printed.py memory.md 2_any   # those with such a word in their name
    python tests/printed.py jax.numpy.cumsum     # one row of benchmarks/FUNCTIONS.md

Read the difference before you commit it: what changed is what the library says now.
"""

import contextlib
import io
import re
import sys

import conftest  # noqa: F401  # the devices and the cache of the tests
import jax
from corpus import functions
from index import TESTS

with contextlib.suppress(ImportError):  # pages alone need none
    import nbclient
    import nbformat

ROOT = TESTS.parent


BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.M | re.S)


def page(name, text):
    """The text of a page, with what its programs print."""
    namespace, printed, line = {"__name__": "__main__"}, io.StringIO(), 0

    def block(match):
        nonlocal printed, line
        language, code = match.groups()
        if language == "python":
            # So many lines before it that an error names the line of the page.
            line = text.count("\n", 0, match.start(2))
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * line + code, name, "exec"), namespace)
            return match[0]
        said, printed = printed.getvalue(), io.StringIO()
        return f"```text\n{said}```"

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        new = BLOCK.sub(block, text)
    assert not printed.getvalue(), f"{name}, line {line}: no block shows what it prints"
    return new


def notebook(path):
    """Runs a notebook, and keeps what it shows."""
    read = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(read, timeout=300, resources=place).execute()
    for cell in read.cells:
        cell.metadata.pop("execution", None)  # the time of day
    nbformat.write(read, path)


def main(words):
    """Prints the pages and notebooks with such a word in their names; or rows."""
    names = {name for name, _ in functions.functions()}
    for name in names.intersection(words):
        print(functions.row(name))
    parts = [word for word in words if word not in names] if words else [""]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in [*pages, *sorted((ROOT / "notebooks").glob("*.ipynb"))]:
        if "_build" in path.parts or not any(part in path.name for part in parts):
            continue
        print(path.relative_to(ROOT), flush=True)
        if path.suffix == ".ipynb":
            notebook(path)
        else:
            path.write_text(page(path.name, path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
