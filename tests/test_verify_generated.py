"""`verify` against losses made at random, whose cause is known by how they are made."""

import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import verify_losses

import ga_optax as ga
from ga_optax import Cause

BENCHMARKS = str(pathlib.Path(__file__).parents[1] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
import verify_rates  # noqa: E402

sys.path.remove(BENCHMARKS)

pytestmark = pytest.mark.usefixtures("fast_compilation")

GRID = [
    (way, cause, program)
    for way, cause in verify_losses.CASES
    for program in verify_losses.PROGRAMS
]


def named(way, cause, program):
    return f"{way.__name__}-{program.__name__}"


def ask(way, program, seed=0, k=4, **options):
    params, batch = verify_losses.arrays(seed)
    loss = verify_losses.loss_of(way, program)
    return batch, ga.verify(loss, params, batch, k, **options)


def is_named(report, cause):
    return report.ok if cause is Cause.ROUNDING else report.cause is cause


@pytest.mark.slow
@pytest.mark.grid(2, 12)
@pytest.mark.parametrize(
    ("way", "cause", "program"), GRID, ids=[named(*case) for case in GRID]
)
def test_a_loss_has_the_cause_of_how_it_is_made(way, cause, program):
    _, report = ask(way, program, seed=len(way.__name__))
    assert is_named(report, cause), report
    # The twins: no other cause is an answer.
    others = set(verify_losses.CAUSES) - {cause}
    assert not any(is_named(report, other) for other in others)
    if not report.ok:
        assert "ga_optax.value_and_grad(loss, 4)" in report.fix


@pytest.mark.grid(1, 3)
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (verify_losses.masked, lambda b: b["mask"]),
        (verify_losses.kept_from_below, lambda b: b["mask"]),
        (verify_losses.normalised_weights, lambda b: b["weight"]),
        (verify_losses.softmax_weights, lambda b: jnp.exp(b["y"])),
    ],
)
def test_weights_are_what_micro_batches_add_to_the_count(way, expected):
    """And the report names the line of the count, which is in `verify_losses`."""
    batch, report = ask(way, verify_losses.scanned)
    counts = np.asarray(expected(batch), np.float64).reshape(4, -1).sum(1)
    np.testing.assert_allclose(report.weights, counts / counts.sum(), rtol=1e-6)
    assert "verify_losses.py:" in report.message

    def weigh(batch):
        return expected(batch).sum()

    _, again = ask(way, verify_losses.scanned, weight_fn=weigh)
    assert again.ok, again
    # The twin: weights of another kind.
    _, other = ask(way, verify_losses.scanned, weight_fn=lambda b: b["x"][0, 0] ** 2)
    assert other.cause is Cause.WEIGHTS, other


def test_a_ratio_over_two_counts_has_both_in_its_weights_and_a_factor():
    batch, report = ask(verify_losses.of_two_counts, verify_losses.plain)
    parts = [
        np.asarray(batch[x], np.float64).reshape(4, -1) for x in ("mask", "weight")
    ]
    counts = np.prod([x.sum(1) / x.sum() for x in parts], axis=0)
    np.testing.assert_allclose(report.weights, counts, rtol=1e-6)
    assert "too large by a factor" in report.message


def test_equal_counts_are_right_in_this_batch_and_warned_of():
    params, batch = verify_losses.arrays()
    loss = verify_losses.loss_of(verify_losses.masked, verify_losses.plain)
    equal = {**batch, "mask": np.arange(verify_losses.ROWS) % 4 < 3}
    report = ga.verify(loss, params, equal, 4)
    assert report.ok
    [warning] = report.warnings
    assert "verify_losses.py:" in warning
    assert "weight_fn" in warning
    # The twins: with weights, and with a loss that reads no count.
    options = {"weight_fn": lambda b: b["mask"].sum()}
    assert not ga.verify(loss, params, equal, 4, **options).warnings
    loss = verify_losses.loss_of(verify_losses.mean, verify_losses.plain)
    assert not ga.verify(loss, params, equal, 4).warnings


def test_lines_are_those_of_the_user_in_functions_of_jax_too():
    """`jnp.std` is jitted, and knows nothing of its caller."""
    _, report = ask(verify_losses.deviation, verify_losses.checkpointed)
    [line] = report.diagnosis[1].partition("Where: ")[2].split("; ")
    assert line.startswith("verify_losses.py:"), report
    assert "(deviation): a sum over rows" in line


@pytest.mark.slow
@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize(
    ("dtype", "kind", "number"),
    [
        ("bfloat16", "right", 0),
        pytest.param("bfloat16", "wrong", 13, marks=pytest.mark.published),
        pytest.param("float64", "wrong", 24, marks=pytest.mark.published),
    ],
)
def test_right_losses_are_ok_and_wrong_ones_have_their_cause(dtype, kind, number):
    """Of those whose rates the page on exactness has."""
    case, report = verify_rates.ask(dtype, kind, number)
    assert verify_rates.outcome(case, report) == "right", f"{case.name}\n{report}"
    # The twin: another cause is no right answer.
    other = case._replace(causes=set(Cause) - case.causes - {report.cause})
    assert verify_rates.outcome(other, report) != "right"
