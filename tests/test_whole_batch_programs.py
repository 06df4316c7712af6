"""Random losses of every form, through `value_and_grad`; see `whole_random`.

`python tests/whole_random.py 2000`, which `make fuzz` runs too, checks as many of them.
"""

import sys

import jax
import pytest
from whole_graphs import Graph
from whole_random import BOUND, Program, check, draw
from whole_steps import MORE_STEPS

from ga_optax._partition import reductions, writer

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")


def is_right(program):
    found = check(program)
    assert found.failures == []
    return found.error is not None and found.error < BOUND


@pytest.mark.grid(1, 3)
@pytest.mark.parametrize("name", sorted(MORE_STEPS))
def test_every_step_has_the_value_gradients_and_aux_of_the_whole_batch(name):
    assert is_right(Program((name,), "spread", has_aux=True))


@pytest.mark.grid(2, 100)
@pytest.mark.parametrize("seed", range(100))
def test_random_losses_have_those_of_the_whole_batch(seed):
    found = check(draw(seed))
    assert found.failures == []
    assert (found.error or 0) < BOUND  # of some steps numbers overflow


@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_along_any_axis_of_several_batch_arguments(axis):
    names = ("contrast", "places")
    assert is_right(Program(names, "root", 4, axis, several=True, has_aux=True))


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="where it optimises little, this XLA fuses across barriers",
)
def test_rows_that_attain_an_extremum_are_found_however_xla_rounds(monkeypatch):
    program = Program(("layers", "transposed", "max_ties"), "mean", 4)
    assert is_right(program)
    # The twin: XLA computes them once for the extremum, and once more to compare.
    plain, ours = jax.lax.optimization_barrier, reductions.__file__

    def only_elsewhere(x):
        return x if sys._getframe(1).f_code.co_filename == ours else plain(x)

    monkeypatch.setattr(jax.lax, "optimization_barrier", only_elsewhere)
    assert check(program).error > 1e-6


# What a program in which this is made wrong looks like.
def _dropped(self, x):
    return x


def _first(self, x, rows):
    start = x.shape[rows.dim] // self.axis.size
    return jax.lax.slice_in_dim(x, 0, start, axis=rows.dim)


@pytest.mark.parametrize(
    ("attribute", "twin", "name"),
    [("sum", _dropped, "correlation"), ("own", _first, "called_back")],
)
def test_a_program_made_wrong_is_found(monkeypatch, attribute, twin, name):
    monkeypatch.setattr(writer.Writer, attribute, twin)
    assert check(Program((name,), "spread")).error > 1e-6


@pytest.mark.grid(1)
@pytest.mark.parametrize("way", range(2))
def test_a_graph_made_wrong_is_found_in_every_way(monkeypatch, way):
    graph, ways = Graph(1, 4, 3), Graph.in_all_ways
    monkeypatch.setattr(Graph, "in_all_ways", lambda self: [[*ways(self)][way]])
    assert is_right(graph)
    monkeypatch.setattr(writer.Writer, "sum", _dropped)
    assert check(graph).error > 1e-6


def test_graphs_are_finite_and_have_rows_everywhere():
    drawn = [draw(seed) for seed in range(1, 200, 2)]
    assert len({graph.length for graph in drawn}) > 4
    assert {graph.devices for graph in drawn} == {1, 4}
