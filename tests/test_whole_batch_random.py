"""Random programs in which rows meet, and for each rule a twin that must be wrong."""

import collections

import jax
import jax.numpy as jnp
import pytest
import whole_programs
from whole_programs import STEPS, arguments, draw, program

import ga_optax as ga
from ga_optax._partition import (
    PARTIAL,
    WHOLE,
    Argument,
    Axis,
    Rows,
    custom,
    linear,
    partition,
    randoms,
    reductions,
    shapes,
    writer,
)

# What is computed whole is a warning, for programs as small as these.
pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
# In float64: of at most some thousand terms, conditioned no worse than 1e3.
BOUND = 1e-9


def partitioned(fun, k, args):
    """The program of `fun`, that of a micro-batch, and how many leaves to derive."""
    leaves, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(lambda *leaves: fun(*tree.unflatten(leaves)))(*leaves)
    n = len(jax.tree.leaves(args[0]))
    jaxpr = closed.jaxpr
    given = [
        *(Argument(x.aval, WHOLE) for x in jaxpr.constvars),
        *(Argument(x.aval, WHOLE, True) for x in jaxpr.invars[:n]),
        *(Argument(x.aval, Rows(0)) for x in jaxpr.invars[n:]),
    ]
    return closed, partition(jaxpr, given, Axis("rows", k, 32))


def by_vmap(fun, k, args):
    """Value and gradients of the micro-batches' program, under `jax.vmap`."""
    closed, part = partitioned(fun, k, args)
    batch = [x.reshape(k, -1, *x.shape[1:]) for x in jax.tree.leaves(args[1])]

    def total(params):
        def one(*batch):
            index = jax.lax.axis_index("rows")
            leaves = *closed.consts, *jax.tree.leaves(params), *batch, index
            loss = jax.core.eval_jaxpr(part.jaxpr, part.consts, *leaves)[0]
            return loss if part.layouts[0] == PARTIAL else loss / k

        return jax.vmap(one, axis_name="rows", axis_size=k)(*batch).sum()

    return jax.value_and_grad(total)(args[0]), part


def off(got, want):
    """The largest difference, of the largest number of the leaf, if not tiny."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    each = [jnp.abs(x - y).max() / (jnp.abs(y).max() + 1e-3) for x, y in pairs]
    return max(float(x) if jnp.isfinite(x) else float("inf") for x in each)


def wrong(names, loss="spread", k=3):
    """How far a program of micro-batches is off, and what it computes whole."""
    with jax.enable_x64(True):
        fun, args = program(names, loss), arguments(len(names))
        got, part = by_vmap(fun, k, args)
        assert part.failures == []
        return off(got, jax.value_and_grad(fun)(*args)), part.whole


def off_in_window(names):
    """The same for `value_and_grad`, which runs it level by level."""
    with jax.enable_x64(True):
        fun, args = program(names, "spread"), arguments(len(names))
        step = ga.value_and_grad(fun, 3, accumulator_dtype="float64")
        return off(jax.jit(step)(*args), jax.value_and_grad(fun)(*args))


SOME = (
    *("max_ties", "columns", "capacity", "entries", "argmax", "segments", "clipped"),
    "clipped_mean",
    *("doubled", "straight", "centred", "running", "cond_meets", "noise", "twice"),
)


@pytest.mark.grid(1, 4)
@pytest.mark.parametrize("name", SOME)
def test_a_step_over_rows_has_the_gradients_of_the_whole_batch(name):
    assert wrong([name])[0] < BOUND


@pytest.mark.published
@pytest.mark.parametrize("name", sorted(set(STEPS) - set(SOME)))
def test_every_step_over_rows_has_the_gradients_of_the_whole_batch(name):
    assert wrong([name])[0] < BOUND


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_programs_have_the_gradients_of_the_whole_batch(seed):
    names, loss = draw(seed)
    assert wrong(names, loss, (2, 3, 4, 6, 12)[seed % 5])[0] < BOUND


@pytest.mark.published
def test_hundreds_of_random_programs_do_and_few_are_computed_whole():
    whole, number = collections.Counter(), 200
    for seed in range(number):
        names, loss = draw(seed)
        error, notes = wrong(names, loss, (2, 3, 4, 6, 12)[seed % 5])
        assert error < BOUND, (seed, names, loss)
        whole.update({note.name for note in notes})
    print(f"\nof {number} programs, computed whole: {dict(whole)}")


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "names",
    [["clipped", "clipped_twice"], ["clipped_mean"], ["layers", "max_ties"]],
)
def test_the_window_runs_such_programs_level_by_level(names):
    assert off_in_window(names) < BOUND


def test_a_backward_rule_taken_for_linear_is_found(monkeypatch):
    monkeypatch.setattr(custom, "_is_linear", lambda w, rule: True)
    assert off_in_window(["clipped"]) > 1e-6


# What has a rule, and is computed whole no more. Others may come to this list.
HAVE_RULES = (
    *("norm", "max_rows", "softmax_rows", "attention", "gram", "columns", "pairs"),
    *("thirds", "twice", "cumsum", "cumprod", "eye", "tril", "entries", "along"),
    *("segments", "clipped", "doubled", "straight", "layers", "deep", "map", "vmap"),
    *("checkpoint", "dropout", "noise", "capacity", "einsum"),
)


@pytest.mark.published
@pytest.mark.parametrize("name", HAVE_RULES)
def test_what_has_a_rule_is_not_computed_whole(name):
    assert wrong([name])[1] == []


# -- Twins -----------------------------------------------------------------------------


def _no_offset(w, shape, d, rows):
    local = shapes.local_shape(shape, rows, w.axis.size)
    return jax.lax.broadcasted_iota(jnp.int32, local, d)


def _first_part(self, x, rows):
    return jax.lax.slice_in_dim(
        x, 0, x.shape[rows.dim] // self.axis.size, axis=rows.dim
    )


def _swapped(old, new, rows, parts):
    found = _RESHAPED(old, new, rows, parts)
    return found and found._replace(segments=found.segments * 2)


def _equal_parts(is_max, found, counts):
    return found.max(0) if is_max else found.min(0)


_RESHAPED = shapes.reshaped
TWINS = {
    "a dropped sum": (writer.Writer, "sum", lambda self, x: x, "norm"),
    "a swapped layout": (shapes, "reshaped", _swapped, "twice shift"),
    "a missing offset": (randoms, "positions", _no_offset, "dropout"),
    "another's rows": (writer.Writer, "own", _first_part, "sorted"),
    "equal parts of unequal ties": (
        reductions,
        "_of_parts",
        _equal_parts,
        "matmul ties",
    ),
    "a whole addend k times": (writer.Writer, "addend", lambda self, v: v.x, "penalty"),
    "a sum that nobody reduces": (
        linear,
        "PRODUCTS",
        linear.PRODUCTS | {"integer_pow": (0,), "exp": (0,), "sqrt": (0,)},
        "norm",
    ),
}


@pytest.mark.grid(1, 7)
@pytest.mark.parametrize("name", TWINS)
def test_a_rule_made_wrong_is_found(monkeypatch, name):
    where, attribute, twin, step = TWINS[name]
    names = step.split()
    assert wrong(names)[0] < BOUND
    monkeypatch.setattr(where, attribute, twin)
    try:
        error, _ = wrong(names)
    except (AssertionError, TypeError):
        return  # it does not even fit
    assert error > 1e-6


def test_programs_without_a_name_are_not_drawn():
    names, loss = draw(0)
    assert set(names) <= set(STEPS)
    assert loss in whole_programs.LOSSES
