"""The memory of scanned layers with experts, whose rows meet in a balance term."""

import pathlib
import sys

import jax
import pytest
import targets

import ga_optax as ga
from ga_optax._window import split_scans

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from helpers import mean_of
from whole_scans import BATCH, K, decoder, nothing

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
]


def temporaries(gradient, layers=6):
    loss, args = decoder(layers, nothing, width=256, length=128)
    return targets.temporaries(targets.compiled("h200", gradient(loss), *args))


def of_the_whole_batch(loss):
    return ga.value_and_grad(loss, K)


def test_it_takes_the_temporaries_of_plain_micro_batches_and_one_layers_rows(
    monkeypatch,
):
    plain = temporaries(lambda loss: mean_of(loss, K))
    # What the last layer hands to the head is kept of all rows.
    bound = 1.05 * plain + 4 * BATCH * 128 * 256
    assert temporaries(of_the_whole_batch) < bound
    assert temporaries(jax.value_and_grad) > 3 * plain
    # The twin: iterations stand one after the other.
    find = split_scans.SplitScan._find_parts

    def in_the_open(self, graph):
        find(self, graph)
        self.unrolled.update(self.part.values())

    monkeypatch.setattr(split_scans.SplitScan, "_find_parts", in_the_open)
    assert temporaries(of_the_whole_batch) > bound
