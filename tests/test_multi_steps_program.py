"""What is compiled: where the optimizer stands, which buffers are made, how often."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion")

PARAMS = {"a": jnp.ones((64, 32)), "b": jnp.ones((32, 48))}
MUON = optax.contrib.muon(1e-3)


def matrix_products(jaxpr):
    """Pairs of (matrix products outside any cond, those in each branch of a cond)."""
    outside, branches = 0, []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            outside += 1
        elif eqn.primitive.name == "cond":
            for branch in eqn.params["branches"]:
                inner, deeper = matrix_products(branch.jaxpr)
                branches.append(inner + sum(deeper))
        else:
            for inner in _subjaxprs(eqn):
                more, deeper = matrix_products(inner)
                outside, branches = outside + more, branches + deeper
    return outside, branches


def _subjaxprs(eqn):
    for value in eqn.params.values():
        for leaf in value if isinstance(value, (tuple, list)) else [value]:
            leaf = getattr(leaf, "jaxpr", leaf)
            if hasattr(leaf, "eqns"):
                yield leaf


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


def has_cond(jaxpr):
    return " cond[" in str(jaxpr)


@pytest.mark.parametrize("weight", [None, 2.0])
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("emit", [True, False])
def test_a_static_emit_has_no_cond(emit, skip, weight):
    tx = ga.MultiSteps(MUON, 4, **skip)
    state = tx.init(PARAMS)

    def step(emit, weight, state, params):
        return ga.apply_gradients(tx, PARAMS, state, params, emit=emit, weight=weight)

    jaxpr = jax.make_jaxpr(step, static_argnums=0)
    program = jaxpr(emit, weight, state, PARAMS).jaxpr
    assert not has_cond(program)
    assert matrix_products(program) == (of_the_bare_optimizer() if emit else 0, [])
    # The twin: where the state counts, there is one.
    assert has_cond(jaxpr(None, weight, state, PARAMS).jaxpr)


def test_a_static_k_of_one_has_no_cond_and_no_accumulator():
    tx = ga.MultiSteps(MUON, 1)
    state = tx.init(PARAMS)
    assert state.total == ()
    for jaxpr in programs(ga.MultiSteps, tx):
        assert not has_cond(jaxpr)
        assert matrix_products(jaxpr) == (of_the_bare_optimizer(), [])
    assert has_cond(next(programs(ga.MultiSteps, ga.MultiSteps(MUON, jnp.ones_like))))


def compiled(tx, params, **kwargs):
    """A donated micro-step, with arguments in the order in which they come back."""

    def step(params, state, grads):
        return ga.apply_gradients(tx, grads, state, params, **kwargs)

    return donated(tx, params, step)


def compiled_transformation(tx, params, **kwargs):
    """The same with `tx.update`."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **kwargs)
        return optax.apply_updates(params, updates), state

    return donated(tx, params, step)


def donated(tx, params, step):
    arguments = (params, tx.init(params), params)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()


BIG = {f"layer_{i}": jnp.ones((400, 400)) for i in range(4)}
BIG_BYTES = sum(p.nbytes for p in jax.tree.leaves(BIG))


@pytest.mark.grid(1, 9)
@pytest.mark.parametrize("emit", [None, True, False])
@pytest.mark.parametrize("k", [1, 7, 8])
@pytest.mark.parametrize(
    "opt",
    [
        optax.sgd(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.adam(1e-3),
        optax.adamw(1e-3),
        optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100)),
    ],
    ids=["sgd", "momentum", "adam", "adamw", "schedule"],
)
def test_a_micro_step_needs_no_temporaries(opt, k, emit):
    if k == 1 and emit is False:
        pytest.skip("a window of one micro-step is never left open")
    memory = compiled(ga.MultiSteps(opt, k), BIG, emit=emit).memory_analysis()
    assert memory.temp_size_in_bytes <= 0.01 * BIG_BYTES


def test_an_optimizer_that_needs_temporaries_of_its_own_gets_no_more():
    lion = optax.lion(1e-3)
    own = compiled(lion, BIG).memory_analysis().temp_size_in_bytes
    assert own > 0.5 * BIG_BYTES
    ours = compiled(ga.MultiSteps(lion, 8), BIG).memory_analysis().temp_size_in_bytes
    assert ours <= own + 0.01 * BIG_BYTES


def test_dropping_windows_needs_no_temporaries_either():
    drop = ga.drop_window_if_not_finite
    tx = ga.MultiSteps(optax.adam(1e-3), 8, should_drop_window_fn=drop)
    assert compiled(tx, BIG).memory_analysis().temp_size_in_bytes <= 0.01 * BIG_BYTES


def test_skipping_micro_steps_needs_what_the_function_itself_needs():
    skip = optax.skip_not_finite
    alone = jax.jit(lambda g: skip(g, 0, None)).lower(BIG).compile().memory_analysis()
    tx = ga.MultiSteps(optax.adam(1e-3), 8, should_skip_update_fn=skip)
    ours = compiled(tx, BIG).memory_analysis().temp_size_in_bytes
    assert ours <= alone.temp_size_in_bytes + 0.01 * BIG_BYTES


def test_weights_need_no_temporaries_either():
    tx = ga.MultiSteps(optax.adam(1e-3), 8)
    memory = compiled(tx, BIG, weight=3.0).memory_analysis()
    assert memory.temp_size_in_bytes <= 0.01 * BIG_BYTES


