"""The arguments of all benchmarks, and the form of the results."""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import sys
from typing import Any

import jax

from ga_optax import _text

RESULTS = pathlib.Path(__file__).parent / "results"


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """A parser with `--json` and `--quick`, described by the first line of `text`."""
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="also write the result here")
    parser.add_argument("--quick", action="store_true", help="small, in seconds")
    return parser


def provenance() -> dict[str, Any]:
    """The device, versions, date and command of this process."""
    device = jax.devices()[0]
    versions = {
        name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")
    }
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{device.platform}: {device.device_kind}",
        "versions": versions | {"python": platform.python_version()},
    }


def write(
    path: pathlib.Path | None,
    content: dict[str, Any],
    versions: dict[str, str] | None = None,
) -> None:
    """Writes a result with its provenance and more versions, if there is a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # JSON has no NaN, and a benchmark should have none.
    whole = provenance() | content
    whole["versions"] |= versions or {}
    text = json.dumps(whole, indent=2, allow_nan=False)
    path.write_text(text + "\n", "utf-8")


def read(path: pathlib.Path) -> dict[str, Any]:
    """The content of a file of results."""
    return json.loads(path.read_text("utf-8"))


def print_table(columns: list[str], rows: list[list[Any]]) -> None:
    """Prints a table, with words flush left and numbers flush right."""
    texts = [
        [cell if isinstance(cell, str) else f"{cell:,}" for cell in r] for r in rows
    ]
    left = [
        i
        for i, column in enumerate(zip(*texts, strict=True))
        if not any(text.startswith((*"-0123456789",)) for text in column)
    ]
    print("\n".join(_text.ruled([columns, *texts], left)))
