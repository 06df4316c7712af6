"""How the dimensions of a primitive are written.

The notation is that of Shardy's sharding rules. Each dimension has a *factor*, by name:

    "b t c, c d -> b t d"    b, t and d are kept, and c is summed
    "b t _, _ -> b t _"      a part along b or t needs the same part; _ is needed whole
    "... _ _"                of all operands and results the last two are needed whole

A part along a factor needs the same part of the operands that have it, and all of the
others. If some result does not have it, the parts of that result are added up. Where
dimensions depend on parameters, a function of the equation returns them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Axes = tuple[int | None, ...]
Shape = tuple[Any, ...]
Dims = tuple[Sequence[Sequence[Any]], Sequence[Sequence[Any]]]


class Factor(NamedTuple):
    """A factor: a way to split a call.

    Attributes:
      ins: the dimension of each operand that has it; None for one that goes whole.
      outs: that of each result; None for a sum over parts.
    """

    ins: Axes
    outs: Axes


@functools.lru_cache(1024)  # a model has many layers of the same shapes
def read(dims: str, ins: tuple[Shape, ...], outs: tuple[Shape, ...]) -> list[Factor]:
    """The ways to split a call with operands and results of such shapes."""
    if "->" in dims:
        return factors_of_dims(named(dims))
    largest = max((*outs, *ins), key=len)  # operands may be broadcast
    kept = len(largest) - dims.count("_")

    def of(shape: Shape) -> list[int | None]:
        pairs = enumerate(zip(shape, largest, strict=False))
        return [d if d < kept and n == due else None for d, (n, due) in pairs]

    return factors_of_dims((list(map(of, ins)), list(map(of, outs))))


def named(dims: str) -> Dims:
    """The factors that are named, such as in "b t _, _ -> b t _"."""
    ins, outs = [[x.split() for x in side.split(",")] for side in dims.split("->")]
    return [*map(_blank, ins)], [*map(_blank, outs)]


def _blank(names: Sequence[Any]) -> list[Any]:
    return [None if x == "_" else x for x in names]


def factors_of_dims(dims: Dims) -> list[Factor]:
    """A way for each factor, in the order of their names' first places."""
    factors = dict.fromkeys(x for side in dims for names in side for x in names)
    factors.pop(None, None)

    def places(x: Any, side: Sequence[Sequence[Any]]) -> Axes:
        return tuple(list(of).index(x) if x in of else None for of in side)

    return [Factor(*(places(x, side) for side in dims)) for x in factors]


class Split(NamedTuple):
    """How a call splits, as the call itself or the user says.

    Attributes:
      factors: the ways to split it; each is right by itself.
      fun: computes the parts of the results from those of the operands, along a way.
      name: of the function of the user's who promises the ways; else "".
    """

    factors: tuple[Factor, ...]
    fun: Callable[..., list[Any]]
    name: str = ""

    def of_some(self, fun: Callable[..., Any], ins: Any, outs: Any) -> "Split":
        """The split of `fun`, whose operands and results are some of these, in order.

        `ins` and `outs` are their numbers among the operands and results here.
        """
        both = [(*way.ins, *way.outs) for way in self.factors]
        ways = (
            Factor(*(tuple(x[i] for i in side) for side in (ins, outs))) for x in both
        )
        return self._replace(fun=fun, factors=tuple(ways))
