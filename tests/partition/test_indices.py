"""Indices of each micro-batch: what is promised of them, and picks of each row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpus.harness import (
    K,
    arguments,
    partitioned,
)
from corpus.rules import counts
from helpers import error
from jax.extend.core import Literal
from jax.lax import GatherScatterMode

from ga_optax._passes import jaxprs

pytestmark = pytest.mark.usefixtures("fast_compilation", "float64")
SORTED = {"indices_are_sorted": True}
PROMISES = {"unique_indices": True} | SORTED
SOME = jnp.array([1, 5, 7], jnp.int32)


def _in_segments(h):
    return jnp.concatenate([h, jnp.cos(h)])


# By the rewriting that they are for, of which each must keep what it says.
CASES = {
    "rows that some have": lambda h, w, ids: [
        h.at[SOME].get(**PROMISES),
        h.at[SOME, SOME // 2].get(**PROMISES),
        h.at[SOME + 6].get(mode="fill", fill_value=0.5, **PROMISES),
        h.at[SOME + 4].get(mode="promise_in_bounds", **PROMISES),
        jax.vmap(lambda h: h.at[SOME].get(**PROMISES))(jnp.stack([h, h * h])),
        _in_segments(h).at[3 * SOME].get(**PROMISES),
    ],
    "rows in another order": lambda h, w, ids: h.at[5 * counts(h) % len(h)].get(
        unique_indices=True
    ),
    "a number of each row": lambda h, w, ids: [
        h.at[counts(h), ids].get(**PROMISES),
        h.at[jnp.repeat(counts(h), 2), jnp.tile(counts(h)[:2], len(h))].get(**PROMISES),
        h.at[counts(h), ids].set(0.5, **PROMISES),
        h.at[counts(h), ids].multiply(0.5, **PROMISES),
        (h @ h.T).at[counts(h), counts(h)].get(**PROMISES),
    ],
    "rows that are written where they are": lambda h, w, ids: [
        h.at[SOME].set(w[:3], **PROMISES),
        h.at[SOME].add(w[:3], **PROMISES),
        h.at[SOME].multiply(w[:3], **PROMISES),
        # JAX 0.10 promises bounds in the derivative, whatever the mode is.
        jax.lax.stop_gradient(h).at[SOME, SOME // 2].min(jnp.zeros(3), **PROMISES),
        h.at[SOME + 6].set(w[:3], mode="drop", **PROMISES),
        _in_segments(h).at[3 * SOME].set(w[:3], **PROMISES),
        h.at[5 * counts(h) % len(h)].set(h, unique_indices=True),
    ],
    "sums over rows": lambda h, w, ids: [
        jnp.zeros_like(h).at[counts(h)].add(h, **PROMISES),
        jax.ops.segment_sum(h, counts(h) // 3, 4, indices_are_sorted=True),
        w.at[ids].add(h),
    ],
    "rows of a matrix": lambda h, w, ids: [
        jnp.tile(w, (2, 1)).at[counts(h)].get(**PROMISES),
        w.at[ids].get(mode="promise_in_bounds"),
    ],
}


def used(jaxpr, consts, args, found):
    """The results of a program; `found` gets what it says of indices, and these."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def values(some):
        return [x.val if isinstance(x, Literal) else env[x] for x in some]

    for e in jaxpr.eqns:
        xs = values(e.invars)
        if e.primitive.name == "gather" or e.primitive.name.startswith("scatter"):
            found.append((e, xs[1]))
        if jaxprs.kind(e) == "call":
            [inside] = jaxprs.inner(e)
            out = used(inside.jaxpr, inside.consts, xs, found)
        else:
            out = e.primitive.bind(*xs, **e.params)
            out = out if e.primitive.multiple_results else [out]
        env.update(zip(e.outvars, out, strict=True))
    return values(jaxpr.outvars)


def indices(fun):
    """The equations with indices of all micro-batches, there and back, and those."""
    h, w, ids = arguments()
    fun_of_leaves = lambda *args: jax.tree.leaves(fun(*args))  # noqa: E731
    closed, part = partitioned(fun_of_leaves, (h, w, ids))

    def there_and_back(h, ids):
        def there(h, w):
            index = jax.lax.axis_index("rows")
            leaves = *closed.consts, h, w, ids, index
            return jax.core.eval_jaxpr(part.jaxpr, part.consts, *leaves)

        out, back = jax.vjp(there, h, w)
        return out, back([jnp.cos(x) for x in out])

    parts = [x.reshape(K, -1, *x.shape[1:]) for x in (h, ids)]
    each = jax.make_jaxpr(there_and_back, axis_env=[("rows", K)])(
        *(x[0] for x in parts)
    )
    equations = []

    def run(*parts):
        found = []
        used(each.jaxpr, each.consts, parts, found)
        equations[:] = [e for e, _ in found]
        return [at for _, at in found]

    every = jax.vmap(run, axis_name="rows", axis_size=K)
    return list(zip(equations, map(np.asarray, jax.jit(every)(*parts)), strict=True))


def broken(e, at):
    """What `e` says of the indices of one micro-batch that does not hold."""
    at = at.reshape(-1, at.shape[-1])
    in_order = at[np.lexsort(at.T[::-1])]
    if e.params["unique_indices"] and (in_order[1:] == in_order[:-1]).all(1).any():
        yield "unique_indices"
    if e.params["indices_are_sorted"] and (in_order != at).any():
        yield "indices_are_sorted"
    numbers = e.params["dimension_numbers"]
    is_gather = e.primitive.name == "gather"
    name = "start_index_map" if is_gather else "scatter_dims_to_operand_dims"
    axes = getattr(numbers, name)
    most = np.take(e.invars[0].aval.shape, axes) - 1  # of slices of one number
    is_promised = e.params["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS
    if is_promised and ((at < 0) | (at > most)).any():
        yield "mode"


def promises_broken(fun):
    return {
        f"{why} of {e.primitive.name}"
        for e, every in indices(fun)
        for at in every
        for why in broken(e, at)
    }


@pytest.mark.parametrize("name", CASES)
def test_promises_of_indices_hold_of_those_of_each_micro_batch(name):
    assert promises_broken(CASES[name]) == set()


# -- Picks of each row -----------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, "clip", "fill", "promise_in_bounds"])
def test_a_number_that_is_picked_of_no_row_is_that_of_the_whole_batch(mode):
    """XLA clips such an index, whatever was promised, and drops its cotangent."""
    n = 12
    rows = jnp.array([n + 2, 1, 6, 0, 5, -2, 1, -n - 3, 1, n, -2, n - 2], jnp.int32)
    w, x = jnp.float64(0.3), jnp.sin(jnp.arange(n * 8.0)).reshape(n, 8)

    def loss(w, x):
        picked = jnp.tanh(x * w).at[rows, (rows * 5 + 1) % 8].get(mode=mode)
        return jnp.mean(jnp.cos(jnp.arange(n)) * jnp.where(picked > 0, picked, -1))

    assert error(loss, K, w, x) < 1e-12
