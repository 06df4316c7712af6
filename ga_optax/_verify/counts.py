"""Weights as counts: whole numbers, or code that counts."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax._passes import read
from ga_optax._verify.gradients import Problem

# The precision of shares, which are quotients of counts in float64.
EXACT = 1e-6
# Expressions that count; -100 is the ignored label of PyTorch.
_COUNTERS = ("{}.sum({})", "({} != 0).sum()", "({} >= 0).sum()", "({} != -100).sum()")


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
    unit = min(share[share > 1e-9], default=1.0)
    return " : ".join(f"{s / unit:.6g}" if s > 1e-9 else "0" for s in share)


def code_that_counts(problem: Problem, share: np.ndarray) -> str | None:
    """An expression in `batch`, a micro-batch, with these shares, if there is one."""
    for code, counts in _expressions(problem):
        if counts.sum() > 0 and np.abs(counts / counts.sum() - share).max() < EXACT:
            return code
    return None


def _expressions(problem: Problem) -> Iterator[tuple[str, np.ndarray]]:
    """Numbers that a loss may divide by, as code, and the value in each micro-batch."""
    leaves = jax.tree.leaves_with_path(problem.take(problem.rows))
    for (path, leaf), axis in zip(leaves, problem.axes, strict=True):
        if axis is None or not (
            leaf.dtype == bool or jnp.isdtype(leaf.dtype, "numeric")
        ):
            continue
        x = np.moveaxis(np.asarray(leaf, np.float64), axis, 0)  # [micro-batch, ...]
        # A sum in half a float would round the count.
        half = read.is_inexact(leaf) and leaf.dtype.itemsize < 4
        name, dtype = f"batch{jax.tree_util.keystr(path)}", "dtype='float32'" * half
        views = {name: x}
        if x.ndim > 2 and axis < 2:  # the mask of a shifted sequence, too
            name += "[:, 1:]" if axis == 0 else "[1:]"
            views[name] = np.moveaxis(x, 2 - axis, 1)[:, 1:]
        for view, x in views.items():
            for counter, counted in zip(
                _COUNTERS, (x, x != 0, x >= 0, x != -100), strict=True
            ):
                yield counter.format(view, dtype), counted.reshape(len(x), -1).sum(1)