@pytest.mark.grid(3)
@pytest.mark.parametrize("drop", [None, ga.drop_window_if_not_finite])
@pytest.mark.parametrize("weight", [None, 3.0])
def test_a_transformation_needs_no_temporaries_either(weight, drop):
    tx = ga.MultiSteps(optax.adam(1e-3), 8, should_drop_window_fn=drop)
    memory = compiled_transformation(tx, BIG, weight=weight).memory_analysis()
    assert memory.temp_size_in_bytes <= 0.01 * BIG_BYTES


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 1), reason="there it takes a copy of the sums"
)
def test_the_norm_of_the_gradient_needs_no_temporaries_either():
    tx = ga.MultiSteps(optax.adam(1e-3), 8, track_norm=True)
    for program in (compiled(tx, BIG), compiled_transformation(tx, BIG)):
        memory = program.memory_analysis()
        assert memory.temp_size_in_bytes <= 0.01 * BIG_BYTES


def test_updates_in_another_dtype_than_the_accumulator_take_a_tree_of_their_own():
    tx = ga.MultiSteps(optax.adam(1e-3), 8)
    params = optax.tree.cast(BIG, jnp.bfloat16)
    memory = compiled_transformation(tx, params).memory_analysis()
    assert memory.temp_size_in_bytes > 0.4 * BIG_BYTES


@pytest.mark.quick
def test_optax_needs_three_trees_of_temporaries():
    # The twin of the tests above: the measure sees what it should.
    tx = optax.MultiSteps(optax.adam(1e-3), 8)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    arguments = (BIG, tx.init(BIG), BIG)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    assert program.memory_analysis().temp_size_in_bytes >= 2.5 * BIG_BYTES


@pytest.mark.quick
def test_inside_the_window_nothing_but_the_accumulator_is_written():
    program = compiled(ga.MultiSteps(optax.adam(1e-3), 8), BIG, emit=False).as_text()
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


def test_a_scan_over_micro_steps_equals_the_host_loop_bit_for_bit():
    tx = ga.MultiSteps(optax.adam(1e-2), 3)
    rng = np.random.default_rng(0)
    grads = [
        jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), PARAMS)
        for _ in range(7)
    ]
    step = jax.jit(lambda c, g: (ga.apply_gradients(tx, g, c[1], c[0]), None))
    carry = scanned = (PARAMS, tx.init(PARAMS))
    for g in grads:
        carry, _ = step(carry, g)
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)
    scanned, _ = jax.jit(lambda c, g: jax.lax.scan(step, c, g))(scanned, stacked)
    for a, b in zip(*map(jax.tree.leaves, (carry, scanned)), strict=True):
        np.testing.assert_array_equal(a, b)


def run_as_a_transformation(tx, opt_args):
    """The updates of two windows, the second with a NaN that may be skipped, jitted."""
    rng = np.random.default_rng(3)
    update = jax.jit(lambda g, s, p, **args: tx.update(g, s, p, **args))
    state, out = tx.init(PARAMS), []
    for i, args in enumerate(opt_args):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), PARAMS)
        grads = jax.tree.map(lambda g, i=i: jnp.nan * g if i == 4 else g, grads)
        updates, state = update(grads, state, PARAMS, **args)
        out += [updates, state._replace(total=state.acc_grads)]
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"should_skip_update_fn": optax.skip_not_finite},
        {"should_drop_window_fn": ga.drop_window_if_not_finite},
        {"use_grad_mean": False},
    ],
    ids=["plain", "skips", "drops", "sums"],
)
@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 0.5, 0.0, 2.0, 1.0]])
def test_accelerators_add_in_a_branch_with_the_bits_of_a_cpu(
    options, weights, monkeypatch
):
    tx = ga.MultiSteps(optax.adam(1e-2), 3, **options)
    args = [{}] * 6 if weights is None else [{"weight": w} for w in weights]
    expected = run_as_a_transformation(tx, args)
    of_cpus = jax.lax.platform_dependent

    def of_others(*args, default, **_):
        return of_cpus(*args, default=default)

    monkeypatch.setattr(jax.lax, "platform_dependent", of_others)
    for a, b in zip(
        *map(jax.tree.leaves, (expected, run_as_a_transformation(tx, args))),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    # The twin: in the branches there are zeros.
    monkeypatch.setattr(
        jax.lax,
        "platform_dependent",
        lambda sums, **_: jax.tree.map(jnp.zeros_like, sums),
    )
    wrong = run_as_a_transformation(tx, args)
    assert not np.array_equal(expected[4]["a"], wrong[4]["a"])


def test_apply_gradients_is_update_and_apply_updates():
    tx = ga.MultiSteps(optax.adamw(1e-2), 2)
    rng = np.random.default_rng(0)
    for params in (PARAMS, optax.tree.cast(PARAMS, jnp.bfloat16)):
        ours = theirs = (params, tx.init(params))
        for _ in range(4):
            grads = jax.tree.map(
                lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params
            )
            ours = jax.jit(lambda p, s, g: ga.apply_gradients(tx, g, s, p))(
                *ours, grads
            )

            @jax.jit
            def contract(params, state, grads):
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            theirs = contract(*theirs, grads)
        for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
            assert a.dtype == b.dtype
        # Bit for bit, but for the contraction of p + (-rate · u) in either program, and
        # for what is left in the accumulator.
        states = (s._replace(total=s.acc_grads) for _, s in (ours, theirs))
        for a, b in zip(*map(jax.tree.leaves, states), strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (ours[0], theirs[0])), strict=True):
            eps = float(jnp.finfo(a.dtype).eps)
            np.testing.assert_allclose(
                np.asarray(a, float), np.asarray(b, float), rtol=2 * eps
            )
