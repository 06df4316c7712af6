"""`optimize=False`: the plain scan, in the argument, the environment and the config."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mean_of, python

import ga_optax as ga
from ga_optax._passes import ir

W = jnp.full((3, 3), 0.1)
X = jnp.arange(24.0).reshape(8, 3) / 24


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def by_hand(w, x):
    """What a reader would write."""

    def step(carry, part):
        value, grads = jax.value_and_grad(loss)(w, part)
        return (carry[0] + value, carry[1] + grads), None

    start = jnp.zeros([]), jnp.zeros_like(w)
    (value, grads), _ = jax.lax.scan(step, start, x.reshape(4, 2, 3))
    return value / 4, grads / 4


def names(fun, *args):
    """The primitives of a program and of its loop, with how often."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    return collections.Counter(e.primitive.name for e in ir.equations(jaxpr))


FENCES = {"optimization_barrier", "ga_optax_window", "sort", "xor", "cond", "new_ref"}


@pytest.mark.quick
@pytest.mark.parametrize("weight_fn", [None, lambda x: x[0, 0] + 1])
def test_it_is_the_scan_that_one_would_write(weight_fn):
    options = {"weight_fn": weight_fn, "optimize": False}
    plain = names(mean_of(loss, 4, **options), W, X)
    acc = ga.accumulator.init(W)
    longer = names(ga.accumulate(loss, 4, **options), acc, W, X)
    for found in (plain, longer):
        assert found["scan"] == 1
        assert found["dot_general"] == names(by_hand, W, X)["dot_general"]
        assert not FENCES & found.keys()
    # The twin: with passes there are fences.
    assert FENCES & names(mean_of(loss, 4, weight_fn=weight_fn), W, X).keys()


@pytest.mark.quick
def test_so_it_is_for_value_and_grad_of_a_mean():
    def dropped(w, x):
        keep = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
        return loss(w, jnp.where(keep, jax.nn.relu(x), 0))

    for fun in (loss, dropped):
        found = names(ga.value_and_grad(fun, 4, optimize=False), W, X)
        assert found["scan"] == 1
        assert found["dot_general"] == names(by_hand, W, X)["dot_general"]
        assert not (FENCES - {"xor"}) & found.keys()  # which draws, too
        # The twin: where rows meet there is one more loop.
        root = lambda w, x, f=fun: jnp.sqrt(f(w, x))  # noqa: E731
        assert names(ga.value_and_grad(root, 4, optimize=False), W, X)["scan"] > 1


@pytest.mark.quick
def test_it_has_the_bits_of_the_scan_written_by_hand():
    value, grads = jax.jit(ga.value_and_grad(loss, 4, optimize=False))(W, X)
    expected = jax.jit(by_hand)(W, X)
    assert np.array_equal(value, expected[0])
    assert np.array_equal(grads, expected[1])
    assert np.any(grads)


def is_plain(**options):
    def scanned(params, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)
        return jnp.mean(h**2)

    step = ga.value_and_grad(scanned, 4, **options)
    return not FENCES & names(step, jnp.stack([W] * 3), X).keys()


WORDS = {"0": "False", "1": "True", "false": "False"}


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


@pytest.mark.grid(2, 4)
@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        *(("OPTIMIZE", word, [is_on, "False"]) for word, is_on in WORDS.items()),
        ("WHOLE_DRAWS", "1", [str(ga.config.optimize), "True"]),
    ],
)
def test_the_environment_sets_it(name, value, answer):
    assert environment(value, name).stdout.split() == answer


def test_another_word_in_the_environment_raises():
    run = environment("maybe")
    assert run.returncode != 0
    assert "GA_OPTAX_OPTIMIZE must be 0 or 1, but it is 'maybe'" in run.stderr


def environment(value, name="OPTIMIZE"):
    program = "from ga_optax import config; print(config.optimize, config.whole_draws)"
    return python("-c", program, **{f"GA_OPTAX_{name}": value})


@pytest.mark.quick
def test_an_unknown_option_or_value_raises():
    with pytest.raises(AttributeError, match="must be given the name of an option"):
        ga.config.update("optimise", False)
    with pytest.raises(TypeError, match="must be a bool, but it got 0"):
        ga.config.update("optimize", 0)
    with pytest.raises(TypeError, match="whole_draws must be a bool, but it got 'yes'"):
        ga.config.update("whole_draws", "yes")
    assert ga.config.optimize is True
