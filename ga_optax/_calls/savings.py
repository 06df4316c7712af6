"""Whether micro-batches save memory, by an estimate, and which lines keep them from it.

    of a program:  what its way back reads of its way there, and the largest moment
    of a window:   that of a micro-batch, what it keeps between levels, and its results

Both are counted alike, without arguments, gradients and results of the undivided batch,
so that their ratio means something: it is compared with what XLA needs, see the tests.
"""

import collections
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from ga_optax._calls import layouts
from ga_optax._calls.batches import nbytes
from ga_optax._partition import Note, Partitioned, Rows
from ga_optax._passes import ir, known, places
from ga_optax._passes.notes import note
from ga_optax._window import cost
from ga_optax._window.levels import FEW_BYTES, is_recorded

_OF_LEVELS = 0.8  # what levels keep is said to be up to twice as much as it is
ENOUGH = 0.47  # of what the undivided batch needs: half of it, less an error
_MOST_LINES = 4


class Savings(NamedTuple):
    """What a window needs of what the undivided batch does, in bytes.

    Attributes:
      undivided: what the undivided batch needs beside arguments and results.
      window: what a window needs beside those.
      lines: where a micro-batch computes all rows, by a primitive's name and the line
        of the user's code, and about how many bytes that takes; the largest first.
    """

    undivided: int
    window: int
    lines: Sequence[Note]

    @property
    def ratio(self) -> float:
        return self.window / max(self.undivided, 1)

    def is_little(self, num_microbatches: int) -> bool:
        """Whether a window of so many needs so much that it is to be said."""
        least = 1.3 / num_microbatches  # of two, a half is all that there is to save
        enough = ENOUGH if self.lines else _OF_LEVELS
        return self.undivided >= FEW_BYTES and self.ratio > max(enough, least)


def say(trace: layouts.Traced, num_microbatches: int, report: Any, knob: str) -> None:
    """Warns, once, if a window saves little, and lets `plan` say it.

    Args:
      trace: the program of all rows, and that of a micro-batch, see `layouts`.
      num_microbatches: how many there are.
      report: what a window says of its levels; None if there are none.
      knob: the option that keeps less between levels.
    """
    if is_recorded() or layouts.is_open(trace.closed.jaxpr):
        return
    found = _estimate(trace, report.peak if report else 0)
    if not found.is_little(num_microbatches):
        return
    text = said(found, num_microbatches, report.stored if report else (), knob)
    note(text)
    lines = tuple(x.line for x in found.lines)
    if lines not in _said:
        _said.add(lines)
        warnings.warn(text, stacklevel=2)


_said: set[tuple[str, ...]] = set()  # of which lines, each once


def _estimate(trace: layouts.Traced, kept: int) -> Savings:
    """What a window saves, about, which keeps so many bytes between its levels."""
    whole, part = trace.closed.jaxpr, trace.part
    own, num_consts, num_params = part.jaxpr, len(whole.constvars), trace.num_params
    params = own.invars[num_consts : num_consts + num_params]
    results = zip(trace.closed.out_avals, part.layouts, strict=False)
    stacks = sum(nbytes(a) for a, layout in results if isinstance(layout, Rows))
    # Levels take less than a whole step at a time, but beside what is kept for others.
    window = _needs(own, params, kept) + stacks
    undivided = _needs(whole, whole.invars[:num_params])
    return Savings(undivided, window, _lines(whole, part, window // _PARTS))


def _shape(aval: Any) -> tuple[Any, ...]:
    return getattr(aval, "shape", ())


# -- Of a program ----------------------------------------------------------------------


def _needs(jaxpr: core.Jaxpr, params: Sequence[Any], kept: int = 0) -> int:
    """What one forward and one backward pass need, at their largest moment.

    That is what the way back reads of the way there, or what is kept if that is more;
    and what is there for a moment, half of whose largest is among that.
    """
    given = [*jaxpr.constvars, *jaxpr.invars]
    read = cost.residuals(jaxpr.eqns, params, given)
    return max(read, kept) + max(_largest(jaxpr) // 2, _again(jaxpr))


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
    gone: collections.Counter[int] = collections.Counter()
    for i, e in enumerate(jaxpr.eqns):
        inside = max((_largest(p) for p in ir.inner_programs(e)), default=0)
        for x in e.outvars:
            if x in last and not _is_fused(e):
                now += nbytes(x.aval)
                gone[last[x]] += nbytes(x.aval)
        most = max(most, now + inside)
        now -= gone[i]
    return most


def _is_fused(e: core.JaxprEqn) -> bool:
    return e.primitive.name in known.CHEAP and e.primitive.name not in _MADE


_MADE = {"gather", "scatter", "scatter-add", "concatenate", "all_gather", "pad"}


# -- Lines -----------------------------------------------------------------------------


def _lines(whole: core.Jaxpr, part: Partitioned, least: int) -> list[Note]:
    """What is computed whole; if nothing is, what else has all rows."""
    found = [
        Note(f"{x.name.rstrip(',')}, computed whole", x.line, x.size * _WORD)
        for x in part.whole
        if x.size * _WORD > least
    ]
    if not found and (n := _length(whole, part.jaxpr)):
        for e in ir.equations(part.jaxpr):
            sizes = [nbytes(x.aval) for x in e.outvars if n in _shape(x.aval)]
            if max(sizes, default=0) > least and not ir.inner_programs(e):
                name = _NAMES.get(e.primitive.name, ir.name_of(e))
                line = places.line_of(e.source_info)
                found.append(Note(f"{name} of all rows", line, max(sizes)))
    largest: dict[str, Note] = {}
    for x in sorted(found, key=lambda x: -x.size):
        largest.setdefault(x.line, x)
    return list(largest.values())[:_MOST_LINES]


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
