"""The contract table: every optimizer of Optax x every transformation of JAX."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import leaves_of, train

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

# What takes functions, or more than numbers and optimizers.
OWN = {
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(
        optax.exponential_decay(RATE, 1, 0.5), momentum=0.9
    ),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.sgd)(
        RATE, momentum=0.9
    ),
    "lookahead": lambda: optax.lookahead(ADAM, 2, 0.5),  # it syncs in the second step
    "scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(weight_dimension_numbers=of_matrices), MASK
    ),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
}


def of_matrices(params):
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


# What a `MultiSteps` cannot hold: how it is made, and what is said of it.
NOISE = {"l2_norm_clip": 1.0, "noise_multiplier": 0.0}
PER_EXAMPLE = r"leaf \['b'\] of grads must have shape \(3,\).*\(2, 3\)"
NORM = optax.tree.norm
LEFT_OUT = {
    # It accumulates by itself.
    "apply_every": (lambda: optax.apply_every(2), "must not accumulate gradients"),
    # They take one gradient per example, and make a mean of them.
    "differentially_private_aggregate": (
        lambda: optax.contrib.differentially_private_aggregate(**NOISE, key=0),
        PER_EXAMPLE,
    ),
    "dpsgd": (lambda: optax.contrib.dpsgd(RATE, **NOISE, seed=0), PER_EXAMPLE),
    # It adds leaves to its state in its first update, so it goes into no loop either.
    "monitor": (lambda: optax.monitor({"norm": NORM}), r"\.measurements\['norm'\]"),
    # Its updates are a measurement, for `monitor`.
    "measure_with_ema": (lambda: optax.measure_with_ema(NORM, 0.9), "structure"),
}

# Optimizers whose signatures do not say what they return.
UNSAID = "scale_by_factored_rms", "dog", "dowg", "hutchinson_estimator_diag_hessian"

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


def factories():
    """Each transformation of Optax by its name, as a function that makes it."""
    every = vars(optax) | vars(optax.contrib)
    found = {name: make for name, make in OWN.items() if name in every}
    for name, factory in every.items():
        if name.startswith("_") or name in (*LEFT_OUT, *OWN):
            continue
        try:
            signature = inspect.signature(factory)
        except (TypeError, ValueError):
            continue
        says = signature.return_annotation
        if "GradientTransformation" not in str(says) and name not in UNSAID:
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
    grads = [jax.tree.map(lambda g, s=s: g + s / 8, mean) for s in (1, -1)]

    def loss(p):
        return jnp.sum(jnp.square(p["b"] - 1)) + jnp.sum(jnp.square(p["w"] - 1))

    return *jax.tree.map(lambda x: x.astype(dtype), (params, grads, mean)), loss


def extra_arguments(name, params, mean, loss):
    """What this transformation wants beside the gradient, and only that."""
    if name == "sam":
        return {}
    if name in ("sophia", "hutchinson_estimator_diag_hessian"):
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
    pytest.mark.filterwarnings("ignore:An optax.apply_if_finite inside"),
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
        self.params, self.grads, self.mean, loss = problem(dtype)
        self.extra = extra_arguments(name, self.params, self.mean, loss)
        if name == "lookahead":
            self.params = optax.LookaheadParams.init_synced(self.params)
        self.dtypes = dtypes_of(jax.eval_shape(self.step, self.mean))
        self.state_dtypes = dtypes_of(jax.eval_shape(self.opt.init, self.params))
        # Inside, it sees the accumulator's dtype, where it can take it.
        self.precision = max(
            jnp.finfo(dtype), jnp.finfo(jnp.float32), key=lambda info: info.bits
        )
        seen = jax.tree.map(lambda g: g.astype(self.precision.dtype), self.mean)
        run = jax.jit(self.two_steps)
        try:
            self.expected = run(seen)
        except (TypeError, ValueError, FutureWarning):
            self.precision, self.expected = jnp.finfo(dtype), run(self.mean)

    def two_steps(self, grads):
        """The updates of two steps of the bare optimizer, stacked."""

        def step(carry, _):
            params, state = carry
            updates, state = self.opt.update(grads, state, params, **self.extra)
            updates = jax.tree.map(jax.lax.convert_element_type, updates, self.dtypes)
            state = jax.tree.map(jax.lax.convert_element_type, state, self.state_dtypes)
            return (optax.apply_updates(params, updates), state), updates

        start = self.params, self.opt.init(self.params)
        return jax.lax.scan(step, start, length=2)[1]

    def step(self, grads):
        """The updates of the bare optimizer's first step."""
        state = self.opt.init(self.params)
        return self.opt.update(grads, state, self.params, **self.extra)[0]

    def check(self, updates, step=0):
        """Compares up to 32 roundings of quantities as large as the parameters."""
        parameters = _size(self.params)
        expected = jax.tree.map(lambda u: u[step], self.expected)
        atol = 32 * float(self.precision.eps) * (_size(expected) + parameters)
        if self.name in DIFFERENCES:
            atol += float(jnp.finfo(self.dtype).eps) * parameters
        assert jax.tree.structure(updates) == jax.tree.structure(expected)
        for u, e in leaves_of(updates, expected):
            assert u.dtype == e.dtype
            assert np.all(np.isfinite(np.asarray(e, np.float64)))
            np.testing.assert_allclose(
                np.asarray(u, np.float64),
                np.asarray(e, np.float64),
                rtol=float(jnp.finfo(e.dtype).eps),
                atol=atol,
            )


