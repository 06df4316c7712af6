"""Carries that some versions of XLA would lose have a fence, with these versions alone.

What their compilers make of it is in `accelerators/test_rows_kept.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

import ga_optax as ga
from ga_optax import accumulator
from ga_optax._passes import jaxprs
from ga_optax.testing import assert_trees_bitwise_equal

K, ROWS, WORDS, WIDTH = 2, 8, 12, 4


def looked_up(p, b):
    return jnp.mean(p["table"][b["ids"]].astype(jnp.float32) * b["y"])


def in_layers(p, b):
    def layer(h, w):
        return jnp.tanh(h * w) + p["table"][b["ids"]], None

    h = jax.lax.scan(jax.checkpoint(layer), b["y"].astype(p["w"].dtype), p["w"])[0]
    return jnp.mean(h.astype(jnp.float32))


def rows_meet(p, b):
    h = p["table"][b["ids"]].astype(jnp.float32) * b["y"]
    return jnp.mean(jax.nn.logsumexp(jnp.sum(h, 1), 0))


def summed_by_word(p, b):
    s = jnp.zeros((WORDS, WIDTH), b["y"].dtype).at[b["ids"]].add(b["y"])
    return jnp.mean(jnp.tanh(s * p["table"].astype(s.dtype)))


@jax.custom_vjp
def read(table, ids):
    return table[ids]


read.defvjp(
    lambda table, ids: (table[ids], (table, ids)),
    lambda kept, g: (jnp.zeros_like(kept[0]).at[kept[1]].add(g), None),
)


def with_a_rule(p, b):
    return jnp.mean(read(p["table"], b["ids"]).astype(jnp.float32) * b["y"])


def counted(p, b):
    number = jnp.zeros(WORDS * WIDTH, jnp.int32).at[b["ids"].reshape(-1)].add(1)
    return looked_up(p, b), number


def arguments(dtype):
    p = {
        "table": normal(WORDS, WIDTH).astype(dtype),
        "w": normal(3, 1, 1, 1).astype(dtype),
    }
    ids = np.random.default_rng(0).integers(0, WORDS, (ROWS, 3)).astype(np.int32)
    return p, {
        "ids": jnp.asarray(ids),
        "y": normal(ROWS, 3, WIDTH, seed=1).astype(jnp.float32),
    }


def each(loss, **options):
    """Into an accumulator, micro-batches each by itself."""

    def run(p, b):
        return ga.accumulate(loss, K, **options)(accumulator.init(p), p, b)

    return run


def by_hand(p, b):
    """A loop of the caller's around `accumulator.add`."""

    def step(acc, x):
        return accumulator.add(acc, jax.grad(looked_up)(p, x)), None

    xs = jax.tree.map(lambda x: x.reshape(K, -1, *x.shape[1:]), b)
    return jax.lax.scan(step, accumulator.init(p), xs)[0]


LOSSES = looked_up, in_layers, rows_meet, summed_by_word, with_a_rule
CASES = {
    "by hand": by_hand,
    "aux": ga.value_and_grad(counted, K, has_aux=True),
    "accumulate, aux": each(counted, has_aux=True, aux="sum"),
    "accumulate, weighted": each(looked_up, weight_fn=lambda b: jnp.sum(b["ids"] > 2)),
    "uneven": ga.value_and_grad(looked_up, 3),
}
# Of these the program is written when JAX lowers it.
WRITTEN_LATE = {
    "derivative": jax.grad(lambda p, b: each(in_layers, optimize=False)(p, b)[0])
}
for loss in LOSSES:
    name = loss.__name__
    CASES[name] = ga.value_and_grad(loss, K)
    CASES[f"{name}, plain"] = ga.value_and_grad(loss, K, optimize=False)
    WRITTEN_LATE[name] = jax.value_and_grad(ga.microbatch(loss, K))


def bare(program):
    """The carries of scans that rows may be added to, and that something reads bare."""
    found = []
    for e in jaxprs.equations(program.jaxpr):
        if jaxprs.kind(e) != "scan":
            continue
        how = jaxprs.scan_of(e)
        body = how.body.jaxpr
        scatters = [x for x in jaxprs.equations(body) if "scatter" in x.primitive.name]
        sizes = {x.aval.size for e in scatters for x in e.outvars}
        for x in how.split(body.invars)[1]:
            read = {e.primitive.name for e, _ in jaxprs.uses(body, x)}
            if x.aval.size in sizes and read - {"optimization_barrier"}:
                found.append(x)
    return found


@pytest.mark.grid(4, 15)
@pytest.mark.parametrize("name", CASES)
def test_rows_are_added_to_a_carry_behind_a_fence(name, monkeypatch):
    p, b = arguments(jnp.float32)
    monkeypatch.setattr(accumulator, "LOSES_ROWS", True)
    assert bare(jax.make_jaxpr(lambda *args: CASES[name](*args))(p, b)) == []
    # The twin, which is what runs with other versions.
    monkeypatch.setattr(accumulator, "LOSES_ROWS", False)
    assert bare(jax.make_jaxpr(lambda *args: CASES[name](*args))(p, b))


@pytest.mark.grid(1, 3)
@pytest.mark.parametrize("name", WRITTEN_LATE)
def test_so_they_are_in_derivatives(name, monkeypatch):
    number = []
    for fenced in (True, False):
        monkeypatch.setattr(accumulator, "LOSES_ROWS", fenced)
        step = jax.jit(lambda *args: WRITTEN_LATE[name](*args))
        text = step.lower(*arguments(jnp.float32)).as_text()
        number.append(text.count("optimization_barrier"))
    assert number[0] > number[1]


@pytest.mark.grid(1, 5)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_fence_changes_no_bit(loss, dtype, monkeypatch):
    found = []
    with jax.enable_x64(dtype == jnp.float64):
        args = arguments(dtype)
        for fenced in (True, False):
            monkeypatch.setattr(accumulator, "LOSES_ROWS", fenced)
            step = jax.jit(lambda *args: ga.value_and_grad(loss, K)(*args))
            found.append(step(*args))
    assert_trees_bitwise_equal(*found)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("version", "due"),
    [
        ("0.10.0", False),
        ("0.10.1", True),
        ("0.11.2", True),
        ("0.11.3.dev20260912", True),
        ("0.12.0", False),
        ("1.0.0rc1", False),
    ],
)
def test_the_versions_that_lose_rows(version, due):
    assert accumulator.loses_rows(version) == due
