"""The bytes that a program needs at a time, beside its arguments and results.

    most_alive(jaxpr)  =  the largest sum, over time, of the values that are still read

One ruler for any program. Equations run in order, and values are stored as compilers
store them:

    fused      what is cheap its reader computes, unless a product or a loop reads it,
               or several equations
    the same   a reshape, a transpose: no bytes of its own
    in place   a result is written over a value of its size that nobody reads later, but
               for a product
    a loop     holds what it carries and stacks; an iteration runs inside of that
    on CPUs    a product copies what it reads and writes in fewer than 32 bits

XLA orders, fuses and lays out otherwise: its bytes differ by up to a third.
"""

import collections
import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
from jax.extend import core

from . import jaxprs, primitives

# Results that are an operand, as of moves that keep the size.
_SAME = {"optimization_barrier", primitives.APART, primitives.READ_OUT}
_INLINE = {primitives.WINDOW, primitives.GRADIENTS, "custom_jvp_call"}
_INLINE |= {"custom_vjp_call"}


def most_alive(jaxpr: core.Jaxpr) -> int:
    """The most bytes that a program needs at a time, beside arguments and results."""
    line = _Line(jaxpr)
    return line.most({*line.given, *line.results})


class _Step(NamedTuple):
    """An equation, and the numbers of the values that it reads and makes."""

    e: core.JaxprEqn
    reads: list[int]
    makes: list[int]


class _Line:
    """A program without calls.

    Attributes:
      sizes: the bytes of each value, by number.
      steps: the equations.
      given: the arguments.
      results: the results.
    """

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self.sizes: list[int] = []
        self.steps: list[_Step] = []
        self.given = list(map(self._new, (*jaxpr.constvars, *jaxpr.invars)))
        self.results = self._add(jaxpr, self.given)

    def _new(self, x: Any) -> int:
        """The number of a new value."""
        self.sizes.append(jaxprs.nbytes(x))
        return len(self.sizes) - 1

    def _add(self, jaxpr: core.Jaxpr, args: list[int]) -> list[int]:
        """Adds a program of constants and arguments; returns its results."""
        names: dict[Any, int] = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True)
        )

        def of(x: Any) -> int:
            return names[x] if jaxprs.is_variable(x) else self._new(x)

        for e in jaxpr.eqns:
            reads = list(map(of, e.invars))
            programs = jaxprs.inner_programs(e)
            if programs and (jaxprs.is_inline(e) or e.primitive.name in _INLINE):
                consts, number = programs[0].constvars, len(programs[0].invars)
                args = reads[len(reads) - number :]
                makes = self._add(programs[0], [*map(self._new, consts), *args])
            elif _is_same(e):
                makes = reads
            else:
                makes = list(map(self._new, e.outvars))
                self.steps.append(_Step(e, reads, makes))
            names |= zip(e.outvars, makes, strict=True)
        return list(map(of, jaxpr.outvars))

    def most(self, elsewhere: Collection[int]) -> int:
        """The most bytes at a time; values that are stored `elsewhere` take none."""
        last = dict.fromkeys(self.results, len(self.steps))
        stored, readers = {*self.given, *self.results}, collections.Counter[int]()
        for i, step in reversed(list(enumerate(self.steps))):
            if jaxprs.is_cheap(step.e):
                stored.update(y for y in step.makes if readers[y] > 1)
            else:
                stored.update(step.reads, step.makes)
            readers.update({*step.reads})
            # What is not stored is read where its readers are computed.
            is_run = not step.makes or not stored.isdisjoint(step.makes)
            until = i if is_run else max([last.get(y, i) for y in step.makes])
            for x in step.reads:
                last[x] = max(last.get(x, i), until)
        ends = collections.defaultdict[int, list[int]](list)
        for x in stored.difference(elsewhere):
            ends[last.get(x, -1)].append(x)
        alive = most = 0
        taken: dict[int, int] = {}  # by each value; what a loop carries takes none here
        for i, step in enumerate(self.steps):
            is_product = step.e.primitive.name == primitives.PRODUCT
            free = [] if is_product else list(ends[i])
            for y in stored.intersection(step.makes).difference(elsewhere):
                over = next((x for x in free if self.sizes[x] == self.sizes[y]), None)
                if over is None:
                    taken[y] = self.sizes[y]
                    alive += self.sizes[y]
                else:
                    free.remove(over)
                    taken[y] = taken.pop(over, 0)
                if y not in last:
                    ends[i].append(y)
            most = max(most, alive + _inside(step.e))
            alive -= sum([taken.pop(x, 0) for x in ends[i]])
        return most


def _is_same(e: core.JaxprEqn) -> bool:
    """True if results are operands."""
    if primitives.entry_of(e).moves:  # a dimension of size 1 may come in
        [out] = e.outvars
        return jaxprs.nbytes(e.invars[0]) == jaxprs.nbytes(out)
    return e.primitive.name in _SAME


# == Inside of equations ===============================================================

_known: Any = weakref.WeakKeyDictionary()  # by program, which never changes


def _inside(e: core.JaxprEqn) -> int:
    """The most bytes inside of an equation, beside operands and results."""
    if e.primitive.name == primitives.PRODUCT and jax.default_backend() == "cpu":
        types: list[Any] = [x.aval for x in (*e.invars, *e.outvars)]
        return sum([2 * jaxprs.nbytes(x) for x in types if x.dtype.itemsize < 4])
    programs = jaxprs.inner_programs(e)
    for program in programs:
        if program not in _known:
            _known[program] = _of_body(e, program)
    return max([_known[program] for program in programs], default=0)


def _of_body(e: core.JaxprEqn, program: core.Jaxpr) -> int:
    """The most bytes of one iteration, or of a branch."""
    line, kind = _Line(program), jaxprs.kind(e)
    args = line.given[len(program.constvars) :]
    if kind == "scan":
        carried = jaxprs.scan_of(e).split(args)[1]
    elif kind == "while" and len(line.results) == len(e.outvars):
        carried = args[len(args) - len(line.results) :]
    else:
        return line.most({*line.given, *line.results})
    return line.most(set(line.given).difference(carried))
