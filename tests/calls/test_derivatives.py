"""Derivatives of gradients are those of `jax.value_and_grad`, whatever rules say.

A rule may be another function than the derivative: a straight-through estimator, one
that is not linear in its cotangent, or one that calls functions with rules. Each is
differentiated twice, forward and backward over `value_and_grad`, and over the gradient
of `microbatch`, with rows that meet in a mean and with rows that do not. In float64,
where some hundred terms are off by 1e-12 at most, but for what JAX itself computes to
fewer digits. What is wrong is off by more than 1e-2.
"""

import functools
import importlib

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import apart, mesh_of, off, with_rule
from jax import scipy
from jax._src import config
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._partition import reductions
from ga_optax._passes import read

pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation", "float64"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
BOUND = 1e-10
N, D, K = 8, 3, 4


def arguments():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape)) for shape in ((D, D), (N, D))]


def twice(step, forward=True):
    """Products of the Hessian, forward and backward over a gradient."""

    def both(w, x):
        value, pull = jax.vjp(lambda w: step(w, x)[1], w)
        back = pull(jnp.sin(value))
        if not forward:
            return value, back
        return value, back, jax.jvp(lambda w: step(w, x)[1], (w,), (jnp.cos(w),))[1]

    return both


def of_microbatch(loss, k=K):
    return jax.value_and_grad(ga.microbatch(loss, k))


def centred(h):
    return h - h.mean(0, keepdims=True)


def loss_of(f, meets, of_weights=False):
    """A loss in which `f` has numbers around 1/2, of rows or of weights."""

    def loss(w, x):
        near = 0.5 + 0.2 * jnp.tanh(w if of_weights else x @ w)
        h = f(near)
        h = jnp.tanh(x @ h) if of_weights else h
        return jnp.mean(jnp.sin(centred(h) if meets else h) ** 2)

    return loss


# -- Rules of one's own ----------------------------------------------------------------

rounded = with_rule(lambda v: jnp.round(4 * v) / 4, lambda _, ct: (ct,))
bending = with_rule(jnp.tanh, lambda v, ct: (ct / (1 + jnp.abs(ct)) * v[0],))
straight = jax.custom_jvp(lambda v: jnp.round(4 * v) / 4)
straight.defjvp(lambda xs, ts: (straight(*xs), ts[0]))
square = jax.custom_jvp(lambda v: v**2)  # whose rule calls a function with a rule
square.defjvp(lambda xs, ts: (square(*xs), 2 * straight(*xs) * ts[0]))
calling = with_rule(jnp.sin, lambda v, ct: (square(ct) * straight(*v),))
alike = jax.custom_jvp(lambda v: jnp.round(4 * v) / 4)  # the program of `straight`
alike.defjvp(lambda xs, ts: (straight(*xs) + 0 * alike(*xs), jnp.cos(xs[0]) * ts[0]))
# Rows meet in these, there and on the way back.
scaled = with_rule(
    lambda v: v / jnp.max(jnp.abs(v)), lambda v, ct: (ct / jnp.max(jnp.abs(*v)),)
)
clipped = with_rule(jnp.sin, lambda v, ct: (ct / (1 + jnp.max(jnp.abs(ct))) * v[0],))
OWN = {
    "scaled": scaled,
    "clipped": clipped,
    "rounded": rounded,
    "bending": bending,
    "straight": straight,
    "square": square,
    "calling": calling,
    "alike": alike,
}


@pytest.mark.grid(5, 16)
@pytest.mark.parametrize("of_weights", [False, True], ids=["rows", "weights"])
@pytest.mark.parametrize("meets", [False, True], ids=["apart", "meet"])
@pytest.mark.parametrize("name", OWN)
def test_second_derivatives_are_those_of_the_rule(name, meets, of_weights):
    loss = loss_of(OWN[name], meets, of_weights)
    want = twice(jax.value_and_grad(loss))
    for step in (ga.value_and_grad(loss, K), of_microbatch(loss)):
        assert apart(twice(step), want, *arguments()) < BOUND


def test_the_twin_of_the_true_derivative_is_off():
    for rule, true in ((square, lambda v: v**2), (bending, jnp.tanh)):
        got, want = (twice(jax.value_and_grad(loss_of(f, True))) for f in (rule, true))
        assert apart(got, want, *arguments()) > 1e-2


