"""How results of the micro-batches are put together: one way for each leaf.

A way is a few functions of one leaf. The loss is one more leaf, of the way "mean". A
new one is one more record in `WAYS`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import accumulator
from ga_optax._checks import named_leaves
from ga_optax._devices import collectives, logical, meshes
from ga_optax._devices.meshes import Axes
from ga_optax._loop import trees

Vary = Callable[[Any, Any], Any]


class Now(NamedTuple):
    """What the leaves of one micro-batch have in common.

    Attributes:
      weight: its weight; None for 1.
      zero: see `accumulator.rounded`; None if nothing has to be rounded before.
      own: such a zero of what is weighted.
    """

    weight: jax.Array | None
    zero: jax.Array | None
    own: jax.Array | None

    def rounded(self, x: Any) -> Any:
        """A leaf, rounded before it is added."""
        if self.zero is None:
            return x
        return accumulator.rounded(jnp.asarray(x), self.zero)


class Way(NamedTuple):
    """How a leaf is put together; `kept` is what a loop carries of it.

    Attributes:
      init: what is kept before the first micro-batch, of the type of the leaf, and of
        what marks a sum as varying over devices as one of its terms does.
      step: what is kept after one more micro-batch.
      join: what is kept of two logical devices, neighbours.
      merge: what is kept of all devices, of what one kept and of the data axes, which
        are bound. None for a sum: it is reduced with the gradients.
      finish: the leaf of the result, of what is kept and of Σ w.
      adds: whether it adds leaves up. They have to be numbers, and not those of
        different examples.
      collects: whether it keeps the leaves of every micro-batch, along a new axis 0:
        the loop does that, and what it has kept after the loop is those.
    """

    init: Callable[[Any, Vary], Any] = lambda x, vary: ()
    step: Callable[[Any, Any, Now], Any] = lambda kept, x, now: kept
    join: Callable[[Any, Any], Any] = lambda a, b: b
    merge: Callable[[Any, Axes], Any] | None = None
    finish: Callable[[Any, Any], Any] = lambda kept, weight: kept
    adds: bool = False
    collects: bool = False


def _start_of_mean(x: Any, vary: Vary) -> Any:
    [term] = map(_inexact, trees.blank([x]))
    kept: Any = accumulator.init(term).total
    return vary(-kept, term)


def _mean(kept: Any, x: Any, now: Now) -> Any:
    """Σ w·x, weighted as the loss is; that of integers is float32."""
    x = _inexact(now.rounded(x))
    if now.weight is not None:
        x = accumulator.weighted(x, now.weight, kept.dtype, now.own)
    [kept] = accumulator.add_terms([kept], [x], now.weight)
    return kept


def of_last_device(xs: list[jax.Array], axes: Axes) -> list[jax.Array]:
    """What the last device has, on all of them."""
    is_last = jax.lax.axis_index(axes) == meshes.num_devices(axes) - 1

    def last(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = last(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        count = x.astype(_sum_dtype(x.dtype))
        here = jnp.where(is_last, count, -jnp.zeros_like(count))  # -0.0 + x is x
        return jax.lax.psum(here, axes).astype(x.dtype)

    return list(map(last, collectives.vary(xs, axes)))


def _extremum(fun: Any, across: Any) -> Way:
    """The largest or the smallest of all: of numbers that rows need of each other."""

    def step(kept: Any, x: Any, now: Now) -> Any:
        (most, number), x = kept, trees.strong(x)
        return trees.like(jnp.where(number == 0, x, fun(most, x)), most), number + 1

    return Way(
        init=lambda x, vary: (*trees.blank([x]), jnp.zeros([], jnp.int32)),
        step=step,
        merge=lambda kept, axes: (
            across(collectives.vary(kept[0], axes), axes),
            kept[1],
        ),
        finish=lambda kept, weight: kept[0],
        adds=True,
    )


# Those of the option `aux`, and two that only a window needs.
OPTIONS = ("mean", "sum", "last", "stack")
WAYS = {
    "mean": Way(_start_of_mean, _mean, logical.plus, None, accumulator.average, True),
    # Unweighted: counts as counts, and added up in 32 bits at least.
    "sum": Way(
        init=lambda x, vary: vary(jnp.zeros(x.shape, _sum_dtype(x.dtype)), x),
        step=lambda kept, x, now: kept + now.rounded(x).astype(kept.dtype),
        join=logical.plus,
        adds=True,
    ),
    # Of several devices, the last device's.
    "last": Way(
        init=lambda x, vary: trees.blank([x])[0],
        step=lambda kept, x, now: trees.strong(x),
        merge=lambda kept, axes: of_last_device([kept], axes)[0],
    ),
    # Of several devices, in their order.
    "stack": Way(merge=lambda kept, axes: kept, collects=True),
    "max": _extremum(jnp.maximum, jax.lax.pmax),
    "min": _extremum(jnp.minimum, jax.lax.pmin),
}


# -- The option ------------------------------------------------------------------------


def check_option(option: Any) -> None:
    """Raises unless the option `aux` is a tree of modes."""
    for name in jax.tree.leaves(option, is_leaf=lambda x: x is None):
        if not isinstance(name, str) or name not in OPTIONS:
            raise ValueError(
                f"aux must be one of {', '.join(map(repr, OPTIONS))}, or a tree of "
                "those that is a prefix of the aux tree, but it holds "
                f"{name!r}. Pass those."
            )


def of_leaves(option: Any, aux: Any, rows: int, grown: Callable[[], Any]) -> list[str]:
    """The mode of each leaf of `aux`.

    Args:
      option: modes, a prefix of the tree of `aux`.
      aux: the types of the aux of one micro-batch.
      rows: how many rows a micro-batch has.
      grown: returns the types of the aux of twice as many. It is called only if a leaf
        that is added up may have rows.
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
        if not WAYS[mode].adds:
            continue
        if not (jnp.issubdtype(x.dtype, np.number) or x.dtype == jnp.bool_):
            raise TypeError(
                f'aux="{mode}" must have numbers to work on, but {name} of the '
                f'aux has dtype {x.dtype.name}. Use "last" or "stack" there.'
            )
        if rows in x.shape:
            longer = longer or jax.tree.leaves(grown())
            if longer[i].shape != x.shape:
                raise ValueError(
                    f'aux="{mode}" must not add up different examples, but {name} of '
                    f"the aux has shape {x.shape} for {rows} rows, one for each of "
                    'them. Use "stack" to keep those of every micro-batch.'
                )
    return modes


# -- Leaves ----------------------------------------------------------------------------


def _inexact(x: jax.Array) -> jax.Array:
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    """Where "sum" adds up: counts as counts, and never in less than 32 bits."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return accumulator.accumulator_dtype(np.zeros([], dtype), np.dtype(np.float32))
    if dtype == jnp.bool_:
        return np.dtype(np.int32)
    kind = np.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int32
    return np.promote_types(dtype, kind)
