"""Random pairs of what moves rows and anything else are those of the whole batch.

    python tests/whole_moves.py 2000             # as many, from seed 0 on
    python tests/whole_moves.py 100 --first 500

A pair is a step of `MOVES`, before or after another one or one of `OTHERS`: pads,
slices, reversals, gathers and scatters of every mode, with promises that hold, windows,
sorts. It begins with a value whose rows lie along any axis, which may be as long as
another one, or with one in which rows met. The loss weighs each number by its place,
so that none can stand in for another. It goes through our functions as a program of
`whole_random` does, with the same bound; one of them is the second derivative.
"""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from whole_programs import N
from whole_random import GRAPH, MOST, PLAIN, Program, Values, outcome, small


class Pairs(Program):
    """Pairs of such steps, side by side; `names` has the steps of each.

    Which numbers a pair draws depends on its place: to find the one that is wrong,
    leave the steps of the others out.
    """

    def run(self, params, batch, insides=PLAIN):
        value, aux, steps = jnp.zeros(()), [], []
        for i, names in enumerate(self.names):
            if names:
                g = _Chain([self.seed, i], params, batch, insides)
                found, more = g.after(names)
                value, aux = value + found, [*aux, more]
                steps += [f"of {g.kind}", *g.inside]
        return value, aux, steps


def draw(seed, pairs=2):
    """A program of so many pairs."""
    rng = np.random.default_rng(seed)
    devices, k = (4, 3) if rng.random() < 0.1 else (1, rng.choice([2, 3, 4, 6]))
    ways = [rng.choice(["window", "of a gradient", "gradient of it"])]
    ways += ["twice"] * (rng.random() < 0.3)
    names = []
    for _ in range(pairs):
        pair = rng.choice(list(MOVES)), rng.choice([*MOVES, *OTHERS])
        names.append(tuple(map(str, pair if rng.random() < 0.7 else pair[::-1])))
    return Pairs(seed, 2, int(k), devices, tuple(map(str, ways)), tuple(names))


# -- Where it begins, and what of it the loss reads ------------------------------------


def _matrix(x):
    """One number for each row and each of as many columns."""
    return x @ jnp.sin(jnp.arange(3.0 * N)).reshape(3, N)


STARTS = {
    "rows": lambda x, y, z: x,
    "rows along axis 1": lambda x, y, z: y,
    "rows in the middle": lambda x, y, z: z,
    "rows at the end": lambda x, y, z: jnp.moveaxis(z, 1, 2),
    "a square": lambda x, y, z: _matrix(x),
    "a square on its side": lambda x, y, z: _matrix(x).T,
    "rows by rows": lambda x, y, z: x @ jnp.sin(x).T,
    "rows and rows": lambda x, y, z: jnp.concatenate([x, y.T], 1),
    "two segments": lambda x, y, z: jnp.concatenate([y, jnp.cos(y)], 1),
    "rows that met": lambda x, y, z: x - x.mean(0),
    "a sum": lambda x, y, z: z.sum(1),
}


class _Chain(Values):
    """The values of a pair; each step goes on from the last one."""

    def __init__(self, seed, params, batch, insides):
        super().__init__(seed, params, batch, insides)
        self.kind = self.pick(*STARTS)
        x = jnp.tanh(batch["x"] * (params[0][:, 0] + params[3]))
        y, z = (jnp.tanh(batch[name] * (1 + params[3])) for name in "yz")
        self.start = STARTS[self.kind](x, y, z)
        self.values.append(self.start)

    def one(self, least=0):
        v = self.values[-1]
        return v.reshape((1,) * (least - v.ndim) + v.shape)

    def is_so(self, chance=0.5):
        return bool(self.rng.random() < chance)

    def after(self, names):
        """A number of what steps give, and what comes back."""
        seen = [self.start]
        for name in names:
            new = STEPS[name](self)
            self.inside.append(f"{name} {list(new.shape)}")
            if 0 < new.size <= MOST:
                seen.append(new)
                self.values.append(new)
        last = seen[-1]
        value = sum(map(_by_place, seen[-self.pick(1, 2) :]))
        if self.is_so():  # what moved meets what did not
            value = value + _by_place(last * self.like(last))
        if self.is_so():
            value = jnp.sqrt(1 + value**2)
        return value, self.pick({"ids": self.batch["ids"] + 1}, {"last": last})


