"""Code written for `optax.MultiSteps` runs with the import swapped, and agrees."""

import copy
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import SKIPS, bits, off
from test_multi_steps_program import applied, updated

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")

HAS_DTYPE = pytest.mark.skipif(
    "accumulator_dtype" not in inspect.signature(optax.MultiSteps).parameters,
    reason="this optax.MultiSteps has no accumulator_dtype; it came with 0.2.8",
)

BOTH = ga.MultiSteps, optax.MultiSteps
PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 4.0]]), "b": jnp.array([0.25, -1.0])}


def gradients(n, bad=()):
    rng = np.random.default_rng(0)
    for i in range(n):
        g = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), "f4"), PARAMS)
        if i in bad:
            g["b"] = g["b"].at[0].set(jnp.inf)
        yield g


def run(multi_steps, *args, bad=(), **kwargs):
    """A training run as people write it, with whichever class; its whole history."""
    tx = multi_steps(*args, **kwargs)
    init, update = tx.gradient_transformation()
    params, state, history = PARAMS, init(PARAMS), []
    for grads in gradients(9, bad):
        updates, state = jax.jit(update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        seen = {name: getattr(state, name) for name in OF_SKIPS[1:]}
        history.append(seen | {"params": params, "has_updated": tx.has_updated(state)})
        if hasattr(state, "acc_grads"):  # with a k of 1 there is nothing to read
            history[-1]["acc_grads"] = state.acc_grads
    return history


CLOSE = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)


def assert_same_run(ours, theirs, *, keys=None):
    """Within the rounding of Optax's running mean: a few float32 roundings a step."""
    for a, b in zip(ours, theirs, strict=True):
        for key in keys or a.keys() & b.keys():
            jax.tree.map(CLOSE, a[key], b[key])


LARGE = functools.partial(optax.skip_large_updates, max_squared_norm=9.0)
ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)
RUNS = [
    ((ADAM, 3), {}),
    ((ADAM,), {"every_k_schedule": 3}),
    ((), {"opt": SGD, "every_k_schedule": lambda step: 1 + step}),
    ((SGD, 2), {"use_grad_mean": False}),
    ((optax.adamw(1e-2), 1), {}),
    pytest.param((ADAM, 2, True, None, jnp.float32), {}, marks=HAS_DTYPE),
    pytest.param((ADAM, 2), {"accumulator_dtype": None}, marks=HAS_DTYPE),
    ((ADAM, 4, True, optax.skip_not_finite), {}),
    ((ADAM, 3), {**SKIPS, "bad": (1, 5)}),
    ((SGD, 2), {"should_skip_update_fn": LARGE}),
]
OF_SKIPS = ["params", "mini_step", "gradient_step", "inner_opt_state", "skip_state"]


@pytest.mark.grid(4)
@pytest.mark.parametrize(("args", "kwargs"), RUNS)
def test_a_run_gives_what_optax_gives(args, kwargs):
    ours, theirs = (run(of, *args, **kwargs) for of in BOTH)
    assert_same_run(ours, theirs, keys=OF_SKIPS if "bad" in kwargs else None)
    for i in kwargs.get("bad", ()):
        assert bool(ours[i]["skip_state"]["should_skip"])


SCHEDULES = {
    "piecewise": optax.piecewise_constant_schedule(2, {1: 1.5}),  # 2, 3, 3, ...
    "linear": optax.linear_schedule(1.0, 4.0, 4),  # 1, 1.75, 2.5, ...
    "down": lambda step: jnp.bfloat16(3.5) - step.astype(jnp.bfloat16),
    "narrow": lambda step: step.astype(jnp.float16) / 2 + 1,
}


@pytest.mark.grid(2, 8)
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_floats_closes_windows_that_hold_k_or_more(name, chained):
    """As in Optax with the next integer: it takes no floats itself."""

    def history(of, schedule):
        tx = of(SGD, schedule).gradient_transformation()
        tx = optax.chain(optax.clip(2.0), tx) if chained else tx
        seen, params, state = [], PARAMS, jax.jit(tx.init)(PARAMS)
        for grads in gradients(9):
            updates, state = jax.jit(tx.update)(grads, state, params)
            params = optax.apply_updates(params, updates)
            own = state[1] if chained else state
            seen.append({"params": params, "at": (own.mini_step, own.gradient_step)})
        return seen, state

    def integers(step):
        return jnp.ceil(SCHEDULES[name](step)).astype(jnp.int32)

    ours, state = history(ga.MultiSteps, SCHEDULES[name])
    theirs, _ = history(optax.MultiSteps, integers)
    assert_same_run(ours, theirs)
    assert int(ga.stats(state).fill) == int(theirs[-1]["at"][0])
    assert len({int(x["at"][1]) for x in theirs}) > 2  # of several lengths


INTEGERS = {**PARAMS, "n": jnp.array([3, 5]), "on": jnp.array([True, False])}


