"""Functions with rules of their own in which rows meet, there or on the way back."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import error, mesh_of, off, put, undivided
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

import ga_optax as ga

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore:.*The Fp8DotGeneralOp is deprecated"),
]
BOUND = 1e-11  # of float64, as in `test_law_mended`
N, D, K = 12, 5, 3


def with_rule(forward, backward):
    ruled = jax.custom_vjp(lambda *args: forward(*args)[0])
    ruled.defvjp(forward, backward)
    return ruled


def with_tangent(fun, tangent):
    ruled = jax.custom_jvp(fun)
    ruled.defjvp(lambda xs, ts: (fun(*xs), tangent(*xs, *ts)))
    return ruled


def product(backward):
    """`h * s`, with a rule for the cotangents of both."""
    return with_rule(lambda h, s: (h * s, (h, s)), lambda saved, g: backward(*saved, g))


def product_of(of_rows):
    """The same, of which only the cotangent of rows is another."""
    return product(lambda h, s, g: (of_rows(h, s, g) * s, jnp.sum(g * h)))


def normed(g):
    return (g - g.mean(0)) / jnp.sqrt(g.var(0) + 1e-3)


def turned(c, _):
    return jnp.sin(c) - 0.5 * c.mean(0), None


def largest(h):
    return jnp.max(jnp.abs(h))


def by_an_array(g):
    return jnp.sum(g[..., None] * np.array([0.5, 0.7]), -1)


RULES = {
    # The cotangent of what is whole is of all rows.
    "extrema": product(lambda h, s, g: (g * s, g.min() + jnp.abs(g).max(0).sum())),
    "of both": with_rule(
        lambda h, s: (h * s, (s, largest(h))),
        lambda r, g: (g * r[0], r[1] * largest(g)),
    ),
    "no cotangent": with_rule(
        lambda h, s: (h * s, (h, largest(h))), lambda r, g: (None, r[1])
    ),
    "affine": product(lambda h, s, g: (g * s + 1, jnp.sum(g * h) + 2)),
    # That of rows is.
    "centred": product_of(lambda h, s, g: g - g.mean(0)),
    "centred and clipped": product_of(lambda h, s, g: jnp.clip(g - g.mean(0), -0.1, 1)),
    "two levels and a maximum": product(
        lambda h, s, g: (normed(g) * s, largest(g - g.mean(0)) + s)
    ),
    "a clipped norm": product_of(
        lambda h, s, g: g * jnp.minimum(1, 0.01 / jnp.linalg.norm(g))
    ),
    "turned over": product_of(lambda h, s, g: g[::-1]),
    "sorted": product_of(lambda h, s, g: jnp.sort(g, 0)),
    "of pairs": product_of(lambda h, s, g: jnp.tanh(h @ h.T) @ g / N),
    "by an index": with_rule(
        lambda h, s: (h * s, (s, h.argmax(0))),
        lambda r, g: (g.at[r[1], jnp.arange(D)].add(jnp.tanh(g.max(0))), r[0]),
    ),
    # Rows meet on the way there.
    "divided by the largest": with_rule(
        lambda h, s: (h * s / largest(h), (h, s, largest(h))),
        lambda r, g: (g * r[1] / r[2], jnp.sum(g * r[0]) / r[2]),
    ),
    "a scan": with_rule(
        lambda h, s: (lax.scan(turned, h * s, None, 3)[0], (h, s)),
        lambda r, g: (g * r[1], jnp.sum(g * r[0])),
    ),
    "an array": with_rule(
        lambda h, s: (by_an_array(h) * s, (h, s)),
        lambda r, g: (by_an_array(g) * r[1], jnp.sum(g * by_an_array(r[0]))),
    ),
    "an array, row by row": lambda h, s: jax.vmap(
        jax.jit(RULES["an array"]), (0, None)
    )(h, s),
    "an array of a tangent": with_tangent(
        lambda h, s: h * s, lambda h, s, dh, ds: by_an_array(dh) * s + ds * h
    ),
    "a tangent": with_tangent(
        lambda h, s: jnp.round(h * s * 8) / 8,
        lambda h, s, dh, ds: (dh - dh.mean(0)) * s + ds * h.max(0),
    ),
}


def layers(rule, p, x):
    """Before a mean over rows, so that cotangents come from two levels."""
    h = jnp.tanh(rule(x @ p["w"][0], p["s"][0]))
    return jnp.mean(jnp.sin((h - h.mean(0)) @ p["w"][1]) ** 2)


def of_parameters(rule, p, x):
    return jnp.mean((x @ rule(p["w"][0], p["s"][0])) ** 2)


def in_a_scan(rule, p, x):
    def body(h, its):
        w, s = its
        return jnp.tanh(rule(h @ w, s)), None

    h, _ = lax.scan(jax.checkpoint(body), x, (jnp.stack(p["w"]), jnp.stack(p["s"])))
    return jnp.mean(h**2)


def of_a_result(rule, p, x):
    """What no row has of its own, twice, at two levels."""
    h = jnp.tanh(x @ p["w"][0])
    h = jnp.sin((h - rule(h, p["s"][0])) @ p["w"][1])
    return jnp.mean((h - h.mean(0) + rule(h, p["s"][1])) ** 2)


WHOLE = {  # rules of which a result has no rows
    "an energy": with_tangent(
        lambda h, s: (h**2 * s).sum(1).mean(),
        lambda h, s, dh, ds: 2 * ((normed((h**2).sum(1))) * dh.sum(1)).mean() + ds,
    ),
    "a maximum": with_rule(
        lambda h, s: (h.max(0) * s, (h, s)),
        lambda r, g: (jnp.where(r[0] == r[0].max(0), g, 0.1 * g), (g * r[1]).sum()),
    ),
    "a clipped sum": with_rule(
        lambda h, s: (h.sum(0) * s, (h, s)),
        lambda r, g: (
            jnp.ones_like(r[0]) * jnp.clip(g, -0.1, 0.1),
            jnp.tanh(g * r[0].max(0)).sum(),
        ),
    ),
}

LOSSES = {
    **{f"layers, {x}": functools.partial(layers, RULES[x]) for x in RULES},
    **{f"result, {x}": functools.partial(of_a_result, WHOLE[x]) for x in WHOLE},
    **{f"parameters, {x}": functools.partial(of_parameters, RULES[x]) for x in RULES},
    **{f"scan, {x}": functools.partial(in_a_scan, RULES[x]) for x in RULES},
}


def arguments():
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=(n, D))) for n in (2 * D, N))
    return {"w": [w[:D], w[D:]], "s": [jnp.asarray(1.1), jnp.asarray(0.7)]}, x


@pytest.mark.grid(8, len(LOSSES))
@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("name", LOSSES)
def test_rows_meet_in_a_rule_as_they_do_anywhere(name):
    fun = LOSSES[name]
    with jax.enable_x64(True):
        assert error(fun, K, *arguments(), accumulator_dtype="float64") < BOUND
        found = ga.batch_dependencies(fun, K)(*arguments())
    assert not any("custom" in x.name for x in found.whole)  # but `sort`, maybe


@pytest.mark.quick
def test_a_package_whose_name_begins_with_that_of_jax_keeps_its_rules():
    path, names = f"{os.path.dirname(jax.__file__)}typing/rows.py", {"jnp": jnp}
    lines = "def _softmax(h): return jnp.exp(h) / jnp.exp(h).sum(0)"
    exec(compile(lines, path, "exec"), names)
    ruled = with_tangent(names["_softmax"], lambda h, dh: 2 * dh - dh.mean(0))

    def fun(p, x):
        return jnp.mean(jnp.sin(ruled(x @ p["w"][0])) ** 2)

    with jax.enable_x64(True):
        assert error(fun, K, *arguments(), accumulator_dtype="float64") < BOUND


def solved(b, h):
    return jnp.tanh(b * h), jnp.sin(b)


def solver(asks):
    """A function whose rule refuses a cotangent of the second result, which is shared.

    It knows it if it `asks` JAX; or JAX refuses it under `jax.vmap`.
    """

    def forward(b, h):
        b, h = (b.value, h.value) if asks else (b, h)
        return solved(b, h), (b, h)

    def backward(saved, cts):
        assert not asks or isinstance(cts[1], SymbolicZero)
        b, h = saved
        ct = jnp.clip(cts[0], -0.1, 0.1) / jnp.cosh(b * h) ** 2
        return (ct * h).sum(), ct * b

    fun = jax.custom_vjp(solved)
    fun.defvjp(forward, backward, symbolic_zeros=asks)
    return jax.vmap(fun, (None, 0))


READERS = {
    "nothing": lambda y, shared: y,
    "a jit": jax.jit(lambda y, shared: y),
    "a stopped sum": lambda y, shared: y + lax.stop_gradient(shared)[:, None],
    "a test": lambda y, shared: jnp.where(shared[:, None] > 0, y, -y),
    "a branch": lambda y, shared: lax.cond(
        y[0, 0] > 9, lambda y, shared: 2 * y, lambda y, shared: y, y, shared
    ),
}


@pytest.mark.grid(4, 20)
@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("of", ["rows", "parameters"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("asks", [True, False], ids=["asks", "does not ask"])
def test_a_rule_gets_no_cotangent_that_jax_knows_to_be_zero(asks, reader, of):
    solve = solver(asks)

    def loss(p, x):
        def run(h):
            return READERS[reader](*solve(p["s"][0], h))

        w = p["w"][0]
        return jnp.mean((run(x @ w) if of == "rows" else x @ run(w)) ** 2)

    with jax.enable_x64(True):
        assert error(loss, K, *arguments(), accumulator_dtype="float64") < BOUND
        assert ga.batch_dependencies(loss, K)(*arguments()).whole == []


NAMES = "layers, of both", "layers, two levels and a maximum", "layers, a clipped norm"
NAMES += "result, a clipped sum", "scan, of both"


@pytest.mark.grid(2, 5)
@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_other_devices_and_levels_without_room_meet_in_a_rule(name):
    fun, mesh = LOSSES[name], mesh_of(2)
    options = {"residual_bytes": 0, "accumulator_dtype": "float64"}
    options["data_axis"] = ga.DataAxis("data", mesh=mesh)
    with jax.enable_x64(True):
        args = put(arguments(), mesh, (P(), P("data")))
        want = undivided(fun)(*arguments())
        assert off(jax.jit(ga.value_and_grad(fun, K, **options))(*args), want) < BOUND
        assert off(undivided(ga.microbatch(fun, K))(*arguments()), want) < BOUND
