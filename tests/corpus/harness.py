"""A function of rows, through its program of a micro-batch; and rules made wrong."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from corpus.rules import D

from ga_optax._partition import rules as rules_of_ours
from ga_optax._partition.held import PARTIAL, WHOLE, Axis, Rows
from ga_optax._partition.partitioned import Argument, partition
from ga_optax._passes import jaxprs
from ga_optax._passes.rowwise import READ

N, K = 12, 3


# -- Running a function over micro-batches ---------------------------------------------


def arguments():
    """Rows, a matrix that is whole, and an integer for each row."""
    rng = np.random.default_rng(3)
    h, w = (jnp.asarray(rng.normal(size=(n, D))) for n in (N, D))
    return h, w, jnp.asarray(rng.integers(0, 4, N), jnp.int32)


def partitioned(fun, args):
    """The program of `fun`, and that of a micro-batch."""
    closed = jax.make_jaxpr(fun, axis_env=READ)(*args)
    jaxpr = closed.jaxpr
    consts = [Argument(x.aval, WHOLE) for x in jaxpr.constvars]
    h, w, ids = (x.aval for x in jaxpr.invars)
    given = Argument(h, Rows(0), True), Argument(w, WHOLE, True), Argument(ids, Rows(0))
    return closed, partition(jaxpr, [*consts, *given], Axis("rows", K, 8))


def of_each(closed, part, h, w, ids):
    """What the program of a micro-batch returns for each."""

    def one(h, ids):
        index = jax.lax.axis_index("rows")
        leaves = *part.consts, *closed.consts, h, w, ids, index
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], leaves, strict=True))
        for e in jaxpr.eqns:
            ins = [known[x] if jaxprs.is_variable(x) else x.val for x in e.invars]
            if e.primitive.name == "custom_vjp_call":
                # What `vmap` does not map has one cotangent, which it sums for all.
                ins = [jnp.where(index < 0, jnp.zeros_like(x), x) for x in ins]
            outs = jaxprs.bind(jaxpr, [e], e.invars, e.outvars, ins)
            known.update(zip(e.outvars, outs, strict=True))
        return [known[x] if jaxprs.is_variable(x) else x.val for x in jaxpr.outvars]

    jaxpr = part.jaxpr

    split = [x.reshape(K, -1, *x.shape[1:]) for x in (h, ids)]
    return jax.vmap(one, axis_name="rows", axis_size=K)(*split)


def over_micro_batches(fun, args):
    """What `fun` returns, from all micro-batches' parts of it."""
    closed, part = partitioned(fun, args)
    return joined(of_each(closed, part, *args), part, closed)


def joined(out, part, closed):
    """The whole results, of what the program of a micro-batch returns for each."""
    return list(map(_joined, out, part.layouts, closed.out_avals))


def _joined(x, layout, aval):
    """The whole of what all micro-batches hold, `[K, ...]`."""
    x = np.asarray(x)
    if layout == PARTIAL:
        return x.sum(0)
    if layout == WHOLE:
        assert all(np.array_equal(y, x[0], equal_nan=True) for y in x)
        return x[0]
    d, segments = layout.dim, layout.segments
    x = x.reshape(K, *aval.shape[:d], segments, -1, *aval.shape[d + 1 :])
    x = np.moveaxis(x, 0, d + 1)
    x = x.reshape(*aval.shape[:d], -1, *aval.shape[d + 1 :])
    return x.take(range(aval.shape[d]), d)


def derivative(fun, args):
    """That of the sum of weighted results by what rows and `w` are scaled with."""
    h, w, ids = args
    closed, part = partitioned(_weighted(fun), args)

    def total(scale):
        # There may be one more, the first again.
        x, *_ = of_each(closed, part, h * scale, w * scale, ids)
        return x.sum() if part.layouts[0] == PARTIAL else x.mean()

    return jax.jit(jax.grad(total))(jnp.ones(D))


def whole_derivative(fun, args):
    """The same by JAX; None if it has none."""
    h, w, ids = args
    with contextlib.suppress(NotImplementedError, TypeError, ValueError):
        total = jax.grad(lambda s: _weighted(fun)(h * s, w * s, ids))
        return jax.jit(total)(jnp.ones(D))
    return None


def _weighted(fun):
    def total(*args):
        found = jnp.zeros(())
        for x in fun(*args):
            x = jnp.real(x) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.zeros(())
            weights = jnp.sin(1.0 + jnp.arange(x.size)).reshape(x.shape)
            found = found + (weights * x).sum()
        return found

    return total


# -- Where the rows are ----------------------------------------------------------------


def _in_segments(case, h, w, ids):
    return case(jnp.concatenate([h, jnp.cos(h)]), w, jnp.concatenate([ids, ids[::-1]]))


def _uneven(case, h, w, ids):
    return case(h[1:], w, ids[1:])


def _along_axis_1(case, h, w, ids):
    h, ids = jnp.stack([h, jnp.cos(h)]), jnp.stack([ids, ids // 2])
    return jax.vmap(lambda h, ids: case(h, w, ids))(h, ids)


VIEWS = {
    "as they are": lambda case, *args: case(*args),
    "in segments": _in_segments,
    "uneven": _uneven,  # of a number that is no multiple of K
    "along axis 1": _along_axis_1,
}


def seen(case, view):
    """A case as a function of `(h, w, ids)` that returns a list of arrays."""
    return lambda *args: jax.tree.leaves(VIEWS[view](case, *args))


# -- Rules made wrong ------------------------------------------------------------------


def other_rows(x, d):
    """Another row in the place of each."""
    first, rest = jnp.split(x, [1], d)
    return jnp.concatenate([rest, first], d)


def kind(layout):
    return "rows" if isinstance(layout, Rows) else layout


def wrong(x, layout):
    """Rows in disorder, a sum that is dropped, a whole that is added up or changed."""
    if isinstance(layout, Rows):
        return other_rows(x, layout.dim), layout
    if layout == PARTIAL:
        return x, WHOLE
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x, PARTIAL
    return (~x if x.dtype == bool else x + 1), layout


def changed(results, of):
    """Results, of which those of one kind are wrong."""
    return results and [wrong(*x) if kind(x[1]) == of else x for x in results]


def noted(found):
    """Results as they are, of which the kinds are noted."""

    def act(results):
        found.update(kind(layout) for _, layout in results or ())
        return results

    return act


@contextlib.contextmanager
def with_rules(change):
    """The table with `change(key, rule)` in the place of each rule, or without it."""
    rules = rules_of_ours.RULES

    def linear(w, e, vs):
        rule = change(f"linear {e.primitive.name}", rules.linear)
        return rule and rule(w, e, vs)

    def each(group):
        new = {name: change(name, rule) for name, rule in group.items()}
        return {name: rule for name, rule in new.items() if rule}

    new = {key: each(getattr(rules, key)) for key in ("known", "nested")}
    with mock.patch.object(
        rules_of_ours, "RULES", rules._replace(linear=linear, **new)
    ):
        yield


def in_rule(key, act):
    """For `with_rules`: `act(results)` of one rule, the others as they are."""

    def change(name, rule):
        return (lambda *args: act(rule(*args))) if name == key else rule

    return change
