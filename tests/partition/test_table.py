"""The table of rules: each is right, its results matter, and none is needed."""

import functools

import jax
import jax.numpy as jnp
import pytest
from corpus.harness import (
    VIEWS,
    K,
    N,
    arguments,
    changed,
    derivative,
    in_rule,
    joined,
    noted,
    of_each,
    other_rows,
    over_micro_batches,
    partitioned,
    seen,
    whole_derivative,
    with_rules,
)
from corpus.rules import CASES, CUT, EXAMPLES, LINEAR, NEW, D
from corpus.steps import clipped
from helpers import apart, mesh_of, off, put
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._partition import created, linear, rules
from ga_optax._partition.held import WHOLE, Rows
from ga_optax._passes import equation
from ga_optax._passes.primitives import APART, TABLE

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation", "float64")
# In float64: of at most some hundred terms, conditioned no worse than 1e4.
BOUND = 1e-10
WRONG = 1e-6
RULES = rules.RULES

CASES = CASES | {f"linear {name}": [case] for name, case in LINEAR.items()}


# Of the primitives that work number by number, these have rows in all ways.
TYPICAL = ("select_n", "sub")


def functions(key):
    """The cases of a primitive, with rows as they are and in other ways."""
    views = list(VIEWS)
    if key.startswith("linear"):
        views = ["as they are"]
    elif key in TABLE and TABLE[key].dims == "..." and key not in TYPICAL:
        views = ["as they are", "uneven"]
    return [seen(case, view) for case in CASES[key] for view in views]


def is_wrong(fun, args):
    """Whether it gives something else, or nothing that fits."""
    try:
        return off(over_micro_batches(fun, args), fun(*args)) > WRONG
    except (AssertionError, TypeError, ValueError):
        return True


def of_each_key(keys, kept):
    """A test for each key, of which `make test` runs one, and CI some."""
    keys = [key for key in keys if key not in NEW]
    mark = pytest.mark.parametrize("key", keys)
    return lambda test: pytest.mark.grid(1, kept)(mark(test))


# Cases that need all rows, such as a sort of them, by number.
NEEDS_ALL = {"unstack": [1], "dynamic_slice": [2], "dynamic_update_slice": [2]}
NEEDS_ALL |= {"sort": [1], "reduce_window_sum": [1], "fft": [1], "reshape": [1]}
NEEDS_ALL |= {"pmax": [0], "pmin": [0]}
NEEDS_ALL |= {"scatter": [15], "scatter-max": [1], "scan": [2], "while": [2, 7]}
BY_NUMBER = {key for key, row in TABLE.items() if row.dims == "..."}
MOVING = [key for key in CASES if key not in (*BY_NUMBER, *NEW) and " " not in key]


@pytest.mark.quick
@pytest.mark.parametrize("key", MOVING)
def test_only_what_needs_all_rows_is_computed_whole(key):
    views = [seen(case, "as they are") for case in CASES[key]]
    parts = [partitioned(fun, arguments())[1] for fun in views]
    assert [i for i, x in enumerate(parts) if x.whole] == NEEDS_ALL.get(key, [])


def test_every_primitive_of_the_table_has_a_case():
    sums = {x for x, row in TABLE.items() if row.sums or row.each}
    keys = {*RULES.known, *RULES.nested, *(f"linear {name}" for name in sums)}
    # On several devices: test_constraints, test_devices, test_law_devices, and
    # test_regions. JAX does not batch products of groups: test_ragged.
    there = {"reshard", "pvary", "psum_invariant", "shard_map", "ragged_dot_general"}
    there |= {"ppermute", "all_gather", "all_to_all", "reduce_scatter"}
    there |= {f"linear {name}" for name in there}
    # Kernels, calls that say how they split: test_kernels. microbatch: test_anywhere.
    # value_and_grad: test_derivatives. A fence, which the passes write later.
    there |= {"pallas_call", "custom_partitioning", equation.NAME, equation.WRITTEN}
    there.add(f"linear {APART}")
    there |= {f"dot_product_attention_{way}_wrapper" for way in ("fwd", "bwd")}
    assert keys - there == set(CASES)
    assert {created._OPEN[name] for name in CUT} == set(created._OPEN.values())


