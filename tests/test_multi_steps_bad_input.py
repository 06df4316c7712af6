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
OTHER = {"dense": {"kernel": jnp.ones((3, 3)), "bias": jnp.ones(3)}}
WHOLE = {**PARAMS, "name": "a model"}
SGD, PLATEAU = optax.sgd(0.1), optax.contrib.reduce_on_plateau()
PLAIN = optax.scale(-1.0)
DROPS = {"should_drop_window_fn": ga.drop_window_if_not_finite}
W = jnp.ones(1)


def make(k=2, opt=SGD, **options):
    return lambda: ga.MultiSteps(opt, k, **options)


def init(k=2, opt=SGD, **options):
    return lambda: ga.MultiSteps(opt, k, **options).init(PARAMS)


def of(way, tx, grads=GRADS, params=PARAMS, state=None, **options):
    """A call of `update`, of `apply_gradients` or of `flush`."""
    state = tx.init(PARAMS) if state is None else state
    if way == "update":
        return tx.update(grads, state, params, **options)
    if way == "flush":
        return ga.flush(tx, state, params, **options)
    return ga.apply_gradients(tx, grads, state, params, **options)


def update(*args, k=2, opt=SGD, of_tx=None, **options):
    """`update` of a `MultiSteps`, of which `of_tx` are options."""
    return lambda: of(
        "update", ga.MultiSteps(opt, k, **(of_tx or {})), *args, **options
    )


def apply(*args, k=2, opt=SGD, of_tx=None, **options):
    return lambda: of("apply", ga.MultiSteps(opt, k, **(of_tx or {})), *args, **options)


def flush(tx, *args, **options):
    return lambda: of("flush", tx, *args, **options)


def schedule(k):
    return update(k=lambda step: k)


def skips(answer):
    return init(should_skip_update_fn=lambda *_: answer)


def chained(of_inner):
    return init(opt=optax.chain(SGD, of_inner))


TX, CHAIN = make()(), optax.chain(optax.clip(1.0), make()())
STATE, HELD = TX.init(PARAMS), CHAIN.init(PARAMS)
AVERAGES = {"opt": PLATEAU, "of_tx": {"mean_argnames": "value"}}
SWAPPED = r"Swapped\?.*grads, state, params"

