"""The code of the package that no model of the corpora runs: delete it, or say why not.

    python tests/unreached.py              # all models of digests.py, in minutes
    python tests/unreached.py clip mesh    # those with all of these words
    python tests/unreached.py --pytest tests/docs/test_documents.py  # or these tests

Read it before each release: what no model runs may save nobody anything, and if the law
holds without it, it goes. Each line has a number of statements, the file, the lines of
the first and of the last, and the function. Statements that raise an error come apart,
at the end. It needs Python 3.12 or newer.
"""

import ast
import collections
import pathlib
import sys
import warnings

import digests
import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "ga_optax"


def watched(run):
    """`{path: numbers of the lines of the package}` that a function of nothing runs."""
    found, watch = collections.defaultdict(set), sys.monitoring

    def ran(code, line):
        if code.co_filename.startswith(f"{PACKAGE}/"):
            found[code.co_filename].add(line)
        return watch.DISABLE  # each line once

    watch.use_tool_id(watch.COVERAGE_ID, "unreached")
    watch.register_callback(watch.COVERAGE_ID, watch.events.LINE, ran)
    watch.set_events(watch.COVERAGE_ID, watch.events.LINE)
    run()
    watch.free_tool_id(watch.COVERAGE_ID)
    return found


def models(words):
    """Traces and lowers all models with these words in their names."""
    warnings.simplefilter("ignore")
    for name, ways, *case in digests.cases():
        for way in ways:
            if all(word in f"{name}: {way}" for word in words):
                digests.digest(ways[way], *case)


def statements(node, function=""):
    """`(function, statement)` of what stands in functions, but for docstrings."""
    for x in ast.iter_child_nodes(node):
        if isinstance(x, ast.FunctionDef | ast.ClassDef):
            yield from statements(x, f"{function}.{x.name}".lstrip("."))
            continue
        text = isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)
        in_class = isinstance(node, ast.ClassDef | ast.Module)
        if isinstance(x, ast.stmt) and not text and not in_class:
            yield function, x
        yield from statements(x, function)


def lines_of(statement):
    """The lines of a statement; of one with a body those of its head alone."""
    inside = [x for x in ast.walk(statement) if isinstance(x, ast.stmt)][1:]
    first = min((x.lineno for x in inside), default=statement.end_lineno + 1)
    return set(range(statement.lineno, max(first, statement.lineno + 1)))


def main(words):
    """Prints what did not run, by function."""
    is_pytest = words[:1] == ["--pytest"]
    found = watched(lambda: pytest.main(words[1:]) if is_pytest else models(words))
    for raises in (False, True):
        total = 0
        for path in sorted(PACKAGE.rglob("*.py")):
            left = collections.defaultdict(list)
            for function, x in statements(ast.parse(path.read_text("utf-8"))):
                ran = lines_of(x) & found[f"{path}"]
                if isinstance(x, ast.Raise) == raises and not ran:
                    left[function].append(x.lineno)
            for function, at in left.items():
                total += len(at)
                where = f"{path.relative_to(PACKAGE)}:{at[0]}-{at[-1]}"
                print(f"{len(at):5}  {where}  {function}")
        print(f"{total:5}  {'that raise' if raises else 'statements'}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
