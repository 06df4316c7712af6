"""Random losses in which rows meet: each is a sequence of steps on `h`, of [n, d]."""

import jax
import jax.numpy as jnp
import numpy as np

N, D = 12, 6


def _tied(h):
    value = jnp.minimum(jnp.round(h), 0)
    return h - jax.lax.stop_gradient(h) + jax.lax.stop_gradient(value)


def _unit(h):
    return h / jnp.sqrt((h**2).sum(-1, keepdims=True) + 0.1)


@jax.custom_vjp
def clipped(h):
    return h


clipped.defvjp(lambda h: (h, None), lambda _, ct: (0.1 * jnp.tanh(9 * ct),))


@jax.custom_vjp
def doubled(h, w):
    return h * w


doubled.defvjp(
    lambda h, w: (h * w, (h, w)),
    lambda saved, ct: (2 * ct * saved[1], (3 * ct * saved[0]).sum(0)),
)


@jax.custom_jvp
def straight(h):
    return jnp.round(h * 4) / 4


@straight.defjvp
def _(primals, tangents):
    return straight(*primals), 0.5 * tangents[0]


@jax.custom_vjp
def centred(h):  # rows meet inside of it
    return h - h.mean(0)


centred.defvjp(lambda h: (h - h.mean(0), None), lambda _, ct: (ct - 0.5 * ct.mean(0),))


def _layers(h, w, length):
    ws = jnp.stack([w * (1 + 0.1 * i) for i in range(length)])

    def body(h, w):
        h = jnp.tanh(h @ w) + 0.1 * h.mean(0)
        return h, (h**2).sum()

    h, ys = jax.lax.scan(body, h, ws)
    return h + ys.sum() * 0.01


def _deep(h, w, length=40):
    ws = jnp.stack([w * 0.5] * length)
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w + h), None), h, ws)[0]


def _meets_deep(h, w):
    return jax.lax.scan(lambda h, w: (h - 0.1 * h.mean(0), None), h, jnp.zeros(40))[0]


def _running(h, w):
    def body(total, x):
        return total + jnp.tanh(x), jnp.sin(x)

    total, ys = jax.lax.scan(body, jnp.zeros_like(h[0]), h)
    return ys + 0.1 * total


def _carried(h, w):
    return jax.lax.scan(lambda c, x: (0.5 * c + x, c), jnp.zeros_like(h[0]), h)[1]


def _while(h, w):
    return jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h + i), h)


def _cond(h, w):
    return jax.lax.cond(w.sum() > 0, lambda h: h @ w, lambda h: jnp.sin(h), h)


def _cond_meets(h, w):
    return jax.lax.cond(h.mean() > 0, lambda h: h - h.mean(0), jnp.sin, h)


def _attention(h, w):
    scores = (h @ w) @ h.T / 3
    return jax.nn.softmax(scores, -1) @ h


def _capacity(h, w):
    gate = jax.nn.softmax(h)
    chosen = jax.nn.one_hot(gate.argmax(-1), h.shape[1])
    place = (jnp.cumsum(chosen, 0) * chosen).sum(-1)
    return jnp.where((place <= 3)[:, None], gate * 2, 0.1 * h)


def _ids(h):
    return jnp.arange(len(h)) * 5 % 3