EXTREMA = {
    "of all": lambda v: v / jnp.max(jnp.abs(v)),
    "of columns": lambda v: v / jnp.max(v, 0),
    "with ties": lambda v: v * jnp.min(jnp.maximum(v, 0.5), 0),
    "of what a user compares": lambda v: v * jnp.where(v == v.max(0), 2.0, jnp.sin(v)),
}


@pytest.mark.grid(2, 99)
@pytest.mark.parametrize("name", EXTREMA)
def test_some_row_attains_an_extremum_whatever_the_passes_round(name):
    x = np.random.default_rng(2).normal(size=(N, D))
    w, loss = arguments()[0], loss_of(EXTREMA[name], True)
    want = twice(jax.value_and_grad(loss))(w, x)  # one by one, an array rounds once
    for step in (ga.value_and_grad(loss, K), of_microbatch(loss)):
        assert off(jax.jit(twice(step))(w, x), want) < BOUND


def test_one_number_attains_an_extremum_that_was_rounded_in_another_way():
    x = jnp.array([[1.0, 3.0], [3.0, 2.0]])
    for is_max, first in ((True, [[0, 0], [1, 0]]), (False, [[1, 0], [0, 0]])):
        exact = x.max() if is_max else x.min()
        with_ties = reductions.attaining(is_max, (0, 1), x, exact)
        assert np.array_equal(with_ties, x == exact)
        for other in (exact + 1e-15 * 8, exact - 1e-15 * 8):
            assert not (x == other).any()  # the twin
            assert np.array_equal(reductions.attaining(is_max, (0, 1), x, other), first)
        nan = reductions.attaining(is_max, (0, 1), x.at[0, 0].set(jnp.nan), jnp.nan)
        assert not nan.any()  # as in JAX, where the gradient is NaN


# -- Those of JAX and Optax ------------------------------------------------------------


def cross_entropy(v):
    labels = jax.nn.softmax(2 * v)
    return optax.losses.safe_softmax_cross_entropy(4 * v, labels)[:, None]


def softmax(v):
    with config.softmax_custom_jvp(True):
        return jax.nn.softmax(v)


def special(name, *before, after=()):
    """A function of `jax.scipy.special`, with other arguments before and after."""

    def f(v):
        return sum(jax.tree.leaves(getattr(scipy.special, name)(*before, v, *after)))

    return None if not hasattr(scipy.special, name) else f


PLAIN = "dawsn entr erfcinv erfcx expi fresnel log_ndtr logit ndtri sici"
RULES = {
    "relu": lambda v: jax.nn.relu(v - 0.5),
    "relu6": lambda v: jax.nn.relu6(12 * v),
    "log1mexp": jax.nn.log1mexp,
    "softmax": softmax,
    "logaddexp": lambda v: jnp.logaddexp(v, 2 * v),
    "sinc": jnp.sinc,
    "scale_gradient": lambda v: optax.scale_gradient(v, 0.5) ** 2,
    "projection": jax.vmap(lambda v: optax.projections.projection_simplex(4 * v)),
    "cross entropy": cross_entropy,
    "wofz": lambda v: jnp.real(scipy.special.wofz(v.astype(complex))),
    "xlogy": lambda v: scipy.special.xlogy(v, 2 * v),
    "xlog1py": lambda v: scipy.special.xlog1py(v, v),
    "rel_entr": lambda v: scipy.special.rel_entr(v, 2 * v**2),
    "kl_div": lambda v: scipy.special.kl_div(v, 2 * v**2),
    "zeta": special("zeta", 3.0),
    "expn": special("expn", 3),
    "poch": special("poch", after=(2.0,)),
    "hyp1f1": special("hyp1f1", 0.3, 1.7),
    "hyp2f1": special("hyp2f1", 0.3, 0.6, 1.7),
    "owens_t": special("owens_t", after=(0.4,)),
    **{name: special(name) for name in PLAIN.split(" ")},
}
RULES = {name: f for name, f in RULES.items() if f is not None}
if jax.__version_info__ < (0, 11):  # JAX itself cannot compile the second derivative
    del RULES["expn"]
