"""Folds: how results of micro-batches become one result.

There is one `Fold` for each leaf. The loss is one more leaf: of the fold "mean" in
`accumulate`, otherwise of "sum". A new fold is one more record in `FOLDS`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import accumulator
from .._checks import is_real, named_leaves
from .._devices import collectives, meshes
from .._devices.meshes import Axes
from . import micro_step


class Weighting(NamedTuple):
    """The weight of a micro-batch, and the zeros that round its results.

    Attributes:
      weight: the weight; None for 1.
      zero: see `accumulator.rounded`; None if no result is rounded before it is added.
      zero_of_weighted: such a zero for results that the weight multiplies.
    """

    weight: jax.Array | None = None
    zero: jax.Array | None = None
    zero_of_weighted: jax.Array | None = None

    def rounded(self, x: Any) -> Any:
        """A leaf, rounded before it is added."""
        if self.zero is None:
            return x
        return accumulator.rounded(jnp.asarray(x), self.zero)


class Fold(NamedTuple):
    """The functions by which a leaf of all micro-batches becomes one result.

        carry = init(type of the leaf, axes)
        carry = step(carry, leaf, weighting)        for each micro-batch
        carry = join(carry, carry of a neighbour)   for each pair of logical devices
        carry = merge(carry, data axes)             on several devices
        result = finish(carry, Σ w)

    Attributes:
      init: makes the first carry. A sum is marked as varying over `axes`, and as one of
        the terms does.
      step: adds a leaf.
      join: puts together the carries of two logical devices.
      merge: puts together the carries of all devices, whose axes are bound. None for a
        sum: it is reduced together with the gradients.
      finish: makes the result.
      adds: True if leaves are added up or compared: they must be numbers, and not the
        rows of different examples.
      collects: True if the loop stacks the leaves of all micro-batches along a new axis
        0. After the loop this stack is the carry.
    """

    init: Callable[[Any, Axes], Any] = lambda x, axes: ()
    step: Callable[[Any, Any, Weighting], Any] = lambda carry, x, weighting: carry
    join: Callable[[Any, Any], Any] = lambda a, b: b
    merge: Callable[[Any, Axes], Any] | None = None
    finish: Callable[[Any, Any], Any] = lambda carry, weight: carry
    adds: bool = False
    collects: bool = False


def _start_of_mean(x: Any, axes: Axes) -> Any:
    [term] = map(_inexact, micro_step.blank([x]))
    total: Any = accumulator.init(term).total
    return micro_step.varying_like(-total, term, axes)


def _mean(total: Any, x: Any, weighting: Weighting) -> Any:
    """Adds w·x, weighted as the loss is. The sum of integers is float32."""
    x, weight = _inexact(weighting.rounded(x)), weighting.weight
    if weight is not None:
        x = accumulator.weighted(x, weight, total.dtype, weighting.zero_of_weighted)
    return accumulator.add_terms([total], [x], weight)[0]


def of_last_device(xs: list[jax.Array], axes: Axes) -> list[jax.Array]:
    """The arrays of the last device, on all devices."""
    is_last = jax.lax.axis_index(axes) == meshes.num_devices(axes) - 1

    def last(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = last(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        count = x.astype(accumulator.sum_dtype(x.dtype))
        here = jnp.where(is_last, count, -jnp.zeros_like(count))  # -0.0 + x is x
        return jax.lax.psum(here, axes).astype(x.dtype)

    return list(map(last, collectives.vary(xs, axes)))


def _extremum(larger: Any, across: Any) -> Fold:
    """The largest or smallest number; the carry has the number of terms, too."""

    def step(carry: Any, x: Any, _: Weighting) -> Any:
        (most, number), x = carry, micro_step.strong(x)
        # Infinities would stop `jax_debug_infs`, so a count says that there is no term.
        return micro_step.varying_like(
            jnp.where(number == 0, x, larger(most, x)), most
        ), number + 1

    def join(a: Any, b: Any) -> Any:
        return larger(a[0], b[0]), b[1]

    def merge(carry: Any, axes: Axes) -> Any:
        return across(collectives.vary(carry[0], axes), axes), carry[1]

    return Fold(
        init=lambda x, axes: (
            micro_step.varying_like(micro_step.blank([x])[0], x, axes),
            jnp.int32(0),
        ),
        step=step,
        join=join,
        merge=merge,
        finish=lambda carry, weight: carry[0],
        adds=True,
    )


FOLDS = {
    "mean": Fold(
        _start_of_mean, _mean, collectives.rounded_sum, None, accumulator.average, True
    ),
    # Unweighted: counts stay counts, and are added up in 32 bits at least.
    "sum": Fold(
        init=lambda x, axes: micro_step.varying_like(
            micro_step.blank([x])[0].astype(accumulator.sum_dtype(x.dtype)), x, axes
        ),
        step=lambda total, x, w: total + w.rounded(x).astype(total.dtype),
        join=collectives.rounded_sum,
        adds=True,
    ),
    # Of several devices, the leaf of the last.
    "last": Fold(
        init=lambda x, axes: micro_step.blank([x])[0],
        step=lambda carry, x, _: micro_step.strong(x),
        merge=lambda x, axes: of_last_device([x], axes)[0],
    ),
    # Of several devices, in their order.
    "stack": Fold(merge=lambda stack, axes: stack, collects=True),
    "max": _extremum(jnp.maximum, jax.lax.pmax),
    "min": _extremum(jnp.minimum, jax.lax.pmin),
}


# -- The option ------------------------------------------------------------------------


def check_aux(option: Any) -> None:
    """Raises unless the option `aux` is a tree of names of folds."""
    for name in jax.tree.leaves(option, is_leaf=lambda x: x is None):
        if not isinstance(name, str) or name not in FOLDS:
            raise ValueError(
                f"aux must be one of {', '.join(map(repr, FOLDS))}, or a tree of "
                "these words that is a prefix of the aux tree, but it holds "
                f"{name!r}. Pass one of these."
            )


def folds_of(option: Any, aux: Any, rows: int, grown: Callable[[], Any]) -> list[str]:
    """The name of the fold of each leaf of `aux`.

    Args:
      option: names of folds, a prefix of the tree of `aux`.
      aux: the types of the aux of one micro-batch.
      rows: how many rows a micro-batch has.
      grown: returns the types of the aux of twice as many rows. It is called only if a
        leaf that is added up may have rows.
    """
    try:
        modes = jax.tree.leaves(jax.tree.broadcast(option, aux))
    except ValueError as error:
        raise ValueError(
            f"aux must be a tree that is a prefix of the aux tree, but it is {option!r}"
            f" and fun returned {jax.tree.structure(aux)}: {error}. Name the same "
            "keys, or use one word for all of them."
        ) from None
    longer: Any = None
    for i, ((name, x), mode) in enumerate(zip(named_leaves(aux), modes, strict=True)):
        if not FOLDS[mode].adds:
            continue
        compares = mode in ("max", "min")
        if not (
            is_real(x.dtype)
            or (jnp.issubdtype(x.dtype, jnp.complexfloating) and not compares)
        ):
            kind = "real numbers" if compares else "numbers"
            raise TypeError(
                f'aux="{mode}" must have {kind} to work on, but {name} of the '
                f'aux has dtype {x.dtype.name}. Use "last" or "stack" there.'
            )
        if rows in x.shape:
            longer = longer or jax.tree.leaves(grown())
            if longer[i].shape != x.shape:
                raise ValueError(
                    f'aux="{mode}" must not mix different examples, but {name} of '
                    f"the aux has shape {x.shape} for {rows} rows, one number for "
                    'each row. Use "stack" to keep the rows of every micro-batch.'
                )
    return modes


# -- Leaves ----------------------------------------------------------------------------


def _inexact(x: jax.Array) -> jax.Array:
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
