"""A function with other values in place of those that it closes over.

A traced value ends with its trace. A function that closes over traced values can be
called later only with other values in their place.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax


def replaced(x: Any, known: Mapping[int, Any]) -> Any:
    """A function, or a tree, with other values in place of those with `known` ids.

    Values are replaced in closures, default values, partial functions and trees, and in
    the functions inside. An object without any of the values stays the same object.
    """
    replacements = dict(known)

    def replace(x: Any) -> Any:
        if id(x) not in replacements:
            replacements[id(x)] = x  # meanwhile: a function may close over itself
            parts, join = _parts(x)
            new = list(map(replace, parts))
            if any(a is not b for a, b in zip(parts, new, strict=True)):
                replacements[id(x)] = join(*new)
        return replacements[id(x)]

    return replace(x)


def _parts(x: Any) -> tuple[list[Any], Callable[..., Any]]:
    """The parts of a function or a tree, and a function that joins new parts."""
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
