"""The directive `benchmark`: a table from a file in benchmarks/results.

```{benchmark} micro_step.json
:rows: rows
:columns: side = side; milliseconds = ms .1f; over the floor = over_floor .2f
```

What columns are, and what is printed above a table, says benchmarks/result_tables.py.
"""

import result_tables
from docutils import nodes
from docutils.parsers.rst import Directive, directives
from docutils.statemachine import StringList


class Benchmark(Directive):
    """The directive; see the module."""

    required_arguments = 1
    option_spec = {  # noqa: RUF012  # the form that docutils asks for
        "rows": directives.unchanged_required,
        "columns": directives.unchanged_required,
    }

    def run(self):
        """Writes a Markdown table, which the parser of the page then reads."""
        path = result_tables.RESULTS / self.arguments[0]
        self.state.document.settings.env.note_dependency(str(path))
        try:
            lines = result_tables.table(
                path.name, self.options["rows"], self.options["columns"]
            )
        except ValueError as error:
            raise self.error(str(error)) from error
        node = nodes.container()
        text = StringList(lines, source=str(path))
        self.state.nested_parse(text, self.content_offset, node)
        node.children[0]["classes"].append("provenance")  # search_scorer.js reads it
        return node.children


def setup(app):
    """Registers the directive."""
    app.add_directive("benchmark", Benchmark)
    return {"parallel_read_safe": True}
