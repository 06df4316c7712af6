"""The table of rules: each is right, its results matter, and none is needed.

For each primitive of the table there are functions of rows (`whole_rules`), and rows
are as they are, in two segments, not divisible, or along another axis. The program of a
micro-batch gives what the function gives. It does not, if the rule of the primitive
gives something else, or if it has something else of the other micro-batches: so a test
would find a rule that is wrong. And it does, if the rule is left out.
"""

import functools

import jax
import pytest
from helpers import mesh_of, off
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from whole_harness import (
    VIEWS,
    K,
    arguments,
    changed,
    derivative,
    in_rule,
    noted,
    other_rows,
    over_micro_batches,
    partitioned,
    seen,
    whole_derivative,
    with_rules,
    with_seams,
)
from whole_rules import CASES, CUT, EXAMPLES, LINEAR, NEW

from ga_optax._partition import WHOLE, Rows, cutting, factors, table
from ga_optax._passes import divided
from ga_optax._passes.primitives import TABLE

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation", "float64")
# In float64: of at most some hundred terms, conditioned no worse than 1e4.
BOUND = 1e-10
WRONG = 1e-6
RULES = table.RULES

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


def of_each(keys, kept):
    """A test for each key, of which `make test` runs one, and CI some."""
    keys = [key for key in keys if key not in NEW]
    mark = pytest.mark.parametrize("key", keys)
    return lambda test: pytest.mark.grid(1, kept)(mark(test))


def test_every_primitive_of_the_table_has_a_case():
    sums = {x for x, row in TABLE.items() if row.sums or row.each}
    keys = {*RULES.known, *RULES.nested, *(f"linear {name}" for name in sums)}
    # On several devices: test_constraints, test_devices, test_law_devices, and
    # test_regions. JAX does not batch products of groups: test_ragged.
    there = {"reshard", "pvary", "psum_invariant", "shard_map", "ragged_dot_general"}
    there |= {f"linear {name}" for name in there}
    # Kernels, calls that say how they split: test_kernels. microbatch: test_anywhere.
    there |= {"pallas_call", "custom_partitioning", divided.NAME}
    there |= {f"dot_product_attention_{way}_wrapper" for way in ("fwd", "bwd")}
    assert keys - there == set(CASES)
    assert {cutting._RULES[name] for name in CUT} == set(cutting._RULES.values())


@of_each(CASES, 4)
def test_a_function_of_rows_is_that_of_the_whole_batch(key):
    args = arguments()
    for fun in functions(key):
        assert off(over_micro_batches(fun, args), fun(*args)) < BOUND


def typed(x, spec, mesh):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def in_types(fun, args):
    """The dimension of the rows of each result, as JAX's types of shardings have it."""
    mesh = mesh_of(K, names=("rows",), kind=AxisType.Explicit)
    pairs = zip(args, (P("rows", None), P(None, None), P("rows")), strict=True)
    with jax.set_mesh(mesh):
        out = jax.eval_shape(fun, *(typed(x, spec, mesh) for x, spec in pairs))
    specs = [[*x.sharding.spec] for x in out]
    return [spec.index("rows") if "rows" in spec else None for spec in specs]


# A constraint is an assertion there; the other selects from two shardings.
UNTYPED = {"sharding_constraint", "cholesky"}


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="types of fewer primitives")
def test_the_rows_of_the_table_are_where_those_of_the_types_of_jax_are():
    args, found = arguments(), set()
    for name in EXAMPLES.keys() - UNTYPED:
        fun = seen(EXAMPLES[name], "as they are")
        layouts = partitioned(fun, args)[1].layouts
        rows = [x.dim if isinstance(x, Rows) else None for x in layouts]
        assert rows == in_types(fun, args), name
        found.update(rows)
    assert found == {0, 1}
    with without("transpose"):  # the twin
        fun = seen(EXAMPLES["transpose"], "as they are")
        assert partitioned(fun, args)[1].layouts == [WHOLE]


