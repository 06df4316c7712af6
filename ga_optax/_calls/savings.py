"""Whether micro-batches save memory, by an estimate, and which lines keep them from it.

    of a program:  what its way back reads of its way there, and the largest moment
    of a window:   that of a micro-batch, what it keeps between levels, and its results

Both are counted alike, without arguments, gradients and results of the undivided batch,
so that their ratio means something: it is compared with what XLA needs, see the tests.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from ga_optax._partition import Partitioned, Rows
from ga_optax._passes import ir, known, places
from ga_optax._passes.notes import note
from ga_optax._window import cost
from ga_optax._window.levels import FEW_BYTES, is_recorded

_OF_LEVELS = 0.8  # what levels keep is said to be up to twice as much as it is
ENOUGH = 0.47  # of what the undivided batch needs: half of it, less an error
_MOST_LINES = 4


class Line(NamedTuple):
    """A line that computes all rows in each micro-batch.

    Attributes:
      name: what it computes, by its primitive, and how.
      line: of the user's code.
      nbytes: about what it takes, to compare.
    """

    name: str
    line: str
    nbytes: int


class Savings(NamedTuple):
    """What a window needs of what the undivided batch does, in bytes.

    Attributes:
      undivided: what the undivided batch needs beside arguments and results.
      window: what a window needs beside those.
      lines: where a micro-batch computes all rows; the largest first.
    """

    undivided: int
    window: int
    lines: tuple[Line, ...]

    @property
    def ratio(self) -> float:
        return self.window / max(self.undivided, 1)

    def is_little(self, num_microbatches: int) -> bool:
        """Whether a window of so many needs so much that it is to be said."""
        least = 1.3 / num_microbatches  # of two, a half is all that there is to save
        enough = ENOUGH if self.lines else _OF_LEVELS
        return self.undivided >= FEW_BYTES and self.ratio > max(enough, least)


def say(trace: Any, num_microbatches: int, report: Any, knob: str) -> None:
    """Warns, once, if a window saves little, and lets `plan` say it.

    Args:
      trace: the program of all rows, and that of a micro-batch, see `layouts`.
      num_microbatches: how many there are.
      report: what a window says of its levels; None if there are none.
      knob: the option that keeps less between levels.
    """
    if is_recorded():
        return
    kept = report.peak if report else 0
    found = estimate(trace.closed, trace.part, trace.num_params, kept)
    if found is None or not found.is_little(num_microbatches):
        return
    stored = report.stored if report else ()
    text = said(found, num_microbatches, stored, knob)
    note(text)
    lines = tuple(x.line for x in found.lines)
    if lines not in _said:
        _said.add(lines)
        warnings.warn(text, stacklevel=2)


_said: set[tuple[str, ...]] = set()  # of which lines, each once


def estimate(
    closed: Any, part: Partitioned, num_params: int, kept: int = 0
) -> Savings | None:
    """What a window saves, about; None if sizes are left open, as by `jax.export`.

    Args:
      closed: the program of all rows, of the leaves of the parameters and the others.
      part: that of a micro-batch.
      num_params: how many leaves the parameters have.
      kept: the bytes that a window keeps between its levels.
    """
    whole, own = closed.jaxpr, part.jaxpr
    if not (_is_known(whole) and _is_known(own)):
        return None
    num_consts = len(whole.constvars)
    params = own.invars[num_consts : num_consts + num_params]
    undivided = _needs(whole, whole.invars[:num_params])
    results = zip(closed.out_avals, part.layouts, strict=False)
    stacks = sum(_bytes(a) for a, layout in results if isinstance(layout, Rows))
    # Levels take less than a whole step at a time, but beside what is kept for others.
    window = max(_residuals(own, params), kept) + _passing(own) + stacks
    return Savings(undivided, window, tuple(_lines(whole, part, window)))


def _is_known(jaxpr: core.Jaxpr) -> bool:
    """Whether all sizes are numbers."""
    values = [*jaxpr.invars, *(x for e in jaxpr.eqns for x in e.outvars)]
    return all(isinstance(n, int) for x in values for n in _shape(x.aval))


def _shape(aval: Any) -> tuple[Any, ...]:
    return getattr(aval, "shape", ())


def _bytes(aval: Any) -> int:
    size = getattr(getattr(aval, "dtype", np.dtype(bool)), "itemsize", 0)
    return ir.numbers(_shape(aval)) * size


# -- Of a program ----------------------------------------------------------------------


def _needs(jaxpr: core.Jaxpr, params: Sequence[Any]) -> int:
    """What one forward and one backward pass need, at their largest moment."""
    return _residuals(jaxpr, params) + _passing(jaxpr)


def _residuals(jaxpr: core.Jaxpr, params: Sequence[Any]) -> int:
    """What the way back reads of the way there."""
    given = [*jaxpr.constvars, *jaxpr.invars]
    return cost.residuals(jaxpr.eqns, params, given)


def _passing(jaxpr: core.Jaxpr) -> int:
    """What is there for a moment; half of the largest is among what is kept."""
    return max(_largest(jaxpr) // 2, _again(jaxpr))


def _again(jaxpr: core.Jaxpr) -> int:
    """The most that is kept while one checkpointed piece is computed again."""
    pieces = (
        program
        for e in ir.equations(jaxpr)
        if ir.kind(e) == "checkpoint"
        for program in ir.inner_programs(e)
    )
    return max((cost.residuals(p.eqns, p.invars, p.invars) for p in pieces), default=0)


def _largest(jaxpr: core.Jaxpr) -> int:
    """The most that values take at a time which are not fused into their readers."""
    most = now = 0
    last = {x: i for i, e in enumerate(jaxpr.eqns) for x in ir.variables(e.invars)}
    gone: dict[int, int] = {}
    for i, e in enumerate(jaxpr.eqns):
        inside = max((_largest(p) for p in ir.inner_programs(e)), default=0)
        new = 0
        for x in e.outvars:
            if x in last and not _is_fused(e):
                new += _bytes(x.aval)
                gone[last[x]] = gone.get(last[x], 0) + _bytes(x.aval)
        now += new
        most = max(most, now + inside)
        now -= gone.pop(i, 0)
    return most


def _is_fused(e: core.JaxprEqn) -> bool:
    return e.primitive.name in known.CHEAP and e.primitive.name not in _MADE


_MADE = {"gather", "scatter", "scatter-add", "concatenate", "all_gather", "pad"}


# -- Lines -----------------------------------------------------------------------------


def _lines(whole: core.Jaxpr, part: Partitioned, window: int) -> list[Line]:
    """What is computed whole; if nothing is, what else has all rows."""
    found: dict[str, Line] = {}

    def add(name: str, line: str, nbytes: int) -> None:
        so_far = found[line].nbytes if line in found else window // _PARTS
        if nbytes > so_far:
            found[line] = Line(name, line, nbytes)

    for x in part.whole:
        add(f"{x.name.rstrip(',')}, computed whole", x.line, x.size * _WORD)
    if not found and (n := _length(whole, part.jaxpr)):
        for e in ir.equations(part.jaxpr):
            sizes = [_bytes(x.aval) for x in e.outvars if n in _shape(x.aval)]
            if sizes and not ir.inner_programs(e):
                name = _NAMES.get(e.primitive.name, ir.name_of(e))
                add(f"{name} of all rows", places.line_of(e.source_info), max(sizes))
    return sorted(found.values(), key=lambda x: -x.nbytes)[:_MOST_LINES]


def _length(whole: core.Jaxpr, own: core.Jaxpr) -> int:
    """How many rows the batch has; 0 if nothing has rows."""
    # The index of the micro-batch comes last.
    pairs = zip(whole.invars, own.invars[len(whole.constvars) : -1], strict=True)
    split = (zip(_shape(x.aval), _shape(y.aval), strict=True) for x, y in pairs)
    return next((m for sizes in split for m, n in sizes if m != n), 0)


_WORD = 4  # bytes of a number, where its type is not known
_PARTS = 20  # a line that takes less of a window than one of these is not named
_NAMES = {"all_gather": "a copy"}


def said(
    found: Savings,
    num_microbatches: int,
    stored: Sequence[Any] = (),
    knob: str = "residual_bytes=0",
) -> str:
    """What to tell a user whose window saves little, of which this is stored."""
    largest = sorted(stored, key=lambda x: -x.nbytes)[:_MOST_LINES]
    where = "; ".join(dict.fromkeys(x.line for x in largest)) or "where rows meet"
    why = f"most of it is kept from one level to another, at {where}"
    todo = f"Pass {knob} to compute that again"
    if found.lines:
        why = "; ".join(f"{x.name}, at {x.line}" for x in found.lines)
        todo = "Write that with other functions"
        if any(known.hidden(x.name.partition(",")[0]) for x in found.lines):
            todo = "Wrap that in ga_optax.rowwise if its rows do not need each other"
    return (
        f"{num_microbatches} micro-batches need about {_size(found.window)} beside "
        f"arguments and gradients, {found.ratio:.0%} of what the undivided batch needs "
        f"({_size(found.undivided)}): {why}. {todo}; ga_optax.batch_dependencies shows "
        "every line."
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
