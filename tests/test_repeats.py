"""Equations that are alike are differentiated once, and the program is the same."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad

import ga_optax as ga
from ga_optax._passes import ir, places, repeats, table
from ga_optax._passes.facts import Facts

LAYERS, WIDTH = 6, 4
OPTIMIZE = pytest.mark.parametrize("optimize", [True, False])


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


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
        keep = jax.random.bernoulli(
            jax.random.fold_in(jax.random.key(0), i), 0.5, (WIDTH,)
        )
        table = jnp.sin(jnp.arange(WIDTH, dtype=x.dtype) * 0.7)
        x = x + jnp.where(keep[None], layer(x, w), 0) * table[None]
    stacked = jnp.stack(params)
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stacked)[0]
    return jnp.mean(jnp.square(x))


def text_of(loss, *args, **options):
    step = jax.jit(ga.value_and_grad(loss, 2, **options))
    return step.lower(*args).as_text()


@OPTIMIZE
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("loss", [dense, mixed])
def test_the_program_is_that_without_the_pass(loss, dtype, optimize, monkeypatch):
    args = arguments(dtype)
    with_pass = text_of(loss, *args, optimize=optimize)
    helpers.without_pass(monkeypatch, "repeats")
    assert text_of(loss, *args, optimize=optimize) == with_pass


def test_without_passes_run_those_alone_that_change_no_program(monkeypatch):
    ran, args = [], arguments(jnp.bfloat16)
    plain = text_of(mixed, *args, optimize=False)

    def counted(one):
        def change(program, facts):
            ran.append(one.name)
            return one.change(program, facts)

        return one._replace(change=change)

    passes = tuple(map(counted, table.PASSES))
    monkeypatch.setattr(table, "PASSES", passes)
    assert text_of(mixed, *args, optimize=False) == plain
    due = {one.name for one in passes if one.law == table.SAME_PROGRAM}
    assert set(ran) == due == {"repeats"}
    # The twin: a pass that changes the program says that it does not.
    liars = [one._replace(law=table.SAME_PROGRAM) for one in passes]
    monkeypatch.setattr(table, "PASSES", tuple(liars))
    assert text_of(mixed, *args, optimize=False) != plain
    assert set(ran) > due


def test_a_program_that_reads_twice_needs_its_equation_as_it_is(monkeypatch):
    """What comes back to `x` of `x * x` is added in the order of JAX's rules."""

    def loss(params, x):
        for w in params:
            x = jax.lax.mul(x, x) + jnp.tanh(x @ w)
        return jnp.mean(x)

    with_pass = text_of(loss, *arguments())
    with monkeypatch.context() as patch:
        helpers.without_pass(patch, "repeats")
        assert text_of(loss, *arguments()) == with_pass
    if jax.__version_info__ >= (0, 11):  # jax 0.10 has one order for both
        monkeypatch.setattr(repeats, "_twice", lambda read: False)
        assert text_of(loss, *arguments()) != with_pass  # the twin calls it, too


@OPTIMIZE
def test_a_rule_is_run_once_for_all_layers(optimize, monkeypatch):
    runs = []
    rule = ad.primitive_jvps[jax.lax.tanh_p]

    def counted(*args, **kwargs):
        runs.append(1)
        return rule(*args, **kwargs)

    monkeypatch.setitem(ad.primitive_jvps, jax.lax.tanh_p, counted)
    options = {"optimize": optimize}
    jax.make_jaxpr(ga.value_and_grad(dense, 2, **options))(*arguments())
    assert len(runs) == 1
    helpers.without_pass(monkeypatch, "repeats")
    jax.make_jaxpr(ga.value_and_grad(dense, 2, **options))(*arguments())
    assert len(runs) == 1 + LAYERS


def test_names_and_lines_are_those_of_each_equation():
    def loss(params, x):
        for i, w in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x)

    args = arguments()
    program = ir.Program(jax.make_jaxpr(loss)(*args).jaxpr)
    new = repeats.called(program, Facts())
    calls = [e for e in new.jaxpr.eqns if ir.is_inline(e)]
    assert len(calls) == 2 * LAYERS
    flat = jax.make_jaxpr(lambda *xs: jax.core.eval_jaxpr(new.jaxpr, (), *xs))
    for old, one in zip(
        program.jaxpr.eqns, flat(*args[0], args[1]).jaxpr.eqns, strict=True
    ):
        assert str(one.source_info.name_stack) == str(old.source_info.name_stack)
        assert places.line_of(one.source_info) == places.line_of(old.source_info)


def test_a_jax_that_does_not_inline_keeps_the_equations(monkeypatch):
    program = ir.Program(jax.make_jaxpr(dense)(*arguments()).jaxpr)
    monkeypatch.setattr(ir, "as_call", lambda *_: None)
    new = repeats.called(program, Facts())
    assert all(map(lambda a, b: a is b, new.jaxpr.eqns, program.jaxpr.eqns))
