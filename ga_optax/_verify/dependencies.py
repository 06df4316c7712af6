"""Where the rows of a batch depend on each other: lines of the user's code.

The program of the loss is partitioned over micro-batches, as `whole_batch=True` does
it. Where the partitioned program communicates, rows depend on each other.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax

from ga_optax._inside.axis.report import Stored
from ga_optax._inside.dependencies import batch_dependencies, short
from ga_optax._verify.problem import Problem

# What rows need of each other, and how a loss asks for that over an axis {0}.
_OF = {"psum": "a sum over rows", "all_gather": "all rows"}
_OVER_AXIS = {
    "psum": """jax.lax.pmean(..., {0}) around each mean over rows, such as those of
        batch normalisation, and jax.lax.psum(..., {0}) around each sum over them""",
    "all_gather": """jax.lax.all_gather(x, {0}, tiled=True) where rows are compared; row
        i of a micro-batch x is row jax.lax.axis_index({0}) * len(x) + i of that""",
}


class Dependency(NamedTuple):
    """What rows need of each other, as a key of `_OF`, and the line that needs it."""

    kind: str
    line: str


def dependencies(problem: Problem) -> list[Dependency]:
    """Where rows depend on each other, in the order of the program; none if unknown."""
    try:
        found = map(_dependency, _meetings(problem))
    except Exception:
        return []  # Any: the code is the user's, and this only adds to a message.
    return list(dict.fromkeys(found))


def _meetings(problem: Problem) -> list[Stored]:
    find = batch_dependencies(problem.fun, problem.k, batch_axes=problem.batch_axes)
    with jax.enable_x64(problem.x64):
        return find(problem.params, problem.batch, *problem.keys(0)).meetings


def _dependency(meeting: Stored) -> Dependency:
    kind = "psum" if meeting.kind == "sum" else "all_gather"
    return Dependency(kind, short(meeting.line))


def in_words(found: Iterable[Dependency]) -> str:
    """The lines, with what each of them needs; nothing if no line is known."""
    lines: dict[str, list[str]] = {}
    for kind, line in found:
        if line:
            lines.setdefault(line, []).append(_OF[kind])
    return "; ".join(f"{line}: {' and '.join(of)}" for line, of in lines.items())


def over_axis(found: Iterable[Dependency], name: str) -> str:
    """The collectives over an axis that these need; those of most losses for none."""
    kinds = {kind for kind, _ in found} or set(_OVER_AXIS)
    how = [
        text.format(repr(name)) for kind, text in _OVER_AXIS.items() if kind in kinds
    ]
    return f"Put {', and '.join(how)}."