# -- Twins -----------------------------------------------------------------------------


@of_each(CASES, 4)
def test_a_rule_that_gives_something_else_is_found(key):
    args, given, found = arguments(), set(), set()
    for fun in functions(key):
        with with_rules(in_rule(key, noted(here := set()))):
            over_micro_batches(fun, args)
        given |= here
        for of in here - found:
            with with_rules(in_rule(key, functools.partial(changed, of=of))):
                found |= {of} if is_wrong(fun, args) else set()
    assert found == given != set()


@pytest.mark.slow
@pytest.mark.grid(3)
@pytest.mark.parametrize("name", CUT)
def test_rows_computed_from_those_of_something_else_are_found(monkeypatch, name):
    args, rule = arguments(), cutting._RULES[name]
    functions = [seen(CUT[name], view) for view in VIEWS]
    assert all(off(over_micro_batches(f, args), f(*args)) < BOUND for f in functions)

    def broken(w, e, vs, rows):
        x = rule(w, e, vs, rows)
        return x if x is None else other_rows(x, rows.dim)

    monkeypatch.setitem(cutting._RULES, name, broken)
    assert any(is_wrong(fun, args) for fun in functions)


def rule_of(key):
    if key.startswith("linear"):
        return RULES.linear
    return RULES.known.get(key) or RULES.nested.get(key)


def names_of_rules():
    """The primitives of each rule; of those number by number, two will do."""
    found = {}
    for key in CASES:
        if (rule := rule_of(key)) and key not in NEW:
            found.setdefault(rule, []).append(key)
    found[factors.forward] = list(TYPICAL)
    return {f"{keys[0]} and its kind": keys for keys in found.values()}


# What may be wrong: the number of the micro-batch in a search and in a promise of rows,
# which have no use for it.
EQUIVALENT = {
    ("call_hi_primitive and its kind", "index"),
    ("rowwise and its kind", "index"),
}


@pytest.mark.slow
@pytest.mark.grid(4)
@pytest.mark.parametrize("name", names_of_rules())
def test_a_rule_that_has_something_else_of_the_others_is_found(name):
    keys, args = names_of_rules()[name], arguments()
    each = [fun for key in keys for fun in functions(key)]
    if "select_n" in keys:
        each += [seen(case, "as they are") for case in CUT.values()]

    def is_within(key, rule):
        return key in keys or rule is rule_of(keys[0])

    due, found = set(), set()
    for fun in each:
        met = set()
        with with_seams(is_within, None, met):
            over_micro_batches(fun, args)
        due |= met
        for seam in met - found:
            with with_seams(is_within, seam, set()):
                found |= {seam} if is_wrong(fun, args) else set()
    assert due - found == {seam for rule, seam in EQUIVALENT if rule == name}


# -- Without a rule --------------------------------------------------------------------


def without(key):
    return with_rules(lambda name, rule: None if name == key else rule)


@of_each(CASES, 4)
def test_without_its_rule_a_primitive_is_computed_whole_and_right(key):
    args = arguments()
    for fun in functions(key):
        with without(key):
            assert off(over_micro_batches(fun, args), fun(*args)) < BOUND


@of_each(CASES, 3)
def test_its_derivative_is_right_with_the_rule_and_without_it(key):
    args = arguments()
    for fun in [seen(case, "as they are") for case in CASES[key]]:
        if (want := whole_derivative(fun, args)) is not None:
            assert off([derivative(fun, args)], [want]) < BOUND
            with without(key):
                assert off([derivative(fun, args)], [want]) < BOUND


@of_each(CUT, 2)
def test_rows_that_are_not_computed_from_others_are_cut_from_all(monkeypatch, key):
    args = arguments()
    monkeypatch.delitem(cutting._RULES, key)
    for view in VIEWS:
        fun = seen(CUT[key], view)
        assert off(over_micro_batches(fun, args), fun(*args)) < BOUND
