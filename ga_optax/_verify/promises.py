"""Whether what `ga_optax.rowwise` promises is so, by numbers.

The loss is evaluated once more, with promised calls computed in as many parts as there
are micro-batches. If its gradient is another one, a promise does not hold.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._checks import divisors
from ga_optax._passes import ir, places
from ga_optax._passes.rowwise import NAME
from ga_optax._verify.comparison import Comparison
from ga_optax._verify.problem import Problem
from ga_optax._verify.proof import opened, read_by


def broken(comparison: Comparison) -> list[str]:
    """The functions and lines of promises that do not hold."""
    problem, seen = comparison.problem, dict[str, str]()
    args = problem.params, problem.batch, *problem.keys(0)
    with jax.enable_x64(problem.x64):
        jax.eval_shape(_in_parts(problem, (), seen), *args)

    def holds(lines: Collection[str]) -> bool:
        other = dataclasses.replace(problem, fun=_in_parts(problem, lines, {}))
        try:
            return comparison.same(other)
        except Exception:  # Any: the code is the user's, and may not take fewer rows.
            return False

    if not seen or holds(seen):
        return []
    found = [line for line in seen if len(seen) == 1 or not holds([line])]
    return [f"{seen[line]} at {places.short(line)}" for line in found or seen]


def _in_parts(
    problem: Problem, lines: Collection[str], seen: dict[str, str]
) -> Callable[..., Any]:
    """The loss with promised calls of some lines in parts; all of them are `seen`."""

    def rule(e: core.JaxprEqn, values: list[Any]) -> Any:
        if e.primitive.name == NAME:
            line = places.line_of(e.source_info)
            seen[line] = e.params["promise"].name
            return _joined(e, values, problem.k) if line in lines else None
        if any(x.primitive.name == NAME for x in ir.within(e)):
            return opened(e, values, rule)
        return None

    return lambda *args: read_by(problem.fun, rule)(*args)[0]


def _joined(e: core.JaxprEqn, values: list[Any], k: int) -> list[Any]:
    """What a promised call gives, in k parts or a few more."""
    ins, outs = e.params["promise"].ways[0]
    n = next(x.shape[d] for x, d in zip(values, ins, strict=True) if d is not None)
    parts = next(d for d in divisors(n) if d >= min(k, n))
    split = [
        [x] * parts if d is None else jnp.split(x, parts, d)
        for x, d in zip(values, ins, strict=True)
    ]
    each = (e.params["promise"].fun(*xs) for xs in zip(*split, strict=True))
    return [
        sum(xs) if d is None else jnp.concatenate(xs, d)
        for d, xs in zip(outs, zip(*each, strict=True), strict=True)
    ]