def without(key):
    return with_rules(lambda name, rule: None if name == key else rule)


@of_each_key(CASES, 4)
def test_a_function_of_rows_is_right_with_its_rule_and_computed_whole(key):
    args = arguments()
    for fun in functions(key):
        want = fun(*args)
        assert off(over_micro_batches(fun, args), want) < BOUND
        with without(key):
            assert off(over_micro_batches(fun, args), want) < BOUND


AT_ONCE = ["argmax", "cumsum", "gather", "pad", "psum", "random_bits", "reduce_min"]
AT_ONCE += ["scan", "scatter", "scatter-add", "slice"]


@pytest.mark.quick
def test_functions_of_rows_are_right_in_one_program():
    cases = [(case, "as they are") for key in AT_ONCE for case in CASES[key]]
    moves = [case for key in ("pad", "random_bits", "slice") for case in CASES[key]]
    cases += [(case, "in segments") for case in (*moves, CASES["gather"][0])]

    def every(*args):
        return [x for case in cases for x in seen(*case)(*args)]

    args = arguments()
    closed, part = partitioned(every, args)
    out = jax.jit(functools.partial(of_each, closed, part))(*args)
    assert off(joined(out, part, closed), jax.jit(every)(*args)) < BOUND


@of_each_key(CASES, 3)
def test_its_derivative_is_right_with_the_rule_and_without_it(key):
    args = arguments()
    for fun in [seen(case, "as they are") for case in CASES[key]]:
        if (want := whole_derivative(fun, args)) is not None:
            assert off([derivative(fun, args)], [want]) < BOUND
            with without(key):
                assert off([derivative(fun, args)], [want]) < BOUND


def in_types(fun, args):
    """The dimension of the rows of each result, as JAX's types of shardings have it."""
    mesh = mesh_of(K, names=("rows",), kind=AxisType.Explicit)
    args = put(args, mesh, (P("rows", None), P(None, None), P("rows")))
    with jax.set_mesh(mesh):
        out = jax.eval_shape(fun, *args)
    specs = [[*x.sharding.spec] for x in out]
    return [spec.index("rows") if "rows" in spec else None for spec in specs]


# A constraint is an assertion there; the other selects from two shardings.
UNTYPED = {"sharding_constraint", "cholesky"}


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="types of fewer primitives")
def test_the_rows_of_the_table_are_where_those_of_the_types_of_jax_are():
    args, found = arguments(), set()
    for name in EXAMPLES.keys() - UNTYPED - set(NEW):  # of those of this JAX
        fun = seen(EXAMPLES[name], "as they are")
        layouts = partitioned(fun, args)[1].layouts
        rows = [x.dim if isinstance(x, Rows) else None for x in layouts]
        assert rows == in_types(fun, args), name
        found.update(rows)
    assert found == {0, 1}
    with without("transpose"):  # the twin
        fun = seen(EXAMPLES["transpose"], "as they are")
        assert partitioned(fun, args)[1].layouts == [WHOLE]


@of_each_key(CASES, 4)
def test_a_rule_that_gives_something_else_is_found(key, monkeypatch):
    args, given, found = arguments(), set(), set()
    if key.startswith("linear"):  # as where the sum costs more than the equation
        monkeypatch.setattr(linear, "THERE_AND_BACK", 0)
    for fun in functions(key):
        with with_rules(in_rule(key, noted(here := set()))):
            over_micro_batches(fun, args)
        given |= here
        for of in here - found:
            with with_rules(in_rule(key, functools.partial(changed, of=of))):
                found |= {of} if is_wrong(fun, args) else set()
    assert found == given != set()


