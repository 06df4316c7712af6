"""Rows of arrays that a program creates, with an axis as long as the batch.

    z = random.normal(key, (n, 64));  fake = generator(params, z)

What comes from no leaf of the batch is whole, and cut where it meets rows (`cutting`).
Here it meets none. Then the first equation that `cutting` cannot go back through, a
*root*, may get rows of it, and what follows has rows as if `z` were in the batch.

The same goes for an index that takes rows in another order, such as by their experts:
its own rows may be taken by each micro-batch, or all by all.

An axis may be as long as the batch by chance, like that of a table of positions: then
rows would be gathered again. So the program is partitioned both ways, and the way
counts in which a micro-batch computes less.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.extend import core

from ga_optax._partition import cutting, indexing
from ga_optax._partition.values import Layout, Rows, Value
from ga_optax._partition.writer import Writer
from ga_optax._passes import interpret, places, read

Root = tuple[Any, ...]  # an equation, its line, and how an operand of it was made

_LARGE = 2  # numbers for each row: less is not worth a second look
_FEW = 3  # roots that are looked at one by one


@dataclasses.dataclass
class Created:
    """The arrays that one program creates.

    Attributes:
      rows: the rows of the batch, as in a leaf of the batch.
      length: the number of rows of the batch.
      cut: the roots that get rows.
      roots: the roots that might get rows, and the count of numbers in each.
    """

    rows: Rows
    length: Any
    cut: frozenset[Root] = frozenset()
    roots: dict[Root, int] = dataclasses.field(default_factory=dict)
    _ways: dict[Value, int | None] = dataclasses.field(default_factory=dict)

    def __call__(self, w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Value]:
        """The operands of an equation; one has rows if it is a root to cut."""
        if cutting.is_open(e) or w.scope.in_rule:
            return vs
        found = []
        if vs and all(v.is_whole for v in vs):
            found = [i for i, v in enumerate(vs) if self._is_one(v)]
        elif e.primitive.name == "gather" and indexing.reorders(w, e, *vs):
            found = [1] if vs[1].shape[0] == self.length else []
        size = max([read.computed(e), *(vs[i].size for i in found)])
        if not found or size < _LARGE * read.numbers([self.length]):
            return vs
        i = max(found, key=lambda i: vs[i].size)
        line = places.line_of(e.source_info)
        root = e.primitive.name, line, self._way(vs[i])
        self.roots[root] = size
        if root not in self.cut:
            return vs
        rows = self._rows_of(vs[i])
        return interpret.put(vs, [i], [vs[i].with_layout(w.part(vs[i], rows), rows)])

    def layout(self, v: Value) -> Layout:
        """The layout of a result, which has rows if it is created and large."""
        is_large = v.size >= _LARGE * read.numbers([self.length])
        return self._rows_of(v) if is_large and self._is_one(v) else v.layout

    def _rows_of(self, v: Value) -> Rows:
        return self.rows.at(v.shape.index(self.length))

    def _is_one(self, v: Value) -> bool:
        """True if a value has the axis, and `cutting` knows all that created it."""
        return v.is_whole and self.length in v.shape and self._way(v) is not None

    def _way(self, v: Value) -> int | None:
        """A number for how it was made, if `cutting` knows all that made it."""
        if self.length not in v.shape:
            return hash(v.shape)
        if v not in self._ways:
            self._ways[v] = None
            if v.made is not None and cutting.is_open(v.made[0]):
                ways = [self._way(u) for u in v.made[1]]
                if None not in ways:
                    self._ways[v] = hash((v.made[0].primitive.name, v.shape, *ways))
        return self._ways[v]


def best(
    run: Callable[[Created | None], Any],
    cost: Callable[[Any], tuple[int, int]],
    created: Created | None,
) -> Any:
    """The partitioned program in which a micro-batch computes less.

    Args:
      run: partitions the program, with rows of `created`.
      cost: the count of numbers that a micro-batch computes, and of meetings.
      created: without roots that are cut; None if nothing has rows.
    """
    chosen = run(created)
    if created is None:
        return chosen
    roots = sorted(created.roots, key=created.roots.__getitem__, reverse=True)
    each = [[root] for root in roots[:_FEW]]
    cut: frozenset[Root] = frozenset()
    for more in [*each, roots[_FEW:]]:
        if not more:
            continue
        trial = run(Created(created.rows, created.length, cut.union(more)))
        (numbers, met), (before, meetings) = cost(trial), cost(chosen)
        if numbers * (1 + (met > meetings)) < before:  # a meeting is one more pass
            chosen, cut = trial, cut.union(more)
    return chosen