# What takes long to compile.
LONG = {"erfcinv", "erfcx", "expn", "hyp1f1", "hyp2f1", "ndtri", "owens_t", "poch"}
LONG |= {"log_ndtr", "sici", "wofz", "zeta"}
NO_FORWARD_MODE = {"scale_gradient"}  # a forward rule that calls its own function
MODULES = (
    *("jax._src.nn.functions", "jax._src.scipy.special"),
    *("jax._src.third_party.scipy.special", "optax._src.utils"),
    *("optax.projections._projections", "optax.losses._classification"),
)


@pytest.mark.grid(3, 12)
@pytest.mark.parametrize("meets", [False, True], ids=["apart", "meet"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.exhaustive) if x in LONG else x for x in RULES],
)
def test_second_derivatives_of_what_has_a_rule_are_right(name, meets):
    loss, forward = loss_of(RULES[name], meets), name not in NO_FORWARD_MODE
    want = twice(jax.value_and_grad(loss), forward)
    for step in (ga.value_and_grad(loss, K), of_microbatch(loss)):
        assert apart(twice(step, forward), want, *arguments()) < BOUND


def rules_of(module):
    """The functions of a module that have rules, under any `jax.jit`."""
    found = set()
    for x in vars(importlib.import_module(module)).values():
        while hasattr(x, "__wrapped__"):
            if isinstance(x, jax.custom_jvp | jax.custom_vjp):
                found.add(x.__wrapped__.__name__)
            x = x.__wrapped__
    return found


def rules_in(fun, *args):
    names = "custom_jvp_call", "custom_vjp_call"
    found = read.equations(jax.make_jaxpr(fun)(*args).jaxpr)
    inner = [read.inner_programs(e)[0] for e in found if e.primitive.name in names]
    return {str(x.debug_info.func_src_info).split(" ")[0] for x in inner}


@pytest.mark.slow
def test_every_rule_of_jax_and_optax_is_in_the_table():
    """Those that only a rule calls are in the gradient."""
    reached = set()
    for f in RULES.values():
        loss = loss_of(f, False)
        reached |= rules_in(loss, *arguments()) | rules_in(jax.grad(loss), *arguments())
    for module in MODULES:
        found = rules_of(module)
        assert found
        assert found <= reached


# -- Wherever it stands ----------------------------------------------------------------

LOSS = loss_of(lambda v: bending(square(v)), True)


def meta(step, w, x):
    """A loss after a step of training: its gradient has second derivatives."""
    return LOSS(w - 0.1 * step(LOSS)(w, x)[1], x)


def trained(step, w, x):
    """Steps in a loop, with the loss of all."""

    @jax.checkpoint
    def one(w, _):
        value, grad = step(LOSS)(w, x)
        return w - 0.1 * grad, value

    return jnp.sum(jax.lax.scan(one, w, None, 2)[1])


def of_tasks(step, w, x):
    """Each from weights of its own."""
    tasks = jnp.stack([w, 2 * w, jnp.sin(w)])
    losses, grads = jax.vmap(step(LOSS), (0, None))(tasks, x)
    return jnp.sum(losses) + jnp.sum(grads**2)


def of_what_it_closes_over(step, w, x):
    around = jnp.sin(w)
    value, grad = step(lambda w, x: LOSS(w * around, x))(w, x)
    return value + jnp.sum(jnp.cos(grad))


def of_rows_and_aux(step, w, x):
    """With respect to arguments of every role, and of what comes beside the loss."""

    def loss(w, x, *, scale):
        h = bending(x @ w) * scale
        return jnp.mean(centred(h) ** 2), {"h": h, "mean": jnp.mean(h), "k": 3}

    scale = jnp.sum(w)
    (value, aux), grad = step(loss, has_aux=True)(w, jnp.sin(x @ w), scale=scale)
    assert aux.pop("k") == 3
    return value + sum(jnp.sum(jnp.sin(v)) for v in (*aux.values(), grad))


def of_the_gradient_alone(step, w, x):
    return jnp.sum(jax.grad(lambda w: jnp.sum(step(LOSS)(w, x)[1] ** 2))(w) ** 2)


