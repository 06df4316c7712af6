"""Derivatives of gradients are those of `jax.value_and_grad`, whatever rules say.

A rule may be another function than the derivative: a straight-through estimator, one
that is not linear in its cotangent, or one that calls functions with rules. Each is
differentiated twice, forward and backward over `value_and_grad`, and over the gradient
of `microbatch`, with rows that meet in a mean and with rows that do not. In float64,
where some hundred terms are off by 1e-12 at most, but for what JAX itself computes to
fewer digits. What is wrong is off by more than 1e-2.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import apart, mesh_of, off, temporaries, with_rule
from jax import scipy
from jax._src import config
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._partition import extrema

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
OWN = {"scaled": scaled, "clipped": clipped, "rounded": rounded, "bending": bending}
OWN |= {"straight": straight, "square": square, "calling": calling, "alike": alike}


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


INSIDE = {
    "max": lambda a: jnp.max(a, 1),
    "min": lambda a: jnp.min(a, 1),
    "of magnitudes": lambda a: jnp.max(jnp.abs(a), 1),
    "taken off": lambda a: jnp.sum((a - jnp.max(a, 1, keepdims=True)) ** 2, 1),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
@pytest.mark.parametrize("name", INSIDE)
def test_a_number_of_each_row_attains_an_extremum_of_the_row(name, dtype):
    x, y = np.random.default_rng(12).normal(size=(2, 8))

    def loss(t, x):
        a = x[:, None] * t * jnp.asarray(y, dtype)
        return jnp.mean(INSIDE[name](a - jnp.mean(a, 1, keepdims=True)))

    args = jnp.asarray(1.3, dtype), jnp.asarray(x, dtype)
    want = jax.value_and_grad(loss)(*args)  # one by one, an array rounds once
    # Means of 8 numbers and of 8 rows, and a square of a difference: 4 roundings more.
    bound = 4 * (8 + 8 + 4) * float(jnp.finfo(dtype).eps)
    for step in (ga.value_and_grad(loss, K), of_microbatch(loss)):
        with jax.numpy_rank_promotion("allow"):
            assert off(jax.jit(step)(*args), want) < bound


def test_one_number_attains_an_extremum_that_was_rounded_in_another_way():
    x = jnp.array([[1.0, 3.0], [3.0, 2.0]])
    for is_max, first in ((True, [[0, 0], [1, 0]]), (False, [[1, 0], [0, 0]])):
        exact = x.max() if is_max else x.min()
        with_ties = extrema.attaining(is_max, (0, 1), x, exact)
        assert np.array_equal(with_ties, x == exact)
        for other in (exact + 1e-15 * 8, exact - 1e-15 * 8):
            assert not (x == other).any()  # the twin
            assert np.array_equal(extrema.attaining(is_max, (0, 1), x, other), first)
        nan = extrema.attaining(is_max, (0, 1), x.at[0, 0].set(jnp.nan), jnp.nan)
        assert not nan.any()  # as in JAX, where the gradient is NaN


# -- Those of JAX and Optax ------------------------------------------------------------


def softmax(v):
    with config.softmax_custom_jvp(True):
        return jax.nn.softmax(v)


def cross_entropy(v):
    labels = jax.nn.softmax(2 * v)
    return optax.losses.safe_softmax_cross_entropy(4 * v, labels)[:, None]


# What has a rule of JAX or Optax, by the form of the rule: of one argument and of two,
# of functions that have rules, under `jax.vmap`, and of no forward mode.
RULES = {
    "relu": lambda v: jax.nn.relu(v - 0.5),
    "softmax": softmax,
    "sinc": jnp.sinc,
    "logaddexp": lambda v: jnp.logaddexp(v, 2 * v),
    "xlogy": lambda v: scipy.special.xlogy(v, 2 * v),
    "kl_div": lambda v: scipy.special.kl_div(v, 2 * v**2),
    "cross entropy": cross_entropy,
    "projection": jax.vmap(lambda v: optax.projections.projection_simplex(4 * v)),
    "scale_gradient": lambda v: optax.scale_gradient(v, 0.5) ** 2,
    "fresnel": lambda v: sum(scipy.special.fresnel(v)),
}


# Those of one's own are of weights, too.
CASES = [(name, meets, w) for name in OWN for meets in (0, 1) for w in (0, 1)]
CASES += [(name, meets, 0) for name in RULES for meets in (0, 1)]


@pytest.mark.grid(8, 28)
@pytest.mark.parametrize(("name", "meets", "of_weights"), CASES)
def test_second_derivatives_are_those_of_the_rule(name, meets, of_weights):
    loss = loss_of((OWN | RULES)[name], meets, of_weights)
    want = twice(jax.value_and_grad(loss), forward := name != "scale_gradient")
    for step in (ga.value_and_grad(loss, K), of_microbatch(loss)):
        assert apart(twice(step, forward), want, *arguments()) < BOUND


def kept(rule):
    """A product by which gradients are doubled, with a rule of this kind."""

    def product(h, w):
        return jnp.tanh(h @ w)

    if rule == "vjp":
        both = lambda saved, ct: jax.vjp(product, *saved)[1](2 * ct)  # noqa: E731
        return with_rule(product, both)
    ruled = jax.custom_jvp(product)
    ruled.defjvp(lambda xs, ts: jax.jvp(product, xs, tuple(2 * t for t in ts)))
    return ruled


def penalised(loss):
    """A loss of a gradient with respect to activations and weights, as in WGAN-GP."""

    def of_gradient(w, x):
        of_w, of_h = jax.grad(loss, (0, 1))(w, jnp.sin(x @ w))
        return jnp.mean(of_h**2 * x) + jnp.sum(jnp.sin(of_w))

    return of_gradient


INSIDE_OF = {
    "rowwise": lambda f: ga.rowwise(f, in_axes=(0, None)),
    "microbatch": lambda f: ga.microbatch(f, 2, batch_argnums=0),
    "both": lambda f: ga.rowwise(ga.microbatch(f, 2, batch_argnums=0), (0, None)),
}
AROUND = {
    "window": lambda loss: ga.value_and_grad(loss, K),
    "microbatch": of_microbatch,
    "twice": lambda loss: twice(jax.value_and_grad(ga.microbatch(loss, K)), False),
}


@pytest.mark.grid(3, 18)
@pytest.mark.parametrize(
    ("rule", "inside", "around"),
    [(r, i, a) for i in INSIDE_OF for a in AROUND for r in ("vjp", "jvp")],
)
def test_what_stands_beside_its_tangents_has_no_rule_any_more(rule, inside, around):
    """JAX differentiates a value once more as its rule computes it."""
    f = kept(rule)

    def loss(f):
        return lambda w, h: jnp.sum(jnp.sin(3 * f(h, w)) + centred(f(h, w)) ** 2)

    plain = jax.value_and_grad(penalised(loss(f)))
    want = twice(plain, False) if around == "twice" else plain
    ours = AROUND[around](penalised(loss(INSIDE_OF[inside](f))))
    assert apart(ours, want, *arguments()) < BOUND


def test_a_rule_of_the_users_around_a_function_of_jax_is_no_rule_of_jax():
    f = jax.custom_jvp(jnp.tanh)
    f.defjvp(lambda xs, ts: (jnp.tanh(xs[0]), 3 * ts[0]))

    def slopes(f):
        inner = jax.grad(lambda x: jnp.sum(f(x) ** 2))
        return jax.grad(lambda x: jnp.sum(inner(x)))

    ours = slopes(ga.microbatch(f, K, batch_argnums=0))
    assert apart(ours, slopes(f), arguments()[1]) < BOUND


@pytest.mark.parametrize("acts", [False, True])
def test_a_rule_prints_once_beside_what_the_function_prints(acts):
    told = []
    tell = functools.partial(jax.debug.callback, told.append)

    def own(h):
        if acts:
            tell(0)
        return jnp.tanh(h)

    ruled = jax.custom_vjp(jnp.tanh)
    ruled.defvjp(
        lambda h: (tell(1), (jnp.tanh(h), h))[1], lambda h, ct: (tell(2), (2 * ct,))[1]
    )
    f = ga.microbatch(lambda h: ruled(own(h)), K, batch_argnums=0)
    step = jax.jit(jax.grad(lambda w, x: jnp.mean(f(x @ w) ** 2)))
    jax.block_until_ready(step(*arguments()))
    jax.effects_barrier()
    assert sorted(map(int, told)) == [0, 1, 2][not acts :]


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


def without_rows(w, x):
    return jnp.sum(square(w) ** 2)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        pytest.param(LOSS, {"optimize": False}, marks=SLOW),
        pytest.param(LOSS, {"residual_bytes": 0}, marks=SLOW),
        (without_rows, {"optimize": False}),
        (loss_of(square, False), {"data_axis": "d"}),
        (loss_of(square, True), {"data_axis": "d"}),
    ],
)
def test_no_option_changes_a_derivative(loss, options):
    if "data_axis" in options:
        options = {"data_axis": ga.DataAxis("d", mesh=mesh_of(names=("d",)))}
    ours = twice(ga.value_and_grad(loss, 2, **options))
    assert apart(ours, twice(jax.value_and_grad(loss)), *arguments()) < BOUND


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
    args = [jax.ShapeDtypeStruct(s, "float32") for s in ((16, 16), (4096, 16))]
    steps = jax.value_and_grad(deep(f)), ga.value_and_grad(deep(f), 16)
    undivided, ours = (temporaries(jax.jit(way(step)), *args) for step in steps)
    assert ours < most * undivided


# -- On a mesh -------------------------------------------------------------------------


def in_region(loss, make=ga.value_and_grad, check_vma=False):
    step = make(loss, 2, data_axis="d")
    specs = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": check_vma}
    return jax.shard_map(step, mesh=mesh_of(names=("d",)), **specs)


def microbatch_in_region(loss, check_vma=False):
    return jax.value_and_grad(in_region(loss, ga.microbatch, check_vma))


def test_an_extremum_of_an_axis_that_a_mesh_with_types_splits_is_divided():
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("d", "m"), types, devices=jax.devices()[:4])
    x, w = np.float32(np.random.default_rng(1).normal(size=(2, 8, 8)))

    def loss(w, x):
        h = (x @ w).reshape(8, 4, 2)
        return jnp.mean(jnp.max(h, (1, 2))) + jnp.mean(jnp.min(h, 1))

    due = jax.value_and_grad(loss)(w, x)
    with jax.set_mesh(mesh):
        specs = jax.NamedSharding(mesh, P(None, "m")), jax.NamedSharding(mesh, P("d"))
        got = jax.jit(ga.value_and_grad(loss, 2))(*jax.device_put((w, x), specs))
    assert off(got, due) < 1e-5  # if all rows ran at once, it would warn


def attaining(w, x):
    """Data that attains an extremum."""
    data = jnp.sin(x)
    return jnp.mean((jnp.where(data == data.max(0), 2.0, 0.5) * (x @ w)) ** 2)


@pytest.mark.parametrize("check_vma", [False, True])
def test_in_a_region_that_checks_there_are_gradients(check_vma):
    ruled = loss_of(rounded, True)
    for wrap, loss in ((in_region, attaining), (microbatch_in_region, ruled)):
        got, want = wrap(loss, check_vma=check_vma), jax.value_and_grad(loss)
        assert apart(got, want, *arguments()) < BOUND


REFUSED = r"cannot be differentiated in a jax\.shard_map, or with mesh axes"


def microbatch_by_type(loss):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))

    def step(w, x):
        data_axis = ga.DataAxis("d", mesh=mesh)
        x = jax.sharding.reshard(x, jax.NamedSharding(mesh, P("d")))
        return ga.microbatch(loss, 2, data_axis=data_axis)(w, x)

    return jax.value_and_grad(step)


@pytest.mark.parametrize(
    ("rule", "wrap"),
    [
        *((rule, in_region) for rule in (rounded, straight)),
        *((bending, microbatch_in_region), (square, microbatch_by_type)),
    ],
)
def test_in_a_region_of_the_users_a_rule_has_one_derivative(rule, wrap):
    """Also if weights meet it: a cotangent that is complete goes through it once."""
    for of_weights in (True, False):
        loss = loss_of(rule, True, of_weights)
        ours = wrap(loss)
        assert apart(ours, jax.value_and_grad(loss), *arguments()) < BOUND
    with pytest.raises(NotImplementedError, match=REFUSED):
        jax.eval_shape(twice(ours), *arguments())


def test_there_a_rule_of_weights_that_is_not_linear_is_refused():
    loss = loss_of(bending, False, of_weights=True)
    for of_region in (microbatch_in_region, in_region):
        with pytest.raises(NotImplementedError, match="must have check_vma=False"):
            jax.eval_shape(of_region(loss, check_vma=True), *arguments())


@pytest.mark.slow
def test_there_what_has_no_rule_but_those_of_jax_has_all():
    loss = loss_of(lambda v: jnp.logaddexp(jnp.sin(v), v), True)
    ours, plain = twice(in_region(loss)), twice(jax.value_and_grad(loss))
    assert apart(ours, plain, *arguments()) < BOUND
