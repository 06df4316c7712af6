"""`value_and_grad` over micro-batches is that of the undivided batch, anywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mean_of, normal, off

import ga_optax as ga
from ga_optax._loop.micro_step import HAS_REFS

OPTIMIZE = [True, False]
BATCH = 16
WIDTH = 6


def _normal(seed, *shape):
    return np.array(normal(*shape, seed=seed))


def _layer(h, p):
    h = h + jnp.tanh(h @ p["kernel"] + jnp.broadcast_to(p["bias"], h.shape))
    return h * jnp.broadcast_to(p["scale"], h.shape), None


def rematerialised(params, batch):
    h, _ = jax.lax.scan(jax.checkpoint(_layer), batch["x"], params["layers"])
    return jnp.mean(jnp.square(h @ params["out"] - batch["y"]))


def used_twice(params, batch):
    """A scan whose body uses a slice twice, and a parameter that is tied."""

    def layer(h, p):
        return jnp.tanh(h @ p["kernel"]) @ p["kernel"].T * 0.5, None

    h, _ = jax.lax.scan(layer, batch["x"] @ params["tied"], params["layers"])
    return jnp.mean(jnp.square(h @ params["tied"].T))


@jax.jit
def odd(params, batch):
    """Stacked leaves that get a bare product for a gradient, or none at all."""

    def layer(h, p):
        penalty = jnp.sum(p["penalised"] * p["fixed"])
        _ = h @ p["ignored"]
        return jnp.tanh(h @ p["kernel"]) + jax.lax.stop_gradient(p["frozen"]), penalty

    h, penalties = jax.lax.scan(layer, batch["x"], params["layers"])
    return jnp.mean(jnp.square(h @ params["out"])) - jnp.sum(penalties)


def embedded(params, batch):
    h = params["table"][batch["tokens"]]
    h = jnp.tanh(h.sum(1) @ params["out"]) @ params["out"].T
    return jnp.mean(jnp.square(h @ params["table"].T))


def of_complex(params, batch):
    w = params["w"]
    return jnp.mean(jnp.square(jnp.abs(batch["x"].astype(w.dtype) @ w)))


LAYERS = {
    "kernel": _normal(1, 3, WIDTH, WIDTH) * 0.4,
    "bias": _normal(2, 3, WIDTH) * 0.1,
    "scale": 1 + _normal(3, 3, WIDTH) * 0.1,
}
SOME = {"layers": LAYERS, "out": _normal(7, WIDTH, 3)}
ODD = {"kernel": LAYERS["kernel"], "ignored": LAYERS["kernel"]}
ODD |= {"penalised": LAYERS["bias"], "fixed": LAYERS["scale"]}
ODD |= {"frozen": _normal(8, 3, 1, WIDTH)}
MODELS = {
    "rematerialised": (rematerialised, SOME),
    "used_twice": (used_twice, SOME | {"tied": _normal(3, WIDTH, WIDTH)}),
    "odd": (odd, SOME | {"layers": ODD}),
    "embedded": (embedded, {"table": _normal(4, 5, WIDTH), "out": SOME["out"]}),
    "complex": (of_complex, {"w": _normal(0, WIDTH) + 1j * _normal(1, WIDTH)}),
}


def make_batch(seed=0):
    x, y = _normal(seed, BATCH, WIDTH), _normal(seed, BATCH, 3)
    return {
        "x": x,
        "y": y,
        "tokens": np.arange(4 * BATCH, dtype=np.int32).reshape(-1, 4) % 5,
    }


def _wide(x):
    return x if x.dtype == np.int32 else x.astype(np.result_type(x, "f8"))


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimize", OPTIMIZE)
def test_it_equals_the_undivided_batch_to_twelve_digits_in_float64(name, optimize):
    fun, params = MODELS[name]
    with jax.enable_x64(True):
        params, batch = jax.tree.map(_wide, (params, make_batch()))
        expected = jax.jit(jax.value_and_grad(fun))(params, batch)
        # All four in place; by hand differs from that in bits alone, tested below.
        for k in (1, 2, 4, 8) if optimize else (4,):
            got = jax.jit(ga.value_and_grad(fun, k, optimize=optimize))(params, batch)
            assert jax.tree.structure(got) == jax.tree.structure(expected)
            assert off(got, expected) < 1e-12


@pytest.mark.skipif(not HAS_REFS, reason="references came with jax 0.11.1")
def test_only_what_has_the_same_bits_is_summed_in_place():
    def adds_in_place(name, k, **options):
        fun, params = MODELS[name]
        step = ga.value_and_grad(fun, k, **options)
        return "freeze" in str(jax.make_jaxpr(step)(params, make_batch()))

    here = {name for name in MODELS if adds_in_place(name, 2)}
    assert here == {"rematerialised", "odd"}
    # A matrix product over one row is a bare product; a bias of one row likewise.
    assert not adds_in_place("rematerialised", BATCH)
    assert not adds_in_place("rematerialised", 2, optimize=False)


def test_the_function_is_traced_once_for_any_number_of_micro_batches():
    _, params = MODELS["rematerialised"]
    weighted = {"weight_fn": lambda batch: jnp.sum(batch["y"][:, 0] > 0)}
    for k, options in ((1, {}), (8, {}), (8, weighted)):
        traces = []
        make = mean_of if options else ga.value_and_grad

        def fun(params, batch, traces=traces):
            traces.append(0)
            return rematerialised(params, batch)

        step = jax.jit(make(fun, k, **options))
        step(params, make_batch())
        step(params, make_batch(seed=1))
        assert len(traces) == 1
        call = jax.jit(ga.accumulate(fun, k, **options))
        acc = ga.accumulator.init(params)
        for seed in range(3):
            _, acc = call(acc, params, make_batch(seed=seed))
        assert len(traces) == 2


def test_it_has_the_name_and_documentation_of_the_function():
    def fun(w, x):
        """What it is."""
        return jnp.mean(x * w)

    step = ga.value_and_grad(fun, 2)
    assert (step.__name__, step.__doc__) == ("fun", "What it is.")
    ga.value_and_grad(functools.partial(fun), 2)(jnp.float32(1.0), jnp.ones(2))


@pytest.mark.parametrize("optimize", OPTIMIZE)
def test_the_program_does_not_grow_with_the_number_of_micro_batches(optimize):
    """So that compiling it takes no longer; a loop written out grows with each."""
    params = {"layers": _normal(0, 3, WIDTH, WIDTH), "out": _normal(1, WIDTH)}

    def loss(params, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
        return jnp.mean(jnp.square(h @ params["out"]))

    def lines(k):
        step = jax.jit(ga.value_and_grad(loss, k, optimize=optimize))
        return len(step.lower(params, _normal(2, 4 * k, WIDTH)).as_text().splitlines())

    assert lines(4) == lines(64)
