"""The notation of the dimensions of primitives.

Each dimension has a *factor*, or None: it is always whole. A part of a call along a
factor needs the same part of the operands with this factor, and all of the others. The
parts of a result without the factor are added up. For `x @ w` the dimensions are
`[["b", "t", "c"], ["c", "d"]], [["b", "t", "d"]]`: b, t and d are kept, c is summed.

    "..."        dimension d of all operands and results is one factor
    "... _ _"    as well, but the last two dimensions are whole

Where dimensions depend on parameters, a function of the equation returns them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Axes = tuple[int | None, ...]
Shape = tuple[Any, ...]
Dims = tuple[Sequence[Sequence[Any]], Sequence[Sequence[Any]]]


class Factor(NamedTuple):
    """A factor, along which a call splits.

    Attributes:
      ins: the dimension of each operand that splits; None for a whole operand.
      outs: the dimension of each result that splits; None for a sum over parts.
    """

    ins: Axes
    outs: Axes


@functools.lru_cache(1024)  # a model has many layers of the same shapes
def read(dims: str, ins: tuple[Shape, ...], outs: tuple[Shape, ...]) -> list[Factor]:
    """The factors that a text means, of operands and results of such shapes."""
    largest = max((*outs, *ins), key=len)  # operands may be broadcast
    kept = len(largest) - dims.count("_")

    def names(shape: Shape) -> list[int | None]:
        pairs = enumerate(zip(shape, largest, strict=False))
        return [d if d < kept and n == most else None for d, (n, most) in pairs]

    return factors_of_dims((list(map(names, ins)), list(map(names, outs))))


def factors_of_dims(dims: Dims) -> list[Factor]:
    """The factors, in the order in which their names first come."""
    factors = dict.fromkeys(x for side in dims for names in side for x in names)
    factors.pop(None, None)

    def places(x: Any, side: Sequence[Sequence[Any]]) -> Axes:
        return tuple(list(of).index(x) if x in of else None for of in side)

    return [Factor(*(places(x, side) for side in dims)) for x in factors]


class Split(NamedTuple):
    """The factors of a call, as the call itself or the user gives them.

    Attributes:
      factors: the factors; the call may be split along any one of them.
      fun: computes parts of the results from parts of the operands, along a factor.
      name: the name of the user's function, if the user promises the factors; else "".
    """

    factors: tuple[Factor, ...]
    fun: Callable[..., list[Any]]
    name: str = ""

    def of_some(self, fun: Callable[..., Any], ins: Any, outs: Any) -> "Split":
        """The split of another function, with some of the operands and results.

        `ins` and `outs` are their numbers among `[*operands, *results]`.
        """
        dims = [(*factor.ins, *factor.outs) for factor in self.factors]
        factors = (
            Factor(*(tuple(x[i] for i in side) for side in (ins, outs))) for x in dims
        )
        return self._replace(fun=fun, factors=tuple(factors))
