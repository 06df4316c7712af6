"""The folders of the package: who imports whom, and how large things are.

    python tests/test_layout.py    # lines of code by folder, and the longest functions

A line of code is one with a token of Python outside comments and docstrings.
"""

import ast
import collections
import graphlib
import io
import pathlib
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "ga_optax"

# What each folder may import, beside itself. The files at the root are folders of one.
LEAVES = {"_checks", "_text", "accumulator", "config"}
MAY_IMPORT = {
    "_checks": {"_text"},
    "_text": set(),
    "accumulator": {"_checks"},
    "config": set(),
    "data": LEAVES,
    "schedules": LEAVES,
    "_devices": LEAVES,
    "_passes": LEAVES | {"_devices"},
    "_partition": {"_passes"},
    "_loop": LEAVES | {"_devices", "_passes"},
    "_window": LEAVES | {"_devices", "_passes", "_partition", "_loop"},
    "_calls": LEAVES | {"_devices", "_passes", "_partition", "_loop", "_window"},
    "_across": LEAVES | {"_devices"},
    "_compiled": LEAVES | {"_passes"},
    "_verify": LEAVES | {"_devices", "_passes", "_partition", "_calls"},
    "blocks": LEAVES,
}
TOP = {"__init__", "__main__", "flax", "testing"}  # may import all of these, and ours

MOST_FILES, MOST_LINES, MOST_ARGUMENTS = 12, 50, 5


# -- Reading ---------------------------------------------------------------------------


def modules(package=PACKAGE):
    """The syntax of each module, by its name without `ga_optax.`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        parts = parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts
        found[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree, names):
    """The modules that one imports, those inside of functions included."""
    found = set()
    for node in ast.walk(tree):
        wanted = []
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            whole = f"{node.module}."
            wanted = [whole + alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and node.args:
            first = node.args[0]  # of importlib.import_module("...")
            if ast.unparse(node.func).endswith("import_module") and isinstance(
                first, ast.Constant
            ):
                wanted = [first.value]
        for name in wanted:
            if name.partition(".")[0] != "ga_optax":
                continue
            name = name.partition(".")[2]
            while name and name not in names:  # a name of a module: its module
                name = name.rpartition(".")[0]
            found.add(name or "__init__")
    return found


def graph(package=PACKAGE):
    """What each module imports of ours."""
    found = modules(package)
    return {name: imports(tree, found) - {name} for name, tree in found.items()}


def folder(name):
    """The folder of a module, or the module itself if it is at the root."""
    return name.partition(".")[0]


def forbidden(edges):
    """`[(module, imported)]` between folders that the table above does not allow."""
    return [
        (name, other)
        for name, others in sorted(edges.items())
        for other in sorted(others)
        if folder(name) != folder(other)
        and folder(name) not in TOP
        and folder(other) not in MAY_IMPORT.get(folder(name), set())
    ]


def functions(tree, prefix=""):
    """`[(qualified name, node)]` of all functions, nested ones too."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        name = f"{prefix}.{node.name}" if named else prefix
        if named and not isinstance(node, ast.ClassDef):
            yield name, node
        yield from functions(node, name)


def docstring_lines(node):
    """The lines of the docstring of a module, a class or a function."""
    if ast.get_docstring(node) is None:
        return set()
    return set(range(node.body[0].lineno, node.body[0].end_lineno + 1))


def length(node, lines):
    """The lines of code of a function, from `def` to its end."""
    return len(lines & set(range(node.lineno, node.end_lineno + 1)))


def arguments(node):
    """How many arguments a function takes by position or by keyword, but for self."""
    names = [a.arg for a in node.args.posonlyargs + node.args.args]
    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
    return len(names) + len(node.args.kwonlyargs)


def is_private(module, name):
    """Whether only we call it: it or its module begins with an underscore.

    Those that `ga_optax` exports are public wherever they are, with all their options.
    """
    import ga_optax

    last = name.rpartition(".")[2]
    if last.startswith("__"):
        return False
    exported = last in ga_optax.__all__ or module in (
        "blocks._select",
        "flax._modules",
        "flax._states",
    )
    inside = any(part.startswith("_") for part in module.split("."))
    return last.startswith("_") or (inside and not exported)


def code_lines(text):
    """The numbers of the lines with a token outside of comments and docstrings."""
    names = ["COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"]
    skip = [getattr(tokenize, name) for name in names]
    tree, lines = ast.parse(text), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skip:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            lines -= docstring_lines(node)
    return lines


def measured(package=PACKAGE):
    """`(lines of code by folder, of functions, arguments of private functions)`."""
    total, lengths, counts = collections.Counter(), {}, {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        parts = path.relative_to(package).with_suffix("").parts
        module, lines = ".".join(parts), code_lines(text)
        total[parts[0]] += len(lines)
        for name, node in functions(ast.parse(text)):
            lengths[module + name] = length(node, lines)
            if is_private(module, name):
                counts[module + name] = arguments(node)
    return total, lengths, counts


def main():
    """Prints what the tests below look at."""
    total, lengths, counts = measured()
    for name, count in total.items():
        print(f"{count:7,}  {name}")
    print(f"{sum(total.values()):7,}  lines of code")
    for what, of, most in (
        ("lines", lengths, MOST_LINES),
        ("arguments", counts, MOST_ARGUMENTS),
    ):
        for name, count in sorted(of.items(), key=lambda item: -item[1]):
            if count > most:
                print(f"{count:7,}  {what}: {name}")


# -- Who imports whom ------------------------------------------------------------------


@pytest.mark.quick
def test_imports_between_folders_point_one_way():
    edges = graph()
    known = set(MAY_IMPORT) | TOP
    assert {folder(name) for name in edges} <= known, "a folder that the table lacks"
    assert forbidden(edges) == []
    order = list(graphlib.TopologicalSorter(MAY_IMPORT).static_order())
    assert set(order) == set(MAY_IMPORT)  # and the table itself has no cycle

    # No modules import each other in a cycle.
    # A package stands for its modules where one of them is imported by its name.
    edges = {name: others - {"__init__"} for name, others in edges.items()}
    graphlib.TopologicalSorter(edges).prepare()


def test_the_tables_for_contributors_name_every_folder():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for page in ("CONTRIBUTING.md", "docs/design.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in folders:
            assert f"{name}/" in text, (page, name)


# -- How large -------------------------------------------------------------------------


def test_the_root_is_small_no_function_long_and_no_private_one_takes_much():
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_FILES
    total, lengths, counts = measured()
    assert {name for name, count in lengths.items() if count > MOST_LINES} == set()
    assert {name for name, count in counts.items() if count > MOST_ARGUMENTS} == set()
    assert sum(total.values()) > 5_000


if __name__ == "__main__":
    main()
