"""Formats tables and paragraphs, and warns at the line of the user's code."""

import os
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterable, Sequence

import jax

WIDTH = 88


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


def wrap(paragraph: str, width: int = WIDTH) -> list[str]:
    """Lines of a paragraph, each with the indent of the first."""
    indent = " " * (len(paragraph) - len(paragraph.lstrip()))
    return textwrap.wrap(
        paragraph,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def listed(names: Sequence[object], most: int = 8) -> str:
    """The first names in words, and the number of further names."""
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def ruled(rows: Sequence[Sequence[str]], left: Iterable[int] = ()) -> list[str]:
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


_INSIDE = tuple(os.path.dirname(path) + os.sep for path in (__file__, jax.__file__))
