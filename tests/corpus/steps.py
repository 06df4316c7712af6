"""Steps of random programs: `step(h, w, b)` of `h` [n, d], of which rows may meet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from helpers import with_rule
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

import ga_optax as ga

N = 12


# -- Functions with rules of their own -------------------------------------------------


clipped = with_rule(lambda h: h, lambda _, ct: (0.1 * jnp.tanh(9 * ct),))
doubled = with_rule(
    lambda h, w: h * w,
    lambda saved, ct: (2 * ct * saved[1], (3 * ct * saved[0]).sum(0)),
)
# Rows meet inside of it.
centred = with_rule(lambda h: h - h.mean(0), lambda _, ct: (ct - 0.5 * ct.mean(0),))
looked_up = with_rule(
    lambda table, ids: table[ids],
    lambda saved, ct: (jnp.zeros_like(saved[0]).at[saved[1]].add(2 * ct), None),
)


@jax.custom_jvp
def straight(h):
    return jnp.round(h * 4) / 4


straight.defjvp(lambda xs, dots: (straight(*xs), 0.5 * dots[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reversed_gradient(h, scale):
    return h * 1.5


reversed_gradient.defvjp(
    lambda h, scale: (h * 1.5, h.shape), lambda scale, _, ct: (-scale * ct,)
)


def _two_back(saved, cts):
    h, w, z = saved
    ct = cts[0] * (1 - z**2)
    return ct @ w.T + 0.5 * cts[1], h.T @ ct


two_results = with_rule(
    lambda h, w: (jnp.tanh(h @ w), h.sum(0)),
    _two_back,
    saves=lambda h, w: (h, w, jnp.tanh(h @ w)),
)


def _kernel(h_ref, b_ref, out_ref):
    out_ref[...] = jnp.sin(h_ref[...]) * b_ref[...]


def _called(h, b):
    row = pl.BlockSpec((1, h.shape[1]), lambda i: (i, 0))
    whole = pl.BlockSpec((1, h.shape[1]), lambda i: (0, 0))
    out = jax.ShapeDtypeStruct(h.shape, h.dtype)
    how = {"grid": (len(h),), "in_specs": [row, whole], "out_specs": row}
    return pl.pallas_call(_kernel, out, **how, interpret=True)(h, b[None])


sines = with_rule(
    _called,
    lambda r, ct: (_called(r[0] + jnp.pi / 2, r[1]) * ct, (jnp.sin(r[0]) * ct).sum(0)),
)

# -- Row by row ------------------------------------------------------------------------


def _each_inverse(h, w, b):
    matrices = jax.vmap(lambda x: jnp.outer(x, x) + 2 * jnp.eye(x.size))(h)
    return jnp.einsum("nij,nj->ni", jnp.linalg.inv(matrices), h)


def _over_features(h, w, b):
    def body(c, x):
        c = jnp.tanh(c + x)
        return c, c

    return lax.scan(body, jnp.zeros_like(h[:, 0]), h.T, unroll=2)[1].T


def _each_cond(h, w, b):
    one = lambda x, flag: lax.cond(flag, jnp.sin, lambda x: x * 0.5, x)  # noqa: E731
    return jax.vmap(one)(h, b["mask"])


def _until(h, w, b):
    body = lambda c: (c[0] * 1.5, c[1] + 1)  # noqa: E731
    x, turns = lax.while_loop(lambda c: c[1] < 4, body, (lax.stop_gradient(h), 0))
    return h + 0.01 * x + turns


def _row_keys(h, w, b):
    def one(i):
        key = jax.random.fold_in(jax.random.key(8), i)
        return jax.random.normal(key, h.shape[1:], h.dtype)

    return h + jax.vmap(one)(b["ids"])


def _slope(h, w, b):
    return h + 0.1 * jax.grad(lambda h: jnp.tanh(h @ w).sum())(h)


BY_ROW = {
    "dense": lambda h, w, b: jnp.tanh(h @ w),
    "own entry": lambda h, w, b: (
        h + jax.nn.log_softmax(h)[jnp.arange(len(h)), b["ids"] % h.shape[1]][:, None]
    ),
    "complex": lambda h, w, b: jnp.abs(h + 1j * (0.5 + w[0] ** 2)),
    "spectrum": lambda h, w, b: h + 0.1 * jnp.abs(jnp.fft.fft(h, axis=1)) ** 2 / 6,
    "conv": lambda h, w, b: lax.conv_general_dilated(
        h[:, None], w[:1, None, :2], (1,), "SAME"
    )[:, 0],
    "pool": lambda h, w, b: lax.reduce_window(
        h, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"
    ),
    "inverse": _each_inverse,
    "over features": _over_features,
    "branches": _each_cond,
    "until": _until,
    "keys of rows": _row_keys,
    "slope": _slope,
    "kernel": lambda h, w, b: sines(h, w[0]),
    "doubled": lambda h, w, b: doubled(h, w[0]),
    "straight": lambda h, w, b: straight(h) + h,
    "reversed gradient": lambda h, w, b: reversed_gradient(h, 0.3),
    "looked up": lambda h, w, b: h + looked_up(w, b["ids"] % len(w)),
}

# -- Rows meet -------------------------------------------------------------------------


def _group_softmax(h, w, b):
    top = jax.ops.segment_max(h, b["ids"], 3)
    e = jnp.exp(h - jnp.where(jnp.isfinite(top), top, 0)[b["ids"]])
    return h + e / jax.ops.segment_sum(e, b["ids"], 3)[b["ids"]]


def _experts(h, w, b):
    order = jnp.argsort(b["ids"])
    sizes = jnp.bincount(b["ids"], length=3).astype(jnp.int32)
    each = w * jnp.cos(jnp.arange(3.0))[:, None, None]
    return jnp.zeros_like(h).at[order].set(lax.ragged_dot(h[order], each, sizes))


def _layers(h, w, b):
    @jax.checkpoint
    def body(h, w):
        h = jnp.tanh(h @ w)
        return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 0.1), h.max()

    h, tops = lax.scan(body, h, jnp.stack([w, w.T]))
    return h + tops.sum() * 0.1


def _running(h, w, b):
    def body(total, x):
        return 0.5 * total + jnp.tanh(x), total

    total, ys = lax.scan(body, jnp.zeros_like(h[0]), h, reverse=True)
    return ys + 0.1 * total


def _recurrence(h, w, b):
    def combine(x, y):
        return x[0] * y[0], y[0] * x[1] + y[1]

    return ga.associative_scan(combine, (jax.nn.sigmoid(h), h))[1]


def _tied(h, w, b):
    value = jnp.minimum(jnp.round(h), 0)
    return h + (h - lax.stop_gradient(h) + lax.stop_gradient(value)).max(0)


def _adapted(h, w, b):
    return jnp.tanh(h @ (w - 0.1 * jax.grad(lambda w: ((h @ w) ** 2).mean())(w)))


def _whitened(h, w, b):
    z = h - h.mean(0)
    factor = jnp.linalg.cholesky(z.T @ z / len(h) + jnp.eye(h.shape[1]))
    return jax.scipy.linalg.solve_triangular(factor, z.T, lower=True).T


def _called_back(h, w, b):
    kind = jax.ShapeDtypeStruct(h.shape, h.dtype)
    found = jax.pure_callback(lambda x: np.sort(x, 0), kind, lax.stop_gradient(h))
    return h + 0.1 * found


def _mixup(h, w, b):
    key, other = jax.random.split(jax.random.key(9))
    share = jax.random.uniform(key, dtype=h.dtype)
    return share * h + (1 - share) * h[jax.random.permutation(other, len(h))]


def _named(h, w):
    x = checkpoint_name(jnp.tanh(h @ w), "kept")
    return jnp.sin(x) - x.mean(0)


_POLICIES = jax.checkpoint_policies

MEETING = {
    "norm": lambda h, w, b: (h - h.mean(0)) / jnp.sqrt(h.var(0) + 0.1),
    "those that attain it": lambda h, w, b: h * (h == h.min(0)) + 0.1 * h,
    "ties": _tied,
    "distances": lambda h, w, b: jnp.exp(-((h[:, None] - h[None]) ** 2).sum(-1)) @ h,
    "gram": lambda h, w, b: h @ (h.T @ h) / len(h),
    "segments": lambda h, w, b: h - jax.ops.segment_sum(h, b["ids"], 3)[b["ids"]] / 4,
    "softmax of groups": _group_softmax,
    "experts": _experts,
    "clipped": lambda h, w, b: clipped(h) + 0.1 * clipped(w).sum(0),
    "clipped mean": lambda h, w, b: h - clipped(h.mean(0)),
    "centred": lambda h, w, b: centred(h),
    "two results": lambda h, w, b: sum(two_results(h, w)),
    "layers": _layers,
    "running": _running,
    "recurrence": _recurrence,
    "branch": lambda h, w, b: lax.switch(
        b["ids"].max(), [jnp.sin, jnp.tanh, lambda h: h - h.mean(0)], h
    ),
    "loop": lambda h, w, b: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h - h[0] + i), h),
    "saved by name": jax.checkpoint(
        lambda h, w, b: _named(h, w), policy=_POLICIES.save_only_these_names("kept")
    ),
    "saved products": jax.checkpoint(
        lambda h, w, b: _named(h, w), policy=_POLICIES.dots_saveable
    ),
    "adapted": _adapted,
    "whitened": _whitened,
    "mixup": _mixup,
    "called back": _called_back,
}
STEPS = BY_ROW | MEETING
