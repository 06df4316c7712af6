"""Prints the tables of benchmarks/RESULTS.md anew, from the files of results.

    python benchmarks/result_tables.py

A table stands behind a comment that names its file, its rows and its columns:

    <!-- micro_step.json rows: side = side; ms a micro-step = ms .1f -->
    ...
    <!-- end -->

A column is `title = field`, or `title = field .2f` with a format. `outer/inner` names a
field within another; a row that lacks it has a dash. Above the table are the command,
date, device and versions that the file records, so no number is typed by hand. The
directive `benchmark` of the documentation makes its tables with the same functions.
"""

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).parent
RESULTS, PAGE = HERE / "results", HERE / "RESULTS.md"
VERSIONS = ("jax", "optax", "python", "libtpu", "jax-cuda12-plugin")
TABLE = re.compile(
    r"^<!-- (\S+\.json) (\w+): (.*?) -->\n.*?^<!-- end -->$", re.M | re.S
)


def provenance(record: dict[str, Any]) -> str:
    """How and where the numbers were measured: one sentence, in Markdown."""
    flat = record | record.get("versions", {})
    versions = ", ".join(f"{name} {flat[name]}" for name in VERSIONS if name in flat)
    day, flags = record["date"][:10], record.get("xla_flags")
    how = f"`{record['command']}`" + (f" with `XLA_FLAGS={flags}`" if flags else "")
    return f"{how}, on {day}, {record['device']}, {versions}."


def cells(row: dict[str, Any], columns: list[str]) -> Iterator[str]:
    """The texts of one row."""
    for column in columns:
        field = column.partition(" = ")[2].strip()
        name, _, spec = field.rpartition(" ")
        if not spec.startswith("."):
            name, spec = field, ""
        outer, _, inner = name.partition("/")
        value = row[outer].get(inner) if inner else row[outer]
        yield "-" if value is None else format(value, spec)


def table(name: str, rows: str, columns: str) -> list[str]:
    """The lines of a table, and what is said above it."""
    record = json.loads((RESULTS / name).read_text("utf-8"))
    fields = [c.strip() for c in columns.split(";")]
    titles = [c.partition(" = ")[0].strip() for c in fields]
    texts = [list(cells(row, fields)) for row in record[rows]]
    for title, *column in zip(titles, *texts, strict=True):
        if set(column) == {"-"}:
            raise ValueError(f"No row of {name} has what {title} names.")
    lines = [
        f"From `benchmarks/results/{name}`: {provenance(record)}",
        "",
        "| " + " | ".join(titles) + " |",
        "|" + " --- |" * len(titles),
    ]
    return lines + ["| " + " | ".join(row) + " |" for row in texts]


def printed(text: str) -> str:
    """The page with its tables made anew."""

    def anew(match: re.Match[str]) -> str:
        head = f"<!-- {match[1]} {match[2]}: {match[3]} -->"
        return "\n".join([head, "", *table(*match.groups()), "", "<!-- end -->"])

    return TABLE.sub(anew, text)


if __name__ == "__main__":
    PAGE.write_text(printed(PAGE.read_text("utf-8")), "utf-8")