PROGRAMS = (
    *(meta, trained, of_tasks, of_what_it_closes_over, of_rows_and_aux),
    of_the_gradient_alone,
)


def in_micro_batches(loss, **options):
    return ga.value_and_grad(loss, K, **options)


@pytest.mark.grid(2, 6)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_gradient_in_a_program_has_the_derivatives_of_the_rules(program):
    ours = jax.value_and_grad(functools.partial(program, in_micro_batches))
    plain = jax.value_and_grad(functools.partial(program, jax.value_and_grad))
    assert apart(ours, plain, *arguments()) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("program", [meta, of_rows_and_aux])
def test_so_it_has_in_a_window(program):
    """Where it has a derivative, and where it has none."""

    def losses(step):
        def both(w, x):
            fixed = program(step, jax.lax.stop_gradient(w), x)
            return program(step, w, x) + jnp.mean((x @ w) ** 2) * fixed

        return both

    ours = ga.value_and_grad(losses(in_micro_batches), 2)
    plain = jax.value_and_grad(losses(jax.value_and_grad))
    assert apart(ours, plain, *arguments()) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"optimize": False}, {"residual_bytes": 0}])
def test_no_option_changes_a_derivative(options):
    ours = ga.value_and_grad(LOSS, K, **options)
    assert apart(twice(ours), twice(jax.value_and_grad(LOSS)), *arguments()) < BOUND


def test_a_loss_that_reads_no_row_has_second_derivatives():
    loss = lambda w, x: jnp.sum(square(w) ** 2)  # noqa: E731
    steps = (ga.value_and_grad(loss, 2, optimize=False), jax.value_and_grad(loss))
    got, want = (jax.jit(twice(step))(*arguments()) for step in steps)
    assert helpers.off(got, want) < BOUND


@pytest.mark.slow
def test_derivatives_that_are_not_compiled_are_the_same():
    steps = ga.value_and_grad(LOSS, 2), jax.value_and_grad(LOSS)
    got, want = (twice(step)(*arguments()) for step in steps)
    assert helpers.off(got, want) < BOUND


def test_what_a_loss_tells_it_tells_once_if_its_gradient_is_differentiated():
    told = []

    def loss(w, x):
        value = LOSS(w, x)
        jax.debug.callback(told.append, value)
        return value

    step = jax.jit(twice(ga.value_and_grad(loss, K), forward=False))
    jax.block_until_ready(step(*arguments()))
    jax.effects_barrier()
    assert len(told) == 1


def test_tangents_and_cotangents_may_be_numbers_of_python():
    def loss(w, x):
        return jnp.mean(jnp.sin(w * x) ** 2)

    x = arguments()[1]
    slope, ours = jax.grad(loss), ga.microbatch(loss, K)
    got = jax.jvp(lambda w: ours(w, x), (2.0,), (1.0,))[1]
    assert abs(got - slope(2.0, x)) < BOUND
    step = ga.value_and_grad(loss, K)
    [got] = jax.vjp(lambda w: step(w, x)[1], 2.0)[1](1.0)
    assert abs(got - jax.grad(slope)(2.0, x)) < BOUND


# -- What it takes ---------------------------------------------------------------------


