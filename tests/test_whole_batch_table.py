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
from whole_harness import (
    VIEWS,
    arguments,
    changed,
    derivative,
    in_rule,
    noted,
    off,
    other_rows,
    over_micro_batches,
    seen,
    whole_derivative,
    with_rules,
    with_seams,
)
from whole_rules import CASES, CUT, LINEAR, NEW

from ga_optax._partition import cutting, elementwise, linear, table

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")
# In float64: of at most some hundred terms, conditioned no worse than 1e4.
BOUND = 1e-10
WRONG = 1e-6
RULES = table.RULES

CASES = CASES | {f"linear {name}": [case] for name, case in LINEAR.items()}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


# Of the primitives that work number by number, these have rows in all ways.
TYPICAL = ("select_n", "sub")


def functions(key):
    """The cases of a primitive, with rows as they are and in other ways."""
    views = list(VIEWS)
    if key.startswith("linear"):
        views = ["as they are"]
    elif key in elementwise.NAMES and key not in TYPICAL:
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
    sums = {*linear.SUMS, *linear.PRODUCTS, "select_n"}
    keys = {*RULES.known, *RULES.nested, *(f"linear {name}" for name in sums)}
    # On several devices: test_constraints, test_devices, test_law_devices.
    there = {"reshard", "pvary", "psum_invariant"}
    there |= {f"linear {name}" for name in there}
    assert keys - there == set(CASES)
    assert {cutting._RULES[name] for name in CUT} == set(cutting._RULES.values())
    assert RULES.uneven <= keys


@of_each(CASES, 4)
def test_a_function_of_rows_is_that_of_the_whole_batch(key):
    args = arguments()
    for fun in functions(key):
        assert off(over_micro_batches(fun, args), fun(*args)) < BOUND


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
    found[elementwise.elementwise] = list(TYPICAL)
    return {f"{keys[0]} and its kind": keys for keys in found.values()}


# What may be wrong: sums beyond the last row, which nothing reads, and the number of
# the micro-batch in a search, which has no use for it.
EQUIVALENT = {
    ("cumsum and its kind", "filled"),
    ("call_hi_primitive and its kind", "index"),
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


@of_each(sorted(RULES.uneven - {"reshard"}), 2)
def test_rows_that_do_not_divide_are_computed_whole_by_others(monkeypatch, key):
    args, uneven = arguments(), RULES.uneven - {key}
    monkeypatch.setattr(table, "RULES", RULES._replace(uneven=uneven))
    for case in CASES[key]:
        fun = seen(case, "uneven")
        assert off(over_micro_batches(fun, args), fun(*args)) < BOUND
