"""What is compiled: where the optimizer stands, which buffers are made, how often."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import bits, leaves_of

import ga_optax as ga
from ga_optax._passes import ir

pytestmark = pytest.mark.usefixtures("optax_promotion")

PARAMS = {"a": jnp.ones((64, 32)), "b": jnp.ones((32, 48))}
MUON = optax.contrib.muon(1e-3)


def matrix_products(jaxpr):
    """Pairs of (matrix products outside any cond, those in each branch of a cond)."""
    outside, branches = 0, []
    for eqn in jaxpr.eqns:
        inside = [matrix_products(inner) for inner in ir.inner_programs(eqn)]
        if eqn.primitive.name == "cond":
            branches += [inner + sum(deeper) for inner, deeper in inside]
            continue
        outside += eqn.primitive.name == "dot_general"
        outside += sum(inner for inner, _ in inside)
        branches += [number for _, deeper in inside for number in deeper]
    return outside, branches


def has_cond(jaxpr):
    return " cond[" in str(jaxpr)


def programs(multi_steps, tx):
    """The jaxprs of both ways to take a micro-step."""
    state = tx.init(PARAMS)

    def contract(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    yield jax.make_jaxpr(contract)(PARAMS, state, PARAMS).jaxpr
    if multi_steps is ga.MultiSteps:
        applied = functools.partial(ga.apply_gradients, tx)
        yield jax.make_jaxpr(applied)(PARAMS, state, PARAMS).jaxpr


SKIPS = [
    {},
    {"should_skip_update_fn": optax.skip_not_finite},
    {"should_drop_window_fn": ga.drop_window_if_not_finite},
]


def of_the_bare_optimizer():
    jaxpr = jax.make_jaxpr(MUON.update)(PARAMS, MUON.init(PARAMS), PARAMS)
    products, _ = matrix_products(jaxpr)
    assert products > 0
    return products


@pytest.mark.quick
def test_the_inner_update_stands_in_one_branch_of_one_cond_and_nowhere_else():
    bare = of_the_bare_optimizer()
    for skip in SKIPS:
        tx = ga.MultiSteps(MUON, 4, **skip)
        for jaxpr in programs(ga.MultiSteps, tx):
            outside, branches = matrix_products(jaxpr)
            assert outside == 0
            assert sorted(branches) == [0, bare]
    # The twin: Optax computes it in every micro-step.
    (jaxpr,) = programs(optax.MultiSteps, optax.MultiSteps(MUON, 4))
    outside, branches = matrix_products(jaxpr)
    assert outside + max(branches, default=0) == bare
    assert "select_n" in str(jaxpr)


@pytest.mark.parametrize("weight", [None, 2.0])
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("emit", [True, False])
def test_a_static_emit_has_no_cond(emit, skip, weight):
    tx = ga.MultiSteps(MUON, 4, **skip)

    def step(emit, state, params):
        return ga.apply_gradients(tx, PARAMS, state, params, emit=emit, weight=weight)

    jaxpr = jax.make_jaxpr(step, static_argnums=0)
    program = jaxpr(emit, tx.init(PARAMS), PARAMS).jaxpr
    assert not has_cond(program)
    assert matrix_products(program) == (of_the_bare_optimizer() if emit else 0, [])
    # The twin: where the state counts, there is one.
    assert has_cond(jaxpr(None, tx.init(PARAMS), PARAMS).jaxpr)


def test_a_static_k_of_one_has_no_cond_and_no_accumulator():
    tx = ga.MultiSteps(MUON, 1)
    state = tx.init(PARAMS)
    assert state.total == ()
    for jaxpr in programs(ga.MultiSteps, tx):
        assert not has_cond(jaxpr)
        assert matrix_products(jaxpr) == (of_the_bare_optimizer(), [])
    assert has_cond(next(programs(ga.MultiSteps, ga.MultiSteps(MUON, jnp.ones_like))))


BIG = {f"layer_{i}": jnp.ones((400, 400)) for i in range(4)}
BIG_BYTES = sum(p.nbytes for p in jax.tree.leaves(BIG))
ADAM, LION = optax.adam(1e-3), optax.lion(1e-3)
OLD = jax.__version_info__ < (0, 11, 1)  # there the norm takes a copy of the sums


def compiled(tx, params=BIG, way="apply", **options):
    """A donated micro-step, with arguments in the order in which they come back."""

    def applied(params, state, grads):
        return ga.apply_gradients(tx, grads, state, params, **options)

    def updated(params, state, grads):
        updates, state = tx.update(grads, state, params, **options)
        return optax.apply_updates(params, updates), state

    step = jax.jit(updated if way == "update" else applied, donate_argnums=(0, 1))
    return step.lower(params, tx.init(params), params).compile()


def trees(program):
    """The temporaries of a compiled program, in trees of parameters."""
    return program.memory_analysis().temp_size_in_bytes / BIG_BYTES


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": ADAM,
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100)),
}


@pytest.mark.grid(1, 9)
@pytest.mark.parametrize("emit", [None, True, False])
@pytest.mark.parametrize("k", [1, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_micro_step_needs_no_temporaries(name, k, emit):
    if k > 1 or emit is not False:  # a window of one micro-step is never left open
        tx = ga.MultiSteps(OPTIMIZERS[name], k)
        assert trees(compiled(tx, emit=emit)) <= 0.01


@pytest.mark.grid(4)
@pytest.mark.parametrize("way", ["apply", "update"])
@pytest.mark.parametrize(
    ("options", "weight"),
    [
        (SKIPS[2], None),
        ({}, 3.0),
        (SKIPS[2], 3.0),
        pytest.param(
            {"track_norm": True}, None, marks=pytest.mark.skipif(OLD, reason="a copy")
        ),
    ],
    ids=["drops", "weighted", "both", "norm"],
)
def test_no_option_needs_temporaries_either(options, weight, way):
    tx = ga.MultiSteps(ADAM, 8, **options)
    assert trees(compiled(tx, way=way, weight=weight)) <= 0.01


@pytest.mark.quick
def test_temporaries_that_are_needed_are_no_more_and_are_seen():
    skip = jax.jit(lambda g: optax.skip_not_finite(g, 0, None)).lower(BIG).compile()
    skipping = ga.MultiSteps(ADAM, 8, **SKIPS[1])
    assert trees(compiled(skipping)) <= trees(skip) + 0.01
    own = trees(compiled(LION))
    assert own > 0.5
    assert trees(compiled(ga.MultiSteps(LION, 8))) <= own + 0.01
    # Updates in another dtype than the accumulator take a tree of their own.
    halves = optax.tree.cast(BIG, jnp.bfloat16)
    assert trees(compiled(ga.MultiSteps(ADAM, 8), halves, "update")) > 0.4
    # The twin of the tests above: Optax needs three trees.
    assert trees(compiled(optax.MultiSteps(ADAM, 8), way="update")) >= 2.5


@pytest.mark.quick
def test_inside_the_window_nothing_but_the_accumulator_is_written():
    program = compiled(ga.MultiSteps(ADAM, 8), emit=False).as_text()
    body = program[program.index("ENTRY") :]
    written = re.findall(r"= f32\[400,400\]\S* (?!parameter|get-tuple)(\w+)", body)
    assert written == ["fusion"] * len(BIG)
    assert " divide(" not in program


@pytest.mark.quick
def test_a_run_is_traced_and_compiled_once():
    traces = 0
    tx = ga.MultiSteps(optax.adam(1e-3), lambda step: 1 + step % 3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        nonlocal traces
        traces += 1
        return ga.apply_gradients(tx, grads, state, params)

    params, state = jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS)
    for _ in range(12):
        params, state = step(params, state, PARAMS)
    assert traces == 1
    assert step._cache_size() == 1
    assert int(ga.stats(state).steps) == 6


# -- Ways to run one window ------------------------------------------------------------


def draw(n, like=PARAMS):
    rng = np.random.default_rng(0)
    return [
        jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), like)
        for _ in range(n)
    ]


def run(tx, weights, grads):
    """Updates and states of micro-steps by a jitted `update`."""
    update = jax.jit(lambda g, s, **args: tx.update(g, s, PARAMS, **args))
    state, out = tx.init(PARAMS), []
    for i, g in enumerate(grads):
        updates, state = update(g, state, **({"weight": weights[i]} if weights else {}))
        out += [updates, state._replace(total=state.acc_grads)]
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [*SKIPS, {"use_grad_mean": False}])
@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 0.5, 0.0, 2.0, 1.0]])
def test_accelerators_add_in_a_branch_with_the_bits_of_a_cpu(
    options, weights, monkeypatch
):
    tx, grads = ga.MultiSteps(ADAM, 3, **options), draw(6)
    grads[4] = jax.tree.map(lambda g: jnp.nan * g, grads[4])  # that may be skipped
    expected, of_cpus = run(tx, weights, grads), jax.lax.platform_dependent

    def of_others(*args, default, **_):
        return of_cpus(*args, default=default)

    monkeypatch.setattr(jax.lax, "platform_dependent", of_others)
    jax.tree.map(np.testing.assert_array_equal, expected, run(tx, weights, grads))

    def zeros(sums, **_):
        return jax.tree.map(jnp.zeros_like, sums)

    monkeypatch.setattr(jax.lax, "platform_dependent", zeros)  # the twin
    assert bits(expected[4]["a"]) != bits(run(tx, weights, grads)[4]["a"])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_apply_gradients_is_update_and_apply_updates(dtype):
    tx, params = ga.MultiSteps(optax.adamw(1e-2), 2), optax.tree.cast(PARAMS, dtype)

    @jax.jit
    def contract(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    applied = jax.jit(lambda p, s, g: ga.apply_gradients(tx, g, s, p))
    ours = theirs = (params, tx.init(params))
    for grads in draw(4, params):
        ours, theirs = applied(*ours, grads), contract(*theirs, grads)
    # Bit for bit, but for the contraction of p + (-rate · u) in either program, and
    # for what is left in the accumulator.
    (p, a), (q, b) = ours, theirs
    assert bits(a._replace(total=a.acc_grads)) == bits(b._replace(total=b.acc_grads))
    for x, y in leaves_of(p, q):
        assert x.dtype == y.dtype
        eps = float(jnp.finfo(x.dtype).eps)
        x, y = (np.asarray(z, float) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=2 * eps)
