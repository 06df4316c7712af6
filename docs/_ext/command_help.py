"""The directive `command-help`: the help that a command of `ga-optax` prints.

```{command-help} verify
```
"""

import contextlib
import io
import os

from docutils import nodes
from docutils.parsers.rst import Directive

from ga_optax.__main__ import main


class CommandHelp(Directive):
    """The directive; see the module."""

    required_arguments = 1

    def run(self):
        """Prints the help as on a terminal of 80 columns."""
        os.environ["COLUMNS"] = "80"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([self.arguments[0], "--help"])
        if not printed.getvalue():
            raise self.error(f"ga-optax has no command {self.arguments[0]}.")
        return [nodes.literal_block("", printed.getvalue(), language="text")]


def setup(app):
    """Registers the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
