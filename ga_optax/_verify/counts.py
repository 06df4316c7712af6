"""Weights as the counts that they are: whole numbers, or code that counts."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax._verify.problem import Problem

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


def code_that_counts(problem: Problem, share: np.ndarray) -> str | None:
    """An expression in `batch`, a micro-batch, with these shares, if there is one."""
    for code, counts in _expressions(problem):
        total = counts.sum()
        if total > 0 and np.abs(counts / total - share).max() < EXACT:
            return code
    return None


def _expressions(problem: Problem) -> Iterator[tuple[str, np.ndarray]]:
    """What a loss may divide by, as code, with its value in each micro-batch."""
    parts = [problem.take(problem.batch, problem.rows(i)) for i in range(problem.k)]
    leaves = zip(*map(jax.tree.leaves, parts), strict=True)
    paths = jax.tree.leaves_with_path(problem.batch)
    for (path, leaf), axis, xs in zip(paths, problem.axes, leaves, strict=True):
        name = f"batch{jax.tree_util.keystr(path)}"
        if not jnp.issubdtype(leaf.dtype, np.number) and leaf.dtype != jnp.bool_:
            continue
        values = np.stack([np.asarray(x).astype(np.float64) for x in xs])
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
                yield code, counted.reshape(len(x), -1).sum(1).astype(np.float64)