def _by_place(v):
    weights = jnp.cos(1 + jnp.arange(v.size, dtype=v.dtype)).reshape(v.shape)
    return jnp.sum(weights * jnp.sin(v))


# -- What moves rows, of numbers and of masks ------------------------------------------


def _of_masks_too(build):
    """A step of `build(g, v)`, which moves an array like `v`."""

    @functools.wraps(build)
    def step(g):
        v = g.one(1)
        move = build(g, v)
        new = move(v)
        return jnp.where(move(v > 0.1), new, new / 2) if g.is_so(0.3) else new

    return step


def padded(g, v):
    """Along some axes by more or fewer, or so that the shape stays the same."""
    config, stays = [], g.is_so()
    for n in v.shape:
        low, high, between = g.pick(-1, 0, 1, 2), g.pick(-2, 0, 1), g.pick(0, 0, 0, 1)
        high, between = (-low, 0) if stays else (high, between)
        is_left = n + low + high + (n - 1) * between > 0
        config.append((low, high, between) if is_left else (0, 0, 0))
    by = g.pick(0, 0, 1)
    return lambda v: lax.pad(v, jnp.asarray(by, v.dtype), config)


def padded_by_itself(g, v):
    by = [g.pick((0, 0), (1, 0), (1, 1)) for _ in v.shape]
    mode = g.pick("edge", "wrap", "reflect")
    return lambda v: jnp.pad(v, by, mode)