@of_each_key(CUT, 3)
def test_rows_computed_from_those_of_something_else_are_found(monkeypatch, key):
    args, rule = arguments(), created._OPEN[key]
    functions = [seen(CUT[key], view) for view in VIEWS]

    def right():
        return [off(over_micro_batches(f, args), f(*args)) < BOUND for f in functions]

    def broken(w, e, vs, rows):
        x = rule(w, e, vs, rows)
        return x if x is None else other_rows(x, rows.dim)

    assert all(right())
    monkeypatch.setitem(created._OPEN, key, broken)
    assert any(is_wrong(fun, args) for fun in functions)
    # And without a rule they are cut from all.
    monkeypatch.delitem(created._OPEN, key)
    assert all(right())


def _half(h):
    return h[: len(h) // 2], h[len(h) // 2 :]


def _turned(one, two):
    return one[0] * two[0], two[0] * one[1] + two[1]


# Rows that move: `z[:n], z[n:]`, temporal differences, other rows as negatives.
MOVES = {
    "halves of two views": lambda h, w: _half(jnp.concatenate([h, jnp.sin(h)]))[1] * h,
    "rows and columns of a mask": lambda h, w: jnp.where(
        jax.lax.pad(h > 0, False, ((1, -1, 0), (-1, 1, 0))), h @ w, h
    ),
    "columns that are none": lambda h, w: jnp.hstack(
        [jnp.roll(x, 1, 0) * x.sum(0) for x in jnp.split(h, [D], 1)]
    ),
    "rows that are none": lambda h, w: jnp.concatenate([h[:0], h @ w, w[:0]]),
    "an edge of columns": lambda h, w: jnp.pad(h, ((0, 0), (1, 0)), "edge")[:, 1:] @ w,
    "roll": lambda h, w: h * jnp.roll(h, 1, 0),
    "pad far": lambda h, w: h * jnp.pad(h, ((4, 0), (0, 0)))[:-4],
    "of two": lambda h, w: h * jnp.concatenate([jnp.sin(h)[5:], h[:5]]),
    "queue": lambda h, w: jax.nn.softmax(h @ jnp.concatenate([h, w, w[:1]]).T),
    "scan by doubling": lambda h, w: jax.lax.associative_scan(
        _turned, (0.9 * jnp.ones_like(h), h)
    )[1],
    "a backward rule": lambda h, w: clipped(h[1:]) * clipped(h[:-1]),
    "row of an extremum": lambda h, w: h * h[jnp.argmax(h[:, 0])],
    "sorted, along directions": lambda h, w: jax.vmap(
        lambda t: jax.jvp(functools.partial(jnp.sort, axis=1), (h,), (jnp.cos(h * t),))[
            1
        ]
    )(jnp.arange(1.0, 3.0)).sum(0),
}


def loss_of(move):
    def fun(w, x):
        h = move(jnp.tanh(x @ w), w)
        return jnp.sqrt((h**2).sum() + 1) + jnp.sin(h).mean(), h

    return fun


def dependencies(move, k=4):
    h, w, _ = arguments()
    return ga.batch_dependencies(loss_of(move), k, has_aux=True)(w, h)


@pytest.mark.grid(2, 8)
@pytest.mark.parametrize("k", [4, 1, 2, N])
@pytest.mark.parametrize("name", MOVES)
def test_rows_that_move_are_right_and_not_computed_whole(name, k):
    h, w, _ = arguments()
    fun, options = loss_of(MOVES[name]), {"has_aux": True}
    step = ga.value_and_grad(fun, k, **options)
    assert apart(step, jax.value_and_grad(fun, **options), w, h) < 10 * BOUND
    # Eleven rows of twelve, one each, are nobody's: a rule of one's own runs on all.
    if (name, k) != ("a backward rule", N):
        assert dependencies(MOVES[name], k).whole == []


# Moves after one another are one: of what they move there is one copy, kept once.
@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("halves of two views", 0),
        ("rows that are none", 0),
        ("an edge of columns", 0),
        ("roll", 1),
        ("pad far", 1),
        ("of two", 2),
    ],
)
def test_rows_that_move_are_stored_as_they_were_or_not_at_all(name, copies):
    found = dependencies(MOVES[name])
    stacks = [m.type.shape for m in found.meetings if m.kind == "stack"]
    of_all = [x for x in found.kept if x.kind == "shared" and x.shape]
    assert (stacks, of_all) == ([(N // 4, D)] * copies, [])
