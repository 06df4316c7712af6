"""The directive `lines-of-code`: what `python tests/project/test_layout.py` prints.

```{lines-of-code}
```
"""

import pathlib
import subprocess
import sys

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = pathlib.Path(__file__).parents[2]


class LinesOfCode(Directive):
    """The directive; see the module."""

    def run(self):
        """Runs the script, and shows what it counts by folder."""
        printed = subprocess.run(
            [sys.executable, ROOT / "tests/project/test_layout.py"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        counted, total, _ = printed.partition("  lines of code\n")
        return [nodes.literal_block("", counted + total, language="text")]


def setup(app):
    """Registers the directive."""
    app.add_directive("lines-of-code", LinesOfCode)
    return {"parallel_read_safe": True}
