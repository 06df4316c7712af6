"""The contract table: every optimizer of Optax x every transformation of JAX.

The reference is always the bare optimizer, given the mean of the window once. The
gradients are dyadic numbers, so that their mean is exact and nothing but the
optimizer itself rounds: float64 compares to 1e-14, float32 and bfloat16 to what their
precision leaves.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
from helpers import leaves_of, off

import ga_optax as ga

NAMES = sorted(optimizers.factories())
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
        self.opt = optax.with_extra_args_support(optimizers.factories()[name]())
        self.params, self.grads, self.mean, loss = optimizers.problem(dtype)
        self.extra = optimizers.extra_arguments(name, self.params, self.mean, loss)
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
        if self.name in optimizers.DIFFERENCES:
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


def precision(dtype):
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


@table("float64", "float32", "bfloat16")
def test_under_jit_and_scan_it_gives_what_the_bare_optimizer_gives(name, dtype):
    with precision(dtype):
        case = make_case(name, dtype)
        tx = ga.MultiSteps(case.opt, 2)
        stacked = jax.tree.map(lambda *g: jnp.stack(g * 2), *case.grads)

        @jax.jit
        def four_micro_steps(state):
            def body(state, g):
                updates, state = tx.update(g, state, case.params, **case.extra)
                return state, updates

            return jax.lax.scan(body, state, stacked)

        # The scan itself proves that the state keeps its structure and dtypes.
        state, updates = four_micro_steps(tx.init(case.params))
        assert int(state.gradient_step) == 2
        inner = jax.tree.map(lambda s: s.dtype, state.inner_opt_state)
        assert inner == case.state_dtypes
        for i in (0, 2):
            assert all(np.all(np.asarray(u[i]) == 0) for u in jax.tree.leaves(updates))
        if name not in optimizers.RANDOM or dtype != "bfloat16":
            case.check(jax.tree.map(lambda u: u[1], updates))


@table("float32", "bfloat16")
def test_under_vmap_each_replica_gets_its_own_step(name, dtype):
    with precision(dtype):
        case = make_case(name, dtype)
        tx = ga.MultiSteps(case.opt, 2)
        pair = jax.tree.map(lambda g: jnp.stack([g, 3 * g]), case.grads)
        ours = jax.jit(jax.vmap(lambda grads: case.window(tx, grads)))(pair)
        if name not in optimizers.RANDOM:
            case.check(jax.tree.map(lambda u: u[0], ours))


@table("float32", "bfloat16")
def test_reverse_mode_through_a_window_is_that_through_the_bare_optimizer(name, dtype):
    with precision(dtype):
        case = make_case(name, dtype)
        tx = ga.MultiSteps(case.opt, 2)

        def squared(updates):
            leaves = jax.tree.leaves(updates)
            return sum(jnp.sum(jnp.square(u.astype(float))) for u in leaves)

        def of_bare(scale):
            seen = case.precision.dtype
            grads = jax.tree.map(lambda g: (scale * g).astype(seen), case.mean)
            return squared(case.step(grads))

        def of_window(scale):
            grads = jax.tree.map(lambda g: (scale * g).astype(g.dtype), case.grads)
            return squared(case.window(tx, grads))

        one = jnp.ones([], float)
        if name in optimizers.NOT_DIFFERENTIABLE:
            for function in (of_bare, of_window):
                with pytest.raises(ValueError, match="while_loop"):
                    jax.jit(jax.grad(function))(one)
            return
        value, slope = jax.jit(jax.value_and_grad(of_bare))(one)
        ours, our_slope = jax.jit(jax.value_and_grad(of_window))(one)
        assert np.isfinite(ours)
        assert np.isfinite(our_slope) == np.isfinite(slope)
        if case.precision.bits < 32:
            return  # computed in bfloat16 throughout, a slope is mostly rounding
        # bfloat16 rounds gradients and updates on the way, forwards and backwards.
        eps = float(jnp.finfo(dtype).eps)
        # Some slopes are NaN (a square root at 0), here and on their own.
        tolerance = 64 * eps * float(np.nan_to_num(abs(slope)) + abs(value))
        if name not in optimizers.RANDOM:
            np.testing.assert_allclose(ours, value, rtol=0, atol=tolerance)
        if name not in optimizers.DECOMPOSE:
            np.testing.assert_allclose(our_slope, slope, rtol=0, atol=tolerance)


def test_gradients_of_examples_are_refused_inside_and_added_up_outside():
    params, grads, *_ = optimizers.problem(jnp.float32)
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
    case.check(case.window(ga.MultiSteps(case.opt, 2), case.grads))
    dropped = case.window(ga.MultiSteps(case.opt, 2), [case.grads[0]] * 2)
    summed = ga.MultiSteps(case.opt, 2, use_grad_mean=False)
    for wrong in (dropped, case.window(summed, case.grads)):
        with pytest.raises(AssertionError):
            case.check(wrong)
