"""The backward pass by block: the bits of the whole one, with one block's gradient."""

import pathlib
import sys

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ga_optax as ga
from ga_optax import blocks

pytest.importorskip("flax")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

path = pathlib.Path(__file__).parents[1] / "examples" / "blockwise_backward.py"
sys.path.append(str(path.parent))  # as for a script: it imports char_lm
example = helpers.load(path)

K = 4
PARAMS = example.init_params(layers=3, width=16)
PARTITION = blocks.partition(PARAMS, 1)
LINES = example.load_corpus(example.LENGTH).train

pytestmark = [pytest.mark.published, pytest.mark.usefixtures("optax_promotion")]


def first_window(size=8):
    return example.draw_window(LINES, jax.random.key(0), 0, size)


def whole(params, window, **kwargs):
    add = jax.jit(ga.accumulate(example.loss_fn, K, **kwargs))
    value, acc = add(ga.accumulator.init(params), params, window)
    return value, ga.accumulator.mean(acc)


def differing(one, other):
    return [row.different for row in example.compare(PARTITION, one, other)]


def test_the_bits_are_those_of_accumulate():
    window = first_window()
    loss, grads = example.block_by_block(PARTITION, PARAMS, window, K)
    value, expected = whole(PARAMS, window, weight_fn=example.count_tokens)
    rows = example.compare(PARTITION, expected, grads)
    assert all(map(example.agrees, rows))
    assert [row.name for row in rows if row.different] in ([], ["embed"])
    assert abs(loss - float(value)) < 8 * np.finfo(np.float32).eps * loss
    # The twins: without the weights, and with another line in one micro-batch.
    assert all(differing(whole(PARAMS, window)[1], grads))
    rows = example.compare(PARTITION, whole(PARAMS, window)[1], grads)
    assert not any(map(example.agrees, rows))
    window = np.concatenate([window[:-1], window[:1]])
    _, other = example.block_by_block(PARTITION, PARAMS, window, K)
    assert all(differing(expected, other))


def test_the_weight_of_an_addition_is_the_same_number_rounded_elsewhere():
    """In float64, far below a bound for float32: as the check of the language model."""
    window = first_window()
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), PARAMS)
        _, expected = whole(params, window, weight_fn=example.count_tokens)
        _, grads = example.block_by_block(
            PARTITION, params, window, K, as_cotangent=False
        )
        _, unweighted = whole(params, window)
    eps = float(np.finfo(np.float32).eps)

    def off(tree):
        pairs = zip(*map(jax.tree.leaves, (expected, tree)), strict=True)
        return max(
            float(np.max(np.abs(a - b))) / float(np.max(np.abs(a))) for a, b in pairs
        )

    assert off(grads) <= 2 * K * eps < off(unweighted) / 100


def test_no_two_gradients_of_blocks_are_alive_at_once():
    params = example.init_params(layers=6, width=64)
    partition = blocks.partition(params, 1)
    window = first_window(4)
    seen = []

    class Watch(example.Memory):
        def count(self, more, name):
            super().count(more, name)
            if name == "blocks.add":
                seen.append(example._alive() - self.before)

    memory = Watch(params)
    example.block_by_block(partition, params, window, K, memory)
    sizes = [4 * block.elements for block in partition.blocks]
    # What enters a layer; there is one for each, and two more on the way.
    entering = (len(params) + 1) * 64 * example.LENGTH * 4
    small = 64 * 1024  # tokens, counters, losses
    assert len(seen) == K * len(partition)
    bound = 2 * sum(sizes) + max(sizes) + entering + small
    assert max(seen) <= bound
    assert memory.peak >= max(seen)
    # The twin: with the gradients of two blocks it would be seen.
    assert max(seen) + sorted(sizes)[-2] > bound
    # And a piece is compiled once, not once a layer.
    assert len(memory.compiled) == 5
    assert memory.calls["layer_backward"] == 6 * K


def test_it_needs_less_memory_than_a_gradient_beside_the_accumulator():
    params = example.init_params(layers=6, width=64)
    partition = blocks.partition(params, 1)
    window = first_window()
    memory = example.Memory(params)
    example.block_by_block(partition, params, window, K, memory)
    gradient = jax.jit(jax.value_and_grad(example.loss_fn))
    program = gradient.lower(params, window[: len(window) // K]).compile()
    tree = sum(p.nbytes for p in jax.tree.leaves(params))
    # Parameters and accumulator lie in both.
    assert 2 * tree < memory.peak < example.needed(program) + tree


def test_a_run_compares_prints_and_trains(capsys):
    assert example.main(["--layers", "1", "--width", "8", "--steps", "10"]) == 0
    printed = capsys.readouterr().out
    assert "block by block (most in" in printed
    assert "step   10   loss" in printed


def test_numbers_that_do_not_fit_are_refused(capsys):
    for flags in ("--layers 0", "--width 6"):
        with pytest.raises(SystemExit):
            example.main(flags.split())
        assert "must be" in capsys.readouterr().err
