"""What is compiled: where the optimizer stands, which buffers are made, how often."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import DROPS, SKIPS, bits, normal, updates_of

import ga_optax as ga
from ga_optax._loop.micro_step import HAS_REFS
from ga_optax._passes import jaxprs

pytestmark = pytest.mark.usefixtures("optax_promotion")

PARAMS = {"a": jnp.ones((64, 32)), "b": jnp.ones((32, 48))}
MUON = optax.contrib.muon(1e-3)


def matrix_products(jaxpr):
    """Pairs of (matrix products outside any cond, those in each branch of a cond)."""
    outside, branches = 0, []
    for eqn in jaxpr.eqns:
        inside = [matrix_products(inner) for inner in jaxprs.inner_programs(eqn)]
        if eqn.primitive.name == "cond":
            branches += [inner + sum(deeper) for inner, deeper in inside]
            continue
        outside += eqn.primitive.name == "dot_general"
        outside += sum(inner for inner, _ in inside)
        branches += [number for _, deeper in inside for number in deeper]
    return outside, branches


def has_cond(jaxpr):
    return " cond[" in str(jaxpr)


def applied(tx, params, state, grads, **options):
    return ga.apply_gradients(tx, grads, state, params, **options)


def updated(tx, params, state, grads, **options):
    updates, state = tx.update(grads, state, params, **options)
    return optax.apply_updates(params, updates), state


def program(way, tx, params=PARAMS, **options):
    step = functools.partial(way, tx, **options)
    return jax.make_jaxpr(step)(params, tx.init(params), params).jaxpr


EITHER = [{}, SKIPS, DROPS]


def of_the_bare_optimizer():
    products, _ = matrix_products(program(updated, MUON))
    assert products > 0
    return products


@pytest.mark.quick
def test_the_inner_update_stands_in_one_branch_of_one_cond_and_nowhere_else():
    bare = of_the_bare_optimizer()
    for skip in EITHER:
        for way in (applied, updated):
            jaxpr = program(way, ga.MultiSteps(MUON, 4, **skip))
            outside, branches = matrix_products(jaxpr)
            assert outside == 0
            assert sorted(branches) == [0, bare]
    # The twin: Optax computes it in every micro-step.
    jaxpr = program(updated, optax.MultiSteps(MUON, 4))
    outside, branches = matrix_products(jaxpr)
    assert outside + max(branches, default=0) == bare
    assert "select_n" in str(jaxpr)


@pytest.mark.parametrize("weight", [None, 2.0])
@pytest.mark.parametrize("skip", EITHER)
@pytest.mark.parametrize("emit", [True, False])
def test_a_static_emit_has_no_cond(emit, skip, weight):
    tx = ga.MultiSteps(MUON, 4, **skip)
    jaxpr = program(applied, tx, emit=emit, weight=weight)
    assert not has_cond(jaxpr)
    assert matrix_products(jaxpr) == (of_the_bare_optimizer() if emit else 0, [])
    # The twin: where the state counts, there is one.
    assert has_cond(program(applied, tx, weight=weight))


def test_a_static_k_of_one_has_no_cond_and_no_accumulator():
    tx = ga.MultiSteps(MUON, 1)
    assert tx.init(PARAMS).total == ()
    for way in (applied, updated):
        jaxpr = program(way, tx)
        assert not has_cond(jaxpr)
        assert matrix_products(jaxpr) == (of_the_bare_optimizer(), [])
    assert has_cond(program(updated, ga.MultiSteps(MUON, jnp.ones_like)))


BIG = {f"layer_{i}": jnp.ones((400, 400)) for i in range(4)}
BIG_BYTES = sum(p.nbytes for p in jax.tree.leaves(BIG))
ADAM, LION = optax.adam(1e-3), optax.lion(1e-3)
NORM = {"track_norm": True}  # which takes a copy of the sums in an older jax
OLD = pytest.mark.skipif(not HAS_REFS, reason="a copy")


def compiled(tx, params=BIG, way=applied, **options):
    """A donated micro-step, with arguments in the order in which they come back."""
    step = jax.jit(functools.partial(way, tx, **options), donate_argnums=(0, 1))
    return step.lower(params, tx.init(params), params).compile()


def trees(executable):
    """The temporaries of a compiled program, in trees of parameters."""
    return executable.memory_analysis().temp_size_in_bytes / BIG_BYTES


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": ADAM,
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100)),
}


@pytest.mark.grid(2, 12)
@pytest.mark.parametrize(
    ("name", "options", "how"),
    [
        *((name, {}, {"emit": x}) for name in OPTIMIZERS for x in (None, True, False)),
        ("adam", DROPS, {"way": updated}),
        ("adam", {}, {"way": updated, "weight": 3.0}),
        ("adam", DROPS, {"weight": 3.0}),
        pytest.param("adam", NORM, {}, marks=OLD),
    ],
)
def test_a_micro_step_needs_no_temporaries_whatever_is_asked_for(name, options, how):
    for k in {1, 7} if how == {"emit": None} else {7}:
        tx = ga.MultiSteps(OPTIMIZERS[name], k, **options)
        assert trees(compiled(tx, **how)) <= 0.01


@pytest.mark.cpu
@pytest.mark.quick
def test_temporaries_that_are_needed_are_no_more_and_are_seen():
    skip = jax.jit(lambda g: optax.skip_not_finite(g, 0, None)).lower(BIG).compile()
    skipping = ga.MultiSteps(ADAM, 8, **SKIPS)
    assert trees(compiled(skipping)) <= trees(skip) + 0.01
    own = trees(compiled(LION))
    assert own > 0.5
    assert trees(compiled(ga.MultiSteps(LION, 8))) <= own + 0.01
    # Updates in another dtype than the accumulator take a tree of their own.
    halves = optax.tree.cast(BIG, jnp.bfloat16)
    assert trees(compiled(ga.MultiSteps(ADAM, 8), halves, updated)) > 0.4
    # The twin of the tests above: Optax needs three trees.
    assert trees(compiled(optax.MultiSteps(ADAM, 8), way=updated)) >= 2.5


@pytest.mark.quick
def test_inside_the_window_nothing_but_the_accumulator_is_written():
    text = compiled(ga.MultiSteps(ADAM, 8), emit=False).as_text()
    body = text[text.index("ENTRY") :]
    written = re.findall(r"= f32\[400,400\]\S* (?!parameter|get-tuple)(\w+)", body)
    assert written == ["fusion"] * len(BIG)
    assert " divide(" not in text


def run(tx, weights, grads):
    """Updates and states of micro-steps by a jitted `update`."""
    seen = updates_of(tx, grads, PARAMS, weights)
    return [(u, state._replace(total=state.acc_grads)) for u, state in seen]


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [*EITHER, {"use_grad_mean": False}])
@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 0.5, 0.0, 2.0, 1.0]])
def test_accelerators_add_in_a_branch_with_the_bits_of_a_cpu(
    options, weights, monkeypatch
):
    tx = ga.MultiSteps(ADAM, 3, **options)
    grads = [{n: normal(*p.shape, seed=i) for n, p in PARAMS.items()} for i in range(6)]
    grads[4] = jax.tree.map(lambda g: jnp.nan * g, grads[4])  # that may be skipped
    expected, of_cpus = run(tx, weights, grads), jax.lax.platform_dependent

    def of_others(*args, default, **_):
        return of_cpus(*args, default=default)

    monkeypatch.setattr(jax.lax, "platform_dependent", of_others)
    jax.tree.map(np.testing.assert_array_equal, expected, run(tx, weights, grads))

    def zeros(sums, **_):
        return jax.tree.map(jnp.zeros_like, sums)

    monkeypatch.setattr(jax.lax, "platform_dependent", zeros)  # the twin
    assert bits(expected[2][0]) != bits(run(tx, weights, grads)[2][0])
