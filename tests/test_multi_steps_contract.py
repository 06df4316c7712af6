"""The contract table: every optimizer of Optax x every transformation of JAX.

The reference is always the bare optimizer, given the mean of the window once. The
gradients are dyadic numbers, so that their mean is exact and nothing but the
optimizer itself rounds: float64 compares to 1e-14, float32 and bfloat16 to what their
precision leaves. What optax and optax.contrib have is found by inspection, so what a
newer one adds is tested with its defaults.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import leaves_of, off

import ga_optax as ga

RATE = 1e-2
ADAM = optax.adam(RATE)
MASK = {"b": False, "w": True}
BY_MASK = {"x": ADAM, "y": optax.sgd(RATE)}, {"b": "x", "w": "y"}

# What they take beside a rate: by position, or what must be given by its name.
POSITIONAL = {
    "add_noise": [0.1, 0.5, 0],
    "chain": [optax.clip(1.0), ADAM],
    "multi_transform": BY_MASK,
    "named_chain": [("clip", optax.clip(1.0)), ("adam", ADAM)],
    "noisy_sgd": [RATE, 0.01, 0.55, 0],
    "partition": BY_MASK,
    "sam": [optax.sgd(RATE), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))],
}
NAMED = {
    **dict.fromkeys(("base_optimizer", "inner", "optimizer", "tx"), ADAM),
    **dict.fromkeys(("freeze_mask", "mask"), MASK),
    **dict.fromkeys(("max_delta", "max_norm", "threshold"), 1.0),
    **dict.fromkeys(("max_backtracking_steps", "max_linesearch_steps"), 4),
    "clipping": 0.1,
    "decay": 0.9,
    "f": lambda updates, params: updates,
    "max_consecutive_errors": 3,
    "should_transform_fn": lambda n: n > 0,
    "step_size_fn": lambda n: 0.1 * n,
}

# Not optimizers on their own, or not for gradients with the parameters' shapes.
LEFT_OUT = {
    "inject_hyperparams": "tested by name in test_multi_steps_composition.py",
    "inject_stateful_hyperparams": "as inject_hyperparams",
    "lookahead": "takes LookaheadParams, two trees in one",
    "measure_with_ema": "wraps a function of the user's",
    "snapshot": "wraps a function of the user's",
    "scale_by_muon": "needs a tree of dimension numbers; muon makes it",
    "differentially_private_aggregate": "takes one gradient per example",
    "dpsgd": "takes one gradient per example",
}

# Their result depends on the dtype or the moment in which they draw.
RANDOM = {"add_noise", "noisy_sgd"}

# Their updates are differences of parameters, which are stored in the dtype.
DIFFERENCES = {
    "madgrad",
    "scale_by_madgrad",
    "schedule_free",
    "schedule_free_adamw",
    "schedule_free_sgd",
}

# Their slopes divide by differences of singular values, some of which are close: in
# float32 nothing but rounding is left of them, another on each kind of CPU.
DECOMPOSE = {"galore", "scale_by_galore"}

# They loop until a condition holds, which has no reverse mode, on their own either.
NOT_DIFFERENTIABLE = {"lbfgs", "scale_by_zoom_linesearch"}


def factories():
    """Each transformation of Optax by its name, as a function that makes it."""
    found = {}
    for name, factory in (vars(optax) | vars(optax.contrib)).items():
        if name.startswith("_") or name in LEFT_OUT or not callable(factory):
            continue
        try:
            signature = inspect.signature(factory)
        except (TypeError, ValueError):
            continue
        if "GradientTransformation" not in str(signature.return_annotation):
            continue
        positional = POSITIONAL.get(name, ())
        named = {
            p.name: NAMED.get(p.name, RATE)
            for p in signature.parameters.values()
            if p.default is p.empty
            and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            and not positional
        }
        found[name] = functools.partial(factory, *positional, **named)
    return found


FACTORIES = factories()


def problem(dtype):
    """Parameters, two gradients with an exact mean, and a loss."""
    w = jnp.arange(12.0).reshape(4, 3) / 8
    params = {"b": jnp.full(3, 0.5), "w": w - 0.5}
    mean = {"b": jnp.array([0.5, -1.0, 0.25]), "w": 1.0 - w}
    apart = {"b": jnp.full(3, 0.25), "w": jnp.full((4, 3), 0.125)}
    grads = [
        jax.tree.map(jnp.add, mean, apart),
        jax.tree.map(jnp.subtract, mean, apart),
    ]

    def loss(p):
        terms = jax.tree.map(lambda x: jnp.sum(jnp.square(x - 1)), p)
        return terms["b"] + terms["w"]

    cast = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)  # noqa: E731
    return cast(params), [cast(g) for g in grads], cast(mean), loss


def extra_arguments(name, params, mean, loss):
    """What this transformation wants beside the gradient, and only that."""
    if name == "sam":
        return {}
    if name == "sophia":
        return {"obj_fn": loss}
    if "momo" in name or "polyak" in name or name == "reduce_on_plateau":
        return {"value": loss(params)}
    if "lbfgs" in name or "linesearch" in name:
        return {"value": loss(params), "grad": mean, "value_fn": loss}
    return {}


NAMES = sorted(FACTORIES)
# One of each kind: no state, moments, a sign, factored moments, a chain, differences.
QUICK = ("sgd", "adam", "lion", "adafactor", "chain", "schedule_free")

pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]


def table(*dtypes):
    """Every optimizer in every dtype; all tests of one run one after another."""
    cases = [
        pytest.param(
            name,
            dtype,
            marks=pytest.mark.quick if name in QUICK else pytest.mark.published,
        )
        for name in NAMES
        for dtype in dtypes
    ]
    return pytest.mark.parametrize(("name", "dtype"), cases, scope="module")


class Case:
    """One optimizer in one dtype, and what it does on its own."""

    def __init__(self, name, dtype):
        self.name, self.dtype = name, dtype
        self.opt = optax.with_extra_args_support(FACTORIES[name]())
        self.tx = ga.MultiSteps(self.opt, 2)
        self.params, self.grads, self.mean, loss = problem(dtype)
        self.extra = extra_arguments(name, self.params, self.mean, loss)
        step = jax.jit(self.step)
        bare = step(self.mean)
        self.dtypes = jax.tree.map(lambda u: u.dtype, bare)
        state = jax.eval_shape(self.opt.init, self.params)
        self.state_dtypes = jax.tree.map(lambda s: s.dtype, state)
        # Inside, it sees the accumulator's dtype, where it can take it.
        self.precision = max(
            jnp.finfo(dtype), jnp.finfo(jnp.float32), key=lambda info: info.bits
        )
        seen = jax.tree.map(lambda g: g.astype(self.precision.dtype), self.mean)
        try:
            expected = step(seen)
        except (TypeError, ValueError, FutureWarning):
            self.precision, expected = jnp.finfo(dtype), bare
        self.expected = jax.tree.map(lambda u, d: u.astype(d), expected, self.dtypes)

    def step(self, grads):
        """The updates of the bare optimizer's first step."""
        state = self.opt.init(self.params)
        return self.opt.update(grads, state, self.params, **self.extra)[0]

    def window(self, tx, grads):
        """The updates of the last of some micro-steps, one after another."""
        state = tx.init(self.params)
        for g in grads:
            updates, state = tx.update(g, state, self.params, **self.extra)
        return updates

    def check(self, updates):
        """Compares up to 32 roundings of quantities as large as the parameters.

        Some updates are differences of parameters, and the longest ones (Muon's
        polynomials) round about as often; what is stored is rounded once more.
        """
        parameters = _size(self.params)
        atol = 32 * float(self.precision.eps) * (_size(self.expected) + parameters)
        if self.name in DIFFERENCES:
            atol += float(jnp.finfo(self.dtype).eps) * parameters
        assert jax.tree.structure(updates) == jax.tree.structure(self.expected)
        for u, e in leaves_of(updates, self.expected):
            assert u.dtype == e.dtype
            np.testing.assert_allclose(
                np.asarray(u, np.float64),
                np.asarray(e, np.float64),
                rtol=float(jnp.finfo(e.dtype).eps),
                atol=atol,
            )


