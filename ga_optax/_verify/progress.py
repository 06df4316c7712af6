"""A line on a terminal while `verify` works."""

import sys
import time


class Progress:
    """A line on stderr, if stderr is a terminal and it takes more than two seconds."""

    def __init__(self) -> None:
        self.start, self.done, self.shown = time.monotonic(), 0, False

    def tick(self) -> None:
        """One more gradient was evaluated."""
        self.done += 1
        seconds = time.monotonic() - self.start
        if seconds > 2 and sys.stderr.isatty():
            self.shown = True
            text = f"\rga_optax.verify: {self.done} gradients, {seconds:.0f} s "
            print(text, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
