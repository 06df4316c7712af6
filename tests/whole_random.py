"""Random programs are those of the whole batch, in value, gradients and aux.

    python tests/whole_random.py 2000             # as many, from seed 0 on
    python tests/whole_random.py 100 --first 500

A program is a graph. It begins with the leaves of a batch, whose rows lie along
different axes, with parameters, one of which is as long as the batch, and with
integers. Each step makes a new value of some that are there: by a function of
`jax.numpy`, by a step of `whole_programs`, or by such steps inside of something,
which may be a micro-batch, a promise, a checkpoint, a scan, a branch or a gradient.
The loss reads several values, and some come back. Each program goes through several
of our functions, as `WAYS` has them, some also on four devices. A number is wrong if
it is off by more than 1e-9 of the largest of its leaf, in float64, and by more than
1e4 times what a change of the parameters by an ulp makes of it.
"""

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from whole_programs import BY_ROW, STEPS, N

import ga_optax as ga
from ga_optax._calls.second_derivatives import NoDerivativeError

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
    """A random program.

    Attributes:
      seed: what it is drawn from.
      length: how many steps it takes.
      k: how many micro-batches, on a device.
      devices: on how many devices, also.
      ways: the functions that it goes through, of `WAYS`.
      names: its steps, if they are not drawn.
    """

    seed: int
    length: int = 1
    k: int = 3
    devices: int = 1
    ways: tuple[str, ...] = ("window",)
    names: tuple[str, ...] = ()

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
    return str(values.rng.choice(list(values.pick(GRAPH, GRAPH, STEPS))))


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
        insides = PLAIN if way == "twice" else Insides()  # promises have one derivative
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
        value = sum(jnp.sin(v + 0.3 * i).mean() for i, v in enumerate(last))
        if self.rng.random() < 0.5:
            value = jnp.sqrt(1 + value**2) * jnp.tanh(last[1]).sum()
        aux = {"last": last[0], "one": last[2], "id": self.batch["ids"] + 1}
        return value, aux | {"count": self.batch["mask"].sum(), "first": self.params[0]}


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


def reduced(g):
    v = g.one(1)
    f = g.pick(jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.std, jax.nn.logsumexp, jnp.prod)
    keep = bool(g.rng.random() < 0.5)
    return small(f(v + 0.01, axis=g.pick(g.axis(v), None), keepdims=keep))


def along(g):
    v = g.one(1)
    f = g.pick(
        *(jnp.sort, jnp.cumsum, jnp.flip, jax.nn.softmax, jax.nn.log_softmax),
        *(jnp.cumprod, jnp.diff, lax.cumlogsumexp, lax.cummax),
    )
    return small(f(v, axis=g.axis(v)))


def moved(g):
    v = g.one(1)
    d, by = g.axis(v), int(g.rng.integers(-5, 6))
    step = g.pick(1, 2)
    return g.pick(
        lambda: jnp.roll(v, by, d),
        lambda: jnp.moveaxis(v, d, 0),
        lambda: v.T,
        lambda: jnp.expand_dims(v, d),
        lambda: jnp.repeat(v, 2, d),
        lambda: jnp.concatenate([v, jnp.sin(v)], d),
        lambda: jnp.stack([v, v * 0.5], d),
        lambda: lax.slice_in_dim(v, min(1, v.shape[d] - 1), None, step, d),
        lambda: jnp.pad(v, [(1, 1) if i == d else (0, 0) for i in range(v.ndim)]),
        lambda: lax.index_in_dim(v, by % v.shape[d], d, keepdims=False),
    )()


def reshaped(g):
    v = g.one(1)
    first = g.pick(*(m for m in (1, 2, 3, 4, 6, 12, v.size) if v.size % m == 0))
    second = g.pick(*(m for m in (1, 2, 3, 4) if v.size // first % m == 0))
    shape = (first, second, -1) if g.rng.random() < 0.5 else (second, -1)
    return v.reshape(shape, order=g.pick("C", "C", "F"))


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


def looked_up(g):
    v, i = g.one(1), g.index()
    return jnp.take(v, i, axis=g.axis(v), mode=g.pick("wrap", "clip"))


def updated(g):
    v, i = g.one(1), g.index()
    at = v.at[g.pick(i % v.shape[0], 0, slice(None, None, 2))]
    return g.pick(lambda: at.add(0.5), lambda: at.mul(0.5), lambda: at.max(0.1))()


def scanned(g):
    v, w = g.one(1), g.one()
    f = g.pick(
        lambda c, x: (c + x, c),
        lambda c, x: (c + jnp.sin(x), x * 2),
        lambda c, x: (0.5 * c + x, c),
        lambda c, x: (c, x + w.sum()),
        lambda c, x: (jnp.maximum(c, x), c - x),
    )
    reverse = bool(g.rng.random() < 0.3)
    return small(g.pick(*lax.scan(f, jnp.zeros_like(v[0]), v, reverse=reverse)))


def drawn(g):
    v = g.one(1)
    key = jax.random.key(int(g.rng.integers(9)))
    return v * g.pick(jax.random.normal, jax.random.uniform)(key, v.shape, v.dtype)


GRAPH = {
    f.__name__: f
    for f in (
        *(around, by_number, of_two, reduced, along, moved, reshaped),
        *(product, of_each, looked_up, updated, scanned, drawn),
    )
}


def outcome(seed, draw=draw):
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
