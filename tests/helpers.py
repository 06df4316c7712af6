"""What several test files use; oracle.py has the oracles, conftest.py the policy."""

import argparse
import collections
import contextlib
import functools
import importlib.util
import math
import os
import pathlib
import re
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ga_optax as ga
from ga_optax._loop import in_place
from ga_optax._loop import micro_step as loop_micro_step
from ga_optax._passes import jaxprs
from ga_optax._passes import table as passes_table
from ga_optax._passes.effects import Reason

ROOT = pathlib.Path(__file__).parents[1]
# Each mode of the aux of `accumulate`, of numbers of micro-batches and their weights.
MODES = {
    "mean": lambda x, weights: np.average(x, axis=0, weights=weights),
    "sum": lambda x, _: np.sum(x, axis=0),
    "last": lambda x, _: x[-1],
    "stack": lambda x, _: x,
    "max": lambda x, _: np.max(x, axis=0),
    "min": lambda x, _: np.min(x, axis=0),
}
SKIPS = {"should_skip_update_fn": optax.skip_not_finite}
DROPS = {"should_drop_window_fn": ga.drop_window_if_not_finite}


def bits(tree):
    """The dtypes and the bytes of a tree's leaves: equal if every bit is."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    assert leaves  # nothing equals nothing
    return [(leaf.dtype, leaf.tobytes()) for leaf in leaves]


def off(got, want):
    """The largest difference, in parts of the largest number of its leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert jax.tree.leaves(want)  # nothing equals nothing
    return max(map(_off, jax.tree.leaves(got), jax.tree.leaves(want)))


def _off(x, y):
    x, y = np.asarray(x), np.asarray(y)
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return np.inf
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        return 0.0 if np.array_equal(x, y) else np.inf
    wide = complex if np.iscomplexobj(y) else float
    x, y = x.astype(wide), y.astype(wide)
    with np.errstate(invalid="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        error = np.abs(np.where(same, 0, x - y)).max(initial=0)
    largest = np.abs(np.where(np.isfinite(y), y, 0)).max(initial=1e-3)
    return float(error / largest) if np.isfinite(error) else np.inf


def apart(ours, plain, *args):
    """How far two functions, compiled, are from each other."""
    return off(jax.jit(ours)(*args), jax.jit(plain)(*args))


@functools.lru_cache(maxsize=64)
def undivided(fun, **options):
    """Value and gradients of the whole batch, compiled once for all who compare."""
    return jax.jit(jax.value_and_grad(fun, **options))


def error(fun, k, *args, **options):
    """How far value and gradients of micro-batches are off those of the whole batch."""
    return apart(ga.value_and_grad(fun, k, **options), undivided(fun), *args)


def array(*shape, scale=1.0, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)


def on_cpus():
    """Whether XLA's backend is that of CPUs, which fuses and rounds in its own way."""
    return jax.default_backend() == "cpu"


def assert_quotients(got, want):
    """Quotients in float32 are rounded correctly, as NumPy's.

    XLA divides by `div.full.f32` on NVIDIA's GPUs, which is off by at most 2 ULPs, by
    the manual of PTX.
    """
    digits = 0 if on_cpus() else 2
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_max_ulp(np.asarray(x), np.asarray(y), digits)


def mesh_of(*sizes, names=("data",), kind=AxisType.Auto):
    """A mesh of the first devices: four, unless sizes are given."""
    sizes = sizes or (4,)
    devices = jax.devices()[: math.prod(sizes)]
    if len(devices) < math.prod(sizes) and not on_cpus():
        pytest.skip(f"needs {math.prod(sizes)} devices", allow_module_level=True)
    return jax.make_mesh(sizes, names, (kind,) * len(names), devices=devices)


def put(tree, mesh, specs):
    """A tree where a spec, or a tree of specs, says on a mesh."""
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    place = functools.partial(NamedSharding, mesh)
    return jax.device_put(tree, jax.tree.map(place, specs, is_leaf=is_spec))


def mean_of(fun, num_microbatches=1, *, accumulator_dtype=jnp.float32, **options):
    """Value and mean gradient of micro-batches, each by itself, by `ga.accumulate`."""
    step = ga.accumulate(fun, num_microbatches, **options)
    argnums = options.get("argnums", 0)

    def value_and_grad(*args, **kwargs):
        one = isinstance(argnums, int)
        params = args[argnums] if one else tuple(args[i] for i in argnums)
        acc = ga.accumulator.init(params, accumulator_dtype)
        value, acc = step(acc, *args, **kwargs)
        grads = ga.accumulator.mean(acc)
        return value, jax.tree.map(
            lambda g, p: g.astype(jnp.result_type(p)), grads, params
        )

    return value_and_grad


def plain_scan(loss, k, dtype=None):
    """What one would write: a scan that adds up values and gradients."""

    def window(params, x):
        def micro_step(carry, part):
            new = jax.value_and_grad(loss)(params, part)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), carry, new), None

        start = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype or p.dtype), params)
        parts = jnp.reshape(x, (k, -1, *x.shape[1:]))
        sums, _ = jax.lax.scan(micro_step, (jnp.zeros([]), start), parts)
        means = jax.tree.map(lambda g, p: (g / k).astype(p.dtype), sums[1], params)
        return sums[0] / k, means

    return window


