"""Weights as the counts that they are: whole numbers, or code that counts."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# How precise shares are, which are quotients of counts in float64.
EXACT = 1e-6


def proportions(share: np.ndarray) -> str:
    """Weights as small whole numbers if possible, else in units of the least one.

    Args:
      share: the weights, which add up to 1.
    """
    total, whole = np.arange(1, 100_001), np.ones(100_000, bool)
    for s in share:
        whole &= np.abs(total * s - np.round(total * s)) < EXACT
    if whole.any():
        return " : ".join(f"{s * total[whole][0]:.0f}" for s in share)
    unit = min((s for s in share if s > 1e-9), default=1.0)
    return " : ".join(f"{s / unit:.6g}" if s > 1e-9 else "0" for s in share)


def code_that_counts(
    parts: Sequence[Any], axes: Sequence[int | None], share: np.ndarray
) -> str | None:
    """An expression in `batch`, a micro-batch, that has these shares, if there is one.

    `axes` are where leaves are split.
    """
    for code, counts in _expressions(parts, axes):
        total = counts.sum()
        if total > 0 and np.abs(counts / total - share).max() < EXACT:
            return code
    return None


def _expressions(
    parts: Sequence[Any], axes: Sequence[int | None]
) -> Iterator[tuple[str, np.ndarray]]:
    """What a loss may divide by, as code, with its value in each micro-batch."""
    leaves = zip(*map(jax.tree.leaves, parts), strict=True)
    names = [
        jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(parts[0])
    ]
    for name, axis, of_parts in zip(names, axes, leaves, strict=True):
        leaf, name = of_parts[0], f"batch{name}"
        if not jnp.issubdtype(leaf.dtype, np.number) and leaf.dtype != jnp.bool_:
            continue
        values = np.stack([np.asarray(x).astype(np.float64) for x in of_parts])
        # A sum in half a float would round the count.
        half = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        dtype = "dtype='float32'" if half else ""
        views = [(name, values)]
        if leaf.ndim >= 2 and axis == 0:  # the mask of a shifted sequence, too
            views += [(f"{name}[:, 1:]", values[:, :, 1:])]
        elif leaf.ndim >= 2 and axis == 1:
            views += [(f"{name}[1:]", values[:, 1:])]
        for view, x in views:
            for code, counted in (
                (f"{view}.sum({dtype})", x),
                (f"({view} != 0).sum()", x != 0),
                (f"({view} >= 0).sum()", x >= 0),
                (f"({view} != -100).sum()", x != -100),  # PyTorch's ignored label
            ):
                yield code, counted.reshape(len(parts), -1).sum(1).astype(np.float64)
