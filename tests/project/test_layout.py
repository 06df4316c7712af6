"""The folders of the package: who imports whom, and how much there is to read.

    python tests/project/test_layout.py    # lines by folder

A line of code is one with a token of Python outside comments and docstrings.
"""

import ast
import collections
import graphlib
import io
import pathlib
import re
import sys
import tokenize

import jax
import jax.numpy as jnp
import pytest

import ga_optax
from ga_optax import accumulator
from ga_optax._loop import micro_step

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "ga_optax"

# What each folder may import, beside itself. The files at the root are folders of one.
LEAVES = {"_checks", "_text", "accumulator", "config"}
MAY_IMPORT = {
    "_checks": {"_text"},
    "_text": set(),
    "accumulator": {"_checks"},
    "config": set(),
    "data": LEAVES,
    "_devices": LEAVES,
    "_passes": LEAVES | {"_devices"},
    "_partition": {"_passes", "_text"},
    "_loop": LEAVES | {"_devices", "_passes"},
    "_window": LEAVES | {"_devices", "_passes", "_partition", "_loop"},
    "_calls": LEAVES | {"_devices", "_passes", "_partition", "_loop", "_window"},
    "_across": LEAVES | {"_devices", "_passes"},
    "_compiled": LEAVES | {"_passes"},
    "_verify": LEAVES | {"_devices", "_passes", "_partition", "_calls"},
    "blocks": LEAVES,
}
TOP = {"__init__", "flax", "testing"}  # may import all of these, and ours

# -- Reading ---------------------------------------------------------------------------


def modules():
    """The text of each module, by its name without `ga_optax.`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


def imports(module, tree, names):
    """The modules of ours that `module` imports, those inside of functions included."""
    is_package = any(name.startswith(f"{module}.") for name in names)
    parts = ["ga_optax", *module.split(".")]
    wanted = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                wanted += [alias.name for alias in node.names]
            case ast.ImportFrom(level=0, module=name):
                wanted += [f"{name}.{alias.name}" for alias in node.names]
            case ast.ImportFrom(level=level, module=name):
                above = parts[: len(parts) - level + is_package]
                where = ".".join([*above, name] if name else above)
                wanted += [f"{where}.{alias.name}" for alias in node.names]
            case ast.Call(args=[ast.Constant(str(name)), *_]):
                if ast.unparse(node.func).endswith("import_module"):
                    wanted.append(f"ga_optax{name}" if name[0] == "." else name)
    found = set()
    for name in wanted:
        package, _, name = name.partition(".")
        while name and name not in names:  # a name of a module: its module
            name = name.rpartition(".")[0]
        if package == "ga_optax":
            found.add(name or "__init__")
    return found


def graph():
    """What each module imports of ours."""
    found = modules()
    return {
        name: imports(name, ast.parse(text), found) - {name}
        for name, text in found.items()
    }


def folder(name):
    """The folder of a module, or the module itself if it is at the root."""
    return name.partition(".")[0]


def functions(tree, prefix=""):
    """`[(qualified name, node)]` of all functions, nested ones too."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        name = f"{prefix}.{node.name}" if named else prefix
        if named and not isinstance(node, ast.ClassDef):
            yield name, node
        yield from functions(node, name)


def arguments(node):
    """How many arguments a function takes by position or by keyword, but for self."""
    names = [a.arg for a in node.args.posonlyargs + node.args.args]
    return len(names) + len(node.args.kwonlyargs) - (names[:1] in (["self"], ["cls"]))


def is_private(module, name):
    """True if we alone call it: it is in a private module, and not exported."""
    last = name.rpartition(".")[2]
    if last.startswith("__"):
        return False
    open_to_users = "blocks._by_block", "flax._modules", "flax._states"
    exported = last in ga_optax.__all__ or module in open_to_users
    return last.startswith("_") or ("._" in f".{module}" and not exported)


def code_lines(text):
    """The numbers of the lines with a token outside of comments and docstrings."""
    names = ["COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"]
    skip = [getattr(tokenize, name) for name in names]
    tree, lines = ast.parse(text), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skip:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def measured():
    """`(lines of code by folder, of functions, arguments of private functions)`."""
    total, lengths, counts = collections.Counter(), {}, {}
    for module, text in modules().items():
        lines = code_lines(text)
        total[folder(module)] += len(lines)
        for name, node in functions(ast.parse(text)):
            inside = range(node.lineno, node.end_lineno + 1)
            lengths[module + name] = len(lines & set(inside))
            if is_private(module, name):
                counts[module + name] = arguments(node)
    return total, lengths, counts


def main():
    """Prints the lines by folder, and what is too long or takes too much."""
    total, lengths, counts = measured()
    for name, count in {**total, "lines of code": total.total()}.items():
        print(f"{count:7,}  {name}")
    for what, of, most in (("lines", lengths, 50), ("arguments", counts, 5)):
        for name in too_many(of, most):
            print(f"{of[name]:7,}  {what}: {name}")


def too_many(of, most):
    return [name for name, count in of.items() if count > most]