def dtypes_of(tree):
    return jax.tree.map(lambda x: x.dtype, tree)


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


def two_windows(case, k, around=lambda opt: opt):
    """The updates of two windows of k micro-steps under `scan`, and the state."""
    tx, grads = ga.MultiSteps(around(case.opt), k), [*case.grads, case.mean][-k:]
    stacked = jax.tree.map(lambda *g: jnp.stack(g * 2), *grads)

    def micro_step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params, **case.extra)
        return (optax.apply_updates(params, updates), state), updates

    # The scan itself proves that the state keeps its structure and dtypes.
    start = case.params, tx.init(case.params)
    (_, state), updates = jax.jit(jax.lax.scan, static_argnums=0)(
        micro_step, start, stacked
    )
    return updates, state


def check_two_windows(case, k, **options):
    updates, state = two_windows(case, k, **options)
    assert int(state.gradient_step) == 2
    assert dtypes_of(state.inner_opt_state) == case.state_dtypes
    for i in range(2 * k):
        now = jax.tree.map(lambda u: u[i], updates)  # noqa: B023
        if i % k < k - 1:
            assert all(np.all(np.asarray(u) == 0) for u in jax.tree.leaves(now))
        elif case.name not in RANDOM or case.dtype != "bfloat16":
            case.check(now, i // k)


@table("float64", "float32", "bfloat16")
def test_under_jit_and_scan_it_gives_what_the_bare_optimizer_gives(case):
    check_two_windows(case, 3)


@table("float32")
def test_a_window_of_one_micro_step_is_the_bare_optimizer(case):
    check_two_windows(case, 1)


@table("float32")
def test_with_its_state_on_the_host_it_is_the_bare_optimizer(case):
    check_two_windows(case, 3, around=ga.on_host)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_refused(name):
    make, said = LEFT_OUT[name]
    params, (grads, _), *_ = problem("float32")
    if said == PER_EXAMPLE:
        grads = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads)
    tx = ga.MultiSteps(make(), 3)
    with pytest.raises(ValueError, match=said):
        train(tx, [grads], params)


def test_the_table_covers_what_optax_has_and_can_fail():
    assert len(NAMES) > 90
    assert {"adam", "muon", "lbfgs", "galore", "schedule_free", "mechanize"} <= {*NAMES}
    assert {*UNSAID, *OWN} <= {*NAMES} | {*LEFT_OUT}
    case = Case("sgd", "float32")
    check_two_windows(case, 3)
    case.grads = case.grads[:1] * 2  # the twin: a micro-batch is dropped
    with pytest.raises(AssertionError):
        check_two_windows(case, 3)