STEPS = {
    "matmul": lambda h, w: jnp.tanh(h @ w),
    "relu": lambda h, w: jax.nn.relu(h @ w) + 0.1 * h,
    "gelu": lambda h, w: jax.nn.gelu(h),
    "norm": lambda h, w: (h - h.mean(0)) / jnp.sqrt(h.var(0) + 0.1),
    "layer_norm": lambda h, w: h - h.mean(1, keepdims=True),
    "unit": lambda h, w: _unit(h),
    "softmax_rows": lambda h, w: jax.nn.softmax(h, 0),
    "softmax": lambda h, w: jax.nn.softmax(h),
    "logsumexp_rows": lambda h, w: h - jax.nn.logsumexp(h, 0),
    "max_rows": lambda h, w: h - 0.3 * h.max(0),
    "min_rows": lambda h, w: h * (h == h.min(0)) + 0.1 * h,
    "max_ties": lambda h, w: h + jnp.maximum(h, 0).max(0) + jnp.minimum(h, 0).max(0),
    "penalty": lambda h, w: h.mean() + (w**2).sum() + h * w[0, 0],
    "ties": lambda h, w: h + _tied(h).max(0),
    "attention": _attention,
    "kernel": lambda h, w: jnp.exp(-((h[:, None] - h[None]) ** 2).sum(-1)) @ h,
    "gram": lambda h, w: h @ (h.T @ h) / len(h),
    "transposed": lambda h, w: (jnp.sin(h.T) @ jnp.eye(len(h))).T,
    "columns": lambda h, w: h + (h @ h.T).max(0)[:, None] * 0.1,
    "pairs": lambda h, w: (
        h.reshape(-1, 2, h.shape[1])[:, ::-1].reshape(h.shape) * 0.5 + h
    ),
    "thirds": lambda h, w: jnp.concatenate([h, -h, h * w[0]])[len(h) : 2 * len(h)],
    "twice": lambda h, w: jnp.concatenate([h, jnp.sin(h)]).reshape(2, *h.shape).sum(0),
    "halves": lambda h, w: jnp.concatenate([h[len(h) // 2 :], h[: len(h) // 2]]),
    "shift": lambda h, w: h - 0.5 * jnp.roll(h, 1, 0),
    "flip": lambda h, w: h + h[::-1],
    "sort_rows": lambda h, w: jnp.sort(h, 0),
    "sorted": lambda h, w: h - 0.5 * jnp.sort(h, 0),
    "sort": lambda h, w: jnp.sort(h, 1),
    "top_k": lambda h, w: h + jax.lax.top_k(h, 2)[0].sum(-1, keepdims=True),
    "cumsum": lambda h, w: jnp.cumsum(h, 0) / len(h),
    "cumsum_reverse": lambda h, w: jax.lax.cumsum(h, 0, reverse=True) / len(h),
    "cumprod": lambda h, w: jnp.cumprod(jnp.tanh(h) + 1.0, 0) * 0.1,
    "cummax": lambda h, w: jax.lax.cummax(h, 0),
    "prod": lambda h, w: h * jnp.prod(1 + 0.01 * jnp.tanh(h), 0),
    "any": lambda h, w: jnp.where((h > 1).any(0), h, 0.5 * h),
    "mask": lambda h, w: jnp.where(jnp.arange(len(h))[:, None] < 5, h, -h),
    "eye": lambda h, w: (jnp.eye(len(h)) * 2 - 1) @ h / 4,
    "tril": lambda h, w: jnp.tril(h @ h.T) @ h / len(h),
    "diagonal": lambda h, w: h * jnp.diagonal(h @ h.T)[:, None] * 0.1,
    "take": lambda h, w: h[jnp.arange(len(h)) * 7 % len(h)],
    "rows_take": lambda h, w: h[jnp.argsort(h[:, 0])],
    "first": lambda h, w: h - h[0] + h[jnp.array([1, 3])].sum(0),
    "entries": lambda h, w: h + h[jnp.arange(len(h)), _ids(h)][:, None],
    "along": lambda h, w: h * jnp.take_along_axis(h, h.argmax(1)[:, None], 1),
    "segments": lambda h, w: h - jax.ops.segment_sum(h, _ids(h), 3)[_ids(h)] / 4,
    "scatter": lambda h, w: h + jnp.zeros_like(h).at[h.argmax(0), 0].add(h[0]),
    "argmax": lambda h, w: h + h[h.argmax(0)].sum(0) * 0.1,
    "set": lambda h, w: h.at[0].set(h[1]),
    "median": lambda h, w: h - jnp.median(h, 0),
    "clipped": lambda h, w: clipped(h) + 0.1 * clipped(w).sum(0),
    "clipped_twice": lambda h, w: (lambda c: c + c.mean(0))(clipped(h)),
    "clipped_mean": lambda h, w: h - clipped(h.mean(0)),
    "doubled": lambda h, w: doubled(h, w[0]),
    "doubled_sum": lambda h, w: doubled(h - h.mean(0), h.mean(0)),
    "straight": lambda h, w: straight(h) + h,
    "centred": lambda h, w: centred(h),
    "layers": lambda h, w: _layers(h, w, 2),
    "deep": _deep,
    "meets_deep": _meets_deep,
    "running": _running,
    "carried": _carried,
    "while": _while,
    "cond": _cond,
    "cond_meets": _cond_meets,
    "map": lambda h, w: jax.lax.map(lambda x: jnp.tanh(x @ w), h),
    "vmap": lambda h, w: jax.vmap(lambda x: jnp.outer(x, x) @ w[0])(h),
    "vmap_rows": lambda h, w: jax.vmap(lambda c: jnp.cumsum(c), 1, 1)(h) * 0.1,
    "checkpoint": jax.checkpoint(lambda h, w: jnp.tanh(h @ w) - h.mean(0)),
    "checkpoint_dots": jax.checkpoint(
        lambda h, w: jnp.sin(jnp.sin(h @ w)),
        policy=jax.checkpoint_policies.dots_saveable,
    ),
    "dropout": lambda h, w: jnp.where(
        jax.random.bernoulli(jax.random.key(1), 0.7, h.shape), h, 0.0
    ),
    "noise": lambda h, w: h + jax.random.normal(jax.random.key(2), h.shape, h.dtype),
    "row_keys": lambda h, w: (
        h
        * jax.vmap(lambda k: jax.random.uniform(k, (D,), h.dtype))(
            jax.random.split(jax.random.key(3), len(h))
        )
    ),
    "shuffle": lambda h, w: h[jax.random.permutation(jax.random.key(4), len(h))],
    "capacity": _capacity,
    "solve": lambda h, w: jnp.linalg.solve(h.T @ h + 3 * jnp.eye(D), h.T).T,
    "einsum": lambda h, w: jnp.einsum("nd,de,me,mf->nf", h, w, h, h) * 0.02,
    "stack": lambda h, w: jnp.stack([h, h * 2], 1).sum(1) - jnp.stack([h, h]).max(0),
    "repeat": lambda h, w: jnp.repeat(h, 2, 0)[::2],
    "tile": lambda h, w: jnp.tile(h, (2, 1))[: len(h)] * 0.5,
    "pad": lambda h, w: jnp.pad(h, ((1, 0), (0, 0)))[:-1],
    "conv": lambda h, w: jax.lax.conv_general_dilated(
        h[:, None], w[:3].reshape(3, 1, -1)[:1], (1,), "SAME"
    )[:, 0],
    "pool": lambda h, w: jax.lax.reduce_window(
        h, -jnp.inf, jax.lax.max, (1, 3), (1, 1), "SAME"
    ),
    "callback": lambda h, w: (
        h
        + jax.lax.stop_gradient(
            jax.pure_callback(
                lambda x: np.asarray(x).mean(0),
                jax.ShapeDtypeStruct((D,), h.dtype),
                jax.lax.stop_gradient(h),
            )
        )
    ),
}

LOSSES = {
    "mean": lambda h, w, y: ((h - y) ** 2).mean(),
    "root": lambda h, w, y: jnp.sqrt(((h - y) ** 2).sum() + 1),
    "ratio": lambda h, w, y: (h * y).sum() / ((h**2).sum() + 1),
    "entropy": lambda h, w, y: -(jax.nn.log_softmax(h) * jax.nn.softmax(y)).mean(),
    "max": lambda h, w, y: (h * y).max() + (w**2).sum(),
    "spread": lambda h, w, y: jnp.std(h, 0).sum() + (h @ y.T).std(),
}


def program(names, loss):
    """The loss that takes these steps, one weight for each."""

    def fun(params, batch):
        h = batch["x"]
        for name, w in zip(names, params, strict=True):
            h = STEPS[name](h, w)
        return LOSSES[loss](h, params[0], batch["y"])

    return fun


def arguments(length, n=N, seed=0):
    rng = np.random.default_rng(seed)
    params = [jnp.asarray(rng.normal(size=(D, D)) * 0.4) for _ in range(length)]
    x, y = (jnp.asarray(rng.normal(size=(n, D))) for _ in range(2))
    return params, {"x": x, "y": y}


def draw(seed):
    """A random program: its steps and its loss."""
    rng = np.random.default_rng(seed)
    names = rng.choice(list(STEPS), rng.integers(1, 5))
    return [str(x) for x in names], str(rng.choice(list(LOSSES)))
