"""A function with other values in the place of what it closes over.

What is traced ends with its trace. A function that closes over it can be called later
only if it gets what stands for it then.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax


def replaced(x: Any, known: Mapping[int, Any]) -> Any:
    """A function, or a tree, with other values for those whose ids are known.

    They are found in closures, default values, partial functions and trees, and in the
    functions in those; whatever holds none stays the same object.
    """
    made = dict(known)

    def new(x: Any) -> Any:
        if id(x) not in made:
            made[id(x)] = x  # while it is made: a function may close over itself
            parts, join = _taken_apart(x)
            others = list(map(new, parts))
            if any(a is not b for a, b in zip(parts, others, strict=True)):
                made[id(x)] = join(*others)
        return made[id(x)]

    return new(x)


def _taken_apart(x: Any) -> tuple[list[Any], Callable[..., Any]]:
    """What it holds, and what puts it together."""
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__], types.MethodType
    if isinstance(x, functools.partial):
        parts = [x.func, x.args, x.keywords]
        return parts, lambda fun, args, named: functools.partial(fun, *args, **named)
    if isinstance(x, types.FunctionType):
        cells = [y for y in x.__closure__ or () if y != types.CellType()]
        parts = [x.__defaults__, *(cell.cell_contents for cell in cells)]
        return parts, lambda *others: _like(x, cells, *others)
    leaves, structure = jax.tree.flatten(x)
    is_leaf = len(leaves) == 1 and leaves[0] is x
    return ([] if is_leaf else leaves), lambda *others: structure.unflatten(others)


def _like(fun: Any, cells: list[Any], defaults: Any, *contents: Any) -> Any:
    """A function with other values in some cells of its closure."""
    known = dict(zip(map(id, cells), map(types.CellType, contents), strict=True))
    closure = tuple(known.get(id(cell), cell) for cell in fun.__closure__ or ())
    place = fun.__code__, fun.__globals__, fun.__name__
    new = types.FunctionType(*place, defaults, closure)
    new.__kwdefaults__ = fun.__kwdefaults__
    return functools.update_wrapper(new, fun)
