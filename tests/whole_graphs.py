"""Random programs that are graphs: values of several shapes, rows in any dimension.

A program begins with the leaves of a batch, whose rows lie along different axes, with
parameters, one of which is as long as the batch, and with integers. Each step makes a
new value of some that are there. The loss reads several of them, and some come back.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import ga_optax as ga

N, MOST = 12, 1500
AXES = {"x": 0, "y": 1, "z": 1, "ids": 0}
SHAPES = {"x": (N, 3), "y": (2, N), "z": (4, N, 2), "ids": (N,)}
PARAMS = ((3, 4), (N, 2), (4,), ())


class Graph(NamedTuple):
    """A random program, with so many steps.

    Attributes:
      seed: what it is drawn from.
      length: how many steps it takes.
      k: how many micro-batches, on a device.
      devices: on how many devices, also.
      has_aux: it always returns some.
    """

    seed: int
    length: int
    k: int
    devices: int = 1
    has_aux: bool = True

    def __call__(self, params, batch):
        value, aux, _ = self._run(params, batch)
        return value, aux

    def _run(self, params, batch):
        rng = np.random.default_rng(self.seed)
        graph = _Values(rng, [*params, *(batch[n] for n in ("x", "y", "z"))], batch)
        steps = []
        while len(steps) < self.length:
            name = str(rng.choice(list(STEPS)))
            new = STEPS[name](graph)
            if new is None or not 0 < new.size <= MOST:
                continue
            steps.append(f"{name} {list(new.shape)}")
            graph.add(new)
        return *graph.loss(), steps

    def __str__(self):
        steps = []

        def run(*args):
            steps.extend(self._run(*args)[-1])

        jax.eval_shape(run, *self.arguments())
        return f"{self!r}: {', '.join(steps)}"

    def arguments(self):
        rng = np.random.default_rng(self.seed + 1)
        params = [jnp.asarray(rng.normal(size=shape)) for shape in PARAMS]
        batch = {name: jnp.asarray(rng.normal(size=s)) for name, s in SHAPES.items()}
        return params, batch | {"ids": jnp.asarray(rng.integers(0, 3, N), jnp.int32)}

    def in_all_ways(self):
        """By `value_and_grad` and by `microbatch`, on one device and on several."""
        grads = jax.value_and_grad(self, has_aux=True)
        for devices in {1, self.devices}:
            where = None
            if devices > 1:
                mesh = jax.make_mesh((devices,), ("data",))
                where = ga.DataAxis("data", mesh=mesh)
            k = self.k if devices == self.devices else self.k * self.devices
            shared = {"batch_axes": AXES, "data_axis": where}
            wide = {"has_aux": True, "accumulator_dtype": "float64"}
            yield ga.value_and_grad(self, k, **wide, **shared)
            yield ga.microbatch(grads, k, **shared)


def draw(seed):
    rng = np.random.default_rng(seed)
    several = bool(rng.random() < 0.25)
    k = rng.choice([1, 3]) if several else rng.choice([2, 3, 4, 6, 12])
    return Graph(seed, int(rng.integers(2, 9)), int(k), 4 if several else 1)


class _Values:
    """The values that are there, and draws from them."""

    def __init__(self, rng, values, batch):
        self.rng, self.values, self.batch = rng, list(values), batch
        self.ids = [batch["ids"], jnp.arange(N, dtype=jnp.int32)]

    def add(self, new):
        if jnp.issubdtype(new.dtype, jnp.inexact):
            self.values.append(new)
        else:
            self.ids.append(new.astype(jnp.int32))

    def one(self, least=0):
        """A value with so many axes; later ones are drawn more often."""
        found = [v for v in self.values if v.ndim >= least]
        return found[-1 - min(int(self.rng.geometric(0.25)) - 1, len(found) - 1)]

    def index(self):
        """Integers along one axis."""
        found = [v for v in self.ids if v.ndim == 1]
        return found[self.rng.integers(len(found))]

    def axis(self, v):
        return int(self.rng.integers(v.ndim))

    def pick(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def like(self, v):
        """A value that broadcasts with another, or that with new axes."""
        order = self.rng.permutation(len(self.values))
        for i in order:
            u = self.values[i]
            for axes in ((), (0,), (-1,), (0, 1), (0, -1), (-2, -1)):
                w = jnp.expand_dims(u, axes)
                if self._fits(v.shape, w.shape):
                    return w
        return v

    def _fits(self, one, two):
        try:
            return math.prod(np.broadcast_shapes(one, two)) <= MOST
        except ValueError:
            return False

    def loss(self):
        """A number of several values, and some that come back."""
        last = [self.values[-1], self.one(), self.one()]
        value = sum(jnp.sin(v + 0.3 * i).mean() for i, v in enumerate(last))
        if self.rng.random() < 0.5:
            value = jnp.sqrt(1 + value**2) * jnp.tanh(last[1]).sum()
        return value, {"last": last[0], "one": last[2], "id": self.ids[-1]}


# -- Steps -----------------------------------------------------------------------------

STEPS = {}


def step(f):
    STEPS[f.__name__.strip("_")] = f
    return f


def small(v):
    """Numbers that stay of the size of one."""
    return jnp.tanh(v) if v.ndim % 2 else v / (1 + jnp.abs(v))


@step
def by_number(g):
    f = g.pick(jnp.sin, jnp.tanh, jax.nn.relu, jnp.abs, jax.nn.gelu, lax.stop_gradient)
    return f(g.one())


@step
def of_two(g):
    v = g.one()
    u = g.like(v)
    f = g.pick(jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.hypot)
    return small(f(v, u))


@step
def quotient(g):
    v = g.one()
    return v / (1 + g.like(v) ** 2)


@step
def choice(g):
    v = g.one()
    u = g.like(v)
    return jnp.where(u > 0.1, v, g.pick(0.0, u))


@step
def reduced(g):
    v = g.one(1)
    f = g.pick(
        *(jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.std, jax.nn.logsumexp, jnp.prod)
    )
    keep = bool(g.rng.random() < 0.5)
    return small(f(v + 0.01, axis=g.pick(g.axis(v), None), keepdims=keep))


@step
def searched(g):
    v = g.one(1)
    f = g.pick(jnp.argmax, jnp.argmin, jnp.argsort)
    return f(v, axis=g.axis(v)) % N


@step
def along(g):
    v = g.one(1)
    f = g.pick(
        *(jnp.sort, jnp.cumsum, jnp.flip, jax.nn.softmax, jax.nn.log_softmax),
        *(jnp.cumprod, jnp.diff, lax.cumlogsumexp, lax.cummax),
    )
    return small(f(v, axis=g.axis(v)))


@step
def moved(g):
    v = g.one(1)
    d, by = g.axis(v), int(g.rng.integers(-5, 6))
    f = g.pick(
        lambda: jnp.roll(v, by, d),
        lambda: jnp.moveaxis(v, d, 0),
        lambda: v.T,
        lambda: jnp.expand_dims(v, d),
        lambda: jnp.repeat(v, 2, d),
        lambda: jnp.concatenate([v, jnp.sin(v)], d),
        lambda: jnp.stack([v, v * 0.5], d),
        lambda: lax.slice_in_dim(v, min(1, v.shape[d] - 1), None, g.pick(1, 2), d),
        lambda: jnp.pad(v, [(1, 1) if i == d else (0, 0) for i in range(v.ndim)]),
        lambda: lax.index_in_dim(v, by % v.shape[d], d, keepdims=False),
    )
    return f()


@step
def reshaped(g):
    v = g.one(1)
    n = v.size
    first = g.pick(*(m for m in (1, 2, 3, 4, 6, 12, n) if n % m == 0))
    second = g.pick(*(m for m in (1, 2, 3, 4) if n // first % m == 0))
    shape = (first, second, -1) if g.rng.random() < 0.5 else (second, -1)
    return v.reshape(shape, order=g.pick("C", "C", "F"))


@step
def product(g):
    v = g.one(1)
    d = g.axis(v)
    found = [u for u in g.values if v.shape[d] in u.shape]
    u = g.pick(*found)
    return small(jnp.tensordot(v, u, ((d,), (u.shape.index(v.shape[d]),))))


@step
def of_pairs(g):
    v = g.one(1)
    v = v.reshape(v.shape[0], -1)
    return small((v[:, None] - v[None]).sum(-1) * g.pick(1.0, 0.1))


@step
def of_each(g):
    v = g.one(2)
    d = g.axis(v)
    f = g.pick(
        lambda x: x / (1 + jnp.linalg.norm(x)),
        lambda x: x - x.mean(),
        lambda x: x.max() * x,
        lambda x: jnp.cumsum(x, 0),
        jax.grad(lambda x: jnp.sin(x).sum() ** 2),
    )
    return small(jax.vmap(f, d, d)(v))


@step
def looked_up(g):
    v, i = g.one(1), g.index()
    return jnp.take(v, i, axis=g.axis(v), mode=g.pick("wrap", "clip"))


@step
def own_entries(g):
    v, i = g.one(2), g.index()
    if v.shape[0] != i.shape[0]:
        return None
    return v[jnp.arange(len(i)), i % v.shape[1]]


@step
def added_up(g):
    v, i = g.one(1), g.index()
    if v.shape[0] != i.shape[0]:
        return None
    f = g.pick(jax.ops.segment_sum, jax.ops.segment_max)
    found = f(v, i % 4, g.pick(4, N))
    return small(jnp.where(jnp.isfinite(found), found, 0.0))


@step
def updated(g):
    v, i = g.one(1), g.index()
    at = v.at[g.pick(i % v.shape[0], 0, slice(None, None, 2))]
    return g.pick(lambda: at.add(0.5), lambda: at.mul(0.5), lambda: at.max(0.1))()


@step
def entries_set(g):
    v, i = g.one(2), g.index()
    if v.shape[0] != i.shape[0]:
        return None
    at = v.at[jnp.arange(len(i)), i % v.shape[1]]
    return g.pick(lambda: at.set(0.5), lambda: at.add(v[:, 0]))()


@step
def scanned(g):
    v = g.one(1)
    start = jnp.zeros_like(v[0])
    w = g.one()
    f = g.pick(
        lambda c, x: (c + x, c),
        lambda c, x: (c + jnp.sin(x), x * 2),
        lambda c, x: (0.5 * c + x, c),
        lambda c, x: (c, x + w.sum()),
        lambda c, x: (jnp.maximum(c, x), c - x),
    )
    total, ys = lax.scan(f, start, v, reverse=bool(g.rng.random() < 0.3))
    return small(g.pick(total, ys))


@step
def looped(g):
    v, w = g.one(1), g.one()
    f = g.pick(
        lambda i, x: jnp.tanh(x + i),
        lambda i, x: x - 0.1 * x.mean(0),
        lambda i, x: x * jnp.sin(w.mean()),
    )
    return lax.fori_loop(0, int(g.pick(2, 3)), f, v)


@step
def branched(g):
    v, w = g.one(1), g.one()
    f = g.pick(jnp.sin, lambda x: x - x.mean(0), lambda x: x[::-1])
    return lax.cond(w.sum() > 0, f, jnp.tanh, v)


@step
def again(g):
    v = g.one(1)
    d = g.axis(v)
    f = jax.checkpoint(lambda v: jnp.sin(v) - jnp.sin(v).mean(d, keepdims=True))
    return f(v)


@jax.custom_vjp
def clipped(v):
    return jnp.sin(v)


clipped.defvjp(lambda v: (jnp.sin(v), v), lambda v, ct: (jnp.tanh(3 * ct) * v,))


@step
def with_rule(g):
    return g.pick(clipped, jax.nn.silu, jax.nn.relu6, jax.nn.logsumexp)(g.one(1))


@step
def drawn(g):
    v = g.one(1)
    key = jax.random.key(int(g.rng.integers(9)))
    f = g.pick(jax.random.normal, jax.random.uniform)
    return v * f(key, v.shape, v.dtype)


@step
def one_hot(g):
    i = g.index()
    return jax.nn.one_hot(i % 4, 4, dtype=jnp.float64)


@step
def counted(g):
    v = g.one(1)
    d = g.axis(v)
    return v * lax.broadcasted_iota(jnp.float64, v.shape, d) / N


@step
def cast(g):
    return jnp.arange(N).astype(g.pick(jnp.int8, bool, jnp.uint8)).astype(jnp.int32)
