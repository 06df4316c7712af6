"""Random programs are those of the whole batch, in value, gradients and aux.

    PYTHONPATH=tests python -m corpus.random_programs 2000  # as many, from seed 0 on
    PYTHONPATH=tests python -m corpus.random_programs 100 --first 500

A program is a graph. It begins with the leaves of a batch, whose rows lie along
different axes, with parameters, one of which is as long as the batch, and with
integers. Each step makes a new value of some that are there: by a function of
`jax.numpy`, by what moves rows (`MOVES`), by a step of `steps`, or by such
steps inside of something, which may be a micro-batch, a promise, a checkpoint, a scan,
a branch or a gradient. The loss weighs each number of several values by its place, so
that none can stand in for another, and some come back. Each program goes through
several of our functions, as `WAYS` has them, some also on four devices. A number is
wrong if it is off by more than 1e-9 of the largest of its leaf, in float64, and by more
than 1e4 times what a change of the parameters by an ulp makes of it.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from corpus.steps import BY_ROW, STEPS, N
from jax import lax
from jax.sharding import AxisType

import ga_optax as ga
from ga_optax._passes.equation import NoDerivativeError

BOUND, MOST = 1e-9, 1500
AXES = {"x": 0, "y": 1, "z": 1, "ids": 0, "mask": 0}
SHAPES = {"x": (N, 3), "y": (2, N), "z": (4, N, 2)}
PARAMS = ((3, 4), (N, 2), (4,), ())


class Insides(NamedTuple):
    """What steps inside of micro-batches, `f(w, h, b)`, and of promises are."""

    divide: Callable = lambda f, k, axes: ga.microbatch(
        f, k, batch_argnums=(1, 2), batch_axes=axes
    )
    promise: Callable = ga.rowwise


PLAIN = Insides(lambda f, k, axes: f, lambda f, **axes: f)


class Program(NamedTuple):
    """A random program, drawn from its seed."""

    seed: int
    length: int = 1  # of its steps
    k: int = 3  # micro-batches on a device
    devices: int = 1  # on so many, too
    ways: tuple[str, ...] = ("window",)  # of `WAYS`
    names: tuple[str, ...] = ()  # of its steps, if they are not drawn

    def run(self, params, batch, insides=PLAIN):
        """The loss and its aux, and the steps."""
        values = Values(self.seed, params, batch, insides)
        steps = []
        while len(steps) < self.length:
            name = self.names[len(steps)] if self.names else _drawn_name(values)
            new = of_matrix(values, name) if name in STEPS else GRAPH[name](values)
            if new is not None and 0 < new.size <= MOST:
                steps.append(f"{name} {list(new.shape)}")
                values.values.append(new)
        return *values.loss(), [*steps, *values.inside]

    def arguments(self):
        rng = np.random.default_rng(self.seed + 1)
        params = [jnp.asarray(rng.normal(size=shape)) for shape in PARAMS]
        batch = {name: jnp.asarray(rng.normal(size=s)) for name, s in SHAPES.items()}
        ids = jnp.asarray(rng.integers(0, 3, N), jnp.int32)
        return params, batch | {"ids": ids, "mask": jnp.asarray(rng.random(N) < 0.6)}

    def __str__(self):
        steps = []
        note = lambda *args: steps.extend(self.run(*args)[-1])  # noqa: E731
        with float64():
            jax.eval_shape(note, *self.arguments())
        return f"{self!r}: {', '.join(steps)}"


def _drawn_name(values):
    return str(values.rng.choice(list(values.pick(GRAPH, MOVES, STEPS))))


def draw(seed):
    rng = np.random.default_rng(seed)
    devices = 4 if rng.random() < 0.25 else 1
    k = rng.choice([1, 3] if devices > 1 else [2, 3, 4, 6, 12])
    ways = rng.choice(list(WAYS), 2, replace=False)
    length = int(rng.integers(2, 7))
    return Program(seed, length, int(k), devices, tuple(map(str, ways)))


# -- Our functions, and JAX's ----------------------------------------------------------


def _twice(fun):
    """Derivatives of derivatives."""

    def of(params, batch):
        grads = jax.grad(lambda *args: fun(*args)[0])(params, batch)
        return sum(jnp.vdot(jnp.cos(g), g) for g in jax.tree.leaves(grads)), None

    return jax.value_and_grad(of, has_aux=True)


def _of_jax(fun):
    return jax.value_and_grad(fun, has_aux=True)


_WIDE = {"has_aux": True, "accumulator_dtype": "float64"}
# Name: ours, and JAX's own.
WAYS = {
    "window": (lambda f, *a, **o: ga.value_and_grad(f, *a, **o, **_WIDE), _of_jax),
    "of a gradient": (lambda f, *a, **o: ga.microbatch(_of_jax(f), *a, **o), _of_jax),
    "gradient of it": (lambda f, *a, **o: _of_jax(ga.microbatch(f, *a, **o)), _of_jax),
    "inside alone": (lambda f, *a, **o: _of_jax(f), _of_jax),
    "twice": (lambda f, *a, **o: _twice(ga.microbatch(f, *a, **o)), _twice),
}


def runs(program):
    """Pairs of ours and JAX's, as functions of the arguments."""

    def fun(insides):
        return lambda *args: program.run(*args, insides)[:2]

    for way in program.ways:
        ours, theirs = WAYS[way]
        insides = Insides()
        for devices in {1, program.devices if way != "inside alone" else 1}:
            # Those of explicit type are differentiated as loops, in which JAX before
            # 0.12 forgets the rules of functions, the second time backwards.
            typed = program.seed % 2 and jax.__version_info__ >= (0, 12)
            kind = AxisType.Explicit if typed else AxisType.Auto
            axis = ga.DataAxis("data", mesh=helpers.mesh_of(devices, kind=kind))
            k = program.k * (program.devices // devices)
            options = {"batch_axes": AXES, "data_axis": axis if devices > 1 else None}
            yield ours(fun(insides), k, **options), theirs(fun(PLAIN))


def check(program):
    """How far a program is off; None if the whole batch's numbers are not finite."""
    error = 0.0
    with float64(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*computed whole")
        warnings.filterwarnings("ignore", "Each of .* micro-batches computes")
        args = program.arguments()
        near = jax.tree.map(lambda p: p * (1 + 2**-52), args[0]), args[1]
        for mine, plain in runs(program):
            try:
                want = jax.jit(plain)(*args)
            except (NotImplementedError, ValueError):  # a kernel's second derivative
                continue
            if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(want)):
                return None
            try:
                found = off(jax.jit(mine)(*args), want)
            except NoDerivativeError:  # of a rule, twice, on a mesh of explicit axes
                continue
            if found > BOUND:  # is it the numbers that are badly conditioned?
                found = found if found > 1e4 * off(jax.jit(plain)(*near), want) else 0
            error = max(error, found)
    return error


@contextlib.contextmanager
def float64():
    """Not `jax.enable_x64`, which callbacks in other threads know nothing of."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def off(got, want):
    """As `helpers.off`, if the types are weak alike."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert getattr(x, "weak_type", False) == getattr(y, "weak_type", False)
    return helpers.off(got, want)


# -- The values that are there ---------------------------------------------------------


class Values:
    """The values that are there, and draws from them."""

    def __init__(self, seed, params, batch, insides):
        self.rng, self.batch, self.insides = np.random.default_rng(seed), batch, insides
        self.params, self.values = params, [*params, *(batch[n] for n in SHAPES)]
        self.inside: list[Any] = []

    def one(self, least=0):
        """A value with so many axes; later ones are drawn more often."""
        found = [v for v in self.values if v.ndim >= least]
        return found[-1 - min(int(self.rng.geometric(0.25)) - 1, len(found) - 1)]

    def index(self):
        """Integers along one axis."""
        return self.pick(self.batch["ids"], jnp.arange(N, dtype=jnp.int32))

    def axis(self, v):
        return int(self.rng.integers(v.ndim))

    def is_so(self, chance=0.5):
        return bool(self.rng.random() < chance)

    def pick(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def like(self, v):
        """A value that broadcasts with another, or that with new axes."""
        for i in self.rng.permutation(len(self.values)):
            for axes in ((), (0,), (-1,), (0, 1), (0, -1), (-2, -1)):
                w = jnp.expand_dims(self.values[i], axes)
                if _fits(v.shape, w.shape):
                    return w
        return v

    def matrix(self):
        """A value as `[N, d]`, with a matrix `[d, d]`, and what has rows beside it."""
        found = [v for v in self.values if v.size >= N and N in v.shape]
        v = found[-1 - min(int(self.rng.geometric(0.3)) - 1, len(found) - 1)]
        h = jnp.moveaxis(v, v.shape.index(N), 0).reshape(N, -1)[:, :24]
        w = jnp.sin(1 + jnp.arange(h.shape[1] ** 2)) + jnp.tanh(self.params[3])
        w = w.reshape(h.shape[1], -1) / h.shape[1] ** 0.5
        return h, w, {name: self.batch[name] for name in ("ids", "mask")}

    def loss(self):
        """A number of several values, and some that come back."""
        last = [self.values[-1], self.one(), self.one()]
        value = sum(map(_by_place, last))
        if self.is_so():
            value = jnp.sqrt(1 + value**2) * jnp.tanh(last[1]).sum()
        aux = {"last": last[0], "one": last[2], "id": self.batch["ids"] + 1}
        return value, aux | {"count": self.batch["mask"].sum(), "first": self.params[0]}


def _by_place(v):
    weights = jnp.cos(1 + jnp.arange(v.size, dtype=v.dtype)).reshape(v.shape)
    return jnp.mean(weights * jnp.sin(v))


def _fits(one, two):
    try:
        return math.prod(np.broadcast_shapes(one, two)) <= MOST
    except ValueError:
        return False


def small(v):
    """Numbers that stay of the size of one."""
    return jnp.tanh(v) if v.ndim % 2 else v / (1 + jnp.abs(v))


# -- Steps of matrices, and what they may be inside of ---------------------------------


def of_matrix(g, name):
    return small(STEPS[name](*g.matrix()))


def around(g):
    """Some steps in one of `AROUND`, which may be in another."""
    h, w, b = g.matrix()
    return small(_inner(g, depth=2)(w, h, b))


def _inner(g, depth):
    """`f(w, h, b)` of one to two steps, or of one inside of something."""
    steps = []
    for _ in range(g.rng.integers(1, 3)):
        if depth and g.rng.random() < 0.6:
            name = str(g.rng.choice(list(AROUND)))
            steps.append(AROUND[name](g, _inner(g, depth - 1)))
        else:
            promised = g.rng.random() < 0.2
            name = str(g.rng.choice(list(BY_ROW if promised else STEPS)))
            step = STEPS[name]
            if promised:
                step = g.insides.promise(step, in_axes=(0, None, 0))
            steps.append(lambda w, h, b, f=step: f(h, w, b))
        g.inside.append(name)

    def run(w, h, b):
        for f in steps:
            h = jnp.tanh(f(w, h, b))
        return h

    return run


def _divided(g, f):
    """Over micro-batches, with a result of some layout."""
    k, kind = int(g.pick(2, 4, 6)), g.pick("rows", "number", "both", "columns", "map")

    def step(w, h, b):
        over = lambda f, axes=0: g.insides.divide(f, k, axes)  # noqa: E731
        if kind == "rows":
            return over(f)(w, h, b)
        if kind == "number":
            return h * over(lambda *args: jnp.mean(f(*args) ** 2))(w, h, b)
        if kind == "both":
            every = lambda w, h, b: (f(w, h, b), f(w, h, b).sum(0), b["ids"] + 1)  # noqa: E731
            rows, total, ids = over(every)(w, h, b)
            return rows + jnp.tanh(total) * ids[:, None]
        if kind == "columns":
            return over(lambda w, h, b: f(w, h.T, b).T, (1, 0))(w, h.T, b).T
        many = jnp.stack([h, h / 2])
        return jax.vmap(lambda h: over(f)(w, h, b))(many).sum(0)

    return step


def _scanned(g, f):
    """Over one to three matrices, with sums over rows that are carried."""
    length, reverse = int(g.pick(1, 2, 3)), bool(g.rng.random() < 0.5)
    wrap = g.pick(jax.checkpoint, lambda body: body)

    def step(w, h, b):
        def body(c, w):
            h, a = c
            h = jnp.tanh(f(w, h, b))
            return (h, 0.9 * a + h.mean(0) ** 2), (h.sum(), a)

        start, every = (h, jnp.zeros_like(h[0])), jnp.stack([w, w.T, w])[:length]
        (h, a), (sums, before) = lax.scan(wrap(body), start, every, reverse=reverse)
        return h + a + before.sum(0) / 3 + sums.sum() / 9

    return step


def _pulled(g, f):
    def step(w, h, b):
        of_w, of_h = jax.grad(lambda *wh: jnp.sin(f(*wh, b)).sum(), (0, 1))(w, h)
        return h + of_h / 3 + of_w[0] / N

    return step


AROUND = {
    "checkpoint": lambda g, f: jax.checkpoint(f),
    "jit": lambda g, f: jax.jit(f),
    "scan": _scanned,
    "gradient": _pulled,
    "micro-batches": _divided,
    "micro-batches again": _divided,
    "branch": lambda g, f: (
        lambda w, h, b: lax.cond(h.sum() > 1e9, lambda h: h, lambda h: f(w, h, b), h)
    ),
    "loop": lambda g, f: (
        lambda w, h, b: lax.fori_loop(0, 2, lambda i, h: jnp.tanh(f(w, h, b)), h)
    ),
}

# -- Steps of any values ---------------------------------------------------------------


def by_number(g):
    f = g.pick(jnp.sin, jnp.tanh, jax.nn.relu, jnp.abs, jax.nn.gelu, lax.stop_gradient)
    return f(g.one())


def of_two(g):
    v = g.one()
    u = g.like(v)
    f = g.pick(
        *(jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.hypot),
        lambda v, u: v / (1 + u**2),
        lambda v, u: jnp.where(u > 0.1, v, 0.0),
        lambda v, u: jnp.where(u > 0.1, v, u),
    )
    return small(f(v, u))


def begun(g):
    """What rows may be of: a square, segments, other rows, rows that met."""
    x, y = (jnp.tanh(g.batch[name] * (1 + g.params[3])) for name in "xy")
    square = x @ jnp.sin(jnp.arange(3.0 * N)).reshape(3, N)
    return g.pick(
        *(square, square.T, x @ jnp.sin(x).T, jnp.concatenate([x, y.T], 1)),
        *(jnp.concatenate([y, jnp.cos(y)], 1), x - x.mean(0)),
    )


def reduced(g):
    v = g.one(1)
    f = g.pick(jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.std, jax.nn.logsumexp, jnp.prod)
    return small(f(v + 0.01, axis=g.pick(g.axis(v), None), keepdims=g.is_so()))


def along(g):
    v = g.one(1)
    d, back = g.axis(v), {"reverse": g.is_so()}
    f = g.pick(lax.cumsum, lax.cumprod, lax.cumlogsumexp, lax.cummax, lax.cummin)
    f = functools.partial(f, **back)
    return small(g.pick(f, f, jax.nn.softmax, jax.nn.log_softmax)(v, axis=d))


def added(g):
    """An axis, or what is beside a value or between its rows."""
    v = g.one(1)
    d, other = g.axis(v), g.axis(v)
    return g.pick(
        lambda: jnp.expand_dims(v, d),
        lambda: jnp.stack([v, v * 0.5], d),
        lambda: jnp.diff(v, axis=d),
        lambda: lax.index_in_dim(v, other % v.shape[d], d, keepdims=False),
    )()


def product(g):
    v = g.one(1)
    d = g.axis(v)
    u = g.pick(*(u for u in g.values if v.shape[d] in u.shape))
    return small(jnp.tensordot(v, u, ((d,), (u.shape.index(v.shape[d]),))))


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


def scanned(g):
    v, w = g.one(1), g.one()
    f = g.pick(
        lambda c, x: (c + x, c),
        lambda c, x: (c + jnp.sin(x), x * 2),
        lambda c, x: (0.5 * c + x, c),
        lambda c, x: (c, x + w.sum()),
        lambda c, x: (jnp.maximum(c, x), c - x),
    )
    found = lax.scan(f, jnp.zeros_like(v[0]), v, reverse=g.is_so(0.3))
    return small(g.pick(*found))


def drawn(g):
    v = g.one(1)
    key = jax.random.key(int(g.rng.integers(9)))
    return v * g.pick(jax.random.normal, jax.random.uniform)(key, v.shape, v.dtype)


def scattered_to(g):
    """Numbers that are added to others, multiply them, or are compared with them."""
    v = g.one(1)
    at, how = _at(g, v)
    name = g.pick("add", "subtract", "min", "max", "multiply")
    if name == "multiply" and not how.get("unique_indices"):
        name = "add"  # JAX has no derivative of it
    new = jnp.sin(v.at[at].get()) + g.params[3]
    return small(getattr(v.at[at], name)(new, **how))


def segmented(g):
    v, ids = g.one(1), g.batch["ids"]
    v = jnp.moveaxis(v, v.shape.index(N), 0) if N in v.shape else v
    ids, is_sorted = jnp.resize(ids, len(v)), g.is_so()
    ids = jnp.sort(ids) if is_sorted else ids
    f = g.pick(jax.ops.segment_sum, jax.ops.segment_max, jax.ops.segment_min)
    new = f(v, ids, 4, indices_are_sorted=is_sorted)
    return small(jnp.where(jnp.isfinite(new), new, 0)[g.pick(ids, slice(None))])


def windowed(g):
    v = g.one(1)
    sizes, steps = ([g.pick(1, 1, 2, 3) for _ in v.shape] for _ in range(2))
    sizes = [min(m, n) for m, n in zip(sizes, v.shape, strict=True)]
    start, by = g.pick((0.0, lax.add), (-jnp.inf, lax.max), (jnp.inf, lax.min))
    pads = g.pick("VALID", "SAME", [g.pick((0, 0), (1, 0)) for _ in v.shape])
    ways = ("base_dilation", "window_dilation") if by is lax.add else ()
    more = {way: [g.pick(1, 1, 2) for _ in v.shape] for way in ways if g.is_so(0.3)}
    start = jnp.asarray(start, v.dtype)
    new = lax.reduce_window(v, start, by, sizes, steps, pads, **more)
    return small(jnp.where(jnp.isfinite(new), new, 0))


def ordered(g):
    """Some arrays by the first ones, the largest of one, or rows where it is."""
    v = g.one(2)
    d = g.axis(v)
    at = jnp.expand_dims(g.pick(jnp.argmax, jnp.argmin)(v, d), d)
    return g.pick(
        lambda: lax.sort((jnp.round(v * 4), v, -v), dimension=d, num_keys=1)[2],
        lambda: lax.sort((v % 0.5, jnp.sin(v)), dimension=d, num_keys=2)[1],
        lambda: lax.top_k(jnp.moveaxis(v, d, -1), 1)[0],
        lambda: jnp.median(v, d),
        lambda: jnp.take_along_axis(v, at, d),
    )()


# -- What moves rows: `build(g, v)` is a function of arrays like `v` -------------------


def padded_or_cut(g, v):
    """Along some axes by more or fewer, or so that the shape stays the same."""
    config, stays = [], g.is_so()
    for n in v.shape:
        low, high, between = g.pick(-1, 0, 1, 2), g.pick(-2, 0, 1), g.pick(0, 0, 0, 1)
        high, between = (-low, 0) if stays else (high, between)
        is_left = n + low + high + (n - 1) * between > 0
        config.append((low, high, between) if is_left else (0, 0, 0))
    by = g.pick(0, 0, 1)
    return lambda v: lax.pad(v, jnp.asarray(by, v.dtype), config)


def joined(g, v):
    d, number = g.axis(v), g.pick(2, 3)
    at = int(g.rng.integers(v.shape[d] + 1))

    def move(v):
        parts = jnp.split(v, [at], d)
        return jnp.concatenate([*parts[::-1], v][:number], d)

    return move


def sliced(g, v):
    ends = [
        g.pick((0, n), (0, n), (min(1, n - 1), n), (0, -(-n // 2))) for n in v.shape
    ]
    steps = [g.pick(1, 1, 2) for _ in v.shape] if g.is_so() else None
    return lambda v: lax.slice(v, *zip(*ends, strict=True), steps)


def _begins(g, n, taken):
    """Where a slice of so many begins: a number, or one of the batch."""
    at = jnp.asarray(g.pick(0, 1, n - taken, n), jnp.int32)
    return at if g.is_so() else jnp.minimum(g.batch["ids"][1], at)


def dynamic(g, v):
    """A slice, or an update by the last numbers, wherever they go."""
    sizes = [g.pick(n, 1, max(n - 1, 1)) for n in v.shape]
    starts = [_begins(g, n, m) for n, m in zip(v.shape, sizes, strict=True)]
    last = [n - m for n, m in zip(v.shape, sizes, strict=True)]
    return g.pick(
        lambda v: lax.dynamic_slice(v, starts, sizes),
        lambda v: lax.dynamic_update_slice(v, lax.slice(v, last, v.shape), starts),
    )


def _index(g, n, most):
    """An index into `n` of some mode, with promises that hold."""
    mode = g.pick("fill", "clip", "promise_in_bounds", None)
    kind = g.pick("some", "some", "others", "all", "each", "ids")
    how = {"mode": mode}
    if kind == "ids":
        at = g.batch["ids"] % n
        at = at if g.is_so() else jnp.minimum(at * 4, n - 1)
        return at[: min(most, N)], how
    if kind in ("all", "each"):
        at = jnp.arange(n, dtype=jnp.int32)[:most]
        at = jnp.repeat(at, 2) if kind == "each" and n * 2 <= most else at
        return at, how | {"indices_are_sorted": g.is_so()}
    if kind == "some":
        at = g.rng.permutation(n)[: g.pick(1, 2, n)]
        how |= {"unique_indices": g.is_so(0.7)}
    else:
        outside = 0 if mode == "promise_in_bounds" else 3
        at = g.rng.integers(-outside, n + outside, g.pick(2, 5, n))
    if g.is_so() and at.min() >= 0:
        at, how = np.sort(at), how | {"indices_are_sorted": True}
    at = jnp.asarray(at[:most], jnp.int32)
    # As they come with the batch, nobody sees what they are.
    return (at + 0 * g.batch["ids"][0] if g.is_so() else at), how


def _at(g, v):
    """An index of one axis, or of two that belong together."""
    d, few = g.axis(v), max(1, MOST // v.size * v.shape[0])
    at, how = _index(g, v.shape[d], few)
    if d + 1 < v.ndim and g.is_so(0.4):
        other = (at * 5 + 1) % v.shape[d + 1]
        return (slice(None),) * d + (at, other), how | {"mode": how["mode"]}
    return (slice(None),) * d + (at,), how


def gathered(g, v):
    at, how = _at(g, v)
    fill = {"fill_value": g.pick(0, 1)} if how["mode"] == "fill" else {}
    return lambda v: v.at[at].get(**how, **fill)


def gathered_along(g, v):
    d = g.axis(v)
    at = (jnp.arange(v.size, dtype=jnp.int32).reshape(v.shape) * 5) % v.shape[d]
    order = g.pick(lambda v: jnp.argsort(v, d), lambda v: at)
    return lambda v: jnp.take_along_axis(v, order(v), d)


def scattered(g, v):
    at, how = _at(g, v)
    new = jnp.cos(jnp.arange(v.size, dtype=v.dtype)).reshape(v.shape).at[at].get()
    if not how.get("unique_indices"):
        new = jnp.zeros_like(new)  # which of several is written is not said
    return lambda v: v.at[at].set(new.astype(v.dtype), **how)


def _some(g, v):
    return [d for d in range(v.ndim) if g.is_so()]


def _shape(g, v):
    first = g.pick(*(m for m in (1, 2, 3, 4, 6, 12) if v.size % m == 0))
    rest = v.size // first
    return first, g.pick(*(m for m in (1, 2, 3, 4) if rest % m == 0)), -1


MOVES = {
    build.__name__: build
    for build in (
        *(padded_or_cut, sliced, joined, dynamic, gathered, gathered_along, scattered),
    )
} | {
    "filled": lambda g, v: functools.partial(
        jnp.pad,
        pad_width=[g.pick((0, 0), (1, 0), (1, 1)) for _ in v.shape],
        mode=g.pick("edge", "wrap", "reflect"),
    ),
    "reversed": lambda g, v: functools.partial(lax.rev, dimensions=_some(g, v)),
    "rolled": lambda g, v: functools.partial(
        jnp.roll, shift=g.pick(-5, 1, 3), axis=tuple(_some(g, v))
    ),
    "turned": lambda g, v: functools.partial(
        jnp.transpose, axes=[int(d) for d in g.rng.permutation(v.ndim)]
    ),
    "shaped": lambda g, v: functools.partial(
        jnp.reshape, shape=_shape(g, v), order=g.pick("C", "C", "F")
    ),
    "tiled": lambda g, v: functools.partial(
        jnp.tile, reps=[g.pick(1, 2) for _ in v.shape]
    ),
    "repeated": lambda g, v: functools.partial(jnp.repeat, repeats=2, axis=g.axis(v)),
    "sorted": lambda g, v: functools.partial(lax.sort, dimension=g.axis(v)),
}


def moved(name):
    """A step that moves an array, and perhaps a mask alike."""

    def step(g):
        v = g.one(1)
        move = MOVES[name](g, v)
        new = move(v)
        return jnp.where(move(v > 0.1), new, new / 2) if g.is_so(0.3) else new

    return step


GRAPH = {
    f.__name__: f
    for f in (
        *(around, by_number, of_two, begun, reduced, along, added, product, of_each),
        *(scanned, drawn, scattered_to, segmented, windowed, ordered),
    )
} | {name: moved(name) for name in MOVES}


def outcome(seed):
    program = draw(seed)
    try:
        error = check(program)
    except Exception as raised:
        return "raised", f"{raised!r:.600}\n  {program}"
    is_wrong = error is not None and not error < BOUND
    kind = "not finite" if error is None else "finite"
    return kind, is_wrong and f"{error}\n  {program}"


if __name__ == "__main__":
    helpers.search(__doc__, outcome)
