"""Random Pallas kernels against the undivided ones, with the share that is split.

    python tests/whole_kernels.py 200             # as many, from seed 0 on
    python tests/whole_kernels.py 100 --first 500

A kernel has a grid of up to three axes, blocks and index maps of many kinds, operands
whose rows are along one axis or another, and a body that may read where it is, keep
scratch, or write where another program did. Every other one is of what is not
differentiated; the others are the forward rule of a function, and another random kernel
is the backward rule.
"""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from helpers import off, search
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import ga_optax as ga

N, D, HEADS = 8, 4, 2
BOUND = 1e-4  # in float32, of sums of at most some hundred terms of either sign

SHAPE = jax.ShapeDtypeStruct((N, D), jnp.float32)

# Where the rows of an operand are, and how a result of that shape becomes `[N, D]`.
VIEWS = {
    "rows": (lambda h: h, lambda o: o),
    "columns": (lambda h: h.T, lambda o: o.T),
    "heads": (
        lambda h: h.reshape(-1, D // HEADS),
        lambda o: o.reshape(-1, D),
    ),
    "segments": (
        lambda h: jnp.concatenate([h, 2 * h]),
        lambda o: o[: len(o) // 2] + o[len(o) // 2 :],
    ),
    "in between": (
        lambda h: jnp.stack([h, jnp.cos(h)], 1),
        lambda o: o[:, 0] - o[:, 1],
    ),
}

# Which block of a dimension a program has, given its places along two axes.
MAPS = {
    "itself": lambda blocks, i, j: i % blocks,
    "shared": lambda blocks, i, j: i // 2 % blocks,
    "next": lambda blocks, i, j: (i + 1) % blocks,
    "flipped": lambda blocks, i, j: blocks - 1 - i % blocks,
    "skipped": lambda blocks, i, j: i * 3 % blocks,
    "of both": lambda blocks, i, j: (i + j) % blocks,
    "at most": lambda blocks, i, j: jnp.minimum(i + j, blocks - 1),
}


class Array(NamedTuple):
    """How programs read or write an array.

    Attributes:
      view: where its rows are; None if all have the same numbers.
      shape: its shape.
      block: the block of each dimension, None for one index.
      maps: for each dimension the kind of its index map and two axes; None for 0.
    """

    view: str | None
    shape: tuple[int, ...]
    block: tuple[int | None, ...]
    maps: tuple[tuple[str, int, int] | None, ...]

    def spec(self):
        def index(*ids):
            found = []
            for n, b, how in zip(self.shape, self.block, self.maps, strict=True):
                if how is None:
                    found.append(jnp.int32(0))
                    continue
                kind, i, j = how
                found.append(MAPS[kind](n // (b or 1), ids[i], ids[j]))
            return tuple(found)

        return pl.BlockSpec(self.block, index)


class Kernel(NamedTuple):
    """A random kernel.

    Attributes:
      grid: its grid.
      arrays: its operands, then its result.
      body: what programs do beside reading operands and writing a result.
      axis: the axis of the grid that this is about.
      vmapped: which of the operands `jax.vmap` maps, if it is over several of it.
      semantics: what is said about the axes of the grid.
    """

    grid: tuple[int, ...]
    arrays: tuple[Array, ...]
    body: frozenset[str]
    axis: int
    vmapped: tuple[bool, ...] | None
    semantics: tuple[str, ...] | None

    def __call__(self, *operands):
        """A result `[N, D]` of operands `[N, D]`, and of a matrix `[N, D]` for all."""
        *ins, out = self.arrays
        xs = [
            x if a.view is None else VIEWS[a.view][0](x)
            for x, a in zip(operands, ins, strict=True)
        ]
        if self.vmapped is None:
            found = self.call(*xs)
        else:
            each = [
                jnp.stack([x, 2 * x]) if m else x
                for x, m in zip(xs, self.vmapped, strict=True)
            ]
            axes = [0 if m else None for m in self.vmapped]
            found = jax.vmap(self.call, axes)(*each).sum(0)
        found = jnp.nan_to_num(found)  # what no program wrote
        return (
            VIEWS[out.view][1](found) if out.view else jnp.zeros((N, D)) + found.sum()
        )

    @property
    def call(self):
        *ins, out = self.arrays
        scratch = [pltpu.VMEM((1, D), jnp.float32)] if "scratch" in self.body else []
        more = {}
        if self.semantics is not None:
            semantics = self.semantics
            more["compiler_params"] = pltpu.CompilerParams(
                dimension_semantics=semantics
            )
        if "alias" in self.body:
            more["input_output_aliases"] = {0: 0}
        return pl.pallas_call(
            self.program,
            grid=self.grid,
            in_specs=[a.spec() for a in ins],
            out_specs=out.spec(),
            out_shape=jax.ShapeDtypeStruct(out.shape, jnp.float32),
            scratch_shapes=scratch,
            cost_estimate=pl.CostEstimate(
                flops=64, bytes_accessed=64, transcendentals=64
            ),
            interpret=True,
            **more,
        )

    def program(self, *refs):
        ins = refs[: len(self.arrays) - 1]
        out, *scratch = refs[len(ins) :]
        value = jnp.zeros(out.shape)
        for i, ref in enumerate(ins):
            x = ref[...]
            x = x if x.shape == out.shape else jnp.full(out.shape, jnp.mean(x))
            value = value + (i + 1) * jnp.tanh(x)
        if "place" in self.body:
            value = value * (1 + pl.program_id(self.axis)).astype(value.dtype)
        if "number" in self.body:
            value = value / pl.num_programs(self.axis)
        if "writes" in self.body:
            ins[-1][...] = ins[-1][...] * 0.5
        if scratch:
            value = value + self.carried(scratch[0], value)
        if "adds" in self.body:
            value = value + jnp.nan_to_num(out[...])
        out[...] = value

    def carried(self, scratch, value):
        """What earlier programs left, from the last that began anew."""
        old = jnp.nan_to_num(scratch[...])
        if self.semantics is not None:  # then it begins where the last axis does
            old = jnp.where(pl.program_id(len(self.grid) - 1) == 0, 0.0, old)
        scratch[...] = old + jnp.mean(value)
        return jnp.mean(old)


# -- By hand ---------------------------------------------------------------------------


def array(view="rows", kind="itself", block=1):
    """An array with such blocks of rows, one for each place on the first axis."""
    shape = (1, D) if view is None else jax.eval_shape(VIEWS[view][0], SHAPE).shape
    maps = (kind and (kind, 0, 0), *[None] * (len(shape) - 1))
    return Array(view, shape, (block, *shape[1:]), maps)


def kernel(*arrays, grid=(N,), body=(), semantics=None):
    """A kernel of operands and a result; from each row to itself if none are given."""
    arrays = arrays or (array(), array())
    return Kernel(grid, arrays, frozenset(body), 0, None, semantics)


# -- Drawing ---------------------------------------------------------------------------


def drawn(seed):
    """A forward and a backward kernel, and how many micro-batches."""
    rng = np.random.default_rng(seed)
    return _kernel(rng), _kernel(rng), int(rng.choice([2, 4]))


def _kernel(rng):
    sizes = [int(rng.choice([2, 4, 8, 16])) for _ in range(rng.integers(1, 4))]
    axis = int(rng.integers(len(sizes)))
    strange = rng.random() < 0.2  # the others mostly go straight along the rows
    if not strange:
        sizes = [2] * len(sizes)
        sizes[axis] = int(rng.choice([4, 8, 8, 16]))
    place = _Place(tuple(sizes), axis, strange)
    # Rows in segments are not next to those that lie otherwise.
    names = (
        ["segments"] if rng.random() < 0.2 else [v for v in VIEWS if v != "segments"]
    )
    names = list(VIEWS) if strange else names
    views = [None if rng.random() < 0.3 else _choice(rng, names) for _ in range(3)]
    out = None if strange and rng.random() < 0.2 else _choice(rng, names)
    arrays = [_array(rng, view, place) for view in (*views, out)]
    likely = {"place": 0.1, "number": 0.1, "writes": 0.1, "scratch": 0.15, "adds": 0.15}
    body = {name for name, p in likely.items() if rng.random() < p}
    if rng.random() < 0.3 and arrays[0].shape == arrays[-1].shape:
        body.add("alias")
    vmapped = semantics = None
    if rng.random() < 0.2:
        vmapped = tuple(bool(x) for x in rng.random(3) < 0.6)
        vmapped = vmapped if any(vmapped) else (True, False, False)
    if "scratch" in body and rng.random() < 0.6:
        semantics = (*["parallel"] * (len(sizes) - 1), "arbitrary")
    return Kernel(place.grid, tuple(arrays), frozenset(body), axis, vmapped, semantics)


class _Place(NamedTuple):
    """A grid, its axis that rows are along, and whether index maps may be anything."""

    grid: tuple[int, ...]
    axis: int
    strange: bool


def _choice(rng, names):
    return str(rng.choice(list(names)))


def _array(rng, view, place):
    shape = (N, D) if view is None else jax.eval_shape(VIEWS[view][0], SHAPE).shape
    along, length = {"columns": 1}.get(view, 0), place.grid[place.axis]
    others = [i for i in range(len(place.grid)) if i != place.axis or place.strange]
    block, maps = [], []
    for d, n in enumerate(shape):
        is_rows = d == along and (view is not None or rng.random() < 0.3)
        if is_rows and (not place.strange or rng.random() < 0.6):
            kind = "itself" if n >= length else "shared"
            size = max(n // length, 1)
            maps.append((kind, place.axis, place.axis))
        else:
            size = int(rng.choice([1, n // 2, n]))
            kind = _choice(rng, MAPS)
            used = rng.choice(others, 2) if others and rng.random() < 0.5 else ()
            maps.append((kind, *map(int, used)) if len(used) else None)
        block.append(size if size > 1 or rng.random() < 0.5 else None)
    return Array(view, shape, tuple(block), tuple(maps))


# -- Checking --------------------------------------------------------------------------


def function(forward, backward):
    """A function of rows and of a matrix for all, with those two kernels as rules."""

    @jax.custom_vjp
    def fun(h, c):
        return forward(h, jnp.sin(h), c)

    def derived(saved, ct):
        h, c = saved
        return backward(h, ct, c), jnp.ones_like(c) * ct.sum()

    fun.defvjp(lambda h, c: (fun(h, c), (h, c)), derived)
    return fun


class Checked(NamedTuple):
    """How far value and gradients are off, and what was computed whole."""

    error: float
    whole: list[str]


def check(seed):
    """Compares random kernels over micro-batches with undivided ones."""
    forward, backward, k = drawn(seed)
    fun = function(forward, backward)

    def loss(params, x):
        if seed % 2:
            y = forward(x, jnp.sin(x), jax.lax.stop_gradient(params["c"])) @ params["w"]
        else:
            y = fun(x @ params["w"], params["c"])
        return jnp.mean(y**2) + jnp.mean(y)

    rng = np.random.default_rng(seed)
    w, c, x = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((D, D), (N, D), (N, D))
    )
    args = {"w": w, "c": c}, x
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*computed whole")
        got = jax.jit(ga.value_and_grad(loss, k))(*args)
    want = jax.jit(jax.value_and_grad(loss))(*args)
    notes = ga.batch_dependencies(loss, k)(*args).whole
    return Checked(off(got, want), [note.name for note in notes])


def outcome(seed):
    error, whole = check(seed)
    is_wrong = not error < BOUND
    return "whole" if whole else "split", is_wrong and f"{error}\n{drawn(seed)}"


if __name__ == "__main__":
    search(__doc__, outcome)