def deep(f):
    def loss(w, x):
        for _ in range(8):
            x = f(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    return loss


def pushed(step):
    return lambda w, x: jax.jvp(lambda w: step(w, x)[1], (w,), (w,))[1]


def pulled(step):
    return jax.grad(lambda w, x: jnp.sum(step(w, x)[1] ** 2))


@pytest.mark.parametrize(
    ("f", "way", "most"),
    [
        (rounded, pushed, 0.15),
        (jnp.sin, pulled, 0.15),
        (centred, pushed, 0.4),
        pytest.param(centred, pulled, 0.8, marks=pytest.mark.slow),
    ],
)
def test_second_derivatives_take_the_memory_of_a_few_micro_batches(f, way, most):
    """Where rows meet they are what they need of each other, there and back, too."""

    def temporaries(step):
        args = (jax.ShapeDtypeStruct(s, "float32") for s in ((16, 16), (4096, 16)))
        compiled = jax.jit(way(step)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    undivided = temporaries(jax.value_and_grad(deep(f)))
    assert temporaries(ga.value_and_grad(deep(f), 16)) < most * undivided


# -- On a mesh -------------------------------------------------------------------------


@pytest.mark.parametrize("meets", [False, True], ids=["apart", "meet"])
def test_with_a_data_axis_second_derivatives_are_those_of_the_rule(meets):
    axis = ga.DataAxis("d", mesh=mesh_of(names=("d",)))
    loss = loss_of(square, meets)
    ours = twice(ga.value_and_grad(loss, 2, data_axis=axis))
    assert apart(ours, twice(jax.value_and_grad(loss)), *arguments()) < BOUND


def in_region(loss, check_vma=False):
    step = ga.value_and_grad(loss, 2, data_axis="d")
    specs = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": check_vma}
    return jax.shard_map(step, mesh=mesh_of(names=("d",)), **specs)


def test_data_that_attains_an_extremum_fits_a_region_that_checks():
    def loss(w, x):
        data = jnp.sin(x)
        return jnp.mean((jnp.where(data == data.max(0), 2.0, 0.5) * (x @ w)) ** 2)

    for check_vma in (False, True):
        got = in_region(loss, check_vma)
        assert apart(got, jax.value_and_grad(loss), *arguments()) < BOUND


REFUSED = r"cannot be differentiated in a jax\.shard_map, or with mesh axes"


@pytest.mark.parametrize("rule", [rounded, straight], ids=["vjp", "jvp"])
def test_in_a_region_of_the_users_a_rule_has_one_derivative(rule):
    loss = loss_of(rule, True)
    assert apart(in_region(loss), jax.value_and_grad(loss), *arguments()) < BOUND
    with pytest.raises(NotImplementedError, match=REFUSED):
        jax.eval_shape(twice(in_region(loss)), *arguments())


def microbatch_in_region(loss, check_vma=False):
    step = ga.microbatch(loss, 2, data_axis="d")
    specs = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": check_vma}
    return jax.shard_map(step, mesh=mesh_of(names=("d",)), **specs)


def microbatch_by_type(loss):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))

    def step(w, x):
        data_axis = ga.DataAxis("d", mesh=mesh)
        x = jax.sharding.reshard(x, jax.NamedSharding(mesh, P("d")))
        return ga.microbatch(loss, 2, data_axis=data_axis)(w, x)

    return step


@pytest.mark.parametrize(
    ("rule", "wrap"),
    [
        (bending, microbatch_in_region),
        (square, microbatch_by_type),
        pytest.param(bending, microbatch_by_type, marks=pytest.mark.slow),
        pytest.param(square, microbatch_in_region, marks=pytest.mark.slow),
    ],
)
def test_so_it_has_in_microbatch_also_if_weights_meet_it(rule, wrap):
    """A cotangent that is complete goes through it once."""
    for of_weights in (True, False):
        loss = loss_of(rule, True, of_weights)
        ours = jax.value_and_grad(wrap(loss))
        assert apart(ours, jax.value_and_grad(loss), *arguments()) < BOUND
    with pytest.raises(NotImplementedError, match=REFUSED):
        jax.eval_shape(twice(ours), *arguments())


def test_in_a_region_that_checks_microbatch_has_gradients():
    loss = loss_of(rounded, True)
    ours = jax.value_and_grad(microbatch_in_region(loss, check_vma=True))
    assert apart(ours, jax.value_and_grad(loss), *arguments()) < BOUND


def test_there_a_rule_of_weights_that_is_not_linear_is_refused():
    loss = loss_of(bending, False, of_weights=True)
    with pytest.raises(NotImplementedError, match="must have check_vma=False"):
        jax.eval_shape(microbatch_in_region(loss, check_vma=True), *arguments())
    with pytest.raises(NotImplementedError, match="must have check_vma=False"):
        jax.eval_shape(in_region(loss, check_vma=True), *arguments())


@pytest.mark.slow
def test_there_what_has_no_rule_but_those_of_jax_has_all():
    loss = loss_of(lambda v: jnp.logaddexp(jnp.sin(v), v), True)
    ours, plain = twice(in_region(loss)), twice(jax.value_and_grad(loss))
    assert apart(ours, plain, *arguments()) < BOUND