def in_calls(fun, params, batch, grouping, **options):
    """The last value and the mean of a window, in calls of so many micro-batches."""
    acc, start = ga.accumulator.init(params), 0
    size = len(jax.tree.leaves(batch)[0]) // sum(grouping)
    for number in grouping:
        here = slice(start * size, (start + number) * size)
        part = jax.tree.map(lambda x, here=here: x[here], batch)
        value, acc = jax.jit(ga.accumulate(fun, number, **options))(acc, params, part)
        start += number
    return value, jax.jit(ga.accumulator.mean)(acc)


def by_hand(optimize=False):
    """What is traced inside adds no gradient in place; nothing else changes."""
    if optimize:
        return contextlib.nullcontext()
    reasons = in_place.reasons_not_in_place

    def nowhere(*args):
        return [why or Reason("by hand") for why in reasons(*args)]

    return mock.patch.object(in_place, "reasons_not_in_place", nowhere)


def failing(error, file=ga.__file__):
    """A function that raises an error, as if it stood in a file: one of the library."""
    names = {"error": error}
    exec(compile("def rule(*_, **__): raise error", file, "exec"), names)
    return names["rule"]


def without_pass(monkeypatch, name):
    """Takes a pass out of the table."""
    rest = tuple(one for one in passes_table.PASSES if one.name != name)
    assert len(rest) == len(passes_table.PASSES) - 1
    monkeypatch.setattr(passes_table, "PASSES", rest)


def with_pass(monkeypatch, name, change):
    """Puts another pass in the place of one."""
    assert name in {one.name for one in passes_table.PASSES}
    passes = ((one, one._replace(change=change)) for one in passes_table.PASSES)
    new = tuple(other if one.name == name else one for one, other in passes)
    monkeypatch.setattr(passes_table, "PASSES", new)


def without_fence_of_consts(monkeypatch):
    """Leaves what has no role, as frozen parameters, out of the fence of a loop."""
    whole = loop_micro_step.fusion_barrier

    def without_consts(tree):
        if isinstance(tree, tuple) and len(tree) == 4:
            return tree[0], *whole(tree[1:])
        return whole(tree)

    monkeypatch.setattr(loop_micro_step, "fusion_barrier", without_consts)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def integers(*shape, seed=0):
    """Small ones, in float32, whose sums are exact."""
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float32)


def squares(w, x):
    """A loss whose rows do not meet."""
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def with_rule(fun, backward, saves=lambda *args: args):
    """A function whose backward rule is `backward(what it saves, cotangent)`."""
    ruled = jax.custom_vjp(fun)
    ruled.defvjp(lambda *args: (fun(*args), saves(*args)), backward)
    return ruled


def leaves_of(*trees):
    """The leaves of trees side by side, which have as many."""
    return zip(*map(jax.tree.leaves, trees), strict=True)


def ruled(back, fun=lambda x: x):
    """A function, the identity if none is given, with a rule for its cotangent."""
    return with_rule(fun, lambda _, ct: (back(ct),), saves=lambda x: None)


KINDS = {"V": ValueError, "T": TypeError, "A": AttributeError, "E": AssertionError}


def refusals(table):
    """The rows `code -> V parts | of the message` of a table, an error each."""
    rows = re.sub(r"\n +", " ", table).splitlines()
    pairs = (row.split(" -> ", 1) for row in rows if " -> " in row)
    return [(code, KINDS[said[0]], said[2:]) for code, said in pairs]


def says(call, error, parts):
    """A call raises such an error, whose message has these parts in their order."""
    with pytest.raises(error) as raised:
        call()
    message, at = " ".join(str(raised.value).split()), 0
    for part in parts.split(" | "):
        assert part in message[at:], message
        at = message.index(part, at)


