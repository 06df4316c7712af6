"""examples/exactness.py runs, and its checks can fail."""

import pathlib
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ga_optax as ga

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "exactness.py"

pytestmark = [pytest.mark.published, pytest.mark.usefixtures("optax_promotion")]


# Two processes that compile thirty programs each, side by side.
def test_two_processes_print_the_same_tables_bit_for_bit():
    command = EXAMPLE, "--steps", "2", "--splits", "8", "64"
    flags = "--xla_backend_optimization_level=0"
    processes = [helpers.started(*command, XLA_FLAGS=flags) for _ in range(2)]
    (out, err), other = (process.communicate(timeout=600) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], out + err
    assert (out, err) == other
    assert "FAILED" not in out

    row = r"^(\d+ x \d+) +(\S.*?)  +(\S+) +(0x1\S*) +(\S+) +(0x1\S*) +([\d,]+|-)$"
    rows = re.findall(row, out, re.MULTILINE)
    assert {row[0] for row in rows} == {"1 x 64", "8 x 8", "64 x 1"}
    assert len(rows) == 1 + 2 * 4
    for _, _, decimal, bits, validation, validation_bits, _ in rows:
        for number, exact in ((decimal, bits), (validation, validation_bits)):
            assert np.float32(float(number)) == float.fromhex(exact)
    # The twin of the second table: in the first, most splits have other bits.
    assert sum(row[-1] not in ("-", "0") for row in rows) > 4
    answers = re.findall(r"^accumulate.* (yes|NO)$", out, re.M)
    assert answers == ["yes"] * 3
    placed = re.findall(r"^(.* logical .*?)  .* (yes|no)$", out, re.M)
    same = [name for name, answer in placed if answer == "yes"]
    assert same == [f"8 logical devices on {n}" for n in (8, 4, 2, 1)]
    assert len(placed) == 10
    assert re.search(r"^optax\.MultiSteps +no$", out, re.MULTILINE)


@pytest.fixture
def exactness(monkeypatch):
    """The example, made small: two groupings into calls."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    module = helpers.load(EXAMPLE)
    monkeypatch.setattr(module, "GROUPINGS", (1, 2))
    monkeypatch.setattr(module, "make_placed", lambda fun, opt: {})
    return module


ACCUMULATE, MULTI_STEPS = ga.accumulate, ga.MultiSteps


def one_rounding_more(fun, k, **options):
    """An accumulator whose sum is moved by a bit, as another order of adding would."""
    accumulate = ACCUMULATE(fun, k, **options)

    def moved(acc, *args):
        value, acc = accumulate(acc, *args)
        total = jax.tree.map(lambda t: t * jnp.float32(1 + 2**-23), acc.total)
        return value, acc._replace(total=total)

    return moved


def mean_over_one_less(fun, k, **options):
    del options

    def value_and_grad(params, batch):
        parts = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)
        values, grads = jax.vmap(jax.value_and_grad(fun), (None, 0))(params, parts)
        wrong = jnp.float32(1 / (k - 1))
        return jnp.mean(values), jax.tree.map(lambda g: g.sum(0) * wrong, grads)

    return value_and_grad


def sum_for_mean(opt, k):
    return MULTI_STEPS(opt, k, use_grad_mean=False)


@pytest.mark.parametrize(
    ("name", "broken", "failed"),
    [
        ("accumulate", one_rounding_more, "the bits of accumulate, 2 x 4"),
        ("value_and_grad", mean_over_one_less, "given gradients, ga.value_and_grad"),
        ("MultiSteps", sum_for_mean, "undivided batch: ga.MultiSteps"),
    ],
)
def test_the_example_exits_with_1_where_something_is_broken(
    name, broken, failed, exactness, monkeypatch, capsys
):
    # What verify finds is tested where verify is.
    monkeypatch.setattr(exactness, "check_network", lambda *_: None)
    monkeypatch.setattr(ga, name, broken)
    assert exactness.main(["--steps", "1", "--splits", "8"]) == 1
    assert failed in capsys.readouterr().out