@pytest.mark.grid(1)
@pytest.mark.skipif(optax.__version__ == "0.2.6", reason="it takes no boolean leaves")
@pytest.mark.parametrize("opt", [optax.sgd(0.5), optax.adamw(0.5)])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_integer_parameters_are_updated_as_by_optax(opt, dtype):
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    grads |= {"n": jnp.array([2, 4], dtype), "on": jnp.array([1, 0], bool)}

    def trained(of, opt, way):
        tx = of(opt, 2)
        params, state = INTEGERS, tx.init(INTEGERS)
        for _ in range(4):
            params, state = jax.jit(functools.partial(way, tx))(params, state, grads)
        return params

    theirs = trained(optax.MultiSteps, opt, updated)
    for way in (applied, updated):
        assert off(trained(ga.MultiSteps, opt, way), theirs) < 1e-6
    other = trained(ga.MultiSteps, optax.sgd(4.0), applied)  # the twin
    assert off(other["n"], theirs["n"])


def test_it_is_a_gradient_transformation_with_extra_arguments():
    tx = ga.MultiSteps(optax.sgd(0.1), 1)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    init, update = tx
    assert (init, update) == (tx.init, tx.update)
    assert isinstance(tx.inner_opt, optax.GradientTransformationExtraArgs)
    assert tx.gradient_transformation() is tx
    assert not isinstance(tx._replace(update=optax.sgd(1.0).update), ga.MultiSteps)
    assert "every_k_schedule=1" in repr(tx)
    # Either name of the first argument works.
    state = tx.init(PARAMS)
    theirs, _ = update(updates=PARAMS, state=state, params=PARAMS)
    ours, _ = update(grads=PARAMS, state=state, params=PARAMS)
    assert bits(ours) == bits(theirs)
    with pytest.raises(AttributeError, match=r"one sum of gradients.*total"):
        _ = state.acc_grads  # which a k of 1 does not hold


def test_it_survives_copying_and_is_a_static_argument():
    tx = ga.MultiSteps(optax.sgd(1.0), 2, use_grad_mean=False)
    clone = copy.deepcopy(tx)
    assert isinstance(clone, ga.MultiSteps)
    assert repr(clone) == repr(tx)
    assert jax.tree.leaves(tx) == []
    assert jax.tree.map(lambda x: x, tx) is tx
    init = jax.jit(lambda tx, params: tx.init(params))  # static: it has no leaves
    assert int(init(tx, PARAMS).mini_step) == 0


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
def test_acc_grads_are_the_mean_so_far_or_the_sum(mean):
    tx, one, seen = ga.MultiSteps(SGD, 3, mean), jnp.ones(1), []
    state = tx.init(one)
    for g in (1.0, 3.0, 5.0):
        _, state = tx.update(g * one, state, one)
        seen.append(float(state.acc_grads[0]))
    assert seen == [1, 2 if mean else 4, 0]


@pytest.mark.quick
def test_a_state_prints_in_a_few_lines_wherever_it_is():
    tx, params = ga.MultiSteps(SGD, 2), jnp.ones((64, 64))
    state = tx.init(params)
    texts = [repr(state), repr(jax.eval_shape(tx.init, params))]
    jax.eval_shape(lambda state: texts.append(repr(state)), state)
    assert jax.device_get(state).micro_steps == 0  # NumPy's
    jax.tree.map(lambda x: x.delete(), state)
    for text in (*texts, repr(state)):
        assert "total=<1 array, 16,384 bytes>" in text
        assert text.count("\n") <= 6
    assert "counters=[0, 0, 0, 0]" in texts[0]
    assert "weight=<deleted>" in repr(state)


def test_from_optax_keeps_what_the_skip_function_keeps():
    theirs = optax.MultiSteps(SGD, 2, **SKIPS)
    [grads] = gradients(1, bad=(0,))
    _, state = theirs.update(grads, theirs.init(PARAMS), PARAMS)
    ours = ga.from_optax(state)
    assert bits(ours.skip_state) == bits(state.skip_state)
    assert bool(ours.skip_state["should_skip"])
    ga.MultiSteps(SGD, 2, **SKIPS).update(grads, ours, PARAMS)


@pytest.mark.grid(2, 8)
@pytest.mark.parametrize(
    ("at", "chained"), [(2, True), (3, False), (4, True), (0, False), (2, False)]
)
@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
def test_from_optax_continues_the_run_from_any_micro_step(at, mean, chained):
    args = optax.adam(1e-2), 3, mean

    def make(of):
        tx = of(*args).gradient_transformation()
        counts = optax.scale_by_schedule(lambda step: 1.0)  # has a state, too
        return optax.chain(counts, tx) if chained else tx

    tx, params = make(optax.MultiSteps), PARAMS
    state = tx.init(PARAMS)
    for i, grads in enumerate(gradients(9)):
        if i == at:
            state, tx = ga.from_optax(state, use_grad_mean=mean), make(ga.MultiSteps)
            assert bool(ga.has_updated(state)) == (at > 0 and at % 3 == 0)
            assert f"micro_steps={at % 3}" in repr(ga.stats(state))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert int(ga.stats(state).steps) == 3
    assert_same_run([{"params": params}], run(optax.MultiSteps, *args)[-1:])
