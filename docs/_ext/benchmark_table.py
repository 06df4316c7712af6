"""The directive `benchmark`: a table from a file in benchmarks/results.

```{benchmark} micro_step.json
:rows: rows
:columns: side = side; milliseconds = ms .1f; over the floor = over_floor .2f
```

A column is `title = field`, or `title = field .2f` with a format. `outer/inner` names a
field within another; a row that lacks it has a dash. The command, date, device and
versions that the file records are printed above the table, so no number is typed by
hand.
"""

import json
import pathlib

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from docutils.statemachine import StringList

VERSIONS = ("jax", "optax", "python", "libtpu", "jax-cuda12-plugin")
RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"


def read(name):
    """The record in a file of results."""
    return json.loads((RESULTS / name).read_text("utf-8"))


def provenance(record):
    """How and where the numbers were measured: one sentence, in Markdown."""
    flat = record | record.get("versions", {})
    versions = ", ".join(f"{name} {flat[name]}" for name in VERSIONS if name in flat)
    day, flags = record["date"][:10], record.get("xla_flags")
    how = f"`{record['command']}`" + (f" with `XLA_FLAGS={flags}`" if flags else "")
    return f"{how}, on {day}, {record['device']}, {versions}."


def cells(row, columns):
    """The texts of one row."""
    for column in columns:
        field = column.partition(" = ")[2].strip()
        name, _, spec = field.rpartition(" ")
        if not spec.startswith("."):
            name, spec = field, ""
        outer, _, inner = name.partition("/")
        value = row[outer].get(inner) if inner else row[outer]
        yield "-" if value is None else format(value, spec)


class Benchmark(Directive):
    """The directive; see the module."""

    required_arguments = 1
    option_spec = {  # noqa: RUF012  # the form that docutils asks for
        "rows": directives.unchanged_required,
        "columns": directives.unchanged_required,
    }

    def run(self):
        """Writes a Markdown table, which the parser of the page then reads."""
        path = RESULTS / self.arguments[0]
        self.state.document.settings.env.note_dependency(str(path))
        record = read(path.name)
        columns = [c.strip() for c in self.options["columns"].split(";")]
        titles = [c.partition(" = ")[0].strip() for c in columns]
        rows = [list(cells(row, columns)) for row in record[self.options["rows"]]]
        for title, *column in zip(titles, *rows, strict=True):
            if set(column) == {"-"}:
                raise self.error(f"No row of {path.name} has what {title} names.")
        lines = [
            f"From `benchmarks/results/{path.name}`: {provenance(record)}",
            "",
            "| " + " | ".join(titles) + " |",
            "|" + " --- |" * len(titles),
        ]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        node = nodes.container()
        text = StringList(lines, source=str(path))
        self.state.nested_parse(text, self.content_offset, node)
        node.children[0]["classes"].append("provenance")  # search_scorer.js reads it
        return node.children


def setup(app):
    """Registers the directive."""
    app.add_directive("benchmark", Benchmark)
    return {"parallel_read_safe": True}
