"""The form in which a parameter's gradient comes out of a backward pass."""

import math
from typing import Any

from jax.extend import core

from ga_optax._passes import places, primitives, read

# XLA:CPU adds two to four rows together with the accumulator, in another order.
FEW = 8


def arrival(jaxpr: core.Jaxpr, variable: Any, piece: str = "whole") -> str | None:
    """The form in which a parameter's gradient comes out of the backward pass.

    "slices": a scan runs over the parameter, uses each slice once, and the gradient of
    a slice is a sum of two terms or more. Adding slices in place saves memory and has
    the bits of the plain sum. Two uses would be two additions, `(total + a) + b`; a
    bare product and the addition may become one fused multiply-add, which rounds once
    and not twice.

    "whole": a sum likewise, but in one piece, which exists before the addition. So are
    the slices of a scan that is unrolled as a whole, or behind a reshape, a transpose,
    a cast or `jax.checkpoint`, through which no reference goes.

    "scatter": one look-up of rows (an embedding), whose sum XLA scatters into the
    accumulator.

    None: anything else, such as a bare product, which has to be `accumulator.rounded`.
    """
    use = read.only_use(jaxpr, variable)
    if use is None or not variable.aval.size:  # a stack of no layers
        return None
    equation, i = use
    name, row = equation.primitive.name, primitives.entry_of(equation)
    if read.kind(equation) in read.THROUGH:
        return _inside(equation, i, piece)
    if name == primitives.PRODUCT:
        return piece if _more(_num_terms(equation, i), 1) else None
    out: Any = next(iter(equation.outvars), None)  # printing has no results
    terms = out.aval.size // variable.aval.size if row.broadcasts else 1
    if _more(terms, 1):
        return piece if piece != "slices" or _more(terms, FEW - 1) else "whole"
    if name == "gather" and i == 0 and piece == "whole":
        return "scatter"
    if (row.moves and name != "squeeze") or name == primitives.CAST:
        # The gradient comes back through these as it is.
        form = arrival(jaxpr, out, piece)
        return "whole" if form == "slices" and piece == "whole" else form
    return None


def _inside(equation: core.JaxprEqn, i: int, piece: str) -> str | None:
    """The form of the gradient of an argument of a program inside an equation."""
    [inner] = read.inner_programs(equation)
    if read.kind(equation) == "scan":
        if not read.is_sliced(equation, i):
            return None  # used in every iteration
        if read.scan_of(equation).unroll < read.times(equation):
            piece = "slices"
    form = arrival(inner, inner.invars[i], piece)
    is_whole = read.kind(equation) == "checkpoint" and piece != "slices"
    return "whole" if form == "slices" and is_whole else form


def _num_terms(equation: core.JaxprEqn, i: int) -> int:
    """The number of terms that the gradient of an operand of a product sums up."""
    other: Any = equation.invars[1 - i].aval
    pairs = equation.params["dimension_numbers"]
    both = math.prod(other.shape[axis] for pair in pairs for axis in pair[1 - i])
    return other.size // both if both else 0


def _more(number: Any, least: int) -> bool:
    """True if a number is larger for all dimensions that `jax.export` leaves open."""
    try:
        return bool(number > least)
    except Exception:  # Any: JAX does not export the error of a symbolic dimension.
        return False


def is_cut(jaxpr: core.Jaxpr, i: int, placement: Any) -> bool:
    """True if a parameter is split along a dimension that its slices lack.

    The gradient of the parameter comes in slices, says `arrival`.
    """
    gone = _num_scanned(jaxpr, jaxpr.invars[i])
    return any(dim < gone for dim, _ in placement.dims)


def _num_scanned(jaxpr: core.Jaxpr, variable: Any) -> int:
    """The number of a parameter's dimensions that are sliced where it is used."""
    [(equation, i)] = read.uses(jaxpr, variable)
    if read.kind(equation) not in ("call", "scan"):
        return 0
    [inner] = read.inner_programs(equation)
    inside: Any = inner.invars[i]
    gone = len(variable.aval.shape) - len(inside.aval.shape)
    return gone + _num_scanned(inner, inside)


def use_of(jaxpr: core.Jaxpr, variable: Any) -> str:
    """The line of the user's code that says most about how a parameter is used."""
    reads = read.uses(jaxpr, variable)
    return places.line_of(reads[-1][0].source_info) if reads else "nowhere"
