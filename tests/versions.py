"""Which versions the tests run with, and what they leave out: for `make pytest`."""

import importlib.metadata
import platform

SINCE = {(0, 11, 1): "additions in place inside a call"}


def main():
    jax = importlib.metadata.version("jax")
    version = tuple(int(part) for part in jax.split(".")[:3] if part.isdigit())
    skipped = [what for since, what in SINCE.items() if version < since]
    print(
        f"Python {platform.python_version()}, jax {jax}, "
        f"optax {importlib.metadata.version('optax')}: "
        + (f"without {', '.join(skipped)}" if skipped else "nothing is left out")
        + (". A newer Python has a newer jax: 3.12 or newer" if skipped else "")
        + "."
    )


if __name__ == "__main__":
    main()
