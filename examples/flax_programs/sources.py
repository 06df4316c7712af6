"""The data of the programs beside this file: digits, and lines of Python source."""

import pathlib
import sysconfig
from typing import Any

import numpy as np
import sklearn.datasets


def digits() -> dict[str, np.ndarray]:
    """scikit-learn's 1,797 images of 8 x 8 pixels, and their labels."""
    digits: Any = sklearn.datasets.load_digits()
    images = (digits["images"] / 16).astype(np.float32)[..., None]
    return {"image": images, "label": digits["target"].astype(np.int32)}


def lines(length: int = 32, limit: int = 20_000) -> dict[str, np.ndarray]:
    """Lines of the standard library as bytes `[lines, length + 1]`, padded with 0."""
    rows: list[bytes] = []
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for line in path.read_bytes().splitlines():
            if line.strip():
                rows.append(
                    (b"\n" + line + b"\n")[: length + 1].ljust(length + 1, b"\0")
                )
        if len(rows) >= limit:
            break
    tokens = np.frombuffer(b"".join(rows[:limit]), np.uint8).reshape(-1, length + 1)
    return {"tokens": tokens.astype(np.int32)}


def batch(data: dict[str, np.ndarray], step: int, size: int) -> dict[str, np.ndarray]:
    """The examples of a step."""
    rows = np.random.default_rng(step).integers(
        len(next(iter(data.values()))), size=size
    )
    return {name: x[rows] for name, x in data.items()}
