"""Rules that close over arrays which the function around them computes."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from helpers import error, mesh_of, off
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

import ga_optax as ga
from ga_optax._passes import effects

pytestmark = pytest.mark.usefixtures("optax_promotion")
N, D, K = 12, 4, 3
BOUND = 2e-6
PARAMS = 0.3 * jnp.ones((2, D, D))
BATCH = {
    "scale": jax.random.uniform(jax.random.key(1), (N, 1)) + 0.5,
    "x": jax.random.normal(jax.random.key(0), (N, D)),
}
# jax 0.10.0 forgets the variable of a value that only rules read.
OLDEST = jax.__version_info__ == (0, 10, 0)


def of_cotangents(c, back):
    """`h * c`, with a backward rule that closes over `c`, as does the function."""
    rule = jax.custom_vjp(lambda h: h * c)
    rule.defvjp(lambda h: (rule(h), h), lambda h, g: (back(g, c) + 0.1 * h,))
    return rule


def of_tangents(c, back):
    rule = jax.custom_jvp(lambda h: h * c)
    rule.defjvp(lambda hs, ts: (rule(*hs), back(ts[0], c) + 0.1 * c * ts[0]))
    return rule


def asking(c, back):
    """Rules that are told which tangents are zero: none is here."""
    rule = jax.custom_jvp(lambda h: h * c)

    def jvp(hs, ts):
        assert type(ts[0]) is not SymbolicZero
        return rule(*hs), back(ts[0], c)

    rule.defjvp(jvp, symbolic_zeros=True)
    return rule


def by_decorator(c, back):
    return jax.custom_gradient(lambda h: (h * c, lambda g: back(g, c)))


RULES = {
    "cotangents": of_cotangents,
    "tangents": of_tangents,
    "asking": asking,
    "decorator": by_decorator,
}
VALUES = {
    "constants": lambda batch: jnp.cos(jnp.arange(1.0, 1 + D)),
    "rows": lambda batch: jnp.sqrt(batch["scale"]),
    "a mean of rows": lambda batch: batch["x"].mean(0),
    "an argument": lambda batch: batch["scale"],
}
BACK = {
    "by row": lambda g, c: g * c,
    "rows meet": lambda g, c: g * c - g.mean(0),
    "the rule alone reads it": lambda g, c: g * (1 + c**2).sum(-1, keepdims=True),
}
LAYERS = {
    "open": lambda layer, h, p: layer(layer(h, p[0])[0], p[1])[0],
    "vmap": lambda layer, h, p: jax.vmap(lambda x: layer(x, p[0])[0])(h),
    "scan": lambda layer, h, p: lax.scan(layer, h, p)[0],
    "checkpoint": lambda layer, h, p: lax.scan(jax.checkpoint(layer), h, p)[0],
    "jit": lambda layer, h, p: jax.jit(layer)(h, p[0])[0],
    "cond": lambda layer, h, p: lax.cond(
        p[0, 0, 0] > 0, lambda h: layer(h, p[0])[0], lambda h: h, h
    ),
}


def loss_of(rule, value, back=BACK["by row"], layers=LAYERS["open"]):
    def loss(params, batch):
        ruled = rule(value(batch), back)
        h = layers(lambda h, w: (jnp.tanh(ruled(h @ w)), None), batch["x"], params)
        return jnp.mean(h**2)

    return loss


def both(loss, *, as_it_is=False):
    """How far a gradient, and one through `microbatch`, are off; also without `jit`."""
    divided = ga.microbatch(loss, K, batch_argnums=1)
    ours = ga.value_and_grad(loss, K)
    calls = [jax.jit(ours), jax.jit(jax.value_and_grad(divided))]
    want = jax.value_and_grad(loss)(PARAMS, BATCH)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The gradient is computed of all rows at once")
        return [off(f(PARAMS, BATCH), want) for f in [*calls, *[ours] * as_it_is]]


@pytest.mark.quick
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_closes_over_what_the_loss_computes(rule):
    assert max(both(loss_of(RULES[rule], VALUES["constants"]), as_it_is=True)) < BOUND


@pytest.mark.grid(4, 12)
@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("back", BACK)
@pytest.mark.parametrize("rule", RULES)
def test_of_rows_and_where_rows_meet(rule, back, value):
    if OLDEST and value == "a mean of rows":
        pytest.skip("jax 0.10.0")
    assert max(both(loss_of(RULES[rule], VALUES[value], BACK[back]))) < BOUND


@pytest.mark.grid(4, 12)
@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("rule", ["cotangents", "tangents"])
def test_in_programs_of_programs(rule, layers):
    """Under `jax.jit` JAX refuses some of them."""
    value = VALUES["a mean of rows" if layers == "vmap" else "constants"]
    loss = loss_of(RULES[rule], value, layers=LAYERS[layers])
    assert max(both(loss)) < BOUND


def mapped(rule):
    """A rule that is made inside of `jax.vmap`, of what it maps."""

    def loss(params, batch):
        def row(scale, x):
            h = RULES[rule](jnp.sin(scale), BACK["the rule alone reads it"])(
                x @ params[0]
            )
            return jnp.tanh(h) @ params[1]

        h = jax.vmap(row)(batch["scale"], batch["x"])
        return jnp.mean((h - h.mean(0)) ** 2)

    return loss


@pytest.mark.parametrize("rule", ["tangents", "asking", "decorator"])
def test_a_rule_closes_over_what_a_vmap_around_it_maps(rule):
    loss = mapped(rule)
    assert max(both(loss, as_it_is=True)) < BOUND
    both_ways = ga.value_and_grad(loss, K), jax.value_and_grad(loss)
    ours, want = (
        jax.jit(jax.grad(lambda p, f=f: jnp.vdot(f(p, BATCH)[1], p)))(PARAMS)
        for f in both_ways
    )
    assert off(ours, want) < BOUND
    assert ga.batch_dependencies(loss, K)(PARAMS, BATCH).meetings


def test_an_array_that_is_a_parameter_s_is_refused_as_jax_refuses_it():
    def loss(params, batch):
        ruled = of_cotangents(jnp.sin(params[0, 0]), BACK["by row"])
        return jnp.mean(ruled(batch["x"] @ params[1]) ** 2)

    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.grad(loss)(PARAMS, BATCH)
    divided = jax.grad(ga.microbatch(loss, K, batch_argnums=1))
    for call in (ga.value_and_grad(loss, K), jax.jit(divided)):
        with pytest.raises(NotImplementedError, match="an argument of the function"):
            call(PARAMS, BATCH)


@pytest.mark.parametrize("back", ["by row", "rows meet"])
def test_on_devices(back):
    axis = ga.DataAxis("data", mesh=mesh_of(4))
    loss = loss_of(of_cotangents, VALUES["rows"], BACK[back])
    assert error(loss, K, PARAMS, BATCH, data_axis=axis) < BOUND


def refuses(back):
    """`h * t`, whose rule refuses that `t` has a tangent."""
    rule = jax.custom_vjp(lambda h, t: h * t)

    def forward(h, t):
        if t.perturbed:
            raise RuntimeError("a tangent of t")
        return h.value * t.value, t.value

    rule.defvjp(forward, lambda t, g: (back(g, t), None), symbolic_zeros=True)
    return rule


def fixed(layer, h, p, t):
    """A scan with `t` in the carry, to which no iteration adds."""
    step = lambda c, w: ((layer(c[0], w, c[1])[0], c[1]), None)  # noqa: E731
    return lax.scan(step, (h, t), p)[0][0]


SCANS = {
    "a constant": lambda layer, h, p, t: lax.scan(lambda h, w: layer(h, w, t), h, p)[0],
    "a slice": lambda layer, h, p, t: lax.scan(
        lambda h, xs: layer(h, *xs), h, (p, jnp.stack([t, t]))
    )[0],
    "a carry": fixed,
    "a branch": lambda layer, h, p, t: lax.cond(
        p[0, 0, 0] > 0, lambda h, t: layer(h, p[0], t)[0], lambda h, t: h, h, t
    ),
}


def refusing(scan, back, moves=False):
    def loss(params, batch):
        ruled, t = refuses(back), batch["x"].mean(0)
        t = t + params[0, 0] if moves else t
        return jnp.mean(
            SCANS[scan](
                lambda h, w, t: (jnp.tanh(ruled(h @ w, t)), None), batch["x"], params, t
            )
            ** 2
        )

    return loss


@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("back", ["by row", "rows meet"])
@pytest.mark.parametrize("scan", SCANS)
def test_no_tangent_is_asked_for_that_never_comes(scan, back):
    if scan == "a branch" and back == "rows meet":
        with pytest.warns(UserWarning, match="cond, at .* computed whole"):
            assert max(both(refusing(scan, BACK[back]))) < BOUND
    else:
        assert max(both(refusing(scan, BACK[back]))) < BOUND
    moves = refusing(scan, BACK[back], moves=True)  # the twin
    with pytest.raises(RuntimeError, match="a tangent of t"):
        jax.grad(moves)(PARAMS, BATCH)
    with pytest.raises(RuntimeError, match="a tangent of t"):
        jax.jit(ga.value_and_grad(moves, K))(PARAMS, BATCH)


def in_scan(ruled, params, batch):
    """The carry of the rule has a derivative by what is written to a reference."""

    def body(carry, w):
        h, other = carry
        h = ruled(other) * batch["x"] + h * w[0]
        ref = jax.new_ref(other)
        ref[...] = h
        return (h, ref[...]), None

    start = batch["x"], jnp.ones_like(batch["x"])
    return lax.scan(body, start, params)[0][0]


@pytest.mark.filterwarnings("ignore:The gradient is computed of all rows")
def test_what_is_written_to_a_reference_has_a_derivative():
    def loss(params, batch):
        rule = jax.custom_vjp(lambda h: jnp.sin(h))
        rule.defvjp(lambda h: (rule(h), None), lambda _, g: (jnp.clip(g, -0.02, 0.02),))
        return jnp.mean(in_scan(rule, params, batch) ** 2)

    assert error(loss, K, PARAMS, BATCH) < BOUND


def test_a_rule_whose_side_effects_are_asked_for_can_be_run_again():
    """JAX forgets the trees of a rule that raises, but not the program."""

    def loss(params, batch):
        h, t = batch["x"] @ params[0], lax.stop_gradient(batch["x"].mean(0))
        return jnp.mean(refuses(BACK["rows meet"])(h, t) ** 2)

    jaxpr = jax.make_jaxpr(loss)(PARAMS, BATCH)
    call = jax.grad(lambda params: core.jaxpr_as_fun(jaxpr)(params, *BATCH.values())[0])
    for _ in range(2):  # the first time the rule has not been traced
        assert effects.side_effects(jaxpr.jaxpr.replace()).nonlinear_backward
        assert off(call(PARAMS), jax.grad(loss)(PARAMS, BATCH)) < BOUND