def times_rate():
    """An optimizer that returns minus the gradient times the extra argument `rate`."""

    def update(updates, state, params=None, *, rate, **extra_args):
        del params, extra_args
        return jax.tree.map(lambda g: -g * rate, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def train(tx, grads, params, weights=None, emits=None, state=None):
    """(parameters, state) after each of some micro-steps by `apply_gradients`."""
    state, seen = tx.init(params) if state is None else state, []
    static = () if isinstance(emits, jax.Array) else "emit"
    step = jax.jit(functools.partial(ga.apply_gradients, tx), static_argnames=static)
    nothing = [None] * len(grads)
    emits, weights = nothing if emits is None else emits, weights or nothing
    for g, emit, weight in zip(grads, emits, weights, strict=True):
        params, state = step(g, state, params, emit=emit, weight=weight)
        seen.append((params, state))
    return seen


def updates_of(tx, grads, params, weights=None):
    """(updates, state) of each of some micro-steps by `update`."""
    state, seen = tx.init(params), []
    update = jax.jit(functools.partial(tx.update))  # traced anew
    for g, weight in zip(grads, weights or [None] * len(grads), strict=True):
        updates, state = update(g, state, params, weight=weight)
        params = optax.apply_updates(params, updates)
        seen.append((updates, state))
    return seen


def started(*arguments, cwd=None, **environment):
    """Python in a process of its own, which finds what this one finds."""
    path, pipe = os.pathsep.join(filter(None, sys.path)), subprocess.PIPE
    env = os.environ | {"PYTHONPATH": path} | environment
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True
    )


def python(*arguments, timeout=300, **options):
    """What such a process says, and its exit status, once it has ended."""
    with started(*arguments, **options) as process:
        try:
            said = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, *said)


def load(path):
    """The module that a script is, executed anew."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_benchmarks(*names):
    """Modules of the folder of benchmarks, where they find each other."""
    with mock.patch.object(sys, "path", [str(ROOT / "benchmarks"), *sys.path]):
        return list(map(importlib.import_module, names))


def search(doc, outcome):
    """Runs a script by many seeds; `outcome(seed)` is its kind, and what is wrong."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("number", type=int)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_num_cpu_devices", 4)
    counts = collections.Counter()
    for done in range(given.number):
        seed = given.first + done
        kind, wrong = outcome(seed)
        counts[kind] += 1
        if wrong:
            counts["wrong"] += 1
            print(f"seed {seed}: {wrong}", flush=True)
        if done % 50 == 49:
            jax.clear_caches()
            print(f"{done + 1} so far, {dict(counts)}", flush=True)
    print(f"of {given.number}: {dict(counts)}")
    raise SystemExit(counts["wrong"] > 0)


def temporaries(jitted, *args):
    """The temporaries of a jitted function in bytes, compiled for these arguments."""
    # On GPUs the order of sums that conftest asks for takes room for cuBLAS.
    usual = {"xla_gpu_deterministic_ops": False, "xla_gpu_autotune_level": 4}
    compiled = jitted.lower(*args).compile(None if on_cpus() else usual)
    return compiled.memory_analysis().temp_size_in_bytes


def needed(compiled):
    """The bytes that a compiled program needs on a device."""
    memory = compiled.memory_analysis()
    parts = (
        memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    # jax 0.10 has none, and of a GPU's program that was in a cache it is 0.
    return getattr(memory, "total_allocation_bytes", 0) or parts


def nbytes(tree):
    """The bytes of a tree's leaves, of arrays or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def products(fun, *args):
    """How often a program multiplies matrices, and how often bfloat16 gives float32."""

    def count(jaxpr):
        found = np.zeros(2, int)
        for e in jaxpr.eqns:
            if e.primitive.name == "dot_general":
                low = e.invars[0].aval.dtype == "bfloat16"
                found += [1, low and e.outvars[0].aval.dtype == "float32"]
            inside = list(map(count, jaxprs.inner_programs(e)))
            if e.primitive.name == "cond":
                inside = [max(inside, key=tuple)]
            found += e.params.get("length", 1) * sum(inside, np.zeros(2, int))
        return found

    # JAX keeps what it traced of a function.
    closed = jax.make_jaxpr(lambda *args: fun(*args))(*args)
    return tuple(count(closed.jaxpr).tolist())
