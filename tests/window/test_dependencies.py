"""`batch_dependencies`: what each loop computes, of which lines, and what it leaves."""

import jax
import jax.numpy as jnp
import pytest

import ga_optax as ga
from ga_optax._window import run, stages

K, N, D = 4, 16, 3
W, X = jnp.ones(D), jnp.ones((N, D))


def mean(w, x):
    return jnp.mean((x @ w) ** 2)


def root(w, x):
    h = x @ w
    moment = jnp.mean(h**2)
    return jnp.mean(h / jnp.sqrt(moment))


def norms(w, x):
    h = x @ w
    for _ in range(2):
        h = h - jnp.mean(jnp.tanh(h))
    return jnp.mean(h**2)


def of(fun, *args, k=K, **options):
    """The stages of a plan, by name."""
    found = ga.batch_dependencies(fun, k, **options)(*args or (W, X))
    return {stage.name: stage for stage in found.stages}


LOOP = f"a loop over {K} micro-batches"
BOTH = f"{LOOP}, forward and backward"
ONCE = "once, in no loop"
STAGES = {
    mean: {"the loss": BOTH},
    root: {
        "level 1": LOOP,
        "level 2, shared": ONCE,
        "the loss": BOTH,
        "level 2, shared, back": ONCE,
        "level 1, back": LOOP,
    },
    norms: {
        "level 1": LOOP,
        "level 2": LOOP,
        "the loss": BOTH,
        "level 2, back": LOOP,
        "level 1, back": LOOP,
    },
}


@pytest.mark.quick
@pytest.mark.parametrize("fun", STAGES)
def test_a_plan_has_a_stage_for_each_loop_in_the_order_in_which_they_run(fun):
    found = {name: stage.loop for name, stage in of(fun).items()}
    assert list(found.items()) == list(STAGES[fun].items())


def layouts(fun, *args, **options):
    """What micro-batches hold of what the stages compute, by stage and primitive."""
    return {
        (stage.name, x.name): x.holds
        for stage in of(fun, *args, **options).values()
        for x in stage.computes
    }


def test_a_plan_says_what_a_micro_batch_holds_of_each_value():
    rows, part = f"rows 0 of float32[{N}]", "part of float32[]"
    found = layouts(mean)
    assert found == {
        ("the loss", "dot_general"): rows,
        ("the loss", "integer_pow"): rows,
        ("the loss", "reduce_sum"): part,
        ("the loss", "div"): part,
    }
    found = layouts(root)
    assert found["level 1", "dot_general"] == rows
    assert found["level 1", "reduce_sum"] == part
    assert found["level 2, shared", "sqrt"] == "all of float32[]"
    assert found["the loss", "div"] == part
    # Along another axis; and of what needs all rows, all of it.
    for along, where, holds in (
        (0, "the loss", "rows 1"),
        (1, "level 2, shared", "all"),
    ):

        def fun(w, x, d=along):
            return jnp.mean(jnp.tanh(jnp.sort(x * w.sum(), d)))

        found = layouts(fun, W, X.T, batch_axes=1)
        assert found[where, "sort"] == f"{holds} of float32[{D},{N}]"


@pytest.mark.quick
@pytest.mark.parametrize("fun", [root, norms])
def test_what_runs_is_the_list_that_is_shown(fun, monkeypatch):
    lists = []

    def listed(schedule):
        lists.append(list(stages.stages(schedule)))
        return lists[-1]

    monkeypatch.setattr(run, "stages", listed)
    jax.jit(ga.value_and_grad(fun, K))(W, X)
    [ran] = lists
    assert [x.name for x in ran] == list(of(fun))