# -- Who imports whom ------------------------------------------------------------------


@pytest.mark.quick
def test_imports_between_folders_point_one_way():
    edges = graph()
    known = set(MAY_IMPORT) | TOP
    assert {folder(name) for name in edges} <= known, "a folder that the table lacks"
    forbidden = [
        (name, other)
        for name, others in edges.items()
        for other in others
        if folder(name) not in TOP
        and folder(other) not in MAY_IMPORT[folder(name)] | {folder(name)}
    ]
    assert forbidden == []
    order = graphlib.TopologicalSorter(MAY_IMPORT).static_order()
    assert {*order} == {*MAY_IMPORT}  # and the table itself has no cycle

    # No modules import each other in a cycle. A package stands for its modules where
    # one of them is imported by its name.
    edges = {name: others - {"__init__"} for name, others in edges.items()}
    graphlib.TopologicalSorter(edges).prepare()


def test_every_private_function_is_named_where_it_is_used():
    """One that a decorator registers is used by that."""
    words = collections.Counter(re.findall(r"\w+", "\n".join(modules().values())))
    defined = [
        node
        for text in modules().values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    private = [x.name for x in defined if x.name[:1] == "_" != x.name[1:2]]
    registered = {x.name for x in defined if x.decorator_list}
    assert len(private) > 500
    assert [x for x in private if words[x] < 2 and x not in registered] == []


def test_the_table_for_contributors_names_every_folder():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [name for name in folders if f"{name}/" not in text] == []


# -- How large -------------------------------------------------------------------------


def test_the_root_is_small_no_function_long_and_no_private_one_takes_much():
    assert len(list(PACKAGE.glob("*.py"))) <= 12
    total, lengths, counts = measured()
    assert (too_many(lengths, 50), too_many(counts, 5)) == ([], [])
    assert 5_000 < total.total() <= 17_211  # who raises it says what went for it
    tests = (x.read_text("utf-8") for x in (ROOT / "tests").rglob("*.py"))
    assert sum(len(code_lines(text)) for text in tests) <= 17_161  # so here


# -- How much a reader meets -----------------------------------------------------------

PARAMS = {"a": jnp.ones((3, 5))}
ROWS = {"x": jnp.ones((16, 3))}


def mean(params, rows):
    return ((rows["x"] @ params["a"]) ** 2).mean()


def batch_norm(params, rows):
    h = rows["x"] @ params["a"]
    h = h - h.mean(0, keepdims=True)
    h = h / jnp.sqrt((h**2).mean(0, keepdims=True) + 1e-3)
    return (h**4).mean()


def entered(loss):
    """`(files, edges, calls)` of a call of ours: an edge is a file that calls another.

    A function of ours is called by the innermost function of ours around it: what JAX
    calls for us between the two does not count.
    """
    edges, calls = set(), 0

    def seen(frame, event, _):
        nonlocal calls
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(f"{PACKAGE}/"):
            return
        calls += 1
        caller = frame.f_back
        while caller and not caller.f_code.co_filename.startswith(f"{PACKAGE}/"):
            caller = caller.f_back
        if caller and caller.f_code.co_filename != name:
            edges.add((caller.f_code.co_filename, name))

    step, before = jax.jit(ga_optax.value_and_grad(loss, 4)), sys.getprofile()
    sys.setprofile(seen)
    try:
        jax.eval_shape(step, PARAMS, ROWS)
    finally:
        sys.setprofile(before)
    return {file for edge in edges for file in edge}, edges, calls


@pytest.mark.quick
@pytest.mark.parametrize(
    ("loss", "most_files", "most_edges", "most_calls"),
    [(mean, 35, 113, 1_660), (batch_norm, 47, 177, 11_200)],
)
def test_a_call_enters_few_files(loss, most_files, most_edges, most_calls):
    """On one device or on several. Older Pythons call comprehensions.

    A JAX without references is warned of once, which enters one file more.
    """
    files, edges, calls = entered(loss)
    assert f"{PACKAGE}/_calls/engine.py" in files  # something was seen
    if not micro_step.HAS_REFS:
        files.discard(f"{PACKAGE}/_text.py")
    if accumulator.LOSES_ROWS:  # `micro_step` puts fences into the loop, and calls it
        most_edges, most_calls = most_edges + 3, 1.2 * most_calls
    assert (len(files) <= most_files, len(edges) <= most_edges) == (True, True), (
        len(files),
        len(edges),
    )
    assert calls <= most_calls or sys.version_info < (3, 12)


def test_no_file_is_long():
    texts = modules()
    lengths = {name: len(code_lines(text)) for name, text in texts.items()}
    assert too_many(lengths, 450) == []
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    statements = [x for x in nodes if isinstance(x, ast.Import | ast.ImportFrom)]
    assert sum(x.end_lineno - x.lineno + 1 for x in statements) <= 1146
    names = collections.Counter(x.name for x in nodes if isinstance(x, ast.FunctionDef))
    assert names["run"] <= 8  # other functions say what they do


if __name__ == "__main__":
    main()
