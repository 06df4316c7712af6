"""Random losses against `jax.value_and_grad`, with the share that is computed whole.

    python tests/whole_random.py 2000             # as many, from seed 0 on
    python tests/whole_random.py 100 --first 500

Every other loss is a graph of values of several shapes (`whole_graphs`), and goes
through `value_and_grad` and `microbatch`, some of them also on four devices. The others
take steps of `whole_programs` and `whole_steps`, of one batch argument or of several,
with rows along one axis or another, and may return aux that has rows. A number is wrong
if it is off by more than 1e-9 of the largest of its leaf, in float64, and by more than
1e4 times what a change of the parameters by an ulp makes of it.
"""

import argparse
import collections
import contextlib
import warnings
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from whole_graphs import draw as draw_graph
from whole_programs import LOSSES, STEPS, D, N
from whole_steps import MORE_STEPS

import ga_optax as ga
from ga_optax._calls import layouts

BOUND = 1e-9


class Program(NamedTuple):
    """A random loss, and how it is called.

    Attributes:
      names: its steps.
      loss: its end.
      k: how many micro-batches.
      axis: the axis of the rows of its first batch argument.
      several: whether it has several batch arguments, rather than one.
      has_aux: whether it returns aux.
    """

    names: tuple[str, ...]
    loss: str
    k: int = 3
    axis: int = 0
    several: bool = False
    has_aux: bool = False

    def __call__(self, params, *batch):
        x, rest = batch if self.several else (batch[0]["x"], batch[0])
        h = x.T if self.axis else x
        for name, w in zip(self.names, params, strict=True):
            if name in MORE_STEPS:
                h = MORE_STEPS[name](h, w, rest)
            else:
                h = STEPS[name](h, w)
        value = LOSSES[self.loss](h, params[0], rest["y"])
        if not self.has_aux:
            return value
        aux = {"rows": h, "columns": h.T, "mean": h.mean(0), "ids": rest["ids"] + 1}
        return value, aux | {"count": rest["mask"].sum(), "first": params[0]}

    def arguments(self, seed=0):
        rng = np.random.default_rng(seed)
        params = [jnp.asarray(rng.normal(size=(D, D)) * 0.4) for _ in self.names]
        x, y = (jnp.asarray(rng.normal(size=(N, D))) for _ in range(2))
        ids = jnp.asarray(rng.integers(0, 3, N), jnp.int32)
        rest = {"y": y, "ids": ids, "mask": jnp.asarray(rng.random(N) < 0.6)}
        x = x.T if self.axis else x
        return (params, x, rest) if self.several else (params, rest | {"x": x})

    def in_all_ways(self):
        x = self.axis
        rest = dict.fromkeys(("y", "ids", "mask"), 0)
        yield ga.value_and_grad(
            self,
            self.k,
            batch_argnums=(1, 2) if self.several else 1,
            batch_axes=(x, rest) if self.several else rest | {"x": x},
            has_aux=self.has_aux,
            accumulator_dtype="float64",
        )


def draw(seed):
    return draw_graph(seed) if seed % 2 else draw_steps(seed)


def draw_steps(seed):
    rng = np.random.default_rng(seed)
    names = rng.choice([*STEPS, *MORE_STEPS], rng.integers(1, 5))
    return Program(
        tuple(map(str, names)),
        str(rng.choice(list(LOSSES))),
        int(rng.choice([2, 3, 4, 6, 12])),
        int(rng.random() < 0.2),
        bool(rng.random() < 0.4),
        bool(rng.random() < 0.4),
    )


class Checked(NamedTuple):
    """How far a program is off, and what was computed whole; None if not finite."""

    error: float | None
    whole: list[str]
    failures: list[Exception]


def check(program):
    """Compares a program over micro-batches with `jax.value_and_grad`."""
    with float64(), recorded() as parts, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*computed whole")
        args = program.arguments()
        reference = jax.jit(jax.value_and_grad(program, has_aux=program.has_aux))
        want = reference(*args)
        found = [jax.jit(step)(*args) for step in program.in_all_ways()]
        names = [note.name for part in parts for note in part.whole]
        failures = [error for part in parts for error in part.failures]
        if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(want)):
            return Checked(None, names, failures)
        error = max(off(got, want) for got in found)
        if error > BOUND:  # is it the numbers that are badly conditioned?
            near = jax.tree.map(lambda p: p * (1 + 2**-52), args[0])
            error = error if error > 1e4 * off(reference(near, *args[1:]), want) else 0
        return Checked(error, names, failures)


@contextlib.contextmanager
def float64():
    """Not `jax.enable_x64`, which callbacks in other threads know nothing of."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


@contextlib.contextmanager
def recorded():
    """What is partitioned here."""
    found = []

    def partition(*args):
        found.append(plain(*args))
        return found[-1]

    plain = layouts.partition
    with mock.patch.object(layouts, "partition", partition):
        yield found


def off(got, want):
    """The largest difference, of the largest number of its leaf; integers are equal."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    errors = [0.0]
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = np.asarray(x), np.asarray(y)
        if not np.issubdtype(y.dtype, np.inexact):
            errors.append(0.0 if np.array_equal(x, y) else np.inf)
        else:
            error = np.abs(x - y).max() / (np.abs(y).max() + 1e-3)
            errors.append(float(error) if np.isfinite(error) else np.inf)
    return max(errors)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("number", type=int)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_num_cpu_devices", 4)
    counts, primitives = collections.Counter(), collections.Counter()
    for seed in range(given.first, given.first + given.number):
        counts["programs"] += 1
        program = draw(seed)
        try:
            found = check(program)
        except Exception as error:
            counts["wrong"] += 1
            print(f"seed {seed} raises: {program}\n  {error!r:.400}", flush=True)
            continue
        counts["not finite"] += found.error is None
        counts["whole"] += bool(found.whole)
        primitives.update(set(found.whole))
        if (found.error or 0) > BOUND or found.failures:
            counts["wrong"] += 1
            what = f"off by {found.error}, {found.failures}"
            print(f"seed {seed} is wrong: {program}\n  {what}", flush=True)
        if counts["programs"] % 50 == 0:
            jax.clear_caches()
            print(summary(counts, primitives), flush=True)
    print(summary(counts, primitives))
    raise SystemExit(counts["wrong"] > 0)


def summary(counts, primitives):
    share = counts["whole"] / max(counts["programs"], 1)
    most = ", ".join(f"{name} {number}" for name, number in primitives.most_common())
    return (
        f"{counts['programs']} programs, {counts['wrong']} wrong, "
        f"{counts['not finite']} not finite; {share:.1%} have something that is "
        f"computed whole ({most})"
    )


if __name__ == "__main__":
    main()
