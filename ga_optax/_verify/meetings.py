"""Where the rows of a batch meet in the program of a loss, and what fixes it there.

The program is traced for the undivided batch and for a micro-batch. An axis whose
length differs between the two holds rows. Rows meet where such an axis goes away or
comes twice, on a way from the parameters to the loss.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend import core

from ga_optax._passes import ir
from ga_optax._passes.ir import inner_programs
from ga_optax._verify.problem import Problem

LINES = {
    "statistic": """Put jax.lax.pmean(..., {0}) around each mean over the rows, such as
        those of batch normalisation, and jax.lax.psum(..., {0}) around each sum over
        them.""",
    "product": """Compare rows with jax.lax.all_gather(x, {0}, tiled=True), where row i
        of a micro-batch x is row jax.lax.axis_index({0}) * len(x) + i.""",
    "extremum": """Take a maximum over the rows of jax.lax.all_gather(x, {0},
        tiled=True).""",
}

# What a value is, if it depends on the parameters: anything, or what rows became.
_SMOOTH, _OF_ROWS = 1, 2


def of_window(kinds: Iterable[str], name: str) -> str:
    """The collectives that make these meetings those of the window.

    If none shows, those of the usual ones.
    """
    usual = "statistic", "product"
    return " ".join(LINES[kind].format(repr(name)) for kind in kinds or usual)


def meetings(problem: Problem) -> list[str]:
    """How the rows of a batch meet, as keys of `LINES`; none if that does not show."""

    def trace(rows: Any) -> core.Jaxpr:
        batch = problem.take(problem.batch, rows)
        program: Any = jax.make_jaxpr(problem.fun)
        return program(problem.params, batch, *problem.keys(0)).jaxpr

    try:
        with jax.enable_x64(problem.x64):
            many, few = trace(problem.rows(None)), trace(problem.rows(0))
        of_params = [_SMOOTH] * len(jax.tree.leaves(problem.params))
        rest = [0] * (len(many.invars) - len(of_params))
        found, _ = _followed(many, few, [*of_params, *rest])
    except Exception:
        return []  # Any: the code is the user's, and may differ with the size.
    return [kind for kind in LINES if kind in found]


def _followed(
    many: core.Jaxpr, few: core.Jaxpr, given: Sequence[int]
) -> tuple[set[str], list[int]]:
    """How rows meet in a program, and what its results are, given its arguments."""
    found: set[str] = set()
    what = dict(zip(many.invars, given, strict=True))

    def read(x: Any) -> int:
        return 0 if isinstance(x, core.Literal) else what.get(x, 0)

    pairs = (_equations(program) for program in (many, few))
    for e, f in zip(*pairs, strict=True):
        its = list(map(read, e.invars))
        rows = list(map(_rows, e.invars, f.invars))
        met = any(x and r for x, r in zip(its, rows, strict=True))
        inner = list(zip(inner_programs(e), inner_programs(f), strict=True))
        for body, other in inner:
            more, results = _followed(body, other, its[len(its) - len(body.invars) :])
            found |= more
            if len(results) == len(e.outvars):
                what |= zip(e.outvars, results, strict=True)
        for out, other in zip(e.outvars, f.outvars, strict=True) if not inner else ():
            here = _rows(out, other)
            what[out] = _OF_ROWS if met and not here else max(its, default=0)
            if met and not here and e.primitive.name in ("reduce_max", "reduce_min"):
                found.add("extremum")
            if here and what[out] == _OF_ROWS:
                what[out] = _SMOOTH
                found.add("statistic")
            if met and here > max(1, *rows):
                found.add("product")
    return found, list(map(read, many.outvars))


def _equations(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """Those that the results need."""
    return ir.needed(jaxpr, jaxpr.outvars)[0]


def _rows(x: Any, y: Any) -> int:
    """How many axes hold rows."""
    return sum(m != n for m, n in zip(x.aval.shape, y.aval.shape, strict=True))
