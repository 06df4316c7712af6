"""Functions of pairs of rows, such as products of rows with rows, split along columns.

    logits = images @ texts.T;  log_softmax(logits, 1);  log_softmax(logits, 0)

A product of rows with rows can be split along its columns instead: all rows of one
factor are needed here anyway; with the rows of the other factor each column is
complete, and a reduction over rows needs no collective.
"""

import dataclasses
from typing import Any

from ga_optax._partition import factors
from ga_optax._partition.values import Rows, Value, can_split
from ga_optax._partition.writer import Writer
from ga_optax._passes.primitives import entry_of

# By a value and rows of it: the equation, operands and factor that compute these; None
# if they are here already, or are gathered.
Steps = dict[tuple[Value, Rows], Any]


def of_pairs(w: Writer, v: Value, gone: tuple[int, ...]) -> Value | None:
    """A function of pairs of rows, split along an axis that a reduction leaves.

    It is None unless it is computed of such rows that are here already, and of others
    that have fewer numbers than it has itself. The reduction takes the axes `gone`.
    """
    if w.scope.forbids_collectives or not v.params:
        return None
    for rows in map(Rows, range(len(v.shape))):
        fits = rows.dim not in gone and can_split(v.shape, rows, w.axis.parts)
        steps = _steps(v, rows) if fits else {}
        if any(_is_here(u, its) for u, its in steps):
            for (u, its), step in steps.items():
                if step is not None:
                    here, (e, vs, way) = w.at(level=0), step
                    u.copies[its] = *factors.along(here, e, vs, its, way), here.level
            x, level = v.copies[rows]
            return dataclasses.replace(v.with_layout(x, rows), level=level)
    return None


def _steps(v: Value, rows: Rows) -> Steps:
    """The steps to rows of a value, in order; none if one gathers as many numbers."""
    steps, todo = Steps(), [(v, rows)]
    while todo:
        u, its = todo[-1]
        step, due, gathered = None, [], []
        if not (u.is_whole or _is_here(u, its)):
            step, gathered = _step(u, its), [u]
        if step is not None:
            pairs = list(zip(step[1], step[2].ins, strict=True))
            due = [(x, its.at(d)) for x, d in pairs if d is not None]
            gathered = [x for x, d in pairs if d is None and not x.is_whole]
        if any(x.size >= v.size for x in gathered):
            return {}
        if due := [x for x in due if x not in steps]:
            todo += due
        else:
            steps[todo.pop()] = step
    return steps


def _step(v: Value, rows: Rows) -> Any:
    """The step to rows of a value; a product takes none but rows that are here."""
    if v.made is None:
        return None
    e, vs, _ = v.made
    way = next((x for x in factors.of_equation(e) if x.outs == (rows.dim,)), None)
    if way is None:
        return None
    pairs = zip(vs, way.ins, strict=True)
    is_here = all(d is None or u.layout == rows.at(d) for u, d in pairs)
    return (e, vs, way) if is_here or not entry_of(e).is_dear else None


def _is_here(v: Value, rows: Rows) -> bool:
    """True if a value has such rows, and they need not be cut from all of it."""
    return not v.is_whole and rows in (v.layout, *v.copies)
