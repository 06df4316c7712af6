"""Advice on code that each micro-batch computes for all rows, and the warning of it.

The partition records the lines. A call warns of the lines if a micro-batch computes
more for all rows than for its own rows: then more micro-batches save little memory.
"""

import collections
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core

from ga_optax._calls import rows
from ga_optax._calls.batches import nbytes
from ga_optax._calls.call import Call
from ga_optax._partition import Note, Partitioned
from ga_optax._passes import known, log, places, read
from ga_optax._text import warn
from ga_optax._window.meetings import MEETINGS

_OF_INDEX = (
    "An index may reach any row. If each row has its own, such as the nodes of its own "
    "graph, index inside of a row, by jax.vmap or take_along_axis, and add no offsets."
)
# The advice on primitives that are computed for all rows.
_TODO = {
    "while": "A loop that runs until all rows are done has all of them in every "
    "micro-batch. Give each row a loop of its own, by jax.vmap.",
    **dict.fromkeys(("gather", "scatter", "scatter-max", "scatter-min"), _OF_INDEX),
    "reshape": "A reshape cuts rows into pieces, and micro-batches would have unequal "
    "numbers of them: choose a number of pieces that num_microbatches divides, or "
    "fewer micro-batches.",
    "dynamic_update_slice": "Join the new part and the old one by jnp.concatenate.",
}
_OF_EFFECT = (
    "Code that prints, checks or calls back gets all rows at once: give it fewer "
    "numbers, such as a sum over rows."
)
_OF_ANY_OTHER = (
    "If no row needs another there, write it for one row, under jax.vmap. If rows must "
    "meet, more micro-batches save no memory there."
)
_MOST_LINES = 4


def of_primitives(whole: Sequence[Note]) -> list[str]:
    """Returns the advice on the primitives in `_TODO`, each sentence once."""
    reads = lambda x: x.name.startswith("what ")  # noqa: E731
    todo = (_OF_EFFECT if reads(x) else _TODO.get(x.name) for x in whole)
    return list(dict.fromkeys(filter(None, todo)))


def of_hidden(whole: Sequence[Note]) -> str:
    """Returns the advice on code that cannot be read; "" if there is no such code."""
    hidden = {x: known.hidden(x.name) for x in whole if known.hidden(x.name)}
    if not hidden:
        return ""
    counts = collections.Counter(hidden.values())
    kinds = [f"{n} {kind}{'' if n == 1 else 's'}" for kind, n in counts.items()]
    are = "is" if len(hidden) == 1 else "are"
    lines = (re.match(r"(.*?:\d+):\d+ \((.*?)\)", places.short(x.line)) for x in hidden)
    named = dict.fromkeys(f"{x[2]} ({x[1]})" for x in lines if x)
    what = " and ".join(named) or "what calls it"
    return (
        f"{' and '.join(kinds)} {are} computed whole: wrap {what} in ga_optax.rowwise "
        "if its rows do not need each other."
    )


def say(call: Call, jaxpr: core.Jaxpr, part: Partitioned) -> None:
    """Warns of each set of lines once, if a micro-batch computes more for all rows.

    `plan` prints the warning, too. If rows only meet, which no other code avoids, the
    limit is the number of bytes that the whole batch computes. `jaxpr` is the program
    of the whole batch.
    """
    if rows.is_open(jaxpr):
        return
    size, of_batch = call.size, part.jaxpr.invars[-1 - len(call.batch) :]
    for_all, for_own = _computed(part.jaxpr, of_batch, ())
    if for_all <= for_own * (1 if part.whole else size):
        return
    lines = [f"{x.name.rstrip(',')}, at {x.line}" for x in part.whole] or [
        f"{read.name_of(e)}, at {places.place_of(e.source_info)}"
        for e in read.equations(part.jaxpr)
        if e.primitive.name in MEETINGS
    ]
    lines = tuple(dict.fromkeys(lines))[:_MOST_LINES]
    todo = "If rows must meet there, more micro-batches save no memory."
    if part.whole:
        texts = *of_primitives(part.whole), of_hidden(part.whole)
        todo = " ".join(filter(None, texts))
    what = "; ".join(lines) + (", computed whole" if part.whole else "")
    text = (
        f"Each of {size} micro-batches computes {for_all:,} bytes for all rows, "
        f"and {for_own:,} for its own rows: {what}. "
        f"{todo or _OF_ANY_OTHER} ga_optax.batch_dependencies shows every line."
    )
    log.write(text)
    if lines not in _warned:
        _warned.add(lines)
        warn(text)


_warned: set[tuple[str, ...]] = set()  # the lines of each warning


def _computed(
    jaxpr: core.Jaxpr, of_rows: Iterable[Any], of_all: Iterable[Any]
) -> tuple[int, int]:
    """The bytes that a micro-batch computes forward: for all rows, for its own rows.

    Integers do not count, such as the indices by which rows are shuffled.

    Args:
      jaxpr: the program of the micro-batch.
      of_rows: the arguments that have the rows of the micro-batch.
      of_all: the arguments that depend on all rows, alike in all micro-batches.
    """
    meetings = (e for e in jaxpr.eqns if e.primitive.name in MEETINGS)
    of_all = [*of_all, *(x for e in meetings for x in e.outvars)]
    of_all = read.following(jaxpr, of_all)
    of_rows = read.following(jaxpr, of_rows, list(MEETINGS))
    total = [0, 0]
    for e in jaxpr.eqns:
        for program in read.inner_programs(e):
            pairs = list(zip(program.invars, read.operands(e, program), strict=False))
            inside = [
                [x for x, y in pairs if read.is_among(y, group)]
                for group in (of_rows, of_all)
            ]
            for i, n in enumerate(_computed(program, *inside)):
                total[i] += read.times(e) * n
        if read.inner_programs(e):
            continue
        size = sum(nbytes(x.aval) for x in filter(read.is_inexact, e.outvars))
        if not of_rows.isdisjoint(e.outvars):
            total[1] += size
        elif not of_all.isdisjoint(e.outvars):
            total[0] += size
    return total[0], total[1]
