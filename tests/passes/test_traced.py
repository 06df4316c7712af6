"""What is alike is traced, differentiated and partitioned once."""

import collections

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, plain_scan
from jax.interpreters import ad

import ga_optax as ga
from ga_optax import accumulator
from ga_optax._partition import nested
from ga_optax._passes import jaxprs, pullback

LAYERS, WIDTH = 6, 4


def dense(params, x):
    for w in params:
        x = jnp.tanh(x @ w + 0.5 * jnp.square(x))
    return jnp.mean(x * x)


def arguments(dtype=jnp.float32):
    ws = [normal(WIDTH, WIDTH, seed=i).astype(dtype) for i in range(LAYERS)]
    return ws, normal(8, WIDTH, seed=9).astype(dtype)


def mixed(params, x):
    """Layers with a jitted function, a rule, a checkpoint, keys and a scan."""

    @jax.checkpoint
    def layer(x, w):
        return jax.nn.relu(jax.nn.softmax(x @ w) - 0.2)

    for i, w in enumerate(params):
        key = jax.random.fold_in(jax.random.key(0), i)
        keep = jax.random.bernoulli(key, 0.5, (WIDTH,))
        table = jnp.sin(jnp.arange(WIDTH, dtype=x.dtype) * 0.7)
        x = x + jnp.where(keep[None], layer(x, w), 0) * table[None]
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(params))
    return jnp.mean(jnp.square(x))


def by_jax(program, params, rest, known=None):
    """The backward pass as JAX writes it."""

    def evaluate(*params):
        loss, *more = jaxprs.results(program, [*params, *rest])
        return loss, more

    loss, pull, more = jax.vjp(evaluate, *params, has_aux=True)
    return [loss, *more], pull


def returning(params, x):
    """A rule whose gradient has no cotangent in it; results that get no cotangent."""

    @jax.custom_vjp
    def constant(x):
        return jnp.sin(x), x

    constant.defvjp(
        lambda x: (constant(x), None), lambda _, cts: (jnp.full_like(cts[0], 0.5),)
    )
    for w in params:
        wide, rest = jnp.split(x @ jnp.hstack([w, w]), [WIDTH + 1], axis=1)
        x = constant(wide[:, :WIDTH])[0] + jax.lax.stop_gradient(wide[:, WIDTH:])
        x = jnp.cumsum(x, axis=1) + jnp.sort(x, axis=1) + jnp.floor(rest[:, :1])
    return jnp.mean(x * x)


def before_zeros(params, x):
    """A rule that returns constants, behind cotangents of zeros, and behind none."""

    @jax.custom_vjp
    def constant(x):
        return jnp.sin(x)

    @jax.custom_vjp
    def zeros(x, y):
        return x + y

    half = jnp.float32(0.5)
    constant.defvjp(
        lambda x: (jnp.sin(x), None), lambda _, g: (jnp.full_like(g, half),)
    )
    zeros.defvjp(lambda x, y: (x + y, None), lambda _, g: (jnp.zeros_like(g), None))
    for w in params:
        x = zeros(constant(x @ w), constant(x * w[:1])) + x
    return jnp.mean(x * x)


def normed(params, x):
    """Layers of which rows meet, so that there are several loops."""
    for w in params:
        h = x @ w
        x = x + jnp.tanh(h - jnp.mean(h, 0, keepdims=True))
    return jnp.mean(x * x)


TABLES = [np.asarray(normal(1, WIDTH, seed=20 + i)) for i in range(LAYERS)]


def with_constants(params, x):
    """Rows meet; functions and rules are alike, but for the arrays they close over."""
    for i, w in enumerate(params):
        table = TABLES[i].astype(x.dtype)

        @jax.custom_vjp
        def scaled(x, table=table):
            return x * table

        scaled.defvjp(
            lambda x, table=table: (x * table, None),
            lambda _, ct, table=table: (2 * ct * table, None),
        )
        shifted = jax.jit(lambda x, table=table: jnp.tanh(x * table) * table)
        x = shifted(scaled(x @ w))
        x = x - jnp.mean(x, 0, keepdims=True)
    return jnp.mean(x * x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "loss", [dense, mixed, returning, before_zeros, normed, with_constants]
)
def test_it_is_the_program_of_jax(loss, dtype, monkeypatch):
    """The same bits, by as many equations of each kind, functions of ours aside."""

    def found():
        step = ga.value_and_grad(loss, 2)
        program = jax.make_jaxpr(step)(*arguments(dtype)).jaxpr
        names = [e.primitive.name for e in jaxprs.equations(program)]
        counts = collections.Counter(names)
        del counts["jit"], counts["pjit"]
        return helpers.bits(jax.jit(step)(*arguments(dtype))), counts

    bits, counts = found()
    monkeypatch.setattr(pullback, "with_pullback_of_equals", by_jax)
    assert found() == (bits, counts)


def runs_of_a_rule(loss, monkeypatch):
    """A function that returns how often a trace of the loss runs the rule of tanh."""
    rule, runs = ad.primitive_jvps[jax.lax.tanh_p], []

    def number():
        runs.clear()
        jax.make_jaxpr(ga.value_and_grad(loss, 2))(*arguments())
        return len(runs)

    counted = lambda *args, **how: runs.append(1) or rule(*args, **how)  # noqa: E731
    monkeypatch.setitem(ad.primitive_jvps, jax.lax.tanh_p, counted)
    return number


