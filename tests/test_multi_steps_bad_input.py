"""Bad input raises before anything runs, says what came, and loses nothing."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import ga_optax as ga

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("optax_promotion")]

PARAMS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
SGD = optax.sgd(0.1)
W = jnp.ones(1)


def spoil(**leaves):
    dense = {**GRADS["dense"], **leaves}
    return {"dense": {name: leaf for name, leaf in dense.items() if leaf is not None}}


@pytest.mark.parametrize(
    ("k", "error", "words"),
    [
        (0, ValueError, "at least 1, but it is 0"),
        (-3, ValueError, "at least 1, but it is -3"),
        (np.int32(0), ValueError, "at least 1"),
        (2.0, TypeError, "int or a function, but it is 2.0 of type float"),
        (True, TypeError, "True of type bool"),
        ("4", TypeError, "'4' of type str"),
        (None, TypeError, "None"),
        (jnp.array(2), TypeError, "int or a function"),
    ],
)
def test_a_k_that_is_no_window_length_raises(k, error, words):
    with pytest.raises(error, match=words):
        ga.MultiSteps(SGD, k)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda step: 0, "at least 1, but it is 0"),
        (lambda step: jnp.ones(2), r"integer scalar, but it returned float32\[2\]"),
        (lambda step: True, "integer scalar, but it returned bool"),
        (lambda step: 1j, "integer scalar, but it returned complex"),
    ],
)
def test_a_schedule_that_returns_no_window_length_raises(schedule, words):
    tx = ga.MultiSteps(SGD, schedule)
    with pytest.raises(ValueError, match=words):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("opt", [optax.adam, None, "adam", 3])
def test_an_optimizer_that_is_none_raises(opt):
    with pytest.raises(TypeError, match="must be an optax"):
        ga.MultiSteps(opt, 2)


@pytest.mark.parametrize(
    ("grads", "error", "words"),
    [
        (spoil(bias=None), ValueError, ["['dense']['bias']", "missing"]),
        (spoil(extra=jnp.ones(1)), ValueError, ["['dense']['extra']", "not in"]),
        (spoil(bias=jnp.ones(4)), ValueError, ["['dense']['bias']", "(3,)", "(4,)"]),
        (spoil(bias=jnp.ones(3, int)), TypeError, ["['dense']['bias']", "int32"]),
        (spoil(bias=1), ValueError, ["['dense']['bias']", "()"]),
    ],
)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_gradients_that_do_not_fit_raise_name_the_leaf_and_lose_nothing(
    grads, error, words, k, jit
):
    tx = ga.MultiSteps(optax.adam(0.1), k)
    step = functools.partial(ga.apply_gradients, tx)
    step = jax.jit(step, donate_argnums=(1, 2)) if jit else step
    params, state = jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS)
    copies = jax.tree.map(np.asarray, (params, state))
    with pytest.raises(error) as caught:
        step(grads, state, params)
    for word in words:
        assert word in str(caught.value)
    # Not donated, not changed.
    for a, b in zip(*map(jax.tree.leaves, ((params, state), copies)), strict=True):
        np.testing.assert_array_equal(a, b)
    step(GRADS, state, params)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"grads": spoil(bias=jnp.ones(4))}, r"\['dense'\]\['bias'\].*\(3,\).*\(4,\)"),
        ({"grads": spoil(bias=None)}, r"\['dense'\]\['bias'\] is missing"),
        ({"weight": -1.0}, "not negative"),
    ],
)
def test_bad_input_raises_before_anything_of_the_user_is_traced(bad, words, k):
    def never(*args, **kwargs):
        raise AssertionError("this was traced")

    inner = optax.GradientTransformation(optax.init_empty_state, never)
    skip = lambda updates, step, params: (jnp.zeros([], bool), ())  # noqa: E731
    calls = []

    def counted(*args):
        calls.append(args)
        return skip(*args)

    tx = ga.MultiSteps(inner, k, should_skip_update_fn=counted)
    state = tx.init(PARAMS)
    calls.clear()
    with pytest.raises(ValueError, match=words):
        tx.update(**{"grads": GRADS, "state": state, "params": PARAMS, **bad})
    assert calls == []


def test_parameters_of_another_model_raise():
    tx = ga.MultiSteps(SGD, 2)
    other = {"dense": {"kernel": jnp.ones((3, 3)), "bias": jnp.ones(3)}}
    with pytest.raises(ValueError, match=r"\['dense'\]\['kernel'\].*params"):
        ga.apply_gradients(tx, GRADS, tx.init(PARAMS), other)
    with pytest.raises(ValueError, match=r"\['dense'\]\['kernel'\].*params"):
        ga.flush(tx, tx.init(PARAMS), other)


def test_parameters_that_are_no_arrays_raise_and_say_how_to_split_them():
    tx, whole = ga.MultiSteps(SGD, 2), {**PARAMS, "name": "a model"}
    for call in (
        lambda: tx.init(whole),
        lambda: tx.update(GRADS, tx.init(PARAMS), whole),
        lambda: ga.apply_gradients(tx, GRADS, tx.init(PARAMS), whole),
    ):
        with pytest.raises(TypeError, match=r"leaf \['name'\] of params.*partition"):
            call()


@pytest.mark.parametrize(
    ("weight", "error", "words"),
    [
        (-1.0, ValueError, "not negative, but it is -1.0"),
        (float("nan"), ValueError, "finite.*nan"),
        (jnp.ones(3), ValueError, r"scalar, but it has shape \(3,\)"),
        (True, TypeError, "bool"),
        ("3", TypeError, "str"),
    ],
)
@pytest.mark.parametrize("k", [1, 2])
def test_a_weight_that_is_none_raises(weight, error, words, k):
    tx = ga.MultiSteps(SGD, k)
    with pytest.raises(error, match=words):
        tx.update(GRADS, tx.init(PARAMS), PARAMS, weight=weight)
    with pytest.raises(error, match=words):
        ga.apply_gradients(tx, GRADS, tx.init(PARAMS), PARAMS, weight=weight)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((jnp.ones(2, bool), ()), r"boolean scalar.*dtype bool and shape \(2,\)"),
        ((jnp.float32(1.0), ()), r"boolean scalar.*dtype float32 and shape \(\)"),
        ((1, ()), "boolean scalar.*int32"),
        (jnp.array(True), "the pair"),
        (None, "the pair"),
    ],
)
def test_a_skip_function_that_returns_no_boolean_scalar_raises(answer, words):
    tx = ga.MultiSteps(SGD, 2, should_skip_update_fn=lambda *_: answer)
    with pytest.raises(ValueError, match=words):
        tx.init(PARAMS)


def test_a_skip_function_may_return_a_python_bool():
    tx = ga.MultiSteps(SGD, 2, should_skip_update_fn=lambda *_: (True, ()))
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert int(ga.stats(state).skipped_micro_steps) == 1


@pytest.mark.parametrize("name", ["weights", "wieght", "weight_", "emits"])
def test_a_misspelt_weight_does_not_go_to_the_optimizer_in_silence(name):
    tx = ga.MultiSteps(SGD, 2)
    state = tx.init(W)
    with pytest.raises(TypeError, match=f"'{name}' looks like '(weight|emit)'"):
        ga.apply_gradients(tx, W, state, W, **{name: 3.0})
    with pytest.raises(TypeError, match=f"'{name}' looks like '(weight|emit)'"):
        tx.update(W, state, W, **{name: 3.0})
    ga.apply_gradients(tx, W, state, W, value=3.0)  # the twin: what optimizers take


def test_an_extra_argument_for_an_optimizer_that_takes_none_raises():
    plain = optax.scale(-1.0)
    for tx in (ga.MultiSteps(plain, 2), copy.copy(ga.MultiSteps(plain, 2)), plain):
        with pytest.raises(TypeError, match=r"plain GradientTransformation.*'loss'"):
            ga.apply_gradients(tx, W, tx.init(W), W, loss=3.0)
    tx = ga.MultiSteps(plain, 2)
    with pytest.raises(TypeError, match=r"plain GradientTransformation.*'loss'"):
        ga.flush(tx, tx.init(W), W, loss=3.0)
    # The twin: a chain gives all of its members the argument that one of them takes.
    chain = optax.chain(tx, optax.identity())
    ga.apply_gradients(chain, W, chain.init(W), W, value=3.0, weight=2)
    # And one that would lose the weight.
    pair = optax.GradientTransformation(*tx)
    with pytest.raises(TypeError, match="'weight'"):
        ga.apply_gradients(pair, W, pair.init(W), W, weight=2)


@pytest.mark.parametrize("opt", [optax.adamw(0.1), optax.novograd(0.1)])
@pytest.mark.parametrize("k", [1, 2])
def test_parameters_that_are_missing_raise_if_the_optimizer_needs_them(opt, k):
    tx = ga.MultiSteps(opt, k)
    with pytest.raises(ValueError, match="needs the parameters, but params is None"):
        tx.update(GRADS, tx.init(PARAMS))
    with pytest.raises(TypeError, match="params must be the parameters"):
        ga.apply_gradients(tx, GRADS, tx.init(PARAMS), None)
    # The twins: one that does not, and one that fails for another reason.
    tx = ga.MultiSteps(SGD, k)
    tx.update(GRADS, tx.init(PARAMS))
    tx = ga.MultiSteps(optax.contrib.reduce_on_plateau(), k)
    with pytest.raises(TypeError, match="'value'"):
        tx.update(GRADS, tx.init(PARAMS))


def test_the_gradient_of_an_integer_that_jax_makes_raises():
    params = {"w": W, "n": jnp.array([1, 2])}
    grads = jax.grad(lambda p: jnp.sum(p["w"]), allow_int=True)(params)
    tx = ga.MultiSteps(SGD, 2)
    with pytest.raises(TypeError, match=r"\['n'\].*float0.*zeros_like"):
        ga.apply_gradients(tx, grads, tx.init(params), params)
    zeros = {**grads, "n": jnp.zeros_like(params["n"])}  # what the message advises
    ga.apply_gradients(tx, zeros, tx.init(params), params)


PLATEAU = optax.contrib.reduce_on_plateau()


@pytest.mark.parametrize("names", ["weight", ("value", 3)])
def test_a_name_of_no_extra_argument_raises(names):
    with pytest.raises(ValueError, match="mean_argnames must name"):
        ga.MultiSteps(PLATEAU, 2, mean_argnames=names)


def test_an_argument_to_average_that_is_none_raises():
    tx = ga.MultiSteps(PLATEAU, 2, mean_argnames="value")
    state = tx.init(W)
    for args in ({}, {"value": None}, {"value": "3"}):
        with pytest.raises(TypeError, match=r"value must be a real number.*every call"):
            ga.apply_gradients(tx, W, state, W, **args)
    with pytest.raises(ValueError, match=r"value must be a scalar.*\(1,\)"):
        ga.apply_gradients(tx, W, state, W, value=W)
    other = ga.MultiSteps(PLATEAU, 2)
    with pytest.raises(ValueError, match=r"each of mean_argnames.*\(arg_totals"):
        ga.apply_gradients(tx, W, other.init(W), W, value=3.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint8])
def test_a_narrow_schedule_closes_the_window_when_it_is_full(dtype):
    k = 100 if jnp.issubdtype(dtype, jnp.integer) else 384  # bfloat16 skips 257
    tx = ga.MultiSteps(SGD, lambda step: jnp.asarray(k, dtype))
    state = tx.init(W)._replace(mini_step=jnp.int32(k - 2), weight=jnp.float32(k - 2))
    for closes in (False, True):
        _, state = ga.apply_gradients(tx, W, state, W)
        assert bool(ga.has_updated(state)) is closes


def test_a_function_that_drops_windows_does_not_go_where_micro_steps_are_skipped():
    with pytest.raises(ValueError, match=r"Pass should_drop_window_fn=ga_optax\.drop_"):
        ga.MultiSteps(SGD, 2, should_skip_update_fn=ga.drop_window_if_not_finite)
    with pytest.raises(TypeError, match="should_drop_window_fn must be a function"):
        ga.MultiSteps(SGD, 2, should_drop_window_fn=True)


def test_any_function_may_drop_a_window():
    """Recognised by the argument it is given to, and not by its identity."""
    wrapped = lambda *args: ga.drop_window_if_not_finite(*args)  # noqa: E731
    large = lambda updates, step, params: (updates[0] > 5, {"seen": updates[0]})  # noqa: E731
    for drop, bad in ((wrapped, jnp.inf), (large, 100.0)):
        tx = ga.MultiSteps(SGD, 2, should_drop_window_fn=drop)
        params = jnp.ones(1)
        state = tx.init(params)
        for g in (bad, 1.0, 2.0, 4.0):
            params, state = ga.apply_gradients(tx, jnp.array([g]), state, params)
        stats = ga.stats(state)
        assert (int(stats.skipped_windows), int(stats.steps)) == (1, 1)
        assert (int(stats.skipped_micro_steps), int(stats.micro_steps)) == (0, 4)
    assert float(state.drop_state["seen"]) == 3.0  # the mean, as the optimizer sees it


def test_micro_steps_are_skipped_and_windows_dropped_in_one_run():
    tx = ga.MultiSteps(
        SGD,
        2,
        should_skip_update_fn=optax.skip_not_finite,
        should_drop_window_fn=lambda updates, *_: (updates[0] > 5, ()),
    )
    params = jnp.ones(1)
    state = tx.init(params)
    for g in (jnp.nan, 100.0, 1.0, 2.0, 4.0):
        params, state = ga.apply_gradients(tx, jnp.array([g]), state, params)
    stats = ga.stats(state)
    assert (int(stats.skipped_micro_steps), int(stats.skipped_windows)) == (1, 1)
    assert (int(stats.steps), int(stats.fill)) == (1, 0)


def test_a_skip_function_that_is_none_raises():
    with pytest.raises(TypeError, match="should_skip_update_fn must be a function"):
        ga.MultiSteps(SGD, 2, should_skip_update_fn=True)


@pytest.mark.parametrize("emit", [1, "yes", W > 0, jnp.int32(1), np.bool_(1)])
def test_an_emit_that_is_no_bool_raises(emit):
    tx = ga.MultiSteps(SGD, 2)
    with pytest.raises(TypeError, match="a Python bool, or a bool scalar"):
        ga.apply_gradients(tx, GRADS, tx.init(PARAMS), PARAMS, emit=emit)


def test_what_only_a_multi_steps_can_do_is_refused_elsewhere():
    chain = optax.chain(optax.clip(1.0), ga.MultiSteps(SGD, 2))
    state = chain.init(PARAMS)
    with pytest.raises(TypeError, match=r"emit needs tx .*MultiSteps\(optax.chain"):
        ga.apply_gradients(chain, GRADS, state, PARAMS, emit=True)
    with pytest.raises(TypeError, match="flush needs tx"):
        ga.flush(chain, state, PARAMS)
    with pytest.raises(ValueError, match="there is none"):
        ga.apply_gradients(SGD, GRADS, SGD.init(PARAMS), PARAMS, weight=2.0)
    # And what it can do works there.
    params, state = ga.apply_gradients(chain, GRADS, state, PARAMS, weight=2.0)
    params, _ = ga.apply_gradients(SGD, GRADS, SGD.init(PARAMS), params)
    np.testing.assert_allclose(params["dense"]["bias"], 0.9)


def test_a_state_without_an_accumulator_cannot_hold_a_window():
    one, four = ga.MultiSteps(SGD, 1), ga.MultiSteps(SGD, 4)
    with pytest.raises(ValueError, match=r"every_k_schedule=1.*_replace"):
        four.update(GRADS, one.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="every_k_schedule=1"):
        ga.apply_gradients(one, GRADS, one.init(PARAMS), PARAMS, emit=False)
    # What the message advises works.
    old = one.init(PARAMS)
    new = four.init(PARAMS)._replace(inner_opt_state=old.inner_opt_state)
    four.update(GRADS, new, PARAMS)


def test_a_state_that_is_none_raises():
    tx = ga.MultiSteps(SGD, 2)
    with pytest.raises(TypeError, match="must be a MultiStepsState"):
        tx.update(GRADS, SGD.init(PARAMS), PARAMS)


def test_swapped_arguments_are_called_swapped():
    tx = ga.MultiSteps(SGD, 2)
    chain = optax.chain(tx, optax.scale(1.0))
    state = tx.init(PARAMS)
    for call in (
        lambda: ga.apply_gradients(tx, GRADS, PARAMS, state),
        lambda: ga.apply_gradients(tx, state, GRADS, PARAMS),
        lambda: ga.apply_gradients(chain, GRADS, PARAMS, chain.init(PARAMS)),
        lambda: tx.update(GRADS, PARAMS, state),
        lambda: tx.update(state, GRADS, PARAMS),
        lambda: ga.flush(tx, PARAMS, state),
    ):
        with pytest.raises(TypeError, match=r"Swapped\?.*grads, state, params"):
            call()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ga.MultiSteps(ga.MultiSteps(SGD, 4), 2), r"2 x 4 = 8 micro-steps"),
        (lambda: ga.MultiSteps(optax.MultiSteps(SGD, 4), 2), "it is an optax.MultiS"),
        (
            lambda: ga.MultiSteps(optax.chain(SGD, ga.MultiSteps(SGD, 4)), 2),
            r"holds a MultiStepsState at \[1\].*k x \(its k\)",
        ),
        (
            lambda: ga.MultiSteps(
                optax.chain(optax.MultiSteps(SGD, 4).gradient_transformation()), 2
            ),
            r"holds a MultiStepsState at \[0\]",
        ),
    ],
    ids=["ours", "theirs", "ours-chained", "theirs-chained"],
)
def test_windows_of_windows_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make().init(PARAMS)


DECIDES = {
    "skip_state": {"should_skip_update_fn": optax.skip_not_finite},
    "drop_state": {"should_drop_window_fn": ga.drop_window_if_not_finite},
}


@pytest.mark.parametrize("field", DECIDES)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("made", ["before", "from_optax", "otherwise"])
def test_a_state_made_without_what_decides_names_the_argument(field, jit, made):
    (name,) = DECIDES[field]
    tx = ga.MultiSteps(SGD, 2, **DECIDES[field])
    old = {
        "before": lambda: ga.MultiSteps(SGD, 2).init(PARAMS),
        "from_optax": lambda: ga.from_optax(optax.MultiSteps(SGD, 2).init(PARAMS)),
        "otherwise": lambda: tx.init(PARAMS)._replace(**{field: {"other": W}}),
    }[made]()
    apply = functools.partial(ga.apply_gradients, tx)
    apply = jax.jit(apply) if jit else apply
    with pytest.raises(ValueError, match=rf"(?s){field}.*{name}.*_replace\({field}="):
        apply(GRADS, old, PARAMS)
    # What the message advises works, in the middle of a window too.
    held = old._replace(mini_step=jnp.int32(1))
    new = held._replace(**{field: getattr(tx.init(PARAMS), field)})
    assert int(apply(GRADS, new, PARAMS)[1].gradient_step) == 1


@pytest.mark.parametrize("dtype", [jnp.int32, bool, jnp.complex64])
def test_an_accumulator_dtype_that_is_not_floating_raises(dtype):
    with pytest.raises(TypeError, match="floating dtype"):
        ga.MultiSteps(SGD, 2, accumulator_dtype=dtype)
