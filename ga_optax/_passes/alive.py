"""The bytes that a program needs at a time, beside its arguments and results.

    most_alive(jaxpr)  =  the largest sum, over time, of the values that are still read

One ruler for any program. Equations run in order, and values are stored as compilers
store them:

    fused      what is computed number by number, or moved, each reader computes anew,
               unless a product or a loop reads it, or several read an `exp`, or
               a value of two others
    the same   a reshape, a transpose: no bytes of its own
    in place   a result is written over an operand of its size that nobody reads later
    a loop     holds what it carries and stacks; an iteration runs inside of that

XLA orders, fuses and lays out otherwise: its bytes differ by up to a third.
"""

import collections
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from . import jaxprs, primitives

_BARRIER = "optimization_barrier"
# Results that are an operand, and take no bytes.
_SAME = {"reshape", "squeeze", "transpose", "copy", "name", "stop_gradient", "pvary"}
_SAME |= {_BARRIER, primitives.CONSTRAINT, primitives.APART, primitives.READ_OUT}
_SAME |= {"pbroadcast", "device_put"}
# Their results are computed where they are read, beside what is so number by number.
_MOVED = "broadcast_in_dim slice dynamic_slice pad rev concatenate iota split get"
_FUSED = {*_MOVED.split(), "unstack", "stack", "tile"}
# They are computed of what they read, as it is read, and stored.
_READING = {"argmax", "argmin", "dynamic_update_slice", "scatter", "scatter-add"}
_READING |= {primitives.ADD_TO, primitives.WRITE}
# The first operand is written over, if nobody reads it later.
_WRITTEN = {"dynamic_update_slice", "scatter", "scatter-add", "scatter-mul"}
_WRITTEN |= {"scatter-max", "scatter-min", primitives.NEW_REF}
_UPDATES = {"dynamic_update_slice"}
_INLINE = {primitives.WINDOW, primitives.GRADIENTS, "custom_jvp_call"}
_INLINE |= {"custom_vjp_call"}


def most_alive(jaxpr: core.Jaxpr) -> int:
    """The most bytes that a program needs at a time, beside arguments and results."""
    line = _Line()
    given = [line.number(0) for _ in (*jaxpr.constvars, *jaxpr.invars)]
    names = zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True)
    outs = line.add(jaxpr, {**dict(names)})
    return _Lives(line, given, outs).most(outs)


# == A straight line ===================================================================


class _Step(NamedTuple):
    """An equation; None for a literal among what it reads."""

    name: str
    e: Any
    reads: Sequence[int | None]
    makes: Sequence[int]

    @property
    def pairs(self) -> list[tuple[int | None, int]]:
        """Operands and results by place."""
        return list(zip(self.reads, self.makes, strict=False))


