"""Primitives that work number by number: rows stay rows."""

from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from ga_optax._partition.values import Result, Rows, Value, is_inexact, types_of
from ga_optax._partition.writer import Writer

NAMES = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e
        bessel_i1e bitcast_convert_type cbrt ceil clamp clz complex conj
        convert_element_type copy cos cosh digamma div eq erf erf_inv erfc
        exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
        integer_pow is_finite le le_to lgamma log log1p log2 logistic lt
        lt_to max min mul mulhi name ne neg nextafter not one_minus_square
        optimization_barrier or polygamma polynomial population_count pow pvary
        real reduce_precision regularized_incomplete_beta rem reshard round
        rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
        shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
        tanh xor zeta""".split()  # noqa: SIM905
)


_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")


def _keep(w: Writer, vs: list[Value]) -> None:
    """Keeps what is compared with a value of a later level, such as its own extremum.

    If it were computed again there, it might round otherwise, and no row would attain
    the extremum.
    """
    last = max(v.level for v in vs)
    for v in vs:
        if (
            v.rows
            and v.params
            and v.level < last
            and is_inexact(v.aval)
            and not w.apart
        ):
            v.x = checkpoint_name(v.x, w.axis.name)


def fitted(w: Writer, v: Value, rows: Rows, shape: tuple[int, ...]) -> Any:
    """An operand, for a result of a shape that has rows."""
    return w.whole(v) if is_spread(v, rows, shape) else w.part(v, rows)


def is_spread(v: Value, rows: Rows, shape: tuple[int, ...]) -> bool:
    """Whether all rows of a result of a shape read the same of an operand."""
    return len(v.shape) < len(shape) or v.shape[rows.dim] != shape[rows.dim]


def elementwise(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result] | None:
    if e.primitive.name == "optimization_barrier":
        return [
            (x, v.layout) for x, v in zip(w.run(e, [v.x for v in vs]), vs, strict=True)
        ]
    shape = types_of(e)[0].shape
    if e.primitive.name == "bitcast_convert_type" and shape != vs[0].shape:
        return None
    rows = target(vs, shape)
    if rows is None:
        return None
    if e.primitive.name in _COMPARES:
        _keep(w, vs)
    xs = [fitted(w, v, rows, shape) for v in vs]
    return [(x, rows) for x in w.results(e, xs)]


def target(vs: list[Value], shape: tuple[int, ...]) -> Rows | None:
    """The rows of a result: those of the largest operand that has some."""
    fit = [
        v
        for v in vs
        if v.rows and len(v.shape) == len(shape) and v.shape[v.dim] == shape[v.dim]
    ]
    return max(fit, key=lambda v: v.size).rows if fit else None
