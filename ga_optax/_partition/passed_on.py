"""Equations that are computed whole, and passed on."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .._passes import jaxprs
from .._passes.jaxprs import is_inexact
from .._passes.places import place_of
from . import custom
from .attached import given_of
from .held import Value, types_of
from .writer import Writer


def passed_on(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Any]:
    """The results of an equation that is computed whole.

    If it calls back, or a rule in there is not linear, one micro-batch runs it, and
    passes the results on.
    """
    xs, types = [w.whole(v) for v in vs], types_of(e)
    is_key = (jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in types)
    calls_back = jaxprs.acts(e) and not any(is_key)
    if calls_back and not types:
        _run_once(w, e, xs)
        return []
    bends = custom.has_nonlinear_rule(w, e, vs)
    passed = [i for i, x in enumerate(types) if calls_back or (bends and is_inexact(x))]
    if not passed:
        return w.bound(e, xs)
    if bends and w.axis.is_checked:
        raise NotImplementedError(
            "A derivative rule that is not linear in its cotangent, of what has no "
            "rows, must see what comes from all rows: for that a jax.shard_map must "
            f"have check_vma=False, but this one checks, and {e.primitive.name} is at "
            f"{place_of(e.source_info)}. Pass check_vma=False, or call at top "
            "level with data_axis=."
        )

    def computed() -> list[jax.Array]:
        # The zeros of a rule that returns None have the types of its own arguments,
        # and JAX compares those of the branches.
        own = [jax.lax.copy_p.bind(x) if is_inexact(x) else x for x in xs]
        some = map(given_of(w, e, own).__getitem__, passed)
        return [x.astype(jnp.int32) if x.dtype == jnp.bool_ else x for x in some]

    # The others do not run it: a rule may make something of no cotangent.
    nothing = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(computed)]
    found = jax.lax.cond(w.index == 0, computed, lambda: nothing)
    w.level += 1
    out = w.bound(e, xs) if len(passed) < len(types) else [None] * len(types)
    for i, x in zip(passed, found, strict=True):
        out[i] = w.sum(x).astype(types[i].dtype)
    return out


def _run_once(w: Writer, e: core.JaxprEqn, xs: list[Any]) -> None:
    """Runs what only calls back in one micro-batch.

    It is a loop of one iteration or of none: a conditional without results is lost in a
    scan that is differentiated (jax 0.10 to 0.12).
    """
    xs = [jax.lax.stop_gradient(x) if is_inexact(x) else x for x in xs]

    def body(_: jax.Array) -> jax.Array:
        w.bound(e, xs)
        return jnp.zeros((), bool)

    jax.lax.while_loop(lambda due: due, body, w.index == 0)
