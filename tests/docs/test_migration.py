"""docs/migrating.md: the programs before and after train the same model."""

import re

import numpy as np
import pytest
from helpers import ROOT

PAGE = ROOT / "docs" / "migrating.md"
EPS = float(np.finfo(np.float32).eps)

pytestmark = pytest.mark.usefixtures("optax_promotion")


def programs(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


# `{title: {"Before": program, "After": program}}`, and what they begin with.
BEGINNING, *REST = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.M)
[COMMON] = programs(BEGINNING)
SECTIONS = {
    text.partition("\n")[0]: {
        program.partition("\n")[0].removeprefix("# "): program
        for program in programs(text)
    }
    for text in REST
    if text.startswith("From ")
}


def train(program):
    """The parameters that a program ends with; those in float64, and the bound."""
    namespace = {}
    exec(COMMON + program, namespace)
    return np.asarray(namespace["params"]["w"]), *oracle(namespace)


def oracle(namespace):
    """The same run in NumPy and float64, and how far float32 may be from it."""
    rate, k = namespace["RATE"], namespace["K"]
    w = np.zeros(namespace["x"].shape[-1])
    error = np.zeros_like(w)
    for x, y in zip(namespace["x"], namespace["y"], strict=True):
        x, y = x.astype(np.float64), y.astype(np.float64)
        n, d = x.shape
        scale = rate * 2 / n
        terms = scale * np.abs(x).T @ (np.abs(x) @ np.abs(w) + np.abs(y))
        # In a chain: d products and sums of X·w, the subtraction of y, the factors 2
        # and 1/rows, n products and sums of Xᵀr over rows and micro-batches, at most 3
        # roundings for each of k terms of a running mean, the rate, the update. Half an
        # eps each; a whole one here, for what is of second order.
        roundings = (d + 1) + 1 + 3 + (n + 1) + 3 * k + 1 + 1
        local = roundings * EPS * (terms + np.abs(w))
        error += scale * np.abs(x).T @ (np.abs(x) @ error) + local
        w = w - scale * x.T @ (x @ w - y)
    return w, error


OTHERS = "PyTorch", "MaxText"  # not installed where tests run


def test_each_section_has_a_program_after_and_one_before_if_it_can_run():
    assert len(SECTIONS) == 5
    for title, sides in SECTIONS.items():
        elsewhere = any(name in title for name in OTHERS)
        assert set(sides) == ({"After"} if elsewhere else {"Before", "After"})


@pytest.mark.parametrize(
    ("title", "side"), [(title, side) for title in SECTIONS for side in SECTIONS[title]]
)
def test_the_program_trains_the_model_of_the_float64_run(title, side):
    w, expected, bound = train(SECTIONS[title][side])
    assert w.dtype == np.float32
    assert np.max(np.abs(w)) > 0.1
    assert np.all(np.abs(w - expected) <= bound)


# The broken twins: another normaliser, a micro-batch dropped, a window of other length.
BROKEN = [
    ("From `optax.MultiSteps`", "After", "schedule=K", "schedule=K, use_grad_mean=0"),
    ("From a hand-written scan", "After", "state, batch)\n", "state, part(batch))\n"),
    ("From PyTorch, Lightning or Keras", "After", "schedule=K", "schedule=K + 1"),
]
PART = "def part(tree, n=8):\n    return tree[0][n:], tree[1][n:]\n\n"


@pytest.mark.parametrize(("title", "side", "good", "broken"), BROKEN)
def test_a_program_that_accumulates_otherwise_is_outside_the_bound(
    title, side, good, broken
):
    program = SECTIONS[title][side]
    assert good in program
    w, expected, bound = train(PART + program.replace(good, broken))
    assert np.any(np.abs(w - expected) > 100 * bound)
