"""Inside every combinator of Optax."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import bits, off, times_rate, train, updates_of

import ga_optax as ga
from ga_optax import _text

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")

PARAMS = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array([0.5])}
GRADS = [
    {"w": jnp.array([1.0, 2.0, -1.0]), "b": jnp.array([4.0])},
    {"w": jnp.array([3.0, 0.0, 1.0]), "b": jnp.array([-2.0])},
]
MEAN = {"w": jnp.array([2.0, 1.0, 0.0]), "b": jnp.array([1.0])}

ADAM = optax.adam(1e-2)
COMBINATORS = {
    "named_chain": lambda tx: optax.named_chain(
        ("clip", optax.clip(100.0)), ("accumulate", tx)
    ),
    "partition": lambda tx: optax.partition({"all": tx}, {"w": "all", "b": "all"}),
    "masked": lambda tx: optax.masked(tx, dict.fromkeys(PARAMS, True)),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda scale: optax.chain(tx, optax.scale(scale))
    )(scale=1.0),
    "chain of chains": lambda tx: optax.chain(optax.chain(optax.chain(tx))),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


@pytest.mark.grid(5)
@pytest.mark.parametrize("name", COMBINATORS)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_extra_arguments_and_weights_arrive_and_the_state_is_found(name, jit):
    tx = COMBINATORS[name](ga.MultiSteps(times_rate(), 2))
    tx = optax.with_extra_args_support(tx)
    update = jax.jit(tx.update) if jit else tx.update
    state = tx.init(PARAMS)
    assert not ga.has_updated(state)
    _, state = update(GRADS[0], state, PARAMS, rate=0.5, weight=3)
    assert not ga.has_updated(state)
    assert float(ga.stats(state).weight) == 3
    updates, state = update(GRADS[1], state, PARAMS, rate=0.5, weight=1)
    assert ga.has_updated(state)
    due = jax.tree.map(lambda a, b: -0.5 * (3 * a + b) / 4, *GRADS)
    assert bits(updates) == bits(due)


@pytest.mark.quick
def test_a_window_that_is_left_out_and_counted_is_warned_of_once():
    tx = ga.MultiSteps(optax.apply_if_finite(optax.sgd(1.0), 3), 2)
    with pytest.warns(UserWarning, match="should_drop_window_fn=ga_optax.drop_window"):
        state = tx.init(PARAMS)
    tx.init(PARAMS)  # as are all warnings below, a second one would be an error
    nan = jax.tree.map(lambda g: g * np.nan, GRADS[0])
    params, state = train(tx, [nan, GRADS[1]], PARAMS, state=state)[-1]
    assert bits(params) == bits(PARAMS)
    assert int(ga.stats(state).steps) == 1
    # The twins: what the warning advises.
    _text._said.clear()
    for option in ("should_drop_window_fn", "should_skip_update_fn"):
        cure = ga.drop_window_if_not_finite
        if "skip" in option:
            cure = optax.skip_not_finite
        tx = ga.MultiSteps(tx.inner_opt, 2, **{option: cure})
        _, state = train(tx, [nan, GRADS[1]], PARAMS)[-1]
        assert int(ga.stats(state).steps) == 0


SGD = optax.sgd(1.0)
TWO = ga.MultiSteps(SGD, 2)
BY_LEAF = {"w": "one", "b": "other"}


def test_partition_and_masked_leave_the_other_leaves_alone():
    tx = optax.partition({"one": TWO, "other": SGD}, BY_LEAF)
    (first, _), (second, state) = updates_of(tx, GRADS, PARAMS)
    np.testing.assert_array_equal(first["w"], 0)
    np.testing.assert_array_equal(first["b"], -GRADS[0]["b"])
    np.testing.assert_array_equal(second["w"], -MEAN["w"])
    assert ga.has_updated(state)
    masked = {"w": PARAMS["w"], "b": optax.MaskedNode()}
    one = ga.MultiSteps(SGD, 1)
    updates, _ = one.update({**masked}, one.init(masked), masked)
    assert isinstance(updates["b"], optax.MaskedNode)
    # A weight reaches every accumulator, and of two none is guessed.
    both = optax.partition({"one": TWO, "other": TWO}, BY_LEAF)
    params, state = train(both, GRADS, PARAMS, (3, 1))[-1]
    due = jax.tree.map(lambda p, a, b: p - (3 * a + b) / 4, PARAMS, *GRADS)
    assert bits(params) == bits(due)
    with pytest.raises(ValueError, match=r"there are 2: .*'one'.*'other'"):
        ga.has_updated(state)
    assert ga.has_updated(state.inner_states["one"])


LOOKAHEAD = optax.lookahead(SGD, 2, 0.5)


@pytest.mark.parametrize("begins", ["both", "fast"])
@pytest.mark.parametrize("way", ["update", "apply", "flush"])
@pytest.mark.parametrize("k", [1, 2])
def test_of_the_parameters_of_lookahead_the_fast_ones_have_gradients(k, way, begins):
    start = params = due = optax.LookaheadParams.init_synced(PARAMS)
    tx, bare = ga.MultiSteps(LOOKAHEAD, k), LOOKAHEAD.init(start)
    state = tx.init(start if begins == "both" else PARAMS)
    for _ in range(2):  # the second step writes the slow ones
        for grads in GRADS if k == 2 else [MEAN]:
            if way == "update":
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
            else:
                emit = False if way == "flush" and k == 2 else None
                given = tx, grads, state, params
                params, state = ga.apply_gradients(*given, emit=emit)
        if way == "flush":
            params, state = ga.flush(tx, state, params)
        due, bare = ga.apply_gradients(LOOKAHEAD, MEAN, bare, due)
    assert off(due.slow, start.slow) > 0.1  # the twin
    assert bits(params) == bits(due)  # of integers and halves
    assert bits(state.inner_opt_state) == bits(bare)


HALVING = optax.exponential_decay(1.0, 1, 0.5)
BY_HALVES = optax.scale_by_schedule(HALVING)


def injected(rate, k=2):
    return optax.inject_hyperparams(lambda rate: ga.MultiSteps(optax.sgd(rate), k))(
        rate=rate
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tx", "where"),
    [
        (optax.chain(TWO, BY_HALVES), r"\[1\].count"),
        (optax.chain(optax.ema(0.9), optax.chain(injected(1.0))), r"\[0\].count"),
        (optax.named_chain(("a", TWO), ("b", ADAM)), r"\['b'\]\[0\].co"),
        (injected(HALVING), r"hyperparams_states\['rate'\].count"),
        (optax.MultiSteps(TWO, 2), ".mini_step"),
        (optax.contrib.schedule_free(TWO, 1.0), ".step_count"),
        # What counts steps is not.
        (optax.chain(ga.MultiSteps(optax.chain(ADAM, BY_HALVES), 2), SGD), None),
        (optax.chain(ga.MultiSteps(SGD, 1), BY_HALVES), None),
        (injected(HALVING, k=1), None),
        (optax.partition({"one": TWO, "other": ADAM}, BY_LEAF), None),
        (ADAM, None),
    ],
)
def test_what_counts_micro_steps_beside_an_accumulator_is_named(tx, where):
    said = pytest.warns(UserWarning, match=f"counts micro-steps at .*{where}")
    with said if where else contextlib.nullcontext():  # a warning is an error
        ga.apply_gradients(tx, GRADS[0], tx.init(PARAMS), PARAMS)