class _Line:
    """A program without calls: its steps, and the bytes of each value by number.

    `slices` are those of stacks, by variable, which come with their first reader.
    `constants` have one number everywhere.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.steps: list[_Step] = []
        self.slices: dict[Any, int] = {}
        self.constants: set[int | None] = {None}

    def number(self, nbytes: int) -> int:
        """A new value of so many bytes."""
        self.sizes.append(nbytes)
        return len(self.sizes) - 1

    def add(self, jaxpr: core.Jaxpr, names: dict[Any, int | None]) -> list[int | None]:
        """Adds a program, given the numbers of what it reads; returns the results."""

        def of(x: Any) -> int | None:
            if not jaxprs.is_variable(x):
                return None
            if x in self.slices:
                makes = [self.number(jaxprs.nbytes(x.aval))]
                step = _Step("dynamic_slice", None, [self.slices.pop(x)], makes)
                self.steps.append(step)
                [names[x]] = makes
            return names[x]

        for e in jaxpr.eqns:
            name, reads = e.primitive.name, list(map(of, e.invars))
            programs = _inlined_from(e)
            if programs and _is_inline(e):
                outs = self._inlined(e, programs[0], reads)
            else:
                outs = [self.number(jaxprs.nbytes(x.aval)) for x in e.outvars]
                if self.constants.issuperset(reads[:1]):
                    # An update of zeros is computed where it is read, as a pad.
                    name = "pad" if name in _UPDATES else name
                    is_one = name in _SAME or name == "broadcast_in_dim"
                    self.constants.update(outs if is_one else ())
                self.steps.append(_Step(name, e, reads, outs))
            names |= zip(e.outvars, outs, strict=True)
        return list(map(of, jaxpr.outvars))

    def _inlined(
        self, e: core.JaxprEqn, inside: core.Jaxpr, reads: Sequence[int | None]
    ) -> list[int | None]:
        reads = reads[len(reads) - len(inside.invars) :]
        if jaxprs.kind(e) == "checkpoint" and e.params.get("differentiated"):
            # What is computed again waits for all that it reads.
            some = [x for x in reads if x is not None]
            makes = [self.number(self.sizes[x]) for x in some]
            self.steps.append(_Step(_BARRIER, None, some, makes))
            new: dict[int | None, int] = dict(zip(some, makes, strict=True))
            reads = list(map(new.get, reads))
        known: dict[Any, int | None] = dict.fromkeys(inside.constvars)
        return self.add(inside, known | dict(zip(inside.invars, reads, strict=True)))


def _is_inline(e: core.JaxprEqn) -> bool:
    return jaxprs.is_inline(e) or e.primitive.name in _INLINE or "function" in e.params


def _inlined_from(e: core.JaxprEqn) -> list[core.Jaxpr]:
    """The programs inside an equation; of a `microbatch` what it runs."""
    divided: Any = e.params.get("function")
    if "program" in e.params or not hasattr(divided, "runs"):
        return jaxprs.inner_programs(e)
    closed: Any = jax.make_jaxpr(lambda *xs: divided.runs(divided, xs))(*divided.types)
    return [jaxprs.live(closed.jaxpr)]


def _is_same(step: _Step) -> bool:
    """True if results are operands."""
    if step.name == "broadcast_in_dim":  # a dimension of size 1 may come in
        one, two = (x.aval.shape for x in (step.e.invars[0], step.e.outvars[0]))
        return jaxprs.numbers(one) == jaxprs.numbers(two)
    return step.name in _SAME


def _is_fused(step: _Step) -> bool:
    """True if readers may compute the results."""
    row = primitives.TABLE.get(step.name, primitives.UNKNOWN)
    return step.name in _FUSED or (row.dims == "..." and not row.is_dear)


def _costs(step: _Step) -> bool:
    """True for a function such as `exp`, which several readers do not compute again."""
    if step.e is None:
        return False
    row = primitives.TABLE.get(step.name, primitives.UNKNOWN)
    simple = row.each or row.broadcasts or row.is_exact or row.sums != ()
    return row.dims == "..." and not simple and jaxprs.is_inexact(step.e.outvars[0])


# == Lives =============================================================================


class _Lives:
    """The stored values of a line, and how long each lives.

    Attributes:
      line: the program.
      given: the arguments, which are stored elsewhere.
      carried: those of them that may be written over.
      stored: the values that are stored.
      origin: for each value the stored values of which it is computed, or itself.
      first: the step that stores each value; -1 for arguments.
      last: the last step that reads it.
      over: the value over which a value is written.
    """

    def __init__(
        self,
        line: _Line,
        given: Sequence[int],
        wanted: Sequence[int | None],
        read: Sequence[int | None] = (),
        carried: Sequence[int] = (),
    ) -> None:
        """`wanted` results are stored; others are `read` at the end."""
        self.line, self.given, self.carried = line, set(given), set(carried)
        self.stored = self._stored(wanted, read)
        self.origin = [frozenset[int]()] * len(line.sizes)
        self.first, self.last = dict.fromkeys(given, -1), dict.fromkeys(given, -1)
        for x in given:
            self.origin[x] = frozenset([x])
        for i, step in enumerate(line.steps):
            self._live(i, step)
        for x in (*wanted, *read):
            for b in () if x is None else self.origin[x]:
                self.last[b] = len(line.steps)
        self.over: dict[int, int] = {}
        for i, step in enumerate(line.steps):
            for n, y in enumerate(step.makes):
                if self.first.get(y) == i:
                    self._write_over(i, y, _places(step, n))

    def _stored(
        self, wanted: Sequence[int | None], read: Sequence[int | None]
    ) -> set[int]:
        needed = {x for x in wanted if x is not None}
        readers = collections.Counter([x for x in (*wanted, *read) if x is not None])
        stored: set[int] = set()
        for step in reversed(self.line.steps):
            reads = [x for x in step.reads if x is not None]
            if _is_same(step):
                pairs = [(x, y) for x, y in step.pairs if x is not None]
                waits = step.name == _BARRIER
                needed.update(x for x, y in pairs if y in needed or waits)
                for x, y in pairs:
                    readers[x] += readers[y]
                continue
            fused = _is_fused(step)
            several = fused and readers[step.makes[0]] > 1
            several &= _costs(step) or len({*step.reads} - self.line.constants) > 1
            stored.update(x for x in step.makes if x in needed or several or not fused)
            if not (fused or step.name in _READING or step.name.startswith("reduce_")):
                needed.update(reads)
            elif step.name in _WRITTEN:
                needed.update(reads[:1])
            readers.update(reads)
        return stored

    def _live(self, i: int, step: _Step) -> None:
        origin = self.origin
        reads = [x for x in step.reads if x is not None]
        if same := _is_same(step):
            for x, y in step.pairs:
                origin[y] = frozenset() if x is None else origin[x]
        stored = [] if same else [y for y in step.makes if y in self.stored]
        if stored or not step.makes or step.name == _BARRIER:
            self.last.update((b, i) for x in reads for b in origin[x])
        for y in () if same else step.makes:
            if y in self.stored:
                origin[y], self.first[y], self.last[y] = frozenset([y]), i, i
            else:
                origin[y] = frozenset().union(*(origin[x] for x in reads))

    def _write_over(self, i: int, y: int, places: Sequence[int | None]) -> None:
        """Writes a value over an operand of its size that nobody reads later."""
        sizes, taken = self.line.sizes, self.over.values()
        for b in (b for x in places if x is not None for b in self.origin[x]):
            free = b not in self.given or b in self.carried
            if free and self.last[b] == i and sizes[b] == sizes[y] and b not in taken:
                self.over[y] = b
                return

    def root(self, x: int) -> int:
        """The value at whose place a value is stored."""
        while x in self.over:
            x = self.over[x]
        return x

    def carry(self, starts: Sequence[int], results: Sequence[int | None]) -> None:
        """Puts what the next iteration gets in the place of what this one got."""
        for start, x in zip(starts, results, strict=True):
            for b in () if x is None else self.origin[x]:
                if (r := self.root(b)) != start and self.last[start] < self.first[r]:
                    self.over[r] = start

    def most(self, elsewhere: Sequence[int | None] = ()) -> int:
        """The most bytes at a time; results `elsewhere` take none here."""
        line, end = self.line, len(self.line.steps)
        outs = [x for x in elsewhere if x is not None]
        free = {self.root(b) for x in outs for b in self.origin[x]} | self.given
        changes = [0] * (end + 2)
        for y, start in self.first.items():
            if self.root(y) not in free:
                start = self.last[self.over[y]] + 1 if y in self.over else start
                changes[start] += line.sizes[y]
                changes[max(self.last[y] + 1, start)] -= line.sizes[y]
        inside = [*map(_inside, line.steps), 0, 0]
        alive = most = 0
        for change, more in zip(changes, inside, strict=True):
            alive += change
            most = max(most, alive + more)
        return most


def _places(step: _Step, n: int) -> Sequence[int | None]:
    """The operands over which the n-th result may be written."""
    e: Any = step.e
    kind = None if e is None else jaxprs.kind(e)
    if kind == "scan":
        how = jaxprs.scan_of(e)
        return step.reads[how.num_consts + n :][:1] if n < how.num_carry else ()
    if kind == "while":
        return step.reads[len(step.reads) - len(step.makes) + n :][:1]
    if step.name in _WRITTEN:
        return step.reads[:1]
    return step.reads if _is_fused(step) else ()


# == Inside of loops ===================================================================

_known: Any = weakref.WeakKeyDictionary()  # by program, which never changes


def _inside(step: _Step) -> int:
    """The most bytes inside of an equation, beside operands and results."""
    e = step.e
    if e is None:
        return 0
    if step.name == primitives.PRODUCT:
        return _copied(e)
    if jaxprs.kind(e) not in ("scan", "while", "cond") and step.name != "shard_map":
        return 0
    programs = jaxprs.inner_programs(e)
    for program in programs:
        if program not in _known:
            _known[program] = _of_body(e, program)
    return max([_known[program] for program in programs])


def _copied(e: core.JaxprEqn) -> int:
    """The bytes of copies that a product makes of what it reads.

    It reads summed dimensions last, or first; others of more than two are turned. On
    CPUs it computes in 32 bits.
    """
    contracted, batched = e.params["dimension_numbers"]
    cpu, copies = jax.default_backend() == "cpu", 0
    types: list[Any] = [x.aval for x in (*e.invars, *e.outvars)]
    for side, x in enumerate(types[:2]):
        batch, summed = len(batched[side]), len(contracted[side])
        rank, low = len(x.shape), x.dtype.itemsize < 4
        start = batch if side else rank - summed
        due = (*range(batch), *range(start, start + summed))
        turned = rank > 2 and (*batched[side], *contracted[side]) != due
        if (low and cpu) or turned:
            copies += jaxprs.nbytes(x) * (2 if low and cpu else 1)
    if cpu and types[2].dtype.itemsize < 4:
        copies += 2 * jaxprs.nbytes(types[2])
    return copies


def _of_body(e: core.JaxprEqn, program: core.Jaxpr) -> int:
    """The most bytes of one iteration, or of a branch."""
    kind, line, outs = jaxprs.kind(e), _Line(), len(program.outvars)
    number, carried, slices = outs, list[Any](), list[Any]()
    if kind == "scan":
        how = jaxprs.scan_of(e)
        _, carried, slices = how.split(program.invars)
        number = how.num_carry
    elif kind == "while" and outs == len(e.outvars):
        carried = program.invars[len(program.invars) - outs :]
    every = [*program.constvars, *program.invars]
    given = [line.number(jaxprs.nbytes(x.aval)) for x in every]
    numbers = dict(zip(every, given, strict=True))
    line.slices = {x: numbers[x] for x in slices}
    starts = [numbers[x] for x in carried]
    results = line.add(program, {**numbers})
    lives = _Lives(line, given, results[:number], results[number:], starts)
    if not carried:
        return lives.most(results[:number])
    lives.carry(starts, results[:number])
    return lives.most()