def test_a_rule_is_run_once_for_all_layers(monkeypatch):
    number = runs_of_a_rule(dense, monkeypatch)
    assert number() == 1
    monkeypatch.setattr(pullback, "with_pullback_of_equals", by_jax)
    assert number() == LAYERS


def test_a_rule_is_run_once_for_all_loops_of_a_window(monkeypatch):
    number = runs_of_a_rule(normed, monkeypatch)
    assert number() == 1
    by_itself, known = pullback.with_pullback_of_equals, pullback.Known
    new = lambda *args: by_itself(*args[:3], known())  # noqa: E731
    monkeypatch.setattr(pullback, "with_pullback_of_equals", new)
    assert number() > 1


def test_programs_that_differ_in_constants_alone_are_not_alike(monkeypatch):
    params, x = arguments()
    args = params[:3], x  # of more layers the gradient is not well conditioned
    want = jax.value_and_grad(with_constants)(*args)

    def error():
        got = jax.jit(ga.value_and_grad(with_constants, 2))(*args)
        return helpers.off(got, want)

    assert error() < 1e-5
    # The twin takes all arrays for one.
    monkeypatch.setattr(jaxprs.Same, "__eq__", lambda *_: True)
    monkeypatch.setattr(jaxprs.Same, "__hash__", lambda _: 0)
    assert error() > 1e-2


ALIKE = {
    # Each time a new function.
    "checkpoint": lambda x: jax.checkpoint(lambda x: jnp.tanh(x) * 2)(x),
    "jvp": jax.nn.relu,
    "draw": lambda x: x * jax.random.uniform(jax.random.key(0), x.shape),
}


@pytest.mark.parametrize("name", ALIKE)
def test_jax_runs_the_rules_of_alike_layers_on_one_program(name, monkeypatch):
    def loss(params, x):
        for i, w in enumerate(params):
            x = ALIKE[name](x[:, :1] * w[None]) + float(i)
        return jnp.mean(x**2)

    def programs(number):
        args = [jnp.ones(4)] * number, jnp.ones((8, 4))
        step = jax.make_jaxpr(ga.value_and_grad(loss, 2))(*args)
        loops = [e for e in jaxprs.equations(step.jaxpr) if e.primitive.name == "scan"]
        every = [e for loop in loops for e in loop.params["jaxpr"].eqns]
        found = [e.params["jaxpr"] for e in every if jaxprs.is_inline(e)]
        return len({id(getattr(x, "jaxpr", x)) for x in found}), len(found)

    (few, calls), (many, more) = map(programs, (2, 7))
    assert few == many
    assert calls < more
    # The twin: the pullback joins them, too.
    monkeypatch.setattr(pullback, "with_pullback_of_equals", by_jax)
    monkeypatch.setattr(nested, "key_of", lambda *given: object())
    assert programs(2)[0] < programs(7)[0]


K = 4


def scaled(params, x):
    for scale in params:
        x = jnp.tanh(x * scale)
    return jnp.mean(jnp.square(x))


def terms(params, x):
    """Each matrix in a term of its own: all their products share an operand."""
    products = (x.astype(w.dtype) @ w for w in params)
    return sum(jnp.mean(jnp.square(y)).astype(jnp.float32) for y in products)


def of_a_leaf(step, leaf):
    """How many lines one leaf more adds to a program."""
    x = jax.ShapeDtypeStruct((2 * K, 3), jnp.float32)
    few, many = (jax.jit(step).lower([leaf] * n, x).as_text() for n in (8, 24))
    return (len(many.splitlines()) - len(few.splitlines())) / 16


def test_a_leaf_adds_to_a_program_what_it_adds_to_a_plain_scan(monkeypatch):
    leaf = jax.ShapeDtypeStruct((1, 3), jnp.float32)
    plain = of_a_leaf(plain_scan(scaled, K, jnp.float32), leaf)
    assert of_a_leaf(ga.value_and_grad(scaled, K), leaf) <= plain

    def cleared(params, dtype):
        acc = accumulator.init(params, dtype)
        clear = lambda x: accumulator.cleared(x, acc.count == 0)  # noqa: E731
        return acc._replace(total=jax.tree.map(clear, acc.total))

    # The twin begins with zeros that it clears, one by one.
    monkeypatch.setattr(accumulator, "begun", cleared)
    assert of_a_leaf(ga.value_and_grad(scaled, K), leaf) > plain


def test_products_that_are_alike_are_traced_once_and_are_one_function(monkeypatch):
    leaf, traced = jax.ShapeDtypeStruct((3, 3), jnp.bfloat16), []
    once = jaxprs.traced
    monkeypatch.setattr(jaxprs, "traced", lambda *a: traced.append(1) or once(*a))
    plain = of_a_leaf(plain_scan(terms, K, jnp.float32), leaf)
    # A mean in bfloat16 is rounded once, where the sum of all rows is.
    assert of_a_leaf(ga.value_and_grad(terms, K), leaf) <= 1.3 * plain
    assert len(traced) == 2  # of two programs
    # The twin has no name for what they have in common.
    monkeypatch.setattr(jaxprs, "key_of", lambda *_: object())
    assert of_a_leaf(ga.value_and_grad(terms, K), leaf) > 1.2 * plain
    assert len(traced) == 2 + 24 + 8
