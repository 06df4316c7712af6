"""Formats tables and paragraphs."""

import re
import textwrap
from collections.abc import Iterable, Sequence

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
