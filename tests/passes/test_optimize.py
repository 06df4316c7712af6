"""`optimize=False`: the plain scan, in the argument, the environment and the config."""

import collections

import jax
import jax.numpy as jnp
import pytest
from helpers import bits, mean_of, plain_scan, python
from helpers import squares as loss

import ga_optax as ga
from ga_optax import accumulator
from ga_optax._passes import jaxprs

W = jnp.full((3, 3), 0.1)
X = jnp.arange(24.0).reshape(8, 3) / 24


def names(fun, *args):
    """The primitives of a program and of its loop, with how often."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    return collections.Counter(e.primitive.name for e in jaxprs.equations(jaxpr))


FENCES = {
    *("optimization_barrier", "ga_optax_window", "reduce_precision"),
    *("cond", "new_ref", "sort"),
}
# Some versions of XLA need one on each carry, whatever is switched off.
ON_CARRIES = {"optimization_barrier"} if accumulator.LOSES_ROWS else set()


def dropped(w, x):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return loss(w, jnp.where(keep, jax.nn.relu(x), 0))


def root(w, x):
    return jnp.sqrt(loss(w, x))


def added(fun, k, **options):
    step = ga.accumulate(fun, k, **options)
    return lambda w, x: step(ga.accumulator.init(w), w, x)


WEIGHTED = {"weight_fn": lambda x: x[0, 0] + 1}
MAKERS = [(mean_of, {}), (mean_of, WEIGHTED), (added, {}), (added, WEIGHTED)]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fun", "make", "options"),
    [
        *((loss, *way) for way in MAKERS),
        *((f, ga.value_and_grad, {}) for f in (loss, dropped)),
    ],
)
def test_it_is_the_scan_that_one_would_write(fun, make, options):
    found = names(make(fun, 4, optimize=False, **options), W, X)
    assert found["scan"] == 1
    assert found["dot_general"] == names(plain_scan(loss, 4), W, X)["dot_general"]
    assert FENCES & found.keys() <= ON_CARRIES
    # The twins: with passes there are fences, and where rows meet one more loop.
    assert FENCES & names(make(fun, 4, **options), W, X).keys()
    assert names(ga.value_and_grad(root, 4, optimize=False), W, X)["scan"] > 1


@pytest.mark.quick
def test_it_has_the_bits_of_the_scan_written_by_hand():
    got = jax.jit(ga.value_and_grad(loss, 4, optimize=False))(W, X)
    assert bits(got) == bits(jax.jit(plain_scan(loss, 4))(W, X))
    assert jnp.any(got[1] != 0)


@pytest.mark.quick
def test_what_keeps_bits_in_every_grouping_is_for_accumulate_alone():
    def sorts(make):  # a counter, on CPUs
        return "stablehlo.sort" in jax.jit(make(loss, 4)).lower(W, X).as_text()

    assert sorts(added)
    assert not sorts(ga.value_and_grad)


def is_plain(**options):
    # With passes, `accumulate` has fences in all versions.
    return FENCES & names(added(loss, 4, **options), W, X).keys() <= ON_CARRIES


def test_the_config_and_the_argument_both_switch_it_off():
    assert not is_plain()
    assert is_plain(optimize=False)
    assert ga.config.optimize is True
    ga.config.update("optimize", False)
    try:
        assert ga.config.optimize is False
        assert is_plain()
        assert is_plain(optimize=True)
    finally:
        ga.config.update("optimize", True)
    assert not is_plain()


@pytest.mark.grid(3, 5)
@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("OPTIMIZE", "maybe", "GA_OPTAX_OPTIMIZE must be 0 or 1, but it is 'maybe'"),
        ("OPTIMIZE", "0", "False"),
        ("OPTIMIZE", "1", "True"),
        ("OPTIMIZE", "false", "False"),
    ],
)
def test_the_environment_sets_it(name, value, answer):
    program = "from ga_optax import config; print(config.optimize)"
    run = python("-c", program, **{f"GA_OPTAX_{name}": value})
    assert answer in (run.stderr if run.returncode else run.stdout)
    assert bool(run.returncode) == (value == "maybe")
