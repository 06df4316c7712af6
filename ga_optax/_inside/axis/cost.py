"""What equations take: scalar operations, bytes, and which are cheap to run again."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from ga_optax._passes import ir, known

# They compute nothing.
_LAYOUTS = {*known.MOVES, "expand_dims", "slice", "copy", "copy_p", "name", "iota"}
_LOOPS = ("scan", "while")
_DEEP = 100  # operations for each number that something unknown reads or returns


def is_cheap(equation: core.JaxprEqn) -> bool:
    """Whether running it again costs little more than reading what it returns."""
    return all(
        ir.kind(e) not in _LOOPS
        if ir.inner_programs(e)
        else e.primitive.name in known.CHEAP
        for e in ir.within(equation)
    )


def work(equation: core.JaxprEqn) -> float:
    """About how many scalar operations it takes."""
    shapes = [
        getattr(x.aval, "shape", ()) for x in (*equation.invars, *equation.outvars)
    ]
    largest = max(map(ir.numbers, shapes), default=0)
    if programs := ir.inner_programs(equation):
        return ir.times(equation) * sum(work(e) for p in programs for e in p.eqns)
    name = equation.primitive.name
    if name in _LAYOUTS:
        return 0.0
    if name == known.PRODUCT:
        (contracted, _), _ = equation.params["dimension_numbers"]
        return (
            2.0 * ir.numbers(shapes[-1]) * ir.numbers(shapes[0][i] for i in contracted)
        )
    if name == known.CONVOLUTION:
        features = shapes[1][equation.params["dimension_numbers"].rhs_spec[0]]
        of_one = ir.numbers(shapes[1]) / max(ir.numbers([features]), 1)
        return 2.0 * ir.numbers(shapes[-1]) * of_one
    return float(largest if is_cheap(equation) else _DEEP * largest)


def nbytes(x: Any) -> int:
    """The bytes of a value."""
    return ir.numbers(x.aval.shape) * x.aval.dtype.itemsize


def of_a_step(closed: Any, params: Sequence[Any], rest: Sequence[Any]) -> int:
    """The bytes that one micro-batch's step takes: its residuals and its gradients.

    Args:
      closed: the program of a micro-batch, the loss first, without collectives.
      params: its first arguments, to differentiate with respect to.
      rest: the others.
    """

    def residuals(params: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        def loss(*params: Any) -> Any:
            return ir.results(closed, [*params, *rest])[0]

        return jax.tree.leaves(jax.vjp(loss, *params)[1])

    kept = jax.eval_shape(residuals, list(params), list(rest))
    return sum(ir.numbers(x.shape) * x.dtype.itemsize for x in (*kept, *params))
