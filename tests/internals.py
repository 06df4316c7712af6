"""What the package reads of JAX beside its public functions, by name.

    python tests/internals.py

Modules; primitives that the table knows; parameters of equations; and names in programs
as MLIR writes them. They are read from the text of the package, so the list is whole.
"""

import ast
import pathlib
import re
import sys

sys.path.append(str(pathlib.Path(__file__).parent.parent))

from ga_optax._passes import primitives

PACKAGE = pathlib.Path(__file__).parent.parent / "ga_optax"
# The parameters of an equation go by these names.
_PARAMS = ("p", "params", "by_name")
_MODULE = re.compile(r"jax(?:lib)?\.(?:_src|extend|interpreters|lib)\b")


def read():
    """`{kind: names}`, sorted."""
    paths = sorted(PACKAGE.rglob("*.py"))
    nodes = [n for x in paths for n in ast.walk(ast.parse(x.read_text("utf-8")))]
    constants = [n.value for n in nodes if isinstance(n, ast.Constant)]
    texts = [x for x in constants if isinstance(x, str)]
    return {
        "modules": sorted(set(filter(None, map(_module, nodes)))),
        "primitives": sorted(primitives.TABLE),
        "parameters": sorted(set(filter(None, map(_parameter, nodes)))),
        "MLIR": sorted({x for x in texts if re.fullmatch(r"sdy\.\w+", x)}),
    }


def _module(node):
    """The module that a statement imports from, if it is one of JAX's inner ones."""
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return node.module if _MODULE.match(node.module) else None
    return None


def _parameter(node):
    """The parameter of an equation that an expression reads, such as `p["axes"]`."""
    if isinstance(node, ast.Subscript):
        value, key = node.value, node.slice
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and node.args
    ):
        value, key = node.func.value, node.args[0]
    else:
        return None
    name = getattr(value, "attr", getattr(value, "id", ""))
    is_text = isinstance(key, ast.Constant) and isinstance(key.value, str)
    return key.value if is_text and name in _PARAMS else None


if __name__ == "__main__":
    for kind, names in read().items():
        print(f"{kind} ({len(names)}): {', '.join(names)}")