def sliced(g, v):
    ends = [
        g.pick((0, n), (0, n), (min(1, n - 1), n), (0, -(-n // 2))) for n in v.shape
    ]
    steps = [g.pick(1, 1, 2) for _ in v.shape] if g.is_so() else None
    return lambda v: lax.slice(v, *zip(*ends, strict=True), steps)


def reversed_(g, v):
    axes = [d for d in range(v.ndim) if g.is_so()]
    return lambda v: lax.rev(v, axes)


def rolled(g, v):
    axes = tuple(d for d in range(v.ndim) if g.is_so())
    by = tuple(g.pick(-5, 1, 3) for _ in axes)
    return lambda v: jnp.roll(v, by, axes)


def joined(g, v):
    d, number = g.axis(v), g.pick(2, 3)
    at = int(g.rng.integers(v.shape[d] + 1))

    def move(v):
        parts = jnp.split(v, [at], d)
        return jnp.concatenate([*parts[::-1], v][:number], d)

    return move


def turned(g, v):
    axes = tuple(map(int, g.rng.permutation(v.ndim)))
    return lambda v: v.transpose(axes)


def shaped(g, v):
    first = g.pick(*(m for m in (1, 2, 3, 4, 6, 12) if v.size % m == 0))
    order = g.pick("C", "F")
    return lambda v: v.reshape(first, -1, order=order)


def tiled(g, v):
    d, times = g.axis(v), [g.pick(1, 2) for _ in v.shape]
    several = g.pick(lambda v: jnp.tile(v, times), lambda v: jnp.repeat(v, 2, d))
    return lambda v: several(v)


def _start(g, n, taken):
    """Where a slice of so many begins: a number, or one of the batch."""
    at = jnp.asarray(g.pick(0, 1, n - taken, n), jnp.int32)
    return at if g.is_so() else jnp.minimum(g.batch["ids"][1], at)


def dynamically_sliced(g, v):
    sizes = [g.pick(n, 1, max(n - 1, 1)) for n in v.shape]
    starts = [_start(g, n, m) for n, m in zip(v.shape, sizes, strict=True)]
    return lambda v: lax.dynamic_slice(v, starts, sizes)


def dynamically_updated(g, v):
    sizes = [g.pick(n, 1, max(n - 1, 1)) for n in v.shape]
    starts = [_start(g, n, m) for n, m in zip(v.shape, sizes, strict=True)]
    start = [n - m for n, m in zip(v.shape, sizes, strict=True)]
    return lambda v: lax.dynamic_update_slice(v, lax.slice(v, start, v.shape), starts)


def sorted_(g, v):
    d = g.axis(v)
    return lambda v: lax.sort(v, dimension=d)


# -- Indices, with every mode and with promises that hold ------------------------------


def _index(g, n, most):
    """An index into `n`, and how it is meant."""
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


MOVES = {
    build.__name__: _of_masks_too(build)
    for build in (
        *(padded, padded_by_itself, sliced, reversed_, rolled, joined, turned),
        *(shaped, tiled, dynamically_sliced, dynamically_updated, sorted_),
        *(gathered, gathered_along, scattered),
    )
}

# -- Anything else ---------------------------------------------------------------------


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


def sorted_by(g):
    """Some arrays by the first ones, or the largest of one."""
    v = g.one(1)
    d = g.axis(v)
    return g.pick(
        lambda: lax.sort((jnp.round(v * 4), v, -v), dimension=d, num_keys=1)[2],
        lambda: lax.sort((v % 0.5, jnp.sin(v)), dimension=d, num_keys=2)[1],
        lambda: lax.top_k(jnp.moveaxis(v, d, -1), 1)[0],
        lambda: jnp.median(v, d),
    )()


def convolved(g):
    """Rows are images, channels, filters, or what the window goes along."""
    v = g.one(2)
    v = v.reshape(-1, *v.shape[-2:]) if v.ndim > 2 else v[:, None]
    w = jnp.sin(1 + jnp.arange(4.0)).reshape(2, 1, 2) * (1 + g.params[3])
    steps, pads = (g.pick(1, 2),), g.pick("SAME", "VALID", [(1, 0)])
    conv, groups = lax.conv_general_dilated, v.shape[1]
    each = {"feature_group_count": groups}
    mean = jnp.ones((1, len(v), 1), v.dtype) * w[0, 0, 0]
    return small(
        g.pick(
            lambda: conv(v[:, :1], w, steps, pads),
            lambda: conv(v.transpose(1, 0, 2)[:1, :1], w, steps, pads),
            lambda: conv(v, jnp.tile(w, (groups, 1, 1)), steps, pads, **each),
            lambda: conv(v.T[:1].transpose(0, 2, 1), mean, steps, pads),
        )()
    )


def cumulated(g):
    v = g.one(1)
    f = g.pick(lax.cumsum, lax.cumprod, lax.cumlogsumexp, lax.cummax, lax.cummin)
    return small(f(v, g.axis(v), reverse=g.is_so()))


def largest(g):
    """The rows where something is largest."""
    v = g.one(2)
    d = g.axis(v)
    at = g.pick(jnp.argmax, jnp.argmin)(v, d)
    return jnp.take_along_axis(v, jnp.expand_dims(at, d), d)


def without_numbers(g):
    """A part that is empty goes the way of the rest."""
    v = g.one(1)
    d = g.axis(v)
    f = g.pick(
        lambda v: v[::-1] * 2,
        lambda v: jnp.cumsum(v, 0),
        lambda v: jnp.roll(v, 1, 0) * v.sum(0),
        lambda v: jnp.sort(v, -1),
        lambda v: v @ v.T @ v if v.ndim == 2 else v,
    )
    return small(jnp.concatenate([*map(f, jnp.split(v, [v.shape[d]], d))], d))


OTHERS = {
    f.__name__: f
    for f in (
        *(scattered_to, segmented, windowed, sorted_by, convolved, cumulated),
        *(largest, without_numbers),
    )
} | {name: f for name, f in GRAPH.items() if name != "around"}
STEPS = MOVES | OTHERS


if __name__ == "__main__":
    helpers.search(__doc__, functools.partial(outcome, draw=draw))