def _size(tree):
    leaves = [np.abs(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)]
    return max(x[np.isfinite(x)].max(initial=0.0) for x in leaves)


@functools.lru_cache(maxsize=4)
def make_case(name, dtype):
    """The case, which all of its tests share."""
    return Case(name, dtype)


@pytest.fixture
def case(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        yield make_case(name, dtype)


@table("float64", "float32", "bfloat16")
def test_under_jit_and_scan_it_gives_what_the_bare_optimizer_gives(case):
    stacked = jax.tree.map(lambda *g: jnp.stack(g * 2), *case.grads)

    @jax.jit
    def four_micro_steps(state):
        def body(state, g):
            updates, state = case.tx.update(g, state, case.params, **case.extra)
            return state, updates

        return jax.lax.scan(body, state, stacked)

    # The scan itself proves that the state keeps its structure and dtypes.
    state, updates = four_micro_steps(case.tx.init(case.params))
    assert int(state.gradient_step) == 2
    inner = jax.tree.map(lambda s: s.dtype, state.inner_opt_state)
    assert inner == case.state_dtypes
    for i in (0, 2):
        assert all(np.all(np.asarray(u[i]) == 0) for u in jax.tree.leaves(updates))
    if case.name not in RANDOM or case.dtype != "bfloat16":
        case.check(jax.tree.map(lambda u: u[1], updates))


@table("float32", "bfloat16")
def test_under_vmap_each_replica_gets_its_own_step(case):
    pair = jax.tree.map(lambda g: jnp.stack([g, 3 * g]), case.grads)
    ours = jax.jit(jax.vmap(lambda grads: case.window(case.tx, grads)))(pair)
    if case.name not in RANDOM:
        case.check(jax.tree.map(lambda u: u[0], ours))


@table("float32", "bfloat16")
def test_reverse_mode_through_a_window_is_that_through_the_bare_optimizer(case):
    def squared(updates):
        leaves = jax.tree.leaves(updates)
        return sum(jnp.sum(jnp.square(u.astype(float))) for u in leaves)

    def of_bare(scale):
        seen = case.precision.dtype
        grads = jax.tree.map(lambda g: (scale * g).astype(seen), case.mean)
        return squared(case.step(grads))

    def of_window(scale):
        grads = jax.tree.map(lambda g: (scale * g).astype(g.dtype), case.grads)
        return squared(case.window(case.tx, grads))

    one = jnp.ones([], float)
    if case.name in NOT_DIFFERENTIABLE:
        for function in (of_bare, of_window):
            with pytest.raises(ValueError, match="while_loop"):
                jax.jit(jax.grad(function))(one)
        return
    (value, slope), (ours, our_slope) = (
        jax.jit(jax.value_and_grad(of))(one) for of in (of_bare, of_window)
    )
    assert np.isfinite(ours)
    assert np.isfinite(our_slope) == np.isfinite(slope)
    if case.precision.bits < 32:
        return  # computed in bfloat16 throughout, a slope is mostly rounding
    # bfloat16 rounds gradients and updates on the way, forwards and backwards.
    eps = float(jnp.finfo(case.dtype).eps)
    # Some slopes are NaN (a square root at 0), here and on their own.
    tolerance = 64 * eps * float(np.nan_to_num(abs(slope)) + abs(value))
    if case.name not in RANDOM:
        np.testing.assert_allclose(ours, value, rtol=0, atol=tolerance)
    if case.name not in DECOMPOSE:
        np.testing.assert_allclose(our_slope, slope, rtol=0, atol=tolerance)


def test_gradients_of_examples_are_refused_inside_and_added_up_outside():
    params, grads, *_ = problem(jnp.float32)
    of_two = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads[0])
    private = optax.contrib.differentially_private_aggregate(1.0, 0.0, key=0)
    inside = ga.MultiSteps(optax.chain(private, optax.sgd(0.1)), 2)
    with pytest.raises(ValueError, match=r"\['b'\].*\(3,\).*\(2, 3\)"):
        inside.update(of_two, inside.init(params), params)
    outside = optax.chain(private, ga.MultiSteps(optax.sgd(0.1), 2))
    state = outside.init(params)
    for last in (False, True):
        updates, state = outside.update(of_two, state, params)
        assert bool(ga.has_updated(state)) == last
    plain = optax.chain(private, optax.sgd(0.1))
    due, _ = plain.update(of_two, plain.init(params), params)
    assert np.abs(due["w"]).max() > 0
    assert off(updates, due) < 4 * np.finfo(np.float32).eps


def test_the_table_covers_what_optax_has_and_can_fail():
    assert len(NAMES) > 90
    assert {"adam", "muon", "lbfgs", "galore", "schedule_free", "mechanize"} <= {*NAMES}
    case = Case("sgd", "float32")
    case.check(case.window(case.tx, case.grads))
    dropped = case.window(case.tx, [case.grads[0]] * 2)
    summed = ga.MultiSteps(case.opt, 2, use_grad_mean=False)
    for wrong in (dropped, case.window(summed, case.grads)):
        with pytest.raises(AssertionError):
            case.check(wrong)
