"""Text for the user: tables, paragraphs, warnings at the line of the user's code."""

import math
import os
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

WIDTH = 88
_MOST = 8  # names that are listed


def columns(rows: Iterable[Sequence[str]], left: Iterable[int] = ()) -> list[str]:
    """Lines of a table: columns two spaces apart, flush right except those in `left`.

    Args:
      rows: the cells of each row, the header first.
      left: the indices of the columns that are flush left.

    Returns:
      One line for each row, without trailing spaces.
    """
    rows, left = list(rows), set(left)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def wrap(paragraph: str) -> list[str]:
    """Lines of a paragraph, each with the indent of the first."""
    indent = " " * (len(paragraph) - len(paragraph.lstrip()))
    return textwrap.wrap(
        paragraph,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def listed(names: Sequence[object]) -> str:
    """The first names in words, and the number of further names."""
    shown, more = ", ".join(map(repr, names[:_MOST])), len(names) - _MOST
    return f"{shown} and {more} more" if more > 0 else shown


def repr_of(name: str, fields: Mapping[str, Any]) -> str:
    """A `repr` in a few lines: numbers as they are, trees by their arrays and bytes."""
    fields = {
        field: x for field, x in fields.items() if not isinstance(x, tuple | dict) or x
    }
    texts = [f"{field}={_short(x)}" for field, x in fields.items()]
    line = f"{name}({', '.join(texts)})"
    if len(line) <= WIDTH:
        return line
    unbroken = [text.replace(" ", "\0") for text in texts]  # wrap breaks at spaces
    lines = wrap(" " * 4 + ", ".join(unbroken) + ",")
    return "\n".join([f"{name}(", *lines, ")"]).replace("\0", " ")


def _short(x: Any) -> str:
    leaves = jax.tree.leaves(x)
    are_arrays = all(
        hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves
    )
    if not (leaves and are_arrays):
        return repr(x)
    if leaves[0] is x and math.prod(x.shape) <= 8:
        is_here = isinstance(x, jax.Array | np.ndarray | np.generic)
        is_here = is_here and not isinstance(x, jax.core.Tracer)
        if is_here and getattr(x, "is_fully_addressable", True):
            is_deleted = isinstance(x, jax.Array) and x.is_deleted()
            return "<deleted>" if is_deleted else str(np.asarray(x).tolist())
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    number = "1 array" if len(leaves) == 1 else f"{len(leaves)} arrays"
    return f"<{number}, {nbytes:,} bytes>"


def ruled(rows: Sequence[Sequence[str]], left: Iterable[int]) -> list[str]:
    """Lines of a table as `columns` makes it, with a rule under the header."""
    rule = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return columns([rows[0], rule, *rows[1:]], left)


def unfold(paragraph: str) -> str:
    """Joins the lines of a paragraph that was indented in the code."""
    return re.sub(r"\s*\n\s*", " ", paragraph)


def warn(text: str) -> None:
    """Warns at the line of the caller's code: not of this package's, nor of JAX's."""
    frames = traceback.walk_stack(sys._getframe(1))
    paths = (frame.f_code.co_filename for frame, _ in frames)
    outside = (i for i, x in enumerate(paths, 2) if not x.startswith(_INSIDE))
    warnings.warn(text, stacklevel=next(outside, 2))


def warn_once(text: str) -> None:
    """Warns, unless the same was said before."""
    if is_first(text):
        warn(text)


def is_first(key: Any) -> bool:
    """True the first time that it is called with this key: for what is said once."""
    is_new = key not in _said
    _said.add(key)
    return is_new


_said: set[Any] = set()
_INSIDE = tuple(os.path.dirname(path) + os.sep for path in (__file__, jax.__file__))