VALUE = [
    # The length of a window.
    (make(0), "at least 1, but it is 0"),
    (make(np.int32(0)), "at least 1"),
    (schedule(0), "at least 1, but it is 0"),
    (schedule(jnp.ones(2)), r"integer scalar, but it returned float32\[2\]"),
    (schedule(True), "integer scalar, but it returned bool"),
    (init(opt=make(4)()), r"2 x 4 = 8 micro-steps"),
    (init(opt=optax.MultiSteps(SGD, 4)), "it is an optax.MultiS"),
    (chained(make(4)()), r"holds a MultiStepsState at \[1\].*k x \(its k\)"),
    (
        chained(optax.MultiSteps(SGD, 4).gradient_transformation()),
        r"holds a MultiStepsState at \[1\]",
    ),
    # Functions that skip.
    (skips((jnp.ones(2, bool), ())), r"boolean scalar.*dtype bool and shape \(2,\)"),
    (skips((jnp.float32(1.0), ())), r"boolean scalar.*dtype float32 and shape \(\)"),
    (skips(jnp.array(True)), "the pair"),
    (
        make(should_skip_update_fn=ga.drop_window_if_not_finite),
        r"Pass should_drop_window_fn=ga_optax\.drop_",
    ),
    # Trees and weights.
    (apply(GRADS, OTHER), r"\['dense'\]\['kernel'\].*params"),
    (flush(TX, GRADS, OTHER), r"\['dense'\]\['kernel'\].*params"),
    *(
        (call(weight=weight, k=k), words)
        for call in (update, apply)
        for k in (1, 2)
        for weight, words in (
            (-1.0, "not negative, but it is -1.0"),
            (float("nan"), "finite.*nan"),
            (jnp.ones(3), r"scalar, but it has shape \(3,\)"),
        )
    ),
    # What the optimizer takes.
    *(
        (update(GRADS, None, k=k, opt=opt), "needs the parameters, but params is None")
        for opt in (optax.adamw(0.1), optax.novograd(0.1))
        for k in (1, 2)
    ),
    (make(opt=PLATEAU, mean_argnames="weight"), "mean_argnames must name"),
    (make(opt=PLATEAU, mean_argnames=("value", 3)), "mean_argnames must name"),
    (apply(value=W, **AVERAGES), r"value must be a scalar.*\(1,\)"),
    (apply(value=3.0, state=STATE, **AVERAGES), r"mean_argnames.*\(arg_totals"),
    # States.
    (lambda: of("apply", SGD, weight=2.0), "there is none"),
    (lambda: ga.stats(SGD.init(PARAMS)), "there is none"),
    (update(k=4, state=init(1)()), r"every_k_schedule=1.*_replace"),
    (apply(k=1, emit=False), "every_k_schedule=1"),
    (apply(k=1, emit=jnp.array(True)), "must hold an accumulator"),
]
TYPE = [
    (make(2.0), "int or a function, but it is 2.0 of type float"),
    (make(True), "True of type bool"),
    (make(jnp.array(2)), "int or a function"),
    *((make(opt=opt), "must be an optax") for opt in (optax.adam, None, "adam", 3)),
    (make(should_skip_update_fn=True), "should_skip_update_fn must be a function"),
    (make(should_drop_window_fn=True), "should_drop_window_fn must be a function"),
    (make(accumulator_dtype=jnp.int32), "floating dtype"),
    (make(accumulator_dtype=jnp.complex64), "floating dtype"),
    *((update(weight=w), name) for w, name in ((True, "bool"), ("3", "str"))),
    # Parameters that are no arrays: it says how to split them.
    (lambda: TX.init(WHOLE), r"leaf \['name'\] of params.*partition"),
    (update(GRADS, WHOLE), r"leaf \['name'\] of params.*partition"),
    (apply(GRADS, WHOLE), r"leaf \['name'\] of params.*partition"),
    (apply(GRADS, None, opt=optax.adamw(0.1)), "params must be the parameters"),
    # Extra arguments: one that is misspelt does not go to the optimizer in silence.
    *(
        (call(**{name: 3.0}), f"'{name}' looks like '(weight|emit)'")
        for call in (update, apply)
        for name in ("weights", "wieght", "emits")
    ),
    *(
        (
            lambda tx=tx: of("apply", tx, loss=3.0),
            r"plain GradientTransformation.*'loss'",
        )
        for tx in (make(opt=PLAIN)(), copy.copy(make(opt=PLAIN)()), PLAIN)
    ),
    (flush(make(opt=PLAIN)(), loss=3.0), r"plain GradientTransformation.*'loss'"),
    (lambda: of("apply", optax.GradientTransformation(*TX), weight=2), "'weight'"),
    (update(GRADS, None, opt=PLATEAU), "'value'"),
    *(
        (apply(**given, **AVERAGES), r"value must be a real number.*every call")
        for given in ({}, {"value": None}, {"value": "3"})
    ),
    *(
        (apply(emit=emit), "a Python bool, or a bool scalar")
        for emit in (1, "yes", W > 0, jnp.int32(1), np.bool_(1))
    ),
    # What only a MultiSteps can do, and states that are none.
    (
        lambda: of("apply", CHAIN, emit=True),
        r"emit needs tx .*MultiSteps\(optax.chain",
    ),
    (flush(CHAIN), "flush needs tx"),
    (update(state=SGD.init(PARAMS)), "must be a MultiStepsState"),
    *(
        (functools.partial(call, *args), SWAPPED)
        for call, args in (
            (ga.apply_gradients, (TX, GRADS, PARAMS, STATE)),
            (ga.apply_gradients, (TX, STATE, GRADS, PARAMS)),
            (ga.apply_gradients, (CHAIN, GRADS, PARAMS, HELD)),
            (TX.update, (GRADS, PARAMS, STATE)),
            (TX.update, (STATE, GRADS, PARAMS)),
            (ga.flush, (TX, PARAMS, STATE)),
        )
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [(call, ValueError, words) for call, words in VALUE]
    + [(call, TypeError, words) for call, words in TYPE],
)
def test_what_cannot_be_raises_and_says_what_came(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_what_those_messages_advise_works():
    of("apply", TX, GRADS, value=3.0)  # optimizers take other arguments
    of("apply", CHAIN, GRADS, weight=2.0)
    chain = optax.chain(make(opt=PLAIN)(), optax.identity())
    of("apply", chain, value=3.0, weight=2)  # a chain gives them to all its members
    for k in (1, 2):
        update(GRADS, None, k=k)()  # this one needs no parameters
    old, new = init(1)(), init(4)()
    update(k=4, state=new._replace(inner_opt_state=old.inner_opt_state))()
    skip = {"should_skip_update_fn": lambda *_: (True, ())}
    _, state = apply(of_tx=skip)()
    assert int(ga.stats(state).skipped_micro_steps) == 1
    params, _ = of("apply", SGD)
    np.testing.assert_allclose(params["dense"]["bias"], 0.9)


def spoil(**leaves):
    dense = {**GRADS["dense"], **leaves}
    return {"dense": {name: leaf for name, leaf in dense.items() if leaf is not None}}


SPOILT = [
    (spoil(bias=None), ValueError, r"\['dense'\]\['bias'\] is missing"),
    (spoil(extra=jnp.ones(1)), ValueError, r"\['dense'\]\['extra'\].*not in"),
    (spoil(bias=jnp.ones(4)), ValueError, r"\['dense'\]\['bias'\].*\(3,\).*\(4,\)"),
    (spoil(bias=jnp.ones(3, int)), TypeError, r"\['dense'\]\['bias'\].*int32"),
    (spoil(bias=1), ValueError, r"\['dense'\]\['bias'\].*\(\)"),
]


@pytest.mark.parametrize(("grads", "error", "words"), SPOILT)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_gradients_that_do_not_fit_raise_trace_nothing_and_lose_nothing(
    grads, error, words, k, jit
):
    traced = []

    def skip(*args):
        traced.append(args)
        return jnp.zeros([], bool), ()

    tx = ga.MultiSteps(optax.adam(0.1), k, should_skip_update_fn=skip)
    step = functools.partial(ga.apply_gradients, tx)
    step = jax.jit(step, donate_argnums=(1, 2)) if jit else step
    params, state = jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS)
    copies = jax.tree.map(np.asarray, (params, state))
    traced.clear()
    with pytest.raises(error, match=words):
        step(grads, state, params)
    assert not traced  # before anything of the user's
    # Not donated, not changed.
    jax.tree.map(np.testing.assert_array_equal, (params, state), copies)
    step(GRADS, state, params)
    assert traced


def test_the_gradient_of_an_integer_that_jax_makes_raises():
    params = {"w": W, "n": jnp.array([1, 2])}
    grads = jax.grad(lambda p: jnp.sum(p["w"]), allow_int=True)(params)
    with pytest.raises(TypeError, match=r"\['n'\].*float0.*zeros_like"):
        ga.apply_gradients(TX, grads, TX.init(params), params)
    zeros = {**grads, "n": jnp.zeros_like(params["n"])}  # what the message advises
    ga.apply_gradients(TX, zeros, TX.init(params), params)


DECIDES = {
    "skip_state": {"should_skip_update_fn": optax.skip_not_finite},
    "drop_state": DROPS,
}


@pytest.mark.parametrize("field", DECIDES)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("made", ["before", "from_optax", "otherwise"])
def test_a_state_made_without_what_decides_names_the_argument(field, jit, made):
    (name,) = DECIDES[field]
    tx = ga.MultiSteps(SGD, 2, **DECIDES[field])
    old = {
        "before": STATE,
        "from_optax": ga.from_optax(optax.MultiSteps(SGD, 2).init(PARAMS)),
        "otherwise": tx.init(PARAMS)._replace(**{field: {"other": W}}),
    }[made]
    apply = functools.partial(ga.apply_gradients, tx)
    apply = jax.jit(apply) if jit else apply
    with pytest.raises(ValueError, match=rf"(?s){field}.*{name}.*_replace\({field}="):
        apply(GRADS, old, PARAMS)
    # What the message advises works, in the middle of a window too.
    held = old._replace(mini_step=jnp.int32(1))
    new = held._replace(**{field: getattr(tx.init(PARAMS), field)})
    assert int(apply(GRADS, new, PARAMS)[1].gradient_step) == 1
